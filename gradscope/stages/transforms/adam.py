"""Gradients as Adam sees them: preconditioned by the moments of the optimiser that trained."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from gradscope.blocks import Block, Gradients, PreconditionedBlock
from gradscope.blocks.derived import DerivedBlock
from gradscope.core.precision import doubled
from gradscope.errors import SpecError
from gradscope.sources.weights.optimizer import Moments, read_optimizer
from gradscope.stages.transforms.base import Transform, TransformScope, transform, widened


@transform("adam", TransformScope.ELEMENTWISE)
def adam(state: str, form: Literal["scaled", "step"] = "scaled") -> Transform:
    """T(g) = g / (√v̂ + ε), v̂ the second moments of the Adam or AdamW that trained the model.

    `state` is a file of torch.optim's state_dict. With t steps made, v̂ = v / (1 - β₂ᵗ), and ε, β₁,
    β₂ are the optimiser's own. This is linear in g.

    `form=step` is the step that the optimiser would make with g, its moments going on with it:
    (m' / (1 - β₁ᵗ⁺¹)) / (√(v' / (1 - β₂ᵗ⁺¹)) + ε), where m' = β₁m + (1 - β₁)g and
    v' = β₂v + (1 - β₂)g², as LESS takes it (Xia et al. 2024, arXiv:2402.04333, section 2). Learning
    rate and weight decay are left out. With `amsgrad` v is the largest so far in both.

    Parameters are told by name where the state has names, else by their order.
    """
    stored = read_optimizer(Path(state))
    bound: dict[str, Callable[[Block], Block]] = {}

    def apply(gradients: Gradients) -> Gradients:
        if not bound:
            found = stored.of({name: block.shape for name, block in gradients.items()})
            bound.update({name: made(name, own, gradients[name]) for name, own in found.items()})
        return gradients.of({k: bound[k](block) for k, block in widened(gradients).items()})

    def made(name: str, moments: Moments, block: Block) -> Callable[[Block], Block]:
        if block.dtype.is_complex:
            raise SpecError(f"{name!r} is complex, and adam takes real parameters only")
        if form == "step":
            return partial(StepBlock, moments=moments.to(block.device))
        divisor = moments.root.to(block.device) + moments.eps
        return partial(PreconditionedBlock, diagonal=torch.where(divisor == 0, 0, 1 / divisor))

    return apply


@dataclass(frozen=True, eq=False)
class StepBlock(DerivedBlock):
    """Adam's step with each sample's gradient."""

    moments: Moments

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
