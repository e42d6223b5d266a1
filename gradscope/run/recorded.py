"""A file that has just been written, held against itself before it takes its place.

The checksums tell that the bytes are those that were handed over. Whether these were the right
ones, its parts tell of each other: which samples it is about, how many of them the aggregates have
seen. (`stats.require_consistent` tells whether stored rows have the norms stored of them.)
"""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from gradscope.errors import OutputError
from gradscope.stages.reducers import State
from gradscope.storage import GradientFile

_REMEDY = "This is a mistake in gradscope: please report it."


def require_samples(file: GradientFile, index: Sequence[int]) -> None:
    """Compare the samples of a file with those that it is to be about.

    Raises:
        OutputError: They are others.
    """
    if not np.array_equal(file.samples["index"], np.asarray(index)):
        raise OutputError(
            "its rows are of other samples than were asked for",
            where="/samples/index",
            remedy=_REMEDY,
        )


def require_counts(file: GradientFile, states: Mapping[str, State], kept: bool) -> None:
    """Compare how many samples reducers have seen with how many there are.

    Args:
        file: The file.
        states: By owner; those that count samples do so under "n".
        kept: Whether samples count that are not finite.

    Raises:
        OutputError: There are more or less.
    """
    right = file.n if kept else int(np.count_nonzero(file.samples["finite"]))
    for owner, state in states.items():
        n = state.get("n")
        if isinstance(n, Tensor) and n.numel() == 1 and float(n) != right:
            raise OutputError(
                f"its aggregates are of {float(n):,.0f} samples, of {right:,} that there are",
                where=owner,
                remedy=_REMEDY,
            )
