"""Callbacks of transformers' Trainer and of Lightning's, whose classes are added on import."""

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
    """What both have: a `monitor`, which is told of the end."""

    monitor: Monitor | None = None

    def on_train_end(self, *args: Any, **known: Any) -> None:
        """Say that the training has ended."""
        if self.monitor is not None:
            self.monitor.close()


class LightningMonitor(_Callback):
    """Measures a LightningModule while it is trained; `Monitor` says what and how.

    The first `samples` samples of the step's batch are measured, by the module's `forward`. The
    numbers also go to the Trainer's own loggers.

    Args:
        loss: As of `Scope`, of what `forward` returns and the targets.
        every: As of `Monitor`.
        samples: Likewise.
        overhead: Likewise.
        split: From a batch to inputs and targets, called at each step; by default a batch is a
            pair of them.
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
        split: Callable[[Any], tuple[Any, Any]] | None = None,
        **options: Any,
    ) -> None:
        self._loss, self._split = loss, split or _pair
        self._options = {"every": every, "samples": samples, "overhead": overhead, **options}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin."""

        def log(step: int, values: Any) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(metrics=dict(values), step=step)

        options = self._options | {"trackers": [log, *self._options.get("trackers", ())]}
        self.monitor = Monitor(pl_module, self._loss, **options)
        steps = math.inf
        with suppress(Exception):  # whatever Lightning cannot say of its loaders
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
        """Measure if it is time."""
        if self.monitor is not None:
            self.monitor.advance(trainer.global_step, lambda: self._split(batch))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Say that the training was stopped."""
        if self.monitor is not None:
            self.monitor.close(f"stopped by {type(exception).__name__}")


def _pair(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise SpecError(
        f"a batch is no pair of inputs and targets, but {type(batch).__name__}",
        where="LightningMonitor",
        remedy="Say what its inputs and targets are: split=lambda batch: (..., ...).",
    )


class TrainerMonitor(_Callback):
    """Measures the model of a Trainer; `Monitor` says what and how.

    The Trainer tells its callbacks no batch. So `samples` samples are drawn once, by `seed`, from
    the training data, made into a batch by the Trainer's own collator, and measured every time.
    The Trainer's loader is not asked: its order stays as it is. Of a model that fully_shard has
    sharded, each process draws samples of its own.

    Args:
        loss: By name, of the model's logits and the batch's labels: "causal_lm" (the labels are
            shifted, as in transformers), "cross_entropy", ...; or `(outputs, labels) -> (n,)` of
            what the model returns. A sample's loss is its own, by default the mean over its own
            tokens; transformers' is the mean over the tokens of the whole batch.
        every: As of `Monitor`.
        samples: Likewise.
        overhead: Likewise.
        batch: Samples as the model takes them, by keyword, labels included, in place of those
            that are drawn.
        labels: The key of the labels; the model is not given them.
        seed: Of the samples that are drawn.
        options: Others of `Monitor`.

    Attributes:
        monitor: The `Monitor`, once the training has begun; None before, and in other processes
            than the first unless the model is sharded.
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
        """Draw the samples, and begin."""
        ranks = ranks_of(within(known["model"]))
        share = (ranks.rank, ranks.size) if isinstance(ranks, ModelParallel) else None
        if share is None and not state.is_world_process_zero:
            return  # all processes measure a sharded model
        inputs = self._given
        if inputs is None:
            loader = known["train_dataloader"]
            inputs = drawn_batch(loader, self._samples, self._seed, share or (0, 1))
        inputs = dict(inputs)
        if self._labels not in inputs:
            raise SpecError(
                f"a batch has no {self._labels!r}, but {', '.join(map(repr, inputs))}",
                where="TrainerMonitor",
                remedy="Say under which key the labels are: labels=...",
            )
        probe = inputs, inputs.pop(self._labels)
        self.monitor = Monitor(known["model"], self._loss, probe=probe, **self._options)
        self.monitor.start(state.global_step, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Measure if it is time."""
        if self.monitor is not None:
            self.monitor.step(step=state.global_step)


def drawn_batch(loader: Any, samples: int, seed: int, share: tuple[int, int] = (0, 1)) -> Any:
    """Return a batch of samples of a loader's data set, drawn by `seed`, made by its collator.

    Neither the loader's order nor any random generator is moved on. `share` (k, m) draws those of
    process k of m, which are others for each.

    Raises:
        SpecError: The data set has no length, so that nothing can be drawn.
    """
    data: Any = getattr(loader, "dataset", None)
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise SpecError(
            "the training data are a stream, of which no sample can be drawn",
            where="TrainerMonitor",
            remedy="Give some: batch={...}.",
        )
    draw = torch.Generator().manual_seed(seed)
    k, m = share
    rows = torch.randperm(len(data), generator=draw)[k::m][:samples].tolist()
    with forked(), random_numbers_kept():
        return loader.collate_fn([data[row] for row in rows])
