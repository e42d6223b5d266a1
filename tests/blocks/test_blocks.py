"""Every kind of block against its dense form, which is built here without the blocks' own code."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradscope.blocks import (
    Block,
    CenteredBlock,
    DenseBlock,
    Gradients,
    MappedBlock,
    OuterBlock,
    PreconditionedBlock,
    RandomBlock,
    ScaledBlock,
    ScatterBlock,
    SparseBlock,
    SquaredBlock,
    TotalBlock,
    base,
    total,
)
from gradscope.blocks import outer as outer_module
from gradscope.blocks import scatter as scatter_module

DTYPES = [torch.float32, torch.float64, torch.complex128]
N = 5
Pair = tuple[Block, Tensor]


def outer(dtype, k=1, t=1, r=4, c=3, shape=None) -> Pair:
    """gᵢ[k] = Σₜ leftₜ ⊗ rightₜ, written out with einsum."""
    left = torch.randn(N, k, t, r).to(dtype) + torch.randn(N, k, t, r).to(dtype) * unit(dtype)
    right = torch.randn(N, k, t, c).to(dtype)
    shape = shape or ((r, c) if k == 1 else (k * r, c))
    dense = torch.einsum("nktr,nktc->nkrc", left, right).reshape(N, *shape)
    return OuterBlock(left, right, shape), dense


def scatter(dtype, v=4, d=3, t=6) -> Pair:
    """Rows added one by one; with six rows for four places indices repeat."""
    index = torch.randint(0, v, (N, t))
    index[0] = 2
    rows = torch.randn(N, t, d).to(dtype) * (1 + unit(dtype))
    dense = torch.zeros(N, v, d, dtype=dtype)
    for i in range(N):
        for j in range(t):
            dense[i, index[i, j]] += rows[i, j]
    return ScatterBlock(index, rows, v), dense


def dense(dtype, *shape) -> Pair:
    values = torch.randn(N, *shape).to(dtype) * (1 + 2 * unit(dtype))
    return DenseBlock(values), values


def unit(dtype) -> complex | int:
    return 1j if dtype.is_complex else 0


def summed(*pairs: Pair) -> Pair:
    return total([b for b, _ in pairs]), sum(d for _, d in pairs)


def mapped(pair: Pair, fn: Callable[[Tensor], Tensor]) -> Pair:
    return MappedBlock(pair[0], fn), fn(pair[1])


def squared(pair: Pair) -> Pair:
    return SquaredBlock(pair[0]), pair[1].abs() ** 2


def scaled(pair: Pair) -> Pair:
    factors = torch.tensor([0.5, -2.0, 3.0, 0.0, 1.5])
    each = factors.to(pair[1].dtype).reshape(-1, *[1] * (pair[1].dim() - 1))
    return ScaledBlock(pair[0], factors), pair[1] * each


def centered(pair: Pair) -> Pair:
    """gᵢ − μ; not their own mean, so that sums do not vanish."""
    block, values = pair
    wide = values.to(torch.promote_types(values.dtype, torch.float64))
    mean = wide.mean(0) + wide[0] / 3
    return CenteredBlock(block, mean), (wide - mean).to(values.dtype)


def preconditioned(pair: Pair) -> Pair:
    diagonal = torch.rand(pair[0].shape, dtype=torch.float64) + 0.1
    return PreconditionedBlock(pair[0], diagonal), (pair[1] * diagonal).to(pair[1].dtype)


def keyed(pair: Pair) -> Pair:
    """A row times a number that only its key decides."""
    keys = torch.tensor([7, 3, 9, 3, 4])

    def fn(values: Tensor, keys: Tensor) -> Tensor:
        return values * keys.sin().to(values.dtype).reshape(-1, *[1] * (values.dim() - 1))

    return RandomBlock(pair[0], keys, fn), fn(pair[1], keys)


def sparse(dtype) -> Pair:
    """Three entries a sample, and padding."""
    values = torch.randn(N, 3).to(dtype) * (1 + unit(dtype))
    values[1, 2] = 0
    index = torch.stack([torch.randperm(11)[:3] + 1 for _ in range(N)])
    index[1, 2] = 0
    dense = torch.zeros(N, 12, dtype=dtype)
    for i in range(N):
        for j in range(3):
            dense[i, index[i, j]] += values[i, j]
    return SparseBlock(index, values, (4, 3)), dense.reshape(N, 4, 3)


def kept(*pairs: Pair) -> Pair:
    """A sum whose parts are not melted together."""
    return TotalBlock(tuple(b for b, _ in pairs)), sum(d for _, d in pairs)


KINDS: dict[str, Callable[[torch.dtype], Pair]] = {
    "dense": lambda t: dense(t, 4, 3),
    "dense scalar": lambda t: dense(t),
    "dense vector": lambda t: dense(t, 7),
    "outer": lambda t: outer(t),
    "outer wide": lambda t: outer(t, r=2, c=7),
    "outer few positions": lambda t: outer(t, t=2, r=6, c=7),
    "outer many positions": lambda t: outer(t, t=40),
    "outer groups": lambda t: outer(t, k=2, r=3, c=4),
    "outer groups and positions": lambda t: outer(t, k=3, t=2, r=6, c=4, shape=(18, 2, 2)),
    "outer groups, many positions": lambda t: outer(t, k=2, t=30, r=2, c=3),
    "outer of another shape": lambda t: outer(t, t=2, shape=(2, 2, 3)),
    "scatter": scatter,
    "total outer and scatter": lambda t: summed(outer(t, t=2), scatter(t)),
    "total outer and dense": lambda t: summed(outer(t, t=2), dense(t, 4, 3)),
    "total of three kinds": lambda t: summed(scatter(t), dense(t, 4, 3), outer(t)),
    "total of one kind": lambda t: summed(outer(t), outer(t, t=3)),
    "total of scatters": lambda t: summed(scatter(t), scatter(t, t=2)),
    "total of reshaped outers": lambda t: kept(
        outer(t, r=2, c=6, shape=(4, 3)), outer(t, t=2), scatter(t)
    ),
    "total of groups and scatter": lambda t: kept(
        outer(t, k=2, r=2, c=3, shape=(4, 3)), scatter(t)
    ),
    "total of transposed outer and scatter": lambda t: kept(
        outer(t, t=2, r=6, c=2, shape=(4, 3)), scatter(t)
    ),
    "mapped": lambda t: mapped(outer(t, t=2), torch.sgn),
    "mapped scatter": lambda t: mapped(scatter(t), torch.abs),
    "squared": lambda t: squared(outer(t)),
    "squared positions": lambda t: squared(outer(t, t=3)),
    "squared scatter": lambda t: squared(scatter(t)),
    "squared total": lambda t: squared(summed(outer(t), scatter(t))),
    "scaled map": lambda t: scaled(mapped(outer(t, t=2), torch.sgn)),
    "scaled square": lambda t: scaled(squared(outer(t))),
    "centered dense": lambda t: centered(dense(t, 4, 3)),
    "centered outer": lambda t: centered(outer(t)),
    "centered positions": lambda t: centered(outer(t, t=2, r=6, c=7)),
    "centered scatter": lambda t: centered(scatter(t)),
    "centered total": lambda t: centered(summed(outer(t), scatter(t))),
    "centered square": lambda t: centered(squared(outer(t))),
    "scaled, centered": lambda t: scaled(centered(outer(t))),
    "preconditioned dense": lambda t: preconditioned(dense(t, 4, 3)),
    "preconditioned outer": lambda t: preconditioned(outer(t)),
    "preconditioned groups": lambda t: preconditioned(outer(t, k=2, r=3, c=4)),
    "preconditioned positions": lambda t: preconditioned(outer(t, t=2, r=6, c=7)),
    "preconditioned scatter": lambda t: preconditioned(scatter(t)),
    "preconditioned, centered": lambda t: preconditioned(centered(outer(t))),
    "keyed": lambda t: keyed(outer(t, t=2)),
    "sparse": sparse,
}


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return str(request.param)


@pytest.fixture(params=DTYPES, ids=str)
def pair(request, kind) -> Pair:
    torch.manual_seed(4)
    block, values = KINDS[kind](request.param)
    assert (block.n, block.shape, block.dtype) == (N, tuple(values.shape[1:]), values.dtype)
    return block, values


def close(ours: Tensor, right: Tensor) -> None:
    assert ours.shape == right.shape
    single = right.dtype in (torch.float32, torch.complex64)
    size = float(right.abs().max())
    torch.testing.assert_close(
        ours, right, rtol=1e-4 if single else 1e-12, atol=size * (1e-5 if single else 1e-13)
    )


def flat(values: Tensor) -> Tensor:
    return values.reshape(N, -1)


def test_dense(pair):
    block, values = pair
    close(block.dense(), values)


@pytest.mark.parametrize("contiguous", [True, False])
def test_dense_into_a_buffer(pair, contiguous):
    block, values = pair
    if contiguous:
        out = torch.full(values.shape, 7, dtype=values.dtype)
    else:
        out = torch.full((*values.shape, 2), 7, dtype=values.dtype)[..., 0]
    assert block.dense(out).data_ptr() == out.data_ptr()
    close(out, values)


def test_dense_into_a_wider_buffer(pair):
    block, values = pair
    wide = torch.complex128 if values.is_complex() else torch.float64
    out = torch.full(values.shape, torch.nan, dtype=wide)
    assert block.dense(out).data_ptr() == out.data_ptr()
    close(out.to(values.dtype), values)


def test_squared_norms(pair):
    block, values = pair
    norms = block.squared_norms()
    assert not norms.is_complex()
    close(norms, flat(values).abs().square().sum(1))


@pytest.mark.parametrize("weighted", [False, True])
def test_weighted_sum(pair, weighted):
    block, values = pair
    weights = torch.tensor([0.5, -1.0, 0.0, 3.0, 2.0]) if weighted else torch.ones(N)
    right = torch.einsum("n,n...->...", weights.to(values.dtype), values)
    close(block.weighted_sum(weights if weighted else None), right)


@pytest.mark.parametrize("weighted", [False, True])
def test_squared_sum(pair, weighted):
    block, values = pair
    weights = torch.tensor([0.5, -1.0, 0.0, 3.0, 2.0]) if weighted else torch.ones(N)
    squares = values.abs().square()
    right = torch.einsum("n,n...->...", weights.to(squares.dtype), squares)
    close(block.squared_sum(weights if weighted else None), right)


def test_dot(pair):
    block, values = pair
    vector = torch.randn(block.shape).to(values.dtype) * (1 - unit(values.dtype))
    close(block.dot(vector), flat(values) @ vector.conj().flatten())


@pytest.mark.parametrize("size", [None, 1, 200])
def test_pieces(pair, size, monkeypatch):
    """Whatever their size, they make up the gradients."""
    block, values = pair
    if size is not None:
        monkeypatch.setattr(base, "PIECE_BYTES", size)
        for module in (outer_module, scatter_module):
            monkeypatch.setattr(module, "TILE_BYTES", size)
    found = torch.zeros(N, values[0].numel(), dtype=torch.promote_types(values.dtype, torch.double))
    for samples, entries, part in block.pieces():
        found[samples, entries] += part
    close(found.to(values.dtype), flat(values))


def test_pieces_of_outer_products_are_rows_of_all_samples(monkeypatch):
    """The groups one after the other, each row of all samples 5 · 4 · 8 bytes."""
    block, _ = outer(torch.float64, k=2, t=3, r=5, c=4, shape=(5, 8))
    monkeypatch.setattr(outer_module, "TILE_BYTES", 2 * N * 4 * 8)
    found = list(block.pieces())
    assert all(samples == slice(0, N) for samples, _, _ in found)
    starts = [entries.start // 4 for _, entries, _ in found]
    assert starts == [0, 2, 4, 5, 7, 9]


def test_pieces_of_a_table_leave_out_what_nothing_touches(monkeypatch):
    monkeypatch.setattr(scatter_module, "TILE_BYTES", 1)
    block = ScatterBlock(torch.tensor([[1, 1], [5, 1]]), torch.ones(2, 2, 3), 9)
    assert [entries for _, entries, _ in block.pieces()] == [slice(3, 6), slice(15, 18)]


def test_two_sided(pair):
    block, values = pair
    rows = block.shape[0] if block.shape else 1
    columns = values[0].numel() // rows
    left = torch.randn(2, rows, dtype=torch.float64)
    right = torch.randn(3, columns, dtype=torch.float64)
    wider = torch.promote_types(values.dtype, torch.float64)
    matrices = values.reshape(N, rows, columns).to(wider)
    expected = torch.einsum("ar,nrc,bc->nab", left.to(wider), matrices, right.to(wider))
    close(block.two_sided(left, right).to(values.dtype), expected.to(values.dtype))


@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, 3.0, torch.inf])
def test_norms(pair, p):
    block, values = pair
    sizes = flat(values).abs()
    right = sizes.amax(1) if p == torch.inf else sizes.pow(p).sum(1).pow(1 / p)
    close(block.norms(p), right)


def test_gram(pair):
    block, values = pair
    close(block.gram(), flat(values) @ flat(values).mH)


def test_scale(pair):
    block, values = pair
    factors = torch.tensor([0.5, -1.0, 0.0, 3.0, 2.0])
    scaled = block.scale(factors)
    assert scaled.dtype == values.dtype
    close(scaled.dense(), torch.einsum("n,n...->n...", factors.to(values.dtype), values))


@pytest.mark.parametrize(
    "rows",
    [
        slice(1, 4),
        slice(0, 1),
        torch.tensor([3, 0, 3, 1]),
        torch.tensor([True, False, True, True, False]),
    ],
    ids=["slice", "one", "positions", "mask"],
)
def test_select(pair, rows):
    block, values = pair
    part = block.select(rows)
    assert part.n == len(values[rows])
    close(part.dense(), values[rows])
    close(part.squared_norms(), values[rows].reshape(part.n, -1).abs().square().sum(1))


def test_to(pair):
    block, values = pair
    for dtype in [torch.complex128] if values.is_complex() else [torch.float64, torch.float32]:
        cast = block.to(dtype)
        assert cast.n == N and cast.shape == block.shape
        assert cast.dtype == dtype
        torch.testing.assert_close(
            cast.dense(), values.to(cast.dtype), rtol=1e-4, atol=1e-4 * float(values.abs().max())
        )


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "dense scalar"])
def test_transpose(pair):
    block, values = pair
    matrix = [(0, 1), (1, 0), (-1, -2), (-2, -1), (0, -1), (1, 1)]
    for a, b in matrix if len(block.shape) > 1 else [(0, 0), (-1, 0)]:
        right = values.transpose(a % len(block.shape) + 1, b % len(block.shape) + 1)
        turned = block.transpose(a, b)
        assert turned.shape == tuple(right.shape[1:])
        close(turned.dense(), right)
        close(turned.squared_norms(), flat(right).abs().square().sum(1))


def test_reshape(pair):
    block, values = pair
    size = values[0].numel()
    for shape in [(size,), (1, size), (size, 1), tuple(block.shape)]:
        again = block.reshape(shape)
        assert again.shape == shape
        close(again.dense(), values.reshape(N, *shape))
        close(again.squared_norms(), flat(values).abs().square().sum(1))


def test_finite(pair):
    block, _ = pair
    assert block.finite().tolist() == [True] * N
    spoilt = block.scale(torch.tensor([1.0, torch.nan, 1.0, torch.inf, 1.0]))
    assert spoilt.finite().tolist() == [True, False, True, False, True]


def test_tiles_of_one_sample_change_nothing(pair, monkeypatch):
    block, values = pair
    monkeypatch.setattr(base, "TILE_BYTES", 1)
    assert [rows.stop - rows.start for rows, _ in block.tiles()] == [1] * N
    close(torch.cat([tile for _, tile in block.tiles()]), values)
    close(Block.squared_norms(block), flat(values).abs().square().sum(1))
    close(Block.gram(block), flat(values) @ flat(values).mH)
    close(Block.weighted_sum(block), values.sum(0))
    close(Block.squared_sum(block), values.abs().square().sum(0))
    vector = torch.randn(block.shape).to(values.dtype)
    close(Block.dot(block, vector), flat(values) @ vector.conj().flatten())


def test_operations_leave_the_block_alone(pair):
    block, values = pair
    block.dense().clone()
    block.scale(torch.zeros(N))
    block.weighted_sum(torch.zeros(N))
    block.squared_norms()
    close(block.dense(), values)


def test_half_precision_neither_overflows_nor_rounds_away():
    values = torch.tensor([[300.0, 400.0], [1e-4, 0.0]], dtype=torch.float16)
    norms = DenseBlock(values).squared_norms()
    assert norms.dtype == torch.float32
    close(norms, values.float().square().sum(1))
    ones = torch.ones(2, 1, 1, 1, dtype=torch.float16)
    close(OuterBlock(values[:, None, None], ones, (2, 1)).squared_norms(), norms)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_one_kind_melt_together(dtype):
    assert isinstance(summed(outer(dtype), outer(dtype, t=3))[0], OuterBlock)
    assert isinstance(summed(scatter(dtype), scatter(dtype, t=1))[0], ScatterBlock)
    assert isinstance(summed(dense(dtype, 4, 3), dense(dtype, 4, 3))[0], DenseBlock)
    assert isinstance(summed(outer(dtype), scatter(dtype))[0], TotalBlock)


def test_gradients_of_several_parameters():
    torch.manual_seed(5)
    pairs = {"w": outer(torch.float64, t=2), "e": scatter(torch.float64)}
    gradients = Gradients({name: block for name, (block, _) in pairs.items()})
    flats = torch.cat([flat(values) for _, values in pairs.values()], 1)
    close(gradients.norms, flats.norm(dim=1))
    assert gradients.n == N and list(gradients) == ["w", "e"]
    rows = torch.tensor([4, 1])
    close(gradients.select(rows).norms, flats[rows].norm(dim=1))
    close(gradients.scale(torch.arange(5.0)).norms, flats.norm(dim=1) * torch.arange(5.0))
    out = {name: torch.empty_like(values) for name, (_, values) in pairs.items()}
    written = gradients.dense(out)
    for name, (_, values) in pairs.items():
        assert written[name].data_ptr() == out[name].data_ptr()
        close(out[name], values)
