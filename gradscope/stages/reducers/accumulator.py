"""Accumulates the states of batches, files or processes into the state of all their samples.

Within a batch sums are taken in the gradients' own precision. From batch to batch states are
carried in float64, and sums are added in place, which takes no memory for a second state.
"""

from collections.abc import Hashable, Mapping
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

_TRIED, _CUTS = 7, ((0, 3), (3, 4), (4, 7))  # made-up samples, and the parts that they come in
_TOLERANCE = 1e-6  # of the largest number of its kind


class Accumulator(Generic[K]):
    """The states of several reducers over all samples so far.

    Args:
        reducers: By any key.
        states: The states of earlier samples, by key. Their tensors are not changed.

    Attributes:
        states: By key, of each reducer that has seen samples.
    """

    def __init__(
        self, reducers: Mapping[K, Reducer], states: Mapping[K, State] | None = None
    ) -> None:
        self.reducers, self.states = reducers, dict(states or {})
        self._owned: set[K] = set()  # keys of states in float64 whose tensors nothing else holds
        self._dtypes: dict[K, dict[str, torch.dtype]] = {}  # the dtypes of each first state

    def add(self, more: dict[K, State], *, carry: bool = True) -> None:
        """Add the states of further samples, which leave `more` on the way.

        Sums are added in place after everything that may run out of memory: if it does, nothing
        has changed.

        Args:
            more: By key.
            carry: Convert a reducer's first state to float64 now. Otherwise the method `carry`
                does, or nobody where no further samples come.
        """
        sums: dict[K, State] = {}
        new: dict[K, State] = {}
        for key in [*more]:
            reducer, before, own = self.reducers[key], self.states.get(key), {**more.pop(key)}
            if before is None:
                self._dtypes.setdefault(key, {kind: t.dtype for kind, t in own.items()})
                new[key] = _taken_over(own, copy=reducer.additive) if carry else own
            elif reducer.additive and key in self._owned:
                sums[key] = own
            else:
                new[key] = carried_state(reducer.merge(before, own))
        for key, own in sums.items():
            _add_in_place(self.states[key], own)
        self._owned |= {key for key in new if carry or key in self.states}
        self.states = self.states | new

    def carry(self) -> None:
        """Convert states to float64 that are not yet: they may hold the gradients' memory."""
        for key in self.states.keys() - self._owned:
            self.states[key] = _taken_over(self.states[key], copy=self.reducers[key].additive)
            self._owned.add(key)

    def pop(self, key: K) -> State | None:
        """Remove and return a reducer's state, None if it has seen no sample."""
        self._owned.discard(key)
        return self.states.pop(key, None)

    def result(self, key: K, *, narrow: bool = False) -> dict[str, Tensor]:
        """Return {name: (*shape)}, the result of a reducer; its state is removed.

        Args:
            key: A reducer that has seen samples.
            narrow: Convert the state to the dtypes of its first batch before.
        """
        state = self.pop(key)
        assert state is not None
        dtypes = self._dtypes.get(key, {}) if narrow else {}
        state |= {kind: t.to(dtypes[kind]) for kind, t in state.items() if kind in dtypes}
        return taken_result(self.reducers[key], state)


def _taken_over(state: State, *, copy: bool) -> State:
    """Return a state in float64; entries leave `state` on the way, so that never both are whole.

    With `copy` it shares no tensor with anything else, even where it is in float64 already.
    """
    found: State = {}
    for key in list(state):
        own = state.pop(key)
        wide = carried(own)
        found[key] = wide.clone() if copy and wide is own else wide
    return found


def _add_in_place(state: State, more: State) -> None:
    """Add sums to a state in float64 without making new tensors."""
    for key, value in state.items():
        value.add_(more[key].to(value.device))


def depends_on_split(reducer: Reducer) -> str | None:
    """Return the first result that changes when the same samples come in several batches, or None.

    A few made-up gradients are reduced at once, and in three parts, which are accumulated and
    merged. Returns None if all results agree, and for a reducer that does not take such gradients.
    """
    for gradients in (_made_up(), _made_up(broken=True)):
        try:
            if reducer.earlier is not None:
                first = reducer.earlier.reducer
                reducer = reducer.earlier.given(first.result(first.start(gradients)))
            whole = reducer.result(carried_state(reducer.start(gradients)))
            ways = (reducer, reducer._replace(additive=False))  # added in place, and merged
            results = [_in_parts(one, gradients) for one in ways]
        except Exception:  # a run raises whatever is wrong with the reducer
            return None
        for found in results:
            for name in (*whole, *(found.keys() - whole.keys())):
                if name not in whole or name not in found or not _same(whole[name], found[name]):
                    return name
    return None


def _in_parts(reducer: Reducer, gradients: Gradients) -> dict[str, Tensor]:
    """Return the result of gradients that come in three batches."""
    total = Accumulator({0: reducer})
    for cut in _CUTS:
        part = gradients.select(slice(*cut)).with_powers(reducer.powers)
        total.add({0: reducer.start(part)})
    return total.result(0)


def _made_up(*, broken: bool = False) -> Gradients:
    """Return gradients of a layer (3, 2) with two positions a sample, and of its bias.

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
