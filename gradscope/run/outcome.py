"""What a finished file says of its run: which numbers are finite, whether it contradicts itself.

Numbers of a chain that are not finite although the gradients are come from a stage. They are
counted in rows as they are written, and in aggregates when these are taken, before the stages that
follow the reducer as well as after them (a sign hides what has overflowed).
"""

from collections.abc import Iterable, Mapping, Sequence
from math import nan, prod
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gradscope.blocks import Gradients
from gradscope.blocks.base import as_rows
from gradscope.errors import OutputError
from gradscope.stages.chain import Chain
from gradscope.stages.reducers import State
from gradscope.stats import Json, ParameterRow, Record
from gradscope.storage import GradientFile

NONFINITE = "nonfinite"  # the counts by chain, among the reducers' states
MEAN_GRADIENT = "mean_gradient"  # kept in every run, for signal-to-noise
_PIECE = 2**20  # numbers of a stored array in work at a time
_REPORT = "This is a mistake in gradscope: please report it."


class RunReport(Record):
    """What one `gradscope compute` did, for its last words and its `--json`."""

    schema_: Literal["gradscope.compute"] = "gradscope.compute"
    version: Literal[1] = 1
    parameters: tuple[ParameterRow, ...]  # one row each, in the model's order
    certificate: Json  # the proof of the first batch, and what was audited
    backend: str  # which one ran
    notes: tuple[str, ...] = ()  # why that backend, unused parameters, what else is worth a line
    samples: int
    nonfinite: int  # samples that are not finite
    chains_nonfinite: tuple[int, ...] = ()  # numbers by chain, of samples that are finite
    seconds: float  # wall time
    path: str | None = None  # of what was written
    bytes: int | None = None
    chains: tuple[str, ...] = ()  # in canonical spelling
    audits: str | None = None  # what was audited, in a line


def nonfinite_of_rows(rows: Gradients, finite: Tensor) -> Tensor:
    """Return how many numbers (0-d) of a chain's rows (n, ...) are not finite.

    Of samples only that are themselves: `finite` is (n,) bool.
    """
    found = torch.zeros((), dtype=torch.int64, device=finite.device)
    if rows.bounded():
        return found
    for block in rows.values():
        for part, tile in block.tiles():
            bad = (~as_rows(tile).isfinite()).sum(1)
            found += (bad.to(finite.device) * finite[part]).sum()
    return found


def results_of(
    chains: Mapping[int, Chain], states: Mapping[str, State]
) -> tuple[dict[int, dict[str, Tensor]], dict[int, int]]:
    """Return the results of reduced chains, and how many numbers of each are not finite.

    Where all are, but some were not before the last stages, how many these were.
    """
    results, counts = {}, {}
    for k, chain in chains.items():
        if chain.reducer is None or str(k) not in states:
            continue
        before = chain.reducer.result(states[str(k)])
        results[k] = chain.finish(before)
        counts[k] = _nonfinite_numbers(results[k]) or _nonfinite_numbers(before)
    return results, counts


def _nonfinite_numbers(result: Mapping[str, Tensor]) -> int:
    return sum(int((~value.isfinite()).sum()) for value in result.values())


def nonfinite_of_file(file: GradientFile, *, aggregates: bool) -> tuple[int, ...]:
    """Return the counts by chain that a file shows; of `aggregates`, not only what is recorded."""
    noted = file.states.get(NONFINITE, {})
    found = []
    for k, chain in enumerate(file.chains):
        kept = int(noted[str(k)][...]) if str(k) in noted else 0
        if chain.reduced:
            found.append(max(kept, sum(map(_nonfinite, chain.values())) if aggregates else 0))
        else:
            found.append(kept + sum(int(getattr(a, "overflowed", 0)) for a in chain.values()))
    return tuple(found)


def _nonfinite(array: Any) -> int:
    if not array.shape:
        return int((~np.isfinite(array[...])).sum())
    step = max(1, _PIECE // max(1, prod(array.shape[1:])))
    parts = (array[start : start + step] for start in range(0, array.shape[0], step))
    return sum(int((~np.isfinite(part)).sum()) for part in parts)


def with_counts(states: Mapping[str, State], counts: Mapping[int, int]) -> dict[str, State]:
    """Return the states with the counts of aggregates, where there is anything to count."""
    kept = {k: count for k, count in states.get(NONFINITE, {}).items() if int(k) not in counts}
    every = kept | {str(k): torch.tensor(count) for k, count in counts.items() if count}
    others = {owner: state for owner, state in states.items() if owner != NONFINITE}
    return others | ({NONFINITE: every} if every else {})


def mean_gradient_norms(
    states: Mapping[str, State], names: Iterable[str]
) -> dict[str, dict[str, float]]:
    """Return ‖mean gᵢ‖ of each parameter, for /norms."""
    state = states.get(MEAN_GRADIENT)
    if state is None:  # no sample is finite
        return {name: {"mean_gradient_norm": nan} for name in names}
    n = float(state["n"])
    sums = {key.removeprefix("sum:"): value for key, value in state.items() if key != "n"}
    return {name: {"mean_gradient_norm": float(g.norm()) / n} for name, g in sums.items()}


def require_written(
    file: GradientFile, index: Sequence[int], states: Mapping[str, State], *, kept: bool
) -> None:
    """Hold a file that has just been written against itself before it takes its place.

    The checksums tell that the bytes are those that were handed over; this tells whether these were
    the right ones: rows of the samples `index`, and states of reducers that have counted as many
    samples as there are (all of them where `kept`, else the finite ones).

    Raises:
        OutputError: Its rows are of other samples, or its aggregates of more or fewer than it has.
    """
    if not np.array_equal(file.samples["index"], np.asarray(index)):
        raise OutputError(
            "its rows are of other samples than were asked for",
            where="/samples/index",
            remedy=_REPORT,
        )
    right = file.n if kept else int(np.count_nonzero(file.samples["finite"]))
    for owner, state in states.items():
        n = state.get("n")
        if isinstance(n, Tensor) and n.numel() == 1 and float(n) != right:
            raise OutputError(
                f"its aggregates are of {float(n):,.0f} samples, of {right:,} that there are",
                where=owner,
                remedy=_REPORT,
            )
