"""Shortage of memory or threads, and how to continue.

`ThreadPoolExecutor` starts a thread when work arrives and no thread is idle. If the system cannot
start a thread, `submit` raises, although the work is already in the queue. So `thread_pool` starts
all threads at once, or uses none.
"""

import errno
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from threading import Barrier
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

RESERVE = 2**24  # bytes: several times a chunk of a file and its compressor

_WORDS = (
    "can't allocate memory",  # torch's allocator on the CPU
    "not enough memory",  # the same, elsewhere
    "out of memory",
    "ALLOC_FAILED",  # CUDA's libraries
    "std::bad_alloc",
    "could not create a primitive\n",  # oneDNN, after the description
    "can't start new thread",  # Python, without memory for the thread's stack
    "memory allocation failed",  # HDF5
)


def is_shortage(error: BaseException) -> bool:
    """Whether an exception says that memory ran out; torch raises a RuntimeError on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    text = f"{error}\n"
    known = isinstance(error, RuntimeError | OSError)  # h5py raises either
    return known and any(words in text for words in _WORDS)


def is_device_lost(error: BaseException) -> bool:
    """Whether an exception says that a GPU has failed, perhaps in an earlier operation."""
    return isinstance(error, torch.AcceleratorError) and not is_shortage(error)


def is_machine_error(error: BaseException) -> bool:
    """Whether the machine caused the error: memory ran out, or a GPU has failed."""
    return is_shortage(error) or is_device_lost(error)


def require_memory(size: int = RESERVE) -> None:
    """Raise a MemoryError if `size` bytes are not available; HDF5 may crash without memory."""
    bytearray(size)  # allocated, not touched, and freed


class InlineExecutor(Executor):
    """Runs submitted work before `submit` returns."""

    def submit(self, action: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call `action` and store its result or exception in the future."""
        future: Future[T] = Future()
        try:
            future.set_result(action(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def thread_pool(count: int, name: str) -> Executor:
    """Return a pool of `count` started threads, or `InlineExecutor`; names begin with `name`."""
    pool, all_here = ThreadPoolExecutor(count, name), Barrier(count + 1)
    try:
        for _ in range(count):
            pool.submit(all_here.wait)  # no thread is idle while all wait for each other
        all_here.wait()
    except BaseException as error:  # after an interrupt, too, no thread may keep waiting
        all_here.abort()
        pool.shutdown(cancel_futures=True)
        if isinstance(error, RuntimeError | MemoryError):
            return InlineExecutor()
        raise
    return pool
