"""Kronecker factors (K-FAC), and second moments in their eigenbasis (EK-FAC).

A layer's gradient is Σₜ bₜ ⊗ aₜ over T positions, where a is the activation and b the output
gradient. A linear layer on vectors has a single position. The positions of a convolution are output
pixels, the positions of a shared layer are time steps. Martens and Grosse 2015 (arXiv:1503.05671)
approximate E[vec(g) vec(g)ᵀ] by E[b bᵀ] ⊗ E[a aᵀ]. With several independent positions this is
E[Σₜ b bᵀ] ⊗ E[(1/T) Σₜ a aᵀ] (Grosse and Martens 2016, arXiv:1602.01407; "expand" in Eschenhagen
et al. 2023, arXiv:2311.00636).

A position counts if its output gradient has an entry that is not exactly 0. Padding, ignored tokens
and inactive units add nothing to any gradient. Their activations are excluded from the moments, and
T is the number of positions that count.

If the gradient of a bias is Σₜ b, the bias belongs to the same layer. With (a, 1) instead of a,
weight and bias form one block (Grosse and Martens 2016, section 2).

George et al. 2018 (arXiv:1806.03884) keep the eigenvectors of A ⊗ B and compute the best diagonal
in their basis: E[(U_Bᵀ G U_A)²] for a layer's gradient G, instead of products of eigenvalues.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from functools import partial
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gradscope.blocks import (
    Block,
    ConvolutionBlock,
    DenseBlock,
    Gradients,
    LayerWeights,
    OuterBlock,
    SegmentBlock,
    belongs,
    bias_of,
    layer_of,
    wide,
)
from gradscope.blocks.base import as_rows, precise, times
from gradscope.core.grammar import Stage
from gradscope.core.precision import double, products, wider
from gradscope.errors import InputError, SpecError, UnsupportedError
from gradscope.process.memory import slices
from gradscope.stages.reducers.base import (
    TILE_BYTES,
    FirstPass,
    ParameterState,
    Reducer,
    State,
    added,
    carried,
    count,
    entries,
    joined,
    parts,
    power_sum,
    reducers,
)
from gradscope.stages.reducers.eigen import eigenvectors
from gradscope.stages.transforms.base import Vector

_BANDS, _BAND = 16, 128  # the bands of a symmetric product, and the least rows of a band
_LARGE = 2**22  # the numbers of a parameter whose float64 form takes much memory
_ROWS, _SIDE = 2, 4096  # the most rows of a table for each column, and the most of both
_POSITIONS = 512  # the most products that are summed in float32
_HELD = (1e-12, 1e12)  # if the largest number is in this range, float32 holds its square's digits


@reducers.register("kfac")
def kfac(
    positions: Literal["mean", "sum"] = "mean",
    bias: Literal["separate", "column"] = "separate",
    full: int = 0,
) -> Reducer:
    """Kronecker factors NAME.A and NAME.B of each layer's Fisher block, or else NAME.diagonal.

    B ⊗ A approximates the block E[vec(g) vec(g)ᵀ], where vec reads the gradient row by row (A ⊗ B
    if column by column). It is exact for one sample without weight sharing. B (r, r) belongs to the
    weight's first axis, A (c, c) to the remaining axes. For linear layers and convolutions, B is
    the factor of the output gradient and A of the activation. For weights stored inputs first
    (transposed convolutions, `x @ W`), A and B are exchanged. With G groups the shapes are
    (G, r, r) and (G, c, c). Complex factors are E[b bᴴ] and E[a aᴴ].

    With exact labels B = (1/N) Σᵢₜ E[b bᵀ], the expectation over all labels of a sample.

    Parameters whose gradients have no factors (biases, norms, tables) have NAME.diagonal (*shape),
    E[|g|²], instead. Only the backend `hooks` returns factors. No transform may precede kfac,
    because a transform scales a factor or destroys both factors.

    With `positions=mean`, A = (1/T) Σᵢₜ a aᵀ; with `sum`, A = (1/N) Σᵢₜ a aᵀ. B = (1/N) Σᵢₜ b bᵀ.
    The sums are over the T positions of all samples whose output gradient is not 0 in every entry:
    padding and ignored tokens do not count. N is the number of samples.

    With `bias=column`, a bias whose gradient is Σₜ b in every sample is the last column of its
    weight. The activations are (a, 1), A is (c + 1, c + 1), and the bias has no separate result.
    If the weight is stored inputs first, the bias is the last row, and B is (r + 1, r + 1).

    A dense parameter without factors (for example of a norm layer) is a single row if it has at
    most `full` numbers. Then A is the full second moment E[g gᵀ], B is 1, and it has no diagonal.
    If `full` is not 0, other parameters without factors can be tables, such as position embeddings.
    The last axis of a table are its columns. It has at most twice as many rows as columns, and at
    most 4,096 of both. Then B = E[G Gᵀ] / c, A is the identity (c, c), and it has no diagonal.
    """
    every = partial(_parts, bias, full)
    return Reducer(
        lambda gradients: joined(_samples(gradients), dict(every(gradients))),
        _merged,
        partial(_result, positions),
        raw=True,
        add=lambda gradients, state: _added_in_place(
            state, _samples(gradients), every(gradients, parts(state))
        ),
        join=_joined,
    )


def _parts(
    bias: str, full: int, gradients: Gradients, known: Mapping[str, ParameterState] | None = None
) -> Iterator[tuple[str, ParameterState]]:
    """Yield the sums of each parameter over one batch.

    Sums of outer products are added to the tensors in `known`, if it has the parameter.
    """
    if all(block.kind != "outer" for block in gradients.values()):
        raise UnsupportedError(
            "kfac needs gradients as sums of outer products, but the gradients of "
            f"{', '.join(gradients)} are not",
            remedy="Linear and convolutional layers have them with the backend hooks, if no "
            "transform is before kfac. For other parameters use second_moment or curvature fisher.",
        )
    for name, block in gradients.items():
        own = gradients.get(bias_of(name) or "") if bias == "column" else None
        if block.kind is None and 0 < prod(block.shape) <= full:
            yield name, _as_row(block, gradients.weights)
        elif full and _is_table(block):
            yield name, _as_table(block, gradients.weights)
        else:
            yield name, _sums(block, own, gradients.weights, (known or {}).get(name))


def _result(positions: str, state: State, *, in_place: bool = False) -> dict[str, Tensor]:
    """Return the factors, and the diagonals of parameters without factors.

    With `in_place`, the sums in the state are divided.
    """
    n, every = state["n"], parts(state)
    layers = {name: _with_bias(part) for name, part in every.items() if "a" in part}
    inside = {bias_of(name) for name, (_, _, has_bias) in layers.items() if has_bias}
    found: dict[str, Tensor] = {}
    for name, (a, b, _) in layers.items():
        if name not in inside:
            by = every[name]["counted"].clamp(min=1) if positions == "mean" else n
            by = by.reshape(-1, 1, 1).squeeze(0)
            a, b = (a, b) if in_place else (a.clone(), b.clone())
            found[f"{name}.A"] = _symmetric(a).div_(by)
            found[f"{name}.B"] = _symmetric(b).div_(n)
    for name, part in every.items():
        if "rows" in part and name not in inside:
            found[f"{name}.A"] = torch.diag(part["columns"] / n)
            found[f"{name}.B"] = part["rows"] / n
    squares = {name: part["squares"] for name, part in every.items() if "squares" in part}
    return found | {f"{k}.diagonal": v / n for k, v in squares.items() if k not in inside}


def _merged(a: State, b: State) -> State:
    _require_same(a.keys() ^ b.keys())
    return added(a, b)


def _joined(state: State, more: State) -> State:
    """Add the sums of a state with the same entries in place."""
    return _added_in_place(state, more["n"], parts(more).items())


def _added_in_place(state: State, n: Tensor, every: Iterable[tuple[str, ParameterState]]) -> State:
    """Add the parts of n further samples to a state, one parameter at a time."""
    keys, first = {"n"}, not state
    state["n"] = state["n"] + n if state else n
    for name, part in every:
        for kind, value in part.items():
            key = f"{kind}:{name}"
            keys.add(key)
            if first or kind == "basis":
                state[key] = carried(value)
            elif key in state and state[key] is not value:  # else it was added already
                state[key].add_(value)
    _require_same(state.keys() ^ keys)
    return state


def _require_same(keys: Set[str]) -> None:
    """Raise if there are entries in one of two states only."""
    differing = {key.partition(":")[2] for key in keys}
    if differing:
        raise UnsupportedError(
            f"the gradient of {', '.join(sorted(differing))} is an outer product in some batches "
            "only",
            remedy="Use the same backend and the same input shape for all batches.",
        )


def _squares(block: Block, weights: Tensor | None) -> Tensor:
    """Return Σ |g|² (*shape) of a parameter without factors.

    It is in float64. A batch's squares of a large parameter are added up in float32, if float32
    holds them.
    """
    if weights is None and prod(block.shape) >= _LARGE:
        return power_sum(Gradients({"": block}), "", 2)
    return wide(block).squared_sum(_flat(weights))


def _samples(gradients: Gradients) -> Tensor:
    """Return the number of samples (); a sample may have several rows."""
    rows = count(gradients)
    return rows if gradients.weights is None else rows / gradients.weights.shape[1]


def _flat(weights: Tensor | None) -> Tensor | None:
    return None if weights is None else weights.flatten()


def _as_row(block: Block, weights: Tensor | None) -> ParameterState:
    """Return the sums of a parameter that is treated as a single row: Σ g gᴴ, and N."""
    found = None
    flat = _flat(weights)
    for rows, tile in wide(block).tiles():
        values = as_rows(times(tile, None if flat is None else flat[rows].sqrt()))
        product = values.mT @ values.conj()
        found = product if found is None else found + product
    assert found is not None
    n = found.real.new_tensor(float(block.n if weights is None else len(weights)))
    # two tensors: the entries of a state are added in place
    return {"a": found, "b": n.reshape(1, 1).to(found.dtype, copy=True), "counted": n}


def _is_table(block: Block) -> bool:
    """Whether a parameter has no factors, and the matrices of a table have few numbers."""
    *axes, c = block.shape or (1,)
    return block.kind != "outer" and c <= _SIDE and 1 < prod(axes) <= min(_ROWS * c, _SIDE)


def _as_table(block: Block, weights: Tensor | None) -> ParameterState:
    """Return the sums of a table of c columns: Σ G Gᴴ / c (r, r), and N for each column (c,).

    The names differ from the names of factors: other batches may not have factors.
    """
    *axes, c = block.shape
    r, flat = prod(axes), _flat(weights)
    dtype = wider(block.dtype, block.device)
    found = torch.zeros(r, r, dtype=dtype, device=block.device)
    for rows, tile in wide(block).tiles():
        values = times(tile, None if flat is None else flat[rows].sqrt()).reshape(-1, r, c)
        used = values.transpose(0, 1).flatten(1)  # (r, n·c)
        (places,) = (used != 0).any(1).nonzero(as_tuple=True)  # a text uses the first positions
        used = used[places]
        found[places.unsqueeze(1), places] += used @ used.mH / c
    n = float(block.n if weights is None else len(weights))
    return {"rows": found, "columns": found.new_full((c,), n)}


def _sums(
    block: Block, bias: Block | None, weights: Tensor | None, known: ParameterState | None = None
) -> ParameterState:
    """Return Σᵢₜ a aᴴ, Σᵢₜ b bᴴ over the positions that count, and their number () or (k,).

    The sums are computed a few samples at a time, without the entries above the diagonal. They are
    added to the sums in `known`, if given. With a bias, the factors are (a, 1) and (b, 1), and two
    further numbers count the samples whose bias gradient differs from Σₜ b and from Σₜ a. With
    weights (samples, r), each row has its own b. The rows of a sample share a, and a position of a
    counts if it counts in any of the rows.
    """
    if block.kind != "outer":
        return {"squares": _squares(block, weights)}
    found: ParameterState = {key: known[key] for key in ("a", "b")} if known else {}
    r = 1 if weights is None else weights.shape[1]
    for some in slices(block.n // r, r * (block.factored_size or 1) * 16, TILE_BYTES):
        rows = slice(some.start * r, some.stop * r)
        part = block.select(rows)
        if isinstance(part, ConvolutionBlock):
            part = part.outer
        assert isinstance(part, OuterBlock | SegmentBlock)
        factors = part.factors()
        assert factors is not None  # an outer product always has factors
        left, right = factors.tensors.values()
        column = bias is not None
        for key, factor in (("a", right), ("b", left)):
            if key not in found:
                found[key] = _zeros(factor, ones=column)
        sums = _Sums(*(found[key].view(-1, *found[key].shape[-2:]) for key in ("a", "b")))
        if weights is None:
            counted = _add_rows(part, left, right, sums)
        else:
            counted = _add_labels(part, left, right, weights[some], sums)
        more = {"counted": counted if len(counted) > 1 else counted.squeeze(0)}
        if bias is not None:
            own = bias.select(rows)
            more["apart"] = torch.stack([~belongs(own, side) for side in (left, right)]).sum(1)
        found |= {key: found[key] + value if key in found else value for key, value in more.items()}
    return {key: found[key] for key in ("a", "b", "counted", "apart") if key in found}


class _Sums(NamedTuple):
    """The sums of outer products of both factors, without the entries above the diagonal."""

    a: Tensor  # (k, c, c)
    b: Tensor  # (k, r, r)


def _zeros(factor: Tensor, *, ones: bool) -> Tensor:
    """Return the sums (k, f, f) of no rows of a factor (n, k, t, f); (f, f) without groups."""
    k, f = factor.shape[1], factor.shape[-1] + ones
    dtype = wider(factor.dtype, factor.device)
    return torch.zeros(*([k] if k > 1 else []), f, f, dtype=dtype, device=factor.device)


def _add_rows(part: OuterBlock | SegmentBlock, left: Tensor, right: Tensor, sums: _Sums) -> Tensor:
    """Add rows that are samples; return the number of positions that count (k,)."""
    counted = part.nonzero_positions()
    if isinstance(part, SegmentBlock):  # its rows are not padded to the longest sample
        left, right, counted = (t[None, None] for t in (part.left, part.right, counted))
    _add_moments(right, counted, sums.a)
    _add_moments(left, counted, sums.b)
    return counted.sum((0, 2)).to(double(part.device))


def _add_labels(
    part: OuterBlock | SegmentBlock, left: Tensor, right: Tensor, weights: Tensor, sums: _Sums
) -> Tensor:
    """Add samples with several rows each; return the number of positions that count (k,)."""
    (n, r), right_is_gradient = weights.shape, part.right_is_gradient
    if isinstance(part, SegmentBlock):
        raise _other_positions()
    counted = part.nonzero_positions()
    counted = counted & (weights.flatten() > 0).reshape(-1, 1, 1)
    once = counted.reshape(n, r, *counted.shape[1:]).any(1)  # (n, k, t)
    by = weights.flatten().sqrt()
    for flag in (False, True) if isinstance(right_is_gradient, Tensor) else (right_is_gradient,):
        here = right_is_gradient == flag  # (t,), or a bool for all positions
        gradient, activation = (right, left) if flag else (left, right)
        own, input_ = (sums.a, sums.b) if flag else (sums.b, sums.a)
        same = (activation == activation[::r].repeat_interleave(r, 0)).all(-1)
        if not bool((same | ~(counted & here)).all()):
            raise _other_positions()
        rows = times(gradient.to(wider(gradient.dtype, gradient.device)), by)
        _add_moments(rows, counted & here, own)
        _add_moments(activation[::r], once & here, input_)
    return once.sum((0, 2)).to(double(part.device))


def _other_positions() -> UnsupportedError:
    return UnsupportedError(
        "the gradients of a sample's labels come from different positions of a layer, so they have "
        "no common factor A",
        where="labels exact: kfac",
        remedy='Use labels="sampled".',
    )


def _add_moments(factor: Tensor, counted: Tensor, total: Tensor) -> None:
    """Add Σᵢₜ f fᴴ of a factor (n, k, t, f) to a total (k, f, f) in float64.

    The sum is over the positions that are `counted` (n, k, t). If the total is one larger, f
    becomes (f, 1). Entries above the diagonal are left out.

    Long rows in float32 are multiplied in float32, because this takes half of the time. At most
    `_POSITIONS` products are summed in float32, which changes an entry of the result by about 1e-7
    of the largest. Other sums are in float64.
    """
    n, k, t, f = factor.shape
    size = total.shape[-1]
    rows = factor.new_empty(k, n, t, size, dtype=_precision(factor))
    rows[..., :f] = factor.transpose(0, 1)
    rows[..., f:] = 1
    inside = counted.transpose(0, 1).unsqueeze(3)  # (k, n, t, 1)
    if not bool(inside.all()):
        rows.masked_fill_(~inside, 0)
    width = max(_BAND, -(-size // _BANDS))
    for group, sums in zip(rows.flatten(1, 2), total, strict=True):
        for start in range(0, size, width):
            stop = min(start + width, size)
            for some in group.split(_POSITIONS):
                sums[start:stop, :stop] += some[:, start:stop].mT @ some[:, :stop].conj()


def _precision(factor: Tensor) -> torch.dtype:
    """Return the dtype for products of a factor (n, k, t, f)."""
    whole = wider(factor.dtype, factor.device)
    short = factor.shape[-1] < _BAND
    if short or whole != torch.float64 or factor.dtype == whole or not factor.numel():
        return whole
    if products(factor.device) != torch.float32:
        return whole
    least, largest = _HELD
    held = least < float(factor.abs().amax()) < largest  # False if a number is not finite
    return torch.float32 if held else whole


def _symmetric(sums: Tensor) -> Tensor:
    """Fill in the entries above the diagonal of sums (..., f, f), and return them."""
    f = sums.shape[-1]
    for start in range(0, f, _BAND):
        stop = min(start + _BAND, f)
        inside = sums[..., start:stop, start:stop]
        inside.copy_(inside.tril() + inside.tril(-1).mH)
        sums[..., :start, start:stop] = sums[..., start:stop, :start].mH
    return sums


def _with_bias(part: ParameterState) -> tuple[Tensor, Tensor, bool]:
    """Return the layer's sums A and B, and whether they include its bias."""
    a, b = part["a"], part["b"]
    if "apart" not in part:
        return a, b, False
    beside, below = (part["apart"] == 0).tolist()
    below = below and not beside
    a = a if beside else a[..., :-1, :-1]
    return a, b if below else b[..., :-1, :-1], beside or below


