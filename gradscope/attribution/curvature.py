"""Curvature: the damped inverse of a Fisher matrix or of an approximation, from stored chains.

Query rows are multiplied by (F + λ)⁻¹, layer by layer. A layer is a weight whose gradient has
factors, with the bias that belongs to it (`blocks.layers`), or a small parameter (`kfac:full=`).
Every other parameter uses its diagonal. The damping is relative: λ is α times the mean eigenvalue
of the layer's block, so that α means the same in every layer and model. With α = 0 the inverse is
the pseudo-inverse. With the mean gradient (`RemainingGradient`), a constant is added to all layers
if training stopped early (`trusted`).

The empirical Fisher F = (1/N) Σ gᵢ gᵢᵀ is inverted exactly (`Gram`, `Moments`), for all entries of
a row together or layer by layer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import inf, prod
from typing import NamedTuple

import torch
from torch import Tensor

from gradscope.attribution.products import real_rows, sum_of
from gradscope.blocks import Block, DenseBlock, Gradients, LayerWeights, OuterBlock, layer_of
from gradscope.blocks.base import precise
from gradscope.core.precision import doubled
from gradscope.errors import InputError, SpecError
from gradscope.process.memory import slices
from gradscope.stages.reducers.kfac import Basis, bases_of, rotated

LEAST = 0.1  # α for a converged model; a factor 5 up or down changes little
_TIMES = 2.0  # the largest step, in units of the noise
_PER_DIRECTION = 10.0  # α is raised where there are fewer samples for each effective direction
_RAISED = 100.0  # the most by which it is raised, and to which
_GRAM_ROWS = 4096  # rows of a matrix that are converted to float64 at a time
_STEPS = 40  # bisections of an interval [α, 2α]


class Ridge(NamedTuple):
    """λ = αΛ̄ₗ + βΛ̄ of a layer: Λ̄ₗ is the mean of its eigenvalues, and Λ̄ that of all layers."""

    own: float  # α
    common: float = 0.0  # β

    @property
    def relative(self) -> float:
        """α + β: the mean λ of all eigenvalues, over their mean Λ̄."""
        return self.own + self.common

    def times(self, factor: float) -> "Ridge":
        """Return the damping with both parts multiplied by a factor."""
        return Ridge(factor * self.own, factor * self.common)

    def of(self, means: Sequence[float], sizes: Sequence[int]) -> list[float]:
        """Return λ of each layer from Λ̄ₗ and the numbers of eigenvalues.

        Layers without any gradient do not count in Λ̄.
        """
        counted = sum(size for mean, size in zip(means, sizes, strict=True) if mean)
        total = sum(mean * size for mean, size in zip(means, sizes, strict=True)) / max(counted, 1)
        return [self.own * mean + self.common * total for mean in means]


def _of(eigenvalues: Sequence[Tensor]) -> tuple[list[float], list[int]]:
    """Return Λ̄ₗ and the number of eigenvalues of each layer, of any shape."""
    means = [float(e.double().mean()) if e.numel() else 0.0 for e in eigenvalues]
    return means, [e.numel() for e in eigenvalues]


def trusted(
    eigenvalues: Sequence[Tensor], squares: Sequence[Tensor], n: int, least: float = LEAST
) -> Ridge:
    """Return α = `least` and the smallest β ≥ 0 whose Newton step can be trusted.

    At the end of a training the mean gradient ḡ is about zero, and a small α is near the best. If
    training stopped earlier, ḡ is not zero. The remaining Newton step (H + λ)⁻¹ḡ then leads far
    from the model, where the linearisation behind the scores does not hold. In this case β rises
    until the step is as short as the step that sampling noise (N samples) alone causes with β = 0.
    β is the same in all layers, because an early stop acts like a constant that is added to every
    eigenvalue (Ali et al. 2019, arXiv:1810.10082). Neither queries nor retrained models are used.

    With eigenvalues Λ_k and squares ḡ_k² of the mean gradient along their eigenvectors, λ of a
    layer, and λ₀ its value with β = 0:

        Σ_k ḡ_k² Λ_k / (Λ_k + λ)²  ≤  (2/N) Σ_k Λ_k² / (Λ_k + λ₀)²

    On the left is dᵀHd of the step d. On the right is twice its expectation with λ₀, if ḡ is the
    mean of N = `n` draws with mean zero and second moment H. The left side falls as β rises. Each
    layer's eigenvalues are not negative; its squares have the same shape, which may be any.
    """
    each = [(e.double(), s.double()) for e, s in zip(eigenvalues, squares, strict=True) if e.any()]
    spectra, along_mean = [e for e, _ in each], [s for _, s in each]
    layers = _of(spectra)

    def step(common: float, squares: Sequence[Tensor]) -> float:
        added = Ridge(least, common).of(*layers)
        return sum(_step(*one) for one in zip(spectra, squares, added, strict=True))

    noise = _TIMES / n * step(0.0, spectra)

    def too_far(common: float) -> bool:
        return step(common, along_mean) > noise

    if not each or not too_far(0.0):
        return Ridge(least)
    high = least
    while too_far(high):
        high *= 2.0
    low = high / 2.0 if high > least else 0.0
    for _ in range(_STEPS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if too_far(middle) else (low, middle)
    return Ridge(least, high)


def raised_damping(eigenvalues: Sequence[Tensor], damping: Ridge, n: int) -> Ridge:
    """Return the damping of EK-FAC times 10 N / d: at least 1, at most 100, and α + β at most 100.

    d = Σ_k Λ_k / (Λ_k + λ) is the effective number of directions. Together with the Fisher,
    EK-FAC needs more damping than alone, unless there are many directions for each of the N samples
    (`python -m benchmarks.attribution.study`).
    """
    each = [e.double() for e in eigenvalues if e.any()]
    added = damping.of(*_of(each))
    directions = sum(float((e / (e + own)).sum()) for e, own in zip(each, added, strict=True))
    times = min(_PER_DIRECTION * n / max(directions, 1.0), _RAISED)
    if damping.relative:
        times = min(times, _RAISED / damping.relative)
    return damping.times(max(times, 1.0))


def _step(eigenvalues: Tensor, squares: Tensor, added: float) -> float:
    """Return Σ_k s_k Λ_k / (Λ_k + λ)²."""
    tiny = torch.finfo(torch.float64).tiny
    raised = (eigenvalues + added).square().clamp_(min=tiny)
    return float((squares * eigenvalues / raised).sum())


def along(gram: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of K = G Gᵀ / N, and the squares of the mean gradient along them.

    If u is an eigenvector of K, then Gᵀu / √(Nλ) is an eigenvector of the empirical Fisher GᵀG / N.
    The mean gradient is Gᵀ1 / N, so ḡ_k² = λ_k (u_k·1)² / N. Both results are (N,) in float64. In
    `gram` (N, N), rows and columns of samples left out are zero; `n` counts the other samples.
    """
    eigenvalues, vectors = torch.linalg.eigh(gram.double())
    eigenvalues = eigenvalues.clamp_(min=0.0)
    return eigenvalues, eigenvalues * vectors.sum(0).square() / n


