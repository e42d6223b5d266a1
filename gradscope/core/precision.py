"""Names of dtypes, and the widest dtype of a device: float64, or float32 on MPS."""

import warnings
from functools import cache
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn


@cache
def _has_double(device: torch.device) -> bool:
    try:
        torch.zeros((), dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):  # torch raises a TypeError on MPS
        return False
    return True


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def double(device: torch.device) -> torch.dtype:
    """Return the dtype for sums on a device."""
    always = device.type in ("cpu", "cuda", "meta")
    return torch.float64 if always or _has_double(device) else torch.float32


def wider(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype, real or complex, for sums of `dtype` on a device."""
    return torch.promote_types(dtype, double(device))


def doubled(t: Tensor) -> Tensor:
    """Return a tensor, real or complex, in the dtype for its sums."""
    return t.to(wider(t.dtype, t.device))


def all_finite(t: Tensor) -> bool:
    """Whether every number of `t` is finite; a finite sum shows it in a single read."""
    return isfinite(abs(t.sum().item())) or bool(t.isfinite().all())


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a model's floating-point tensors; complex tensors to the complex dtype of that width.

    `model.to(dtype)` would drop imaginary parts. Attributes of modules that are plain tensors, or
    lists of them, are also cast if they have the dtype of a parameter.
    """
    known = {p.dtype for p in model.parameters()}

    def one(t: Tensor) -> Tensor:
        if t.is_complex():
            return t.to(dtype.to_complex())
        return t.to(dtype) if t.is_floating_point() else t

    def attribute(value: Any) -> Any:
        if type(value) is Tensor and value.grad_fn is None and value.dtype in known:
            return one(value)
        if type(value) in (list, tuple) and any(type(v) is Tensor for v in value):
            return type(value)(map(attribute, value))
        return value

    for module in model.modules():
        plain = [(k, v) for k, v in vars(module).items() if type(v) in (Tensor, list, tuple)]
        vars(module).update({k: attribute(v) for k, v in plain})
    if not any(t.is_complex() for t in (*model.parameters(), *model.buffers())):
        return model.to(dtype)
    whole: nn.Module = model._apply(one)  # type: ignore[no-untyped-call]
    return whole


def products(device: torch.device) -> torch.dtype:
    """Return a dtype with the digits to which a device may round the factors of float32 products.

    The result is float32, unless TF32 is allowed: then float16, which has the digits of TF32, or
    bfloat16.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about TF32 whenever these flags are read
        try:
            asked = torch.get_float32_matmul_precision()
            convolutions = device.type == "cuda" and torch.backends.cudnn.allow_tf32
        except RuntimeError:  # set by two interfaces: assume the lower precision of both
            asked, convolutions = "high", True
    if asked == "medium":
        return torch.bfloat16
    return torch.float16 if convolutions or asked == "high" else torch.float32


def perturbed(t: Tensor, share: float, draw: torch.Generator) -> Tensor:
    """Return a tensor with each entry scaled at random, by a factor within 1 ± `share`."""
    real = torch.view_as_real(t) if t.is_complex() else t
    wide = on_host(real).double()
    noise = torch.rand(wide.shape, generator=draw, device=wide.device, dtype=torch.float64)
    changed = (wide * (1 + share * (noise * 2 - 1))).to(real)
    return torch.view_as_complex(changed) if t.is_complex() else changed


def on_host(t: Tensor) -> Tensor:
    """Return a tensor on a device with float64: its own device, or the CPU."""
    return t if double(t.device) == torch.float64 else t.cpu()
