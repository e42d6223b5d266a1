"""The empirical Fisher F = (1/N) Σ gᵢ gᵢᵀ of the training samples, inverted exactly.

Where samples are fewer than numbers, by their Gram matrix K = G Gᵀ / N (N, N): with Woodbury's
identity q (F + λ)⁻¹ Gᵀ = q Gᵀ (K + λ)⁻¹. Where rows are short (projections), by F itself, one
matrix for each entry of the chain.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gradscope.attribution.products import Part, real_rows
from gradscope.errors import SpecError

Rows = dict[str, Tensor]  # {name: (m, entries)}, real


@dataclass(frozen=True)
class Gram:
    """The Gram matrix of N training samples, and its damping.

    Args:
        products: ⟨gᵢ, gⱼ⟩ (N, N) in float64; rows and columns of samples left out are zero.
        n: The samples that were not left out.
        damping: λ, in the unit of an eigenvalue of F.
    """

    products: Tensor
    n: int
    damping: float

    @cached_property
    def _root(self) -> Tensor:
        matrix = self.products / self.n
        matrix.diagonal().add_(self.damping)
        found: Tensor
        found, info = torch.linalg.cholesky_ex(matrix)
        if int(info):
            raise SpecError(
                "the Fisher matrix with this damping cannot be inverted in float64",
                where=f"damping {self.damping:g}",
                remedy="Give a larger --damping.",
            )
        return found

    def solved(self, products: Tensor) -> Tensor:
        """Return q (F + λ)⁻¹ Gᵀ (m, N) from the products q Gᵀ (m, N)."""
        found: Tensor = torch.cholesky_solve(products.mT, self._root).mT
        return found

    def self_influence(self) -> Tensor:
        """Return gᵢᵀ (F + λ)⁻¹ gᵢ (N,): n (1 − λ ((K + λ)⁻¹)ᵢᵢ)."""
        inverse = torch.cholesky_inverse(self._root).diagonal()
        return self.n * (1.0 - self.damping * inverse)


class Moments:
    """F itself, one block (w, w) for each entry of short rows."""

    def __init__(self) -> None:
        self.blocks: Rows = {}
        self.n = 0

    def add(self, part: Part) -> None:
        """Add some samples."""
        self.n += len(part.places)
        for name, block in part.gradients.items():
            rows = block.dense()
            dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
            values = real_rows(rows, dtype)
            products = (values.mT @ values).double()
            self.blocks[name] = (
                self.blocks[name].add_(products) if name in self.blocks else products
            )

    def mean_eigenvalues(self) -> dict[str, float]:
        """Return the mean eigenvalue of each block."""
        return {k: float(b.diagonal().mean()) / self.n for k, b in self.blocks.items()}

    def inverted(self, damping: Mapping[str, float]) -> Callable[[Mapping[str, Any]], Rows]:
        """Return what multiplies rows by (F + λ)⁻¹, with λ of each block."""
        roots = {}
        for name, block in self.blocks.items():
            matrix = block / self.n
            matrix.diagonal().add_(damping[name])
            roots[name], info = torch.linalg.cholesky_ex(matrix)
            if int(info):
                raise SpecError(
                    f"the Fisher matrix of {name!r} with this damping cannot be inverted",
                    where=f"damping {damping[name]:g}",
                    remedy="Give a larger --damping.",
                )

        def apply(rows: Mapping[str, Any]) -> Rows:
            found = {}
            for name, block in rows.items():
                values = real_rows(block.dense(), torch.float64)
                found[name] = torch.cholesky_solve(values.mT, roots[name]).mT.contiguous()
            return found

        return apply
