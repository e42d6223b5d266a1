"""Transforms of per-sample gradients, one family a file."""

from gradscope.stages.transforms import elementwise, hessian, norms, project, random, vectors  # noqa: F401  each registers its transforms
