"""The reference: gradscope's loop in float64, one sample at a time, and how far off a result is."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from benchmarks.workloads import LOSS, Workload
from gradscope.backends.loop import one_sample
from gradscope.core.batch import Batch
from gradscope.model.problem import Problem
from gradscope.stages.losses import resolve

_FLOOR = 1e-2  # a parameter below this share of the whole is rounding noise
_ROWS, _ROWS_OF_REAL = 4, 2

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
        mean: {name: (*shape)}; nothing at real sizes, as below.
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
    """Go through the samples one by one.

    At real sizes no moments are kept, and fewer rows, in float32: they have 10^8 numbers each.
    """
    real = workload.family.real
    problem = Problem.of(workload.model, resolve(LOSS)).converted(torch.float64)
    whole = Batch.of(workload.inputs, workload.targets).to(None, torch.float64)
    rows = kept_rows(workload)
    few = [one_sample(problem, whole.one(int(i)))[1] for i in rows]
    max_norm = float(f"{float(torch.stack([_norm(g) for g in few]).mean()):.3g}")
    if real:
        few = [{name: g.float() for name, g in row.items()} for row in few]
    clipped = _zeros(problem)
    mean, second = ({} if real else _zeros(problem) for _ in range(2))
    norms = []
    for i in range(workload.n):
        gradient = one_sample(problem, whole.one(i))[1]
        norms.append(_norm(gradient))
        factor = min(1.0, max_norm / float(norms[-1])) / workload.n
        for name, g in gradient.items():
            if not real:
                mean[name].add_(g, alpha=1 / workload.n)
                second[name].addcmul_(g, g, value=1 / workload.n)
            clipped[name].add_(g, alpha=factor)
    return Reference(
        problem=problem,
        batch=whole.select(rows),
        rows=rows,
        gradients={name: torch.stack([g[name] for g in few]) for name in clipped},
        norms=torch.stack(norms),
        max_norm=max_norm,
        mean=_detached(mean),
        second=_detached(second),
        clipped=_detached(clipped),
    )


def kept_rows(workload: Workload) -> Tensor:
    """Return the positions (k,) of the samples whose gradients a reference keeps."""
    count = min(_ROWS_OF_REAL if workload.family.real else _ROWS, workload.n)
    return torch.linspace(0, workload.n - 1, count).round().long()


def error(found: Result, expected: Result, *, by_row: bool, floor: float = _FLOOR) -> float:
    """Return the largest relative error over parameters (and rows); infinite if one is missing.

    Args:
        found: {name: array}.
        expected: Likewise, float64.
        by_row: The first axis counts samples, each of which must be right by itself.
        floor: A parameter below this share of the whole gradient is measured by this share.
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
        scale = torch.maximum(right.norm(dim=1), floor * whole).clamp(min=1e-30)
        off = (given - right).norm(dim=1) / scale
        worst = max(worst, float(off.nan_to_num(nan=inf).max()))
    return worst


def _matrix(t: Tensor, by_row: bool) -> Tensor:
    return t.reshape(t.shape[0] if by_row else 1, -1)


def _norm(gradient: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([g.square().sum() for g in gradient.values()]).sum().sqrt()


def _zeros(problem: Problem) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) for name, p in problem.parameters.items()}


def _detached(tree: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in tree.items()}
