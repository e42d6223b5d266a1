"""Curvature: approximations of a Fisher that is inverted, from what chains have stored of it.

Query rows times the damped inverse, (F + λ)⁻¹g, layer by layer. A layer is a weight whose gradient
has factors, with its bias where that belongs to it (`blocks.layers`); anything else is a parameter
by itself with its diagonal. The damping is relative: α times the mean eigenvalue of the layer's
own block is added to each of its eigenvalues, so it means the same in every layer and model.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from gradscope.blocks import Gradients, layer_of
from gradscope.blocks.base import precise
from gradscope.errors import InputError, SpecError
from gradscope.stages.reducers.ekfac import Basis, bases_of

Aggregate = Mapping[str, Tensor]
Apply = Callable[[Gradients, torch.dtype | None], dict[str, Tensor]]
Shapes = Mapping[str, tuple[int, ...]]


class Curvature(NamedTuple):
    """A damped curvature, inverted.

    Attributes:
        name: `kfac`, `ekfac`, `diagonal` or `adam`.
        apply: From gradients of m samples to {name: (m, *shape)}, the dense rows (F + λ)⁻¹g, in the
            dtype that is asked for or, with None, that of the gradients (float32 at least).
        damping: λ of each layer, by the name of its weight or only parameter.
    """

    name: str
    apply: Apply
    damping: dict[str, float]


class _Part(NamedTuple):
    """The Fisher of one layer: its eigenvalues, and where they are."""

    eigenvalues: Tensor  # (k, r, c) in the basis; (*shape) of the parameter where there is none
    basis: Basis | None = None


def kfac_curvature(aggregate: Aggregate, damping: float) -> Curvature:
    """Return the inverse of B ⊗ A + λ, taken in the eigenbasis of both factors.

    Args:
        aggregate: What the chain `kfac` or `kfac:bias=column` has found: {NAME.A, NAME.B,
            NAME.diagonal}.
        damping: α ≥ 0; with 0 it is the pseudo-inverse.

    Raises:
        InputError: There are no factors, or one is not finite.
    """
    parts = _diagonals(aggregate)
    for name, basis in bases_of(aggregate).items():
        a, b = (  # uᴴ F u of each eigenvector u
            (u.conj() * (aggregate[f"{name}.{side}"].reshape(u.shape) @ u)).sum(1).real.clamp_min(0)
            for side, u in zip("AB", basis, strict=True)
        )
        parts[name] = _Part(b.unsqueeze(2) * a.unsqueeze(1), basis)
    return _damped("kfac", parts, damping)


def ekfac_curvature(aggregate: Aggregate, damping: float) -> Curvature:
    """Return the inverse of the layers' second moments in their eigenbases, plus λ.

    George et al. 2018 (arXiv:1806.03884); for influence, Grosse et al. 2023 (arXiv:2308.03296).

    Args:
        aggregate: What the chain `ekfac` has found: {NAME.A.vectors, NAME.B.vectors,
            NAME.eigenvalues, NAME.diagonal}.
        damping: α ≥ 0; with 0 it is the pseudo-inverse.

    Raises:
        InputError: It is no result of `ekfac`.
    """
    parts = _diagonals(aggregate)
    for name, basis in bases_of(aggregate).items():
        if f"{name}.eigenvalues" not in aggregate:
            raise InputError(f"there are no eigenvalues of {name!r}: this is no result of ekfac")
        parts[name] = _Part(aggregate[f"{name}.eigenvalues"].reshape(basis.sizes), basis)
    return _damped("ekfac", parts, damping)


def diagonal_curvature(second_moment: Aggregate, damping: float) -> Curvature:
    """Return 1 / (E[g²] + λ), the diagonal of the Fisher inverted.

    Args:
        second_moment: {NAME: (*shape)}, of the chain `square | mean` or `second_moment`.
        damping: α ≥ 0; with 0 it is the pseudo-inverse.
    """
    return _damped("diagonal", {k: _Part(v) for k, v in second_moment.items()}, damping)


def adam_curvature(second_moment: Aggregate, damping: float) -> Curvature:
    """Return 1 / (√v + λ), Adam's preconditioner; λ is α times the mean of the parameter's √v.

    Args:
        second_moment: {NAME: (*shape)}: the optimiser's own v̂, or E[g²].
        damping: α ≥ 0; with 0 it is the pseudo-inverse.
    """
    return _damped("adam", {k: _Part(v.sqrt()) for k, v in second_moment.items()}, damping)


def _diagonals(aggregate: Aggregate) -> dict[str, _Part]:
    end = ".diagonal"
    return {k.removesuffix(end): _Part(v) for k, v in aggregate.items() if k.endswith(end)}


def _damped(name: str, parts: Mapping[str, _Part], damping: float) -> Curvature:
    """Return the curvature whose eigenvalues are those of all parts, each with its own λ."""
    if not 0 <= damping < inf:
        raise SpecError(f"the damping must be finite and not negative, not {damping}")
    inverses, absolute = {}, {}
    for own, (values, basis) in parts.items():
        if values.is_complex() or not bool(((values >= 0) & (values < inf)).all()):
            raise InputError(
                f"the second moments of {own!r} are not all finite and ≥ 0",
                remedy="Leave samples out whose gradients are not finite: --nonfinite skip.",
            )
        absolute[own] = damping * (float(values.double().mean()) if values.numel() else 0.0)
        inverses[own] = _Part(_inverted(values.double(), absolute[own]), basis)
    return Curvature(name, partial(_applied, inverses), absolute)


def _inverted(eigenvalues: Tensor, damping: float) -> Tensor:
    """Return 1 / (Λ + λ); without damping 0 where Λ is 0 to rounding, as in a pseudo-inverse."""
    least = 0.0
    if not damping and eigenvalues.numel():
        size = max(eigenvalues.shape, default=1)
        least = float(eigenvalues.max()) * size * torch.finfo(eigenvalues.dtype).eps
    return torch.where(eigenvalues + damping > least, 1.0 / (eigenvalues + damping), 0.0)


def _applied(
    inverses: Mapping[str, _Part], gradients: Gradients, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Return {name: (m, *shape)}: the rows of each layer times its inverse."""
    shapes = {name: block.shape for name, block in gradients.items()}
    found: dict[str, Tensor] = {}
    for name, (by, basis) in inverses.items():
        if name in shapes:
            found |= _layer_applied(name, by, basis, gradients, shapes, dtype)
    missing = ", ".join(repr(name) for name in shapes if name not in found)
    if missing:
        raise SpecError(
            f"the curvature has nothing for {missing}",
            remedy="Compute it of the same parameters as the gradients.",
        )
    return {name: found[name] for name in shapes}


def _layer_applied(
    name: str,
    by: Tensor,
    basis: Basis | None,
    gradients: Gradients,
    shapes: Shapes,
    dtype: torch.dtype | None,
) -> dict[str, Tensor]:
    def rows(own: str) -> Tensor:
        dense = gradients[own].dense()
        return precise(dense) if dtype is None else dense.to(dtype)

    if basis is None:
        if by.shape != shapes[name]:
            raise SpecError(
                f"the curvature of {name!r} has the shape {tuple(by.shape)}, and its gradients "
                f"{shapes[name]}"
            )
        values = rows(name)
        return {name: values * by.to(values.device, values.dtype)}
    layer = layer_of(name, basis.sizes, shapes)
    if layer is None:
        raise SpecError(
            f"the curvature of {name!r} is of {basis.sizes} groups, rows and columns, which does "
            f"not fit the gradients' {shapes[name]}"
        )
    matrices = layer.dense({own: rows(own) for own in layer[:2] if own is not None})
    found = basis.coordinates(matrices)
    return layer.apart(basis.back(found * by.to(found.device, found.dtype)), shapes)
