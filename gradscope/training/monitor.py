"""`Monitor`: measures a model while it is trained, within a budget, and leaves the training alone.

Norms, noise scale (McCandlish et al. 2018), clipping, signal of each parameter and agreement are
those of `measure`. The clock on the wall says what they cost; a measurement waits
until the training has lasted long enough to pay for it. Besides its file it goes to trackers: any
callable (step, values), or an object's `log`.
"""

import gc
import math
import os
import re
import sys
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from importlib import import_module
from operator import index
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import numpy.ma  # noqa: F401  # percentiles load it: not while a training waits
import torch
from torch import Tensor, nn

from gradscope.core.batch import Batch
from gradscope.errors import GradscopeError, SpecError
from gradscope.model.randomness import forked, random_numbers_kept
from gradscope.model.ranks import OutOfStepError
from gradscope.process import stops
from gradscope.process.libc import keep_pages
from gradscope.process.memory import synchronize
from gradscope.scope import Scope, UncopiedHandle
from gradscope.stats.summary import ordered_statistics
from gradscope.training.history import CURVES, Cost, End, Step, append
from gradscope.training.measurement import measure

_FEW = 4  # samples on which the first proof is made, so that it costs little
# What the first measurement is taken to cost before anything is known, in forward and backward
# passes over its samples: a proof evaluates them in a dozen other batches, a measurement takes the
# sums of the gradients after a pass.
_PROOF, _MEASURE = 12, 2
# Where a training ends before one measurement of all samples is allowed, there are to be three, of
# eight samples or more each, and the first proof is made on two.
_POINTS, _LEAST, _FEWEST = 3, 8, 2
_LATELY = 3  # measurements; the next is taken to last as long as the longest of them


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


class MonitorWarning(UserWarning):
    """A training is measured no more, or was not; it goes on all the same."""


@dataclass
class _Progress:
    """How far a training is."""

    start: float | None = None  # by the clock
    first: int = 0  # steps made before
    step: int = 0
    batch: int = 1  # samples in a step
    last: int | None = None  # the step with which it ends, where that is known


