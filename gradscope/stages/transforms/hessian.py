"""The Hessian-vector product of one sample's loss: exact, or an error.

Double backward passes can be wrong silently in two ways. First, a custom function may have a
backward pass that cannot be differentiated. It leaves an error node in the graph, and autograd
skips this node on the way to parameters behind it. Second, a custom function may save an
intermediate value, which is then treated as a constant. gradscope therefore searches the graph for
error nodes. If the graph has custom functions, it also compares the product with differences of
gradients in float64.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradscope.backends.hooks.graph import internals
from gradscope.blocks import DenseBlock, Gradients
from gradscope.core.batch import Batch
from gradscope.core.precision import wider
from gradscope.errors import CoupledSamplesError, SpecError, UnsupportedError
from gradscope.model.independence import require_independent
from gradscope.model.locate import unsupported
from gradscope.model.problem import Problem, unfused
from gradscope.model.releases import require
from gradscope.stages.transforms.base import (
    NeedsProblem,
    Transform,
    TransformScope,
    Vector,
    transform,
)

_ERROR_NODE = "Error"
_STEP = 1e-5  # step of the differences of gradients, relative to the length of the parameters
_TOLERANCE = 1e-4  # relative to the product: a difference loses about half the digits


@transform("hvp", TransformScope.VECTOR)
def hvp(with_: Vector | None = None) -> NeedsProblem:
    """T(g) = Hᵢ gᵢ = ½∇‖gᵢ‖², Hᵢ the Hessian of the sample's own loss; with a stored v, Hᵢ v.

    Without a stored vector, Hᵢ is multiplied by this stage's input: `clip:max_norm=1 | hvp` is Hᵢ
    times the clipped gradient. The product is exact and takes two backward passes a sample
    (Pearlmutter 1994). Real and imaginary parts of complex parameters are separate coordinates. A
    parameter that the gradient does not depend on gets zeros. With coupled samples and own-loss
    gradients, Hᵢ is the Hessian of the sample's loss within its batch.
    """

    def given(problem: Problem, batch: Batch) -> Transform:
        require("hvp", internals.probe)

        def apply(gradients: Gradients) -> Gradients:
            found = {name: block.shape for name, block in gradients.items()}
            if found != {name: tuple(p.shape) for name, p in problem.parameters.items()}:
                names = ", ".join(found)
                raise SpecError(
                    f"hvp needs one entry for each parameter, but its input has {names}",
                    where="chain",
                    remedy="Put hvp before stages such as norm, dot or project.",
                )
            alone = True
            try:
                require_independent(problem, batch)
            except CoupledSamplesError:  # the user asked for own-loss gradients
                alone = False
            shared = None if with_ is None else with_.of(gradients)
            rows = {k: p.new_empty(len(batch), *p.shape) for k, p in problem.parameters.items()}
            for i in range(len(batch)):
                one = gradients.select(slice(i, i + 1))
                vector = shared or {name: block.dense()[0] for name, block in one.items()}
                own = (batch.one(i), 0) if alone else (batch, i)
                product, custom = _product(problem, *own, vector)
                if custom:
                    _require_agreement(problem, *own, vector)
                for name, row in product.items():
                    rows[name][i] = row
            return gradients.of({name: DenseBlock(value) for name, value in rows.items()})

        return apply

    return NeedsProblem(given)


def _product(
    problem: Problem, batch: Batch, position: int, vector: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], bool]:
    """Return {name: (H v) (*shape)} of a sample's loss, and whether its graph has custom functions.

    H v is the gradient of ⟨g, v⟩ for constant v. Only kernels with a second derivative are used.
    """
    what = "hvp cannot differentiate this model twice"
    remedy = "Use operations whose backward pass can itself be differentiated."
    with (
        unsupported(what, problem.model, remedy),
        problem.state.restoring(),
        unfused(),
        sdpa_kernel(SDPBackend.MATH),
        torch.enable_grad(),
    ):
        value = problem.losses(batch)[position]
        custom = any(map(internals.is_custom, _nodes(value)))
        products = []
        slopes = _gradients(value, problem, create_graph=True)
        for name, slope in zip(problem.parameters, slopes, strict=True):
            dtype = wider(slope.dtype, slope.device)
            product = slope.to(dtype) * vector[name].to(dtype).conj()
            products.append(product.sum().real)
        along = torch.stack(products).sum()
        if any(internals.kind(node) == _ERROR_NODE for node in _nodes(along)):
            once = "a custom autograd function is once_differentiable"
            raise UnsupportedError(f"{what}: {once}", remedy=remedy)
        found = [g.detach() for g in _gradients(along, problem)]
    return dict(zip(problem.parameters, found, strict=True)), custom


def _gradients(value: Tensor, problem: Problem, *, create_graph: bool = False) -> list[Tensor]:
    """Return ∂value/∂p for each parameter, dense; zeros if the value does not depend on it."""
    parameters = list(problem.parameters.values())
    if not value.requires_grad:
        return [torch.zeros_like(p) for p in parameters]
    found = torch.autograd.grad(
        value, parameters, create_graph=create_graph, allow_unused=True, materialize_grads=True
    )
    return [g.to_dense() if g.is_sparse else g for g in found]


def _nodes(value: Tensor) -> Iterator[Node]:
    """Yield every node of a tensor's graph once."""
    waiting = [] if value.grad_fn is None else [value.grad_fn]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        found = {n for n, _ in internals.edges(node) if n is not None} - seen
        seen |= found
        waiting.extend(found)


def _require_agreement(
    problem: Problem, batch: Batch, position: int, vector: Mapping[str, Tensor]
) -> None:
    """Compare the product with central differences of gradients, on a copy in float64."""
    problem = problem.converted(torch.float64)
    batch, parameters = batch.to(problem.device, torch.float64), [*problem.parameters.values()]
    starts = [p.detach().clone() for p in parameters]
    directions = [vector[name].to(p) for name, p in problem.parameters.items()]
    length = _length(directions)
    if length == 0:
        return
    step = _STEP * (1 + _length(starts)) / length
    sides = []
    for shift in (step, -step, 0.0):
        with torch.no_grad():
            for p, start, along in zip(parameters, starts, directions, strict=True):
                p.copy_(start + shift * along)
        if shift:
            with problem.state.restoring():
                sides.append(_gradients(problem.losses(batch)[position], problem))
    found = list(_product(problem, batch, position, vector)[0].values())
    right = [(a - b) / (2 * step) for a, b in zip(*sides, strict=True)]
    error = _length([a - b for a, b in zip(found, right, strict=True)])
    rounding = 1e-8 * _length(sides[0]) * length
    if not error <= _TOLERANCE * _length(right) + rounding:
        raise UnsupportedError(
            "the second derivative of a custom autograd function is wrong: H v has norm "
            f"{_length(right):.1e} and differs by {error:.1e} from differences of gradients",
            remedy="Write its backward pass with differentiable operations on its inputs and "
            "outputs. Intermediate values that it saves are treated as constants.",
        )


def _length(tensors: list[Tensor]) -> float:
    return float(torch.stack([t.abs().square().sum() for t in tensors]).sum().sqrt())
