"""Virtual files: their rows stay in other files, each of which must be there and unchanged.

HDF5 reads a missing source of a virtual data set as fill values and says nothing. So rows are not
read through it here: each source is opened as a result file of its own, with all its checks.
"""

import json
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from gradscope.errors import ResultFileError
from gradscope.storage import integrity
from gradscope.storage.arrays import StoredArray
from gradscope.storage.checks import Checks
from gradscope.storage.names import escape
from gradscope.storage.opening import Opened, opened, opened_again
from gradscope.storage.safety import SOURCES

_OPEN = 4  # files that are kept open


@dataclass(frozen=True)
class Source:
    """A file that holds some of the rows.

    Attributes:
        path: Where it is.
        seal: The SHA-256 of its seal when it was merged.
        start: The first of its rows.
        stop: One beyond the last.
    """

    path: Path
    seal: bytes
    start: int
    stop: int

    def require_unchanged(self) -> None:
        """Check that the file is there, and is the one that was merged.

        Raises:
            ResultFileError: It is missing or has changed.
        """
        if not self.path.is_file():
            what = "this file, which holds rows of a virtual one, is missing"
        else:
            seal = integrity.seal_of(self.path)
            if seal is not None and seal.intact and seal.digest == self.seal:
                return
            what = "this file, which holds rows of a virtual one, has changed"
        raise ResultFileError(
            what,
            where=str(self.path),
            remedy="Put it back as it was, or merge the files again.",
        )


class Sources:
    """The files that a virtual one takes its rows from, opened when they are needed.

    Args:
        files: In the order of their rows.
    """

    def __init__(self, files: tuple[Source, ...]) -> None:
        self.files = files
        self._open: OrderedDict[int, Opened] = OrderedDict()
        self._sound: set[int] = set()  # those that were opened before

    def read(self, chain: int, name: str, like: StoredArray, start: int, stop: int) -> np.ndarray:
        """Return rows start:stop (n, *shape) of one parameter's array.

        Raises:
            ResultFileError: A source is missing, changed, damaged or of another kind.
        """
        pieces = []
        for k, source in enumerate(self.files):
            first, last = max(start, source.start), min(stop, source.stop)
            if first < last:
                array = self._array(k, chain, name)
                if (len(array), *array.shape[1:]) != (source.stop - source.start, *like.shape[1:]):
                    raise _other(source, f"its {name!r} has the shape {array.shape}")
                pieces.append(array[first - source.start : last - source.start])
        return np.concatenate(pieces) if pieces else np.empty((0, *like.shape[1:]), like.dtype)

    def close(self) -> None:
        """Close them."""
        while self._open:
            self._open.popitem()[1].file.close()

    def _array(self, k: int, chain: int, name: str) -> StoredArray:
        source = self._opened(k)
        group = source.file["chains"].get(str(chain))
        if group is None or group.attrs["reduced"] or escape(name) not in group:
            raise _other(self.files[k], f"it has no rows of {name!r} in chain {chain}")
        return StoredArray(name, group[escape(name)], source.checks)

    def _opened(self, k: int) -> Opened:
        """Open a source, and close the one that was not used for longest."""
        if k not in self._open:
            source = self.files[k]
            source.require_unchanged()
            known = k in self._sound
            self._open[k] = opened_again(source.path, source.seal) if known else opened(source.path)
            self._sound.add(k)
            if SOURCES in self._open[k].file.attrs:
                raise _other(source, "it is a virtual file itself")
            if len(self._open) > _OPEN:
                self._open.popitem(last=False)[1].file.close()
        self._open.move_to_end(k)
        return self._open[k]


class JoinedArray(StoredArray):
    """One parameter's rows, in several files."""

    def __init__(
        self, name: str, item: h5py.HLObject, checks: Checks, chain: int, sources: Sources
    ) -> None:
        super().__init__(name, item, checks)
        self._chain, self._sources = chain, sources
        rows = sources.files[-1].stop if sources.files else 0
        if not self.shape or self.shape[0] != rows:
            raise ResultFileError(
                f"an array of {self.shape} does not fit the {rows:,} rows of the other files",
                where=self._where,
            )

    @property
    def nbytes(self) -> int:
        """The bytes it takes in this file: none."""
        return 0

    def _read(self, start: int, stop: int) -> np.ndarray:
        return self._sources.read(self._chain, self.name, self, start, stop)


def sources_of(text: str, folder: Path) -> Sources:
    """Return the sources that a virtual file in `folder` names, each checked.

    Raises:
        ResultFileError: The list is not one, or a file is missing or has changed.
    """
    try:
        files = tuple(_source(record, folder) for record in json.loads(text))
    except (ValueError, KeyError, TypeError) as error:
        raise ResultFileError(f"the attribute {SOURCES!r} is not a list of files") from error
    ends = [0, *(file.stop for file in files)]
    if not files or any(s.start != end for s, end in zip(files, ends, strict=False)):
        raise ResultFileError(f"the files of the attribute {SOURCES!r} leave gaps")
    for file in files:
        file.require_unchanged()
    return Sources(files)


def _source(record: Any, folder: Path) -> Source:
    path = Path(str(record["path"]))
    if path.is_absolute() or "\0" in str(path):
        raise ValueError(record)
    start, stop = (int(row) for row in record["rows"])
    return Source(folder / path, bytes.fromhex(record["seal"]), start, stop)


def _other(source: Source, what: str) -> ResultFileError:
    return ResultFileError(
        what, where=str(source.path), remedy="Merge the files again, without --virtual."
    )
