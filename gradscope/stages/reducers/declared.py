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
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from gradscope.blocks import Gradients
from gradscope.core.grammar import StageFactory
from gradscope.core.locate import own_stage
from gradscope.errors import ModelError, SpecError
from gradscope.stages.reducers.base import Reducer, State

P = ParamSpec("P")
T = TypeVar("T")


def reducer(factory: Callable[..., Any]) -> StageFactory[Reducer]:
    """Declare a factory of reducers, for chains as FILE.py:NAME or through an entry point.

    Args:
        factory: Takes the stage's options by keyword; returns a `Reducer`, or its three functions
            start, merge and result as a tuple.
    """
    name = factory.__name__

    @wraps(factory)
    def make(**options: Any) -> Reducer:
        try:
            with own_stage(f"reducer {name}"):
                made = factory(**options)
        except ModelError as error:  # a ValueError is about the options
            raise (error.__cause__ if isinstance(error.__cause__, ValueError) else error) from None
        if isinstance(made, tuple) and not isinstance(made, Reducer) and len(made) == 3:
            made = Reducer(*made)
        if not (isinstance(made, Reducer) and all(map(callable, made[:3]))):
            raise SpecError(
                f"{name!r} returned {type(made).__name__}, not a reducer",
                where="reducer",
                remedy="Return gradscope.Reducer(start, merge, result).",
            )
        return made._replace(
            start=_with_state(name, _running(name, made.start)),
            merge=_running(name, made.merge),
            result=_running(name, made.result),
        )

    return StageFactory(make)


def _running(name: str, function: Callable[P, T]) -> Callable[P, T]:
    """Return the function, which says whose code raised; errors of gradscope's own pass through."""

    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        with own_stage(f"reducer {name}"):
            return function(*args, **kwargs)

    return guarded


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
