"""Projections: one linear map for every kind of block; its matrix against its definition."""

import hashlib
from statistics import NormalDist

import numpy as np
import pytest
import torch

from gradscope.blocks import Block, DenseBlock, Gradients, OuterBlock, segmented
from gradscope.engine.chains import bind
from gradscope.errors import SpecError
from gradscope.stages.transforms import random
from gradscope.stages.transforms.project import Pattern, RandomMatrices, SparseMatrices, table
from tests.stages.examples import compare, everything, flat, run

FULL = ["gaussian", "rademacher", "sparse"]
SPARSE = ["sjlt", "sjlt,nonzeros=2", "sjlt,nonzeros=6"]
KINDS = [*FULL, "kronecker", *SPARSE]
DIM = 6


def matrix(kind: str, shapes: dict[str, tuple[int, ...]], seed: int = 0) -> np.ndarray:
    """The projection (dim, entries), read off the gradients that are one at one place."""
    sizes = [int(np.prod(s)) for s in shapes.values()]
    basis = torch.eye(sum(sizes), dtype=torch.float64)
    blocks = {
        name: DenseBlock(part.reshape(-1, *shape))
        for (name, shape), part in zip(shapes.items(), basis.split(sizes, 1), strict=True)
    }
    return run(f"project:dim={DIM},kind={kind},seed={seed}", Gradients(blocks))["project"].numpy().T


