"""Control flow by functions, run as Python would: cond, while_loop, scan, map, flex_attention.

torch compiles the functions to find the tensors in their closures. It does not compile if compiled
code runs eagerly or a dispatch mode is active. Then tensors in closures, such as parameters,
silently get no gradient. Run step by step, autograd records every operation of the functions.
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
    # torch has flattened `carried` for its compiler, and only the compiler restores the structure
    form = getclosurevars(more).nonlocals.get("in_spec") if isfunction(more) else None
    return tuple(state) if form is None else pytree.tree_unflatten([*state, *others], form)[0]


def _scan(
    step: Function, init: Sequence[Tensor], xs: Sequence[Tensor], others: Sequence[Any], **_: Any
) -> Any:
    """Return the last carried values, and the outputs of t steps, stacked (t, ...).

    The result has the structure of a step's result: a pair of any trees, or flat in torch's
    compiler.
    """
    state, rows, form = [*init], [], None
    for each in zip(*xs, strict=True):
        found, form = pytree.tree_flatten(step(*state, *each, *others))
        state, row = found[: len(init)], found[len(init) :]
        rows.append(row)
    assert form is not None  # torch rejects a scan over nothing
    stacked = [None if r[0] is None else torch.stack(r) for r in zip(*rows, strict=True)]
    return pytree.tree_unflatten([*state, *stacked], form)


def _map(step: Function, xs: Sequence[Tensor], others: Sequence[Any], **_: Any) -> Any:
    """Return the outputs of the steps, tensors in any tree, stacked (t, ...)."""
    return _scan(step, (), xs, others)


def _flex_attention(*args: Any, **_: Any) -> tuple[Tensor, ...]:
    """Attention with a score function, without its fused kernel, which cannot train on a CPU."""
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
    """Run control flow in the body as Python would, except while torch compiles."""
    own = HigherOrderOperator.__call__
    # checks that the kernel supports training
    check: Any = getattr(attention, "_validate_device", None)

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
