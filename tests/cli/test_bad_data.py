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


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("kind", ["U", "S"])
def test_texts_of_numpy(forked: Forked, folder: Path, save: Callable, kind: str) -> None:
    names = np.char.encode([f"é {k}" for k in range(N)], "utf-8")
    keys = names if kind == "S" else np.char.decode(names, "utf-8")
    save(folder / "data.npz", inputs=X, label=np.array(["a", "b", "c"])[Y], key=keys)
    (folder / "dataset.toml").write_text(
        SPEC + 'id = "key"\ntargets = ["label"]\nclasses = { label = ["a", "b", "c"] }\n'
    )
    done = compute(forked, folder, "dataset.toml", "--batch-size", "5")
    assert done.code == 0, done.err
    with h5py.File(folder / "out.h5") as file:
        assert file["samples/id"].asstr()[:].tolist() == [f"é {k}" for k in range(N)]
        assert file["samples/target"][:].tolist() == Y.tolist()


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


@pytest.mark.parametrize(("text", "expected"), [('"name"', None), ('"key"', None)])
def test_ids_are_stored(forked: Forked, folder: Path, text: str, expected: None) -> None:
    names = [f"sample {k} {'é' * (k % 3)}" for k in range(N)]
    lines = ["a,b,c,d,label,name,key"]
    lines += [
        f"{','.join(map(str, x))},{y},{name},{10 * k}"
        for k, (x, y, name) in enumerate(zip(X.tolist(), Y, names, strict=True))
    ]
    (folder / "data.csv").write_text("\n".join(lines))
    (folder / "dataset.toml").write_text(
        f'path = "data.csv"\nid = {text}\ncolumns = {{ inputs = ["[0:4]"], targets = "label" }}\n'
    )
    done = compute(forked, folder, "dataset.toml", "--batch-size", "5", "--samples", "1:12")
    assert done.code == 0, done.err
    with h5py.File(folder / "out.h5") as file:
        found = file["samples/id"]
        if text == '"name"':
            assert [t.decode() for t in found[:]] == names[1:]
            assert found.asstr()[0] == names[1]
        else:
            assert found[:].tolist() == [10 * k for k in range(1, N)]
    import gradscope

    with gradscope.open(folder / "out.h5") as result:
        assert str(result.samples["id"][0]) == (names[1] if text == '"name"' else "10")
