"""Defects in scores: of a curvature, of products, of ranks."""

from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch

import gradscope
from tests.attribution import test_query_rank
from tests.mutants.base import Numbers, mutant

_DAMPING = 0.2


@dataclass(frozen=True)
class Scored:
    """Twelve training samples and three queries of a small model, one of them not finite."""

    def numbers(self) -> Numbers:
        sides = self._sides()
        found = {k: gradscope.attribute(*sides, k, _DAMPING) for k in ("identity", "fisher")}  # type: ignore[arg-type]
        best = found["identity"].helpful(0, 4)
        return {
            **{k: np.nan_to_num(v.values) for k, v in found.items()},
            "own": np.nan_to_num(found["fisher"].samples["self_influence"]),
            "helpful": best.places.astype(float),
        }

    def right(self) -> Numbers:
        return _right()

    def caught_by(self) -> str | None:
        return None

    @staticmethod
    def _sides() -> tuple[tuple[gradscope.Scope, torch.Tensor, torch.Tensor], ...]:
        model, x, y = _made()
        scope = gradscope.Scope(model, "mse")
        return (scope, x[:12], y[:12]), (scope, x[12:], y[12:])


def _made() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    x, y = torch.randn(15, 3, dtype=torch.float64), torch.randn(15, 2, dtype=torch.float64)
    x[4] = torch.nan
    return model.double(), x, y


@cache
def _right() -> Numbers:
    model, x, y = _made()
    rows = []
    for one, target in zip(x, y, strict=True):
        loss = (model(one) - target).square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in grads]).nan_to_num().numpy())
    g, q = np.stack(rows[:12]), np.stack(rows[12:])
    fisher = g.T @ g / 11
    root = fisher + _DAMPING * np.trace(fisher) / 11 * np.eye(len(fisher))
    solved = np.linalg.solve(root, g.T)
    scores = {"identity": q @ g.T / 11, "fisher": q @ solved / 11}
    own = np.where(np.arange(12) == 4, 0.0, np.diag(g @ solved) / 11)
    order = np.argsort(-np.where(np.arange(12) == 4, -np.inf, scores["identity"][0]))
    return {**scores, "own": own, "helpful": order[:4].astype(float)}


def _test() -> None:
    found, wanted = Scored().numbers(), _right()
    for name, values in wanted.items():
        assert np.allclose(found[name], values, atol=1e-9 * np.abs(values).max()), name


scored = partial(mutant, scenario=Scored(), guard="tests", test=_test)

scored(
    "attribution/scoring.py",
    "sum for mean: scores are not divided by the number of training samples",
    "found = steps.after(products) / n",
    "found = steps.after(products)",
)
scored(
    "attribution/curvature.py",
    "twice the damping: what is added to the Fisher matrix is not what was asked for",
    "matrix.diagonal().add_(damping)",
    "matrix.diagonal().add_(2 * damping)",
)
scored(
    "attribution/curvature.py",
    "all samples counted: the Gram matrix is divided by those that were left out, too",
    "return damped_root(self.products / self.n, self.damping)",
    "return damped_root(self.products / len(self.products), self.damping)",
)
scored(
    "attribution/products.py",
    "one factor: products of outer products are those of their left factors alone",
    "pairs *= own[1][:, rows].flatten(1, 2) @ others[1]",
    "pairs *= 1.0",
)
scored(
    "attribution/products.py",
    "dense twice: products of dense rows are counted twice",
    "out[rows, samples] += mine.to(dtype) @ other",
    "out[rows, samples] += 2 * mine.to(dtype) @ other",
)
scored(
    "attribution/scores.py",
    "helpful is harmful: the samples with the lowest scores come first",
    "return self._best(query, k, -1.0)",
    "return self._best(query, k, 1.0)",
)


@dataclass(frozen=True)
class Truncated:
    """Five queries whose matrices are kept as two outer products, with EK-FAC."""

    def numbers(self) -> Numbers:
        found = test_query_rank.attributed("ekfac", 2)
        return {"scores": np.asarray(found.values), "dropped": found.queries["truncation"]}

    def right(self) -> Numbers:
        return _truncated()

    def caught_by(self) -> str | None:
        return None


@cache
def _truncated() -> Numbers:
    rows, dropped = test_query_rank.preconditioned("ekfac", 2)
    return {"scores": test_query_rank.scores_of(rows), "dropped": dropped}


def _test_truncated() -> None:
    found, wanted = Truncated().numbers(), _truncated()
    for name, values in wanted.items():
        assert np.allclose(found[name], values, atol=1e-7 * np.abs(values).max()), name


truncated = partial(mutant, scenario=Truncated(), guard="tests", test=_test_truncated)

truncated(
    "attribution/curvature.py",
    "smallest directions kept: a matrix of low rank has the smallest singular values",
    "short = vectors[:, -rank:].to(own)",
    "short = vectors[:, :rank].to(own)",
)
truncated(
    "attribution/curvature.py",
    "kept for dropped: the share that a low rank drops is of what it keeps",
    "dropped[i] += values[:-rank]",
    "dropped[i] += values[-rank:]",
)
truncated(
    "attribution/curvature.py",
    "factors not turned back: the columns of a matrix of low rank stay in the eigenbasis",
    "right @ self.basis.a.mT.to(right)",
    "right",
)
truncated(
    "blocks/layers.py",
    "bias without its columns: the bias of a matrix of low rank is the sum of its left factors",
    "bias = column.mT @ left",
    "bias = left.sum(2)",
)
