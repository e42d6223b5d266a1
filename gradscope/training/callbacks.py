"""Callbacks for the Trainers of transformers and Lightning, without their base classes."""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from gradscope.errors import SpecError
from gradscope.model.randomness import forked, random_numbers_kept
from gradscope.model.ranks import ModelParallel, ranks_of
from gradscope.stages.losses import resolve
from gradscope.training.monitor import Monitor, within


class _Callback:
    """Common base: closes `monitor` at the end of training."""

    monitor: Monitor | None = None

    def on_train_end(self, *args: Any, **known: Any) -> None:
        """Close the monitor."""
        if self.monitor is not None:
            self.monitor.close()


class LightningMonitor(_Callback):
    """Measures a LightningModule during training; see `Monitor`.

    The first `samples` samples of the step's batch are measured with the module's `forward`. The
    numbers are also logged to the Trainer's loggers.

    Args:
        loss: The loss of the output of `forward` and the targets, as for `Scope`.
        every: See `Monitor`.
        samples: See `Monitor`.
        overhead: See `Monitor`.
        split: Function from a batch to (inputs, targets), called at each step. By default, a batch
            is the pair (inputs, targets).
        options: Further arguments of `Monitor`.

    Attributes:
        monitor: The `Monitor`, after the start of the training.
    """

    def __init__(
        self,
        loss: str | Callable[..., Tensor],
        every: int = 50,
        samples: int = 64,
        overhead: float | None = 0.03,
        *,
        split: Callable[[Any], tuple[Any, Any]] | None = None,
        **options: Any,
    ) -> None:
        self._loss, self._split = loss, split or _pair
        self._options = {"every": every, "samples": samples, "overhead": overhead, **options}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Create and start the monitor."""

        def log(step: int, values: Any) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(metrics=dict(values), step=step)

        options = self._options | {"trackers": [log, *self._options.get("trackers", ())]}
        self.monitor = Monitor(pl_module, self._loss, **options)
        steps = math.inf
        with suppress(Exception):  # Lightning may not know the length of its loaders
            steps = trainer.estimated_stepping_batches
        last = int(steps) if steps < math.inf else None
        self.monitor.start(trainer.global_step, last=last)

    def on_train_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count the step, and measure if due."""
        if self.monitor is not None:
            self.monitor.advance(trainer.global_step, lambda: self._split(batch))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the monitor with the exception as the reason."""
        if self.monitor is not None:
            self.monitor.close(f"stopped by {type(exception).__name__}")


def _pair(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise SpecError(
        f"a batch is not a pair (inputs, targets), but {type(batch).__name__}",
        where="LightningMonitor",
        remedy="Give a function that returns (inputs, targets): split=lambda batch: (..., ...).",
    )


class TrainerMonitor(_Callback):
    """Measures the model of a Trainer; see `Monitor`.

    The Trainer does not pass batches to callbacks. So `samples` samples are drawn once from the
    training data, by `seed`, and the Trainer's collator makes a batch of them. This batch is
    measured every time. The order of the Trainer's loader does not change. If the model is sharded
    by fully_shard, each process draws different samples.

    Args:
        loss: A name, for the model's logits and the batch's labels: "causal_lm" (the labels are
            shifted, as in transformers), "cross_entropy", ...; or `(outputs, labels) -> (n,)` for
            the model's output. By default, a sample's loss is the mean over the sample's tokens.
            The loss of transformers is the mean over the tokens of the whole batch.
        every: See `Monitor`.
        samples: See `Monitor`.
        overhead: See `Monitor`.
        batch: {keyword of the model: tensor}, including labels; replaces the drawn samples.
        labels: The key of the labels, which are not passed to the model.
        seed: The seed for drawing samples.
        options: Further arguments of `Monitor`.

    Attributes:
        monitor: The `Monitor`, or None before the training starts. In other processes than the
            first, it remains None unless the model is sharded.
    """

    def __init__(
        self,
        loss: str | Callable[[Any, Any], Tensor],
        every: int = 50,
        samples: int = 64,
        overhead: float | None = 0.03,
        *,
        batch: dict[str, Any] | None = None,
        labels: str = "labels",
        seed: int = 0,
        **options: Any,
    ) -> None:
        self._loss = resolve(loss) if isinstance(loss, str) else loss
        self._given, self._labels, self._seed, self._samples = batch, labels, seed, samples
        self._options = {"every": every, "samples": samples, "overhead": overhead, **options}

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Draw the samples, and create and start the monitor."""
        ranks = ranks_of(within(known["model"]))
        share = (ranks.rank, ranks.size) if isinstance(ranks, ModelParallel) else None
        if share is None and not state.is_world_process_zero:
            return  # only the first process measures, unless the model is sharded
        inputs = self._given
        if inputs is None:
            loader = known["train_dataloader"]
            inputs = drawn_batch(loader, self._samples, self._seed, share or (0, 1))
        inputs = dict(inputs)
        if self._labels not in inputs:
            raise SpecError(
                f"the batch has no key {self._labels!r}; its keys are "
                f"{', '.join(map(repr, inputs))}",
                where="TrainerMonitor",
                remedy="Give the key of the labels: labels=...",
            )
        probe = inputs, inputs.pop(self._labels)
        self.monitor = Monitor(known["model"], self._loss, probe=probe, **self._options)
        self.monitor.start(state.global_step, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Count the step, and measure if due."""
        if self.monitor is not None:
            self.monitor.step(step=state.global_step)


def drawn_batch(loader: Any, samples: int, seed: int, share: tuple[int, int] = (0, 1)) -> Any:
    """Return a batch of samples drawn by `seed` from a loader's data set, made by its collator.

    The loader's order and the random generators do not change. `share` (k, m) draws the samples
    for process k of m processes; each process gets different samples.

    Raises:
        SpecError: The data set has no length or no index, so samples cannot be drawn.
    """
    data: Any = getattr(loader, "dataset", None)
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise SpecError(
            "the training data are a stream, so samples cannot be drawn from them",
            where="TrainerMonitor",
            remedy="Give a batch to measure: batch={...}.",
        )
    draw = torch.Generator().manual_seed(seed)
    k, m = share
    rows = torch.randperm(len(data), generator=draw)[k::m][:samples].tolist()
    with forked(), random_numbers_kept():
        return loader.collate_fn([data[row] for row in rows])