_DIAGONAL = ".diagonal"


class Basis(NamedTuple):
    """The eigenvectors (as columns) of a layer's factors, for k groups."""

    a: Tensor  # (k, c, c)
    b: Tensor  # (k, r, r)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(k, r, c) of the layer's matrices."""
        return len(self.a), self.b.shape[-1], self.a.shape[-1]

    def like(self, block: Block) -> "Basis":
        """Return the basis in the precision of the gradients, float32 at least."""
        dtype = precise(torch.empty(0, dtype=block.dtype)).dtype
        if self.a.is_complex():
            dtype = torch.promote_types(dtype, torch.complex64)
        return Basis(*(side.to(block.device, dtype) for side in self))

    def coordinates(self, matrices: Tensor) -> Tensor:
        """Return the coordinates U_Bᴴ G conj(U_A) of matrices G (n, k, r, c)."""
        return _between(self.b.mH.to(matrices), matrices, self.a.conj().to(matrices))

    def back(self, coordinates: Tensor) -> Tensor:
        """Return the matrices U_B C U_Aᵀ with coordinates C (n, k, r, c)."""
        return _between(self.b.to(coordinates), coordinates, self.a.mT.to(coordinates))


def _between(left: Tensor, matrices: Tensor, right: Tensor) -> Tensor:
    """Return L G R (n, k, r, c) for left (k, r, r) and right (k, c, c), by large products."""
    return torch.einsum("ksr,nkrd->nksd", left, torch.einsum("nkrc,kcd->nkrd", matrices, right))


