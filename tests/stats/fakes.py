"""A result file in memory, made of plain per-sample gradients."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np


class FakeChain(dict):
    """Arrays by name, as `StoredChain` has them."""

    def __init__(self, text: str, arrays: dict[str, np.ndarray] | None = None, reduced=False):
        super().__init__(arrays or {})
        self.text, self.reduced = text, reduced


@dataclass(frozen=True)
class FakeFile:
    """The attributes of `GradientFile` that statistics use; rows are stored unless told not to."""

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
        return table if self.target is None else table | {"target": self.target}

    @property
    def norms(self) -> dict[str, np.ndarray]:
        return {
            name: np.linalg.norm(g.reshape(self.n, -1), axis=1)
            for name, g in self.gradients.items()
        }

    @property
    def norm_attributes(self) -> dict[str, dict[str, float]]:
        with np.errstate(all="ignore"):
            means = {
                name: g[self.finite].sum(0) / np.float64(self.finite.sum())
                for name, g in self.gradients.items()
            }
        return {k: {"mean_gradient_norm": float(np.linalg.norm(m))} for k, m in means.items()}


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