def shapes() -> dict[str, tuple[int, ...]]:
    return {name: block.shape for name, block in everything()[0].items()}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_sums(kind: str) -> None:
    gradients, rows = everything()
    text = f"project:dim={DIM},kind={kind}"
    right = flat(rows) @ matrix(kind, shapes()).T
    cuts = (1, 3)
    compare(run(text, gradients), {"project": right})
    compare(run(text, gradients, cuts), {"project": right})
    compare(run(f"{text} | mean", gradients, cuts), {"project": right.mean(0)}, 1e-10)
    compare(run(f"mean | {text}", gradients, cuts), {"project": right.mean(0)}, 1e-10)
    compare(run(f"{text} | var", gradients, cuts), {"project": right.var(0, ddof=1)}, 1e-9)
    centred = right - right.mean(0)
    compare(run(f"center | {text}", gradients, cuts), {"project": centred}, 1e-10)
    norms = np.linalg.norm(flat(rows), axis=1)
    clipped = right * np.minimum(1, 0.5 / norms)[:, None]
    compare(run(f"clip:max_norm=0.5 | {text}", gradients, cuts), {"project": clipped})


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients, _ = everything()
    text = f"project:dim={DIM},kind={kind}"
    whole = run(text, gradients)["project"]
    for module in ("base", "outer", "scatter"):
        monkeypatch.setattr(f"gradscope.blocks.{module}.TILE_BYTES", 1)
    torch.testing.assert_close(run(text, gradients)["project"], whole, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_the_matrix_depends_on_seed_and_name_only(kind: str) -> None:
    one, two = {"a": (3, 4)}, {"b": (2, 2), "a": (3, 4)}
    alone = matrix(kind, one)
    assert np.array_equal(alone, matrix(kind, two)[:, 4:])
    assert not np.allclose(alone, matrix(kind, one, seed=1))
    assert not np.allclose(alone, matrix(kind, {"c": (3, 4)}))


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["kronecker", *SPARSE])
def test_inner_products_are_kept_on_average(kind: str) -> None:
    """Of the matrices whose entries are not independent; the others' table has exact moments."""
    gradients, rows = everything()
    right = flat(rows) @ flat(rows).conj().T
    found = []
    for seed in range(100):
        projected = run(f"project:dim=6,kind={kind},seed={seed}", gradients)["project"].numpy()
        found.append(projected @ projected.conj().T)
    stack = np.stack(found)
    for part in (np.real, np.imag):
        error = np.abs(part(stack).mean(0) - part(right))
        spread = part(stack).std(0, ddof=1) / len(stack) ** 0.5
        assert np.all(error <= 5 * spread + 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_products_in_float32_are_near_those_in_float64(kind: str) -> None:
    torch.manual_seed(2)
    left, right = torch.randn(3, 5, 90), torch.randn(3, 5, 1000)
    found = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        block = OuterBlock.matrix(left.bfloat16().to(dtype), right.bfloat16().to(dtype))
        found[dtype] = run(f"project:dim=18,kind={kind}", Gradients({"w": block}))["project"]
        assert found[dtype].dtype == torch.float64
    size = float(found[torch.float64].abs().max())
    torch.testing.assert_close(found[torch.float32], found[torch.float64], rtol=0, atol=2e-6 * size)
    assert torch.equal(found[torch.bfloat16], found[torch.float32])


def test_two_sided_never_forms_an_outer_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix of 10^10 entries a sample, from its factors."""
    big = OuterBlock.matrix(torch.randn(2, 3, 100_000), torch.randn(2, 3, 100_000))

    def refuse(self: object, out: object = None) -> torch.Tensor:
        raise AssertionError("formed")

    monkeypatch.setattr(OuterBlock, "dense", refuse)
    gradients = Gradients({"w": big}, torch.arange(2))
    found = run("project:dim=4,kind=kronecker", gradients)["project"]
    assert found.shape == (2, 4) and bool(found.isfinite().all())


def test_stacked_experts_are_one_tall_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four experts (30, 20) it has 120 rows; dense or not, in the given order or another."""
    torch.manual_seed(5)
    owners = torch.randint(0, 3, (50,)), torch.randint(0, 4, (50,))
    rows = segmented((torch.randn(50, 30), torch.randn(50, 20), *owners), (3, 4), (4, 30, 20))
    chain = "project:dim=6,kind=kronecker"

    def projected(block: Block) -> torch.Tensor:
        return run(chain, Gradients({"w": block}, torch.arange(3)))["project"]

    dense = rows.dense()
    right = projected(DenseBlock(dense.view(3, 120, 20)))
    torch.testing.assert_close(projected(DenseBlock(dense)), right, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(Block, "tiles", None)
    torch.testing.assert_close(projected(rows), right, rtol=1e-5, atol=1e-4)


CPU = torch.device("cpu")
WIDE = 9001  # columns: two tiles of 4,096, and a rest
USE = "a use"


def defined(kind: str, rows: int, columns: int, name: str = "w", seed: int = 3) -> np.ndarray:
    """The matrix, a stream of raw bits for each 16 rows and 4,096 columns."""
    found = np.empty((rows, columns))
    for top in range(0, rows, 16):
        for first in range(0, columns, 4096):
            width = min(4096, columns - first)
            text = "\0".join(map(str, (seed, USE, name, top, first))).encode()
            key = int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")
            raw = np.random.SFC64(key).random_raw(16 * width).astype("<u8").tobytes()
            stream = values(kind, raw, 16 * width).reshape(16, width)
            found[top : top + 16, first : first + width] = stream[: rows - top]
    return found


def values(kind: str, raw: bytes, count: int) -> np.ndarray:
    if kind == "rademacher":  # the highest bit of a byte first
        bits = [byte >> k & 1 for byte in raw[: (count + 7) // 8] for k in range(7, -1, -1)]
        return 2.0 * np.array(bits[:count]) - 1
    draws = np.frombuffer(raw, "<u2")[:count].astype(int)
    if kind == "sparse":
        sixth = 10923
        sign = 1.0 * (draws >= 65536 - sixth) - 1.0 * (draws < sixth)
        return sign * (65536 / (2 * sixth)) ** 0.5
    quantiles = np.array([NormalDist().inv_cdf((k + 0.5) / 65536) for k in range(65536)])
    quantiles[32768:] = -quantiles[:32768]
    return (quantiles / (quantiles**2).mean() ** 0.5)[draws]


@pytest.mark.parametrize(("height", "columns"), [(37, 7), (19, 4099), (37, WIDE)])
@pytest.mark.parametrize("kind", FULL)
def test_definition(kind: str, height: int, columns: int) -> None:
    """So of fewer rows they are the first ones."""
    ours = RandomMatrices(height, kind, 3, USE, tile_rows=32).whole("w", columns, CPU)
    assert ours.dtype == torch.float32
    np.testing.assert_allclose(ours, defined(kind, height, columns), rtol=3e-7)


@pytest.mark.parametrize("kind", FULL)
def test_moments_of_the_table(kind: str) -> None:
    """What independent entries have, exactly and not on average."""
    entries = table(kind).astype(float)
    assert entries.mean() == 0
    assert abs((entries**2).mean() - 1) < 1e-7
    assert abs((entries**4).mean() - {"gaussian": 3, "rademacher": 1, "sparse": 3}[kind]) < 1e-3
    together = entries.T @ entries / len(entries)
    np.testing.assert_allclose(together, np.eye(len(together)), atol=1e-7)


@pytest.mark.parametrize("part", [slice(0, 10), slice(4090, 4100), slice(100, WIDE)])
def test_parts(part: slice) -> None:
    drawn = RandomMatrices(37, "gaussian", 3, USE)
    found = torch.full((37, WIDE), torch.nan)
    for rows, columns, entries in drawn.tiles("w", WIDE, part, CPU):
        found[rows, columns] = entries
    whole = drawn.whole("w", WIDE, CPU)
    assert torch.equal(found[:, part], whole[:, part])
    assert int(found.isnan().sum()) == 37 * (WIDE - (part.stop - part.start))


def test_threads_change_nothing() -> None:
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(RandomMatrices(100, "gaussian", 3, USE).whole("w", WIDE, CPU))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_what_fits_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept tiles stay within the budget; the others are drawn again, and are the same."""
    drawn: list[tuple[str, int, int]] = []
    words = random.words

    def counted(seed: int, use: str, name: str, row: int, column: int, count: int) -> np.ndarray:
        drawn.append((name, row, column))
        return words(seed, use, name, row, column, count)

    monkeypatch.setattr(random, "words", counted)
    kept = 4 * 16 * 4096 + 4 * 16 * 10
    matrices = RandomMatrices(16, "gaussian", 3, USE, kept_bytes=kept)
    first = [matrices.whole(name, size, CPU) for name, size in (("big", WIDE), ("small", 10))]
    assert drawn == [("big", 0, 0), ("big", 0, 4096), ("big", 0, 8192), ("small", 0, 0)]
    drawn.clear()
    again = [matrices.whole(name, size, CPU) for name, size in (("big", WIDE), ("small", 10))]
    assert all(map(torch.equal, first, again))
    assert drawn == [("big", 0, 4096), ("big", 0, 8192)]


def sparse_defined(rows: int, nonzeros: int, columns: int, name: str, seed: int) -> np.ndarray:
    """The matrix of sjlt, an entry of each column in each part of the rows."""
    width, found = rows // nonzeros, np.zeros((rows, columns))
    for part in range(nonzeros):
        for column in range(columns):
            chunk = column // width
            text = (seed, "project sjlt places", name, part, chunk - chunk % 4096)
            words = np.random.SFC64(hashed(*text)).random_raw(chunk % 4096 + 1)
            place = (column + int(words[-1]) % width) % width
            first = column - column % 4096
            wide = min(4096, columns - first)
            top = part - part % 16
            raw = np.random.SFC64(hashed(seed, "project sjlt signs", name, top, first))
            count = min(16, nonzeros - top) * wide
            bits = np.unpackbits(raw.random_raw(count // 64 + 1).astype("<u8").view(np.uint8))
            sign = 2.0 * bits[(part - top) * wide + column - first] - 1
            found[part * width + place, column] = sign
    return found / nonzeros**0.5


def hashed(*parts: object) -> int:
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")


@pytest.mark.parametrize(
    ("rows", "nonzeros", "columns"), [(1, 1, 50), (6, 2, 4200), (34, 17, 300), (500, 1, 1100)]
)
def test_definition_of_sjlt(rows: int, nonzeros: int, columns: int) -> None:
    """Beyond a stream of signs, of places (4,096 chunks of 1 or 3) and of rows."""
    torch.manual_seed(4)
    values = torch.randn(3, columns, dtype=torch.float64)
    right = values.numpy() @ sparse_defined(rows, nonzeros, columns, "w", 5).T
    text = f"project:dim={rows},kind=sjlt,nonzeros={nonzeros},seed=5"
    compare(run(text, Gradients({"w": DenseBlock(values)})), {"project": right})


def test_streams_of_places_follow_each_other() -> None:
    """4,096 chunks a stream; so the places of any part are those of the whole."""
    matrices = SparseMatrices(2, 1, 5)
    whole = dense(matrices.part("w", 9000, slice(0, 9000), CPU), 2, 9000)
    part = dense(matrices.part("w", 9000, slice(8101, 8303), CPU), 2, 202)
    assert np.array_equal(whole[:, 8101:8303], part)
    words = [np.random.SFC64(hashed(5, "project sjlt places", "w", 0, k)) for k in (0, 4096)]
    shifts = np.concatenate([stream.random_raw(4096) for stream in words])[:4500] % 2
    place = (np.arange(9000) + shifts.astype(int).repeat(2)) % 2
    assert np.array_equal(np.abs(whole).argmax(0), place)


def dense(pattern: Pattern, rows: int, columns: int) -> np.ndarray:
    return pattern.of(torch.eye(columns)).numpy().reshape(rows, columns)


@pytest.mark.sampled
@pytest.mark.parametrize(("rows", "nonzeros"), [(10, 1), (10, 2), (12, 4)])
def test_mean_and_variance_of_sjlt(rows: int, nonzeros: int) -> None:
    """Over seeds, as of any two entries that meet with probability nonzeros / rows, or never."""
    torch.manual_seed(6)
    g, h = (t.double().numpy() for t in torch.randn(2, 57))
    width = rows // nonzeros
    chunk = np.arange(57) // width
    met = np.outer(g, h) + np.outer(h, g)
    variance = (np.triu(met, 1) ** 2)[chunk[:, None] != chunk].sum() / rows
    whole = (g @ g * (h @ h) + (g @ h) ** 2 - 2 * (g**2 * h**2).sum()) / rows  # of random signs
    assert variance < whole
    found = []
    for seed in range(3000):
        matrix = dense(
            SparseMatrices(rows, nonzeros, seed).part("w", 57, slice(0, 57), CPU), rows, 57
        )
        found.append((matrix @ g) @ (matrix @ h) / nonzeros)
    errors = np.array(found) - g @ h
    assert abs(errors.mean()) < 4 * errors.std() / len(errors) ** 0.5
    spread = (errors**2).std() / len(errors) ** 0.5
    assert abs((errors**2).mean() - variance) < 4 * spread < 0.25 * variance


@pytest.mark.parametrize("nonzeros", [1, 3])
def test_entries_of_one_width_never_meet(nonzeros: int) -> None:
    torch.manual_seed(8)
    values = torch.randn(4, 5, 4, dtype=torch.float64)
    text = f"project:dim={20 * nonzeros},kind=sjlt,nonzeros={nonzeros} | gram"
    found = run(text, Gradients({"w": DenseBlock(values)}))["gram"]
    torch.testing.assert_close(found, values.flatten(1) @ values.flatten(1).T)


@pytest.mark.parametrize("kind", KINDS)
def test_each_parameter_by_itself(kind: str) -> None:
    """Their sum is the whole; what has no more entries than dim is kept, in its order."""
    gradients, rows = everything()
    text = f"project:dim={DIM},kind={kind},per=parameter"
    found = run(text, gradients, (1, 3))
    assert list(found) == list(gradients)
    small = [name for name, shape in shapes().items() if np.prod(shape) <= DIM]
    assert "scalar" in small and "complex" in small
    assert len(small) < len(found)
    compare({k: found[k] for k in small}, {k: rows[k].reshape(len(rows[k]), -1) for k in small})
    large = Gradients({k: b for k, b in gradients.items() if k not in small}, gradients.index)
    whole = run(f"project:dim={DIM},kind={kind}", large)["project"].numpy()
    compare({"sum": sum(found[k] for k in large)}, {"sum": whole})
    mean = run(f"{text} | mean", gradients, (1, 3))
    compare(mean, {k: v.numpy().mean(0) for k, v in found.items()}, 1e-9)


def test_patterns_within_the_budget_are_kept() -> None:
    torch.manual_seed(9)
    values = torch.randn(300, 2)
    part = slice(0, 300)
    matrices = SparseMatrices(8, 2, 1, kept_bytes=2 * 300 * 8 + 8 * 4)
    first, other = (matrices.part(name, 300, part, CPU) for name in ("a", "b"))
    assert matrices.part("a", 300, part, CPU) is first
    again = matrices.part("b", 300, part, CPU)
    assert again is not other and torch.equal(again.of(values), other.of(values))
    assert not torch.equal(first.of(values), other.of(values))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("kind=sjlt,nonzeros=4", "nonzeros must divide dim, but 4 does not divide 6"),
        ("kind=sjlt,nonzeros=0", "nonzeros must divide dim"),
        ("nonzeros=2", "nonzeros is an option of kind=sjlt only, and kind is gaussian"),
    ],
)
def test_nonzeros_that_do_not_fit(arguments: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        bind(f"project:dim=6,{arguments}")
