"""Opening a result file that comes from somewhere else: its seal first, then all that it holds."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import h5py
import numpy as np

from gradscope.errors import ResultFileError
from gradscope.storage import consistency, integrity, safety
from gradscope.storage.arrays import reading
from gradscope.storage.build import FORMAT, FORMAT_VERSION
from gradscope.storage.checks import REMEDY, Checks


@dataclass(frozen=True)
class Opened:
    """An open result file; close it, or use it in a `with` statement.

    Attributes:
        file: Its structure, which was checked.
        checks: Its data.
        seal: The SHA-256 of its seal.
    """

    file: h5py.File
    checks: Checks
    seal: bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def opened(path: Path) -> Opened:
    """Open a result file and check everything but its rows.

    Raises:
        ResultFileError: It is absent, unfinished, damaged, not a result file, newer than this
            gradscope, or reaches outside itself.
    """
    try:
        with reading(str(path)):
            file, seal = _file(path)
            try:
                return Opened(file, *_checked(file, path.stat().st_size, seal))
            except BaseException:
                file.close()
                raise
    except ResultFileError as error:
        raise error if error.where else error.at(str(path)) from error.__cause__


def opened_again(path: Path, digest: bytes) -> Opened:
    """Open a file whose structure was checked when it had this seal.

    Raises:
        ResultFileError: It has changed, or cannot be read.
    """
    with reading(str(path)):
        seal = integrity.seal_of(path) if _is_file(path) else None
        if seal is None or not seal.intact or seal.digest != digest:
            raise ResultFileError(
                "it is no longer what it was when it was opened first",
                where=str(path),
                remedy="Wait until nobody changes it, and try again.",
            )
        file = h5py.File(path, "r", locking=False)
        return Opened(file, Checks(file.id.get_vfd_handle, seal.table), digest)


def _file(path: Path) -> tuple[h5py.File, integrity.Seal | None]:
    """Open the file, having checked its seal, and return that."""
    if not _is_file(path):
        part = path.with_name(path.name + ".part")
        raise ResultFileError(
            "there is no such file",
            remedy=f"{part.name} is there: the run is not finished; give --resume."
            if _is_file(part)
            else "Check the path.",
        )
    seal = integrity.seal_of(path)
    if seal is not None and not seal.intact:
        raise _changed("its structure was changed after it was written")
    if not h5py.is_hdf5(path):
        raise ResultFileError(
            "this is not an HDF5 file", remedy="Give the file that gradscope compute -o wrote."
        )
    try:
        return h5py.File(path, "r", locking=False), seal
    except OSError as error:
        if "truncated" not in str(error):
            raise
        raise ResultFileError(
            "the file is cut short", remedy="Take another copy of it, or compute it again."
        ) from error


def _checked(file: h5py.File, size: int, seal: integrity.Seal | None) -> tuple[Checks, bytes]:
    """Check the structure, and return what is needed for the data."""
    safety.check_attributes(file, size)
    found = file.attrs.get("format")
    if not isinstance(found, str) or found != FORMAT:
        raise ResultFileError(
            "this HDF5 file was not written by gradscope",
            remedy="Give the file that gradscope compute -o wrote.",
        )
    version = file.attrs.get("format_version")
    if not isinstance(version, int | np.integer) or version > FORMAT_VERSION:
        raise ResultFileError(
            f"the file has format version {version}, this gradscope reads {FORMAT_VERSION}",
            remedy="Install a newer gradscope.",
        )
    if file.attrs.get("status") != "complete":
        raise ResultFileError(
            "the file is not finished: its run was stopped, or is still going on",
            remedy="Go on with it: the same command and --resume.",
        )
    if seal is None:
        raise _changed("its seal is missing: it was cut short, or changed after it was written")
    consistency.check(file, safety.check(file, size))
    return Checks(file.id.get_vfd_handle, seal.table), seal.digest


def _is_file(path: Path) -> bool:
    return os.path.isfile(path)  # noqa: PTH113 (which raises where a name is too long)


def _changed(what: str) -> ResultFileError:
    return ResultFileError(what, remedy=REMEDY)
