"""Transforms that differentiate the per-sample gradient once more."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradscope.blocks import DenseBlock, Gradients
from gradscope.core.batch import Batch
from gradscope.core.independence import require_independent
from gradscope.core.locate import first_line, layer_of
from gradscope.core.problem import Problem
from gradscope.errors import CoupledSamplesError, GradscopeError, SpecError, UnsupportedError
from gradscope.transforms.base import NeedsProblem, Scope, Transform, Vector, transform

Loss = Callable[[int], Tensor]


@transform("hvp", Scope.VECTOR)
def hvp(with_: Vector | None = None) -> NeedsProblem:
    """T(g) = Hᵢ gᵢ = ½∇‖gᵢ‖², Hᵢ the Hessian of the sample's own loss; with a stored v, Hᵢ v.

    Without a vector each sample's is what reaches this stage: `clip:max_norm=1 | hvp` is Hᵢ times
    the clipped gradient. Exact, by two backward passes a sample (Pearlmutter 1994); of complex
    parameters real and imaginary parts count as coordinates of their own. A parameter that the
    gradient does not depend on gets zeros.

    Args:
        with_: A stored v, argument `with=FILE.h5:CHAIN`.
    """

    def given(problem: Problem, batch: Batch) -> Transform:
        def apply(gradients: Gradients) -> Gradients:
            _require_parameters(problem, gradients)
            loss = _own_loss(problem, batch)
            shared = None if with_ is None else with_.of(gradients)
            rows = {k: p.new_empty(len(batch), *p.shape) for k, p in problem.parameters.items()}
            for i in range(len(batch)):
                one = gradients.select(slice(i, i + 1))
                vector = shared or {name: block.dense()[0] for name, block in one.items()}
                for name, row in _product(problem, loss, i, vector).items():
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


def _own_loss(problem: Problem, batch: Batch) -> Loss:
    """Return the loss of sample i with its graph: alone, or in its batch if that makes it."""
    try:
        require_independent(problem, batch)
    except CoupledSamplesError:  # the run was allowed to go on with own-loss gradients
        return lambda i: problem.losses(batch)[i]
    return lambda i: problem.losses(batch.one(i))[0]


def _product(
    problem: Problem, loss: Loss, i: int, vector: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return {name: (Hᵢ v) (*shape)}: the gradient of ⟨gᵢ, v⟩, v held fixed."""
    parameters = list(problem.parameters.values())
    with _twice_differentiable(problem), torch.enable_grad():
        value = loss(i)
        slopes = _gradients(value, parameters, create_graph=True)
        pairs = zip(problem.parameters, slopes, strict=True)
        along = torch.stack([_real_product(g, vector[name]) for name, g in pairs]).sum()
        found = _gradients(along, parameters)
    return {name: g.detach() for name, g in zip(problem.parameters, found, strict=True)}


def _gradients(
    value: Tensor, parameters: list[torch.nn.Parameter], *, create_graph: bool = False
) -> list[Tensor]:
    """Return ∂value/∂p for each parameter, dense, zeros where it is not reached."""
    if not value.requires_grad:
        return [torch.zeros_like(p) for p in parameters]
    found = torch.autograd.grad(
        value, parameters, create_graph=create_graph, allow_unused=True, materialize_grads=True
    )
    return [g.to_dense() if g.is_sparse else g for g in found]


def _real_product(gradient: Tensor, vector: Tensor) -> Tensor:
    """Return Re Σ g · conj(v) in float64."""
    dtype = torch.promote_types(gradient.dtype, torch.float64)
    return (gradient.to(dtype) * vector.to(dtype).conj()).sum().real


@contextmanager
def _twice_differentiable(problem: Problem) -> Iterator[None]:
    """Keep to kernels that have a second derivative, and name the layer where there is none."""
    no_onednn = torch.backends.mkldnn.flags(enabled=False)
    no_cudnn = torch.backends.cudnn.flags(enabled=False)
    try:
        with no_onednn, no_cudnn, sdpa_kernel(SDPBackend.MATH):
            yield
    except (GradscopeError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # whatever torch or the user's code raises
        raise UnsupportedError(
            f"hvp cannot differentiate this model twice: {first_line(error)}",
            where=layer_of(error, problem.model),
            remedy="Use operations whose backward pass can itself be differentiated.",
        ) from error
