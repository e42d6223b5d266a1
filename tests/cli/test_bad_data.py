"""Bad data through the command line: one clear error, the right exit code, nothing written."""

import io
import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch import nn

import gradscope
from tests.cli.forked import Forked, Outcome

N = 12
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(N, 4)).astype(np.float32)
Y = RANDOM.integers(0, 3, N)

MODEL = """
import torch
from torch import nn


def build():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def averaged(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)


class Uneven(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, k):
        return torch.ones(k + 1), 0


class Said(Uneven):
    def __getitem__(self, k):
        return "hello", 0
"""

SPEC = 'path = "data.npz"\n'


@pytest.fixture(scope="module")
def forked() -> Iterator[Forked]:
    with Forked() as process:
        yield process


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    return tmp_path


def compute(forked: Forked, folder: Path, data: str, *more: str) -> Outcome:
    words = ["compute", "weights.pt", data, "--model", "model.py:build", "-o", "out.h5"]
    if "--loss" not in more:
        words += ["--loss", "cross_entropy"]
    return forked.run(*words, *more, cwd=folder)


def good(path: Path, **changes: np.ndarray) -> None:
    np.savez(path / "data.npz", **({"inputs": X, "targets": Y} | changes))


def with_spec(path: Path, text: str) -> None:
    good(path)
    (path / "dataset.toml").write_text(SPEC + text)


