"""Floor 3: transforms of per-sample gradients, one family a file."""

from gradscope.transforms import (
    elementwise,
    factors,
    hessian,
    norms,
    products,
    projections,
    sparsify,
    statistics,
    stochastic,
)
from gradscope.transforms.base import (
    NeedsMean,
    NeedsProblem,
    Scope,
    Step,
    Transform,
    Vector,
    transform,
    transforms,
)

__all__ = [
    "NeedsMean",
    "NeedsProblem",
    "Scope",
    "Step",
    "Transform",
    "Vector",
    "elementwise",
    "factors",
    "hessian",
    "norms",
    "products",
    "projections",
    "sparsify",
    "statistics",
    "stochastic",
    "transform",
    "transforms",
]
