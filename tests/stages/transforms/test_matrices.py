"""Random matrices against their definition, written out here in plain Python and numpy."""

import hashlib
from statistics import NormalDist

import numpy as np
import pytest
import torch

from gradscope.stages.transforms import random
from gradscope.stages.transforms.project import RandomMatrices, table

KINDS = ["gaussian", "rademacher", "sparse"]

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


@pytest.mark.parametrize("columns", [1, 7, WIDE])
@pytest.mark.parametrize("kind", KINDS)
def test_definition(kind: str, columns: int) -> None:
    ours = RandomMatrices(37, kind, 3, USE, tile_rows=32).whole("w", columns, CPU)
    assert ours.dtype == torch.float32
    np.testing.assert_allclose(ours, defined(kind, 37, columns), rtol=3e-7)


@pytest.mark.parametrize("kind", KINDS)
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


def test_fewer_rows_are_the_first() -> None:
    for kind in KINDS:
        many, few = (RandomMatrices(r, kind, 3, USE).whole("w", 4099, CPU) for r in (50, 19))
        assert torch.equal(many[:19], few)


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
