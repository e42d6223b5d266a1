"""Measuring while a model is trained: in one's own loop, in transformers' Trainer, in Lightning.

`Monitor` is for any loop. `TrainerMonitor` and `LightningMonitor` are callbacks; their libraries
are imported when they are asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradscope.errors import SpecError
from gradscope.training.monitor import Monitor, MonitorWarning, to_mlflow, to_tensorboard, to_wandb

if TYPE_CHECKING:
    from gradscope.training.callbacks import LightningMonitor, TrainerMonitor

__all__ = [
    "LightningMonitor",
    "Monitor",
    "MonitorWarning",
    "TrainerMonitor",
    "to_mlflow",
    "to_tensorboard",
    "to_wandb",
]

# the libraries that may have the class of a callback, and the name of that class
_CALLBACKS = {
    "LightningMonitor": (("lightning.pytorch", "pytorch_lightning"), "Callback"),
    "TrainerMonitor": (("transformers",), "TrainerCallback"),
}


def __getattr__(name: str) -> Any:
    if name not in _CALLBACKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    libraries, kind = _CALLBACKS[name]
    own = getattr(import_module(f"{__name__}.callbacks"), name)
    for library in libraries:
        try:
            base = getattr(import_module(library), kind)
        except ModuleNotFoundError:
            continue
        made = type(name, (own, base), {"__doc__": own.__doc__, "__module__": __name__})
        globals()[name] = made
        return made
    package = libraries[0].partition(".")[0]
    raise SpecError(f"{package} is not installed", where=name, remedy=f"pip install {package}")
