"""Accumulates the states of batches, files or processes into the state of all their samples.

Within a batch, sums have the gradients' precision. Between batches, states are kept in float64.
Sums are added in place, so no memory for a second state is needed.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

from gradscope.blocks import DenseBlock, Gradients, OuterBlock
from gradscope.stages.reducers.base import (
    Reducer,
    State,
    carried,
    carried_state,
    taken_result,
)

K = TypeVar("K", bound=Hashable)

_TRIED, _CUTS = 7, ((0, 3), (3, 4), (4, 7))  # number of test samples, and their batches
_TOLERANCE = 1e-6  # relative to the largest entry of a result


class Accumulator(Generic[K]):
    """The states of several reducers over all samples so far.

    Args:
        reducers: {key: reducer}, with keys of any type.
        states: {key: state} of earlier samples. Their tensors are not changed.

    Attributes:
        states: {key: state} of each reducer that has seen samples.
    """

    def __init__(
        self, reducers: Mapping[K, Reducer], states: Mapping[K, State] | None = None
    ) -> None:
        self.reducers, self.states = reducers, dict(states or {})
        self._owned: set[K] = set()  # keys of float64 states whose tensors are not shared
        self._dtypes: dict[K, dict[str, torch.dtype]] = {}  # the dtypes of each first state

    def add(self, more: dict[K, State], *, carry: bool = True) -> None:
        """Add the states of further samples, which are removed from `more`.

        Sums are added in place after all steps that may run out of memory. If a step does, the
        states have not changed.

        Args:
            more: {key: state}.
            carry: Convert a reducer's first state to float64 now. Otherwise the method `carry`
                converts it, which is not needed if there are no further samples.
        """
        sums: dict[K, State] = {}
        new: dict[K, State] = {}
        for key in [*more]:
            reducer, before, own = self.reducers[key], self.states.get(key), {**more.pop(key)}
            if before is None:
                self._dtypes.setdefault(key, {kind: t.dtype for kind, t in own.items()})
                new[key] = _taken_over(own, copy=reducer.additive) if carry else own
            elif key in self._owned and (reducer.additive or _joins(reducer, before, own)):
                sums[key] = own
            else:
                new[key] = carried_state(reducer.merge(before, own))
        for key, own in sums.items():
            (self.reducers[key].join or _add_in_place)(self.states[key], own)
        self._owned |= {key for key in new if carry or key in self.states}
        self.states = self.states | new

    def update(self, key: K, add: Callable[[State], State]) -> None:
        """Let `add` add further samples to a reducer's state in place; see `Reducer.add`."""
        found = self.states | {key: add(self.states.get(key, {}))}
        self.states = {key: found[key] for key in self.reducers if key in found}
        self._owned.add(key)

    def carry(self) -> None:
        """Convert the remaining states to float64: they may keep the gradients' memory alive."""
        for key in self.states.keys() - self._owned:
            self.states[key] = _taken_over(self.states[key], copy=self.reducers[key].additive)
            self._owned.add(key)

    def pop(self, key: K) -> State | None:
        """Remove and return a reducer's state, or None if it has seen no sample."""
        self._owned.discard(key)
        return self.states.pop(key, None)

    def result(self, key: K, *, narrow: bool = False) -> dict[str, Tensor]:
        """Return {name: (*shape)}, the result of a reducer; its state is removed.

        Args:
            key: A reducer that has seen samples.
            narrow: First convert the state to the dtypes of its first batch.
        """
        state = self.pop(key)
        assert state is not None
        dtypes = self._dtypes.get(key, {}) if narrow else {}
        state |= {kind: t.to(dtypes[kind]) for kind, t in state.items() if kind in dtypes}
        return taken_result(self.reducers[key], state)


def _taken_over(state: State, *, copy: bool) -> State:
    """Return a state in float64; entries are removed from `state` one by one to save memory.

    With `copy`, the result has new tensors even for entries that are already float64.
    """
    found: State = {}
    for key in list(state):
        own = state.pop(key)
        wide = carried(own)
        found[key] = wide.clone() if copy and wide is own else wide
    return found


def _joins(reducer: Reducer, state: State, more: State) -> bool:
    """Whether a state can be added in place; `merge` raises if the entries differ."""
    return reducer.join is not None and state.keys() == more.keys()


def _add_in_place(state: State, more: State) -> State:
    """Add sums to a float64 state in place."""
    for key, value in state.items():
        value.add_(more[key].to(value.device))
    return state


def depends_on_split(reducer: Reducer) -> str | None:
    """Return the first result that changes when the samples are split into batches, or None.

    Random gradients are reduced in a single batch, and in three batches that are accumulated and
    merged. Returns None if all results agree, or if the reducer raises for these gradients.
    """
    for gradients in (_made_up(), _made_up(broken=True)):
        try:
            if reducer.earlier is not None:
                first = reducer.earlier.reducer
                reducer = reducer.earlier.given(first.result(first.start(gradients)))
            whole = reducer.result(carried_state(reducer.start(gradients)))
            ways = (reducer, reducer._replace(additive=False, join=None))  # in place, or merged
            results = [_in_parts(one, gradients) for one in ways]
        except Exception:  # the run will raise the reducer's error
            return None
        for found in results:
            for name in (*whole, *(found.keys() - whole.keys())):
                if name not in whole or name not in found or not _same(whole[name], found[name]):
                    return name
    return None


def _in_parts(reducer: Reducer, gradients: Gradients) -> dict[str, Tensor]:
    """Return the result for gradients in three batches."""
    total = Accumulator({0: reducer})
    for cut in _CUTS:
        part = gradients.select(slice(*cut)).with_powers(reducer.powers)
        total.add({0: reducer.start(part)})
    return total.result(0)


def _made_up(*, broken: bool = False) -> Gradients:
    """Return random gradients of a layer (3, 2) with two positions a sample, and of its bias.

    If `broken`, the first sample is not finite.
    """
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(_TRIED, *shape, generator=draw, dtype=torch.float64)

    weight, bias = OuterBlock.matrix(random(2, 3), random(2, 2)), random(3)
    if broken:
        bias[0] = torch.inf
    return Gradients({"weight": weight, "bias": DenseBlock(bias)}, torch.arange(_TRIED))


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    size = float(a.nan_to_num(posinf=0.0, neginf=0.0).abs().amax()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * size, equal_nan=True)
