"""Transforms with stored values: inner products with a vector, preconditioning, Adam's moments.

A stored vector is the aggregate of a chain in a result file, `with=FILE.h5:CHAIN`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from math import inf, prod, sqrt
from operator import add
from typing import Literal

import torch
from torch import Tensor

from gradscope.blocks import Block, DenseBlock, Gradients, KroneckerBlock, PreconditionedBlock, wide
from gradscope.blocks.base import squares
from gradscope.blocks.derived import DerivedBlock
from gradscope.core.precision import doubled
from gradscope.errors import SpecError
from gradscope.model.optimizer import AdamMoments, OptimizerState, ParameterNames
from gradscope.stages.transforms.base import (
    KnowsModel,
    NeedsMean,
    Transform,
    TransformScope,
    Vector,
    transform,
    widened,
)

Apply = Callable[[Block], Block]

_ROOT = 0.5  # the power of the second moment in Adam


@transform("dot", TransformScope.LINEAR)
def dot(with_: Vector) -> Transform:
    """T(g) = ⟨g, v⟩ = Σ g · conj(v) over all parameters: the single entry `dot` (n,), in float64.

    The result is complex if g or v is complex.
    """

    def apply(gradients: Gradients) -> Gradients:
        return gradients.of({"dot": DenseBlock(inner(gradients, with_.of(gradients)))})

    return apply


@transform("cosine", TransformScope.VECTOR)
def cosine(with_: Vector | None = None, to: Literal["mean"] | None = None) -> Transform | NeedsMean:
    """T(g) = Re⟨g, v⟩ / (‖g‖₂ ‖v‖₂): the single entry `cosine` (n,), 0 if g or v is zero.

    It measures how well gradients agree (Sankararaman et al. 2020, arXiv:1904.06963). v is a stored
    vector. With `to=mean`, v is the mean of this stage's input over all samples, which needs an
    earlier pass over the data.
    """
    if (with_ is None) == (to is None):
        raise ValueError("give either with=FILE.h5:CHAIN or to=mean")
    if with_ is not None:
        return _cosine(with_)
    return NeedsMean(lambda mean: _cosine(Vector(mean, "the mean of the samples")))


@transform("precondition", TransformScope.ELEMENTWISE)
def precondition(with_: Vector, damping: float = 0.0, power: float = _ROOT) -> Transform:
    """T(g) = g / (vᵖ + damping), v a stored second moment; or F⁻¹g, F from a stored `kfac`.

    v is the result of a chain such as `square | mean` or `second_moment`. p = `power` = 1/2 gives
    Adam's √v without bias correction. The damping is outside of the root, like Adam's ε (Kingma &
    Ba 2015, arXiv:1412.6980, algorithm 1). `power=1` inverts the diagonal of the Fisher. Where
    vᵖ + damping is 0, the result is 0.

    With a stored `kfac`, the gradient is read row by row as a matrix G (r, c). The result is
    (B + √damping/π)⁻¹ G (A + π√damping)⁻ᵀ with π² = (tr A/c) / (tr B/r). This is the natural
    gradient of Martens & Grosse 2015 (arXiv:1503.05671, section 6.3), for each group separately.
    Outer products stay outer products. A parameter without factors is divided by its second moment
    plus the damping. A singular factor is replaced by its pseudo-inverse. `power` applies to stored
    second moments only.
    """
    if not 0 <= damping < inf:
        raise ValueError(f"damping must be finite and not negative, not {damping}")
    if not 0 < power < inf:
        raise ValueError(f"power must be positive and finite, not {power}")
    for name, value in with_.values.items():
        if not name.endswith((".A", ".B")):
            _require_second_moment(name, value)
    bound: dict[str, Apply] = {}  # factors are inverted once, not for every batch

    def apply(gradients: Gradients) -> Gradients:
        for name, block in gradients.items():
            if name not in bound:
                bound[name] = _preconditioner(name, block, with_, damping, power)
        blocks = {name: bound[name](block) for name, block in widened(gradients).items()}
        return gradients.of(blocks)

    return apply


def inner(gradients: Gradients, vector: Mapping[str, Tensor]) -> Tensor:
    """Return ⟨gᵢ, v⟩ (n,), complex if a gradient or the vector is complex."""

    def of(block: Block, v: Tensor) -> Tensor:
        if v.is_complex() and not block.dtype.is_complex:
            return torch.complex(block.dot(v.real), -block.dot(v.imag))
        return block.dot(v.to(block.dtype))

    return reduce(add, (of(wide(block), vector[name]) for name, block in gradients.items()))


def _cosine(vector: Vector) -> Transform:
    def apply(gradients: Gradients) -> Gradients:
        values = vector.of(gradients)
        length = torch.stack([squares(v).sum() for v in values.values()]).sum().sqrt()
        sizes = gradients.norms * length
        found = inner(gradients, values).real
        return gradients.of({"cosine": DenseBlock(torch.where(sizes == 0, 0.0, found / sizes))})

    return apply


def _preconditioner(name: str, block: Block, stored: Vector, damping: float, power: float) -> Apply:
    """Return the function to apply to the parameter's block, from its stored values."""
    values = stored.values
    factors = name not in values and {f"{name}.A", f"{name}.B"} <= values.keys()
    diagonal = name not in values and f"{name}.diagonal" in values
    if power != _ROOT and (factors or diagonal):
        raise SpecError(
            f"power={power:g} cannot be combined with a stored kfac",
            where=stored.source or None,
            remedy="Leave power out: the factors of kfac are inverted.",
        )
    if factors:
        return _kronecker(name, block, stored, damping)
    if diagonal:
        stored = Vector({name: values[f"{name}.diagonal"]}, stored.source)
    moment = stored.of(Gradients({name: block}))[name]
    try:
        _require_second_moment(name, moment)
    except ValueError as error:  # the name of a parameter ends in .A or .B
        raise SpecError(str(error), where=stored.source or None) from error
    divisor = (moment if diagonal else moment.pow(power)) + damping
    inverse = torch.where(divisor == 0, 0.0, 1.0 / divisor)
    return lambda block: PreconditionedBlock(block, inverse)


