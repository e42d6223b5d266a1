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
from gradscope.blocks import Tuner
from gradscope.blocks.variants import known_of
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


class Clock:
    """Measures nothing; `seconds` has the time of each backend for a batch of 16."""

    def __init__(self, **seconds: float) -> None:
        self.seconds, self.asked = seconds, list[tuple[str, int]]()
        self.tuner = Tuner(timed=self.timed)

    def timed(self, run: Any, device: torch.device) -> tuple[float, Any]:
        name, n = run.func.__module__.split(".")[2], len(run.args[0])
        self.asked.append((name, n))
        return self.seconds[name] * (n / 16 if name == "loop" else 1), run()


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
    assert clock.asked == asked
    scope.session.problem.model.basis = basis.astype(np.float64)
    _, right = oracle.per_sample_gradients(scope.session.problem.model, oracle.cross_entropy, x, y)
    for name, rows in found.items():
        torch.testing.assert_close(rows.double(), right[name], rtol=1e-4, atol=1e-6)
    scope.session.problem.model.basis = basis
    scope.norms(x, y)
    assert clock.asked == asked  # measured once


def test_a_backend_that_refuses_is_noted() -> None:
    scope, x, y = scope_of(Clock(expand=3.0, loop=1.5), branches=True)
    scope.norms(x, y)
    assert scope.backend == "loop"
    vmap_refused = "vmap refused: the vmap backend cannot run this model: RuntimeError: vmap"
    assert [": ".join(note.split(": ")[:4]) for note in scope.notes] == [
        REFUSED,
        vmap_refused,
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
