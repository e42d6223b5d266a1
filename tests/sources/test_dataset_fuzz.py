"""Mutated data files: read as they were, or one clear error; never a crash, a hang or a warning."""

import random
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
import torch

from gradscope.core.batch import tensors
from gradscope.core.spec import DatasetSpec
from gradscope.errors import GradscopeError
from gradscope.sources import open_dataset

X = np.random.default_rng(3).normal(size=(9, 4))
Y = np.arange(9) % 4
TEXT = "\n".join(["a,b,label,name"] + [f"{a},{b!r},{k % 4},n{k}" for k, (a, b, *_) in enumerate(X)])
LINES = "\n".join(
    f'{{"inputs": {list(map(float, x))}, "targets": {y}, "w": [{y}, 2]}}'
    for x, y in zip(X, Y, strict=True)
)
TABLE = pa.table({"inputs": list(X), "targets": Y})


def hdf5(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("inputs", data=X, chunks=(4, 4), compression="gzip", fletcher32=True)
        file["targets"] = Y


def stream(path: Path) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, TABLE.schema) as writer:
        writer.write_table(TABLE)


def npy(path: Path) -> None:
    with path.open("wb") as file:
        rows = np.zeros(9, [("inputs", "f8", (4,)), ("targets", "i8")])
        rows["inputs"], rows["targets"] = X, Y
        np.save(file, rows)


WRITERS: dict[str, Callable[[Path], object]] = {
    "a.npz": lambda p: np.savez(p, inputs=X, targets=Y),
    "b.npz": lambda p: np.savez_compressed(p, inputs=X, targets=Y),
    "c.npy": npy,
    "d.safetensors": lambda p: safetensors.numpy.save_file({"inputs": X, "targets": Y}, p),
    "e.h5": hdf5,
    "f.csv": lambda p: p.write_text(TEXT),
    "g.jsonl": lambda p: p.write_text(LINES),
    "h.parquet": lambda p: pq.write_table(TABLE, p),
    "i.arrow": stream,
}
COLUMNS = {"f.csv": {"inputs": ["a", "b"], "targets": "label"}}
ROUNDS = 150


def mutated(whole: bytes, chance: random.Random) -> bytes:
    """Cut, repeat, overwrite or exchange some bytes."""
    content = bytearray(whole)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at, n = chance.randrange(len(content) or 1), chance.choice((1, 1, 2, 4, 8, 64))
        kind = chance.randrange(6)
        if kind == 0:
            del content[at:]
        elif kind == 1:
            del content[at : at + n]
        elif kind == 2:
            content[at:at] = content[at : at + n]
        elif kind == 3:
            content[at : at + n] = chance.randbytes(n)
        elif kind == 4:
            content[at : at + n] = chance.choice((b"\0", b"\xff", b"9", b"-", b'"', b"{", b",")) * n
        elif content:
            content[min(at, len(content) - 1)] ^= 1 << chance.randrange(8)
    return bytes(content)


@pytest.mark.parametrize("name", WRITERS)
def test_a_mutated_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    WRITERS[name](path)
    whole, chance, refused = path.read_bytes(), random.Random(name), 0
    spec = DatasetSpec(path=path, columns=COLUMNS.get(name, {}))
    for _ in range(ROUNDS):
        path.write_bytes(mutated(whole, chance))
        try:
            data = open_dataset(spec)
            batch = data.batch(range(min(len(data), 100)))
        except GradscopeError as error:
            refused += 1
            assert error.exit_code in (2, 3)
            assert error.remedy
            assert str(path) in str(error)
        else:
            for tensor in tensors((batch.inputs, batch.targets)):
                assert tensor.is_floating_point() or tensor.dtype in (torch.int64, torch.bool)
                assert len(tensor) == len(batch)
    assert refused > ROUNDS // 5