@reducers.register("ekfac")
def ekfac(with_: Vector | None = None, full: int = 512) -> Reducer:
    """EK-FAC: NAME.eigenvalues E[(U_Bᵀ G U_A)²], with the bases NAME.A.vectors, NAME.B.vectors.

    The columns of U_A (c, c) and U_B (r, r) are the eigenvectors of the factors. An earlier pass
    over the data computes the factors with `kfac:bias=column`. G (r, c) is a sample's gradient as
    a matrix with its bias in the last column (or row). Groups add a leading axis to all three.
    The sum of the eigenvalues is E‖g‖². A dense parameter without factors of at most `full` numbers
    is a single row (r = 1), with the eigenvalues of E[g gᵀ]. For a table of few rows (see `kfac`),
    U_B has the eigenvectors of E[G Gᵀ], and U_A is the identity. The remaining parameters have
    NAME.diagonal (*shape), E[|g|²]. No transform may precede ekfac.

    `with=` computes the bases from a stored `kfac`, or loads them from a stored `ekfac`. Then there
    is no earlier pass, and the samples may differ from the samples of the stored result.

    Source: George et al. 2018 (arXiv:1806.03884, section 3.2).
    """
    if with_ is not None:
        return _within(with_.values, with_.source)
    stage = Stage("kfac", {"bias": "column", "full": f"{full}"})

    def after(found: dict[str, Tensor]) -> Reducer:  # the earlier pass saw the same samples
        for key in [*found]:  # a factor is replaced: another chain may wait for the same pass
            if key.endswith((".A", ".B")):
                found[f"{key}.vectors"] = _vectors(found.pop(key), key[:-2], "", False)
        return _within(found, known=_diagonals(found))

    # nothing else uses the sums: there is no second copy of the factors
    factors = kfac("mean", "column", full)._replace(result=partial(_result, "mean", in_place=True))
    earlier = FirstPass(stage, factors, after, _of_the_same_sizes)
    return Reducer(_waiting, added, dict, raw=True, earlier=earlier)


