"""Numbers of a chain that are not finite although the gradients are: a stage made them so.

They are counted: in rows as they are written, in aggregates when these are taken, before the stages
that follow the reducer as well as behind them (a sign hides what has overflowed).
"""

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradscope.blocks import Gradients
from gradscope.blocks.base import as_rows
from gradscope.errors import NonFiniteError
from gradscope.stages.chain import Chain
from gradscope.stages.reducers import State
from gradscope.storage import GradientFile

OWNER = "nonfinite"  # of the counts by chain, among the reducers' states
_PIECE = 2**20  # numbers of a stored array in work at a time

Result = dict[str, Tensor]


def of_rows(rows: Gradients, finite: Tensor) -> Tensor:
    """Return how many numbers (0-d) of a chain's rows are not finite.

    Args:
        rows: The rows (n, ...) of each parameter.
        finite: (n,) bool, the samples that count.
    """
    found = torch.zeros((), dtype=torch.int64, device=finite.device)
    if rows.bounded():
        return found
    for block in rows.values():
        for part, tile in block.tiles():
            bad = (~as_rows(tile).isfinite()).sum(1)
            found += (bad.to(finite.device) * finite[part]).sum()
    return found


def of_result(chain: Chain, state: State) -> tuple[Result, int]:
    """Return what `chain.result` does, and how many of its numbers are not finite.

    Where all are, but some were not before the last stages, how many these were.
    """
    assert chain.reducer is not None  # else there is no state
    before = chain.reducer.result(state)
    after = chain.finish(before)
    return after, _count(after) or _count(before)


def of_file(file: GradientFile, *, aggregates: bool) -> tuple[int, ...]:
    """Return the counts by chain that a file shows.

    Args:
        file: A result.
        aggregates: Look at these, too, not only at what is recorded of them.
    """
    noted = file.states.get(OWNER, {})
    found = []
    for k, chain in enumerate(file.chains):
        kept = int(noted[str(k)][...]) if str(k) in noted else 0
        if chain.reduced:
            found.append(max(kept, sum(map(_stored, chain.values())) if aggregates else 0))
        else:
            found.append(kept + sum(int(getattr(a, "overflowed", 0)) for a in chain.values()))
    return tuple(found)


def recorded(states: Mapping[str, State], counts: Mapping[int, int]) -> dict[str, State]:
    """Return the states with the counts of aggregates, where there is anything to count."""
    kept = {k: count for k, count in states.get(OWNER, {}).items() if int(k) not in counts}
    every = kept | {str(k): torch.tensor(count) for k, count in counts.items() if count}
    others = {owner: state for owner, state in states.items() if owner != OWNER}
    return others | ({OWNER: every} if every else {})


def refuse(chains: Iterable[Chain], counts: Mapping[int, int]) -> None:
    """Raise where a chain has such numbers.

    Raises:
        NonFiniteError: It has.
    """
    for k, chain in enumerate(chains):
        if counts.get(k, 0):
            raise NonFiniteError(
                f"{counts[k]:,} of its numbers are not finite, though the gradients are",
                where=f"chain {chain.text!r}",
                remedy="Scale the gradients first, or use nonfinite skip to have them told.",
            )


def _count(result: Result) -> int:
    return int(sum(int((~value.isfinite()).sum()) for value in result.values()))


def _stored(array: Any) -> int:
    if not array.shape:
        return int((~np.isfinite(array[...])).sum())
    step = max(1, _PIECE // max(1, prod(array.shape[1:])))
    parts = (array[start : start + step] for start in range(0, array.shape[0], step))
    return sum(int((~np.isfinite(part)).sum()) for part in parts)
