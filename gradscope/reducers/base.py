"""What a reducer is: three pure functions around a state that can be stored and merged.

The state is a flat dict of float64 tensors (complex128 for complex gradients), so that any split
of the data, merged, gives the same result up to rounding in float64.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gradscope.blocks import Block, Gradients
from gradscope.core.registry import Registry

State = dict[str, Tensor]


class Reducer(NamedTuple):
    """An expectation-like summary over samples.

    Attributes:
        start: State of the samples of one batch.
        merge: State of the samples of both states, as new tensors.
        result: {name: (*shape)}.
    """

    start: Callable[[Gradients], State]
    merge: Callable[[State, State], State]
    result: Callable[[State], dict[str, Tensor]]


reducers: Registry[Callable[..., Reducer]] = Registry("reducer")


def wide(block: Block) -> Block:
    """Cast a block to float64 or complex128, where its sums are then taken."""
    return block.to(torch.complex128 if block.dtype.is_complex else torch.float64)


def count(gradients: Gradients) -> Tensor:
    """Return n as a float64 scalar."""
    return torch.tensor(float(gradients.n), dtype=torch.float64)


def entries(state: State, kind: str) -> dict[str, Tensor]:
    """Return {name: tensor} of the state's entries called `kind:name`."""
    head = f"{kind}:"
    return {key[len(head) :]: value for key, value in state.items() if key.startswith(head)}
