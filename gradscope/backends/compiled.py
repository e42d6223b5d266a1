"""`vmap`, compiled: a backend over another one, which it falls back on and is held against.

What compiling costs is weighed against what is left to do. A chosen backend is compiled for its
first batch; under `auto` the program is timed beside the plain backend, on the batch at hand, and
the faster is kept. Its first answer is held against the plain one, which is proved.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradscope.backends.base import AUTO, ROWS, Evaluate, Request, State
from gradscope.backends.programs import NotCompiledError, Program, Ranges, shape_of
from gradscope.blocks import Evaluation
from gradscope.core.batch import Batch
from gradscope.core.locate import first_line
from gradscope.core.problem import Problem
from gradscope.core.shortage import is_shortage
from gradscope.errors import CertificateError

_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_NEGLIGIBLE = 1e-2  # an entry is measured against at least this share of its kind
_FIXED, _EACH = 5.0, 0.5  # seconds that compiling takes, and each parameter adds, about
_GAIN = 0.5  # of the time that is left: what compiling gains at most, about
_PROGRAMS = 8  # at most
_COMES_AGAIN = 2  # times that a further shape has come when it is compiled
_REPEATS = 3

Key = tuple[tuple[bool, tuple[str, ...]], tuple[Any, ...]]
Clock = Callable[[], float]


def not_compiled(backend: str, verify: str, coupling: str) -> str | None:
    """Return why nothing can be compiled under these settings, or None."""
    if backend not in (AUTO, "vmap"):
        return f"{backend} has no compiled form; auto and vmap have"
    if coupling == "own-loss":
        return "own losses need one joint forward pass"
    if verify == "always":
        return "to prove every batch takes the uncompiled way"
    return None


class Compiled:
    """A backend that answers by compiled programs where it has them, else by the plain one.

    Args:
        problem: What is evaluated.
        plain: The uncompiled backend.
        notes: Takes what was done and why.
        faster: Keep only programs that are measured to be faster, and where there is time to gain.
        check: Hold a program's first answer against the plain one.
        clock: Returns seconds.
    """

    def __init__(
        self,
        problem: Problem,
        plain: Evaluate,
        notes: list[str],
        *,
        faster: bool,
        check: bool,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._problem, self._plain, self._notes = problem, plain, notes
        self._faster, self._check, self._clock = faster, check, clock
        self._able = True
        self._programs: dict[Key, Program | None] = {}
        self._met: Counter[Key] = Counter()
        self._ranges = Ranges()

    def __call__(self, batch: Batch, request: Request = ROWS, /) -> Evaluation:
        """Evaluate a batch by its program, if it has one."""
        if not self._able:
            return self._plain(batch, request)
        key = (request.rows, request.keys), shape_of(batch)
        program = self._programs.get(key)
        if program is not None and self._ranges.hold(batch):
            try:
                return program(batch)
            except Exception as error:  # whatever torch raises where a program does not serve
                if is_shortage(error):
                    raise
                self._programs[key] = None
                why = str(error) if isinstance(error, NotCompiledError) else first_line(error)
                self._notes.append(f"no longer compiled: {why}")
        right = self._plain(batch, request)
        self._ranges.widen(batch)
        if self._may_compile(key):
            self._programs[key] = None
            if self._pays(batch, request):
                self._programs[key] = self._made(batch, request, right)
        return right

    @property
    def in_use(self) -> bool:
        """Whether there is a program."""
        return any(program is not None for program in self._programs.values())

    def forget(self) -> None:
        """Let go of all programs."""
        self._programs.clear()
        self._met.clear()

    def require_equal(self, found: Evaluation, right: Evaluation, request: Request) -> None:
        """Hold a program's answer against the plain one; where they differ, use none any more.

        Raises:
            CertificateError: They differ.
        """
        off = distance(found, right, request, tuple(found.states))
        if not self._is_near(off):
            self._able = False
            self.forget()
            raise CertificateError(
                f"the compiled program is off by {off:.1e}",
                remedy="Leave --compile out.",
            )

    def _is_near(self, off: float) -> bool:
        return off <= _TOLERANCES.get(self._problem.dtype, 1e-8)

    def _may_compile(self, key: Key) -> bool:
        """Whether a program may be made; a batch of a second shape may be the last of its data.

        So its program waits until another of that shape comes.
        """
        self._met[key] += 1
        another = any(met == key[0] and shape != key[1] for met, shape in self._met)
        waits = another and self._met[key] < _COMES_AGAIN
        return not (key in self._programs or len(self._programs) >= _PROGRAMS or waits)

    def _pays(self, batch: Batch, request: Request) -> bool:
        """Whether what is left to do is long enough, so that compiling may shorten it."""
        left = None if request.left is None else request.left - 1
        if left is None or (left and not self._faster):
            return True
        seconds = left * self._seconds(self._plain, batch, request) if left else 0.0
        cost = _FIXED + _EACH * len(self._problem.parameters)
        if seconds * _GAIN >= cost:
            return True
        self._notes.append(
            f"not compiled: about {seconds:.2g} s are left to do, and compiling takes about "
            f"{cost:.0f} s"
        )
        return False

    def _made(self, batch: Batch, request: Request, right: Evaluation) -> Program | None:
        """Compile; return the program unless it is wrong, or slower where that counts."""
        begun = time.perf_counter()
        try:
            program = Program(self._problem, batch, request, self._plain)
        except NotCompiledError as error:
            self._able = False
            self._notes.append(f"not compiled: {error}")
            return None
        said = f"vmap compiled in {time.perf_counter() - begun:.1f} s"
        if self._check:
            off = distance(program(batch), right, request, program.keys)
            if not self._is_near(off):
                self._notes.append(f"not compiled: the program is off by {off:.1e}")
                return None
            said += f", equal to what is proved to {off:.0e}"
        self._notes += [f"{key}: not compiled: {why}" for key, why in program.outside.items()]
        if not self._faster:
            self._notes.append(said)
            return program
        seconds = [
            [self._seconds(way, batch, request) for way in (self._plain, program)]
            for _ in range(_REPEATS)  # in turns
        ]
        before, after = map(min, zip(*seconds, strict=True))
        kept = "is kept" if after < before else "is not kept"
        self._notes.append(
            f"{said}; it {kept}: {after * 1e3:.3g} ms a batch, uncompiled {before * 1e3:.3g} ms"
        )
        return program if after < before else None

    def _seconds(self, way: Callable[[Batch], Evaluation], batch: Batch, request: Request) -> float:
        """Return how long it takes to get all that is requested."""
        self._synchronize()
        start = self._clock()
        found = way(batch)
        _ = found.gradients.squared_norms
        request.starts([key for key in request.keys if key not in found.states], found.gradients)
        if request.rows:
            found.gradients.dense(request.out)
        self._synchronize()
        return self._clock() - start

    def _synchronize(self) -> None:
        if self._problem.device.type == "cuda":
            torch.cuda.synchronize(self._problem.device)


def distance(found: Evaluation, right: Evaluation, request: Request, keys: Sequence[str]) -> float:
    """Return the largest relative error of a program's answer; NaN where it cannot be known.

    Entries are measured together: a single activation at its kink may fall on either side.

    Args:
        found: The program's answer.
        right: The uncompiled one, for the same batch.
        request: What was asked for.
        keys: Of the reductions that the program contains.
    """
    errors = torch.tensor(list(_errors(found, right, request, keys)), dtype=torch.float64)
    return float(errors.max())  # a NaN is the largest


def _errors(
    found: Evaluation, right: Evaluation, request: Request, keys: Sequence[str]
) -> Iterator[float]:
    finite = right.losses.isfinite() & right.gradients.norms.isfinite()
    yield _relative(found.losses[finite], right.losses[finite])
    size = float(right.gradients.norms[finite].norm())
    for name, theirs in right.gradients.squared_norms.items():
        ours = found.gradients.squared_norms[name]
        yield _relative(ours[finite].sqrt(), theirs[finite].sqrt(), size)
    if bool(finite.all()) and keys:  # what is not finite is left out of every sum
        for key, state in request.starts(keys, right.gradients).items():
            yield from _errors_of_state(found.states.get(key, {}), state)
    if request.rows:
        for name, block in right.gradients.select(finite).items():
            row = found.gradients[name].select(finite).dense()
            yield _relative(row, block.dense(), size)


def _errors_of_state(ours: Mapping[str, Tensor], theirs: State) -> Iterator[float]:
    if ours.keys() != theirs.keys():
        yield float("nan")
        return
    kinds: dict[str, list[float]] = {}
    for key, value in theirs.items():
        kinds.setdefault(key.partition(":")[0], []).append(_size(value))
    for key, value in theirs.items():
        whole = kinds[key.partition(":")[0]]
        yield _relative(ours[key], value, float(torch.tensor(whole).norm()))


def _relative(ours: Tensor, theirs: Tensor, whole: float = 0.0) -> float:
    """Return ‖ours − theirs‖ relative to ‖theirs‖, or to a share of the whole it is part of."""
    if ours.shape != theirs.shape:
        return float("nan")
    gap = _size(_wide(ours) - _wide(theirs))
    scale = max(_size(theirs), _NEGLIGIBLE * whole)
    return gap / scale if scale else gap


def _size(t: Tensor) -> float:
    return float(_wide(t).norm())


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64)
