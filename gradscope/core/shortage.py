"""Running out of memory, whoever says so: torch's allocators, Python or the operating system."""

import errno

import torch

RESERVE = 2**24  # bytes: a chunk of a file and what compresses it, several times

_WORDS = (
    "can't allocate memory",  # torch's allocator on the CPU
    "not enough memory",  # the same, elsewhere
    "out of memory",
    "ALLOC_FAILED",  # CUDA's libraries
    "std::bad_alloc",
    "could not create a primitive\n",  # oneDNN, after it has described it
    "can't start new thread",  # Python, where there is none left for its stack
    "memory allocation failed",  # HDF5
)


def is_shortage(error: BaseException) -> bool:
    """Whether an exception says that memory ran out.

    Torch raises a plain RuntimeError when there is none left on the CPU; only its text tells.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    text = f"{error}\n"
    known = isinstance(error, RuntimeError | OSError)  # h5py raises both
    return known and any(words in text for words in _WORDS)


def require_memory(size: int = RESERVE) -> None:
    """Make sure of memory before HDF5 is asked for something: where it has none, it may crash.

    Raises:
        MemoryError: There are not `size` bytes to be had.
    """
    bytearray(size)  # taken from the system, not touched, and given back
