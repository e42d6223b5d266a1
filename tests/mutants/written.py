"""A run of a small model into a result file, and what a reader finds in it."""

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import h5py
import numpy as np
from crc32c import crc32c

import gradscope
from gradscope.errors import GradscopeError, OutputError, RefusedError, ResultFileError
from gradscope.run import compute, merge, prepare, start
from gradscope.storage import open_file
from tests.mutants.base import Numbers
from tests.run import project

_SAMPLES, _BATCH = 230, 40
_NAMES = ("first.weight", "first.bias", "last.weight", "last.bias")
_KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "factored": {"layout": "factored"},
    "packed": {"compression": "gzip"},
    "resumed": {},
    "merged": {},
}


@dataclass(frozen=True)
class Written:
    """Rows, their norms and their mean in a file."""

    # "plain", "factored", "packed" (compressed), "resumed" (stopped half-way and gone on with)
    # or "merged" (from two shards)
    kind: str

    @property
    def name(self) -> str:
        return f"a {self.kind} file"

    def numbers(self) -> Numbers:
        with _folder() as folder:
            path = folder / "out.h5"
            with (
                suppress(GradscopeError),
                patch("gradscope.storage.write.create.require_intact"),
                patch("gradscope.storage.write.create._verify"),
            ):
                self._write(folder, path, verify="never")
            return _plainly(path)

    def right(self) -> Numbers:
        with _folder() as folder:
            rows = project.expected(folder)
        found = {"index": np.arange(_SAMPLES), "sealed": np.array(1.0)}
        for name, g in rows.items():
            found |= {f"0/{name}": g, f"1/{name}": g.mean(0), f"2/{name}": g.sum(0)}
            found |= {f"norm/{name}": np.linalg.norm(g.reshape(len(g), -1), axis=1)}
        return found

    def caught_by(self) -> str | None:
        with _folder() as folder:
            path = folder / "out.h5"
            try:
                self._write(folder, path)
            except RefusedError:
                return "certificate"
            except OutputError:
                return "completion"
            try:
                with open_file(path) as file:
                    rows = {name: array[...] for name, array in file.chains[0].items()}
            except ResultFileError:
                return "seal"
            return None if _agrees(folder, rows) else "compare"

    def _write(self, folder: Path, path: Path, **more: Any) -> None:
        options = {
            "transform": ["identity", "mean", "sum"],
            "batch_size": _BATCH,
            "backend": "hooks",
            **_KINDS[self.kind],
            **more,
        }
        if self.kind == "merged":
            parts = [folder / "a.h5", folder / "b.h5"]
            for part, samples in zip(parts, ("0:90", f"90:{_SAMPLES}"), strict=True):
                compute(prepare(project.spec(folder, samples=samples, **options)), part)
            merge(parts, path)
            return
        if self.kind == "resumed":
            with start(prepare(project.spec(folder, **options)), path) as run:
                batches = run.remaining()
                for _ in range(3):
                    run.add(next(batches))
        compute(prepare(project.spec(folder, **options)), path, resume=self.kind == "resumed")


@contextmanager
def _folder() -> Iterator[Path]:
    with TemporaryDirectory() as name:
        folder = Path(name)
        project.write(folder, _SAMPLES)
        yield folder


def _plainly(path: Path) -> Numbers:
    """Read a file as h5py does, and whether its checksums are right, as its format says."""
    found = {"sealed": np.array(float(_is_sealed(path.read_bytes())))}
    paths = {f"norm/{name}": f"norms/{name}" for name in _NAMES}
    for k in ("0", "1", "2"):
        paths |= {f"{k}/{name}": f"chains/{k}/{name}" for name in _NAMES}
    with h5py.File(path, locking=False) as file:
        for name, place in {"index": "samples/index", **paths}.items():
            with suppress(OSError, KeyError):  # HDF5's own checksums
                found[name] = _dense(file[place])
    return found


def _is_sealed(data: bytes) -> bool:
    count, digest, magic = struct.unpack("<q32s8s", data[-48:])
    end = len(data) - 48 - 24 * count
    table = data[end:-48]
    rest, at, right = hashlib.sha256(table), 0, magic == b"gradcrcs"
    for offset, size, wanted in struct.iter_unpack("<3q", table):
        rest.update(data[at:offset])
        at = offset + size
        right = right and crc32c(data[offset:at]) == wanted
    rest.update(data[at:end])
    return right and rest.digest() == digest


def _dense(item: Any) -> np.ndarray:
    if isinstance(item, h5py.Dataset):
        return np.asarray(item[...])
    left, right = item["left"][...], item["right"][...]
    rows = np.einsum("nktr,nktc->nkrc", left, right)
    return rows.reshape(len(left), *item.attrs["shape"])


def _agrees(folder: Path, rows: Numbers) -> bool:
    """Whether `compare` finds stored rows to be those of the loop."""
    job = prepare(project.spec(folder))
    batch, problem = job.load(0, _SAMPLES), job.scope.problem
    held = gradscope.compare(
        problem.model, problem.loss, batch.inputs, batch.targets, ["loop"], against={"file": rows}
    )
    return held.agrees
