"""Every kind of block against its dense form, which is built here without the blocks' own code.

An operation is tried where a kind of block overrides it, and what is inherited on tiles.
"""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradscope.blocks import (
    Block,
    CenteredBlock,
    DenseBlock,
    DerivedBlock,
    ExpectedBlock,
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
    derived,
    from_factors,
    grouped,
    joined,
    total,
)
from gradscope.blocks import outer as outer_module
from gradscope.blocks import scatter as scatter_module
from gradscope.blocks import segments as segments_module
from gradscope.engine.chains import bind
from tests.stages.examples import Draw

DTYPES = [torch.float32, torch.complex128]
N = 5
Pair = tuple[Block, Tensor]
SEEDS = itertools.count()


def drawn(dtype, kind: str, *sizes, n=N) -> Pair:
    """Other numbers every time; the dense rows are written out in numpy."""
    draw = Draw(dtype, n, next(SEEDS))
    draw.scale = torch.ones(n, dtype=torch.float64)
    block, rows = getattr(draw, kind)(*sizes)
    return block, torch.from_numpy(rows).to(dtype)


def outer(dtype, k=1, t=1, r=4, c=3, shape=None) -> Pair:
    return drawn(dtype, "outer", k, t, r, c, shape or ((r, c) if k == 1 else (k * r, c)))


def segments(dtype, m=40, k=1, r=4, c=3, shape=None) -> Pair:
    return drawn(dtype, "segments", m, k, r, c, shape or ((r, c) if k == 1 else (k, r, c)))


def scatter(dtype, v=4, d=3, t=6) -> Pair:
    """With six rows for four places indices repeat."""
    return drawn(dtype, "scatter", v, d, t)


def dense(dtype, *shape) -> Pair:
    return drawn(dtype, "dense", *shape)


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


def expected(dtype, fn: Callable[[Pair], Pair] = lambda pair: pair) -> Pair:
    """Of three rows a sample."""
    weights = torch.rand(N, 3, dtype=torch.float64).softmax(1)
    block, values = fn(drawn(dtype, "outer", 1, 2, 4, 3, (4, 3), n=3 * N))
    right = torch.einsum("nc,ncrs->nrs", weights.to(values.dtype), values.view(N, 3, 4, 3))
    return ExpectedBlock(block, weights), right


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


def in_parts(*pairs: Pair) -> Pair:
    """The first samples of each, the blocks' own sizes being what they are, in another order."""
    place = torch.tensor([3, 0, 4, 2, 1])
    cut = [slice(0, 3), slice(0, 2)]
    blocks = [block.select(rows) for (block, _), rows in zip(pairs, cut, strict=True)]
    values = torch.cat([values[rows] for (_, values), rows in zip(pairs, cut, strict=True)])
    return joined(blocks, place), values[place]


GROUPS = torch.tensor([3, 1, 7, 1, 2])  # of unequal sizes, so that some are padded
ONE_SIZE = torch.full((N,), 3)


def in_groups(dtype, kind: str, *sizes, groups=GROUPS) -> Pair:
    """N sums of consecutive rows."""
    block, values = drawn(dtype, kind, *sizes, n=int(groups.sum()))
    return _added(block, values, groups)


def groups_of_total(dtype) -> Pair:
    """An outer product and a scatter, as in a tied embedding; of outer products in two places."""
    pairs = [drawn(dtype, "outer", 1, t, 4, 3, (4, 3), n=14) for t in (1, 2)]
    pairs.append(drawn(dtype, "scatter", 4, 3, 2, n=14))
    return _added(total([b for b, _ in pairs]), sum(d for _, d in pairs), GROUPS)


def groups_of_sides(dtype) -> Pair:
    """The weight is used transposed as well, so that both factors are gradients somewhere."""
    (one, a), (other, b) = (
        drawn(dtype, "outer", 1, 2, *sides, sides, n=10) for sides in ((4, 3), (3, 4))
    )
    return _added(total([one, other.transpose(0, 1)]), a + b.mT, torch.full((N,), 2))


def _added(block: Block, values: Tensor, groups: Tensor) -> Pair:
    rows = [part.sum(0) for part in values.split(groups.tolist())]
    return grouped(block, groups), torch.stack(rows)