Aggregate = Mapping[str, Tensor]
Apply = Callable[[Gradients, torch.dtype | None], dict[str, Tensor]]
Truncate = Callable[[Gradients, int], tuple[dict[str, Block], Tensor]]
Shapes = Mapping[str, tuple[int, ...]]


class RemainingGradient(NamedTuple):
    """The mean gradient at the end of the training, which is zero at a minimum."""

    mean: Aggregate  # the mean gradient of the training samples {NAME: (*shape)}, {} if unknown
    n: int  # their number N
    raised: bool = False  # whether the damping is also raised by `raised_damping`


class Curvature(NamedTuple):
    """The inverse of a damped curvature."""

    # from gradients of m samples to {name: (m, *shape)}, the dense rows (F + λ)⁻¹g, in the given
    # dtype; the default is the gradients' dtype, float32 at least
    apply: Apply
    damping: dict[str, float]  # λ of each layer, by the name of its weight or only parameter
    chosen: Ridge  # the damping by which λ was computed
    # from gradients of m samples and R to {name: block}, the rows (F + λ)⁻¹g of which matrices have
    # at most rank R, and ‖dropped‖ / ‖(F + λ)⁻¹g‖ (m,) in float64
    truncate: Truncate


class _LayerSpectrum(NamedTuple):
    """The Fisher of one layer: its eigenvalues and their basis."""

    eigenvalues: Tensor  # (k, r, c) in the basis; without a basis (*shape) of the parameter
    basis: Basis | None = None


