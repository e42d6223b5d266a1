"""Transforms of per-sample gradients, one family a file."""

from gradscope.stages.transforms import (  # noqa: F401  each registers its transforms
    adam,
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
    Step,
    Transform,
    TransformScope,
    Vector,
    transform,
    transforms,
)

__all__ = [
    "NeedsMean",
    "NeedsProblem",
    "ReadsNorms",
    "Step",
    "Transform",
    "TransformScope",
    "Vector",
    "transform",
    "transforms",
]
