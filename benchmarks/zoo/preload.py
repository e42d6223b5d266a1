"""What the server that forks a process for each case imports once, for the groups of this sweep."""

import gc
import os
from importlib import import_module

from benchmarks.zoo import examine  # noqa: F401
from benchmarks.zoo.libraries import GROUPS, NEEDS, load, load_testing, missing

_SLOW = {
    "transformers": ("transformers.modeling_utils", "transformers.loss.loss_utils"),
    "graphs": ("torch_geometric.nn",),
    "diffusers": ("diffusers.models",),
    "monai": ("monai.networks.nets",),
}
_OF_ALL = ("torch._dynamo", "opacus", "backpack.extensions")

for _group in os.environ.get(GROUPS, "").split(","):
    if _group not in NEEDS or missing(_group):
        continue
    if _group in ("operators", "modules"):
        load_testing("common_methods_invocations" if _group == "operators" else "common_modules")
        continue
    for _name in NEEDS[_group]:
        load(_name)
    for _name in _SLOW.get(_group, ()):
        import_module(_name)
for _name in _OF_ALL:
    try:
        import_module(_name)
    except Exception:  # a tool that is absent or does not import; its cases say so
        continue
gc.collect()
gc.freeze()  # or each process would go through all that was imported
