"""Measuring while a model is trained: in one's own loop, in transformers' Trainer, in Lightning.

`Monitor` is for any loop. `TrainerMonitor` and `LightningMonitor` are callbacks; their libraries
are imported when they are asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradscope.errors import SpecError
from gradscope.training.monitor import Monitor, MonitorWarning
from gradscope.training.trackers import to_mlflow, to_tensorboard, to_wandb

if TYPE_CHECKING:
    from gradscope.training.lightning import LightningMonitor
    from gradscope.training.trainer import TrainerMonitor

__all__ = [
    "LightningMonitor",
    "Monitor",
    "MonitorWarning",
    "TrainerMonitor",
    "to_mlflow",
    "to_tensorboard",
    "to_wandb",
]

_HOMES = {
    "LightningMonitor": ("lightning", "lightning"),
    "TrainerMonitor": ("trainer", "transformers accelerate"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, packages = _HOMES[name]
    try:
        return getattr(import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        raise SpecError(
            f"{error.name} is not installed", where=name, remedy=f"pip install {packages}"
        ) from error