KINDS: dict[str, Callable[[torch.dtype], Pair]] = {
    "dense": lambda t: dense(t, 4, 3),
    "dense scalar": lambda t: dense(t),
    "outer": lambda t: outer(t),
    "outer wide": lambda t: outer(t, r=2, c=7),
    "outer many positions": lambda t: outer(t, t=40),
    "outer groups and positions": lambda t: outer(t, k=3, t=2, r=6, c=4, shape=(18, 2, 2)),
    "outer groups, many positions": lambda t: outer(t, k=2, t=30, r=2, c=3),
    "outer of another shape": lambda t: outer(t, t=2, shape=(2, 2, 3)),
    "segments": segments,
    "segments, wide": lambda t: segments(t, m=7, r=2, c=7),
    "segments of groups": lambda t: segments(t, m=60, k=3),
    "segments of groups, of another shape": lambda t: segments(t, k=3, shape=(12, 3)),
    "total of segments and outer": lambda t: summed(segments(t), outer(t, t=2), segments(t, m=3)),
    "total of segments and scatter": lambda t: summed(segments(t), scatter(t)),
    "total of groups and dense": lambda t: summed(segments(t, k=2), dense(t, 2, 4, 3)),
    "scatter": scatter,
    "total outer and scatter": lambda t: summed(outer(t, t=2), scatter(t)),
    "total outer and dense": lambda t: summed(outer(t, t=2), dense(t, 4, 3)),
    "total of three kinds": lambda t: summed(scatter(t), dense(t, 4, 3), outer(t)),
    "total of one kind": lambda t: summed(outer(t), outer(t, t=3)),
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
    "squared": lambda t: squared(outer(t)),
    "squared positions": lambda t: squared(outer(t, t=3)),
    "squared scatter": lambda t: squared(scatter(t)),
    "scaled map": lambda t: scaled(mapped(outer(t, t=2), torch.sgn)),
    "centered dense": lambda t: centered(dense(t, 4, 3)),
    "centered outer": lambda t: centered(outer(t)),
    "centered positions": lambda t: centered(outer(t, t=2, r=6, c=7)),
    "centered scatter": lambda t: centered(scatter(t)),
    "centered square": lambda t: centered(squared(outer(t))),
    "scaled, centered": lambda t: scaled(centered(outer(t))),
    "preconditioned dense": lambda t: preconditioned(dense(t, 4, 3)),
    "preconditioned outer": lambda t: preconditioned(outer(t)),
    "preconditioned groups": lambda t: preconditioned(outer(t, k=2, r=3, c=4)),
    "preconditioned positions": lambda t: preconditioned(outer(t, t=2, r=6, c=7)),
    "keyed": lambda t: keyed(outer(t, t=2)),
    "sparse": sparse,
    "expected": expected,
    "expected square": lambda t: expected(t, squared),
    "groups of dense": lambda t: in_groups(t, "dense", 4, 3),
    "groups of outers": lambda t: in_groups(t, "outer", 1, 1, 4, 3, (4, 3)),
    "groups of positions": lambda t: in_groups(t, "outer", 3, 4, 6, 2, (18, 2)),
    "groups of one size": lambda t: in_groups(t, "outer", 2, 3, 6, 2, (12, 2), groups=ONE_SIZE),
    "groups of segments": lambda t: in_groups(t, "segments", 60, 3, 4, 3, (3, 4, 3)),
    "groups of scatters": lambda t: in_groups(t, "scatter", 4, 3, 2),
    "groups of scatters, of one size": lambda t: in_groups(t, "scatter", 4, 3, 6, groups=ONE_SIZE),
    "groups of a total": groups_of_total,
    "groups of both sides": groups_of_sides,
    "joined outers": lambda t: in_parts(outer(t), outer(t)),
    "joined scatters": lambda t: in_parts(scatter(t), scatter(t)),
    "joined, of two lengths": lambda t: in_parts(outer(t, t=2), outer(t, t=5)),
    "joined, of two kinds": lambda t: in_parts(segments(t), dense(t, 4, 3)),
    "joined totals": lambda t: in_parts(*(kept(outer(t), scatter(t)) for _ in range(2))),
    "joined, total and outer": lambda t: in_parts(kept(outer(t), scatter(t)), outer(t)),
}


def close(ours: Tensor, right: Tensor) -> None:
    assert ours.shape == right.shape
    single = right.dtype in (torch.float32, torch.complex64)
    size = float(right.abs().max())
    torch.testing.assert_close(
        ours, right, rtol=1e-4 if single else 1e-12, atol=size * (1e-5 if single else 1e-13)
    )


def flat(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1)


