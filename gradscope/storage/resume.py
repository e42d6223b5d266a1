"""What is already there: refuse it, clear it away, go on with it, or find nothing left to do."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from gradscope.errors import OutputError, ResultFileError
from gradscope.storage.checks import damage_text, damaged
from gradscope.storage.plan import FilePlan
from gradscope.storage.reader import open_file
from gradscope.storage.sidecar import Paths, Progress

if sys.platform != "win32":
    import fcntl

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # file systems that have none


def is_done(paths: Paths, plan: FilePlan, *, overwrite: bool, resume: bool) -> bool:
    """Whether the complete file of this very run is there already.

    With both `overwrite` and `resume`, what is of another run is replaced, and the rest gone on
    with.

    Raises:
        OutputError: A file is there that is not to be replaced.
    """
    if not paths.final.exists() or (overwrite and not resume):
        return False
    if not resume:
        raise OutputError(
            "the file exists already",
            where=str(paths.final),
            remedy="Choose another name, or give --overwrite.",
        )
    try:
        with open_file(paths.final) as file:
            found = file.identity
    except ResultFileError as error:
        if overwrite:
            return False
        raise OutputError(
            f"a file of another kind is in the way: {error.what}",
            where=str(paths.final),
            remedy="Choose another name, or give --overwrite.",
        ) from error
    if found != plan.identity and (overwrite or _is_to_be_replaced(paths, plan)):
        return False
    _check_same(found, plan.identity, paths.final)
    if not paths.part.exists():
        paths.progress.unlink(missing_ok=True)  # left by a kill right after the file took its place
    return True


def _is_to_be_replaced(paths: Paths, plan: FilePlan) -> bool:
    """Whether this run was begun with --overwrite, and stopped before it was complete."""
    progress = Progress.load(paths.progress) if paths.part.exists() else None
    return progress is not None and progress.replaces and progress.identity == plan.identity


def require_not_there(paths: Paths, descriptor: int, *, overwrite: bool) -> None:
    """Check, with the `.part` locked, that nobody has put the final file in its place meanwhile.

    Raises:
        OutputError: Another process has.
    """
    if overwrite or not paths.final.exists():
        return
    if os.fstat(descriptor).st_size == 0:
        paths.part.unlink(missing_ok=True)  # it was made by being opened
    raise OutputError(
        "another process has just written this file",
        where=str(paths.final),
        remedy="Choose another name, or give --overwrite.",
    )


def start(
    paths: Paths, descriptor: int, plan: FilePlan, *, overwrite: bool, resume: bool
) -> Progress | None:
    """Bring the locked `.part` into the state to go on from; None: begin with an empty file.

    Raises:
        OutputError: An unfinished run is there and nothing was said about it, or it is another.
    """
    unfinished = os.fstat(descriptor).st_size > 0
    if unfinished and not (overwrite or resume):
        raise OutputError(
            "an unfinished file of a stopped run is there",
            where=str(paths.part),
            remedy="Give --resume to go on with it, or --overwrite to start again.",
        )
    progress = Progress.load(paths.progress) if unfinished and resume else None
    if overwrite and progress is not None and progress.identity != plan.identity:
        progress = None
    replaces = overwrite or (progress is not None and progress.replaces)
    require_not_there(paths, descriptor, overwrite=replaces)
    if progress is None:
        paths.progress.unlink(missing_ok=True)
        os.ftruncate(descriptor, 0)
        return None
    _check_same(progress.identity, plan.identity, paths.part)
    progress.structure.put_back(descriptor)
    require_intact(paths.part, descriptor, progress.records)
    return progress


def require_intact(part: Path, descriptor: int, records: np.ndarray) -> None:
    """Check that what is complete in an unfinished file is what was written.

    Args:
        part: The file.
        descriptor: The same, open.
        records: (m, 3) int64: offset, size and CRC-32C of each piece.

    Raises:
        OutputError: Something has changed.
    """
    offsets = damaged(descriptor, records)
    if len(offsets):
        with h5py.File(part, "r", locking=False) as file:
            places = damage_text(file, offsets)
        raise OutputError(
            f"the unfinished file is damaged: {places} changed after they were written",
            where=str(part),
            remedy="Look after the disk. Then start again with --overwrite, or put back a copy of "
            f"{part.name} and {part.name}.progress, and give --resume.",
        )


@contextmanager
def locked(part: Path) -> Iterator[int]:
    """Open `.part` for this process alone, and yield its descriptor.

    Raises:
        OutputError: Another process is writing it.
    """
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(descriptor, part)
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int, part: Path) -> None:
    if sys.platform != "win32":
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise _busy(part) from error
    with suppress(FileNotFoundError):
        if os.path.samestat(part.stat(), os.fstat(descriptor)):
            return
    raise _busy(part)  # the other process finished between our opening and our locking


def _busy(part: Path) -> OutputError:
    return OutputError(
        "another process is writing this file",
        where=str(part),
        remedy="Wait for it to end, or choose another name.",
    )


def _check_same(found: Any, wanted: Any, path: Path) -> None:
    different = list(differences(found, wanted, ""))
    if different:
        raise OutputError(
            "this is another run: " + "; ".join(different),
            where=str(path),
            remedy="Repeat the first run's options to resume it, or give --overwrite.",
        )


def differences(found: Any, wanted: Any, key: str) -> Iterator[str]:
    """Yield what differs, by dotted key: there, here."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for name in {**found, **wanted}:
            inner = f"{key}.{name}" if key else name
            yield from differences(found.get(name), wanted.get(name), inner)
    elif found != wanted and key.startswith("digests."):
        there, here = (str(digest)[:12] for digest in (found, wanted))
        yield f"{key.removeprefix('digests.')} has changed (SHA-256 {there}… there, {here}… here)"
    elif found != wanted:
        yield f"{key} is {found!r} there, {wanted!r} here"
