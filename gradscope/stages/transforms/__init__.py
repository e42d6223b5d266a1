"""Transforms of per-sample gradients, one family a file."""

from gradscope.stages.transforms import (
    center,
    elementwise,
    factors,
    hessian,
    norms,
    precondition,
    products,
    projections,
    sparsify,
    stochastic,
)
from gradscope.stages.transforms.base import (
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
    "center",
    "elementwise",
    "factors",
    "hessian",
    "norms",
    "precondition",
    "products",
    "projections",
    "sparsify",
    "stochastic",
    "transform",
    "transforms",
]