WEIGHTS = torch.tensor([0.5, -1.0, 0.0, 3.0, 2.0])


def summation(values: Tensor, weights: Tensor | None) -> Tensor:
    weights = torch.ones(N) if weights is None else weights
    return torch.einsum("n,n...->...", weights.to(values.dtype), values)


def check_dense(block: Block, values: Tensor) -> None:
    close(block.dense(), values)
    wide = torch.promote_types(values.dtype, torch.float64)
    for out in (
        torch.full(values.shape, 7, dtype=values.dtype),
        torch.full((*values.shape, 2), 7, dtype=values.dtype)[..., 0],
        torch.full(values.shape, torch.nan, dtype=wide),
    ):
        assert block.dense(out).data_ptr() == out.data_ptr()
        close(out.to(values.dtype), values)


def check_add_to(block: Block, values: Tensor) -> None:
    for start in (values.clone(), torch.stack([values, values], -1)[..., 0]):
        block.add_to(start)
        close(start, 2 * values)


def check_squared_norms(block: Block, values: Tensor) -> None:
    assert not block.squared_norms().is_complex()
    close(block.squared_norms(), flat(values).abs().square().sum(1))


def check_norms(block: Block, values: Tensor) -> None:
    sizes = flat(values).abs()
    for p in (0.5, 1.0, 2.0, 3.0):
        close(block.norms(p), sizes.pow(p).sum(1).pow(1 / p))
    close(block.norms(torch.inf), sizes.amax(1))


def check_weighted_sum(block: Block, values: Tensor) -> None:
    for weights in (None, WEIGHTS):
        close(block.weighted_sum(weights), summation(values, weights))


