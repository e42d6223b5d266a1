"""Changes to an unfinished file that a kill cannot leave half done.

Appending rows changes only data bytes. What changes more (finishing, giving a parameter another
layout, mending a chunk) first copies the bytes it will change to `OUT.h5.part.undo`. If that file
is there when a run is resumed, the change did not come to its end, and the bytes are put back.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import h5py
import numpy as np

from gradscope.storage import integrity, sidecar
from gradscope.storage.sidecar import Paths


@contextmanager
def undoable(
    paths: Paths, descriptor: int, chunks: np.ndarray | None = None, keep: bool = False
) -> Iterator[None]:
    """Let the body change the closed `.part`; put it back as it was if the body raises.

    Args:
        paths: The files.
        descriptor: The open `.part`.
        chunks: (m, 2) offsets and sizes of data that the body changes; by default all that is
            not rows: structure, attributes, names.
        keep: Leave the way back open after the body; the caller closes it.
    """
    size = os.fstat(descriptor).st_size
    if chunks is None:
        with h5py.File(paths.part, "r", locking=False) as file:
            pieces = list(integrity.gaps(integrity.extents(file), size))
    else:
        pieces = [(start, start + length) for start, length in chunks.tolist()]
    data = b"".join(os.pread(descriptor, stop - start, start) for start, stop in pieces)
    header = {"size": size, "pieces": pieces}
    sidecar.save(paths.undo, header, [np.frombuffer(data, np.uint8)])
    try:
        yield
    except BaseException:
        restore(paths, descriptor)
        raise
    if not keep:
        paths.undo.unlink()


def restore(paths: Paths, descriptor: int) -> None:
    """Put the bytes back that a change had not finished with, if there are any."""
    loaded = sidecar.load(paths.undo)
    if loaded is None:
        return
    header, (data,) = loaded
    position = 0
    for start, stop in header["pieces"]:
        os.pwrite(descriptor, data[position : position + stop - start].data, start)
        position += stop - start
    os.ftruncate(descriptor, header["size"])
    os.fsync(descriptor)
    paths.undo.unlink()
