"""One pass over the data for several chains: what they share is done once."""

from collections.abc import Iterable, Sequence

import torch

from gradscope.backends.compiled import Wanted
from gradscope.blocks import Evaluation, Gradients
from gradscope.core.batch import Batch
from gradscope.core.problem import Problem
from gradscope.stages.chain import Chain
from gradscope.stages.reducers import State


def updated(
    chains: Sequence[Chain],
    states: Sequence[State | None],
    gradients: Gradients,
    problem: Problem | None = None,
    batch: Batch | None = None,
) -> list[State]:
    """Add a batch of raw gradients to several chains' states; what chains share is done once.

    Args:
        chains: With reducers.
        states: As many (None: nothing seen yet).
        gradients: Raw.
        problem: What they were computed from.
        batch: The samples.
    """
    starts = [gradients.computed(chain.key) for chain in chains]
    missing = [chain for chain, start in zip(chains, starts, strict=True) if start is None]
    made = iter(_starts(missing, [chain.way for chain in missing], gradients, problem, batch))
    found = []
    for chain, state, start in zip(chains, states, starts, strict=True):
        assert chain.reducer is not None
        own = next(made) if start is None else start
        found.append(own if state is None else chain.reducer.merge(state, own))
    return found


def updated_if_finite(
    chains: Sequence[Chain], states: Sequence[State | None], evaluation: Evaluation
) -> list[State] | None:
    """Return the states with a batch added, or None: they do not show that all of it is finite.

    A sum over samples is finite only if every one of them is, and so are norms. What has to be
    computed anyway then tells, and the gradients need not be looked through beforehand.

    Args:
        chains: With reducers.
        states: As many (None: nothing seen yet).
        evaluation: Of the batch.
    """
    if not all(chain.tells for chain in chains) or not evaluation.losses.isfinite().all():
        return None
    gradients = evaluation.gradients
    found = updated(chains, states, gradients)
    raw = (state for chain, state in zip(chains, found, strict=True) if not chain.before)
    sums = next(raw, None)
    if gradients.norms_known:
        return found if bool(gradients.norms.isfinite().all()) else None
    if sums is None:
        return None
    shown = torch.stack([value.sum().abs() for value in sums.values()])
    dtypes = {torch.promote_types(block.dtype, torch.float32) for block in gradients.values()}
    # beyond the root of the largest number a norm is no longer finite
    limit = min(torch.finfo(dtype).max for dtype in dtypes) ** 0.5
    return found if bool((shown < limit).all()) else None


def wanted(chains: Iterable[Chain]) -> Wanted:
    """Return what chains will ask of a batch, for a backend that can compute it along."""
    every = list(chains)
    known = {chain.key: chain for chain in every if chain.key is not None}
    ways = {key: chain.way for key, chain in known.items()}

    def starts(keys: Sequence[str], gradients: Gradients) -> dict[str, State]:
        found = _starts([known[k] for k in keys], [ways[k] for k in keys], gradients)
        return dict(zip(keys, found, strict=True))

    rows = any(chain.key is None for chain in every)
    return Wanted(rows, tuple(known), starts)


def _starts(
    chains: Sequence[Chain],
    ways: Sequence[tuple[str, ...]],
    gradients: Gradients,
    problem: Problem | None = None,
    batch: Batch | None = None,
) -> list[State]:
    """Return the states after one batch; chains of one way share what happens to each sample."""
    powers: dict[tuple[str, ...], frozenset[int]] = {}
    for chain, way in zip(chains, ways, strict=True):
        assert chain.reducer is not None
        powers[way] = powers.get(way, frozenset()) | chain.reducer.powers
    rows: dict[tuple[str, ...], Gradients] = {}
    found: list[State] = []
    done: dict[str, State] = {}  # by text: a chain that is asked for twice is computed once
    for chain, way in zip(chains, ways, strict=True):
        assert chain.reducer is not None
        if way not in rows:
            rows[way] = chain.rows(gradients, problem, batch).asked(powers[way])
        known = done.get(chain.text) if chain.lasting else None
        found.append(chain.reducer.start(rows[way]) if known is None else known)
        done[chain.text] = found[-1]
    return found


def waiting(chains: Iterable[Chain]) -> dict[str, Chain]:
    """Return the first passes that chains wait for, each once."""
    found = (chain.first_pass for chain in chains)
    return {chain.text: chain for chain in found if chain is not None}