def check_squared_sum(block: Block, values: Tensor) -> None:
    for size, weights in ((2**19, None), (2**19, WEIGHTS), (100, None), (100, WEIGHTS)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(outer_module, "_READ_AGAIN", size)
            found = block.squared_sum(weights)
        close(found, summation(values.abs().square(), weights))


def check_sums(block: Block, values: Tensor) -> None:
    """However much of what is formed is read again."""
    for size, w, u in ((2**19, None, None), (2**19, WEIGHTS, WEIGHTS + 2), (100, WEIGHTS, None)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(outer_module, "_READ_AGAIN", size)
            first, second = block.sums(w, u)
        close(first, summation(values, w))
        close(second, summation(values.abs().square(), u))


def check_dot(block: Block, values: Tensor) -> None:
    vector = torch.randn(block.shape).to(values.dtype) * (1 - unit(values.dtype))
    close(block.dot(vector), flat(values) @ vector.conj().flatten())


def check_pieces(block: Block, values: Tensor) -> None:
    """Whatever their size, they make up the gradients."""
    for size in (None, 1, 200):
        with pytest.MonkeyPatch.context() as patch:
            if size is not None:
                patch.setattr(base, "PIECE_BYTES", size)
                for module in (outer_module, scatter_module, segments_module):
                    patch.setattr(module, "TILE_BYTES", size)
            wide = torch.promote_types(values.dtype, torch.float64)
            found = torch.zeros(flat(values).shape, dtype=wide)
            for samples, entries, part in block.pieces():
                found[samples, entries] += part
            close(found.to(values.dtype), flat(values))


def check_two_sided(block: Block, values: Tensor) -> None:
    rows = block.shape[0] if block.shape else 1
    columns = values[0].numel() // rows
    left = torch.randn(2, rows, dtype=torch.float64)
    right = torch.randn(3, columns, dtype=torch.float64)
    wider = torch.promote_types(values.dtype, torch.float64)
    matrices = values.reshape(N, rows, columns).to(wider)
    expected = torch.einsum("ar,nrc,bc->nab", left.to(wider), matrices, right.to(wider))
    close(block.two_sided(left, right).to(values.dtype), expected.to(values.dtype))


def check_gram(block: Block, values: Tensor) -> None:
    close(block.gram(), flat(values) @ flat(values).mH)


def check_scale(block: Block, values: Tensor) -> None:
    found = block.scale(WEIGHTS)
    assert found.dtype == values.dtype
    close(found.dense(), torch.einsum("n,n...->n...", WEIGHTS.to(values.dtype), values))


def check_select(block: Block, values: Tensor) -> None:
    mask = torch.tensor([True, False, True, True, False])
    for rows in (slice(1, 4), slice(0, 1), torch.tensor([3, 0, 3, 1]), mask):
        part = block.select(rows)
        assert part.n == len(values[rows])
        close(part.dense(), values[rows])
        check_squared_norms(part, values[rows])


def check_to(block: Block, values: Tensor) -> None:
    for dtype in [torch.complex128] if values.is_complex() else [torch.float64, torch.float32]:
        cast = block.to(dtype)
        assert (cast.n, cast.shape, cast.dtype) == (N, block.shape, dtype)
        atol = 1e-4 * float(values.abs().max())
        torch.testing.assert_close(cast.dense(), values.to(cast.dtype), rtol=1e-4, atol=atol)


def check_transpose(block: Block, values: Tensor) -> None:
    matrix = [(0, 1), (1, 0), (-1, -2), (-2, -1), (0, -1), (1, 1)]
    for a, b in matrix if len(block.shape) > 1 else [(0, 0), (-1, 0)]:
        right = values.transpose(a % len(block.shape) + 1, b % len(block.shape) + 1)
        turned = block.transpose(a, b)
        assert turned.shape == tuple(right.shape[1:])
        close(turned.dense(), right)
        check_squared_norms(turned, right)


def check_reshape(block: Block, values: Tensor) -> None:
    size = values[0].numel()
    for shape in [(size,), (1, size), (size, 1), tuple(block.shape)]:
        again = block.reshape(shape)
        assert again.shape == shape
        close(again.dense(), values.reshape(N, *shape))


def check_norm_bound(block: Block, values: Tensor) -> None:
    """It is above every norm, and shows what is not finite."""
    norms = flat(values).norm(dim=1)
    assert float(block.norm_bound()) >= float(norms.max())
    for factor in (torch.inf, torch.nan):
        weights = torch.ones(len(norms))
        weights[norms.argmax()] = factor  # another sample may have no entries
        bad = block.scale(weights)
        assert not float(bad.norm_bound()) < torch.inf


def check_factors(block: Block, values: Tensor) -> None:
    factors = block.factors()
    assert factors is not None and factors.kind == block.kind
    assert block.factored_size == sum(t[0].numel() for t in factors.tensors.values())
    close(from_factors(*factors).dense(), values)


CHECKS: dict[str, Callable[[Block, Tensor], None]] = {
    name.removeprefix("check_"): check
    for name, check in [*globals().items()]
    if name.startswith("check_")
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_overridden_operations_equal_the_dense_ones(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so do tiles of single samples."""
    torch.manual_seed(4)
    block, values = KINDS[kind](dtype)
    assert (block.n, block.shape, block.dtype) == (N, tuple(values.shape[1:]), values.dtype)
    for name, check in CHECKS.items():
        own = getattr(type(block), name) is not getattr(Block, name)
        if own and (block.shape or name != "transpose"):
            check(block, values)
    close(block.dense(), values)  # which they have left alone
    for module in (base, derived):
        monkeypatch.setattr(module, "TILE_BYTES", 1)
    close(block.dense(), values)
    assert [rows.stop - rows.start for rows, _ in block.tiles()] == [1] * N
    close(torch.cat([tile for _, tile in block.tiles()]), values)


class Inherited(DerivedBlock):
    """Another block, of which only the rows are known."""

    def _values(self, base: Tensor) -> Tensor:
        return base


@pytest.mark.parametrize("tile", [1, 2**22])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["dense", "outer of another shape"])
def test_what_is_inherited(
    kind: str, dtype: torch.dtype, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(4)
    block, values = KINDS[kind](dtype)
    monkeypatch.setattr(base, "TILE_BYTES", tile)
    for name, check in CHECKS.items():
        if name not in ("norm_bound", "factors"):
            check(Inherited(block), values)


def test_both_sums_at_once_of_long_rows():
    torch.manual_seed(2)
    values = torch.randn(N, 70_000)
    for found, right in zip(
        DenseBlock(values).sums(WEIGHTS, WEIGHTS), (values, values.square()), strict=True
    ):
        expected = summation(right.double(), WEIGHTS)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_pieces_of_outer_products_are_rows_of_all_samples(monkeypatch):
    """The groups one after the other, each row of all samples 5 · 4 · 8 bytes."""
    block, _ = outer(torch.float64, k=2, t=3, r=5, c=4, shape=(5, 8))
    monkeypatch.setattr(outer_module, "TILE_BYTES", 2 * N * 4 * 8)
    found = list(block.pieces())
    assert all(samples == slice(0, N) for samples, _, _ in found)
    assert [entries.start // 4 for _, entries, _ in found] == [0, 2, 4, 5, 7, 9]


def test_pieces_of_a_table_leave_out_what_nothing_touches(monkeypatch):
    monkeypatch.setattr(scatter_module, "TILE_BYTES", 1)
    block = ScatterBlock(torch.tensor([[1, 1], [5, 1]]), torch.ones(2, 2, 3), 9)
    assert [entries for _, entries, _ in block.pieces()] == [slice(3, 6), slice(15, 18)]


def test_no_rows_at_all_are_gradients_of_zero():
    block, _ = segments(torch.float32, m=0, k=2)
    for found in (block.dense(), block.squared_norms(), block.dot(torch.ones(2, 4, 3))):
        assert len(found) == N and not found.any()
    assert not block.weighted_sum().any() and block.weighted_sum().shape == (2, 4, 3)
    assert block.select(slice(1, 3)).dense().shape == (2, 2, 4, 3)


def test_what_is_not_finite_stays_with_its_sample():
    """Also where rows of several samples lie beside it, padded to one length."""
    block, _ = segments(torch.float32, m=60, k=2)
    spoilt = block.scale(torch.tensor([1.0, torch.inf, 1.0, 1.0, 1.0]))
    for norms in (spoilt.squared_norms(), spoilt.dense().flatten(1).square().sum(1)):
        assert norms.isfinite().tolist() == [True, False, True, True, True]


def test_half_precision_neither_overflows_nor_rounds_away():
    values = torch.tensor([[300.0, 400.0], [1e-4, 0.0]], dtype=torch.float16)
    norms = DenseBlock(values).squared_norms()
    assert norms.dtype == torch.float32
    close(norms, values.float().square().sum(1))
    ones = torch.ones(2, 1, 1, 1, dtype=torch.float16)
    close(OuterBlock(values[:, None, None], ones, (2, 1)).squared_norms(), norms)


def test_blocks_of_one_kind_melt_together():
    dtype = torch.float64
    assert isinstance(summed(outer(dtype), outer(dtype, t=3))[0], OuterBlock)
    assert isinstance(summed(scatter(dtype), scatter(dtype, t=1))[0], ScatterBlock)
    assert isinstance(summed(dense(dtype, 4, 3), dense(dtype, 4, 3))[0], DenseBlock)
    assert len(summed(outer(dtype), scatter(dtype))[0].terms()) == 2


def test_gradients_of_several_parameters():
    pairs = {"w": outer(torch.float64, t=2), "e": scatter(torch.float64)}
    gradients = Gradients({name: block for name, (block, _) in pairs.items()})
    sizes = torch.cat([flat(values) for _, values in pairs.values()], 1).norm(dim=1)
    close(gradients.norms, sizes)
    rows = torch.tensor([4, 1])
    close(gradients.select(rows).norms, sizes[rows])
    close(gradients.scale(torch.arange(5.0)).norms, sizes * torch.arange(5.0))


@pytest.mark.parametrize(
    ("sizes", "dense"),
    [
        ((32, 1, 128, 128, 128), True),
        ((32, 2, 128, 64, 128), True),
        ((32, 1, 4, 128, 128), False),  # a few positions: their Gram matrices are tiny
        ((32, 1, 1, 128, 128), False),
        ((320, 1, 128, 128, 128), False),  # 20 MiB
    ],
    ids=str,
)
def test_what_is_formed_for_norms_and_a_sum(sizes: tuple[int, ...], dense: bool) -> None:
    torch.manual_seed(4)
    n, k, t, r, c = sizes
    block = OuterBlock(torch.randn(n, k, t, r), torch.randn(n, k, t, c), (k * r, c))
    formed = block.densify()
    assert (formed.dense_if_formed is not None) is dense
    anyway = t > 1 and 4 * n * k * r * c <= outer_module.KEPT
    assert (block.densify(always=True).dense_if_formed is not None) is anyway
    half = block.to(torch.bfloat16)  # dense it would be rounded; its norms are taken in float32
    assert half.densify(always=True) is half


@pytest.mark.parametrize(("room", "count"), [(0, 0), (6000, 1), (20_000, 2), (10**6, 3)])
def test_what_is_formed_of_many_has_a_limit(
    room: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradscope.blocks.gradients.FORMED_BYTES", room)
    torch.manual_seed(5)
    names = {"a": (15, 20), "b": (10, 300), "c": (10, 12)}  # 4 samples: 4,800, 48,000, 1,920 bytes
    given = Gradients(
        {
            name: OuterBlock.matrix(torch.randn(4, 7, r), torch.randn(4, 7, c))
            for name, (r, c) in names.items()
        }
    )
    rows = {name: block.dense().clone() for name, block in given.items()}
    found = given.densify(always=True)
    kinds = [block.dense_if_formed is not None for block in found.values()]
    assert kinds == [count >= 1, count == 3, count >= 2]
    torch.testing.assert_close(found.norms, torch.cat([*map(flat, rows.values())], 1).norm(dim=1))
    for name, row in rows.items():
        torch.testing.assert_close(found[name].dense(), row)
        torch.testing.assert_close(found[name].weighted_sum(), row.sum(0), rtol=1e-4, atol=1e-5)
    assert found.densify(always=True) is found  # what is known already is not computed again


@pytest.mark.parametrize(
    "stage",
    ["sign", "abs", "power:p=3", "power:p=2.5", "clamp:min=-1", "clamp:min=-1,max=2",
     "threshold:value=0.5", "square", "scale:by=-3"],
)  # fmt: skip
def test_a_bound_goes_with_a_transform_of_entries(stage: str) -> None:
    torch.manual_seed(5)

    def made(values: Tensor) -> Block:
        (block,) = bind(stage).rows(Gradients({"w": DenseBlock(values)})).values()
        return block

    for scale in (1e-3, 1.0, 1e5):
        block = made(torch.randn(4, 5) * scale)
        assert float(block.norms().max()) <= float(block.norm_bound()) < torch.inf
    for value in (torch.inf, torch.nan):
        assert not float(made(torch.tensor([[1.0, value], [1.0, 2.0]])).norm_bound()) < torch.inf


def near(kind: str, spread: float) -> tuple[Block, Tensor, Tensor]:
    """Rows (1 + spread · cᵢ) g, and their mean g as Σ cᵢ = 0; returns the deviations too."""
    torch.manual_seed(3)
    deviations = torch.tensor([-3.0, -2.0, -1.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    if kind == "outer":
        left, right = torch.randn(1, 1, 1, 4), torch.randn(1, 1, 1, 3)
        one: Block = OuterBlock(left.double(), right.double(), (4, 3))
    else:
        one = ScatterBlock(torch.tensor([[1, 3, 1]]), torch.randn(1, 3, 2).double(), 5)
    block = one.select(torch.zeros(6, dtype=torch.long)).scale(1 + spread * deviations)
    return block, one.dense()[0], spread * deviations


@pytest.mark.parametrize("spread", [1.0, 1e-3, 1e-6])
@pytest.mark.parametrize("kind", ["outer", "scatter"])
def test_squares_do_not_cancel(kind: str, spread: float) -> None:
    """The error is that of the difference of two rounded numbers, not of their squares."""
    block, mean, deviations = near(kind, spread)
    centered = CenteredBlock(block, mean)
    tolerance = 1e-14 / spread
    norms = deviations.square() * mean.square().sum()
    torch.testing.assert_close(centered.squared_norms(), norms, rtol=tolerance, atol=0)
    sums = deviations.square().sum() * mean.square()
    torch.testing.assert_close(centered.squared_sum(), sums, rtol=tolerance, atol=0)


def test_float32_is_centred_in_float64() -> None:
    values = 1000 + torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    mean = values.double().mean(0)
    right = values.double() - mean
    found = CenteredBlock(DenseBlock(values), mean).dense()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), right, rtol=1e-7, atol=0)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_stays_visible(bad: float) -> None:
    block, mean, _ = near("outer", 1.0)
    assert isinstance(block, OuterBlock)
    left = block.left.clone()
    left[2, 0, 0, 1] = bad
    centered = CenteredBlock(OuterBlock(left, block.right, block.shape), mean)
    assert centered.squared_norms().isfinite().tolist() == [True] * 2 + [False] + [True] * 3
    assert not bool(centered.squared_sum()[1].isfinite().any())


def test_a_diagonal_beyond_float32() -> None:
    values = torch.tensor([[1e-42, 2.0]])
    diagonal = torch.tensor([1e42, 0.5], dtype=torch.float64)
    block = PreconditionedBlock(DenseBlock(values), diagonal)
    torch.testing.assert_close(block.dense(), torch.tensor([[1.0, 1.0]]), rtol=1e-3, atol=0)
