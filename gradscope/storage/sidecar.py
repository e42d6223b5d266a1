"""Small files beside `OUT.h5.part`, replaced as a whole, so that they are always one or the other.

`OUT.h5.part.progress` says how many rows are complete and holds the reducers' states at that
moment; `OUT.h5.part.undo` holds bytes of the `.part` that are about to be changed. Both are
numpy's npz, whose members carry checksums.
"""

import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradscope.errors import OutputError
from gradscope.storage.layout import as_numpy
from gradscope.storage.plan import States


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

    @property
    def undo(self) -> Path:
        """Bytes to put back if a change to it was not finished."""
        return self._beside(".part.undo")

    def clear(self) -> None:
        """Remove the files beside `.part`."""
        self.undo.unlink(missing_ok=True)
        self.progress.unlink(missing_ok=True)

    def _beside(self, suffix: str) -> Path:
        return self.final.with_name(self.final.name + suffix)


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Attributes:
        completed: The number of rows in the file.
        identity: `FilePlan.identity` of the run.
        states: The reducers' states after these rows.
    """

    completed: int
    identity: dict[str, Any]
    states: dict[str, dict[str, Tensor]]

    @classmethod
    def load(cls, path: Path) -> "Progress | None":
        """Read a progress file; None when there is none."""
        loaded = load(path)
        if loaded is None:
            return None
        header, arrays = loaded
        states: dict[str, dict[str, Tensor]] = {owner: {} for owner in header["owners"]}
        for (owner, key), array in zip(header["keys"], arrays, strict=True):
            states[owner][key] = torch.from_numpy(array)
        return cls(header["completed"], header["identity"], states)


def save_progress(
    path: Path, completed: int, identity: dict[str, Any], states: States | None
) -> None:
    """Replace the progress file, durably."""
    keys = [(owner, key) for owner, state in (states or {}).items() for key in state]
    header = {
        "completed": completed,
        "identity": identity,
        "owners": list(states or {}),
        "keys": keys,
    }
    save(path, header, [as_numpy((states or {})[owner][key]) for owner, key in keys])


def save(path: Path, header: dict[str, Any], arrays: Sequence[np.ndarray]) -> None:
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


def load(path: Path) -> tuple[dict[str, Any], list[np.ndarray]] | None:
    """Return header and arrays, or None when the file does not exist.

    Raises:
        OutputError: The file is damaged.
    """
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
