"""Opening a result file that comes from somewhere else: its seal first, then all that it holds."""

from pathlib import Path

import h5py
import numpy as np

from gradscope.errors import ResultFileError
from gradscope.storage import consistency, integrity, safety
from gradscope.storage.arrays import reading
from gradscope.storage.build import FORMAT, FORMAT_VERSION


def opened(path: Path) -> h5py.File:
    """Open a result file and check everything but its rows.

    Raises:
        ResultFileError: It is absent, unfinished, damaged, not a result file, newer than this
            gradscope, or reaches outside itself.
    """
    try:
        with reading(str(path)):
            file, sealed = _file(path)
            try:
                _check(file, path.stat().st_size, sealed)
            except BaseException:
                file.close()
                raise
            return file
    except ResultFileError as error:
        raise error if error.where else error.at(str(path)) from error.__cause__


def opened_again(path: Path, seal: bytes) -> h5py.File:
    """Open a file whose structure was checked when it had this seal.

    Raises:
        ResultFileError: It has changed, or cannot be read.
    """
    with reading(str(path)):
        if not path.is_file() or not integrity.is_intact(path) or integrity.seal_of(path) != seal:
            raise ResultFileError(
                "it is no longer what it was when it was opened first",
                where=str(path),
                remedy="Wait until nobody changes it, and try again.",
            )
        return h5py.File(path, "r", locking=False)


def _file(path: Path) -> tuple[h5py.File, bool]:
    """Open the file, having checked its seal, and return whether it has one."""
    if not path.is_file():
        part = path.with_name(path.name + ".part")
        raise ResultFileError(
            "there is no such file",
            remedy=f"{part.name} is there: the run is not finished; give --resume."
            if part.exists()
            else "Check the path.",
        )
    intact = integrity.is_intact(path)
    if intact is False:
        raise _changed("its structure was changed after it was written")
    if not h5py.is_hdf5(path):
        raise ResultFileError(
            "this is not an HDF5 file", remedy="Give the file that gradscope compute -o wrote."
        )
    try:
        return h5py.File(path, "r", locking=False), intact is not None
    except OSError as error:
        if "truncated" not in str(error):
            raise
        raise ResultFileError(
            "the file is cut short", remedy="Take another copy of it, or compute it again."
        ) from error


def _check(file: h5py.File, size: int, sealed: bool) -> None:
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
    if not sealed:
        raise _changed("its seal is missing: it was cut short, or changed after it was written")
    safety.check(file, size)
    consistency.check(file)


def _changed(what: str) -> ResultFileError:
    return ResultFileError(what, remedy="Take another copy of the file, or compute it again.")
