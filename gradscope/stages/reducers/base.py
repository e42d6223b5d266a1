"""What a reducer is: three pure functions around a state that can be stored and merged.

The state is a flat dict of tensors: sums, and counts in int64. Within a batch the sums that
autograd takes too (Σ gᵢ, Σ |gᵢ|²) are taken in the gradients' own precision, as autograd does;
from batch to batch they are carried in float64 (complex128 for complex gradients). Any split of
the data, merged in any order, gives the same result up to the rounding of the batches' own sums.

A result that is no tensor of the parameter's own shape is called NAME.word ("fc.weight.edges"). A
parameter is a leaf of the tree of modules, so no other parameter's name begins with NAME and a dot.
"""

from collections.abc import Callable, Iterator
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from gradscope.blocks import Block, Gradients
from gradscope.core.registry import Registry
from gradscope.errors import SpecError

State = dict[str, Tensor]
Merge = Callable[[State, State], State]

TILE_BYTES = 32 * 2**20


class Reducer(NamedTuple):
    """An expectation-like summary over samples.

    Attributes:
        start: State of the samples of one batch.
        merge: State of the samples of both states, as new tensors.
        result: {name: (*shape)}.
        raw: It reads the raw gradients' structure, so no transform may stand before it.
        powers: The sums over samples it asks the gradients for (`Gradients.power_sum`).
    """

    start: Callable[[Gradients], State]
    merge: Merge
    result: Callable[[State], dict[str, Tensor]]
    raw: bool = False
    powers: frozenset[int] = frozenset()


reducers: Registry[Callable[..., Reducer]] = Registry("reducer")


def wide(block: Block) -> Block:
    """Cast a block to float64 or complex128, where its sums are then taken."""
    return block.to(torch.complex128 if block.dtype.is_complex else torch.float64)


def tiles(block: Block) -> Iterator[Tensor]:
    """Yield the dense gradients (m, *shape) in float64 or complex128, a few samples at a time."""
    row = max(1, prod(block.shape) * (16 if block.dtype.is_complex else 8))
    step = max(1, TILE_BYTES // row)
    for start in range(0, block.n, step):
        yield wide(block.select(slice(start, start + step))).dense()


def count(gradients: Gradients) -> Tensor:
    """Return n as a float64 scalar, where the gradients are."""
    device = next(iter(gradients.values())).device
    return torch.tensor(float(gradients.n), dtype=torch.float64, device=device)


def entries(state: State, kind: str) -> dict[str, Tensor]:
    """Return {name: tensor} of the state's entries called `kind:name`."""
    head = f"{kind}:"
    return {key[len(head) :]: value for key, value in state.items() if key.startswith(head)}


def on_one_device(merge: Merge) -> Merge:
    """Move the first state to the second's device: a state read from a file is on the CPU."""

    def apply(a: State, b: State) -> State:
        device = b["n"].device
        return merge({key: value.to(device) for key, value in a.items()}, b)

    return apply


@on_one_device
def added(a: State, b: State) -> State:
    """Merge states of which every entry is a sum over samples."""
    return {key: carried(value) + b[key] for key, value in a.items()}


def carried(sums: Tensor) -> Tensor:
    """Return a batch's sums in the precision in which they are added to another's."""
    if not sums.is_floating_point() and not sums.is_complex():
        return sums
    return sums.to(torch.complex128 if sums.is_complex() else torch.float64)


def carried_state(state: State) -> State:
    """Return a state in the precision in which it is kept from batch to batch."""
    return {key: carried(value) for key, value in state.items()}


def power_sum(gradients: Gradients, name: str, power: int) -> Tensor:
    """Return Σᵢ gᵢ or Σᵢ |gᵢ|² (*shape) of a batch; squares that float32 cannot hold in float64."""
    found = gradients.power_sum(name, power)
    if power == 1 or found.dtype == torch.float64 or not found.numel():
        return found
    held = _HELD[0] < float(found.max()) < _HELD[1]
    return found if held else wide(gradients[name]).squared_sum()


_HELD = (1e-18, 1e37)  # between these, what float32 loses lies 20 decades below the largest entry


def ordered(gradients: Gradients, reducer: str) -> Gradients:
    """Return the gradients if their entries can be put in order.

    Raises:
        SpecError: They are complex.
    """
    for name, block in gradients.items():
        if block.dtype.is_complex:
            raise SpecError(
                f"{reducer!r} needs numbers that can be ordered, and {name!r} is complex",
                remedy=f"Put a transform to real numbers before it: abs | {reducer}.",
            )
    return gradients
