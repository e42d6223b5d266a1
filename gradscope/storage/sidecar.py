"""The record beside `OUT.h5.part` of what is complete, replaced as a whole: the old or the new.

`OUT.h5.part.progress` holds everything a run needs to go on that is not in whole chunks of rows:
how many rows are complete, those of them that do not fill a chunk yet, the reducers' states, and
the file's structure. It is numpy's npz, whose members carry checksums.
"""

import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradscope.errors import OutputError
from gradscope.storage.formats import as_numpy
from gradscope.storage.structure import Structure


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
    """

    completed: int
    identity: dict[str, Any]
    states: dict[str, dict[str, Tensor]]
    tails: Mapping[str, np.ndarray]
    overflowed: Mapping[str, int]
    structure: Structure

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
        structure = Structure(header["size"], *arrays)
        counts = header["overflowed"]
        return cls(header["completed"], header["identity"], states, tails, counts, structure)

    def save(self, path: Path) -> None:
        """Replace the progress file, durably."""
        keys = [(owner, key) for owner, state in self.states.items() for key in state]
        header = {
            "completed": self.completed,
            "identity": self.identity,
            "owners": list(self.states),
            "keys": keys,
            "tails": list(self.tails),
            "overflowed": self.overflowed,
            "size": self.structure.size,
        }
        states = (as_numpy(self.states[owner][key]) for owner, key in keys)
        structure = (self.structure.pieces, self.structure.data)
        _save(path, header, [*states, *self.tails.values(), *structure])


def _save(path: Path, header: dict[str, Any], arrays: Sequence[np.ndarray]) -> None:
    """Write header and arrays to `path`, which is replaced only when they are on the disk."""
    temporary = path.with_name(path.name + ".tmp")
    members = {f"a{k}": array for k, array in enumerate(arrays)}
    try:
        with temporary.open("wb") as file:
            np.savez(file, header=np.array(json.dumps(header)), allow_pickle=False, **members)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _load(path: Path) -> tuple[dict[str, Any], list[np.ndarray]] | None:
    """Return header and arrays, or None when the file does not exist."""
    try:
        with np.load(path, allow_pickle=False) as file:
            header = json.loads(str(file["header"]))
            return header, [file[f"a{k}"] for k in range(len(file.files) - 1)]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise OutputError(
            f"the record of what is complete is damaged: {error}",
            where=str(path),
            remedy="Start again with --overwrite.",
        ) from error
