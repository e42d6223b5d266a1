"""Reading and writing all of it: the operating system may take or give less, and names later."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def read_into(descriptor: int, out: memoryview, offset: int) -> int:
    """Fill `out` with the bytes of a file from `offset` on; return how many there were."""
    done = 0
    while done < len(out) and (count := os.preadv(descriptor, [out[done:]], offset + done)):
        done += count
    return done


def read(descriptor: int, size: int, offset: int) -> np.ndarray:
    """Return the bytes (m,) uint8 of a file from `offset` on, up to its end."""
    found = np.empty(size, np.uint8)
    return found[: read_into(descriptor, found.data, offset)]


def write(descriptor: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
    """Write `parts` one behind the other.

    Raises:
        OSError: Something could not be written.
    """
    done, size = os.pwritev(descriptor, parts, offset), sum(len(part) for part in parts)
    if done < size:
        left = memoryview(b"".join(parts))
        while done < size:
            done += os.pwrite(descriptor, left[done:], offset + done)


def sync_folder(path: Path) -> None:
    """Make the name of a file durable: another sync than that of its bytes.

    Raises:
        OSError: The folder cannot be synced.
    """
    if os.name != "posix":
        return
    folder = os.open(path.absolute().parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
