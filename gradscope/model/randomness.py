"""Fixed random numbers of a forward pass: determined by a seed, a call and a sample.

In train mode a model draws random numbers (dropout, stochastic depth, noise). `FixedRandomness`
answers each such call below autograd. A sample gets the same numbers in any batch, at any position,
and in any evaluation: a batch of one, a batch, `vmap` or `expand`. So each sample has one mask, and
its gradient under this mask is as well defined as without a mask.

The numbers of call k for sample i are a hash of (seed, k, i, entry), in the order of entries in a
batch of one. The sample axis of a tensor of numbers is found by comparing batches of two and of
three. A tensor without such an axis is the same for all samples. If the axis is merged with others,
the losses decide: different numbers for one sample must change only the loss of this sample. If the
code runs once for each sample, in a loop, its calls repeat: repetition i belongs to sample i.

The number of the call is stored in torch's own state, as the seed of the CPU's generator.
Activation checkpointing restores this seed, so recomputed code draws the same numbers again.
"""

import hashlib
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.jit._fuser import optimized_execution
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from gradscope.core.batch import Batch
from gradscope.core.precision import doubled
from gradscope.errors import ModelError, UnsupportedError
from gradscope.model.draws import EVAL, draw, is_random, kind_of
from gradscope.process.memory import accelerator_module

T = TypeVar("T")
_NUMBER = torch.ops.aten._local_scalar_dense.default
Wrap = Callable[[Tensor], Tensor]

# a mark, and the bits for the numbers of the run and the call
_MARK, _RUNS, _CALLS = 0x6773, 28, 20
_KEPT = 1024  # runs whose graphs may still be differentiated
_PLANS = 256  # programs, for example one per sequence length
_TRIALS = 4  # trials of other numbers for a sample, until its loss changes
_CLEAR = 1e-3  # share of a sample's change; a smaller change of another loss is rounding
_PIECE = 2**16  # words per step, which fit into a cache
_REMEDY = (
    "Draw the numbers for all samples at once, with equal shares, in tensors with a sample axis "
    f"(torch.rand(len(x), ...) instead of a loop over samples). Otherwise: {EVAL}"
)


class Unplanned(BaseException):
    """A call whose sample axis is unknown; a BaseException, so that the model does not catch it.

    The caller finds the axis and starts the evaluation again.
    """


class _OwnNumbers(Exception):  # noqa: N818
    """A call whose numbers come from a generator of the model, and are the same for all samples."""


@dataclass(frozen=True)
class DrawAxis:
    """The position of the samples in a tensor of random numbers."""

    kind: str  # the operation's name
    shape: tuple[int, ...]  # for a single sample
    axis: int | None  # the sample axis, or None for numbers that all samples share
    before: int = 1  # entries of other axes merged before the samples (time-major: T)
    period: int = 0  # the number of calls for a sample, if the code runs once for each sample

    def at(self, n: int) -> tuple[int, ...]:
        """Return the shape for n samples, or for one of them if the code runs for each."""
        if self.axis is None or self.period:
            return self.shape
        k = self.axis
        return (*self.shape[:k], self.shape[k] * n, *self.shape[k + 1 :])

    @property
    def merged(self) -> int:
        """The number of entries of the axis per sample."""
        return 1 if self.axis is None or self.period else self.shape[self.axis]

    def arranged(self, each: Tensor) -> Tensor:
        """Arrange the numbers of each sample, (n, *shape), in the shape for n samples."""
        if self.axis is None:
            return each[0]
        shape = (*each.shape[: self.axis + 1], self.before, -1, *self.shape[self.axis + 1 :])
        split = each.reshape(shape)
        return split.movedim(0, self.axis + 1).reshape(self.at(len(each)))


# By the number of the call. Recomputed code, or code that draws after the model restored a
# generator's state, draws the same numbers again, possibly in another shape.
DrawPlan = dict[int, tuple[DrawAxis, ...]]
Call = tuple[int, str, tuple[int, ...]]  # number, kind and shape


