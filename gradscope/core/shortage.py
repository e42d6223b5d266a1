"""Running out of memory, whoever says so: torch's allocators, Python or the operating system."""

import errno

import torch

_WORDS = (
    "can't allocate memory",  # torch's allocator on the CPU
    "not enough memory",  # the same, elsewhere
    "out of memory",
    "ALLOC_FAILED",  # CUDA's libraries
    "std::bad_alloc",
    "could not create a primitive\n",  # oneDNN, after it has described it
    "can't start new thread",  # Python, where there is none left for its stack
)


def is_shortage(error: BaseException) -> bool:
    """Whether an exception says that memory ran out.

    Torch raises a plain RuntimeError when there is none left on the CPU; only its text tells.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = f"{error}\n"
    return isinstance(error, RuntimeError) and any(words in text for words in _WORDS)
