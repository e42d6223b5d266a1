"""Where a measurement goes besides its file: any callable (step, values), or an object's `log`."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Protocol

from gradscope.errors import SpecError
from gradscope.stats.training import CURVES, Step

Values = Mapping[str, float]
Log = Callable[[int, Values], object]

_PREFIX = "gradscope"


class Tracker(Protocol):
    """Takes the numbers of a step by name."""

    def log(self, step: int, values: dict[str, float], /) -> object:
        """Keep them."""


def as_log(tracker: Tracker | Log) -> Log:
    """Return what is called with a step and its values.

    Raises:
        SpecError: It is no tracker.
    """
    log = getattr(tracker, "log", tracker)
    if not callable(log):
        raise SpecError(
            f"a tracker is a callable (step, values), or has such a `log`, not {tracker!r}",
            where="trackers",
        )
    return log


def values_of(step: Step) -> dict[str, float]:
    """Return the numbers of a step that are known, by names such as "gradscope/noise scale"."""
    found: dict[str, float | None] = {name: take(step) for name, take in CURVES.items()}
    found |= {f"norm {p}%": value for p, value in (step.norm_percentiles or {}).items()}
    found |= {f"clipped by {clip.norm:g}": clip.clipped for clip in step.clipped}
    found |= {f"signal to noise/{row.name}": row.signal_to_noise for row in step.parameters}
    if step.cost is not None:
        found["overhead"] = step.cost.overhead
    return {f"{_PREFIX}/{k}".replace(" ", "_"): v for k, v in found.items() if v is not None}


def to_tensorboard(writer: Any) -> Log:
    """Return a tracker that adds scalars to a `SummaryWriter`."""

    def log(step: int, values: Values) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log


def to_wandb(run: Any = None) -> Log:
    """Return a tracker that logs to a run of Weights & Biases, by default the one under way.

    Values are drawn over `gradscope/step`: others may log to the run by a count of their own.
    """

    def log(step: int, values: Values) -> None:
        to = run if run is not None else _imported("wandb").run
        if to is None:
            raise SpecError("no run of wandb is under way", remedy="Call wandb.init() first.")
        to.define_metric(f"{_PREFIX}/*", step_metric=f"{_PREFIX}/step")
        to.log({**values, f"{_PREFIX}/step": step})

    return log


def to_mlflow(client: Any = None) -> Log:
    """Return a tracker that logs to MLflow's run under way, or to what has its `log_metrics`."""

    def log(step: int, values: Values) -> None:
        names = {name.replace("%", ""): value for name, value in values.items()}
        (client if client is not None else _imported("mlflow")).log_metrics(names, step=step)

    return log


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise SpecError(f"{name} is not installed", remedy=f"pip install {name}") from error
