"""Threads for work that can be done beside other work, or in its place where there are none.

`ThreadPoolExecutor` starts a thread with the first piece of work it has no idle one for. Where
the system starts none, for want of memory or by a limit, it raises, though the work is in its queue
by then. So all threads are started at once here; and who cannot have them works without.
"""

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from threading import Barrier
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class InPlace(Executor):
    """Does what is submitted before `submit` returns."""

    def submit(self, action: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call `action`; what it returns or raises is in the future."""
        future: Future[T] = Future()
        try:
            future.set_result(action(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def started(count: int, name: str) -> Executor:
    """Return a pool of `count` threads, all of which run; or `InPlace`, if they cannot be had.

    Args:
        count: How many.
        name: What their names begin with.
    """
    pool, all_here = ThreadPoolExecutor(count, name), Barrier(count + 1)
    try:
        for _ in range(count):
            pool.submit(all_here.wait)  # nobody is idle while all wait for each other
        all_here.wait()
    except BaseException as error:  # an interrupt, too, must not leave anybody waiting
        all_here.abort()
        pool.shutdown(cancel_futures=True)
        if isinstance(error, RuntimeError | MemoryError):
            return InPlace()
        raise
    return pool
