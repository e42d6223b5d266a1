"""The empirical Fisher F = (1/N) Σ gᵢ gᵢᵀ of the training samples, inverted exactly.

Where samples are fewer than numbers, by their Gram matrix K = G Gᵀ / N (N, N): with Woodbury's
identity q (F + λ)⁻¹ Gᵀ = q Gᵀ (K + λ)⁻¹. Where rows are short, by F itself. Either for all entries
of a row together, or for groups of them (layers), each by itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from gradscope.attribution.products import Part, real_rows
from gradscope.blocks import Gradients
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
        return damped_root(self.products / self.n, self.damping)

    def solved(self, products: Tensor) -> Tensor:
        """Return q (F + λ)⁻¹ Gᵀ (m, N) from the products q Gᵀ (m, N)."""
        found: Tensor = torch.cholesky_solve(products.mT, self._root).mT
        return found

    def self_influence(self) -> Tensor:
        """Return gᵢᵀ (F + λ)⁻¹ gᵢ (N,): n (1 − λ ((K + λ)⁻¹)ᵢᵢ)."""
        inverse = torch.cholesky_inverse(self._root).diagonal()
        return self.n * (1.0 - self.damping * inverse)


class Moments:
    """F itself, one block (w, w) for each group of entries of short rows.

    Args:
        groups: {entry: group}.
    """

    def __init__(self, groups: Mapping[str, str]) -> None:
        self._names: dict[str, list[str]] = {}
        for name, group in groups.items():
            self._names.setdefault(group, []).append(name)
        self.sums: Rows = {}  # N times the blocks, in float64
        self._totals: Rows = {}  # Σ of the rows (w,), likewise
        self.n = 0

    def add(self, part: Part) -> None:
        """Add some samples."""
        self.n += len(part.places)
        blocks = part.gradients
        dtypes = (block.dtype for block in blocks.values())
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        for group in self._names:
            rows = self._rows(blocks, group, dtype)
            products = (rows.mT @ rows).double()
            total = rows.sum(0, dtype=torch.float64)
            if group in self.sums:
                self.sums[group] += products
                self._totals[group] += total
            else:
                self.sums[group], self._totals[group] = products, total

    def mean_eigenvalues(self) -> dict[str, float]:
        """Return the mean of each block's eigenvalues, of the N largest if there are more."""
        return {
            group: float(total.diagonal().sum()) / self.n / min(self.n, len(total))
            for group, total in self.sums.items()
        }

    def spectra(self) -> list[tuple[Tensor, Tensor]]:
        """Return of each block its eigenvalues, and the squares of the mean row along them (w,)."""
        found = []
        for group, total in self.sums.items():
            values, vectors = torch.linalg.eigh(total / self.n)
            along = vectors.mT @ (self._totals[group] / self.n)
            found.append((values.clamp_(min=0.0), along.square()))
        return found

    def inverted(self, damping: Mapping[str, float]) -> Callable[[Gradients], Rows]:
        """Return what multiplies rows by (F + λ)⁻¹, with λ of each group."""
        roots = {g: damped_root(s / self.n, damping[g]) for g, s in self.sums.items()}

        def apply(gradients: Gradients) -> Rows:
            found: Rows = {}
            for group, root in roots.items():
                rows = self._rows(gradients, group, torch.float64)
                solved = torch.cholesky_solve(rows.mT, root).mT.contiguous()
                widths = [prod(gradients[name].shape) for name in self._names[group]]
                pairs = zip(self._names[group], torch.split(solved, widths, 1), strict=True)
                found |= {k: v.reshape(len(v), *gradients[k].shape) for k, v in pairs}
            return found

        return apply

    def _rows(self, gradients: Gradients, group: str, dtype: torch.dtype) -> Tensor:
        every = (gradients[name].dense() for name in self._names[group])
        return torch.cat([real_rows(rows, dtype) for rows in every], 1)


def damped_root(matrix: Tensor, damping: float) -> Tensor:
    """Return the Cholesky factor of a matrix + λ; the matrix is used up.

    Raises:
        SpecError: It has none, in float64.
    """
    matrix.diagonal().add_(damping)
    found: Tensor
    found, info = torch.linalg.cholesky_ex(matrix)
    if int(info):
        raise SpecError(
            "the Fisher matrix with this damping cannot be inverted in float64",
            where=f"damping {damping:g}",
            remedy="Give a larger --damping.",
        )
    return found