@dataclass
class _ForwardPass:
    """One forward pass, and later recomputations of its parts."""

    index: Tensor  # (n,) int64, positions of its samples in the data set
    plans: list[DrawPlan]  # plans that fit so far
    single: bool = False  # whether the model sees a batch of one
    recorded: list[Call] | None = None  # the list of all calls, if they are recorded
    # the calls in which the sample at position 1 draws other numbers, and the trial
    redraw: tuple[frozenset[int], int] = (frozenset(), 0)
    # states of the model's own generators
    before: dict[torch.Generator, Tensor] = field(default_factory=dict)
    program: int = 0  # a hash of the operations so far
    picks: int = 0  # a hash of the rows that indices have selected so far
    # whether a call was unplanned; TorchScript converts the signal to its own error
    unplanned: bool = False
    ended: bool = False  # whether the pass has ended, so that further draws are recomputations

    def place(self, call: int, kind: str, *shapes: tuple[int, ...]) -> DrawAxis:
        """Return the sample axis of the numbers of a call, for one of some shapes.

        Raises:
            Unplanned: No plan has the call, or plans differ.
            UnsupportedError: The same, but the pass has ended and cannot start again.
        """
        n = 1 if self.single else len(self.index)
        fitting = [
            (plan, place)
            for plan in self.plans
            for place in _places(plan, call, n)
            if place.kind == kind and place.at(n) in shapes
        ]
        self.plans = [plan for plan, _ in fitting]
        found = {place for _, place in fitting}
        if len(found) != 1 and self.ended:
            raise UnsupportedError(
                f"{kind} draws different random numbers in the backward pass than in the forward "
                "pass",
                remedy="Code that is recomputed must draw the same numbers as the first time. "
                "Move code that depends on the number of calls, such as a counter, out of the "
                "checkpointed part.",
            )
        if len(found) != 1:
            self.unplanned = True
            raise Unplanned
        return found.pop()


