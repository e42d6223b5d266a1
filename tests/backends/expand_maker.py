"""What the examples of the expand backend's rules are made of.

The letters: `p` a tensor of each sample's own, `w` a parameter that samples share, `c` a constant,
`i(high, ...)` integers below `high`, `b` truth values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradscope.backends.expand.tensor import PerSample

N = 3
Example = Callable[["Maker"], tuple[Any, ...]]


@dataclass(frozen=True)
class Maker:
    """Makes the tensors of an example; `own` makes parameters each sample's own.

    Attributes:
        own: Whether `w` is like `p`.
    """

    own: bool

    def p(self, *shape: int) -> Tensor:
        return PerSample(torch.randn(N, *shape, dtype=torch.float64))

    def w(self, *shape: int) -> Tensor:
        if self.own:
            return self.p(*shape)
        return PerSample(torch.randn(*shape, dtype=torch.float64).expand(N, *shape))

    def c(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    def i(self, high: int, *shape: int) -> Tensor:
        return PerSample(torch.randint(0, high, (N, *shape)))

    def b(self, *shape: int) -> Tensor:
        return PerSample(torch.rand(N, *shape) > 0.5)
