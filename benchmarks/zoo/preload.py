"""What the server that forks a process for each case imports once."""

import gc
from importlib import import_module

from benchmarks.zoo import examine  # noqa: F401
from benchmarks.zoo.libraries import NEEDS, load, load_testing, missing

_SLOW = (
    "torch._dynamo",
    "transformers.modeling_utils",
    "transformers.loss.loss_utils",
    "torch_geometric.nn",
    "diffusers.models",
    "monai.networks.nets",
    "opacus",
    "backpack.extensions",
)

for _name in {name for group in NEEDS for name in NEEDS[group] if not missing(group)}:
    load(_name)
for _name in _SLOW:
    try:
        import_module(_name)
    except Exception:  # a library that is absent or does not import; its cases say so
        continue
if not missing("operators"):
    for _name in ("common_methods_invocations", "common_modules"):
        load_testing(_name)
gc.collect()
gc.freeze()  # or each process would go through all that was imported
