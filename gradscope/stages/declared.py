"""Stages that users write in their own files: functions of tensors, and reducers.

    @gradscope.transform("elementwise")
    def soft_threshold(g, level: float = 0.1):
        return g.sign() * (g.abs() - level).clamp_min(0)

A chain uses it as `FILE.py:soft_threshold:level=0.2`. gradscope tests on numbers that the function
keeps to its scope, and raises an error if it does not. A reducer is a function that returns three
functions:

    @gradscope.reducer
    def largest_norm():
        def start(gradients):
            return {"norm": gradients.norms.max().double()}

        def merge(a, b):
            return {"norm": torch.maximum(a["norm"], b["norm"])}

        return gradscope.Reducer(start, merge, lambda state: state)
"""

from collections.abc import Callable
from functools import partial, update_wrapper, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from gradscope.blocks import DenseBlock, Gradients, MappedBlock
from gradscope.core.grammar import StageFactory, signature
from gradscope.core.texts import unequal
from gradscope.errors import ModelError, SpecError
from gradscope.model.locate import own_stage
from gradscope.stages.reducers.base import Reducer, State
from gradscope.stages.transforms.base import (
    Transform,
    TransformFactory,
    TransformScope,
    blockwise,
    widened,
)

P = ParamSpec("P")
T = TypeVar("T")

_SCOPES = {scope.name.lower(): scope for scope in TransformScope}

# Numbers of both signs, large, small and zero. No two have the same magnitude.
_PROBE = [0.3, -1.7, 0.0, 2.9, -0.04, 11.0, -5.3, 1e-3, 0.71, -230.0, 1.1, -0.9]


def transform(scope: str) -> Callable[[Callable[..., Any]], TransformFactory]:
    """Declare a function as a transform, for chains as FILE.py:NAME or through an entry point.

    Args:
        scope: "elementwise": takes gradients of any shape and returns a tensor of the same shape;
            each entry is treated separately. "factor": takes the norms (n,) of the samples'
            gradients and returns one factor a sample (n,). "linear" or "vector": takes
            {name: (n, *shape)} and returns {name: (n, ...)}; each sample is treated separately,
            and the dense gradients are formed. Further arguments of the function are its options.

    Raises:
        SpecError: The scope is unknown.
    """
    if scope not in _SCOPES:
        raise SpecError(
            f"unknown scope {scope!r}",
            where="gradscope.transform",
            remedy=f'Write @gradscope.transform("elementwise"), or: {", ".join(_SCOPES)}.',
        )
    kind = _SCOPES[scope]

    def declared(function: Callable[..., Any]) -> TransformFactory:
        own = signature(function)

        def make(**options: Any) -> Transform:
            return _made(function.__name__, kind, partial(function, **options))

        update_wrapper(make, function)
        make.__signature__ = own.replace(parameters=list(own.parameters.values())[1:])  # type: ignore[attr-defined]
        return TransformFactory(make, kind, function)

    return declared


def of_rows(name: str, function: Callable[[dict[str, Tensor]], Any]) -> Transform:
    """Return the transform of a plain function from {name: (n, *shape)} to {name: (n, ...)}.

    Each row must depend on its own sample only. The dense gradients are formed.
    """
    return partial(_on_rows, name, _guarded(name, function))


def _made(name: str, scope: TransformScope, function: Callable[[Any], Any]) -> Transform:
    """Return the transform, after the tests that need no data."""
    if scope in (TransformScope.LINEAR, TransformScope.VECTOR):
        return of_rows(name, function)
    fn = _guarded(name, function)
    probe = torch.tensor(_PROBE, dtype=torch.float64)
    try:
        if scope is TransformScope.ELEMENTWISE:
            _require_own(name, fn, "entry", probe.reshape(3, 4), ())
            return blockwise(lambda block: MappedBlock(block, fn))
        _require_own(name, fn, "sample", probe.abs(), (1,))
    except ModelError as error:  # before any data is seen, a ValueError is about the options
        raise (error.__cause__ if isinstance(error.__cause__, ValueError) else error) from None
    return lambda gradients: gradients.scale(fn(gradients.norms))


