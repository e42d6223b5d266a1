"""What a reducer is: three pure functions around a state that can be stored and merged.

The state is a flat dict of tensors: sums, and counts in int64. Within a batch the sums that
autograd takes too (Σ gᵢ, Σ |gᵢ|²) are taken in the gradients' own precision, as autograd does;
from batch to batch they are carried in float64 (complex128 for complex gradients). Any split of
the data, merged in any order, gives the same result up to the rounding of the batches' own sums.

A result that is no tensor of the parameter's own shape is called NAME.word ("fc.weight.edges"). A
parameter is a leaf of the tree of modules, so no other parameter's name begins with NAME and a dot.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from gradscope.blocks import Block, Gradients
from gradscope.blocks.base import wide
from gradscope.core.grammar import Stage
from gradscope.core.precision import double, wider
from gradscope.core.registry import Registry
from gradscope.errors import SpecError
from gradscope.process.memory import slices

State = dict[str, Tensor]
Merge = Callable[[State, State], State]

TILE_BYTES = 32 * 2**20
_HELD = (1e-18, 1e37)  # between these, what float32 loses lies 20 decades below the largest entry


class FirstPass(NamedTuple):
    """What a reducer waits for: the result of another one over all samples."""

    stage: Stage  # the other reducer as it is written
    reducer: "Reducer"  # the other reducer
    given: Callable[[Mapping[str, Tensor]], "Reducer"]  # from its result to the one that waits
    # from its result to one of the same sizes that `given` takes in no time: for runs whose time
    # and memory matter, not their numbers
    rehearsed: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict


class Reducer(NamedTuple):
    """An expectation-like summary over samples.

    Attributes:
        start: State of the samples of one batch.
        merge: State of the samples of both states, as new tensors.
        result: {name: (*shape)}.
        raw: It reads the raw gradients' structure, so no transform may stand before it.
        powers: The sums over samples it asks the gradients for (`Gradients.power_sum`).
        additive: Every entry of the state is a sum over samples, and `merge` is `added`.
        earlier: What it waits for, if it does: until that is given it cannot start.
        note: What is to be said of its result.
        separate: Each parameter's result follows from its own entries ("kind:NAME") and from n.
    """

    start: Callable[[Gradients], State]
    merge: Merge
    result: Callable[[State], dict[str, Tensor]]
    raw: bool = False
    powers: frozenset[int] = frozenset()
    additive: bool = False
    earlier: FirstPass | None = None
    note: str = ""
    separate: bool = False


reducers: Registry[Callable[..., Reducer]] = Registry("reducer")


def tiles(block: Block) -> Iterator[Tensor]:
    """Yield the dense gradients (m, *shape) in float64 or complex128, a few samples at a time."""
    row = prod(block.shape) * (16 if block.dtype.is_complex else 8)
    for rows in slices(block.n, row, TILE_BYTES):
        yield wide(block.select(rows)).dense()


def count(gradients: Gradients) -> Tensor:
    """Return n as a float64 scalar, where the gradients are."""
    device = next(iter(gradients.values())).device
    return torch.tensor(float(gradients.n), dtype=double(device), device=device)


def entries(state: State, kind: str) -> dict[str, Tensor]:
    """Return {name: tensor} of the state's entries called `kind:name`."""
    head = f"{kind}:"
    return {key[len(head) :]: value for key, value in state.items() if key.startswith(head)}


def on_one_device(merge: Merge) -> Merge:
    """Move the first state to the second's device: a state read from a file is on the CPU."""

    @wraps(merge)
    def apply(a: State, b: State) -> State:
        device = b["n"].device
        return merge({key: value.to(device) for key, value in a.items()}, b)

    return apply


ParameterState = dict[str, Tensor]  # what a state holds of one parameter, by kind


