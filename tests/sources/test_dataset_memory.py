"""A data set larger than memory: every format is gone through under a limit below its size.

Where a library maps the file, the limit on address space would count the map; there the peak of
memory that is the process's own is measured instead.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy

ROWS, WIDTH = 9000, 1000  # 72 MB
ROOM = {"limited": 40 * 2**20, "measured": 60 * 2**20}

PROGRAM = """
import os, resource, sys
from pathlib import Path

import torch

from gradscope.config import DatasetSpec
from gradscope.process.memory import release_freed_memory
from gradscope.sources.data import open_dataset
import pyarrow.compute, pyarrow.parquet  # the libraries themselves are not data


def own():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def read(path, room, limited):
    release_freed_memory()
    if limited:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (taken + room, taken + room))
    before = most = own()
    data = open_dataset(DatasetSpec(path=path))
    data.sha256
    total = labels = 0
    for _ in range(2):
        for start in range(0, len(data), 128):
            batch = data.batch(range(start, min(start + 128, len(data))))
            total += float(batch.inputs.double().sum())
            labels += int(batch.targets.sum())
            most = max(most, own())
    print(len(data), total / 2, labels / 2, most - before, flush=True)


for line in sys.stdin:
    path, room, how = line.rstrip().split("\\t")
    child = os.fork()
    if child == 0:
        read(Path(path), int(room), how == "limited")
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print("failed", flush=True)
"""


@pytest.fixture(scope="module")
def reader() -> Iterator[Callable[..., str]]:
    """A process that imports everything once and reads each file in a fork, freeing memory."""
    freed = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_MMAP_THRESHOLD_": "65536"}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | freed | {"OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def read(*words: object) -> str:
            print(*words, sep="\t", file=process.stdin, flush=True)
            return process.stdout.readline()

        yield read


def blocks() -> np.ndarray:
    """Row k holds k in every place."""
    return np.broadcast_to(np.arange(ROWS, dtype=np.float64)[:, None], (ROWS, WIDTH))


LABELS = np.arange(ROWS) % 7


def npy(path: Path) -> None:
    path.mkdir()
    np.save(path / "inputs.npy", blocks())
    np.save(path / "targets.npy", LABELS)


def hdf5(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("inputs", data=blocks(), chunks=(100, WIDTH))
        file["targets"] = LABELS


def table(start: int, stop: int) -> pa.Table:
    rows = pa.FixedSizeListArray.from_arrays(np.ravel(blocks()[start:stop]), WIDTH)
    return pa.table({"inputs": rows, "targets": LABELS[start:stop]})


def parquet(path: Path) -> None:
    with pq.ParquetWriter(path, table(0, 1).schema, use_dictionary=False) as writer:
        for start in range(0, ROWS, 1000):
            writer.write_table(table(start, start + 1000))


def arrow(path: Path) -> None:
    schema = table(0, 1).schema
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for start in range(0, ROWS, 1000):
            writer.write_table(table(start, start + 1000))


def tensors(path: Path) -> None:
    safetensors.numpy.save_file({"inputs": np.ascontiguousarray(blocks()), "targets": LABELS}, path)


FORMATS: dict[str, tuple[Callable[[Path], object], str]] = {
    "npy": (npy, "limited"),
    "stored.npz": (lambda p: np.savez(p, inputs=blocks(), targets=LABELS), "limited"),
    "packed.npz": (lambda p: np.savez_compressed(p, inputs=blocks(), targets=LABELS), "limited"),
    "data.h5": (hdf5, "limited"),
    "data.safetensors": (tensors, "measured"),
    "data.parquet": (parquet, "measured"),
    "data.arrow": (arrow, "measured"),
}


def text(path: Path) -> None:
    """The rows that the others have, but for a column that nobody asks for."""
    filler = "x" * 7000
    with path.open("w") as file:
        if path.suffix == ".csv":
            file.write("inputs,targets,note\n")
            file.writelines(f"{k},{k % 7},{filler}\n" for k in range(ROWS))
        else:
            line = '{{"inputs": {}, "targets": {}, "note": "{}"}}\n'
            file.writelines(line.format(k, k % 7, filler) for k in range(ROWS))


FORMATS |= {"data.csv": (text, "limited"), "data.jsonl": (text, "limited")}


@pytest.mark.sampled
@pytest.mark.parametrize("name", FORMATS)
def test_only_some_rows_are_in_memory(
    tmp_path: Path, name: str, reader: Callable[..., str]
) -> None:
    write, how = FORMATS[name]
    write(tmp_path / name)
    n, total, labels, peak = map(float, reader(tmp_path / name, ROOM[how], how).split())
    width = 1 if write is text else WIDTH
    assert (n, total, labels) == (ROWS, width * ROWS * (ROWS - 1) / 2, LABELS.sum())
    assert peak < ROOM[how]
