"""The reference: gradscope's loop in float64, one sample at a time, and how far off a result is."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from benchmarks.workloads import LOSS, Workload
from gradscope.backends.loop import one_sample
from gradscope.core.batch import Batch
from gradscope.core.problem import Problem
from gradscope.stages.losses import resolve

TOLERANCE = 1e-4
_FLOOR = 1e-2  # a parameter below this share of the whole is rounding noise
_ROWS = 4

Result = Mapping[str, Tensor]


@dataclass(frozen=True)
class Reference:
    """What is right, in float64.

    Attributes:
        problem: The model in float64.
        batch: The samples `rows`, in float64.
        rows: Positions (k,) of the samples whose gradients are kept.
        gradients: {name: (k, *shape)} of these samples.
        norms: (n,), of all samples, as everything below.
        max_norm: What the clipping task clips to: some samples are above it and some below.
        mean: {name: (*shape)}.
        second: {name: (*shape)}, the mean of the squares.
        clipped: {name: (*shape)}, the mean of the clipped gradients.
    """

    problem: Problem
    batch: Batch
    rows: Tensor
    gradients: dict[str, Tensor]
    norms: Tensor
    max_norm: float
    mean: dict[str, Tensor]
    second: dict[str, Tensor]
    clipped: dict[str, Tensor]


def reference(workload: Workload) -> Reference:
    """Go through the samples one by one."""
    problem = Problem.of(workload.model, resolve(LOSS)).converted(torch.float64)
    whole = Batch.of(workload.inputs, workload.targets).to(None, torch.float64)
    rows = torch.linspace(0, workload.n - 1, min(_ROWS, workload.n)).round().long()
    few = [one_sample(problem, whole.one(int(i)))[1] for i in rows]
    max_norm = float(f"{float(torch.stack([_norm(g) for g in few]).mean()):.3g}")
    zero = {name: torch.zeros_like(p) for name, p in problem.parameters.items()}
    mean, second, clipped = ({k: v.clone() for k, v in zero.items()} for _ in range(3))
    norms = []
    for i in range(workload.n):
        gradient = one_sample(problem, whole.one(i))[1]
        norms.append(_norm(gradient))
        factor = min(1.0, max_norm / float(norms[-1])) / workload.n
        for name, g in gradient.items():
            mean[name].add_(g, alpha=1 / workload.n)
            second[name].addcmul_(g, g, value=1 / workload.n)
            clipped[name].add_(g, alpha=factor)
    return Reference(
        problem=problem,
        batch=whole.select(rows),
        rows=rows,
        gradients={name: torch.stack([g[name] for g in few]) for name in zero},
        norms=torch.stack(norms),
        max_norm=max_norm,
        mean=_detached(mean),
        second=_detached(second),
        clipped=_detached(clipped),
    )


def error(found: Result, expected: Result, *, by_row: bool) -> float:
    """Return the largest relative error over parameters (and rows); infinite if one is missing.

    Args:
        found: {name: array}.
        expected: Likewise, float64.
        by_row: The first axis counts samples, each of which must be right by itself.
    """
    if set(found) != set(expected):
        return inf
    wanted = {k: _matrix(v, by_row) for k, v in expected.items()}
    whole = torch.stack([v.square().sum(1) for v in wanted.values()]).sum(0).sqrt()
    worst = 0.0
    for name, right in wanted.items():
        if tuple(found[name].shape) != tuple(expected[name].shape):
            return inf
        given = _matrix(found[name].detach().to(right), by_row)
        scale = torch.maximum(right.norm(dim=1), _FLOOR * whole).clamp(min=1e-30)
        off = (given - right).norm(dim=1) / scale
        worst = max(worst, float(off.nan_to_num(nan=inf).max()))
    return worst


def _matrix(t: Tensor, by_row: bool) -> Tensor:
    return t.reshape(t.shape[0] if by_row else 1, -1)


def _norm(gradient: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([g.square().sum() for g in gradient.values()]).sum().sqrt()


def _detached(tree: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in tree.items()}
