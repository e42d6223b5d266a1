"""Measurements during training: in any training loop, in transformers' Trainer, in Lightning.

`Monitor` is for any loop. `TrainerMonitor` and `LightningMonitor` are callbacks. Their libraries
are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradscope.errors import SpecError

if TYPE_CHECKING:
    from gradscope.training.callbacks import LightningMonitor, TrainerMonitor
    from gradscope.training.history import (
        Histories,
        History,
        Step,
        read_histories,
        read_history,
        record,
    )
    from gradscope.training.measurement import measure
    from gradscope.training.monitor import (
        Monitor,
        MonitorWarning,
        to_mlflow,
        to_tensorboard,
        to_wandb,
    )

__all__ = [
    "Histories",
    "History",
    "LightningMonitor",
    "Monitor",
    "MonitorWarning",
    "Step",
    "TrainerMonitor",
    "measure",
    "read_histories",
    "read_history",
    "record",
    "to_mlflow",
    "to_tensorboard",
    "to_wandb",
]

# {module: its names}; a module is imported on first use, because a history needs no torch
_HOMES = {
    "history": ("Histories", "History", "Step", "read_histories", "read_history", "record"),
    "measurement": ("measure",),
    "monitor": ("Monitor", "MonitorWarning", "to_mlflow", "to_tensorboard", "to_wandb"),
}
# {callback: (libraries that may define its base class, name of the base class)}
_CALLBACKS = {
    "LightningMonitor": (("lightning.pytorch", "pytorch_lightning"), "Callback"),
    "TrainerMonitor": (("transformers",), "TrainerCallback"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
            return globals()[name]
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
