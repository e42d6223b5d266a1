"""Queries whose preconditioned matrices have a low rank, against NumPy's singular values."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import gradscope
from gradscope.attribution import products
from gradscope.attribution.products import GradientBatch, Tile
from gradscope.blocks import Block, DenseBlock, Gradients, OuterBlock
from gradscope.errors import SpecError
from tests.attribution.test_scoring import LAMBDA, close

N, M, T, WORDS = 14, 5, 6, 12
LAYERS = ("1.weight", "3.weight", "5.weight")


class Turned(nn.Module):
    """A layer whose weight is stored inputs first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(9, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def model() -> nn.Module:
    """Return a table, layers with the bias as a column or as a row, and a norm."""
    torch.manual_seed(0)
    layers = (nn.Linear(10, 9), nn.Tanh(), Turned(), nn.LayerNorm(8), nn.Linear(8, WORDS))
    return nn.Sequential(nn.Embedding(WORDS, 10), *layers).double()


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.mT, targets, reduction="none").sum(1)


def samples(n: int, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(WORDS, (n, T + 1), generator=draw)
    return tokens[:, :-1], tokens[:, 1:]


def attributed(curvature: Any, rank: int, **how: Any) -> gradscope.attribution.Scores:
    scope = gradscope.Scope(model(), loss, backend="hooks")
    sides = (scope, *samples(N, 1)), (scope, *samples(M, 2))
    return gradscope.attribute(*sides, curvature, LAMBDA, query_rank=rank, **how)


def best(matrix: np.ndarray, rank: int) -> tuple[np.ndarray, float]:
    """Return the truncated decomposition and ‖dropped‖², unless the matrix has fewer numbers."""
    r, c = matrix.shape
    if rank * (r + c) >= r * c:
        return matrix, 0.0
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ v[:rank], float(np.square(s[rank:]).sum())


def preconditioned(curvature: str, rank: int) -> tuple[list[dict[str, np.ndarray]], np.ndarray]:
    """Return the rows of queries times the inverse, truncated, and the shares dropped."""
    chain = "ekfac" if curvature == "ekfac" else "kfac:bias=column"
    scope = gradscope.Scope(model(), loss, backend="hooks")
    stored = {k: v.numpy() for k, v in scope.expectation(chain, *samples(N, 1)).items()}
    names = {k.partition(".A")[0] for k in stored if ".A" in k}
    rows = gradscope.per_sample_gradients(model(), loss, *samples(M, 2), backend="loop")
    found: list[dict[str, np.ndarray]] = []
    shares = []
    for q in range(M):
        g, made = {k: v[q].numpy() for k, v in rows.items()}, {}
        whole = dropped = 0.0
        for name in names:
            if curvature == "ekfac":
                a, b = stored[f"{name}.A.vectors"], stored[f"{name}.B.vectors"]
                values = stored[f"{name}.eigenvalues"]
            else:
                (x, a), (y, b) = (np.linalg.eigh(stored[f"{name}.{side}"]) for side in "AB")
                values = np.outer(y, x)
            if name in LAYERS:
                bias = g[name.replace("weight", "bias")]
                below = g[name].shape == (9, 8)
                own = bias[None] if below else bias[:, None]
                matrix = np.concatenate([g[name], own], 0 if below else 1)
            else:
                matrix = g[name].reshape(b.shape[0], a.shape[0])
            c = (b.T @ matrix @ a) / (values + LAMBDA * values.mean())
            whole += np.square(c).sum()
            c, lost = best(c, rank)
            dropped += lost
            matrix = b @ c @ a.T
            if name in LAYERS:
                made[name] = matrix[:-1] if below else matrix[:, :-1]
                made[name.replace("weight", "bias")] = matrix[-1] if below else matrix[:, -1]
            else:
                made[name] = matrix.reshape(g[name].shape)
        for name in g.keys() - made.keys():
            values = stored[f"{name}.diagonal"]
            row = g[name] / (values + LAMBDA * values.mean())
            whole += np.square(row).sum()
            made[name], lost = best(row, rank) if row.ndim == 2 else (row, 0.0)
            dropped += lost
        found.append(made)
        shares.append(np.sqrt(dropped / whole))
    return found, np.array(shares)


def product(row: dict[str, np.ndarray], rows: dict[str, Tensor], i: int) -> float:
    return float(sum((row[k] * g[i].numpy()).sum() for k, g in rows.items()))


def scores_of(queries: list[dict[str, np.ndarray]]) -> np.ndarray:
    """Return the scores (M, N) of rows of queries, one product at a time."""
    rows = gradscope.per_sample_gradients(model(), loss, *samples(N, 1), backend="loop")
    return np.array([[product(q, rows, i) for i in range(N)] for q in queries]) / N


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("curvature", ["ekfac", "kfac"])
def test_scores_are_those_of_truncated_rows(curvature: str, rank: int) -> None:
    queries, shares = preconditioned(curvature, rank)
    rows = gradscope.per_sample_gradients(model(), loss, *samples(N, 1), backend="loop")
    wanted = np.array(
        [
            [sum((q[k] * g[i].numpy()).sum() for k, g in rows.items()) for i in range(N)]
            for q in queries
        ]
    )
    found = attributed(curvature, rank)
    close(found.values, wanted / N)
    np.testing.assert_allclose(found.queries["truncation"], shares, rtol=1e-7)
    assert shares.min() > 1e-3
    raw = gradscope.per_sample_gradients(model(), loss, *samples(M, 2), backend="loop")
    own = np.array(
        [sum((q[k] * raw[k][i].numpy()).sum() for k in raw) for i, q in enumerate(queries)]
    )
    assert (own > 0).all()
    relative, cosine = (attributed(curvature, rank, score=f).values for f in ("relative", "cosine"))
    close(cosine, relative / np.sqrt(own / N)[:, None])


@pytest.mark.parametrize("rank", [8, 100])
@pytest.mark.parametrize("curvature", ["ekfac", "kfac", "auto"])
def test_a_full_rank_changes_nothing(curvature: str, rank: int) -> None:
    found = attributed(curvature, rank)
    dense = attributed("ekfac" if curvature == "auto" else curvature, 0)
    close(found.values, dense.values, 1e-12)
    assert not found.queries["truncation"].any()
    assert "truncation" not in dense.queries


def test_errors_fall_as_the_rank_grows() -> None:
    dense = np.asarray(attributed("ekfac", 0).values)
    shares = [float(attributed("ekfac", rank).queries["truncation"].max()) for rank in (1, 2, 3)]
    assert shares == sorted(shares, reverse=True)
    assert not np.allclose(attributed("ekfac", 1).values, dense, rtol=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"curvature": "fisher"}, "curvature fisher has no matrices of layers"),
        ({"curvature": "identity"}, "curvature identity has no matrices of layers"),
        ({"curvature": "diagonal"}, "curvature diagonal has no matrices of layers"),
        ({"refine": 3}, "refine"),
        ({"query_rank": -1}, "found -1"),
    ],
    ids=str,
)
def test_what_has_no_matrices_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        gradscope.attribution.AttributionSettings(**{"query_rank": 2, **settings})
    assert caught.value.where == "`query_rank`"