def _guarded(name: str, fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `fn` with a check: it must return a floating-point tensor of its argument's shape."""
    running = _running(f"transform {name}", fn)

    def checked(values: Any) -> Any:
        result = running(values)
        if not isinstance(values, Tensor):
            return result
        if not isinstance(result, Tensor) or result.shape != values.shape:
            found = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise SpecError(
                f"{name!r} returned {found} for values of shape {tuple(values.shape)}",
                where="transform",
                remedy="Return a tensor of the same shape as the argument.",
            )
        if not (result.is_floating_point() or result.is_complex()):
            raise SpecError(
                f"{name!r} returned {result.dtype}",
                where="transform",
                remedy="Return floating-point numbers, for example with .to(g.dtype).",
            )
        return result

    return checked


def _require_own(
    name: str, fn: Callable[[Tensor], Tensor], what: str, probe: Tensor, shape: tuple[int, ...]
) -> None:
    """Raise if a value of fn(probe) depends on further entries, or if fn changes probe in place.

    Each entry is also passed alone, with shape `shape`. `what` is its name in messages.
    """
    given = probe.clone()
    together = fn(given).flatten()
    if not torch.equal(given, probe):
        raise SpecError(
            f"{name!r} changes its argument in place",
            where="transform",
            remedy="Return a new tensor: other chains read the same gradients.",
        )
    for k, entry in enumerate(probe.flatten()):
        alone = fn(entry.clone().reshape(shape)).flatten()[0]
        if not torch.allclose(alone, together[k], rtol=1e-9, atol=1e-12, equal_nan=True):
            one, many = unequal(float(alone.real), float(together[k].real))
            raise SpecError(
                f"{name!r} returns {one} for {float(entry):.3g} alone, but {many} in a batch: a "
                f"value must depend on its own {what} only, and must not be random",
                where="transform",
                remedy='Declare the scope "factor" (one factor a sample) or "vector".',
            )


def _on_rows(name: str, fn: Callable[[dict[str, Tensor]], Any], gradients: Gradients) -> Gradients:
    """Apply a function to copies of the dense rows; the last sample is also tested alone."""
    rows = {key: block.dense().clone() for key, block in widened(gradients).items()}
    last = {key: value[-1:].clone() for key, value in rows.items()}
    found = _rows(name, fn(rows), gradients.n)
    if gradients.n > 1:
        for key, alone in _rows(name, fn(last), 1).items():
            together = found[key][-1]
            gap = float((alone[0] - together).abs().nan_to_num().sum())
            if gap > 1e-2 * float(together.abs().nan_to_num().sum()):
                raise SpecError(
                    f"{name!r} returns a different {key!r} for a sample alone than in its batch",
                    where="transform",
                    remedy="Let each row depend on its own sample only. To combine samples, write "
                    "a reducer.",
                )
    return gradients.of({key: DenseBlock(value) for key, value in found.items()})


def _rows(name: str, found: Any, n: int) -> dict[str, Tensor]:
    """Check that a user's function returned {name: (n, ...)}."""
    values = found if isinstance(found, dict) else {}
    shapes = {k: tuple(v.shape) if isinstance(v, Tensor) else None for k, v in values.items()}
    named = all(isinstance(key, str) for key in shapes)
    if shapes and named and all(shape and shape[0] == n for shape in shapes.values()):
        return values
    raise SpecError(
        f"{name!r} returned {shapes or type(found).__name__} for {n} samples",
        where="transform",
        remedy="Return a dict {name: (n, ...)} with one row a sample.",
    )


def reducer(factory: Callable[..., Any]) -> StageFactory[Reducer]:
    """Declare a factory of reducers, for chains as FILE.py:NAME or through an entry point.

    Args:
        factory: Takes the stage's options by keyword; returns a `Reducer`, or its three functions
            start, merge and result as a tuple.
    """
    name, what = factory.__name__, f"reducer {factory.__name__}"

    @wraps(factory)
    def make(**options: Any) -> Reducer:
        try:
            made = _running(what, factory)(**options)
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
            start=_with_state(name, _running(what, made.start)),
            merge=_running(what, made.merge),
            result=_running(what, made.result),
        )

    return StageFactory(make)


def _running(what: str, function: Callable[P, T]) -> Callable[P, T]:
    """Return the function with errors that name `what`; errors of gradscope are unchanged."""

    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        with own_stage(what):
            return function(*args, **kwargs)

    return guarded


def _with_state(name: str, start: Callable[[Gradients], Any]) -> Callable[[Gradients], State]:
    """Return `start` with a check: it must return a flat dict of tensors, which can be stored."""

    def checked(gradients: Gradients) -> State:
        state = start(gradients)
        if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
            raise SpecError(
                f"the start function of {name!r} does not return a dict of tensors",
                where="reducer",
                remedy="Return {name: tensor}, and convert numbers to tensors.",
            )
        return state

    return checked