def kfac_curvature(
    aggregate: Aggregate, damping: float | Ridge, drift: RemainingGradient | None = None
) -> Curvature:
    """Return the inverse of B ⊗ A + λ, computed in the eigenbasis of both factors.

    `aggregate` is the result of the chain `kfac` or `kfac:bias=column`: {NAME.A, NAME.B,
    NAME.diagonal}.

    Raises:
        InputError: There are no factors, or one is not finite.
    """
    parts = _diagonals(aggregate)
    for name, basis in bases_of(aggregate).items():
        a, b = (  # uᴴ F u of each eigenvector u
            (u.conj() * (aggregate[f"{name}.{side}"].reshape(u.shape) @ u)).sum(1).real.clamp_min(0)
            for side, u in zip("AB", basis, strict=True)
        )
        parts[name] = _LayerSpectrum(b.unsqueeze(2) * a.unsqueeze(1), basis)
    return _damped(parts, damping, drift)


def ekfac_curvature(
    aggregate: Aggregate, damping: float | Ridge, drift: RemainingGradient | None = None
) -> Curvature:
    """Return the inverse of the layers' second moments in their eigenbases, plus λ.

    George et al. 2018 (arXiv:1806.03884); for influence, Grosse et al. 2023 (arXiv:2308.03296).
    `aggregate` is the result of the chain `ekfac`: {NAME.A.vectors, NAME.B.vectors,
    NAME.eigenvalues, NAME.diagonal}.

    Raises:
        InputError: `aggregate` is not a result of `ekfac`.
    """
    parts = _diagonals(aggregate)
    for name, basis in bases_of(aggregate).items():
        if f"{name}.eigenvalues" not in aggregate:
            raise InputError(f"the eigenvalues of {name!r} are missing: not a result of ekfac")
        parts[name] = _LayerSpectrum(aggregate[f"{name}.eigenvalues"].reshape(basis.sizes), basis)
    return _damped(parts, damping, drift)


def diagonal_curvature(
    second_moment: Aggregate, damping: float | Ridge, drift: RemainingGradient | None = None
) -> Curvature:
    """Return 1 / (E[g²] + λ), the inverse of the Fisher's diagonal, from {NAME: E[g²] (*shape)}."""
    return _damped({k: _LayerSpectrum(v) for k, v in second_moment.items()}, damping, drift)


def adam_curvature(second_moment: Aggregate, damping: float) -> Curvature:
    """Return 1 / (√v + λ), Adam's preconditioner; λ is α times the mean of the parameter's √v.

    `second_moment` {NAME: (*shape)} is the optimiser's v̂, or E[g²].
    """
    return _damped({k: _LayerSpectrum(v.sqrt()) for k, v in second_moment.items()}, damping)


def _diagonals(aggregate: Aggregate) -> dict[str, _LayerSpectrum]:
    end = ".diagonal"
    return {k.removesuffix(end): _LayerSpectrum(v) for k, v in aggregate.items() if k.endswith(end)}


def _damped(
    parts: Mapping[str, _LayerSpectrum],
    damping: float | Ridge,
    drift: RemainingGradient | None = None,
) -> Curvature:
    """Return the inverse curvature of all layers; λ is computed for each layer."""
    damping = damping if isinstance(damping, Ridge) else Ridge(damping)
    if not 0 <= damping.relative < inf:
        raise SpecError(
            f"the damping is {damping.relative}, which is negative or not finite",
            remedy="Give a `damping` of at least 0, such as 0.1, or auto.",
        )
    for own, (values, _) in parts.items():
        if values.is_complex() or not bool(((values >= 0) & (values < inf)).all()):
            raise InputError(
                f"the second moments of {own!r} contain negative or non-finite numbers",
                remedy='Leave out samples whose gradient is not finite: nonfinite="skip".',
            )
    spectra = [part.eigenvalues for part in parts.values()]
    if drift is not None and drift.mean:
        damping = _trusted(parts, damping.own, drift)
    if drift is not None and drift.raised:
        damping = raised_damping(spectra, damping, drift.n)
    absolute = dict(zip(parts, damping.of(*_of(spectra)), strict=True))
    inverses = {}
    for own, (values, basis) in parts.items():
        inverse = _inverted(values.double(), absolute[own])
        like = inverse if basis is None else basis.a.real
        inverses[own] = _LayerSpectrum(inverse.to(like), basis)
    apply, truncate = (partial(fn, inverses) for fn in (_applied, _truncated))
    return Curvature(apply, absolute, damping, truncate)  # type: ignore[arg-type]


