"""A run of a small model into a result file, and what a reader finds in it."""

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import h5py
import numpy as np
from crc32c import crc32c

from gradscope.errors import GradscopeError, OutputError, RefusedError, ResultFileError
from gradscope.run import compute, merge, prepare, start
from gradscope.storage import open_file
from tests.mutants.base import Numbers
from tests.run import project

_SAMPLES, _BATCH = 230, 100
_NAMES = ("first.weight", "first.bias", "last.weight", "last.bias")
_OPTIONS: dict[str, dict[str, Any]] = {
    "factored": {"layout": "factored"},
    "packed": {"compression": "gzip"},
}


@dataclass(frozen=True)
class Written:
    """Rows, their norms and their mean in a file."""

    # "plain", "factored", "packed" (compressed), "resumed" (stopped half-way and gone on with)
    # or "merged" (from two shards)
    kind: str

    def numbers(self) -> Numbers:
        with (
            _folder() as folder,
            patch("gradscope.storage.write.create.require_intact"),
            patch("gradscope.storage.write.create._verify"),
        ):
            with suppress(GradscopeError):
                self._write(folder, verify="never")
            return _plainly(folder / "out.h5")

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
            try:
                self._write(folder)
                with open_file(folder / "out.h5") as file:
                    _ = [rows[...] for rows in file.chains[0].values()]
            except RefusedError:
                return "certificate"
            except OutputError:
                return "completion"
            except ResultFileError:
                return "seal"
        return None

    def _write(self, folder: Path, **more: Any) -> None:
        options = {"transform": ["identity", "mean", "sum"], "batch_size": _BATCH, **more}
        options |= {"backend": "hooks", **_OPTIONS.get(self.kind, {})}

        def job(**samples: str) -> Any:
            return prepare(project.spec(folder, **samples, **options))

        path = folder / "out.h5"
        if self.kind == "merged":
            parts = {folder / "a.h5": "0:90", folder / "b.h5": f"90:{_SAMPLES}"}
            for part, samples in parts.items():
                compute(job(samples=samples), part)
            merge(parts, path)
            return
        if self.kind == "resumed":
            with start(job(), path) as run:
                run.add(next(run.remaining()))
        compute(job(), path, resume=self.kind == "resumed")


@contextmanager
def _folder() -> Iterator[Path]:
    with TemporaryDirectory() as name:
        yield project.write(Path(name), _SAMPLES)


def _plainly(path: Path) -> Numbers:
    """Read a file as h5py does, and whether its checksums are right, as its format says."""
    found = {"sealed": np.array(float(_is_sealed(path.read_bytes())))}
    paths = {f"norm/{name}": f"norms/{name}" for name in _NAMES}
    paths |= {f"{k}/{name}": f"chains/{k}/{name}" for k, name in product("012", _NAMES)}
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
