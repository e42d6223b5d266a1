"""What the server that forks a process for each case imports once."""

from importlib import import_module

from benchmarks.zoo import examine  # noqa: F401
from benchmarks.zoo.libraries import NEEDS, load, missing

_SLOW = (
    "torch._dynamo",
    "torch.testing._internal.common_methods_invocations",
    "torch.testing._internal.common_modules",
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