def _trusted(parts: Mapping[str, _LayerSpectrum], least: float, drift: RemainingGradient) -> Ridge:
    """Return the damping of `trusted` for the mean gradient."""
    mean = Gradients({k: DenseBlock(v.unsqueeze(0)) for k, v in drift.mean.items()})
    shapes = {name: block.shape for name, block in mean.items()}
    known = {own: part for own, part in parts.items() if own in shapes}
    squares = [
        _coordinates(own, part, mean, shapes, None)[1].abs().square()[0]
        for own, part in known.items()
    ]
    return trusted([part.eigenvalues for part in known.values()], squares, drift.n, least)


def _inverted(eigenvalues: Tensor, damping: float) -> Tensor:
    """Return 1 / (Λ + λ). If λ = 0, return 0 where Λ is 0 within rounding (pseudo-inverse)."""
    least = 0.0
    if not damping and eigenvalues.numel():
        size = max(eigenvalues.shape, default=1)
        least = float(eigenvalues.max()) * size * torch.finfo(eigenvalues.dtype).eps
    return torch.where(eigenvalues + damping > least, 1.0 / (eigenvalues + damping), 0.0)


class _Rows(NamedTuple):
    """The rows of a layer or parameter times its inverse, in the layer's basis."""

    name: str
    values: Tensor  # (m, k, r, c); without a basis (m, *shape)
    layer: LayerWeights | None
    basis: Basis | None

    def blocks(self, shapes: Shapes) -> dict[str, Block]:
        """Return {name: (m, *shape)} of the weight and its bias, dense."""
        if self.basis is None or self.layer is None:
            return {self.name: DenseBlock(self.values)}
        split = self.layer.split(self.basis.back(self.values), shapes)
        return {name: DenseBlock(values) for name, values in split.items()}

    def truncated(self, rank: int, shapes: Shapes) -> tuple[dict[str, Block], Tensor]:
        """Return blocks of at most this rank, and ‖dropped‖² (m,).

        A parameter stays as it is if its outer products have as many numbers.
        """
        values = self.values
        if self.basis is None:
            values = values.reshape(len(values), 1, *_matrix(shapes[self.name]))
        if stored_numbers(values.shape[2:], rank) == prod(values.shape[2:]):
            return self.blocks(shapes), values.new_zeros(len(values), dtype=torch.float64)
        left, right, dropped = _best(values, rank)
        if self.basis is None or self.layer is None:
            return {self.name: OuterBlock(left, right, shapes[self.name])}, dropped
        left, right = left @ self.basis.b.mT.to(left), right @ self.basis.a.mT.to(right)
        return self.layer.split_factors(left, right, shapes), dropped


def stored_numbers(shape: Sequence[int], rank: int) -> int:
    """Return the numbers of a row of this shape, as a matrix of at most this rank if rank > 0."""
    r, c = _matrix(shape)
    return min(r * c, rank * (r + c)) if rank else r * c


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns of a parameter as a matrix."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


