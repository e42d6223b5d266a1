"""The record beside `OUT.h5.part` of what is complete, replaced as a whole: the old or the new.

`OUT.h5.part.progress` holds everything a run needs to go on that is not in whole chunks of rows:
how many rows are complete, those of them that do not fill a chunk yet, the reducers' states, the
file's structure, and the checksums of the chunks. It is, little-endian,

    "gradprog" · bytes of the header int64 · header, JSON · arrays, one behind the other · CRC-32C

where the header has the type and the shape of each array, and the checksum is of all before it.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from crc32c import crc32c
from torch import Tensor

from gradscope.errors import OutputError
from gradscope.storage.formats import as_numpy
from gradscope.storage.structure import Structure
from gradscope.storage.whole import sync_folder

LONGEST = ".part.progress.tmp"  # what is put behind a name, and where it is the longest

_MAGIC, _SUM_BYTES = b"gradprog", 4


@dataclass(frozen=True)
class Paths:
    """The final file and what lies beside it while it is written."""

    final: Path

    @property
    def part(self) -> Path:
        """The unfinished file."""
        return self._beside(".part")

    @property
    def progress(self) -> Path:
        """What is complete in it."""
        return self._beside(".part.progress")

    def _beside(self, suffix: str) -> Path:
        return self.final.with_name(self.final.name + suffix)


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Attributes:
        completed: The number of rows in the file.
        identity: `FilePlan.identity` of the run.
        states: The reducers' states after these rows.
        tails: uint8, by the path of a data set: the rows that do not fill a chunk yet.
        overflowed: By the path of a data set: numbers too large for its format.
        structure: The file's structure.
        records: (m, 3) int64: offset, size and CRC-32C of what is complete, by offset.
        replaces: Whether the run was told to replace the final file that is there.
    """

    completed: int
    identity: dict[str, Any]
    states: dict[str, dict[str, Tensor]]
    tails: Mapping[str, np.ndarray]
    overflowed: Mapping[str, int]
    structure: Structure
    records: np.ndarray
    replaces: bool = False

    @classmethod
    def load(cls, path: Path) -> "Progress | None":
        """Read a progress file; None when there is none.

        Raises:
            OutputError: The file is damaged.
        """
        loaded = _load(path)
        if loaded is None:
            return None
        header, arrays = loaded
        states: dict[str, dict[str, Tensor]] = {owner: {} for owner in header["owners"]}
        for owner, key in header["keys"]:
            states[owner][key] = torch.from_numpy(arrays.pop(0))
        tails = {name: arrays.pop(0) for name in header["tails"]}
        records = arrays.pop()
        structure = Structure(header["size"], *arrays)
        completed, counts = header["completed"], header["overflowed"]
        replaces = header.get("replaces", False)
        return cls(
            completed, header["identity"], states, tails, counts, structure, records, replaces
        )

    def save(self, path: Path) -> None:
        """Replace the progress file, durably."""
        keys = [(owner, key) for owner, state in self.states.items() for key in state]
        header = {
            "completed": self.completed,
            "identity": self.identity,
            "replaces": self.replaces,
            "owners": list(self.states),
            "keys": keys,
            "tails": list(self.tails),
            "overflowed": self.overflowed,
            "size": self.structure.size,
        }
        states = (as_numpy(self.states[owner][key]) for owner, key in keys)
        structure = (self.structure.pieces, self.structure.data)
        _save(path, header, [*states, *self.tails.values(), *structure, self.records])


def _save(path: Path, header: dict[str, Any], arrays: Sequence[np.ndarray]) -> None:
    """Write header and arrays to `path`, which is replaced only when they are on the disk."""
    temporary = path.with_name(path.name + ".tmp")
    text = json.dumps(header | {"arrays": [(a.dtype.str, a.shape) for a in arrays]}).encode()
    memory = (np.ascontiguousarray(a).reshape(-1).view(np.uint8).data for a in arrays)
    parts: list[bytes | memoryview] = [_MAGIC, len(text).to_bytes(8, "little"), text, *memory]
    checksum = 0
    try:
        with temporary.open("wb") as file:
            for part in parts:
                file.write(part)
                checksum = crc32c(part, checksum)
            file.write(checksum.to_bytes(_SUM_BYTES, "little"))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path)  # what is written next may not fit to the record before
    finally:
        temporary.unlink(missing_ok=True)


def _load(path: Path) -> tuple[dict[str, Any], list[np.ndarray]] | None:
    """Return header and arrays, or None when the file does not exist."""
    try:
        data = bytearray(path.read_bytes())  # arrays in it can be written to
    except FileNotFoundError:
        return None
    view, at = memoryview(data), len(_MAGIC) + 8
    sum_ = crc32c(view[:-_SUM_BYTES]).to_bytes(_SUM_BYTES, "little")
    if data[: len(_MAGIC)] != _MAGIC or data[-_SUM_BYTES:] != sum_:
        raise OutputError(
            "the record of what is complete is damaged, or of another version of gradscope",
            where=str(path),
            remedy="Start again with --overwrite, or put back a copy of it.",
        )
    start = at + int.from_bytes(view[at - 8 : at], "little")
    header, arrays = json.loads(data[at:start]), []
    for kind, shape in header["arrays"]:
        array = np.frombuffer(data, kind, prod(shape), start).reshape(shape)
        arrays.append(array)
        start += array.nbytes
    return header, arrays
