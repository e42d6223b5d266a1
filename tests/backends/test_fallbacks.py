"""Where `hooks` refuses, `auto` keeps the fastest of the remaining backends."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradscope import Scope
from gradscope.backends import vmap
from gradscope.backends.base import Request
from gradscope.blocks import Tuner
from gradscope.blocks.variants import known_of
from gradscope.core.batch import Batch
from gradscope.run import compute, prepare, start
from gradscope.storage import open_file
from tests import oracle
from tests.run import project

REFUSED = "hooks refused: the model runs different operations for different numbers of samples"
LEAST = "on the first batch at least"
MODEL = '''
import numpy as np, torch
from torch import nn


class ByCount(nn.Module):
    """Runs other operations for other numbers of samples, and does not run in float64."""

    def __init__(self, branches=False):
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)
        self.basis, self.branches = np.eye(5, dtype=np.float32), branches

    def forward(self, x):
        x = x @ torch.from_numpy(self.basis)
        for _ in range(len(x) % 3):
            x = x + 0
        if self.branches and x.sum() > 1e6:
            x = -x
        return self.last(self.first(x).tanh())


def build():
    return ByCount(True)


def loss(outputs, targets):
    return (outputs.sum(1) - targets).square()
'''
SPACE: dict[str, Any] = {}
exec(MODEL, SPACE)


class OneByOne(torch.nn.Module):
    """Computes one sample after the other, with one step for each positive entry."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.last = torch.nn.Linear(5, 5), torch.nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = []
        for sample in x:
            h = sample
            for _ in range(int((sample > 0).sum())):
                h = self.step(h).tanh()
            found.append(self.last(h))
        return torch.stack(found)


class Clock:
    """Measures nothing; `seconds` has the time of each backend for a batch of 16."""

    def __init__(self, **seconds: float) -> None:
        self.seconds, self.asked = seconds, list[tuple[str, int]]()
        self.orders: list[list[int]] = []  # of the samples in each timed call
        self.tuner = Tuner(timed=self.timed)

    def timed(self, run: Any, device: torch.device) -> tuple[float, Any]:
        name, part = run.func.__module__.split(".")[2], run.args[0]
        found, n = run(), len(part)
        self.asked.append((name, n))
        self.orders.append(part.index.tolist())
        return self.seconds[name] * (n / 16 if name == "loop" else 1), found


def scope_of(clock: Clock, branches: bool = False, **options: Any) -> tuple[Scope, Any, Any]:
    torch.manual_seed(0)
    scope = Scope(SPACE["ByCount"](branches), "cross_entropy", **options)
    scope.session.tuner = clock.tuner
    return scope, torch.randn(16, 5), torch.randint(0, 3, (16,))


@pytest.mark.parametrize(
    ("seconds", "backend", "note", "asked"),
    [
        (
            {"vmap": 9.0, "expand": 3.0, "loop": 1.0},
            "loop",
            f"loop: {LEAST} 3.0 times faster than expand and 9.0 times faster than vmap",
            [("loop", 4), ("expand", 4), ("vmap", 4)],  # loop is faster than a part of the batch
        ),
        (
            {"vmap": 9.0, "expand": 2.0, "loop": 8.0},
            "expand",
            f"expand: {LEAST} 4.0 times faster than loop and 4.5 times faster than vmap",
            [("loop", 4), ("expand", 4), ("expand", 16), ("vmap", 4)],
        ),
        (
            {"vmap": 1.0, "expand": 0.95, "loop": 8.0},  # nearly as fast: the order is kept
            "vmap",
            f"vmap: {LEAST} 8.0 times faster than loop",
            [("loop", 4), ("expand", 4), ("expand", 16), ("vmap", 4)],
        ),
    ],
)
def test_the_fastest_is_kept(
    seconds: dict[str, float], backend: str, note: str, asked: list[tuple[str, int]]
) -> None:
    clock = Clock(**seconds)
    scope, x, y = scope_of(clock)
    with torch.no_grad():
        basis = scope.session.problem.model.basis
    found = scope.per_sample_gradients(x, y)
    assert (scope.backend, scope.certificate.backend) == (backend, backend)
    assert scope.notes == [REFUSED, note]
    assert [*dict.fromkeys(clock.asked)] == asked
    scope.session.problem.model.basis = basis.astype(np.float64)
    _, right = oracle.per_sample_gradients(scope.session.problem.model, oracle.cross_entropy, x, y)
    for name, rows in found.items():
        torch.testing.assert_close(rows.double(), right[name], rtol=1e-4, atol=1e-6)
    scope.session.problem.model.basis = basis
    calls = len(clock.asked)
    scope.norms(x, y)
    assert len(clock.asked) == calls  # measured once