def _best(matrices: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return L (m, k, R, r), V (m, k, R, c) and ‖C − Σ L ⊗ V‖² (m,) for matrices C (m, k, r, c).

    Σ L ⊗ V is the truncated singular value decomposition (Eckart and Young 1936). The shorter of
    its factors has eigenvectors of CCᴴ or CᴴC in float64, and the other factor is their product
    with C.
    """
    m, k, r, c = matrices.shape
    wide = r < c
    left, right = matrices.new_empty(m, k, rank, r), matrices.new_empty(m, k, rank, c)
    dropped = matrices.new_zeros(m, dtype=torch.float64).real
    for i in range(m):  # one at a time: sums in float64 take memory
        for j in range(k):
            own = matrices[i, j].mH if wide else matrices[i, j]
            wider = (doubled(own[rows]) for rows in slices(len(own), 1, _GRAM_ROWS))
            gram = sum_of(part.mH @ part for part in wider)
            values, vectors = torch.linalg.eigh(gram)
            dropped[i] += values[:-rank].clamp(min=0.0).sum()
            short = vectors[:, -rank:].to(own)
            long = own @ short
            a, b = (short, long.conj()) if wide else (long, short.conj())
            left[i, j], right[i, j] = a.mT, b.mT
    return left, right, dropped


def _preconditioned(
    inverses: Mapping[str, _LayerSpectrum], gradients: Gradients, dtype: torch.dtype | None = None
) -> Iterator[_Rows]:
    """Yield the rows of each layer times its inverse.

    Raises:
        SpecError: A parameter of the gradients is in no layer.
    """
    shapes = {name: block.shape for name, block in gradients.items()}
    missing = dict.fromkeys(shapes)
    for name, part in inverses.items():
        if name in shapes:
            layer, rows = _coordinates(name, part, gradients, shapes, dtype)
            missing.pop(name, None)
            if layer is not None and layer.bias is not None:
                missing.pop(layer.bias, None)
            rows = rows * part.eigenvalues.to(rows.device, rows.dtype)
            yield _Rows(name, rows, layer, part.basis)
    if missing:
        raise SpecError(
            f"the curvature lacks the parameters {', '.join(map(repr, missing))}",
            remedy="Compute the curvature for the same parameters as the gradients.",
        )


def _applied(
    inverses: Mapping[str, _LayerSpectrum], gradients: Gradients, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Return {name: (m, *shape)}: the rows of each layer times its inverse."""
    shapes = {name: block.shape for name, block in gradients.items()}
    found: dict[str, Block] = {}
    for rows in _preconditioned(inverses, gradients, dtype):
        found |= rows.blocks(shapes)
    return {name: found[name].dense() for name in shapes}


def _truncated(
    inverses: Mapping[str, _LayerSpectrum], gradients: Gradients, rank: int
) -> tuple[dict[str, Block], Tensor]:
    """Return {name: block of at most this rank}, and ‖dropped‖ / ‖rows‖ (m,) of all layers."""
    shapes = {name: block.shape for name, block in gradients.items()}
    found: dict[str, Block] = {}
    whole = dropped = torch.zeros((), dtype=torch.float64)
    for rows in _preconditioned(inverses, gradients):
        blocks, lost = rows.truncated(rank, shapes)
        found |= blocks
        own = rows.values.flatten(1)
        squares = torch.linalg.vector_norm(own, dim=1, dtype=doubled(own[:0]).dtype).square()
        whole, dropped = whole + squares, dropped + lost
    share = torch.where(whole > 0, dropped / whole, 0.0).clamp(max=1.0).sqrt()
    return {name: found[name] for name in shapes}, share


def _coordinates(
    name: str, part: _LayerSpectrum, gradients: Gradients, shapes: Shapes, dtype: torch.dtype | None
) -> tuple[LayerWeights | None, Tensor]:
    """Return the layer, and its rows in the basis (m, k, r, c); without a basis (m, *shape)."""
    if part.basis is None:
        if part.eigenvalues.shape != shapes[name]:
            raise SpecError(
                f"the curvature of {name!r} has the shape {tuple(part.eigenvalues.shape)}, but its "
                f"gradients have {shapes[name]}"
            )
        dense = gradients[name].dense()
        return None, precise(dense) if dtype is None else dense.to(dtype)
    layer = layer_of(name, part.basis.sizes, shapes)
    if layer is None:
        raise SpecError(
            f"the curvature of {name!r} has {part.basis.sizes} groups, rows and columns, which "
            f"does not fit the gradients' shape {shapes[name]}"
        )
    own = layer.of(gradients)
    own = own if dtype is None else own.map(lambda block: block.to(dtype))
    return layer, rotated(own, layer, part.basis.like(own[name])).dense()


NamedRows = dict[str, Tensor]  # {name: (m, entries)}, real, or (m, *shape)


@dataclass
class Gram:
    """The Gram matrix of N training samples, and its damping."""

    # ⟨gᵢ, gⱼ⟩ (N, N) in float64; rows and columns of samples left out are zero
    products: Tensor
    n: int  # the number of samples that were not left out
    damping: float  # λ, in the unit of an eigenvalue of F

    @cached_property
    def _root(self) -> Tensor:
        return damped_root(self.products / self.n, self.damping)

    def solved(self, products: Tensor) -> Tensor:
        """Return q (F + λ)⁻¹ Gᵀ (m, N) from the products q Gᵀ (m, N)."""
        found: Tensor = torch.cholesky_solve(products.mT, self._root).mT
        return found

    def self_influence(self) -> Tensor:
        """Return gᵢᵀ (F + λ)⁻¹ gᵢ (N,): the diagonal of N K (K + λ)⁻¹."""
        return torch.einsum("ij,ij->i", self.products, torch.cholesky_inverse(self._root))

    def own(self, squares: Tensor, products: Tensor) -> Tensor:
        """Return qᵀ (F + λ)⁻¹ q (m,) from ‖q‖² (m,) and q Gᵀ (m, N), by Woodbury's identity.

        Without damping it is qᵀ F⁺ q with the pseudo-inverse, to which `solved` also tends.
        """
        solved = self.solved(products)
        if not self.damping:
            return solved.square().sum(1) / self.n
        inside = torch.einsum("ij,ij->i", products, solved) / self.n
        return (squares - inside) / self.damping


class Moments:
    """The exact Fisher of short rows, one block (w, w) for each group of {entry: group}."""

    def __init__(self, groups: Mapping[str, str]) -> None:
        self._names: dict[str, list[str]] = {}
        for name, group in groups.items():
            self._names.setdefault(group, []).append(name)
        self.sums: NamedRows = {}  # N times the blocks, in float64
        self._totals: NamedRows = {}  # Σ of the rows (w,), in float64
        self.n = 0

    def add(self, gradients: Gradients) -> None:
        """Add the samples of a batch."""
        self.n += gradients.n
        dtypes = (block.dtype for block in gradients.values())
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        for group in self._names:
            rows = self._rows(gradients, group, dtype)
            products = (rows.mT @ rows).double()
            total = rows.sum(0, dtype=torch.float64)
            if group in self.sums:
                self.sums[group] += products
                self._totals[group] += total
            else:
                self.sums[group], self._totals[group] = products, total

    def mean_eigenvalues(self) -> dict[str, float]:
        """Return {group: mean eigenvalue of its block}, over the N largest eigenvalues at most."""
        return {
            group: float(total.diagonal().sum()) / self.n / min(self.n, len(total))
            for group, total in self.sums.items()
        }

    def spectra(self) -> list[tuple[Tensor, Tensor]]:
        """Return the eigenvalues (w,) of each block, and the squares of the mean row along them."""
        found = []
        for group, total in self.sums.items():
            values, vectors = torch.linalg.eigh(total / self.n)
            along = vectors.mT @ (self._totals[group] / self.n)
            found.append((values.clamp_(min=0.0), along.square()))
        return found

    def inverted(self, damping: Mapping[str, float]) -> Callable[[Gradients], NamedRows]:
        """Return a function that multiplies rows by (F + λ)⁻¹, with λ of each group."""
        roots = {g: damped_root(s / self.n, damping[g]) for g, s in self.sums.items()}

        def apply(gradients: Gradients) -> NamedRows:
            found: NamedRows = {}
            for group, root in roots.items():
                rows = self._rows(gradients, group, torch.float64)
                solved = torch.cholesky_solve(rows.mT, root).mT
                blocks = {name: gradients[name] for name in self._names[group]}
                entries = [prod(b.shape) * (1 + b.dtype.is_complex) for b in blocks.values()]
                pairs = zip(blocks.items(), torch.split(solved, entries, 1), strict=True)
                found |= {k: _as_block(v.contiguous(), block) for (k, block), v in pairs}
            return found

        return apply

    def _rows(self, gradients: Gradients, group: str, dtype: torch.dtype) -> Tensor:
        every = (gradients[name].dense() for name in self._names[group])
        return torch.cat([real_rows(rows, dtype) for rows in every], 1)


def _as_block(values: Tensor, block: Block) -> Tensor:
    """Return real rows (n, entries) of `real_rows` as (n, *shape), complex like the block."""
    if block.dtype.is_complex:
        return torch.view_as_complex(values.reshape(len(values), *block.shape, 2))
    return values.reshape(len(values), *block.shape)


def damped_root(matrix: Tensor, damping: float) -> Tensor:
    """Return the Cholesky factor of matrix + λ; overwrites the matrix.

    Raises:
        SpecError: The sum is not positive definite in float64.
    """
    matrix.diagonal().add_(damping)
    found: Tensor
    found, info = torch.linalg.cholesky_ex(matrix)
    if int(info):
        raise SpecError(
            "the Fisher matrix with this damping cannot be inverted in float64",
            where=f"damping {damping:g}",
            remedy="Give a larger `damping`.",
        )
    return found
