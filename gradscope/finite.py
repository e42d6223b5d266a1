"""What is done with samples whose gradient is not finite."""

from typing import Literal

from gradscope.blocks import Evaluation, Gradients
from gradscope.core.batch import Batch
from gradscope.core.problem import Problem
from gradscope.engine import finite_samples
from gradscope.errors import NonFiniteError
from gradscope.stages.labels import chosen, over_labels

NonFinite = Literal["skip", "fail", "keep"]


class NonFiniteWarning(UserWarning):
    """Samples without a finite gradient were left out of an expectation."""


def usable(
    evaluation: Evaluation, problem: Problem, batch: Batch, nonfinite: NonFinite
) -> tuple[Gradients, Problem, Batch] | None:
    """Return what chains reduce of a batch: the samples with a finite gradient, or None.

    Args:
        evaluation: Of the batch.
        problem: What was evaluated.
        batch: The samples, against their labels.
        nonfinite: "skip" leaves out samples that are not finite, "fail" raises, "keep" keeps them.

    Raises:
        NonFiniteError: One is not finite, and `nonfinite` is "fail".
    """
    if nonfinite == "keep":
        return evaluation.gradients, problem, batch
    finite = over_labels(finite_samples(evaluation), batch)
    if bool(finite.all()):
        return evaluation.gradients, problem, batch
    if nonfinite == "fail":
        worst = int(batch.index[int((~finite).nonzero()[0])])
        raise NonFiniteError(
            "its gradient is not finite",
            where=f"sample {worst}",
            remedy="Use nonfinite skip to leave such samples out, or keep to keep them.",
        )
    if not bool(finite.any()):
        return None
    return evaluation.gradients.select(finite), problem, chosen(batch, finite.cpu())
