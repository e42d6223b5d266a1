"""Our checksum against HDF5's own."""

from pathlib import Path

import h5py
import numpy as np
import pytest

from gradscope.storage.write.target import fletcher32

LENGTHS = [1, 2, 3, 4, 7, 359, 720, 721, 4095, 4096, 4097, 262_143, 262_144, 300_001, 1_048_576]


def _by_hdf5(path: Path, data: np.ndarray) -> bytes:
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("x", data=data, chunks=data.shape, fletcher32=True)
        chunk: bytes = dataset.id.read_direct_chunk((0,))[1]
        return chunk[-4:]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("top", [1, 2, 256])
def test_as_hdf5_computes_it(tmp_path: Path, length: int, top: int) -> None:
    data = np.random.default_rng(length).integers(0, top, length).astype(np.uint8)
    assert fletcher32(data, length) == _by_hdf5(tmp_path / "x.h5", data)


@pytest.mark.parametrize("length", LENGTHS)
def test_sums_that_are_zero_only_modulo_65535(tmp_path: Path, length: int) -> None:
    data = np.full(length, 255, np.uint8)
    assert fletcher32(data, length) == _by_hdf5(tmp_path / "x.h5", data)


@pytest.mark.parametrize("kept", [0, 1, 5, 4096, 9_999])
def test_zeros_that_follow_need_not_be_there(tmp_path: Path, kept: int) -> None:
    data = np.random.default_rng(kept).integers(0, 256, 10_000).astype(np.uint8)
    data[kept:] = 0
    assert fletcher32(data[:kept], 10_000) == _by_hdf5(tmp_path / "x.h5", data)


@pytest.mark.parametrize("offset", range(1, 8))
def test_memory_that_begins_anywhere(tmp_path: Path, offset: int) -> None:
    data = np.random.default_rng(offset).integers(0, 256, 50_000).astype(np.uint8)[offset:]
    assert fletcher32(data, len(data)) == _by_hdf5(tmp_path / "x.h5", data)
