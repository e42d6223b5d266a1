"""Kronecker factors with eigenvalues of their own: second moments in the factors' eigenbasis.

George et al. 2018 (arXiv:1806.03884) keep the eigenvectors of A ⊗ B and take the best diagonal
there: for a layer's gradient G, E[(U_Bᵀ G U_A)²] instead of the products of both eigenvalues.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gradscope.blocks import Block, DenseBlock, Gradients, Layer, OuterBlock, layer_of, wide
from gradscope.blocks.base import precise
from gradscope.core.grammar import Stage
from gradscope.core.precision import double
from gradscope.errors import InputError, SpecError, UnsupportedError
from gradscope.stages.reducers.base import (
    TILE_BYTES,
    Earlier,
    Part,
    Reducer,
    State,
    added,
    count,
    entries,
    joined,
    parts,
    power_sum,
    reducers,
)
from gradscope.stages.reducers.kfac import kfac
from gradscope.stages.transforms.base import Vector

_DIAGONAL = ".diagonal"


class Basis(NamedTuple):
    """Where a layer's second moments are taken: eigenvectors, one a column, of k groups."""

    a: Tensor  # (k, c, c), float64 or complex128
    b: Tensor  # (k, r, r)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(k, r, c) of the layer's matrices."""
        return len(self.a), self.b.shape[-1], self.a.shape[-1]

    def coordinates(self, matrices: Tensor) -> Tensor:
        """Return U_Bᴴ G conj(U_A) of matrices G (n, k, r, c)."""
        return _between(self.b.mH.to(matrices), matrices, self.a.conj().to(matrices))

    def back(self, coordinates: Tensor) -> Tensor:
        """Return U_B C U_Aᵀ of coordinates C (n, k, r, c): what they are the coordinates of."""
        return _between(self.b.to(coordinates), coordinates, self.a.mT.to(coordinates))


def _between(left: Tensor, matrices: Tensor, right: Tensor) -> Tensor:
    """Return L G R (n, k, r, c), of left (k, r, r) and right (k, c, c), as few large products."""
    return torch.einsum("ksr,nkrd->nksd", left, torch.einsum("nkrc,kcd->nkrd", matrices, right))


@reducers.register("ekfac")
def ekfac(with_: Vector | None = None, full: int = 512) -> Reducer:
    """EK-FAC: NAME.eigenvalues E[(U_Bᵀ G U_A)²], with the bases NAME.A.vectors, NAME.B.vectors.

    U_A (c, c) and U_B (r, r) are the eigenvectors, one a column, of the factors that
    `kfac:bias=column` finds in an earlier pass over the data, and G (r, c) a sample's gradient as
    a matrix, its bias in the last column (or row). With G groups all three have a leading axis.
    The sum of the eigenvalues is E‖g‖². A dense parameter without factors of at most `full` numbers
    is one row (r = 1), and its eigenvalues those of E[g gᵀ]; others have NAME.diagonal (*shape),
    E[|g|²]. Nothing should come before.

    `with=` takes all bases from a stored `kfac`, or from a stored `ekfac` as they are there: then
    there is no earlier pass, and the samples may be others than those they were found with.

    George et al. 2018 (arXiv:1806.03884, section 3.2).
    """
    if with_ is not None:
        return _within(with_.values, with_.source)
    stage, first = (
        Stage("kfac", {"bias": "column", "full": f"{full}"}),
        kfac("mean", "column", full),
    )
    earlier = Earlier(stage, first, _after, _of_the_same_sizes)
    return Reducer(_waiting, added, dict, raw=True, earlier=earlier)


def bases_of(stored: Mapping[str, Tensor], source: str = "") -> dict[str, Basis]:
    """Return {weight: eigenvectors} of what `kfac` or `ekfac` has found.

    Raises:
        InputError: There are no factors, or one is not finite.
    """
    found = {}
    for key in stored:
        for end in (".A.vectors", ".A"):
            name = key.removesuffix(end)
            if name != key and f"{name}.B{end[2:]}" in stored:
                pair = (stored[f"{name}.{side}{end[2:]}"] for side in "AB")
                found[name] = Basis(*(_vectors(f, name, source, end != ".A") for f in pair))
                break
    if not found:
        raise InputError(
            "there are no Kronecker factors in it",
            where=source or None,
            remedy="Give the result of kfac or ekfac.",
        )
    return found


def _vectors(factor: Tensor, name: str, source: str, as_they_are: bool) -> Tensor:
    """Return a factor's eigenvectors (k, f, f); of vectors as they are, the vectors."""
    if not bool(factor.isfinite().all()):
        raise InputError(
            f"the Kronecker factors of {name!r} are not finite, so they have no eigenvectors",
            where=source or None,
            remedy="Leave samples out whose gradients are not finite: --nonfinite skip.",
        )
    matrices = factor.unsqueeze(0) if factor.dim() == 2 else factor
    return matrices if as_they_are else torch.linalg.eigh(matrices)[1]


