"""Floor 3: transforms of per-sample gradients, one family a file."""

from gradscope.transforms import elementwise, factors, norms
from gradscope.transforms.base import Scope, Transform, transform, transforms

__all__ = ["Scope", "Transform", "elementwise", "factors", "norms", "transform", "transforms"]
