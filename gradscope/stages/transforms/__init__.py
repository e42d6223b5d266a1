"""Transforms of per-sample gradients, one family a file."""

from gradscope.stages.transforms import (  # noqa: F401  each registers its transforms
    elementwise,
    hessian,
    norms,
    project,
    random,
    vectors,
)
from gradscope.stages.transforms.base import (
    NeedsMean,
    NeedsProblem,
    ReadsNorms,
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
    "ReadsNorms",
    "Scope",
    "Step",
    "Transform",
    "Vector",
    "transform",
    "transforms",
]