def _of_the_same_sizes(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return bases as large as those of the factors that are found, without their eigenvectors."""
    return {
        f"{key}.vectors": torch.eye(value.shape[-1]).to(value).expand_as(value)
        for key, value in found.items()
        if key.endswith((".A", ".B"))
    } | _diagonals(found)


def _diagonals(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in found.items() if key.endswith(_DIAGONAL)}


def _after(found: Mapping[str, Tensor]) -> Reducer:
    """Return the reducer after the earlier pass, which has seen the same samples."""
    return _within(found, known=_diagonals(found))


def _waiting(gradients: Gradients) -> State:
    raise AssertionError("the earlier pass comes first")


def _within(
    stored: Mapping[str, Tensor], source: str = "", known: Mapping[str, Tensor] | None = None
) -> Reducer:
    """Return the reducer to second moments in the bases that are stored, and the diagonals.

    Of the parameters without factors, unless these are `known`: {NAME.diagonal: (*shape)}.
    """
    bases = bases_of(stored, source)
    marks = {name: _mark(basis) for name, basis in bases.items()}
    plain = [key.removesuffix(_DIAGONAL) for key in _diagonals(stored)]

    def start(gradients: Gradients) -> State:
        layers = _layers(bases, gradients, source)
        inside = {layer.bias for layer in layers.values()}
        every: dict[str, Part] = {}
        for name, block in gradients.items():
            if name in layers:
                moments = _moments(gradients, layers[name], bases[name])
                every[name] = {"moments": moments, "basis": marks[name].to(block.device)}
            elif name not in inside and known is None:
                every[name] = {"squares": wide(block).squared_sum()}
        return joined(count(gradients), every)

    def merge(a: State, b: State) -> State:
        _require_bases(a, marks)
        total = added(a, b)
        return {key: b[key] if key.startswith("basis:") else total[key] for key in total}

    def result(state: State) -> dict[str, Tensor]:
        _require_bases(state, marks)
        found: dict[str, Tensor] = {}
        rest = dict(known or {})
        for name, part in parts(state).items():
            if "squares" in part:
                rest[f"{name}{_DIAGONAL}"] = part["squares"] / state["n"]
                continue
            values = (*bases[name], part["moments"] / state["n"])
            for word, value in zip(("A.vectors", "B.vectors", "eigenvalues"), values, strict=True):
                found[f"{name}.{word}"] = value[0] if len(value) == 1 else value
        return found | rest

    note = f"ekfac: no Kronecker factors, so the diagonal alone: {', '.join(plain)}"
    return Reducer(start, merge, result, raw=True, note=note if plain else "")


def _require_bases(state: State, marks: Mapping[str, Tensor]) -> None:
    """Refuse a state of samples that were held against other eigenvectors."""
    for name, mark in entries(state, "basis").items():
        if int(mark) != int(marks[name]):
            raise UnsupportedError(
                f"{name}: the eigenvectors are not those that earlier samples were held against",
                remedy="Begin again (--overwrite), or give the bases: ekfac:with=FILE.h5:CHAIN.",
            )


def _layers(bases: Mapping[str, Basis], gradients: Gradients, source: str) -> dict[str, Layer]:
    shapes = {name: block.shape for name, block in gradients.items()}
    found = {}
    for name in gradients:
        if name in bases:
            layer = layer_of(name, bases[name].sizes, shapes)
            if layer is None:
                raise SpecError(
                    f"the stored factors of {name!r} are of {bases[name].sizes} groups, rows and "
                    f"columns, which does not fit the parameter's {shapes[name]}",
                    where=source or None,
                )
            found[name] = layer
    return found


def _moments(gradients: Gradients, layer: Layer, basis: Basis) -> Tensor:
    """Return Σᵢ |U_Bᴴ Gᵢ conj(U_A)|² (k, r, c), a few samples at a time."""
    k, r, c = layer.sizes
    weight = gradients[layer.weight]
    dtype = precise(torch.empty(0, dtype=weight.dtype)).dtype
    if basis.a.is_complex():
        dtype = torch.promote_types(dtype, torch.complex64)
    basis = Basis(*(side.to(weight.device, dtype) for side in basis))
    factored = weight.factored_size or 0
    positions = factored // (k * (r + c)) + 1  # about t
    by_factors = weight.kind == "outer" and positions * (r * r + c * c) <= r * c * (r + c)
    size = (factored if by_factors else k * r * c) * dtype.itemsize
    step = max(1, TILE_BYTES // max(1, size))
    found = torch.zeros(layer.sizes, dtype=double(weight.device), device=weight.device)
    for start in range(0, gradients.n, step):
        some = gradients.select(slice(start, start + step))
        block = _rotated(some, layer, basis, by_factors)
        found += power_sum(Gradients({layer.weight: block}), layer.weight, 2)
    return found


def _rotated(gradients: Gradients, layer: Layer, basis: Basis, by_factors: bool) -> Block:
    """Return the coordinates of some samples' gradients, (n, k, r, c)."""
    dtype = basis.a.dtype
    factors = layer.factors(gradients) if by_factors else None
    if factors is not None:
        left, right = (f.to(dtype) for f in factors)
        left = torch.einsum("nktr,krs->nkts", left, basis.b.conj())
        right = torch.einsum("nktc,kcd->nktd", right, basis.a.conj())
        return OuterBlock(left, right, layer.sizes)
    names = [name for name in (layer.weight, layer.bias) if name is not None]
    rows = {name: gradients[name].dense().to(dtype) for name in names}
    return DenseBlock(basis.coordinates(layer.dense(rows)))


def _mark(basis: Basis) -> Tensor:
    """Return a number () that tells eigenvectors from others, bit by bit."""
    bits = [torch.view_as_real(s) if s.is_complex() else s for s in basis]
    whole = {8: torch.int64, 4: torch.int32}
    sums = [t.contiguous().view(whole[t.dtype.itemsize]).flatten() for t in bits]
    weights = [torch.arange(1, 2 * len(s), 2, device=s.device) for s in sums]
    return torch.stack([(s * w).sum() for s, w in zip(sums, weights, strict=True)]).sum()
