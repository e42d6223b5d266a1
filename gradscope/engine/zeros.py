"""Notes about zero gradients, of parameters that are in the graph of a loss or not."""

from collections.abc import Sequence

import torch

from gradscope.core.batch import Batch
from gradscope.core.texts import listed
from gradscope.engine.certificate import Certificate
from gradscope.model.problem import Problem

NOTHING = "nothing is proved: every gradient is zero"
NONE_FINITE = "nothing is proved: no gradient is finite"


def unreached(problem: Problem, batch: Batch, names: Sequence[str]) -> tuple[str, ...]:
    """Return the parameters, among `names`, that are not in the graph of a batch's losses."""
    losses = problem.losses(batch)
    if not names or not losses.requires_grad:
        return tuple(names)
    inputs = [problem.parameters[name] for name in names]
    found = torch.autograd.grad(losses.sum(), inputs, retain_graph=True, allow_unused=True)
    return tuple(name for name, gradient in zip(names, found, strict=True) if gradient is None)


def zero_notes(problem: Problem, batch: Batch, proof: Certificate) -> list[str]:
    """Return the notes about parameters whose gradients are all zero in a proved batch.

    Args:
        problem: The model and its loss.
        batch: The proved samples (or tokens).
        proof: The certificate of the batch.
    """
    lost = unreached(problem, batch, proof.unused) if proof.unused else ()
    still = [name for name in proof.unused if name not in lost]
    which = batch.sample_batch.description
    nothing = NONE_FINITE if proof.nonfinite == proof.samples else NOTHING
    notes = [] if proof.proves else [f"{nothing} ({which})"]
    if lost:
        notes.append(
            f"no loss of {which} depends on {listed(lost)}: the gradient is zero. If it should be "
            "trained, look for detach, for a value cached under torch.no_grad, and for a branch "
            "that none of these samples uses"
        )
    if still and proof.proves:
        notes.append(
            f"the losses of {which} depend on {listed(still)}, but each gradient is exactly zero"
        )
    return notes