def _kronecker(name: str, block: Block, stored: Vector, damping: float) -> Apply:
    stored_pair = (stored.values[f"{name}.{side}"].to(block.device) for side in "AB")
    a, b = (factor.unsqueeze(0) if factor.dim() == 2 else factor for factor in stored_pair)
    found = (*a.shape, *b.shape)
    k, c, r = len(a), a.shape[-1], b.shape[-1]
    if found != (k, c, c, k, r, r) or k * r * c != prod(block.shape):
        raise SpecError(
            f"the stored factors of {name!r} have shapes {tuple(a.shape)} and {tuple(b.shape)}, "
            f"which do not fit the parameter's shape {block.shape}",
            where=stored.source or None,
            remedy="Give the result of kfac:bias=separate for this model.",
        )
    if damping > 0:  # added to both factors in proportion to their mean eigenvalues
        means = [m.diagonal(dim1=1, dim2=2).real.mean(1) for m in (a, b)]
        usable = (means[0] > 0) & (means[1] > 0)  # else π would be 0 or infinite
        pi = torch.where(usable, (means[0] / means[1]).sqrt(), 1.0).reshape(-1, 1, 1)
        ones = [torch.eye(m.shape[-1], dtype=m.dtype, device=m.device) for m in (a, b)]
        a, b = a + sqrt(damping) * pi * ones[0], b + sqrt(damping) / pi * ones[1]
    left, right = (torch.linalg.pinv(m, hermitian=True) for m in (b, a))
    return lambda block: KroneckerBlock.of(block, left, right)


def _require_second_moment(name: str, value: Tensor) -> None:
    if value.is_complex() or not bool((value >= 0).all()):
        raise ValueError(
            f"{name!r} in the stored vector is not a second moment: it has entries that are "
            "complex, negative or NaN"
        )


@transform("adam", TransformScope.ELEMENTWISE)
def adam(
    state: OptimizerState,
    form: Literal["scaled", "step"] = "scaled",
    names: ParameterNames | None = None,
) -> Transform:
    """T(g) = g / (√v̂ + ε), v̂ the second moments of the Adam or AdamW that trained the model.

    `state` is a file with the optimiser's state_dict. After t steps v̂ = v / (1 - β₂ᵗ). ε, β₁ and β₂
    are the optimiser's. This form is linear in g.

    `form=step` is the step that the optimiser would make with the gradient g:
    (m' / (1 - β₁ᵗ⁺¹)) / (√(v' / (1 - β₂ᵗ⁺¹)) + ε). Here m' = β₁m + (1 - β₁)g and
    v' = β₂v + (1 - β₂)g², as in LESS (Xia et al. 2024, arXiv:2402.04333, section 2). Learning
    rate and weight decay are left out. With `amsgrad`, both forms use the largest v so far.

    Moments are matched by name if the state has names. Else they are matched by shape, if only one
    assignment fits the shapes. `names` is a JSON file with the names in the optimiser's order. Or
    it is `model`: each group of the optimiser is in the order of model.parameters().
    """
    stored = state if names is None else state.with_names(names)
    model: dict[str, tuple[int, ...]] = {}
    bound: dict[str, Callable[[Block], Block]] = {}

    def apply(gradients: Gradients) -> Gradients:
        if not bound:
            found = stored.of({name: block.shape for name, block in gradients.items()}, model)
            bound.update({name: made(name, own, gradients[name]) for name, own in found.items()})
        return gradients.of({k: bound[k](block) for k, block in widened(gradients).items()})

    def made(name: str, moments: AdamMoments, block: Block) -> Callable[[Block], Block]:
        if block.dtype.is_complex:
            raise SpecError(f"{name!r} is complex, but adam supports real parameters only")
        if form == "step":
            return partial(StepBlock, moments=moments.to(block.device))
        divisor = moments.root.to(block.device) + moments.eps
        return partial(PreconditionedBlock, diagonal=torch.where(divisor == 0, 0, 1 / divisor))

    return KnowsModel(apply, model.update)


@dataclass(frozen=True, eq=False)
class StepBlock(DerivedBlock):
    """Adam's step for each sample's gradient."""

    moments: AdamMoments

    def _values(self, base: Tensor) -> Tensor:
        own, g = self.moments, doubled(base)
        (beta1, beta2), t = own.betas, own.step + 1
        first = beta1 * own.first + (1 - beta1) * g
        second = beta2 * own.second + (1 - beta2) * g * g
        if own.largest is not None:
            second = torch.maximum(second, own.largest)
        root = (second / (1 - beta2**t)).sqrt()
        found: Tensor = first / (1 - beta1**t) / (root + own.eps)
        return found.to(base.dtype)