@pytest.mark.parametrize("verify", ["first", "never"])
@pytest.mark.parametrize(
    ("seconds", "fastest"),
    [
        ({"hooks": 2.0, "expand": 9.0, "loop": 0.8}, "loop"),
        ({"hooks": 0.7, "expand": 9.0, "loop": 8.0}, "hooks"),
    ],
)
def test_an_analysis_of_single_samples_is_measured_too(
    seconds: dict[str, float], fastest: str, verify: Any
) -> None:
    """`hooks` can analyse a loop over samples, but takes many passes for each new program."""
    torch.manual_seed(0)
    clock, model = Clock(**seconds), OneByOne()
    scope = Scope(model, "cross_entropy", verify=verify)
    scope.session.tuner = clock.tuner
    x, y = torch.randn(16, 5), torch.randint(0, 3, (16,))
    for _ in range(2):
        found = scope.per_sample_gradients(x, y)
        assert scope.backend == fastest
        _, right = oracle.per_sample_gradients(model, oracle.cross_entropy, x, y)
        for name, rows in found.items():
            torch.testing.assert_close(rows.double(), right[name], rtol=1e-4, atol=1e-6)
        x, y = x.flip(0), y.flip(0)
    assert not any(note.startswith("hooks refused") for note in scope.notes)
    assert any(note.startswith(f"{fastest}: {LEAST} ") for note in scope.notes)
    calls = [order for call, order in zip(clock.asked, clock.orders, strict=True)
             if call == ("hooks", 4)]  # fmt: skip
    assert calls[:2] == [[0, 1, 2, 3], [3, 0, 1, 2]]  # another order is another program


def test_requested_factors_need_hooks() -> None:
    """The other backends form dense gradients, so `hooks` is kept although it is slower."""
    torch.manual_seed(0)
    clock = Clock(hooks=2.0, expand=9.0, loop=0.8)
    scope = Scope(OneByOne(), "cross_entropy")
    scope.session.tuner = clock.tuner
    batch = Batch(torch.randn(16, 5), torch.randint(0, 3, (16,)), torch.arange(16))
    scope.session.evaluate(batch, Request(factors=True))
    assert scope.backend == "hooks" and not clock.asked


def test_without_measurements_hooks_is_kept() -> None:
    torch.manual_seed(0)
    scope = Scope(OneByOne(), "cross_entropy")
    scope.session.tuner = Tuner(measures=False)
    scope.norms(torch.randn(16, 5), torch.randint(0, 3, (16,)))
    assert scope.backend == "hooks"


def test_close_times_are_measured_again() -> None:
    """The first times of `loop` are three times too long."""
    clock = Clock(vmap=0.02, expand=0.03, loop=0.012)
    scope, x, y = scope_of(clock)

    def timed(run: Any, device: torch.device) -> tuple[float, Any]:
        spent, found = clock.timed(run, device)
        busy = clock.asked[-1][0] == "loop" and ("vmap", 16) not in clock.asked
        return spent * (3 if busy else 1), found

    scope.session.tuner = Tuner(timed=timed)
    scope.norms(x, y)
    assert ("vmap", 16) in clock.asked
    assert scope.backend == "loop"


def test_a_backend_that_refuses_is_noted() -> None:
    scope, x, y = scope_of(Clock(expand=3.0, loop=1.5), branches=True)
    scope.norms(x, y)
    assert scope.backend == "loop"
    vmap_refused = (
        "vmap refused: the vmap backend cannot run this model: the model branches on values"
    )
    assert [note.partition(" of the data")[0] for note in scope.notes] == [
        vmap_refused,
        REFUSED,
        f"loop: {LEAST} 2.0 times faster than expand",
    ]


def test_a_backend_that_fails_its_proof_is_followed_by_the_next_fastest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scope, x, y = scope_of(Clock(vmap=1.0, expand=3.0, loop=2.0))
    monkeypatch.setattr(vmap, "dense_evaluation", wrong(vmap.dense_evaluation))
    scope.norms(x, y)
    assert scope.backend == "loop"
    assert [note.partition(": relative")[0] for note in scope.notes] == [
        REFUSED,
        f"vmap: {LEAST} 2.0 times faster than loop and 3.0 times faster than expand",
        "vmap refused: the vmap backend failed the proof of agreement",
        f"loop: {LEAST} 1.5 times faster than expand",
    ]


def wrong(build: Callable[..., Any]) -> Callable[..., Any]:
    def made(losses: Any, values: Any) -> Any:
        return build(losses, {name: 2 * value for name, value in values.items()})

    return made


def test_a_resumed_run_keeps_its_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the cache has another one by then: the file is the same to the last bit."""
    monkeypatch.setenv("GRADSCOPE_CACHE", str(tmp_path / "cache"))
    folder = project.write(tmp_path)
    (folder / "model.py").write_text(MODEL)
    model = SPACE["build"]()
    torch.save(model.state_dict(), folder / "weights.pt")
    cache = known_of(torch.device("cpu"))
    assert cache is not None

    def job(fastest: str, n: int = 8) -> Any:
        seconds = {"expand": 2.0, "loop": 2.0} | {fastest: 1.0}
        fact = {"way": fastest, "seconds": seconds}
        cache.put("backend for ByCount with 39 parameters, n≤8", fact, over=True)
        return prepare(project.spec(folder, dtype="float32", batch_size=n, cache=True))

    straight, path = tmp_path / "straight.h5", tmp_path / "broken.h5"
    compute(job("loop"), straight)
    with suppress(ZeroDivisionError), start(job("loop"), path) as run:
        for count, batch in enumerate(run.remaining()):
            run.add(batch)
            if count == 2:
                raise ZeroDivisionError
    compute(job("expand"), path, resume=True)
    assert path.read_bytes() == straight.read_bytes()
    with open_file(path) as file:
        assert file.certificate["backend"] == "loop"
        assert file.run["kernels"] == {"backend for ByCount with 39 parameters": "loop"}
    compute(job("expand"), path, overwrite=True)
    with open_file(path) as file:
        assert file.certificate["backend"] == "expand"