def outer(n: int, t: int, dtype: torch.dtype) -> OuterBlock:
    left, right = torch.randn(n, 1, t, 7, dtype=dtype), torch.randn(n, 1, t, 5, dtype=dtype)
    return OuterBlock(left, right, (7, 5))


def others(dtype: torch.dtype) -> Iterator[Block]:
    yield outer(4, 3, dtype)
    yield outer(4, 40, dtype)
    yield DenseBlock(torch.randn(4, 7, 5, dtype=dtype))


@pytest.mark.parametrize("most", [2**26, 100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_products_of_low_rank_with_any_block(
    dtype: torch.dtype, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of rows are formed, of which no part begins with a row of the matrix."""
    torch.manual_seed(0)
    monkeypatch.setattr(products, "_PAIRS_BYTES", most)
    queries = [outer(3, 2, dtype), outer(2, 2, dtype)]
    batches = [GradientBatch(torch.arange(len(q.left)), Gradients({"w": q})) for q in queries]
    tile = Tile(batches, torch.float64, keeps_rows=False)
    rows = torch.cat([q.dense() for q in queries]).flatten(1)
    for block in others(dtype):
        (found,) = tile.with_each(Gradients({"w": block})).values()
        wanted = (rows.conj() @ block.dense().flatten(1).mT).real
        torch.testing.assert_close(found, wanted.double())
    assert not tile._rows  # nothing is kept


@pytest.mark.parametrize("keeps_rows", [True, False])
@pytest.mark.parametrize(("scale", "rtol"), [(1.0, 1e-8), (1e-22, 1e-13)], ids=["short", "tiny"])
@pytest.mark.parametrize("shape", [(7, 5), (60, 31)], ids=str)
def test_products_of_float32_have_the_sums_of_float64(
    shape: tuple[int, int], scale: float, rtol: float, keeps_rows: bool
) -> None:
    """Relative to ‖q‖ ‖g‖, also of a sample whose products with queries underflow float32."""
    torch.manual_seed(0)
    r, c = shape
    left, right = torch.randn(3, 1, 2, r), torch.randn(3, 1, 2, c)
    rows = torch.randn(4, r, c)
    rows[1] *= scale
    rows[2] = 0.0
    block = OuterBlock(left * scale, right, shape)
    for query in (block, DenseBlock(block.dense())):
        batch = GradientBatch(torch.arange(3), Gradients({"w": query}))
        tile = Tile([batch], torch.float64, keeps_rows=keeps_rows)
        (found,) = tile.with_each(Gradients({"w": DenseBlock(rows)})).values()
        q, g = query.dense().double().flatten(1), rows.double().flatten(1)
        gap = (found - q @ g.mT).abs()
        assert bool((gap <= rtol * q.norm(dim=1, keepdim=True) * g.norm(dim=1)).all())
