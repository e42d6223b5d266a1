"""Number formats: bfloat16 in two bytes, and numbers too large for the format."""

from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import xarray

from gradscope.blocks import Block, DenseBlock, MappedBlock, OuterBlock, ScatterBlock
from gradscope.config import parse_compression
from gradscope.storage import open_file
from tests.storage.example import N, with_layout, write_block

BF16 = torch.bfloat16


def _rounded(values: np.ndarray) -> np.ndarray:
    """float32 to the nearest bfloat16, ties to even, on the bits."""
    bits = values.astype(np.float32).view(np.uint32)
    up = bits + 0x7FFF + (bits >> 16 & 1)
    return (up & 0xFFFF0000).astype(np.uint32).view(np.float32)


def _random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(N, *shape, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_bfloat16_takes_two_bytes_and_others_convert_it(tmp_path: Path, dtype: torch.dtype) -> None:
    values = _random(7, 5).to(dtype)
    wanted = _rounded(values.float().numpy())
    write_block(tmp_path / "o.h5", with_layout("dense", dtype=BF16), DenseBlock(values))
    with open_file(tmp_path / "o.h5") as file:
        array = file.chains[0]["w"]
        assert (array.dtype, array.shape) == (np.float32, (N, 7, 5))
        np.testing.assert_array_equal(array[...], wanted)
        np.testing.assert_array_equal(array[3:9], wanted[3:9])
        np.testing.assert_array_equal(array[[70, 2]], wanted[[70, 2]])
        assert array.overflowed == 0
    with h5py.File(tmp_path / "o.h5") as plain:
        assert "overflowed" not in plain["chains/0/w"].attrs
        assert plain["chains/0/w"].id.get_type().get_size() == 2
        np.testing.assert_array_equal(plain["chains/0/w"][...], wanted)
    with xarray.open_dataset(tmp_path / "o.h5", engine="h5netcdf", group="/chains/0") as found:
        np.testing.assert_array_equal(found["w"].values, wanted)


def test_bfloat16_infinity_and_nan_stay(tmp_path: Path) -> None:
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 1e-40]).expand(N, 5)
    write_block(tmp_path / "o.h5", with_layout("dense", dtype=BF16), DenseBlock(values.to(BF16)))
    with open_file(tmp_path / "o.h5") as file:
        found = file.chains[0]["w"][5]
    np.testing.assert_array_equal(found, values[0].to(BF16).float().numpy())
    assert np.signbit(found[3])


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_half_precision_rows_from_factors_are_rounded_once(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """Factors in bfloat16 take two bytes a number, others four."""
    stored = BF16 if dtype == torch.float32 else dtype
    left, right = _random(1, 1, 40).to(dtype), _random(1, 1, 30).to(dtype)
    write_block(
        tmp_path / "o.h5", with_layout("factored", dtype=stored), OuterBlock(left, right, (40, 30))
    )
    product = left.double()[:, 0, 0, :, None] * right.double()[:, 0, 0, None, :]
    if stored == BF16:
        wanted = _rounded(product.numpy())
    else:
        wanted = product.numpy().astype(np.float16)
    with open_file(tmp_path / "o.h5") as file:
        array = file.chains[0]["w"]
        assert array.representation == "factored"
        assert array.dtype == wanted.dtype
        np.testing.assert_array_equal(array[...], wanted)
    with h5py.File(tmp_path / "o.h5") as plain:
        size = plain["chains/0/w/left"].id.get_type().get_size()
        assert size == (2 if dtype == BF16 else 4)


def test_a_scatter_of_bfloat16(tmp_path: Path) -> None:
    index = torch.arange(N * 2).reshape(N, 2) % 50
    values = _random(2, 8).to(BF16)
    plan = with_layout("factored", dtype=BF16)
    write_block(tmp_path / "o.h5", plan, ScatterBlock(index, values, 50))
    wanted = np.zeros((N, 50, 8), np.float32)
    for i in range(N):
        np.add.at(wanted[i], index[i].numpy(), values[i].float().numpy())
    with open_file(tmp_path / "o.h5") as file:
        np.testing.assert_array_equal(file.chains[0]["w"][...], wanted)


LARGE = torch.tensor([1.0, 65504.0, 65519.0, 65520.0, -1e30, torch.inf, torch.nan, 7e4])


@pytest.mark.parametrize(
    ("computed", "text"), [(False, None), (True, None), (False, "gzip"), (True, "zstd")]
)
def test_numbers_too_large_are_counted(tmp_path: Path, computed: bool, text: str | None) -> None:
    """Three of eight numbers a row are finite in float32, and infinite in float16."""
    block: Block = DenseBlock(LARGE.repeat(N, 1))
    if computed:
        block = MappedBlock(block, torch.clone)
    plan = with_layout("dense", dtype=torch.float16)
    plan = replace(plan, compression=None if text is None else parse_compression(text))
    write_block(tmp_path / "o.h5", plan, block, stop_at=48)
    write_block(tmp_path / "o.h5", plan, block, resume=True)
    with open_file(tmp_path / "o.h5") as file:
        array = file.chains[0]["w"]
        assert array.overflowed == 3 * N
        np.testing.assert_array_equal(np.isinf(array[9]), [0, 0, 0, 1, 1, 1, 0, 1])
        assert array[9][:3].tolist() == [1, 65504, 65504]
    with h5py.File(tmp_path / "o.h5") as plain:
        assert plain["chains/0/w"].attrs["overflowed"] == 3 * N


def test_products_too_large_are_counted(tmp_path: Path) -> None:
    """Factors are finite in float16, their product is not."""
    left = torch.tensor([1.0, 300.0]).half().expand(N, 1, 1, 2)
    right = torch.tensor([2.0, 100.0, 300.0]).half().expand(N, 1, 1, 3)
    plan = with_layout("dense", dtype=torch.float16)
    write_block(tmp_path / "o.h5", plan, OuterBlock(left, right, (2, 3)))
    with open_file(tmp_path / "o.h5") as file:
        array = file.chains[0]["w"]
        assert array.overflowed == N
        np.testing.assert_array_equal(array[7], [[2, 100, 300], [600, 30000, np.inf]])
