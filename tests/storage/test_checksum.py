"""Our checksum against HDF5's own."""

from pathlib import Path

import h5py
import numpy as np
import pytest

from gradscope.storage.write.target import fletcher32

LENGTHS = [1, 2, 3, 4, 7, 359, 720, 721, 4095, 4096, 4097, 262_143, 262_144, 300_001, 1_048_576]


def _random(length: int, top: int = 256) -> np.ndarray:
    return np.random.default_rng(length).integers(0, top, length).astype(np.uint8)


DATA = {
    f"{length} bytes below {top}": _random(length, top) for length in LENGTHS for top in (1, 2, 256)
}
# sums that are zero only modulo 65535
DATA |= {f"{length} times 255": np.full(length, 255, np.uint8) for length in LENGTHS}
DATA |= {f"memory at {offset}": _random(50_000)[offset:] for offset in range(1, 8)}
for kept in (0, 1, 5, 4096, 9_999):
    DATA[f"zeros from {kept}"] = np.append(_random(kept), np.zeros(10_000 - kept, np.uint8))


@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
def test_as_hdf5_computes_it(tmp_path: Path, data: np.ndarray) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        dataset = file.create_dataset("x", data=data, chunks=data.shape, fletcher32=True)
        wanted = dataset.id.read_direct_chunk((0,))[1][-4:]
    assert fletcher32(data, len(data)) == wanted
    there = np.trim_zeros(data, "b")  # zeros that follow need not be there
    assert fletcher32(there, len(data)) == wanted
