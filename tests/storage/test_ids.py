"""The samples' own names: texts and integers, in one go and after a stop, read by h5py as well."""

from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from gradscope.storage import Rows, open_file, open_writer
from tests.storage.example import PLAN, N, batches, rows

NAMES = [f"{'ü' * (k % 4)}sample {k}" for k in range(N)]
WIDTH = max(len(name.encode()) for name in NAMES)


def named(kind: str, start: int, stop: int) -> Rows:
    if kind == "integers":
        return replace(rows(start, stop), id=1000 - torch.arange(start, stop))
    padded = b"".join(name.encode().ljust(WIDTH, b"\0") for name in NAMES[start:stop])
    ids = torch.frombuffer(bytearray(padded), dtype=torch.uint8).reshape(-1, WIDTH)
    return replace(rows(start, stop), id=ids)


def write(path: Path, kind: str, stop_at: int = N, **options: bool) -> None:
    with open_writer(path, PLAN, **options) as writer:
        for start, stop in batches(writer.completed, 16):
            if start >= stop_at:
                raise KeyboardInterrupt
            writer.append(named(kind, start, stop))
        writer.finish({}, {})


@pytest.mark.parametrize("kind", ["integers", "texts"])
@pytest.mark.parametrize("stop_at", [N, 48])
def test_ids(tmp_path: Path, kind: str, stop_at: int) -> None:
    path = tmp_path / "o.h5"
    if stop_at < N:
        with pytest.raises(KeyboardInterrupt):
            write(path, kind, stop_at)
    write(path, kind, resume=True)
    expected = 1000 - np.arange(N) if kind == "integers" else np.array(NAMES)
    with open_file(path) as file:
        np.testing.assert_array_equal(file.samples["id"], expected)
        assert file.samples["id"].dtype.kind == expected.dtype.kind
    with h5py.File(path) as plain:
        column = plain["samples/id"]
        found = column[:] if kind == "integers" else column.asstr()[:]
        assert list(found) == list(expected)