def bomb(path: Path) -> None:
    """A member that claims 8 exabytes, and compresses to nothing."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f8", "fortran_order": False, "shape": (2**30, 2**30)}
    )
    with zipfile.ZipFile(path / "data.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inputs.npy", header.getvalue() + bytes(10**7))
        archive.writestr("targets.npy", header.getvalue())


def member_sizes(path: Path) -> None:
    """The directory of the archive claims more bytes than a member has."""
    good(path)
    whole = bytearray((path / "data.npz").read_bytes())
    at = whole.rfind(b"PK\x01\x02")
    whole[at + 20 : at + 28] = (2**31).to_bytes(4, "little") * 2
    (path / "data.npz").write_bytes(bytes(whole))


def elsewhere(path: Path) -> None:
    """An HDF5 array that lies in another file."""
    (path / "secret.bin").write_bytes(X.tobytes())
    with h5py.File(path / "data.h5", "w") as file:
        file.create_dataset(
            "inputs", X.shape, "f4", external=[(str(path / "secret.bin"), 0, X.nbytes)]
        )
        file["targets"] = Y


def huge_hdf5(path: Path) -> None:
    """An HDF5 array that claims 64 petabytes and stores nothing."""
    with h5py.File(path / "data.h5", "w") as file:
        file.create_dataset("inputs", (2**51, 4), "f8", chunks=(2**20, 4), compression="gzip")
        file["targets"] = Y


def empty_chunk(path: Path) -> None:
    """A chunk of no bytes at the beginning of the file, by which HDF5 crashes."""
    with h5py.File(path / "data.h5", "w") as file:
        file.create_dataset("inputs", data=X, chunks=(4, 4), compression="gzip", fletcher32=True)
        file["targets"] = Y
        chunk = file["inputs"].id.get_chunk_info(1)
    whole = bytearray((path / "data.h5").read_bytes())
    at = whole.find(chunk.byte_offset.to_bytes(8, "little"))
    assert at > 0
    whole[at : at + 8] = bytes(8)
    (path / "data.h5").write_bytes(bytes(whole))


def hostile_header(path: Path) -> None:
    """A safetensors header that claims more than the file."""
    text = json.dumps(
        {"inputs": {"dtype": "F32", "shape": [2**40, 4], "data_offsets": [0, 2**44]}}
    ).encode()
    (path / "data.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


def two_ids(path: Path) -> None:
    good(path, key=np.r_[0:11, 3])
    (path / "dataset.toml").write_text(SPEC + 'id = "key"\n')


Case = tuple[Callable[[Path], object], str, list[str], int, str]
CASES: dict[str, Case] = {
    "unknown key": (
        lambda p: with_spec(p, 'target = ["targets"]\n'),
        "dataset.toml", [], 2, "Did you mean 'targets'?",
    ),
    "absent column": (
        lambda p: np.savez(p / "data.npz", images=X, targets=Y),
        "data.npz", [], 3, "there is no array 'inputs'",
    ),
    "slice of no form": (good, "data.npz", ["--samples", "5-9"], 2, "A:B"),
    "duplicate ids": (two_ids, "dataset.toml", [], 3, "samples 3 and 11 are both 3"),
    "uneven samples": (lambda p: None, "model.py:Uneven", [], 3, "not all of one shape"),
    "texts of one's own": (lambda p: None, "model.py:Said", [], 3, "a sample holds text: 'hello'"),
    "label out of range": (lambda p: good(p, targets=Y + 5), "data.npz", [], 3, "sample 0: "),
    "integers for floats": (
        lambda p: good(p, inputs=np.arange(N * 4).reshape(N, 4)),
        "data.npz", [], 3, 'dtype = { NAME = "float32" }',
    ),
    "truth values for floats": (
        lambda p: good(p, inputs=X > 0), "data.npz", [], 3, "The inputs hold truth values",
    ),
    "floats for labels": (
        lambda p: good(p, targets=Y.astype("f4")), "data.npz", [], 3, 'dtype = { NAME = "int64" }',
    ),
    "a name too long": (lambda p: None, "x" * 300, [], 3, "File name too long"),
    "wrong width": (lambda p: good(p, inputs=X[:, :3]), "data.npz", [], 3, "shapes"),
    "scalar loss": (
        good, "data.npz", ["--loss", "model.py:averaged"], 2, "reduction='none'",
    ),
    "missing": (lambda p: None, "data.npz", [], 3, "there is no such file"),
    "zip bomb": (bomb, "data.npz", [], 3, "bytes of numbers"),
    "zip member sizes": (member_sizes, "data.npz", [], 3, "data.npz"),
    "not in this file": (elsewhere, "data.h5", [], 3, "other files"),
    "a chunk that is none": (empty_chunk, "data.h5", [], 3, "its index of chunks is wrong"),
    "petabytes": (huge_hdf5, "data.h5", [], 3, "of which 0 are stored"),
    "hostile header": (hostile_header, "data.safetensors", [], 3, "data.safetensors"),
    "odd names": (
        lambda p: np.savez(p / "data.npz", **{"[red]x\x1b[31m": X, "targets": Y}),
        "data.npz", [], 3, "[red]x\\x1b[31m",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bad_data(name: str, forked: Forked, folder: Path) -> None:
    prepare, data, more, code, mentioned = CASES[name]
    prepare(folder)
    before = sorted(folder.rglob("*"))
    done = compute(forked, folder, data, *more)
    assert done.code == code, done.err
    assert done.out == ""
    assert mentioned in done.err
    assert "Traceback" not in done.err
    assert done.err.startswith("error: ")
    assert len(done.err.strip().splitlines()) >= 2  # what it is, and what to do
    assert "\x1b" not in done.err
    after = {p for p in folder.rglob("*") if "__pycache__" not in p.parts}
    assert after == set(before)


@pytest.mark.parametrize("rows", [[7], [0], [0, 6, 11], list(range(6)), list(range(N))], ids=str)
def test_rows_that_are_not_finite_are_flagged_alone(
    forked: Forked, folder: Path, rows: list[int]
) -> None:
    inputs = X.copy()
    inputs[rows, 2] = np.nan
    good(folder, inputs=inputs)
    done = compute(forked, folder, "data.npz")
    assert done.code == 7, done.err
    with h5py.File(folder / "out.h5") as file:
        assert np.flatnonzero(~file["samples/finite"][:].astype(bool)).tolist() == rows


def test_data_that_changed_before_resume(forked: Forked, folder: Path) -> None:
    good(folder)
    assert compute(forked, folder, "data.npz").code == 0
    before = (folder / "out.h5").read_bytes()
    good(folder, inputs=X + 1)
    done = compute(forked, folder, "data.npz", "--resume")
    assert done.code == 6
    assert "this is another run" in done.err
    assert "dataset has changed (SHA-256 " in done.err
    assert "Traceback" not in done.err
    assert (folder / "out.h5").read_bytes() == before


@pytest.mark.parametrize("key", ["name", "key"])
@pytest.mark.parametrize("form", ["csv", "U", "S"])
def test_ids_and_texts_are_stored(forked: Forked, folder: Path, form: str, key: str) -> None:
    names = [f"sample {k} {'é' * (k % 3)}" for k in range(N)]
    labels = np.array(["a", "b", "c"])[Y]
    text = f'path = "data.{"csv" if form == "csv" else "npz"}"\nid = "{key}"\n'
    text += 'targets = ["label"]\nclasses = { label = ["a", "b", "c"] }\n'
    if form == "csv":
        rows = zip(X.tolist(), labels, names, range(N), strict=True)
        lines = [f"{','.join(map(str, x))},{y},{name},{10 * k}" for x, y, name, k in rows]
        (folder / "data.csv").write_text("\n".join(["a,b,c,d,label,name,key", *lines]))
        text += 'columns = { inputs = ["[0:4]"] }\n'
    else:
        kept = np.char.encode(names, "utf-8") if form == "S" else np.array(names)
        np.savez(folder / "data.npz", inputs=X, label=labels, name=kept, key=np.arange(N) * 10)
    (folder / "dataset.toml").write_text(text)
    done = compute(forked, folder, "dataset.toml", "--batch-size", "5", "--samples", "1:12")
    assert done.code == 0, done.err
    with h5py.File(folder / "out.h5") as file:
        assert file["samples/target"][:].tolist() == Y[1:].tolist()
        ids = file["samples/id"]
        found = ids.asstr()[:].tolist() if key == "name" else ids[:].tolist()
    assert found == (names if key == "name" else list(range(0, 10 * N, 10)))[1:]
    with gradscope.open(folder / "out.h5") as result:
        assert str(result.samples["id"][0]) == (names[1] if key == "name" else "10")
