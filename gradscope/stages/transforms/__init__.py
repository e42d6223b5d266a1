"""Transforms of per-sample gradients, one family a file."""

from gradscope.stages.transforms import (  # noqa: F401  each registers its transforms
    elementwise,
    hessian,
    norms,
    project,
    random,
    vectors,
)
