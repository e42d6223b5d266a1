"""Curvature: approximations of a Fisher that is inverted, from what chains have stored of it.

Query rows times the damped inverse, (F + λ)⁻¹g, layer by layer. A layer is a weight whose gradient
has factors, with its bias where that belongs to it (`blocks.layers`); anything else is a parameter
by itself with its diagonal. The damping is relative: α times the mean eigenvalue of the layer's
own block is added to each of its eigenvalues, so it means the same in every layer and model. With
the mean gradient (`Drift`), α is the least, and rises where training stopped early (`damping`).
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from gradscope.attribution.damping import trusted
from gradscope.blocks import DenseBlock, Gradients, Layer, layer_of
from gradscope.blocks.base import precise
from gradscope.errors import InputError, SpecError
from gradscope.stages.reducers.ekfac import Basis, bases_of

Aggregate = Mapping[str, Tensor]
Apply = Callable[[Gradients, torch.dtype | None], dict[str, Tensor]]
Shapes = Mapping[str, tuple[int, ...]]


class Drift(NamedTuple):
    """What is left of the gradient at the end of the training.

    Attributes:
        mean: The mean gradient of the training samples {NAME: (*shape)}.
        n: Their number N.
    """

    mean: Aggregate
    n: int


class Curvature(NamedTuple):
    """A damped curvature, inverted.

    Attributes:
        name: `kfac`, `ekfac`, `diagonal` or `adam`.
        apply: From gradients of m samples to {name: (m, *shape)}, the dense rows (F + λ)⁻¹g, in the
            dtype that is asked for or, with None, that of the gradients (float32 at least).
        damping: λ of each layer, by the name of its weight or only parameter.
        relative: α, λ over the mean eigenvalue.
    """

    name: str
    apply: Apply
    damping: dict[str, float]
    relative: float


class _Part(NamedTuple):
    """The Fisher of one layer: its eigenvalues, and where they are."""

    eigenvalues: Tensor  # (k, r, c) in the basis; (*shape) of the parameter where there is none
    basis: Basis | None = None


def kfac_curvature(aggregate: Aggregate, damping: float, drift: Drift | None = None) -> Curvature:
    """Return the inverse of B ⊗ A + λ, taken in the eigenbasis of both factors.

    Args:
        aggregate: What the chain `kfac` or `kfac:bias=column` has found: {NAME.A, NAME.B,
            NAME.diagonal}.
        damping: α ≥ 0; with 0 it is the pseudo-inverse.
        drift: Raises α where the mean gradient is far from zero.

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
    return _damped("kfac", parts, damping, drift)


def ekfac_curvature(aggregate: Aggregate, damping: float, drift: Drift | None = None) -> Curvature:
    """Return the inverse of the layers' second moments in their eigenbases, plus λ.

    George et al. 2018 (arXiv:1806.03884); for influence, Grosse et al. 2023 (arXiv:2308.03296).

    Args:
        aggregate: What the chain `ekfac` has found: {NAME.A.vectors, NAME.B.vectors,
            NAME.eigenvalues, NAME.diagonal}.
        damping: α ≥ 0; with 0 it is the pseudo-inverse.
        drift: Raises α where the mean gradient is far from zero.

    Raises:
        InputError: It is no result of `ekfac`.
    """
    parts = _diagonals(aggregate)
    for name, basis in bases_of(aggregate).items():
        if f"{name}.eigenvalues" not in aggregate:
            raise InputError(f"there are no eigenvalues of {name!r}: this is no result of ekfac")
        parts[name] = _Part(aggregate[f"{name}.eigenvalues"].reshape(basis.sizes), basis)
    return _damped("ekfac", parts, damping, drift)


def diagonal_curvature(
    second_moment: Aggregate, damping: float, drift: Drift | None = None
) -> Curvature:
    """Return 1 / (E[g²] + λ), the diagonal of the Fisher inverted.

    Args:
        second_moment: {NAME: (*shape)}, of the chain `square | mean` or `second_moment`.
        damping: α ≥ 0; with 0 it is the pseudo-inverse.
        drift: Raises α where the mean gradient is far from zero.
    """
    parts = {k: _Part(v) for k, v in second_moment.items()}
    return _damped("diagonal", parts, damping, drift)


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


def _damped(
    name: str, parts: Mapping[str, _Part], damping: float, drift: Drift | None = None
) -> Curvature:
    """Return the curvature whose eigenvalues are those of all parts, each with its own λ."""
    if not 0 <= damping < inf:
        raise SpecError(f"the damping must be finite and not negative, not {damping}")
    for own, (values, _) in parts.items():
        if values.is_complex() or not bool(((values >= 0) & (values < inf)).all()):
            raise InputError(
                f"the second moments of {own!r} are not all finite and ≥ 0",
                remedy="Leave samples out whose gradients are not finite: --nonfinite skip.",
            )
    if drift is not None:
        damping = _trusted(parts, damping, drift)
    inverses, absolute = {}, {}
    for own, (values, basis) in parts.items():
        absolute[own] = damping * (float(values.double().mean()) if values.numel() else 0.0)
        inverses[own] = _Part(_inverted(values.double(), absolute[own]), basis)
    return Curvature(name, partial(_applied, inverses), absolute, damping)


def _trusted(parts: Mapping[str, _Part], least: float, drift: Drift) -> float:
    """Return the damping that the mean gradient calls for, at least `least`."""
    mean = Gradients({k: DenseBlock(v.unsqueeze(0)) for k, v in drift.mean.items()})
    shapes = {name: block.shape for name, block in mean.items()}
    known = {own: part for own, part in parts.items() if own in shapes}
    squares = [
        _coordinates(own, part, mean, shapes, None)[1].abs().square()[0]
        for own, part in known.items()
    ]
    return trusted([part.eigenvalues for part in known.values()], squares, drift.n, least)


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
    layer, found = _coordinates(name, _Part(by, basis), gradients, shapes, dtype)
    found = found * by.to(found.device, found.dtype)
    if basis is None or layer is None:
        return {name: found}
    return layer.apart(basis.back(found), shapes)


def _coordinates(
    name: str, part: _Part, gradients: Gradients, shapes: Shapes, dtype: torch.dtype | None
) -> tuple[Layer | None, Tensor]:
    """Return the layer, and its rows in the basis (m, k, r, c), or (m, *shape) without one."""

    def rows(own: str) -> Tensor:
        dense = gradients[own].dense()
        return precise(dense) if dtype is None else dense.to(dtype)

    if part.basis is None:
        if part.eigenvalues.shape != shapes[name]:
            raise SpecError(
                f"the curvature of {name!r} has the shape {tuple(part.eigenvalues.shape)}, and its "
                f"gradients {shapes[name]}"
            )
        return None, rows(name)
    layer = layer_of(name, part.basis.sizes, shapes)
    if layer is None:
        raise SpecError(
            f"the curvature of {name!r} is of {part.basis.sizes} groups, rows and columns, which "
            f"does not fit the gradients' {shapes[name]}"
        )
    matrices = layer.dense({own: rows(own) for own in layer[:2] if own is not None})
    return layer, part.basis.coordinates(matrices)
