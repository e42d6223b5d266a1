"""What is handed to torch as functions, run as Python would: cond, while_loop, scan, map, scores.

torch compiles such functions to find what they close over. Where compiled code runs as it is
written, or a dispatch mode is active, it does not, and what they close over, parameters for
instance, silently gets no gradient. Run step by step, autograd records every operation of theirs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import getclosurevars, isfunction
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import flex_attention as attention

from gradscope.core.batch import tensors

Function = Callable[..., Any]


def _cond(pred: Any, true: Function, false: Function, operands: Sequence[Any], **_: Any) -> Any:
    return (true if pred else false)(*operands)


def _while_loop(
    more: Function, body: Function, carried: Sequence[Any], others: Sequence[Any], **_: Any
) -> Any:
    state = [*carried]
    while more(*state, *others):
        state = pytree.tree_leaves(body(*state, *others))
    # torch has flattened what is carried for its compiler, which alone puts it together again
    form = getclosurevars(more).nonlocals.get("in_spec") if isfunction(more) else None
    return tuple(state) if form is None else pytree.tree_unflatten([*state, *others], form)[0]


def _scan(
    step: Function, init: Sequence[Tensor], xs: Sequence[Tensor], others: Sequence[Any], **_: Any
) -> Any:
    """Return the last carried values, and what each of t steps gives, stacked (t, ...).

    In the form in which a step gives both: a pair of any trees, or flat to torch's compiler.
    """
    state, rows, form = [*init], [], None
    for each in zip(*xs, strict=True):
        found, form = pytree.tree_flatten(step(*state, *each, *others))
        state, row = found[: len(init)], found[len(init) :]
        rows.append(row)
    assert form is not None  # torch takes no scan over nothing
    stacked = [None if r[0] is None else torch.stack(r) for r in zip(*rows, strict=True)]
    return pytree.tree_unflatten([*state, *stacked], form)


def _map(step: Function, xs: Sequence[Tensor], others: Sequence[Any], **_: Any) -> Any:
    """Return what the steps give, tensors in any tree, stacked (t, ...)."""
    return _scan(step, (), xs, others)


def _flex_attention(*args: Any, **_: Any) -> tuple[Tensor, ...]:
    """Attention by a function of scores, without its fused kernel, which no CPU can train."""
    from torch._higher_order_ops.flex_attention import math_attention

    found: tuple[Tensor, ...] = math_attention(*args)
    return found


_STEPS: dict[str, Function] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "scan": _scan,
    "map_impl": _map,
    "flex_attention": _flex_attention,
}


@contextmanager
def step_by_step() -> Iterator[None]:
    """Run such control flow of the body as Python would; while torch compiles, as torch does."""
    own = HigherOrderOperator.__call__
    check: Any = getattr(attention, "_validate_device", None)  # that its kernel can be trained

    def call(self: HigherOrderOperator, /, *args: Any, **kwargs: Any) -> Any:
        run = _STEPS.get(self._name)
        if run is None or any(isinstance(t, FakeTensor) for t in tensors((args, kwargs))):
            return own(self, *args, **kwargs)  # type: ignore[no-untyped-call]
        return run(*args, **kwargs)

    try:
        HigherOrderOperator.__call__ = call  # type: ignore[method-assign]
        attention._validate_device = lambda *_: None
        yield
    finally:
        attention._validate_device = check
        HigherOrderOperator.__call__ = own  # type: ignore[method-assign]
