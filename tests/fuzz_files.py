"""One good file of each kind that gradscope reads, for the fuzz to damage."""

import io
import json
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.numpy
import safetensors.torch
import torch
from torch import nn

RUN = """
version = 1
[model]
factory = "model.py:build"
kwargs = { width = 3, names = ["a", "b"], date = 2024-01-02 }
[checkpoint]
path = "weights.pt"
key = "ema.module"
ignore = ["head.*"]
[dataset]
path = "data.npz"
inputs = { x = "a", y = "b" }
targets = ["labels"]
dtype = { a = "float32" }
scale = { a = 0.5 }
reshape = { a = [-1, 8] }
[loss]
name = "loss.py:f:a=1"
kwargs = { weight = [1.0, 2.0] }
[compute]
backend = "auto"
transform = ["clip:max_norm=1.0 | mean", 'mine.py:f:with="a.h5:x | y"']
samples = "0:10"
batch_size = 4
seed = 0
[compare]
backends = ["loop", "hooks"]
"""
DATASET = """
path = "data.jsonl"
inputs = { x = "inputs", w = "w", w_mask = "w_mask" }
targets = ["targets", "both"]
columns = { both = ["targets", "inputs[0:2]"] }
dtype = { inputs = "float32", w_mask = "bool" }
scale = { inputs = 0.5 }
reshape = { inputs = [2, -1] }
pad = { w = -1 }
length = { w = 3 }
classes = { name = ["n0", "n1"] }
id = "name"
select = [0, 2, 5]
"""
N = 9
X = np.random.default_rng(3).normal(size=(N, 4))
Y = np.arange(N) % 4
SAMPLES = [
    {"inputs": x, "targets": int(y), "w": [1] * (1 + k % 3), "name": f"n{k}"}
    for k, (x, y) in enumerate(zip(X.tolist(), Y, strict=True))
]
TABLE = pa.table({"inputs": list(X), "targets": Y})
CSV = {"inputs": ["a", "b"], "targets": "label"}  # which columns make which array


def model() -> nn.Module:
    """Return what the checkpoints are of."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def companions() -> dict[str, bytes]:
    """Return what good files name, by file name: these are not damaged."""
    return {
        "shard.safetensors": safetensors.torch.save(model().state_dict()),
        "data.jsonl": _jsonl(),
    }


def checkpoints() -> dict[str, bytes]:
    """Return one good checkpoint of each format, by file name."""
    state = model().state_dict()
    table = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(state, "shard.safetensors")}
    return {
        "w.pt": _saved({"epoch": 3, "state_dict": state}),
        "old.pt": _saved({"epoch": 3, "state_dict": state}, new=False),
        "w.safetensors": safetensors.torch.save(state),
        "index.json": json.dumps(table).encode(),
    }


def data_files() -> dict[str, bytes]:
    """Return one good data file of each format, by file name."""
    arrays = {"inputs": X, "targets": Y}
    rows = np.zeros(N, [("inputs", "f8", (4,)), ("targets", "i8")])
    rows["inputs"], rows["targets"] = X, Y
    plain, packed, single, parquet = (io.BytesIO() for _ in range(4))
    np.savez(plain, **arrays, name=np.array([f"n{k}" for k in range(N)]))
    np.savez_compressed(packed, **arrays)
    np.save(single, rows)
    pq.write_table(TABLE, parquet)
    lines = [
        "a,b,label,name",
        *(f"{a},{b!r},{k % 4},n{k}" for k, (a, b, *_) in enumerate(X.tolist())),
    ]
    return {
        "plain.npz": plain.getvalue(),
        "packed.npz": packed.getvalue(),
        "single.npy": single.getvalue(),
        "data.safetensors": safetensors.numpy.save(arrays),
        "data.h5": _hdf5(),
        "data.csv": "\n".join(lines).encode(),
        "lines.jsonl": _jsonl(),
        "data.parquet": parquet.getvalue(),
        "data.arrow": _arrow(),
    }


def _saved(content: object, *, new: bool = True) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=new)
    return buffer.getvalue()


def _jsonl() -> bytes:
    return "\n".join(map(json.dumps, SAMPLES)).encode()


def _hdf5() -> bytes:
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        file.create_dataset("inputs", data=X, chunks=(4, 4), compression="gzip", fletcher32=True)
        file["targets"] = Y
    return buffer.getvalue()


def _arrow() -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, TABLE.schema) as writer:
        writer.write_table(TABLE)
    return sink.getvalue().to_pybytes()


def columns_of(path: Path) -> dict[str, object]:
    """Return the [dataset] columns that a data file needs."""
    return dict(CSV) if path.suffix == ".csv" else {}
