"""What a finished file says of its run: which numbers are finite, whether it contradicts itself.

Numbers of a chain that are not finite although the gradients are come from a stage. They are
counted in rows as they are written, and in aggregates when these are taken, before the stages that
follow the reducer as well as after them (a sign hides what has overflowed).
"""

from collections.abc import Iterable, Mapping, Sequence
from math import nan

import numpy as np
import torch
from torch import Tensor

from gradscope.blocks import Gradients
from gradscope.blocks.base import as_rows
from gradscope.errors import OutputError
from gradscope.stages.chain import Chain
from gradscope.stages.reducers import State
from gradscope.storage import GradientFile

NONFINITE = "nonfinite"  # the counts by chain, among the reducers' states
MEAN_GRADIENT = "mean_gradient"  # kept in every run, for signal-to-noise
_REPORT = "This is a mistake in gradscope: please report it."


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
) -> tuple[dict[int, dict[str, Tensor]], dict[int, int], dict[str, State]]:
    """Return the results of reduced chains, how many numbers of each are not finite, and states.

    Where all are, but some were not before the last stages, how many these were. The states have
    the counts, too, where there is anything to count.
    """
    results, counts = {}, {}
    for k, chain in chains.items():
        if chain.reducer is None or str(k) not in states:
            continue
        before = chain.reducer.result(states[str(k)])
        results[k], counts[k] = chain.finish(before), 0
        for result in (results[k], before):
            bad = sum(int((~value.isfinite()).sum()) for value in result.values())
            counts[k] = counts[k] or bad
    others = {owner: state for owner, state in states.items() if owner != NONFINITE}
    every = {k: n for k, n in states.get(NONFINITE, {}).items() if int(k) not in counts}
    every |= {str(k): torch.tensor(count) for k, count in counts.items() if count}
    return results, counts, others | ({NONFINITE: every} if every else {})


def nonfinite_of_file(file: GradientFile, *, aggregates: bool) -> tuple[int, ...]:
    """Return the counts by chain that a file shows; of `aggregates`, not only what is recorded."""
    noted = file.states.get(NONFINITE, {})
    found = []
    for k, chain in enumerate(file.chains):
        kept = int(noted[str(k)][...]) if str(k) in noted else 0
        if chain.reduced:
            arrays = chain.values() if aggregates else ()
            found.append(max(kept, sum(int((~np.isfinite(a[...])).sum()) for a in arrays)))
        else:
            found.append(kept + sum(int(getattr(a, "overflowed", 0)) for a in chain.values()))
    return tuple(found)


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
    file: GradientFile,
    index: Sequence[int],
    chains: Mapping[int, Chain],
    states: Mapping[str, State],
    *,
    kept: bool,
) -> None:
    """Hold a file that has just been written against itself before it takes its place.

    The checksums tell that the bytes are those that were handed over; this tells whether these were
    the right ones: rows of the samples `index`, and states of reducers that have counted as many
    samples as there are (all of them where `kept`, else the finite ones). What a reducer of the
    user's own has in its state is not known.

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
    own = {str(k) for k, chain in chains.items() if ".py:" in chain.text}
    for owner, state in states.items():
        n = None if owner in own else state.get("n")
        if isinstance(n, Tensor) and n.numel() == 1 and float(n) != right:
            raise OutputError(
                f"its aggregates are of {float(n):,.0f} samples, of {right:,} that there are",
                where=owner,
                remedy=_REPORT,
            )
