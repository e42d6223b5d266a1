"""Names of dtypes, and the widest one of a device: float64, or float32 where that is all (MPS)."""

import warnings
from functools import cache

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
    """Return the dtype in which sums are taken on a device."""
    always = device.type in ("cpu", "cuda", "meta")
    return torch.float64 if always or _has_double(device) else torch.float32


def wider(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype, real or complex, in which sums of `dtype` are taken on a device."""
    return torch.promote_types(dtype, double(device))


def doubled(t: Tensor) -> Tensor:
    """Return a tensor, real or complex, in the dtype in which its sums are taken."""
    return t.to(wider(t.dtype, t.device))


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a model's floating-point tensors, complex ones to the complex dtype of that width.

    `model.to(dtype)` would drop their imaginary parts.
    """
    if not any(t.is_complex() for t in (*model.parameters(), *model.buffers())):
        return model.to(dtype)

    def one(t: Tensor) -> Tensor:
        if t.is_complex():
            return t.to(dtype.to_complex())
        return t.to(dtype) if t.is_floating_point() else t

    whole: nn.Module = model._apply(one)  # type: ignore[no-untyped-call]
    return whole


def products(device: torch.device) -> torch.dtype:
    """Return a dtype with the digits to which a device may round the factors of float32 products.

    That is float32's own, unless it is allowed TF32, with the digits of float16, or less.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch remarks on TF32 whenever these flags are read
        try:
            asked = torch.get_float32_matmul_precision()
            convolutions = device.type == "cuda" and torch.backends.cudnn.allow_tf32
        except RuntimeError:  # they were set by two interfaces: ask for no more than either allows
            asked, convolutions = "high", True
    if asked == "medium":
        return torch.bfloat16
    return torch.float16 if convolutions or asked == "high" else torch.float32


def perturbed(t: Tensor, share: float, draw: torch.Generator) -> Tensor:
    """Return a tensor whose entries are larger or smaller by up to this share, at random."""
    real = torch.view_as_real(t) if t.is_complex() else t
    wide = on_host(real).double()
    noise = torch.rand(wide.shape, generator=draw, device=wide.device, dtype=torch.float64)
    changed = (wide * (1 + share * (noise * 2 - 1))).to(real)
    return torch.view_as_complex(changed) if t.is_complex() else changed


def on_host(t: Tensor) -> Tensor:
    """Return a tensor where there is float64: where it is, or on the CPU."""
    return t if double(t.device) == torch.float64 else t.cpu()
