"""The size of a file, told before it is written, against the file."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

from gradscope.blocks import DenseBlock, Gradients, OuterBlock
from gradscope.storage import FilePlan, file_bytes, open_writer
from tests.storage.example import PLAN, N, rows, with_layout, write, write_block


def _stored(path: Path) -> int:
    """The bytes of all arrays, by HDF5; those of the axes hold nothing."""
    found: list[int] = []

    def visit(name: str, item: h5py.HLObject) -> None:
        if isinstance(item, h5py.Dataset):
            found.append(item.id.get_storage_size())

    with h5py.File(path) as file:
        file.visititems(visit)
    return sum(found)


@pytest.mark.parametrize("layout", ["dense", "factored", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.bfloat16])
def test_the_numbers_take_exactly_what_was_told(
    tmp_path: Path, layout: Any, dtype: torch.dtype
) -> None:
    plan = with_layout(layout, dtype=dtype)
    results = {name: (shape, torch.float64) for name, shape in plan.parameters.items()}
    numbers, structure = file_bytes(plan, rows(0, 16), [results], [results])  # the means, the sums
    write(tmp_path / "o.h5", plan)
    assert _stored(tmp_path / "o.h5") == numbers
    total = (tmp_path / "o.h5").stat().st_size
    assert abs(numbers + structure - total) < 0.25 * (total - numbers)


@pytest.mark.parametrize(("n", "shape", "batch"), [(40, (300_007,), 3), (7, (5, 100_003), 7)])
def test_the_structure_of_many_chunks(
    tmp_path: Path, n: int, shape: tuple[int, ...], batch: int
) -> None:
    block = DenseBlock(torch.full((n, *shape), 0.5))
    plan = with_layout("dense", n=n, parameters={"w": shape}, chains=PLAN.chains[:1])
    made = Gradients({"w": block.select(slice(0, batch))})
    told = sum(file_bytes(plan, replace(rows(0, batch, made), chains=(made,)), []))
    write_block(tmp_path / "o.h5", plan, block, batch)
    assert told == pytest.approx((tmp_path / "o.h5").stat().st_size, rel=1e-3)


@pytest.mark.parametrize(
    ("chains", "shape"),
    [(1, ()), *(pytest.param(2, shape, marks=pytest.mark.full) for shape in ((2,), (3, 1, 2)))],
)
def test_thousands_of_small_tensors(tmp_path: Path, chains: int, shape: tuple[int, ...]) -> None:
    """A file takes a few times its numbers, and about what was told."""
    shapes = {f"layers.{k}.weight": shape for k in range(400)}
    plan = with_layout("dense", n=64, parameters=shapes, chains=PLAN.chains[:chains])
    values = torch.randn(64, *shape)
    made = Gradients({name: DenseBlock(values) for name in shapes})
    means = {name: values.double().mean(0) for name in shapes}
    one = rows(0, 64, made)
    one = replace(one, chains=(made, None)[:chains])
    kinds = dict.fromkeys(shapes, (shape, torch.float64))
    results, states = [kinds] * (chains - 1), [kinds]
    told = sum(file_bytes(plan, one, results, states))
    with open_writer(tmp_path / "o.h5", plan) as writer:
        writer.append(one, {})
        attributes = {name: {"mean_gradient_norm": 1.0} for name in shapes}
        writer.finish({1: means} if chains > 1 else {}, {}, attributes, {"mean_gradient": means})
    size = (tmp_path / "o.h5").stat().st_size
    numbers = 400 * 64 * 4 * (1 + prod(shape))
    assert told == pytest.approx(size, rel=0.05)
    assert size < numbers + 400 * 3000


def test_nothing_is_computed_to_tell(tmp_path: Path) -> None:
    """Rows of a petabyte."""
    wide = torch.ones(()).expand(2, 1, 1, 10**6)
    made = Gradients({"w": OuterBlock(wide, wide, (10**6, 10**6))})
    one = rows(0, 2, Gradients({"w": DenseBlock(torch.ones(2, 1))}))
    batch = replace(one, norms={}, chains=(made,))
    plan = FilePlan(
        run={}, fingerprint={}, attributes={}, n=N, parameters={"w": (10**6, 10**6)},
        chains=PLAN.chains[:1], layout="dense",
    )  # fmt: skip
    numbers, _ = file_bytes(plan, batch, [])
    assert 4 * N * 10**12 < numbers < 4.1 * N * 10**12
