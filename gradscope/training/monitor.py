"""`Monitor` measures a model during training, within a time budget, without changing the training.

It computes norms, noise scale (McCandlish et al. 2018), clipping, signal of each parameter and
agreement with `measure`. The first and the last step are always measured. A measurement between
them waits until it fits into the budget, in wall-clock time. The numbers are written to a file and
passed to trackers: callables (step, values), or objects with such a `log`.
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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

from gradscope.core.batch import Batch, tensors
from gradscope.errors import GradscopeError, SpecError
from gradscope.model.randomness import forked, random_numbers_kept
from gradscope.model.ranks import OutOfStepError
from gradscope.model.state import facts
from gradscope.process.libc import keep_pages
from gradscope.process.memory import synchronize
from gradscope.scope import Scope, UncopiedHandle
from gradscope.stats.summary import ordered_statistics
from gradscope.training.history import CURVES, Cost, End, Step, append
from gradscope.training.measurement import measure

_FEW = 4  # samples in a proof, which is then fast
_ENTRIES = 16  # compared entries of a parameter, to detect changes that torch does not count
_LATELY = 3  # the next measurement is expected to take as long as the longest of this many


Values = Mapping[str, float]
Log = Callable[[int, Values], object]

_PREFIX = "gradscope"


class Tracker(Protocol):
    """Receives the numbers of each measured step."""

    def log(self, step: int, values: dict[str, float], /) -> object:
        """Log {name: value} of a step."""


def as_log(tracker: Tracker | Log) -> Log:
    """Return the function of a tracker that is called with (step, values).

    Raises:
        SpecError: The object is not a tracker.
    """
    log = getattr(tracker, "log", tracker)
    if not callable(log):
        raise SpecError(
            f"a tracker must be a callable (step, values) or have a method log(step, values), "
            f"not {tracker!r}",
            where="trackers",
            remedy="Give a list, such as trackers=[to_wandb(run)], or [my_function].",
        )
    return log


class MonitorWarning(UserWarning):
    """Measurements of a training failed or have stopped; the training itself continues."""


@dataclass
class _Progress:
    """The progress of a training."""

    start: float | None = None  # time of the clock
    seconds: float = 0.0  # time from the start to the last step, without measurements
    first: int = 0  # steps before the start
    step: int = 0
    last: int | None = None  # the number of the last step, if known


@dataclass(frozen=True)
class _HeldBatch:
    """The batch of the last step, which is measured if the training ends; it is not copied."""

    step: int
    inputs: Any
    targets: Any
    rows: int  # the number of samples
    writes: list[int]  # torch's version counters of its tensors

    @property
    def is_unchanged(self) -> bool:
        """Whether its tensors have not been written to since."""
        return self.writes == _writes(tensors((self.inputs, self.targets)))


class Monitor(UncopiedHandle):
    """Measures per-sample gradients at the first step, every so many steps, and at the last step.

    `start(last=...)` sets the number of the last step. Otherwise the last step is measured when the
    monitor is closed, if the model has not changed after that step.

    The weights are the same, bit for bit, with and without a monitor. It restores random
    generators, gradients, buffers and modes. Without a probe, it holds the batch of the last step
    until the next step or until it is closed, without a copy. It measures in the parameters'
    precision, without autocast (unless the model's forward enables it) and without programs of
    `torch.compile`. A model may hold a monitor. A copy of the model has the same monitor, which
    measures the original. A saved model has None instead.

    Args:
        model: The module that is trained, or its wrapper by DDP or `torch.compile`. If there are
            several processes, only the first measures. If the model is sharded by fully_shard, all
            processes measure at the same steps, each with different samples, and the first process
            writes the file and calls the trackers.
        loss: The unreduced loss, a name or a callable; see `Scope`.
        every: The minimum number of steps between measurements. Other steps take microseconds.
        samples: The maximum number of measured samples of a batch, for each measuring process.
        overhead: The maximum time of all measurements and proofs, relative to the training time
            without them. A measurement that exceeds it waits for a later multiple of `every`. Only
            the first and the last step may exceed it. None: no limit.
        path: A file *.jsonl to which each measurement is appended; `gradscope stats` reads it.
        trackers: Callables (step, {name: value}), or objects with such a `log`; see
            `to_tensorboard`, `to_wandb`, `to_mlflow`.
        max_norm: Clipping norms; the share of samples above each norm is reported.
        probe: (inputs, targets), measured every time instead of the step's batch.
        mode: "eval" measures without dropout and with running statistics. "train" keeps the modes
            of the modules. It is refused if a sample's loss depends on random numbers or on other
            samples, unless `options` allow it.
        errors: "warn" stops measuring with a warning, "raise" raises.
        clock: Returns the time in seconds.
        options: Further arguments of `Scope`: parameters, backend, coupling, ... The first batch is
            proved.

    Attributes:
        scope: The `Scope` that measures.
        latest: The last measured `Step`, or None.

    Raises:
        SpecError: An argument is invalid.
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
            raise SpecError("must be a pair (inputs, targets)", where="probe")
        if not isinstance(trackers, Sequence):
            raise SpecError(f"must be a list, not {type(trackers).__name__}", where="trackers")
        for name, word, words in (
            ("mode", mode, ("eval", "train")),
            ("errors", errors, ("warn", "raise")),
        ):
            if word not in words:
                raise SpecError(f"must be {' or '.join(words)}, not {word!r}", where=name)
        begun = clock()
        self._model = within(model)
        self.every, self.samples, self.overhead = every, samples, overhead
        self.path = None if path is None else Path(path).absolute()  # the training may chdir
        self._clip = clip
        self._probe, self._mode, self._errors, self._clock = probe, mode, errors, clock
        logs = [*map(as_log, trackers)]
        self.latest: Step | None = None
        self._training = _Progress()
        self._held: _HeldBatch | None = None
        # the model at the last measurement
        self._facts: list[Any] = []
        self._tensors: dict[str, Tensor] = {}
        # the model at the last step: version counters of its tensors, entries of its last parameter
        self._marks: tuple[list[int], Tensor | None] = ([], None)
        self._taken = 0  # number of samples in the first measurement
        self._proofs = self._proof = 0.0  # seconds of all proofs, and of the last proof
        self._lately: deque[float] = deque(maxlen=_LATELY)  # seconds of the last measurements
        self.scope = Scope(self._model, loss, **{"verify": "first", **options})
        ranks = self.scope.problem.model_parallel
        self._first = _is_first_process() if ranks is None else ranks.rank == 0
        self._closed = ranks is None and not self._first
        self._trackers = logs if self._first else []
        ordered_statistics()  # imports modules now, so that the training does not wait later
        self._left = None
        with self._together():
            if self.path is not None and self._first:
                append(self.path)
            if self._first and (self.path is not None or logs):
                told = weakref.ref(self), os.getpid(), self.path, self._training
                self._left = weakref.finalize(self, _leave, *told)
        self._spent = self._ahead = clock() - begun  # seconds in all, and before the training

    def start(self, step: int = 0, last: int | None = None) -> None:
        """Start the clock of the training; without this call, the first step starts it.

        Args:
            step: The number of steps before, if a training is resumed.
            last: The number of the last step, if known.

        Raises:
            SpecError: `step` is not a whole number from 0 on.
        """
        training, step = self._training, _numbered(step)
        training.start, training.first, training.step = self._clock(), step, step
        training.last = last

    def step(self, inputs: Any = None, targets: Any = None, *, step: int | None = None) -> None:
        """Count a step of the optimiser, and measure if a measurement is due.

        Call it after `optimizer.step()`.

        Args:
            inputs: The inputs of the batch: a tensor, tuple or dict, sample axis first. With a
                `probe`, they are not needed.
            targets: The targets of the batch, in the same form.
            step: The number of the step; counted if not given.

        Raises:
            SpecError: `step` is not a whole number from 0 on.
        """
        self.advance(self._training.step + 1 if step is None else step, lambda: (inputs, targets))

    def advance(self, step: int, batch: Callable[[], tuple[Any, Any]]) -> None:
        """Do the same as `step` with this number; `batch` returns (inputs, targets)."""
        training, before, step = self._training, self._training.step, _numbered(step)
        training.step, starts = step, training.start is None
        if starts:
            self.start(step)
        if self._closed:
            return
        is_first = self.latest is None and (starts or step > training.first)
        is_last = training.last is not None and before < training.last <= step
        due = is_first or is_last or step // self.every > before // self.every
        if due:
            synchronize(self.scope.problem.device)
        begun = self._clock()
        training.seconds = 0.0 if starts else self._trained(begun)
        try:
            with self._together() if due else nullcontext():
                given = self._probe or batch()
                self._hold(*given, before)
                if is_last and self._held is not None and self._held.is_unchanged:
                    given = self._held.inputs, self._held.targets
                if due:
                    self._measure(*given, begun, always=is_first or is_last)
                self._mark_model()
        except OutOfStepError:
            raise  # the training cannot continue, because the processes are out of step
        except Exception as error:  # an error in a measurement must not stop the training
            self._give_up(error)
        finally:
            self._spent += self._clock() - begun

    def close(self, reason: str | None = None) -> None:
        """Measure the last step, write the end of the training to the file, release the model.

        If the model is sharded, all processes must call it.

        Args:
            reason: The reason if the training ended early. Then no error is raised.
        """
        if self._closed:
            return
        self._closed = True
        missing: str | None = "the last step is not measured: the measurement was interrupted"
        try:
            missing = self._measure_last(reason)
        finally:
            self._write_end("; ".join(filter(None, (reason, missing))) or None)
            self._held = None
            self.scope.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Close the monitor; an exception is recorded in the file as the reason."""
        self.close(None if kind is None else f"stopped by {kind.__name__}")

    def _hold(self, inputs: Any, targets: Any, before: int) -> None:
        """Hold the batch of this step, after the step `before`.

        If this batch has too few samples, as at the end of an epoch, the previous batch is kept.
        """
        found, last = tensors((inputs, targets)), self._held
        rows = next((len(t) for t in found if t.dim()), 0)
        if last is None or last.step < before or rows >= min(self._taken, last.rows):
            step = self._training.step
            self._held = _HeldBatch(step, inputs, targets, rows, _writes(found))

    def _mark_model(self) -> None:
        """Record the model's state, to detect later changes."""
        self._marks = _writes(self._tensors.values()), self._entries()

    def _entries(self) -> Tensor | None:
        """Return a copy of a few entries of the last parameter, or None if the model is sharded."""
        if self.scope.problem.model_parallel is not None or not self.scope.problem.parameters:
            return None
        *_, last = self.scope.problem.parameters.values()
        return last.detach().reshape(-1)[:_ENTRIES].clone()

    def _named_tensors(self) -> dict[str, Tensor]:
        return {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}

    def _measure_last(self, reason: str | None) -> str | None:
        """Measure the last step if needed; return the reason if that is not possible, else None."""
        training, held = self._training, self._held
        if self.latest is None:
            if reason is None and self._first:
                reason = f"no measurement: {self._why_none()}"
                warnings.warn(reason, MonitorWarning, stacklevel=3)
                return reason
            return None
        if held is None or self.latest.step == training.step:
            return None
        begun, missing = self._clock(), None
        try:
            if self.scope.problem.model_parallel is not None and reason is not None:
                missing = "the other processes may have stopped at another step"
            else:
                with self._together():
                    missing = self._changed(held)
                    if not missing and not self._measure(
                        held.inputs, held.targets, begun, always=True
                    ):
                        missing = "its batch is empty"
        except OutOfStepError:
            raise
        except Exception as error:
            if self._errors == "raise" and reason is None:
                raise
            missing = _message(error)
        finally:
            self._spent += self._clock() - begun
        if not missing:
            return None
        missing = f"the last step, {training.step:,}, is not measured: {missing}"
        if self._first:
            _warn(missing)
        return missing

    def _changed(self, held: _HeldBatch) -> str | None:
        """Return a text on a change since the last step on any process, or None."""
        own = self._own_change(held)
        anywhere = self.scope.problem.any(own is not None)
        return own or ("the model has changed on another process" if anywhere else None)

    def _own_change(self, held: _HeldBatch) -> str | None:
        if (ranks := self.scope.problem.model_parallel) is not None:
            ranks.reshard()
        with self._untouched():
            is_other = facts(self._model) != self._facts
        if is_other:
            assert self.latest is not None
            return (
                "modules, modes, parameters, buffers or hooks of the model have changed since step "
                f"{self.latest.step:,}"
            )
        now, (writes, entries) = self._named_tensors(), self._marks
        found = zip(now, _writes(now.values()), writes, strict=True)
        name = next((name for name, then, before in found if then != before), None)
        if name is None and entries is not None and not _same(entries, self._entries()):
            name = [*self.scope.problem.parameters][-1]
        if name is not None:
            return (
                f"{name!r} has changed after the step. Call `monitor.step` after `optimizer.step`, "
                "and close the monitor before you change the model"
            )
        return None if held.is_unchanged else "its batch was overwritten"

    def _write_end(self, reason: str | None) -> None:
        if self._left is None:
            return
        self._left.detach()
        trained = self._training.seconds
        end = End(
            step=self._training.step,
            overhead=self._spent / trained if trained > 0 else None,
            reason=reason,
        )
        try:
            if self.path is not None:
                append(self.path, end)
        except GradscopeError as error:
            if self._errors == "raise":
                raise
            _warn(_message(error))

    def _together(self) -> AbstractContextManager[None]:
        """Return a context that raises an error of one process on all measuring processes."""
        ranks = self.scope.problem.model_parallel
        return nullcontext() if ranks is None else ranks.raise_on_all()

    def _measure(self, inputs: Any, targets: Any, begun: float, *, always: bool) -> bool:
        """Measure if the budget allows it, or `always`; return whether samples were measured."""
        trained, expected = self._training.seconds, max(self._lately, default=0.0)
        if not always and not self._allowed(trained, expected):
            return False
        batch = self._samples(inputs, targets)
        if self.scope.problem.any(not len(batch)):
            return False  # Poisson sampling may draw no sample: the next step is measured
        with self._untouched():
            keep_pages()  # freed memory would change malloc's thresholds and slow later steps
            if self.scope.session.needs_proof():
                if not always and not self._allowed(trained, self._proof + expected):
                    return False
                self.scope.evaluate(batch.select(slice(0, _FEW)))
                synchronize(self.scope.problem.device)
                self._proof = self._clock() - begun
                self._proofs += self._proof
            now = self._clock()
            summary = measure(self.scope, batch.inputs, batch.targets, clip=self._clip)
            self._facts = facts(self._model)
        synchronize(self.scope.problem.device)
        done = self._clock()
        self._lately.append(done - now)
        self._taken = self._taken or len(batch)
        self._tensors = self._named_tensors()
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
        return True

    def _samples(self, inputs: Any, targets: Any) -> Batch:
        if inputs is None:
            raise SpecError(
                "the step has no batch to measure",
                remedy="Call monitor.step(inputs, targets), or give Monitor a probe.",
            )
        batch = Batch.of(inputs, targets, empty=self._probe is None)
        return batch.select(slice(0, self.samples)).to(self.scope.problem.device, None)

    def _trained(self, now: float) -> float:
        """Return the seconds of training so far, without measurements."""
        start = self._training.start
        return 0.0 if start is None else now - start - (self._spent - self._ahead)

    def _why_none(self) -> str:
        """Return the reason why the training ends without a measurement."""
        training = self._training
        if training.start is None or training.step == training.first == 0:
            return "no step was recorded. Call `monitor.step` after each `optimizer.step`"
        return "all batches were empty"

    def _allowed(self, trained: float, seconds: float) -> bool:
        """Return whether the budget allows `seconds` more, on all measuring processes."""
        if self.overhead is None:
            return True
        return not self.scope.problem.any(self._spent + seconds > self.overhead * trained)

    def _interval(self, trained: float, spent: float) -> int:
        """Return the number of steps to the next measurement, at the present speed."""
        if self.overhead is None or trained <= 0:
            return self.every
        waits = (spent + max(self._lately)) / self.overhead - trained
        steps = waits / trained * max(1, self._training.step - self._training.first)
        return max(1, math.ceil(steps / self.every)) * self.every

    def _track(self, step: Step) -> None:
        for log in tuple(self._trackers):
            try:
                log(step.step, values_of(step))
            except Exception as error:
                if self._errors == "raise":
                    raise
                self._trackers.remove(log)
                _warn(f"a tracker failed and is no longer called: {_message(error)}")

    def _give_up(self, error: Exception) -> None:
        if self._errors == "raise":
            self._held = None
            raise error
        reason = f"no longer measured: {_message(error)}"
        if self._first:
            _warn(f"the training continues, but is {reason}")
        self._held = None  # the last step is not measured
        with warnings.catch_warnings(action="ignore"):  # one warning is enough
            self.close(reason)

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """Measure without changes to random generators, modes, autocast and compiled code.

        Garbage collection is disabled, because the time for the training's objects would count.
        """
        modes = [(m, m.training) for m in self._model.modules()] if self._mode == "eval" else []
        device = self.scope.problem.device.type
        with ExitStack() as stack:
            stack.enter_context(forked())
            stack.enter_context(random_numbers_kept())
            stack.enter_context(torch.autocast(device, enabled=False))
            if "torch._dynamo" in sys.modules:  # otherwise no code is compiled
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
        raise SpecError(f"must be a whole number of at least {at_least}, not {value!r}", where=name)


def _numbered(step: Any) -> int:
    """Return the number of a step as int; numpy and torch numbers are accepted."""
    try:
        found = index(step)
    except TypeError:
        found = -1
    if not 0 <= found < 2**53:
        raise SpecError(f"a step must be a whole number of at least 0, not {step!r}", where="step")
    return found


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, GradscopeError) else f"{type(error).__name__}: {error}"


