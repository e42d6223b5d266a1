"""The oracle: the loop in float64, and what else the diagnosis wants to know of the batch."""

from math import prod

import torch
from torch import Tensor

from gradscope.backends import backends
from gradscope.blocks.base import as_rows
from gradscope.comparison.agreement import Oracle
from gradscope.core.batch import Batch, tensors
from gradscope.core.independence import COUPLED_REMEDY
from gradscope.core.problem import Problem
from gradscope.errors import CoupledSamplesError, ModelError

_SAME_LOSS = 1e-8


def oracle_of(problem: Problem, batch: Batch) -> Oracle:
    """Run the loop.

    Args:
        problem: In float64.
        batch: Likewise.

    Raises:
        CoupledSamplesError: The model runs on the batch, but not on one sample alone.
    """
    together = problem.losses(batch).detach()
    try:
        with backends.get("loop")(problem) as evaluate:
            evaluation = evaluate(batch)
    except ModelError as error:  # it ran on the batch
        raise CoupledSamplesError(
            f"on one sample alone {error.what}",
            where=error.where,
            remedy=COUPLED_REMEDY,
        ) from error
    gradients = evaluation.gradients.dense()
    norms = torch.stack([as_rows(g.abs().square()).sum(1) for g in gradients.values()])
    return Oracle(
        gradients=gradients,
        norms=torch.nan_to_num(norms.double().sum(0).sqrt(), nan=0.0, posinf=0.0),
        parameters={name: p.detach() for name, p in problem.parameters.items()},
        sizes=_sizes(batch),
        coupled=not _same(together, evaluation.losses),
    )


def _same(together: Tensor, alone: Tensor) -> bool:
    scale = float(alone[alone.isfinite()].abs().max()) if bool(alone.isfinite().any()) else 0.0
    return torch.allclose(together, alone, rtol=_SAME_LOSS, atol=_SAME_LOSS * scale, equal_nan=True)


def _sizes(batch: Batch) -> dict[int, str]:
    """Name the sizes that a mean within a sample may have divided by."""
    sizes: dict[int, str] = {}
    for what, tree in (("targets", batch.targets), ("inputs", batch.inputs)):
        for t in tensors(tree):
            shape = tuple(t.shape[1:])
            for axis, size in enumerate(shape, start=1):
                sizes.setdefault(size, f"the size of axis {axis} of the {what}")
            if len(shape) > 1:
                sizes.setdefault(prod(shape), f"the number of entries a sample of the {what}")
    return sizes