def for_each_parameter(
    start: Callable[[Block], ParameterState],
    merge: Callable[[ParameterState, ParameterState, Tensor, Tensor], ParameterState] | None,
    result: Callable[[ParameterState, Tensor], dict[str, Tensor]],
    ordered_for: str = "",
) -> Reducer:
    """Return the reducer that treats each parameter by itself.

    Args:
        start: From a batch's gradients to their part of the state.
        merge: From two parts, and the numbers of their samples, to one; None for sums over samples.
        result: From a part and N to tensors by suffix: "" stands for NAME, "edges" for NAME.edges.
        ordered_for: The reducer's name, if complex numbers are to be refused.
    """

    def start_all(gradients: Gradients) -> State:
        given = ordered(gradients, ordered_for) if ordered_for else gradients
        return joined(count(given), {name: start(block) for name, block in given.items()})

    @on_one_device
    def merge_all(a: State, b: State) -> State:
        if merge is None:
            return added(a, b)
        other = parts(b)
        every = {name: merge(own, other[name], a["n"], b["n"]) for name, own in parts(a).items()}
        return joined(a["n"] + b["n"], every)

    def result_all(state: State) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, part in parts(state).items():
            for suffix, value in result(part, state["n"]).items():
                found[f"{name}.{suffix}" if suffix else name] = value
        return found

    return Reducer(start_all, merge_all, result_all, additive=merge is None, separate=True)


def joined(n: Tensor, every: dict[str, ParameterState]) -> State:
    """Return the state of n () samples, from what it holds of each parameter."""
    return {"n": n} | {f"{kind}:{name}": t for name, p in every.items() for kind, t in p.items()}


def parts(state: State) -> dict[str, ParameterState]:
    """Return what a state holds of each parameter, whatever order its entries are in."""
    found: dict[str, ParameterState] = {}
    for key, value in state.items():
        kind, colon, name = key.partition(":")
        if colon:
            found.setdefault(name, {})[kind] = value
    return found


@on_one_device
def added(a: State, b: State) -> State:
    """Merge states of which every entry is a sum over samples."""
    return {key: carried(value) + b[key] for key, value in a.items()}


def taken_result(reducer: Reducer, state: State) -> dict[str, Tensor]:
    """Return the result; where they are `separate`, entries leave the state as it is made of them.

    So there are never both a whole state and a whole result, each as large as the model.
    """
    if not reducer.separate:
        return reducer.result(state)
    own: dict[str, list[str]] = {}
    for key in state:
        _, colon, name = key.partition(":")
        if colon:
            own.setdefault(name, []).append(key)
    shared = {key: value for key, value in state.items() if ":" not in key}
    found: dict[str, Tensor] = {}
    for keys in own.values():
        found |= reducer.result(shared | {key: state.pop(key) for key in keys})
    return found


def carried_state(state: State) -> State:
    """Return a state in the precision in which it is kept from batch to batch."""
    return {key: carried(value) for key, value in state.items()}


def carried_bytes(state: State) -> int:
    """Return the bytes of a state as it is carried, without making it."""
    return sum(t.numel() * _kept(t).itemsize for t in state.values())


def carried(sums: Tensor) -> Tensor:
    """Return a tensor of a state in the precision in which it is kept from batch to batch."""
    return sums.to(_kept(sums))


def _kept(sums: Tensor) -> torch.dtype:
    exact = not (sums.is_floating_point() or sums.is_complex())
    return sums.dtype if exact else wider(sums.dtype, sums.device)


def power_sum(gradients: Gradients, name: str, power: int) -> Tensor:
    """Return Σᵢ gᵢ or Σᵢ |gᵢ|² (*shape) of a batch; squares that float32 cannot hold in float64."""
    found = gradients.power_sum(name, power)
    if power == 1 or found.dtype == double(found.device) or not found.numel():
        return found
    held = _HELD[0] < float(found.max()) < _HELD[1]
    return found if held else wide(gradients[name]).squared_sum()


def ordered(gradients: Gradients, reducer: str) -> Gradients:
    """Return the gradients if their entries can be put in order, and refuse complex ones."""
    for name, block in gradients.items():
        if block.dtype.is_complex:
            raise SpecError(
                f"{reducer!r} needs numbers that can be ordered, and {name!r} is complex",
                remedy=f"Put a transform to real numbers before it: abs | {reducer}.",
            )
    return gradients
