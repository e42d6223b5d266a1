"""`LightningMonitor`: a callback of Lightning's Trainer, whose class is added on import."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gradscope.training.monitor import Monitor


class LightningMonitor:
    """Measures a LightningModule while it is trained; `Monitor` says what and how.

    The first `samples` samples of the step's batch are measured, by the module's `forward`. The
    numbers also go to the Trainer's own loggers.

    Args:
        loss: As of `Scope`, of what `forward` returns and the targets.
        every: As of `Monitor`.
        samples: Likewise.
        overhead: Likewise.
        split: From a batch to inputs and targets; by default it is a pair of them.
        options: Others of `Monitor`.

    Attributes:
        monitor: The `Monitor`, once the training has begun.
    """

    def __init__(
        self,
        loss: str | Callable[..., Tensor],
        every: int = 50,
        samples: int = 64,
        overhead: float | None = 0.03,
        *,
        split: Callable[[Any], tuple[Any, Any]] = tuple,
        **options: Any,
    ) -> None:
        self._loss, self._split = loss, split
        self._options = {"every": every, "samples": samples, "overhead": overhead, **options}
        self.monitor: Monitor | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin."""

        def log(step: int, values: Any) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(metrics=dict(values), step=step)

        trackers = [log, *self._options.pop("trackers", ())]
        self.monitor = Monitor(pl_module, self._loss, trackers=trackers, **self._options)
        self.monitor.start(trainer.global_step)

    def on_train_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Measure if it is time."""
        if self.monitor is not None:
            inputs, targets = self._split(batch)
            self.monitor.step(inputs, targets, step=trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Say that the training has ended."""
        if self.monitor is not None:
            self.monitor.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Say that the training was stopped."""
        if self.monitor is not None:
            self.monitor.close(f"stopped by {type(exception).__name__}")
