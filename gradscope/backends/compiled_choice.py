"""Whether to compile: what it costs against what is left to do, and what it gains by measurement.

A chosen backend is compiled for its first batch. Under `auto` the compiled program is timed beside
the uncompiled way, on the batch at hand, and the faster is kept. Its first answer is held against
the uncompiled one, which is proved.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gradscope.backends.auto import AUTO
from gradscope.backends.base import Evaluate
from gradscope.backends.compilation import NotCompiledError
from gradscope.backends.compiled import Computed, Program, Wanted, shape_of
from gradscope.backends.compiled_proof import distance
from gradscope.backends.compiled_ranges import Ranges
from gradscope.blocks import Evaluation
from gradscope.core.batch import Batch
from gradscope.core.locate import first_line
from gradscope.core.problem import Problem
from gradscope.core.shortage import is_shortage
from gradscope.errors import CertificateError

_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_FIXED, _EACH = 5.0, 0.5  # seconds that compiling takes, and each parameter adds, about
_GAIN = 0.5  # of the time that is left: what compiling gains at most, about
_PROGRAMS = 8  # of a scope, at most
_COMES_AGAIN = 2  # times that a further shape has come when it is compiled
_REPEATS = 3

Way = Callable[[], Evaluation]
Key = tuple[tuple[bool, tuple[str, ...]], tuple[Any, ...]]


@dataclass(frozen=True)
class Choice:
    """What a scope was asked.

    Attributes:
        wish: To compile.
        backend: The backend's name, or `auto`.
        verify: Which batches are proved.
        coupling: What is done with samples that depend on each other.
    """

    wish: bool
    backend: str
    verify: str
    coupling: str

    @property
    def against(self) -> str | None:
        """Why nothing can be compiled."""
        if self.backend not in (AUTO, "vmap"):
            return f"{self.backend} has no compiled form; auto and vmap have"
        if self.coupling == "own-loss":
            return "own losses need one joint forward pass"
        if self.verify == "always":
            return "to prove every batch takes the uncompiled way"
        return None


class Compiler:
    """The compiled programs of a problem.

    Args:
        problem: What is evaluated.
        choice: What was asked.
        notes: Takes what was done and why.

    Attributes:
        left: The number of batches to come, None where it is not known.
    """

    def __init__(self, problem: Problem, choice: Choice, notes: list[str]) -> None:
        self._problem, self._notes = problem, notes
        self._choose, self._check = choice.backend == AUTO, choice.verify != "never"
        self._able = choice.wish and choice.against is None
        self._programs: dict[Key, Program | None] = {}
        self._met: Counter[Key] = Counter()
        self._ranges = Ranges()
        self.left: int | None = None
        if choice.wish and choice.against is not None:
            notes.append(f"not compiled: {choice.against}")

    def evaluation(self, batch: Batch, wanted: Wanted, plain: Evaluate) -> Evaluation:
        """Evaluate a batch by its program, if it has one.

        Args:
            batch: The samples.
            wanted: What will be asked of their gradients.
            plain: The uncompiled way.
        """
        if not self._able:
            return plain(batch)
        if self.left is not None:
            self.left -= 1
        key = wanted.key, shape_of(batch)
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
        right = plain(batch)
        self._ranges.widen(batch)
        self._consider(batch, wanted, right, plain)
        return right

    def require_equal(self, found: Evaluation, right: Evaluation, wanted: Wanted) -> None:
        """Hold a program's answer against the uncompiled one.

        Raises:
            CertificateError: They differ. The programs are not used again.
        """
        assert isinstance(found.gradients, Computed)
        off = distance(found, right, wanted, found.gradients.states)
        if not off <= _TOLERANCES.get(self._problem.dtype, 1e-8):
            self._able = False
            self.forget()
            raise CertificateError(
                f"the compiled program is off by {off:.1e}",
                remedy="Leave --compile out.",
            )

    @property
    def in_use(self) -> bool:
        """Whether there is a program."""
        return any(program is not None for program in self._programs.values())

    def forget(self) -> None:
        """Let go of all programs."""
        self._programs.clear()
        self._met.clear()

    def _consider(self, batch: Batch, wanted: Wanted, right: Evaluation, plain: Evaluate) -> None:
        """Compile a program for batches such as this one, if it may pay.

        A batch of a second shape may be the last of its data: its program waits until another
        of that shape comes.
        """
        key = wanted.key, shape_of(batch)
        self._met[key] += 1
        another = any(met == wanted.key and shape != key[1] for met, shape in self._met)
        waits = another and self._met[key] < _COMES_AGAIN
        full = len(self._programs) >= _PROGRAMS
        if key in self._programs or full or waits:
            return
        self._programs[key] = None
        if self._pays(lambda: plain(batch), wanted):
            self._programs[key] = self._made(batch, wanted, right, plain)

    def _pays(self, way: Way, wanted: Wanted) -> bool:
        """Whether what is left to do is long enough, so that compiling may shorten it."""
        if self.left is None or (self.left and not self._choose):
            return True
        seconds = self.left * self._seconds(way, wanted) if self.left else 0.0
        cost = _FIXED + _EACH * len(self._problem.parameters)
        if seconds * _GAIN >= cost:
            return True
        self._notes.append(
            f"not compiled: about {seconds:.2g} s are left to do, and compiling takes about "
            f"{cost:.0f} s"
        )
        return False

    def _made(
        self, batch: Batch, wanted: Wanted, right: Evaluation, plain: Evaluate
    ) -> Program | None:
        """Compile; return the program unless it is wrong, or slower where that counts."""
        begun = time.perf_counter()
        try:
            program = Program(self._problem, batch, wanted, plain)
        except NotCompiledError as error:
            self._able = False
            self._notes.append(f"not compiled: {error}")
            return None
        said = f"vmap compiled in {time.perf_counter() - begun:.1f} s"
        if self._check:
            off = distance(program(batch), right, wanted, program.keys)
            if not off <= _TOLERANCES.get(self._problem.dtype, 1e-8):
                self._notes.append(f"not compiled: the program is off by {off:.1e}")
                return None
            said += f", equal to what is proved to {off:.0e}"
        self._notes += [f"{key}: not compiled: {why}" for key, why in program.outside.items()]
        if not self._choose:
            self._notes.append(said)
            return program
        before, after = self._timed(lambda: plain(batch), lambda: program(batch), wanted)
        faster = after < before
        kept = "is kept" if faster else "is not kept"
        self._notes.append(
            f"{said}; it {kept}: {after * 1e3:.3g} ms a batch, uncompiled {before * 1e3:.3g} ms"
        )
        return program if faster else None

    def _timed(self, before: Way, after: Way, wanted: Wanted) -> tuple[float, float]:
        """Return the least seconds of two ways, tried in turns."""
        both = [
            (self._seconds(before, wanted), self._seconds(after, wanted)) for _ in range(_REPEATS)
        ]
        return min(a for a, _ in both), min(b for _, b in both)

    def _seconds(self, way: Way, wanted: Wanted) -> float:
        """Return how long a way takes to all that is wanted."""
        self._synchronize()
        start = time.perf_counter()
        gradients = way().gradients
        _ = gradients.squared_norms
        wanted.starts([key for key in wanted.keys if gradients.computed(key) is None], gradients)
        if wanted.rows:
            gradients.dense(wanted.out)
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self._problem.device.type == "cuda":
            torch.cuda.synchronize(self._problem.device)
