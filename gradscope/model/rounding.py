"""Rounding: how far it lets results differ, which digits a model computes in, and float64.

Two evaluations of independent samples may differ in their last digits, because another number of
samples, or another order, adds the same numbers in another order. Float64 shows whether that is
all: there the difference is a billion times smaller.
"""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from gradscope.core.batch import Batch, tensors
from gradscope.core.precision import on_host, perturbed
from gradscope.model.problem import Problem, double_precision
from gradscope.process.memory import available

_ROUNDING = {torch.float64: 1e-9, torch.float32: 3e-5}  # between batches of other sizes
_COPIES = 4  # sizes of a model that a copy in float64 takes, with what it computes
UNITS = 2.0  # in the last place, by which a parameter is changed to see what rounding does

_NARROWING = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}
_BITS = {torch.Tensor.view}  # takes a dtype to read the same bytes in


def same(
    a: Tensor, b: Tensor, among: Tensor | None = None, precision: torch.dtype = torch.float64
) -> bool:
    """Whether two tensors agree up to the rounding that another batch size causes.

    Args:
        a: Some numbers.
        b: The same numbers, computed in another batch.
        among: Numbers of the same kind, whose size says how much rounding is to be expected.
        precision: The dtype that they are computed in, which may be narrower than their own.
    """
    dtypes = (a.dtype, b.dtype, precision)
    tolerance = max(_ROUNDING.get(dtype, _root(dtype)) for dtype in dtypes)
    return within(a, b, tolerance, among)


def within(a: Tensor, b: Tensor, tolerance: float, among: Tensor | None = None) -> bool:
    """Whether two tensors agree up to a relative error; numbers that are not real ones exactly."""
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()) or not b.is_floating_point() | b.is_complex():
        return bool((a == b).all())
    a, b = (t.to(torch.promote_types(a.dtype, b.dtype)) for t in (a, b))
    whole = a if among is None else among
    scale = float(whole.abs().nan_to_num(posinf=0).max()) if whole.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale * 0.1, equal_nan=True)


def _root(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return float(torch.finfo(dtype).eps ** 0.5)
    return 0.0


class _Narrowest(TorchFunctionMode):
    """Finds the narrowest dtype that a forward pass rounds to.

    A number counts as rounded if a torch function made it from a wider floating-point number, or
    from a rounded one. A count of integers in float32, or data that came in float32, is exact.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.float64
        self._rounded: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [t for t in tensors((args, kwargs or {})) if _is_real(t)]
        before = [(_eps(t.dtype), t in self._rounded, t._version) for t in given]
        result = func(*args, **(kwargs or {}))
        written = [t for t, known in zip(given, before, strict=True) if t._version > known[2]]
        for t in (*tensors(result), *written):
            if _is_real(t) and any(eps < _eps(t.dtype) or rounded for eps, rounded, _ in before):
                self._rounded[t] = True
                self.dtype = max(self.dtype, t.dtype.to_real(), key=_eps)
        return result


def _is_real(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _eps(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)


def computed_in(problem: Problem, batch: Batch, samples: int = 1) -> torch.dtype:
    """Return the narrowest dtype that a forward pass rounds to, by running the first samples.

    It may be narrower than the parameters' dtype: a layer such as RMSNorm may cast to float32 and
    back, or compute under autocast, and its gradients are rounded to that.
    """
    with _Narrowest() as seen:
        problem.losses(batch.select(slice(0, samples)))
    narrowest: torch.dtype = max(seen.dtype, problem.precision, key=_eps)
    return narrowest


def nearby(problem: Problem, trials: int, digits: torch.dtype | None = None) -> Iterator[Problem]:
    """Yield the problem on a copy of its model, each time with other last digits of parameters.

    What differs then is what rounding alone can do to a result. Of a sharded model there is no
    copy: its own parameters are changed meanwhile. Later trials change more digits of them, since
    no float64 shows what is rounding.

    Args:
        problem: Model and loss.
        trials: How many times.
        digits: A dtype whose last digits are changed, the parameters' own if it is not given.
    """
    if problem.model_parallel is not None:
        eps = torch.finfo(digits or problem.precision).eps
        for trial in range(trials):
            with problem.model_parallel.perturbing(trial, 2 ** (trial // 2) * UNITS * eps):
                yield problem
        return
    near = problem.converted(None)
    originals = {name: p.detach().clone() for name, p in near.parameters.items()}
    place = on_host(next(iter(problem.parameters.values()))).device
    draw = torch.Generator(place).manual_seed(0)
    for _ in range(trials):
        with torch.no_grad():
            for name, p in near.parameters.items():
                p.copy_(
                    perturbed(originals[name], UNITS * torch.finfo(digits or p.dtype).eps, draw)
                )
        yield near


class widened(TorchFunctionMode):  # noqa: N801  (a context manager)
    """Lets casts to a narrower floating-point dtype be casts to float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _BITS:
            return func(*args, **(kwargs or {}))
        if func in _NARROWING:
            func = torch.Tensor.double
        wide = {key: _wide(value) for key, value in (kwargs or {}).items()}
        return func(*map(_wide, args), **wide)


def _wide(value: Any) -> Any:
    """Return float64 for a narrower floating-point dtype, anything else unchanged."""
    if not isinstance(value, torch.dtype):
        return value
    if value.is_complex:
        return torch.complex128
    return torch.float64 if value.is_floating_point else value


def fits_in_float64(problem: Problem) -> bool:
    """Whether there is memory for a copy of the model in float64, as far as the system says."""
    if problem.precision == torch.float64:
        return True
    size = sum(t.nbytes for t in (*problem.model.parameters(), *problem.model.buffers()))
    free = available(on_host(torch.empty(0, device=problem.device)).device)
    return free is None or _COPIES * size <= free


@contextmanager
def all_in_float64(problem: Problem, batch: Batch) -> Iterator[tuple[Problem, Batch]]:
    """Give the problem and a batch in float64, in a context where no layer casts to less.

    Raises:
        RefusedError: The model cannot be copied.
    """
    wide = problem if problem.precision == torch.float64 else problem.converted(torch.float64)
    with double_precision(), widened():
        yield wide, batch.in_double_precision()