def bases_of(stored: Mapping[str, Tensor], source: str = "") -> dict[str, Basis]:
    """Return {weight: eigenvectors} from the result of `kfac` or `ekfac`.

    Raises:
        InputError: There are no factors, or a factor is not finite.
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
            "the stored result has no Kronecker factors",
            where=source or None,
            remedy="Give the result of kfac or ekfac.",
        )
    return found


def _vectors(factor: Tensor, name: str, source: str, as_they_are: bool) -> Tensor:
    """Return a factor's eigenvectors (k, f, f); `as_they_are` means that it holds them already."""
    if not bool(factor.isfinite().all()):
        raise InputError(
            f"the Kronecker factors of {name!r} are not finite, so they have no eigenvectors",
            where=source or None,
            remedy='Leave out samples with gradients that are not finite: nonfinite="skip".',
        )
    matrices = factor.unsqueeze(0) if factor.dim() == 2 else factor
    # shards read the factors of one file, and their moments are merged
    return matrices if as_they_are else eigenvectors(matrices, measured=not source)


def _of_the_same_sizes(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return bases with the sizes of the found factors; identities instead of eigenvectors."""
    return {
        f"{key}.vectors": torch.eye(value.shape[-1]).to(value).expand_as(value)
        for key, value in found.items()
        if key.endswith((".A", ".B"))
    } | _diagonals(found)


def _diagonals(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in found.items() if key.endswith(_DIAGONAL)}


def _waiting(gradients: Gradients) -> State:
    raise AssertionError("the earlier pass comes first")


def _within(
    stored: Mapping[str, Tensor], source: str = "", known: Mapping[str, Tensor] | None = None
) -> Reducer:
    """Return the reducer for second moments in the stored bases, and for the diagonals.

    Parameters without factors have diagonals, unless `known` {NAME.diagonal: (*shape)} has them.
    """
    bases = bases_of(stored, source)  # in float64 until the first batch
    marks = {name: _mark(basis) for name, basis in bases.items()}
    plain = [key.removesuffix(_DIAGONAL) for key in _diagonals(stored)]

    def every(gradients: Gradients) -> Iterator[tuple[str, ParameterState]]:
        layers = _layers(bases, gradients, source)
        inside = {layer.bias for layer in layers.values()}
        for name, block in gradients.items():
            if name in layers:
                bases[name] = bases[name].like(block)
                moments = _in_basis(gradients, layers[name], bases[name])
                yield name, {"moments": moments, "basis": marks[name].to(block.device)}
            elif name not in inside and known is None:
                yield name, {"squares": _squares(block, gradients.weights)}

    def start(gradients: Gradients) -> State:
        return joined(_samples(gradients), dict(every(gradients)))

    def add(gradients: Gradients, state: State) -> State:
        return _added_in_place(state, _samples(gradients), every(gradients))

    def merge(a: State, b: State) -> State:
        _require_bases(a, marks)
        total = added(a, b)
        return {key: b[key] if key.startswith("basis:") else total[key] for key in total}

    def join(state: State, more: State) -> State:
        _require_bases(state, marks)
        return _joined(state, more)

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

    note = f"ekfac: diagonal only, because there are no Kronecker factors: {', '.join(plain)}"
    return Reducer(start, merge, result, raw=True, note=note if plain else "", add=add, join=join)


def _require_bases(state: State, marks: Mapping[str, Tensor]) -> None:
    """Raise if the state was computed with different eigenvectors."""
    for name, mark in entries(state, "basis").items():
        if int(mark) != int(marks[name]):
            raise UnsupportedError(
                f"the eigenvectors of {name!r} differ from the eigenvectors of earlier samples",
                remedy="Start again, or give the bases with ekfac:with=FILE.h5:CHAIN.",
            )


def _layers(
    bases: Mapping[str, Basis], gradients: Gradients, source: str
) -> dict[str, LayerWeights]:
    shapes = {name: block.shape for name, block in gradients.items()}
    found = {}
    for name in gradients:
        if name in bases:
            layer = layer_of(name, bases[name].sizes, shapes)
            if layer is None:
                raise SpecError(
                    f"the stored factors of {name!r} have {bases[name].sizes} groups, rows and "
                    f"columns, which do not fit the parameter's shape {shapes[name]}",
                    where=source or None,
                )
            found[name] = layer
    return found


def _in_basis(gradients: Gradients, layer: LayerWeights, basis: Basis) -> Tensor:
    """Return Σᵢ |U_Bᴴ Gᵢ conj(U_A)|² (k, r, c), a few samples at a time."""
    k, r, c = layer.sizes
    weight = gradients[layer.weight]
    factored = (weight.factored_size or 0) if by_factors(weight, layer) else k * r * c
    found = torch.zeros(layer.sizes, dtype=double(weight.device), device=weight.device)
    weights, own = _flat(gradients.weights), layer.of(gradients)
    for rows in slices(gradients.n, factored * basis.a.dtype.itemsize, TILE_BYTES):
        block = rotated(own.select(rows), layer, basis)
        if weights is None:
            found += power_sum(Gradients({layer.weight: block}), layer.weight, 2)
        else:
            found += wide(block).squared_sum(weights[rows])
    return found


def by_factors(weight: Block, layer: LayerWeights) -> bool:
    """Whether factors in a basis need fewer multiplications than dense gradients in the basis."""
    k, r, c = layer.sizes
    positions = (weight.factored_size or 0) // (k * (r + c)) + 1  # approximately t
    return weight.kind == "outer" and positions * (r * r + c * c) <= r * c * (r + c)


def rotated(gradients: Gradients, layer: LayerWeights, basis: Basis) -> Block:
    """Return the coordinates of samples' gradients, (n, k, r, c), in the precision of the basis."""
    dtype, weight = basis.a.dtype, gradients[layer.weight]
    factors = layer.factors(gradients) if by_factors(weight, layer) else None
    if factors is not None:
        left, right = (f.to(dtype) for f in factors)
        left = torch.einsum("nktr,krs->nkts", left, basis.b.conj())
        right = torch.einsum("nktc,kcd->nktd", right, basis.a.conj())
        return OuterBlock(left, right, layer.sizes)
    rows = {name: block.dense().to(dtype) for name, block in layer.of(gradients).items()}
    return DenseBlock(basis.coordinates(layer.dense(rows)))


def _mark(basis: Basis) -> Tensor:
    """Return a checksum () of the bits of the eigenvectors."""
    bits = [torch.view_as_real(s) if s.is_complex() else s for s in basis]
    whole = {8: torch.int64, 4: torch.int32}
    sums = [t.contiguous().view(whole[t.dtype.itemsize]).flatten() for t in bits]
    weights = [2 * torch.arange(len(s), device=s.device) + 1 for s in sums]
    return torch.stack([(s * w).sum() for s, w in zip(sums, weights, strict=True)]).sum()
