"""Reducers that users write in a file of their own.

    @gradscope.reducer
    def largest_norm():
        def start(gradients):
            return {"norm": gradients.norms.max().double()}

        def merge(a, b):
            return {"norm": torch.maximum(a["norm"], b["norm"])}

        return gradscope.Reducer(start, merge, lambda state: state)

In a chain that is `FILE.py:largest_norm`.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from gradscope.blocks import Gradients
from gradscope.errors import SpecError
from gradscope.reducers.base import Reducer, State

_MARK = "__gradscope_reducer__"


def reducer(factory: Callable[..., Any]) -> Callable[..., Reducer]:
    """Declare a factory of reducers, for chains as FILE.py:NAME or through an entry point.

    Args:
        factory: Takes the stage's options by keyword; returns a `Reducer`, or its three functions
            start, merge and result as a tuple.
    """

    @wraps(factory)
    def checked(**options: Any) -> Reducer:
        made = factory(**options)
        if isinstance(made, Reducer):
            return made._replace(start=_with_state(factory.__name__, made.start))
        if not (isinstance(made, tuple) and len(made) == 3 and all(map(callable, made))):
            raise SpecError(
                f"{factory.__name__!r} returned {type(made).__name__}, not a reducer",
                where="reducer",
                remedy="Return gradscope.Reducer(start, merge, result).",
            )
        return Reducer(_with_state(factory.__name__, made[0]), made[1], made[2])

    setattr(checked, _MARK, True)
    return checked


def is_reducer(found: Any) -> bool:
    """Whether `found` was declared by `reducer`."""
    return bool(getattr(found, _MARK, False))


def _with_state(name: str, start: Callable[[Gradients], Any]) -> Callable[[Gradients], State]:
    """Return `start`, which must give a flat dict of tensors: only these can be stored."""

    def checked(gradients: Gradients) -> State:
        state = start(gradients)
        if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
            raise SpecError(
                f"the state that {name!r} starts with is not a dict of tensors",
                where="reducer",
                remedy="Return {name: tensor}, numbers as tensors too.",
            )
        return state

    return checked