@dataclass(eq=False)
class FixedRandomness(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws every random number of a model from `seed`, the number of the call, and the sample.

    Two programs that draw in the same shapes look alike, although one may reorder the numbers after
    the draw, or draw for rows that indices have reordered. So `new` reports programs and orders
    that have not run before. Code that proves results must check it.
    """

    seed: int
    new: bool = False  # whether a new sequence of operations has run; reset by the caller
    _programs: set[int] = field(default_factory=set)
    _plans: list[DrawPlan] = field(default_factory=list)
    _runs: OrderedDict[int, _ForwardPass] = field(default_factory=OrderedDict)
    _run_number: int = 0
    _active: bool = False
    _open: list[_ForwardPass] = field(default_factory=list)  # stack of running passes

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @contextmanager
    def active(self, model: nn.Module) -> Iterator[None]:
        """Answer draws in the body, also in backward passes; then restore torch's generator."""
        if self._active:
            yield
            return
        self._active = True
        try:
            with (
                torch.random.fork_rng(devices=[]),
                random_numbers_kept(),
                _unfused(model),
                optimized_execution(False),  # TorchScript would draw differently in later runs
                self,
            ):
                torch.default_generator.manual_seed(_code(0))
                yield
        finally:
            self._active = False

    def evaluate_batch(
        self,
        model: nn.Module,
        batch: Batch,
        evaluate: Callable[[], T],
        losses: Callable[[Batch], Tensor],
        *,
        single: bool = False,
    ) -> T:
        """Return the result of `evaluate` on a batch, with each sample's own numbers.

        Args:
            model: The model that draws.
            batch: The samples.
            evaluate: Runs the model on the samples; called again if the model draws in a new way.
            losses: Runs the model on any samples, and returns their losses (n,).
            single: Whether the model sees a batch of one that represents all samples.

        Raises:
            UnsupportedError: The samples of the numbers cannot be determined.
        """
        with self.active(model):
            try:
                with self._run(_ForwardPass(batch.index, self._plans, single)):
                    return evaluate()
            except Unplanned:
                plan = self._learnt(batch, losses)
            try:
                with self._run(_ForwardPass(batch.index, [plan], single)):
                    return evaluate()
            except Unplanned:
                error = _unclear("draws for this batch do not match draws for two or three samples")
                if single:
                    error.remedy = 'Use backend="hooks" or backend="loop".'
                raise error from None

    @contextmanager
    def _run(self, run: _ForwardPass) -> Iterator[None]:
        before = torch.default_generator.initial_seed()
        self._run_number = (self._run_number + 1) % 2**_RUNS or 1
        self._runs[self._run_number] = run
        if len(self._runs) > _KEPT:
            self._runs.popitem(last=False)
        torch.default_generator.manual_seed(_code(self._run_number))
        self._open.append(run)
        random.seed(self.seed)  # draws from these two are the same for all samples
        np.random.seed(self.seed % 2**32)
        try:
            yield
        except Exception as error:
            if run.unplanned:
                raise Unplanned from error
            raise
        finally:
            self._open.pop().ended = True
            self.new |= run.program not in self._programs
            self._programs.add(run.program)
            for generator, state in run.before.items():
                generator.set_state(state)
            torch.default_generator.manual_seed(before)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, or answer it if it draws."""
        kwargs = kwargs or {}
        if self._open:
            run = self._open[-1]
            run.program = hash((run.program, func))
            chosen = None if run.single else _choice(func, args, len(run.index))
            if chosen is not None:
                with torch._C._DisableTorchDispatch():
                    run.picks = hash((run.picks, chosen.cpu().numpy().tobytes()))
        if func is _NUMBER and not isinstance(args[0], Tensor):
            return args[0]  # a value that an operation saved is already a number
        if not is_random(func) or (not self._open and kwargs.get("generator") is not None):
            return func(*args, **kwargs)  # for example in a proof
        result = self.draw(func, args, kwargs)
        return _undrawn(func, args, kwargs) if result is NotImplemented else result

    def draw(self, func: Any, args: Any, kwargs: dict[str, Any], wrap: Wrap | None = None) -> Any:
        """Return an operation's result from fixed numbers, or NotImplemented.

        Args:
            func: An operation that may draw.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            wrap: Converts each sample's numbers (n, ...) to the tensor that the operation expects.
        """
        code = torch.default_generator.initial_seed()
        generator = kwargs.get("generator")
        words = partial(self._words, kind_of(func), code, wrap, generator is not None)
        try:
            if code >> (_RUNS + _CALLS) != _MARK:  # the model has seeded the generator
                raise _OwnNumbers
            return draw(func, args, kwargs, words)
        except _OwnNumbers:
            run = self._open[-1] if self._open else None
            if run is not None and run.single:
                raise UnsupportedError(
                    f"the model seeds the generator of {kind_of(func)}, so all samples get the "
                    "same numbers",
                    remedy='Use backend="hooks" or backend="loop", which support this.',
                ) from None
            if run is not None and generator is not None:
                run.before.setdefault(generator, generator.get_state())
            return func(*args, **kwargs)

    def _words(
        self,
        kind: str,
        code: int,
        wrap: Wrap | None,
        own: bool,
        shape: Sequence[int],
        device: torch.device,
    ) -> Tensor:
        """Return the words of a call, in the form that the operation expects.

        Raises:
            _OwnNumbers: All samples share the numbers, and the model draws them from its `own`
                generator.
        """
        run, call = self._runs.get(code >> _CALLS & 2**_RUNS - 1), code & 2**_CALLS - 1
        if run is None:
            raise UnsupportedError(
                f"{kind} draws different random numbers in the backward pass than in the forward "
                "pass",
                remedy="Use checkpoint(..., preserve_rng_state=True), the default.",
            )
        torch.default_generator.manual_seed(code + 1)
        full = tuple(shape)

        def made(index: Tensor | None, one: tuple[int, ...], trial: int = 0) -> Tensor:
            with torch._C._DisableTorchDispatch():  # not a part of the model
                return _numbers(self.seed, own_call, index, one, device, trial)

        own_call = call  # the number of the call for one sample
        if run.recorded is not None:
            run.recorded.append((call, kind, full))
            return made(None, full)[0]
        stacked = run.single and wrap is None  # vmap has the samples in front
        n = len(run.index)  # the samples are in front of the first axis, or merged with it
        shapes = [full[1:], (full[0] // n, *full[1:])] if stacked else [full]
        place = run.place(call, kind, *shapes)
        if place.axis is None and own:
            raise _OwnNumbers
        if place.axis is None:
            shared = made(None, place.shape)[0]
            return shared.expand(n, *place.shape).reshape(full) if stacked else shared
        run.program = hash((run.program, run.picks))  # the program depends on the order of rows
        calls, trial = run.redraw
        if place.period:
            sample, own_call = divmod(call, place.period)
            if not run.single:
                other = trial if sample == 1 and own_call in calls else 0
                found = made(run.index[sample : sample + 1], place.shape, other)
                return found[0] if wrap is None else wrap(found)
        each = made(run.index, place.shape)
        if call in calls:
            each[1] = made(run.index[1:2], place.shape, trial)[0]
        if stacked:
            return each.reshape(full)
        return place.arranged(each) if wrap is None else wrap(each)

    def _learnt(self, batch: Batch, losses: Callable[[Batch], Tensor]) -> DrawPlan:
        """Find the sample axes of a model's draws; store and return the plan."""
        try:
            first, second = (self._record_calls(batch.resized(n), losses) for n in (2, 3))
            if (looped := _looped(first, second)) is not None:
                return self._learnt_loop(looped, first, batch, losses)
            if [call[:2] for call in first] != [call[:2] for call in second]:
                raise _unclear("it draws different kinds of numbers for two and for three samples")
            plan: DrawPlan = {}
            for (call, kind, two), (_, _, three) in zip(first, second, strict=True):
                known = plan.get(call, ())
                plan[call] = tuple(dict.fromkeys((*known, _place(kind, two, three))))
            if any(place.axis is None for places in plan.values() for place in places):
                # shared by all samples, or drawn for one of them?
                for k in range(min(len(batch), 3)):
                    if self._record_calls(batch.select(torch.tensor([k, k])), losses) != first:
                        raise _unclear("the kind or shape of a draw differs between samples")
            plan = self._order_axes(plan, batch.resized(3), losses)
        except ModelError as error:
            raise _unclear(
                f"the model does not run on two or three samples: {error.what}"
            ) from error
        except Unplanned:  # raised with other numbers for one sample
            raise _unclear("its later draws depend on its earlier draws") from None
        self._plans = [*(p for p in self._plans[-_PLANS:] if p != plan), plan]
        return plan

    def _learnt_loop(
        self,
        plan: DrawPlan,
        first: list[Call],
        batch: Batch,
        losses: Callable[[Batch], Tensor],
    ) -> DrawPlan:
        """Store and return the plan of code that runs once for each sample, after a test."""
        for k in range(min(len(batch), 3)):
            if self._record_calls(batch.select(torch.tensor([k, k])), losses) != first:
                raise _unclear("the kind or shape of a draw differs between samples")
        if not self._is_own(plan, plan, batch.resized(3), losses):
            raise _unclear("the draws of a loop over samples change several losses")
        self._plans = [*(p for p in self._plans[-_PLANS:] if p != plan), plan]
        return plan

    def _record_calls(self, batch: Batch, losses: Callable[[Batch], Tensor]) -> list[Call]:
        """Return the draws of a model for a batch, in order."""
        found: list[Call] = []
        with self._run(_ForwardPass(batch.index, [], recorded=found)):
            losses(batch)
        return found

    def _order_axes(
        self, plan: DrawPlan, three: Batch, losses: Callable[[Batch], Tensor]
    ) -> DrawPlan:
        """Return the plan with the order of samples and the axes that they are merged with.

        First it is tested whether all axes have the samples in front. Otherwise each is tested.
        """
        merged = [(k, place) for k, places in plan.items() for place in places if place.merged > 1]
        if not merged or self._is_own(plan, [k for k, _ in merged], three, losses):
            return plan
        for k, place in merged:
            ways = [d for d in (1, place.merged, *range(2, place.merged)) if place.merged % d == 0]
            others = tuple(other for other in plan[k] if other != place)
            tried = (plan | {k: (*others, replace(place, before=d))} for d in ways)
            found = next((way for way in tried if self._is_own(way, [k], three, losses)), None)
            if found is None:
                raise _unclear(
                    f"the numbers of {place.kind}, of shape {place.at(3)} for three samples, "
                    "change several losses"
                )
            plan = found
        return plan

    def _is_own(
        self, plan: DrawPlan, calls: Iterable[int], three: Batch, losses: Callable[[Batch], Tensor]
    ) -> bool:
        """Whether other numbers for one of three samples in some calls change only its own loss."""

        def found(trial: int) -> Tensor:
            other = (frozenset(calls if trial else ()), trial)
            with self._run(_ForwardPass(three.index, [plan], redraw=other)):
                return doubled(losses(three).detach()).nan_to_num()

        before = found(0)
        for trial in range(1, _TRIALS + 1):
            change = (found(trial) - before).abs().cpu()
            if bool(change.any()):
                return bool(change[0] + change[2] <= _CLEAR * change[1])
        return True  # no loss depends on the numbers here


def probe() -> None:
    """Draw for three samples and for one of them, and compare the numbers of the latter.

    Raises:
        Exception: This torch release does not let a dispatch mode answer draws.
    """
    fixed, layer, three = FixedRandomness(0), nn.Dropout(), Batch.of(torch.ones(3, 8, device="cpu"))

    def draw(batch: Batch) -> Tensor:
        def losses(batch: Batch) -> Tensor:
            found: Tensor = layer(batch.inputs).sum(1)
            return found

        return fixed.evaluate_batch(layer, batch, lambda: losses(batch), losses)

    if not torch.equal(draw(three)[2:], draw(three.one(2))):
        raise RuntimeError("a sample has different numbers in a batch")


class ExtremeDraws(TorchDispatchMode):
    """Uses the same word everywhere: each draw is as small, or as large, as possible.

    An event of probability 1/1000 happens for one of `WORDS`.
    """

    WORDS = (0, -1, -(2**31), 2**31 - 1)  # 0, almost 1; every event happens, no event happens

    def __init__(self, word: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._word = word

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, or answer it if it draws."""
        kwargs, found = kwargs or {}, NotImplemented
        # the model has seeded the generator
        own = torch.default_generator.initial_seed() != _code(0)
        if is_random(func) and not own and kwargs.get("generator") is None:
            found = draw(func, args, kwargs, self._words)
        return func(*args, **kwargs) if found is NotImplemented else found

    def _words(self, shape: Sequence[int], device: torch.device) -> Tensor:
        return torch.full(tuple(shape), self._word, dtype=torch.int32, device=device)


@contextmanager
def extreme_numbers(word: int) -> Iterator[None]:
    """Draw all random numbers in the body from one word of `ExtremeDraws.WORDS`."""
    with forked(), random_numbers_kept(), ExtremeDraws(word):
        torch.default_generator.manual_seed(_code(0))
        yield


@contextmanager
def _unfused(model: nn.Module) -> Iterator[None]:
    """Make attention and recurrent layers on a GPU draw by separate operations.

    Draws inside fused kernels cannot be answered.
    """
    with ExitStack() as stack:
        if all(t.device.type == "cpu" for t in (*model.parameters(), *model.buffers())):
            yield
            return
        if model.training:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if any(isinstance(m, nn.RNNBase) and m.training and m.dropout for m in model.modules()):
            stack.enter_context(switched_off(torch.backends.cudnn))
        yield


@contextmanager
def switched_off(*kernels: Any) -> Iterator[None]:
    """Disable some of torch's backends, such as `torch.backends.cudnn`, in the body.

    Their own `flags()` also sets everything that is not passed, and fails if TF32 is set by
    `torch.backends.cudnn.conv.fp32_precision`.
    """
    before = [k.enabled for k in kernels]
    try:
        for k in kernels:
            k.enabled = False
        yield
    finally:
        for k, enabled in zip(kernels, before, strict=True):
            k.enabled = enabled


def _drawing(device: torch.device | None) -> tuple[Any, list[Any]]:
    """Return torch's module of a device (default: the current accelerator), and its generators."""
    module = accelerator_module(device)
    started = getattr(module, "is_initialized", lambda: module is not None)()
    if not started or device is None:
        return module, []
    every = range(module.device_count()) if device.index is None else [device]
    return module, [*every]


def states(device: torch.device | None = None) -> list[Callable[[], Tensor]]:
    """Return functions that read the states of generators: the CPU's, and a device's or all."""
    module, devices = _drawing(device or torch.accelerator.current_accelerator())
    return [torch.get_rng_state, *(partial(module.get_rng_state, d) for d in devices)]


def forked(device: torch.device | None = None) -> AbstractContextManager[None]:
    """Restore torch's generators after the body: the CPU's, and a device's or all."""
    place = device or torch.accelerator.current_accelerator()
    module, devices = _drawing(place)
    kind = "cuda" if place is None or module is None else place.type
    return torch.random.fork_rng(devices, device_type=kind)


def seed_all(seed: int) -> None:
    """Seed torch's generators in use; unused devices keep the caller's seed."""
    _, devices = _drawing(torch.accelerator.current_accelerator())
    (torch.manual_seed if devices else torch.default_generator.manual_seed)(seed)


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Restore the global random generators of Python and NumPy after the body."""
    python, legacy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch for the body; restore them after it."""
    with random_numbers_kept(), torch.random.fork_rng([]):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        yield


def _code(run: int) -> int:
    """Return the seed that encodes a run's first call; run 0 means no run."""
    return (_MARK << _RUNS | run) << _CALLS


def _unclear(why: str) -> UnsupportedError:
    return UnsupportedError(
        f"cannot determine which of the model's random numbers belong to which sample: {why}",
        remedy=_REMEDY,
    )


def _looped(two: list[Call], three: list[Call]) -> DrawPlan | None:
    """Return the plan if equal draws repeat for each of two and of three samples, or None."""
    period = len(two) // 2
    one = [call[1:] for call in two[:period]]
    if not one or [c[1:] for c in two] != one * 2 or [c[1:] for c in three] != one * 3:
        return None
    if [c[0] for c in three] != list(range(3 * period)):
        return None  # a part is recomputed
    return {k: (DrawAxis(kind, shape, 0, 1, period),) for k, (kind, shape) in enumerate(one)}


def _places(plan: DrawPlan, call: int, n: int) -> tuple[DrawAxis, ...]:
    """Return the sample axes of a call in a plan, for n samples."""
    period = next((place.period for places in plan.values() for place in places), 0)
    if not period:
        return plan.get(call, ())
    return plan[call % period] if call < n * period else ()


def _place(kind: str, two: tuple[int, ...], three: tuple[int, ...]) -> DrawAxis:
    """Return the sample axis of a call, given its shapes for two and for three samples."""
    changed = [k for k, (a, b) in enumerate(zip(two, three, strict=False)) if a != b]
    if not changed and len(two) == len(three):
        return DrawAxis(kind, two, None)
    k = changed[0] if changed else 0
    even = len(two) == len(three) and len(changed) == 1 and two[k] * 3 == three[k] * 2
    if not even or two[k] % 2:
        raise _unclear(
            f"{kind} draws numbers of shape {two} for two samples and {three} for three, so "
            "samples do not have equal shares"
        )
    return DrawAxis(kind, (*two[:k], two[k] // 2, *two[k + 1 :]), k)


_GAMMA, _FIRST, _SECOND = (  # of SplitMix64 (Steele, Lea and Flood 2014), as signed integers
    value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def _mixed(z: Tensor) -> Tensor:
    """Mix 64-bit words in place, and return them."""
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        z ^= (z >> shift).bitwise_and_(2 ** (64 - shift) - 1)
        if factor != 1:
            z *= factor
    return z


def _numbers(
    seed: int,
    call: int,
    index: Tensor | None,
    shape: Sequence[int],
    device: torch.device,
    trial: int,
) -> Tensor:
    """Return the words (n, *shape), int32, of samples (n,), or (1, *shape) for shared numbers."""
    text = f"{seed}\0{call}\0{trial}\0{'all' if index is None else 'each'}".encode()
    key = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
    if index is None:
        index = torch.zeros(1, dtype=torch.int64)
    starts = _mixed(index.to(device).mul(_GAMMA).add_(key)).unsqueeze(1)
    count = math.prod(shape)
    pairs = (count + 1) // 2
    steps = _mixed(torch.arange(pairs, device=device).mul_(_GAMMA))
    words = torch.empty(len(starts), pairs, dtype=torch.int64, device=device)
    rows = max(1, _PIECE // max(1, pairs)) if device.type == "cpu" else len(starts)
    for start, made in zip(torch.split(starts, rows), torch.split(words, rows), strict=True):
        _mixed(torch.add(start, steps, out=made))
    return words.view(torch.int32)[:, :count].reshape(len(starts), *shape)


_INDEXED, _MASKED = ("index", "index_put"), ("masked_select", "masked_scatter")
_WITHIN = ("gather", "scatter", "scatter_add")  # entries within each row, along another axis
_PICKS = {*_INDEXED, *_MASKED, *_WITHIN, "index_select", "index_add", "index_copy", "embedding"}


def _choice(func: Any, args: Any, n: int) -> Tensor | None:
    """Return the index tensor that selects among rows of n samples, or None."""
    kind = kind_of(func)
    if kind not in _PICKS or n == 1 or isinstance(args[0], nn.Parameter):
        return None
    own, rows = args[0], args[1]
    axes = range(own.dim())
    if kind in _INDEXED:
        first, rows = next((k, t) for k, t in enumerate(rows) if t is not None)
        axes = axes[first:][: rows.dim() if rows.dtype == torch.bool else 1]
        if kind == "index_put" and args[2].numel() == 1:  # the same value for all selected rows
            return None
    elif kind == "embedding":
        axes = axes[:1]
    elif kind not in _MASKED:
        axes, rows = axes[args[1] :][:1], args[2]
    divided = [k for k, size in enumerate(own.shape) if size % n == 0]
    may = any(k in axes for k in (divided[:1] if kind in _WITHIN else divided))
    return rows if may and type(rows) is Tensor and not rows.is_meta else None


def _undrawn(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation that may draw; raise if it does."""
    with forked():
        reads = states()
        before = [read() for read in reads]
        result = func(*args, **kwargs)
        if all(torch.equal(a, read()) for a, read in zip(before, reads, strict=True)):
            return result
    raise UnsupportedError(
        f"the random numbers of {kind_of(func)} cannot be fixed for each sample",
        remedy="Draw them by torch.rand, randn, bernoulli and the like, or outside the model, and "
        f"pass them as inputs. Otherwise: {EVAL}",
    )
