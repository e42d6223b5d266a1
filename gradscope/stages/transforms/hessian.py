"""Transforms that differentiate the per-sample gradient once more."""

from gradscope.blocks import DenseBlock, Gradients
from gradscope.core.batch import Batch
from gradscope.core.independence import require_independent
from gradscope.core.problem import Problem
from gradscope.errors import CoupledSamplesError, SpecError
from gradscope.stages.transforms.base import NeedsProblem, Scope, Transform, Vector, transform
from gradscope.stages.transforms.curvature import SampleLoss, product


@transform("hvp", Scope.VECTOR)
def hvp(with_: Vector | None = None) -> NeedsProblem:
    """T(g) = Hᵢ gᵢ = ½∇‖gᵢ‖², Hᵢ the Hessian of the sample's own loss; with a stored v, Hᵢ v.

    Without a vector each sample's is what reaches this stage: `clip:max_norm=1 | hvp` is Hᵢ times
    the clipped gradient. Exact, by two backward passes a sample (Pearlmutter 1994); of complex
    parameters real and imaginary parts count as coordinates of their own. A parameter that the
    gradient does not depend on gets zeros. Where samples are coupled, and own-loss gradients were
    asked for, Hᵢ is that of the sample's loss within its batch.

    Args:
        with_: A stored v, argument `with=FILE.h5:CHAIN`.
    """

    def given(problem: Problem, batch: Batch) -> Transform:
        def apply(gradients: Gradients) -> Gradients:
            _require_parameters(problem, gradients)
            alone = _independent(problem, batch)
            shared = None if with_ is None else with_.of(gradients)
            rows = {k: p.new_empty(len(batch), *p.shape) for k, p in problem.parameters.items()}
            for i in range(len(batch)):
                one = gradients.select(slice(i, i + 1))
                vector = shared or {name: block.dense()[0] for name, block in one.items()}
                sample = (batch.one(i), 0) if alone else (batch, i)
                for name, row in product(SampleLoss(problem, *sample), vector).items():
                    rows[name][i] = row
            return gradients.of({name: DenseBlock(value) for name, value in rows.items()})

        return apply

    return NeedsProblem(given)


def _require_parameters(problem: Problem, gradients: Gradients) -> None:
    shapes = {name: tuple(p.shape) for name, p in problem.parameters.items()}
    found = {name: block.shape for name, block in gradients.items()}
    if found != shapes:
        raise SpecError(
            f"hvp needs one vector entry for each parameter, and is given {', '.join(found)}",
            where="chain",
            remedy="Put hvp before stages such as norm, dot or project.",
        )


def _independent(problem: Problem, batch: Batch) -> bool:
    """Whether a sample's loss is the same alone; if not, own-loss gradients were asked for."""
    try:
        require_independent(problem, batch)
    except CoupledSamplesError:
        return False
    return True
