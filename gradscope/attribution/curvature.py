"""Approximate curvatures of a model, whose inverses act on rows of gradients."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from gradscope.blocks import Gradients


class Curvature(NamedTuple):
    """What applies (H + λ)⁻¹."""

    name: str
    apply: Callable[[Gradients], dict[str, Tensor]]  # rows to {name: (m, *shape)}
    record: Mapping[str, Any] = {}  # what was chosen