def _warn(text: str) -> None:
    warnings.warn(text, MonitorWarning, stacklevel=5)


def _leave(
    monitor: "weakref.ref[Monitor]", process: int, path: Path | None, training: _Progress
) -> None:
    """End a history whose monitor was not closed, because it was deleted or the program ends."""
    if os.getpid() != process:
        return  # this is a forked process
    open_one = monitor()
    if open_one is not None:
        open_one.close("the program ended before the monitor was closed")
    elif path is not None:
        with suppress(GradscopeError):
            reason = "the monitor was deleted before it was closed"
            append(path, End(step=training.step, reason=reason))


def _writes(of: Collection[Tensor]) -> list[int]:
    """Return torch's version counter of each tensor, which counts in-place writes."""
    try:
        return [t._version for t in of]
    except RuntimeError:  # tensors of inference mode have no version counter
        return [-1 if t.is_inference() else t._version for t in of]


def _same(a: Tensor, b: Tensor | None) -> bool:
    """Whether two tensors have equal values, on any devices; NaN equals NaN."""
    return b is not None and a.dtype == b.dtype and repr(a.tolist()) == repr(b.tolist())


def _is_first_process() -> bool:
    distributed = torch.distributed
    known = distributed.is_available() and distributed.is_initialized()
    return not known or distributed.get_rank() == 0


def within(model: nn.Module) -> nn.Module:
    """Return the module without its wrappers (DDP, DataParallel, `torch.compile`)."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):  # torch.compile
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def values_of(step: Step) -> dict[str, float]:
    """Return {name: number} of a step, with names such as "gradscope/noise_scale"."""
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
    """Return a tracker that logs to a run of Weights & Biases, by default the current run.

    The x axis of the values is `gradscope/step`, so other code may log to the run with a different
    counter. Each measurement also increases the run's step. If your code logs with `step=`, its
    step must not be smaller than the run's.
    """
    if run is not None:
        _method(run, "define_metric")

    def log(step: int, values: Values) -> None:
        to = run if run is not None else _imported("wandb").run
        if to is None:
            raise SpecError("there is no current run of wandb", remedy="Call wandb.init() first.")
        to.define_metric(f"{_PREFIX}/*", step_metric=f"{_PREFIX}/step")
        to.log({**values, f"{_PREFIX}/step": step})

    return log


def to_mlflow(client: Any = None) -> Log:
    """Return a tracker that logs to the current MLflow run, or to an object with `log_metrics`.

    Characters that MLflow does not allow in names are removed.
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
