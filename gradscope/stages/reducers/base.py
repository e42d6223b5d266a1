"""Reducers: three pure functions of a state that can be stored and merged.

The state is a flat dict of tensors: sums, and counts in int64. Within a batch, Σ gᵢ and Σ |gᵢ|²
have the gradients' precision, as in autograd. Between batches, sums are kept in float64 (complex128
for complex gradients). Any split of the data, merged in any order, gives the same result up to the
rounding of each batch's sums.

A result with a shape different from the parameter's is called NAME.word ("fc.weight.edges"). A
parameter is a leaf of the tree of modules, so no parameter's name begins with NAME and a dot.
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
# if the largest square is in this range, squares that underflow float32 are 20 decades smaller
_HELD = (1e-18, 1e37)


class FirstPass(NamedTuple):
    """An earlier reducer whose result over all samples a reducer needs before it can start."""

    stage: Stage  # the earlier reducer's name and arguments
    reducer: "Reducer"  # the earlier reducer
    # from its result to the waiting reducer; it may replace large entries of the result
    given: Callable[[dict[str, Tensor]], "Reducer"]
    # from its result to a result of the same sizes that `given` processes quickly: for runs that
    # measure time and memory only
    rehearsed: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = dict


class Reducer(NamedTuple):
    """A summary over samples, such as an expectation.

    Attributes:
        start: Returns the state of the samples of one batch.
        merge: Returns the state of the samples of both states, as new tensors.
        result: Returns {name: (*shape)}.
        raw: The reducer reads the structure of raw gradients, so no transform may precede it.
        powers: The powers k whose sums over samples it reads (`Gradients.power_sum`).
        additive: Every entry of the state is a sum over samples, and `merge` is `added`.
        earlier: The earlier reducer whose result it needs before it can start, if any.
        note: A note about its result, shown to the user.
        separate: Each parameter's result depends only on its entries ("kind:NAME") and on n.
        add: Adds the samples of a batch to a float64 state in place, one parameter at a time, and
            returns it; {} is the state without samples. For states that are too large to have two.
        join: Adds a state of further samples with the same entries to a float64 state in place.
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
    add: Callable[[Gradients, State], State] | None = None
    join: Merge | None = None


reducers: Registry[Callable[..., Reducer]] = Registry("reducer")


def tiles(block: Block) -> Iterator[Tensor]:
    """Yield the dense gradients (m, *shape) in float64 or complex128, a few samples at a time."""
    row = prod(block.shape) * (16 if block.dtype.is_complex else 8)
    for rows in slices(block.n, row, TILE_BYTES):
        yield wide(block.select(rows)).dense()


def count(gradients: Gradients) -> Tensor:
    """Return n as a float64 scalar on the gradients' device."""
    device = next(iter(gradients.values())).device
    return torch.tensor(float(gradients.n), dtype=double(device), device=device)


def entries(state: State, kind: str) -> dict[str, Tensor]:
    """Return {name: tensor} of the state's entries called `kind:name`."""
    head = f"{kind}:"
    return {key[len(head) :]: value for key, value in state.items() if key.startswith(head)}


def on_one_device(merge: Merge) -> Merge:
    """Return `merge` with the first state moved to the second's device: files load to the CPU."""

    @wraps(merge)
    def apply(a: State, b: State) -> State:
        device = b["n"].device
        return merge({key: value.to(device) for key, value in a.items()}, b)

    return apply


ParameterState = dict[str, Tensor]  # {kind: tensor}, the part of a state for one parameter


def for_each_parameter(
    start: Callable[[Block], ParameterState],
    merge: Callable[[ParameterState, ParameterState, Tensor, Tensor], ParameterState] | None,
    result: Callable[[ParameterState, Tensor], dict[str, Tensor]],
    ordered_for: str = "",
) -> Reducer:
    """Return the reducer that treats each parameter separately.

    Args:
        start: From a batch's gradients to their part of the state.
        merge: From two parts and their numbers of samples to the merged part. Use None for sums.
        result: From a part and N to {suffix: tensor}: "" stands for NAME, "edges" for NAME.edges.
        ordered_for: The reducer's name, if it must raise for complex numbers.
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
    """Return the state of n () samples from the parts {name: part} of all parameters."""
    return {"n": n} | {f"{kind}:{name}": t for name, p in every.items() for kind, t in p.items()}


def parts(state: State) -> dict[str, ParameterState]:
    """Return the parts {name: part} of a state; its entries may be in any order."""
    found: dict[str, ParameterState] = {}
    for key, value in state.items():
        kind, colon, name = key.partition(":")
        if colon:
            found.setdefault(name, {})[kind] = value
    return found


@on_one_device
def added(a: State, b: State) -> State:
    """Merge states with sums over samples as entries."""
    return {key: carried(value) + b[key] for key, value in a.items()}


def taken_result(reducer: Reducer, state: State) -> dict[str, Tensor]:
    """Return the result; for a `separate` reducer, the entries used are removed from the state.

    This avoids a full state and a full result, each as large as the model, at the same time.
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
    """Return a state in the precision in which it is kept between batches."""
    return {key: carried(value) for key, value in state.items()}


def carried_bytes(state: State) -> int:
    """Return the bytes of `carried_state(state)` without computing it."""
    return sum(t.numel() * _kept(t).itemsize for t in state.values())


def carried(sums: Tensor) -> Tensor:
    """Return a tensor of a state in the precision in which it is kept between batches."""
    return sums.to(_kept(sums))


def _kept(sums: Tensor) -> torch.dtype:
    exact = not (sums.is_floating_point() or sums.is_complex())
    return sums.dtype if exact else wider(sums.dtype, sums.device)


def power_sum(gradients: Gradients, name: str, power: int) -> Tensor:
    """Return Σᵢ gᵢ or Σᵢ |gᵢ|² (*shape) of a batch; float64 if float32 cannot hold the squares."""
    found = gradients.power_sum(name, power)
    if power == 1 or found.dtype == double(found.device) or not found.numel():
        return found
    held = _HELD[0] < float(found.max()) < _HELD[1]
    return found if held else wide(gradients[name]).squared_sum()


def ordered(gradients: Gradients, reducer: str) -> Gradients:
    """Return the gradients if all are real, or raise for complex gradients."""
    for name, block in gradients.items():
        if block.dtype.is_complex:
            raise SpecError(
                f"{reducer!r} needs real numbers, but {name!r} is complex",
                remedy=f"Put a transform to real numbers before it, for example abs | {reducer}.",
            )
    return gradients
