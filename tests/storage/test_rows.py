"""The walk over stored rows: against the dense rows by numpy, in every layout and tile."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradscope.attribution.sources import FileSource
from gradscope.blocks import DenseBlock, Gradients, OuterBlock, ScatterBlock
from gradscope.storage import open_file, stored_gradients
from tests.storage.example import N, expected, with_layout, write

SOME = {
    "all": np.arange(N),
    "every third": np.arange(1, N, 3),
    "few, far apart": np.array([2, 3, 97]),
    "one": np.array([41]),
    "none": np.arange(0),
}


@pytest.mark.parametrize("layout", ["dense", "factored"])
@pytest.mark.parametrize("size", [1, 5000, 2**40])
@pytest.mark.parametrize("rows", SOME.values(), ids=SOME)
def test_every_row_comes_once(tmp_path: Path, layout: Any, size: int, rows: np.ndarray) -> None:
    write(tmp_path / "o.h5", with_layout(layout))
    with open_file(tmp_path / "o.h5") as file:
        found = list(stored_gradients(file.chains[0], rows, size))
    assert np.array_equal(np.concatenate([rows[:0], *(places for places, _ in found)]), rows)
    for name, wanted in expected().items():
        for places, gradients in found:
            dense = gradients[name].dense().numpy()
            np.testing.assert_allclose(dense, wanted[places.numpy()], rtol=1e-6, atol=1e-6)
    if size == 1:
        assert all(len(places) == 1 for places, _ in found)


def test_factors_come_as_factors(tmp_path: Path) -> None:
    """Of half precision they are dense, as their product is rounded."""
    kinds = {"layer.weight": OuterBlock, "emb": ScatterBlock}
    for dtype in (torch.float32, torch.float16):
        path = tmp_path / f"{dtype}.h5"
        write(path, with_layout("factored", dtype=dtype))
        with open_file(path) as file:
            ((_, gradients),) = stored_gradients(file.chains[0], np.arange(N), 2**40)
            for name, kind in kinds.items():
                block = gradients[name]
                assert isinstance(block, kind) == (dtype == torch.float32)
                assert np.array_equal(block.dense().numpy(), file.chains[0][name][...])


def test_a_source_leaves_out_rows_that_are_not_finite(tmp_path: Path) -> None:
    """Those that the table says so of, and those that a stage has made so; of any shape."""
    broken = {"w": 7, "layer.weight": 13, "scale": 99}
    broken_rows = {name: rows.copy() for name, rows in expected().items()}
    for name, row in broken.items():
        broken_rows[name][row] = np.nan

    def make(start: int, stop: int) -> Any:
        made = {name: torch.from_numpy(rows[start:stop]) for name, rows in broken_rows.items()}
        return Gradients({name: DenseBlock(rows) for name, rows in made.items()})

    write(tmp_path / "o.h5", with_layout("dense"), make=make)
    right = np.setdiff1d(np.flatnonzero(np.arange(N) % 5 > 0), list(broken.values()))
    with open_file(tmp_path / "o.h5") as file:
        source = FileSource(file, None)
        for _ in range(2):
            batches = list(source.batches())
            assert np.array_equal(torch.cat([batch.places for batch in batches]), right)
            for name, wanted in expected().items():
                rows = torch.cat([batch.gradients[name].dense() for batch in batches])
                np.testing.assert_allclose(rows, wanted[right], rtol=1e-6)
        assert np.array_equal(np.flatnonzero(source.table()["finite"]), right)