class Monitor(UncopiedHandle):
    """Measures per-sample gradients every so many steps of a training.

    The training has the same weights, bit for bit, with and without it: random generators,
    gradients, buffers and modes are left as they were, and no batch is kept. It measures in the
    parameters' own precision, without autocast (unless the model's own forward turns it on), and
    without what `torch.compile` has made. A model may hold it: a copy of the model has the same
    one, which measures the original; a file, None.

    Args:
        model: The module that is trained. Of one that is wrapped by DDP or `torch.compile`, the
            module within. Of several processes, the first alone measures; of a model that
            fully_shard has sharded all do, each its own samples, at the same steps, and the first
            has the file and the trackers.
        loss: As of `Scope`: unreduced, by name or a callable.
        every: Steps between measurements, at least; other steps cost nothing.
        samples: How many samples of a batch are measured, at most, by each process that measures.
            If the training's end is known, and comes before all are allowed, fewer are.
        overhead: The most that all measurements may take, proofs included, as a share of the time
            that the training takes between them. A measurement that it does not allow yet waits
            for a later multiple of `every`. None: no bound.
        path: A file *.jsonl to which each measurement is appended; `gradscope stats` reads it.
        trackers: Others that get the numbers: callables (step, {name: value}), or objects with
            such a `log`; see `to_tensorboard`, `to_wandb`, `to_mlflow`.
        max_norm: Clipping norms of which the share of clipped samples is wanted.
        probe: Inputs and targets that are measured every time in place of the batch.
        mode: "eval" measures without dropout and with running statistics; "train" in the modes
            that the modules are in, which is refused where random numbers or others in the batch
            have a part in a sample's loss, as `options` say.
        errors: "warn" ends measuring with a warning, "raise" raises.
        clock: Tells seconds.
        options: Others of `Scope`: parameters, backend, coupling, ... The first batch is proved.

    Attributes:
        scope: Measures.
        latest: The last `Step` measured, or None.
        interval: Steps to the next measurement, at this pace.

    Raises:
        SpecError: An argument is out of its range.
        OutputError: The file cannot be written.
        UnsupportedError: The model is sharded over processes in a way that is not supported.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: str | Callable[..., Tensor],
        every: int = 50,
        samples: int = 64,
        overhead: float | None = 0.03,
        *,
        path: str | Path | None = None,
        trackers: Sequence[Tracker | Log] = (),
        max_norm: float | Sequence[float] = (),
        probe: tuple[Any, Any] | None = None,
        mode: Literal["eval", "train"] = "eval",
        errors: Literal["warn", "raise"] = "warn",
        clock: Callable[[], float] = time.perf_counter,
        **options: Any,
    ) -> None:
        _require("every", every, at_least=1)
        _require("samples", samples, at_least=2)
        bound = () if overhead is None else (overhead,)
        clip = (max_norm,) if isinstance(max_norm, int | float) else tuple(max_norm)
        for name, values in (("overhead", bound), ("max_norm", clip)):
            if not all(isinstance(v, int | float) and 0 < v < math.inf for v in values):
                raise SpecError(f"must be positive, not {', '.join(map(repr, values))}", where=name)
        if probe is not None and (not isinstance(probe, tuple | list) or len(probe) != 2):
            raise SpecError("is a pair, inputs and targets", where="probe")
        if not isinstance(trackers, Sequence):
            raise SpecError(f"is a list, not {type(trackers).__name__}", where="trackers")
        for name, word, words in (
            ("mode", mode, ("eval", "train")),
            ("errors", errors, ("warn", "raise")),
        ):
            if word not in words:
                raise SpecError(f"is one of {', '.join(words)}, not {word!r}", where=name)
        begun = clock()
        self._model = within(model)
        self.every, self.samples, self.overhead = every, samples, overhead
        self.path = None if path is None else Path(path).absolute()  # wherever the training goes
        self._clip = clip
        self._probe, self._mode, self._errors, self._clock = probe, mode, errors, clock
        logs = [*map(as_log, trackers)]
        self.latest: Step | None = None
        self._training = _Progress(batch=samples)
        self._taken, self._few = samples, _FEW  # how many are measured, and proved first
        self._proofs = self._proof = 0.0  # seconds of all proofs, and of the last
        self._cut_off = 0.0  # seconds of a proof for which there was no more time
        self._lately: deque[float] = deque(maxlen=_LATELY)  # seconds of measurements
        self.scope = Scope(self._model, loss, **{"verify": "first", **options})
        ranks = self.scope.problem.model_parallel
        self._first = _is_first_process() if ranks is None else ranks.rank == 0
        self._closed = ranks is None and not self._first
        self._trackers = logs if self._first else []
        ordered_statistics()  # loads statistics: not while the training waits
        self._left = None
        with self._together():
            if self.path is not None and self._first:
                append(self.path)
                self._left = weakref.finalize(self, _leave, os.getpid(), self.path, self._training)
        self._spent = self._ahead = clock() - begun  # seconds; those before the training

    def start(self, step: int = 0, batch: int | None = None, last: int | None = None) -> None:
        """Say that the training begins now; else it begins when the first step has been made.

        Args:
            step: How many steps were made before, where a training is continued.
            batch: How many samples a step takes, where `step` is not given a batch.
            last: The step with which the training ends, where that is known.

        Raises:
            SpecError: The step has no whole number.
        """
        training, step = self._training, _numbered(step)
        training.start, training.first, training.step = self._clock(), step, step
        training.batch, training.last = batch or training.batch, last

    def step(self, inputs: Any = None, targets: Any = None, *, step: int | None = None) -> None:
        """Count a step of the optimiser, and measure if it is time.

        Args:
            inputs: Of the batch: a tensor, tuple or dict, sample axis first; may be None where
                there is a `probe`.
            targets: Likewise.
            step: The number of the step, where somebody else counts.

        Raises:
            SpecError: The step has no whole number.
        """
        self.advance(self._training.step + 1 if step is None else step, lambda: (inputs, targets))

    def advance(self, step: int, batch: Callable[[], tuple[Any, Any]]) -> None:
        """Do as `step`, of this number, whose batch is asked for if it is measured."""
        training, before, step = self._training, self._training.step, _numbered(step)
        training.step = step
        if training.start is None:
            self.start(step)
        elif not self._closed and step // self.every > before // self.every:
            synchronize(self.scope.problem.device)
            begun = self._clock()
            try:
                with self._together():
                    self._measure(batch, begun)
            except OutOfStepError:
                raise  # nor can it go on: the processes are out of step
            except Exception as error:  # whatever it is, the training is not to blame
                self._give_up(error)
            finally:
                self._spent += self._clock() - begun

    def close(self, reason: str | None = None) -> None:
        """Say in the file that the training has ended, and let go of the model's graph.

        Args:
            reason: Why it has ended, or is measured no more.
        """
        if self._closed:
            return
        self._closed = True
        if self.latest is None and reason is None:
            reason = f"no measurement: {self._why_none()}"
            if self._first:
                warnings.warn(reason, MonitorWarning, stacklevel=2)
        if self.path is not None and self._left is not None:
            self._left.detach()
            trained = self._trained(self._clock())
            share = self._spent / trained if trained > 0 else None
            try:
                append(self.path, End(step=self._training.step, overhead=share, reason=reason))
            except GradscopeError as error:
                if self._errors == "raise":
                    raise
                _warn(_message(error))
        self.scope.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Say that the training has ended, and of which exception."""
        self.close(None if kind is None else f"stopped by {kind.__name__}")

    def _together(self) -> AbstractContextManager[None]:
        """Let an error of one process be one of all those that measure."""
        ranks = self.scope.problem.model_parallel
        return nullcontext() if ranks is None else ranks.raise_on_all()

    def _measure(self, of: Callable[[], tuple[Any, Any]], begun: float) -> None:
        trained, batch = self._trained(begun), self._samples(of)
        if self.scope.problem.any(not len(batch)):
            return  # Poisson sampling has drawn nobody: the next multiple of `every` is measured
        given, batch = len(batch), self._sized(batch, trained)
        if not self._allowed(trained, self._expected(trained)):
            return  # for all processes
        with self._untouched():
            keep_pages()  # or what is freed moves malloc's thresholds: later steps may pay for it
            if not self._proved(batch, trained, begun):
                return
            if self._first and not self._lately and len(batch) < given:
                _warn(
                    f"{len(batch)} of {given} samples are measured: of a training of "
                    f"{self._steps_in_all():,} steps an overhead of {self.overhead} allows no more"
                )
            now = self._clock()
            summary = measure(self.scope, batch.inputs, batch.targets, clip=self._clip)
        synchronize(self.scope.problem.device)
        done = self._clock()
        self._lately.append(done - now)
        seconds = done - begun
        spent = self._spent + seconds
        cost = Cost(
            seconds=seconds,
            proof_seconds=self._proofs,
            overhead=spent / trained if trained > 0 else None,
            budget=self.overhead,
            interval=self._interval(trained, spent),
        )
        self.latest = Step.of(self._training.step, summary, cost)
        if self._left is not None and self.path is not None:
            append(self.path, self.latest)
        self._track(self.latest)

    def _proved(self, batch: Batch, trained: float, begun: float) -> bool:
        """Return whether the model is proved, as it is now, and there is time to measure it.

        If it is not, few samples are: what the budget has left ends a proof before its time.
        """
        if not self.scope.session.needs_proof():
            return True
        budget = math.inf if self.overhead is None else self.overhead * trained
        left = budget - self._spent - (self._clock() - begun)
        try:
            with stops.time_limit(left, self._clock):
                self.scope.evaluate(batch.select(slice(0, self._few)))
                synchronize(self.scope.problem.device)
            self._cut_off, self._proof = 0.0, self._clock() - begun
        except stops.OutOfTime:
            self._cut_off = self._clock() - begun
        took = self._clock() - begun
        self._proofs += took
        return not self._cut_off and self._allowed(trained, took + self._expected(trained))

    def _samples(self, of: Callable[[], tuple[Any, Any]]) -> Batch:
        inputs, targets = of() if self._probe is None else self._probe
        if inputs is None:
            raise SpecError(
                "there is nothing to measure", remedy="Give `step` a batch, or a probe."
            )
        batch = Batch.of(inputs, targets, empty=self._probe is None)
        if self._probe is None and len(batch):
            self._training.batch = len(batch)
        return batch.select(slice(0, self.samples)).to(self.scope.problem.device, None)

    def _sized(self, batch: Batch, trained: float) -> Batch:
        """Return those of a batch's samples that are measured, always as many as the first time."""
        if not self._lately:
            self._taken, self._few = len(batch), _FEW
            self._fit(trained)
        return batch.select(slice(0, self._taken))

    def _fit(self, trained: float) -> None:
        """Take fewer samples if the training ends before one measurement of all is allowed."""
        each = self._each(trained)
        if self.overhead is None or self._training.last is None or each <= 0:
            return
        left = self.overhead * each * self._steps_in_all() - self._spent
        for few in (_FEW, _FEWEST):
            self._few = few
            seconds = left - self._expected_proof(trained)
            fits = int(seconds / (_MEASURE * each / self._training.batch))
            if fits >= self._taken:
                return
        if fits >= _FEWEST:
            self._taken = min(fits, max(fits // _POINTS, _LEAST))

    def _steps_in_all(self) -> int:
        assert self._training.last is not None
        return self._training.last - self._training.first

    def _trained(self, now: float) -> float:
        """Return the seconds of training so far, without those of measurements."""
        start = self._training.start
        return 0.0 if start is None else now - start - (self._spent - self._ahead)

    def _each(self, trained: float) -> float:
        """Return the seconds of training that a step takes."""
        return trained / max(1, self._training.step - self._training.first)

    def _expected(self, trained: float) -> float:
        """Return how many seconds the next measurement will take, with its proof."""
        proof = self._expected_proof(trained)
        if self._lately:
            return proof + max(self._lately)
        sample = self._each(trained) / self._training.batch
        return proof + max(self._proof, _MEASURE * sample * self._taken)

    def _expected_proof(self, trained: float) -> float:
        if self._cut_off or self.scope.certificate is not None:
            return 2 * self._cut_off
        return _PROOF * self._each(trained) / self._training.batch * min(self._few, self._taken)

    def _why_none(self) -> str:
        """Say why the training ends without a measurement."""
        step, every, trained = self._training.step, self.every, self._trained(self._clock())
        if self.overhead is None or step // every == self._training.first // every:
            return f"the training ends at step {step:,}, before one is measured (every={every:,})"
        if self._spent + self._expected(trained) <= self.overhead * trained:
            return "another process has no time for it, and all measure together"
        return (
            f"the first is taken to last {self._expected(trained):.2g} s, and "
            f"of {trained:.2g} s of training {self.overhead * trained:.2g} s may go "
            f"into measuring, and {self._spent:.2g} s have; train longer, "
            "allow more overhead, or take fewer samples"
        )

    def _allowed(self, trained: float, seconds: float) -> bool:
        """Return whether the budget has so many seconds, on all processes that measure."""
        if self.overhead is None:
            return True
        return not self.scope.problem.any(self._spent + seconds > self.overhead * trained)

    def _interval(self, trained: float, spent: float) -> int:
        """Return in how many steps the budget allows another measurement, if nothing changes."""
        if self.overhead is None or trained <= 0:
            return self.every
        waits = (spent + max(self._lately)) / self.overhead - trained
        steps = waits / self._each(trained)
        return max(1, math.ceil(steps / self.every)) * self.every

    def _track(self, step: Step) -> None:
        for log in tuple(self._trackers):
            try:
                log(step.step, values_of(step))
            except Exception as error:
                if self._errors == "raise":
                    raise
                self._trackers.remove(log)
                _warn(f"a tracker gets nothing more: {_message(error)}")

    def _give_up(self, error: Exception) -> None:
        if self._errors == "raise":
            raise error
        reason = f"measured no more: {_message(error)}"
        if self._first:
            _warn(f"the training goes on, but is {reason}")
        with warnings.catch_warnings(action="ignore"):  # a full disk has been told
            self.close(reason)

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """Leave random generators, modes, autocast and compiled code as they are.

        Nor is garbage collected: a walk through all that a training holds would count as measuring.
        """
        modes = [(m, m.training) for m in self._model.modules()] if self._mode == "eval" else []
        device = self.scope.problem.device.type
        with ExitStack() as stack:
            stack.enter_context(forked())
            stack.enter_context(random_numbers_kept())
            stack.enter_context(torch.autocast(device, enabled=False))
            if "torch._dynamo" in sys.modules:  # else nothing is compiled
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if gc.isenabled():
                stack.callback(gc.enable)
                gc.disable()
            try:
                for module, _ in modes:
                    module.training = False
                yield
            finally:
                for module, training in modes:
                    module.training = training


def _require(name: str, value: int, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise SpecError(f"is a whole number from {at_least} on, not {value!r}", where=name)


def _numbered(step: Any) -> int:
    """Return the number of a step, also where numpy or torch has counted it."""
    try:
        found = index(step)
    except TypeError:
        found = -1
    if not 0 <= found < 2**53:
        raise SpecError(f"a step is a whole number from 0 on, not {step!r}", where="step")
    return found


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, GradscopeError) else f"{type(error).__name__}: {error}"


def _warn(text: str) -> None:
    warnings.warn(text, MonitorWarning, stacklevel=5)


def _leave(process: int, path: Path, training: _Progress) -> None:
    """End a history whose monitor is gone without a word, as after an exception."""
    if os.getpid() == process:  # a child of it has no part in the training
        with suppress(GradscopeError):
            append(path, End(step=training.step, reason="its monitor is gone, and was not closed"))


def _is_first_process() -> bool:
    distributed = torch.distributed
    known = distributed.is_available() and distributed.is_initialized()
    return not known or distributed.get_rank() == 0


def within(model: nn.Module) -> nn.Module:
    """Return the module within its wrappers."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):  # torch.compile
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


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
    add = _method(writer, "add_scalar")

    def log(step: int, values: Values) -> None:
        for name, value in values.items():
            add(name, value, step)

    return log


def to_wandb(run: Any = None) -> Log:
    """Return a tracker that logs to a run of Weights & Biases, by default the one under way.

    Values are drawn over `gradscope/step`: others may log to the run by a count of their own. Each
    time is a row of the run, so that a `step=` of one's own must not be behind their number.
    """
    if run is not None:
        _method(run, "define_metric")

    def log(step: int, values: Values) -> None:
        to = run if run is not None else _imported("wandb").run
        if to is None:
            raise SpecError("no run of wandb is under way", remedy="Call wandb.init() first.")
        to.define_metric(f"{_PREFIX}/*", step_metric=f"{_PREFIX}/step")
        to.log({**values, f"{_PREFIX}/step": step})

    return log


def to_mlflow(client: Any = None) -> Log:
    """Return a tracker that logs to MLflow's run under way, or to what has its `log_metrics`.

    Characters that MLflow takes in no name are left out.
    """
    if client is not None:
        _method(client, "log_metrics")

    def log(step: int, values: Values) -> None:
        names = {re.sub(r"[^\w. :/-]", "", name): value for name, value in values.items()}
        (client if client is not None else _imported("mlflow")).log_metrics(names, step=step)

    return log


def _method(tracker: Any, name: str) -> Any:
    if not callable(found := getattr(tracker, name, None)):
        raise SpecError(f"{type(tracker).__name__} has no `{name}`", where="trackers")
    return found


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise SpecError(f"{name} is not installed", remedy=f"pip install {name}") from error
