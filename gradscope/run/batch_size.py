"""How many samples are computed at a time: fewer when memory runs out."""

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from gradscope.core.locate import first_line
from gradscope.core.memory import release_freed_memory
from gradscope.core.shortage import is_shortage
from gradscope.errors import RefusedError

T = TypeVar("T")


class BatchSize:
    """The number of samples computed at a time; halved for good whenever memory runs out.

    Args:
        samples: To begin with.
        fixed: The answer depends on who shares a batch, so that none may be split.

    Attributes:
        samples: Now.
    """

    def __init__(self, samples: int, *, fixed: bool = False) -> None:
        self.samples = self._first = samples
        self._fixed = fixed

    @property
    def notes(self) -> tuple[str, ...]:
        """What there is to say about it."""
        if self.samples == self._first:
            return ()
        return (
            f"memory ran out with {self._first:,} samples at a time: "
            f"{self.samples:,} from there on",
        )

    def fitting(self, action: Callable[[int], T], most: int) -> T:
        """Return `action(n)` for the largest n that memory suffices for.

        Args:
            action: Computes n samples; it may be called again with a smaller n, so it keeps
                nothing unless it succeeds.
            most: The largest n that there are samples for.

        Raises:
            RefusedError: Memory does not suffice for a single sample.
        """
        while True:
            n = min(self.samples, most)
            try:
                return action(n)
            except Exception as error:
                if not is_shortage(error):
                    raise
                self._halve(n, error)
            gc.collect()  # a traceback may hold on to what the attempt had computed
            release_freed_memory()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _halve(self, n: int, error: Exception) -> None:
        if self._fixed:
            raise RefusedError(
                f"memory ran out with {n} samples: {first_line(error)}",
                where="batch",
                remedy="With own-loss coupling the answer depends on which samples share a batch, "
                "so it is not split. Give a smaller --batch-size.",
            ) from error
        if n == 1:
            raise RefusedError(
                f"memory does not suffice for a single sample: {first_line(error)}",
                where="batch",
                remedy="Free memory and go on with --resume; or compute fewer --parameters at a "
                "time, or in another --dtype.",
            ) from error
        self.samples = n // 2
