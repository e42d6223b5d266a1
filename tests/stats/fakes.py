"""A result file in memory, made of plain per-sample gradients."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from gradscope.blocks import Block, DenseBlock


class FakeArray(np.ndarray):
    """An array in memory that is read as a `StoredArray`."""

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.itemsize

    def block(self, start: int, stop: int) -> Block:
        return DenseBlock(torch.from_numpy(np.asarray(self)[start:stop]))


class FakeChain(dict):
    """Arrays by name, as `StoredChain` has them."""

    def __init__(self, text: str, arrays: dict[str, np.ndarray] | None = None, reduced=False):
        super().__init__({k: np.asarray(v).view(FakeArray) for k, v in (arrays or {}).items()})
        self.text, self.reduced = text, reduced


@dataclass(frozen=True)
class FakeFile:
    """What statistics use of a `GradientFile`; `samples`, `norms`, ... are made of the gradients.

    Rows are stored unless told not to; `wrong` replaces what is made: {"norms": {"w": ...}}.
    """

    gradients: dict[str, np.ndarray]  # (N, *shape) each, float64
    loss: np.ndarray
    target: np.ndarray | None = None
    index: np.ndarray | None = None
    path: str = "fake.h5"
    run: dict[str, Any] = field(default_factory=lambda: {"backend": "hooks"})
    certificate: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    rows: bool = True
    more: tuple[FakeChain, ...] = ()
    states: dict[str, Any] = field(default_factory=dict)
    wrong: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def chains(self) -> tuple[FakeChain, ...]:
        rows = (FakeChain("identity", self.gradients),) if self.rows else ()
        return (*rows, *self.more)

    @property
    def n(self) -> int:
        return len(self.loss)

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        return {name: g.shape[1:] for name, g in self.gradients.items()}

    @property
    def flat(self) -> np.ndarray:
        """(N, P)."""
        return np.concatenate([g.reshape(self.n, -1) for g in self.gradients.values()], axis=1)

    @property
    def finite(self) -> np.ndarray:
        return np.isfinite(self.flat).all(1) & np.isfinite(self.loss)

    @property
    def samples(self) -> dict[str, np.ndarray]:
        table = {
            "index": np.arange(self.n) if self.index is None else self.index,
            "loss": self.loss,
            "norm": np.linalg.norm(self.flat, axis=1),
            "finite": self.finite,
        }
        target = {} if self.target is None else {"target": self.target}
        return table | target | self.wrong.get("samples", {})

    @property
    def norms(self) -> dict[str, np.ndarray]:
        flat = {name: g.reshape(self.n, -1) for name, g in self.gradients.items()}
        found = {name: np.linalg.norm(g, axis=1) for name, g in flat.items()}
        return found | self.wrong.get("norms", {})

    @property
    def means(self) -> dict[str, np.ndarray]:
        with np.errstate(all="ignore"):
            n = np.float64(self.finite.sum())
            return {name: g[self.finite].sum(0) / n for name, g in self.gradients.items()}

    @property
    def norm_attributes(self) -> dict[str, dict[str, float]]:
        found = {k: {"mean_gradient_norm": float(np.linalg.norm(m))} for k, m in self.means.items()}
        return found | self.wrong.get("norm_attributes", {})

    def chain(self, name: str) -> FakeChain:
        """A chain that a file may hold in place of the rows."""
        g, mean = self.flat, self.flat.mean(0)
        second = {k: np.mean(v**2, 0) for k, v in self.gradients.items()}
        with np.errstate(invalid="ignore"):
            along = g @ mean / np.linalg.norm(g, axis=1) / np.linalg.norm(mean)
        return {
            "gram": FakeChain("gram", {"gram": g @ g.T}, True),
            "cosine": FakeChain("cosine:to=mean", {"cosine": along}),
            "mean": FakeChain("mean", self.means, True),
            "second": FakeChain("second_moment", second, True),
            "project": FakeChain("project:dim=6", {"project": g[:, :6]}),
        }[name]

    def holding(self, *names: str) -> "FakeFile":
        """The same file with these chains; "rows" are the gradients themselves."""
        more = tuple(self.chain(name) for name in names if name != "rows")
        return replace(self, rows="rows" in names, more=more)


SHAPES = {"[conv1].weight": (4, 3, 3), "[conv1].bias": (4,), "fc.weight": (5, 6), "scale": ()}


def fake(n: int = 40, seed: int = 0, broken: tuple[int, ...] = (), **changes: Any) -> FakeFile:
    """Random gradients of uneven size, with NaN in the samples `broken`."""
    rng = np.random.default_rng(seed)
    size = np.exp(rng.normal(size=n))
    gradients = {}
    for k, (name, shape) in enumerate(SHAPES.items()):
        g = rng.normal(0.3, 1.0, size=(n, *shape)) * 10.0**-k
        gradients[name] = g * size.reshape(n, *[1] * len(shape))
    gradients["scale"][list(broken)] = np.nan
    given: dict[str, Any] = {
        "gradients": gradients,
        "loss": size + rng.random(n),
        "target": rng.integers(0, 10, n),
        "index": np.arange(n) * 3 + 100,
    }
    return FakeFile(**(given | changes))


def plain(g: np.ndarray, **changes: Any) -> FakeFile:
    """A file of one parameter "w" with gradients (N, ...)."""
    return FakeFile(**({"gradients": {"w": g}, "loss": np.ones(len(g))} | changes))


def assert_holds(found: Any, expected: Any, rel: float = 1e-9) -> None:
    """A document has what is expected, numbers to the order in which they were added."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            assert_holds(found[key], value, rel)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_holds(one, other, rel)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=rel, abs=1e-10)
    else:
        assert found == expected
