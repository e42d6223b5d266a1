"""Transforms of per-sample gradients, one family a file."""

from gradscope.stages.transforms import (  # each registers its transforms
    elementwise,
    hessian,
    norms,
    precondition,
    products,
    project,
    stochastic,
    topk,
)
from gradscope.stages.transforms.base import (
    NeedsMean,
    NeedsProblem,
    ReadsNorms,
    Scope,
    Step,
    Transform,
    TransformFactory,
    Vector,
    blockwise,
    transform,
    transforms,
    widened,
)

__all__ = [
    "NeedsMean",
    "NeedsProblem",
    "ReadsNorms",
    "Scope",
    "Step",
    "Transform",
    "TransformFactory",
    "Vector",
    "blockwise",
    "elementwise",
    "hessian",
    "norms",
    "precondition",
    "products",
    "project",
    "stochastic",
    "topk",
    "transform",
    "transforms",
    "widened",
]
