"""Running out of memory or of threads, and how to go on without.

`ThreadPoolExecutor` starts a thread with the first piece of work it has no idle one for. Where
the system starts none, for want of memory or by a limit, it raises, though the work is in its queue
by then. So `thread_pool` starts all threads at once, or does without any.
"""

import errno
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from threading import Barrier
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

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
    """Whether an exception says that memory ran out: on the CPU torch raises a RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    text = f"{error}\n"
    known = isinstance(error, RuntimeError | OSError)  # h5py raises both
    return known and any(words in text for words in _WORDS)


def is_device_lost(error: BaseException) -> bool:
    """Whether an exception says that a GPU has stopped, of what it was asked some time before."""
    return isinstance(error, torch.AcceleratorError) and not is_shortage(error)


def is_machine_error(error: BaseException) -> bool:
    """Whether it is the machine's: memory ran out, or a GPU has stopped."""
    return is_shortage(error) or is_device_lost(error)


def require_memory(size: int = RESERVE) -> None:
    """Raise a MemoryError if there are not `size` bytes: HDF5 may crash where it finds none."""
    bytearray(size)  # taken from the system, not touched, and given back


class InlineExecutor(Executor):
    """Does what is submitted before `submit` returns."""

    def submit(self, action: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call `action`; what it returns or raises is in the future."""
        future: Future[T] = Future()
        try:
            future.set_result(action(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def thread_pool(count: int, name: str) -> Executor:
    """Return a pool of `count` running threads, or `InlineExecutor`; names begin with `name`."""
    pool, all_here = ThreadPoolExecutor(count, name), Barrier(count + 1)
    try:
        for _ in range(count):
            pool.submit(all_here.wait)  # nobody is idle while all wait for each other
        all_here.wait()
    except BaseException as error:  # an interrupt, too, must not leave anybody waiting
        all_here.abort()
        pool.shutdown(cancel_futures=True)
        if isinstance(error, RuntimeError | MemoryError):
            return InlineExecutor()
        raise
    return pool
