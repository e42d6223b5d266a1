"""Rounding: the differences that it explains, the precision of a model, and float64.

Two evaluations of independent samples may differ in their last digits, because a different number
or order of samples changes the order of sums. Float64 shows whether rounding is the only cause:
there the difference is a billion times smaller.
"""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from gradscope.core.batch import Batch, tensors
from gradscope.core.precision import on_host, perturbed
from gradscope.model.problem import Problem, double_precision
from gradscope.model.quantised import require_float64
from gradscope.process.memory import available

_ROUNDING = {torch.float64: 1e-9, torch.float32: 3e-5}  # between batches of different sizes
_SMALL = 2**26  # bytes of a float64 copy and its results that are always available
_COPIES = 4  # memory of a float64 copy and its results, in sizes of the model
UNITS = 2.0  # units in the last place: how much a perturbed parameter changes

_NARROWING = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}
_BITS = {torch.Tensor.view}  # with a dtype, it reinterprets the same bytes


def same(
    a: Tensor, b: Tensor, among: Tensor | None = None, precision: torch.dtype = torch.float64
) -> bool:
    """Whether two tensors agree up to the rounding that a different batch size causes.

    Args:
        a: Some numbers.
        b: The same numbers, computed in another batch.
        among: Numbers of the same kind, whose size determines the expected rounding.
        precision: The dtype of the computation, which may be narrower than the tensors' dtype.
    """
    dtypes = (a.dtype, b.dtype, precision)
    tolerance = max(_ROUNDING.get(dtype, _root(dtype)) for dtype in dtypes)
    return is_close(a, b, tolerance, among)


def is_close(a: Tensor, b: Tensor, tolerance: float, among: Tensor | None = None) -> bool:
    """Whether two tensors agree up to a relative error; integers and booleans must be equal."""
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
    """Finds the narrowest dtype that a forward pass rounds to, among those narrower than `known`.

    A number counts as rounded if a torch function computed it from a wider floating-point number,
    or from a rounded number. A count of integers in float32, or float32 data, is exact.
    """

    def __init__(self, known: torch.dtype) -> None:
        super().__init__()
        self.dtype: torch.dtype = known
        self._known = _eps(known)
        self._rounded: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # a function without a result writes to its first argument
        made = (
            [result] if type(result) is Tensor else tensors(args[:1] if result is None else result)
        )
        narrow = [t for t in made if _eps(t.dtype) > self._known]
        if narrow:  # rare, so that most functions need no search in their arguments
            given = [t for t in tensors((args, kwargs or {})) if _eps(t.dtype)]
            for t in narrow:
                eps = _eps(t.dtype)
                if any(_eps(own.dtype) < eps or own in self._rounded for own in given):
                    self._rounded[t] = True
                    self.dtype = max(self.dtype, t.dtype.to_real(), key=_eps)
        return result


@cache
def _eps(dtype: torch.dtype) -> float:
    """Return the relative rounding error of a dtype; 0 for integers and booleans."""
    real = dtype.is_floating_point or dtype.is_complex
    return float(torch.finfo(dtype).eps) if real else 0.0


def computed_in(problem: Problem, batch: Batch, samples: int = 1) -> torch.dtype:
    """Return the narrowest dtype that a forward pass rounds to, found by running the first samples.

    It may be narrower than the parameters' dtype: a layer such as RMSNorm may cast to float32 and
    back, or compute under autocast. Its gradients are rounded to this dtype.
    """
    with _Narrowest(problem.precision) as seen:
        problem.losses(batch.select(slice(0, samples)))
    narrowest: torch.dtype = seen.dtype
    return narrowest


def nearby(problem: Problem, trials: int, digits: torch.dtype | None = None) -> Iterator[Problem]:
    """Yield the problem on a copy of its model with perturbed last digits of the parameters.

    The differences between results show the effect of rounding. A sharded model is not copied: its
    own parameters are changed temporarily. There, later trials change more digits, because no
    float64 evaluation separates rounding from other causes.

    Args:
        problem: Model and loss.
        trials: The number of perturbations.
        digits: The dtype whose last digits are changed; the parameters' dtype if not given.
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
    """Turns casts to a narrower floating-point dtype into casts to float64.

    Raises:
        RefusedError: A layer of the model does not compute in float64.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        require_float64(model)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _BITS:
            return func(*args, **(kwargs or {}))
        if func in _NARROWING:
            func = torch.Tensor.double
        wide = {key: _wide(value) for key, value in kwargs.items()} if kwargs else {}
        return func(*map(_wide, args), **wide)


def _wide(value: Any) -> Any:
    """Return float64 for a narrower floating-point dtype, and other values unchanged."""
    if not isinstance(value, torch.dtype):
        return value
    if value.is_complex:
        return torch.complex128
    return torch.float64 if value.is_floating_point else value


def fits_in_float64(problem: Problem) -> bool:
    """Whether there is enough memory for a float64 copy of the model, if the system reports it.

    A small copy always fits: to read the free memory may take longer than a pass of a small model.
    """
    size = sum(t.nbytes for t in (*problem.model.parameters(), *problem.model.buffers()))
    if problem.precision == torch.float64 or _COPIES * size <= _SMALL:
        return True
    free = available(on_host(torch.empty(0, device=problem.device)).device)
    return free is None or _COPIES * size <= free


@contextmanager
def all_in_float64(problem: Problem, batch: Batch) -> Iterator[tuple[Problem, Batch]]:
    """Yield the problem and a batch in float64; in the body, no layer casts to a narrower dtype.

    Raises:
        RefusedError: The model cannot be copied, or does not compute in float64.
    """
    wide = problem if problem.precision == torch.float64 else problem.converted(torch.float64)
    with wide.state.restoring(), double_precision(), widened(wide.model):
        yield wide, batch.in_double_precision()
