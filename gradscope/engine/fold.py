"""One pass over batches for several chains: each batch is evaluated, and added to their states.

What chains share is done once. Sums are taken in the gradients' own precision within a batch, and
carried in float64 from batch to batch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradscope.backends.base import Request
from gradscope.blocks import DenseBlock, Evaluation, Gradients
from gradscope.core.batch import Batch, is_empty
from gradscope.engine.certificate import finite_samples
from gradscope.engine.session import Session
from gradscope.errors import CertificateError, DatasetError, NonFiniteError, SpecError
from gradscope.model.problem import Problem
from gradscope.stages.chain import Chain
from gradscope.stages.labels import Expanded, chosen, over_labels, samples
from gradscope.stages.reducers.base import (
    State,
    add_in_place,
    carried_state,
    depends_on_split,
    taken_over,
)
from gradscope.stages.transforms.base import NeedsProblem

Sink = Callable[[Batch, Evaluation], None]
Usable = tuple[Gradients, Problem, Batch]
Way = tuple[str, ...]


@dataclass(frozen=True)
class Folded:
    """What a pass over batches has found."""

    states: list[State | None]  # of each chain, None where no sample was usable
    skipped: int = 0  # samples without a finite gradient, which were left out
    dtypes: Sequence[dict[str, torch.dtype]] = ()  # of each chain's sums of the first batch


def fold(
    session: Session,
    batches: Iterable[Batch],
    chains: Sequence[Chain],
    sink: Sink | None = None,
    *,
    request: Request | None = None,
    ordinal: int | None = None,
    count: int | None = None,
) -> Folded:
    """Evaluate batches, and add each to the states of chains.

    Args:
        session: Evaluates.
        batches: Of samples, one after the other; one without samples is left out.
        chains: With reducers.
        sink: Is given each batch with its evaluation, before it is reduced.
        request: What is asked of each batch, by the sink too; if None, what the chains ask.
        ordinal: The number of the first batch in its run; counted when not given.
        count: How many batches there are until the run ends, if it does: the last is audited.

    Raises:
        RefusedError: No backend has an exact, proved answer.
        NonFiniteError: A gradient is not finite, and that is to be an error.
    """
    asked = request_of(chains) if request is None else request
    found = Folded([None] * len(chains), dtypes=[{}] * len(chains))
    own: set[int] = set()  # states that nobody else holds, to which batches are added in place
    for k, batch in enumerate(batches):
        if is_empty(batch):
            continue  # it changes no state
        _take_over(chains, found.states, own)
        number = None if ordinal is None else ordinal + k
        evaluation = session.evaluate(batch, asked, ordinal=number, last=k + 1 == count)
        if sink is not None:
            sink(batch, evaluation)
        starts, skipped = _after(session, chains, batch, evaluation)
        del evaluation  # before the next one
        dtypes = found.dtypes
        if starts and not any(dtypes):
            dtypes = [{key: v.dtype for key, v in start.items()} for start in starts]
        _add(chains, found.states, starts, own)
        del starts
        found = Folded(found.states, found.skipped + skipped, dtypes)
    return found


def _after(
    session: Session, chains: Sequence[Chain], batch: Batch, evaluation: Evaluation
) -> tuple[list[State], int]:
    """Return chains' states after one batch, none where no sample is usable; how many are not."""
    if session.labels.mode != "exact":
        found = _started_if_finite(chains, evaluation)
        if found is not None:
            return found, 0
    kept = usable(session, batch, evaluation)
    if kept is None:
        return [], len(batch)
    skipped = len(batch) - samples(kept[2])
    return _started(chains, {} if skipped else evaluation.states, *kept), skipped


def _take_over(chains: Sequence[Chain], states: list[State | None], own: set[int]) -> None:
    """Carry sums of a first batch by themselves, in which the gradients' memory may be."""
    for k, chain in enumerate(chains):
        state = states[k]
        assert chain.reducer is not None
        if state is not None and chain.reducer.additive and k not in own:
            states[k] = taken_over(state)
            own.add(k)


def _add(
    chains: Sequence[Chain], states: list[State | None], starts: Sequence[State], own: set[int]
) -> None:
    """Add the states after one batch to those so far; to those in `own` in place."""
    for k, start in enumerate(starts):
        state, reducer = states[k], chains[k].reducer
        assert reducer is not None
        if state is None:
            states[k] = start
        elif k in own:
            add_in_place(state, start)
        else:
            states[k] = reducer.merge(state, start)


def settled(
    session: Session,
    chains: Sequence[Chain],
    batches: Callable[[], Iterable[Batch]],
    left: int | None = None,
) -> tuple[Chain, ...]:
    """Try reducers in parts, and run the earlier passes that chains need (`center`).

    All passes of one round are run in one.

    Args:
        session: Evaluates.
        chains: Any.
        batches: Starts a pass over the data.
        left: How many batches are to come in all, if that is known.
    """
    for chain in chains:
        chain.prepare(session.problem)
    untried = [c for c in chains if c.reducer is not None and c.text not in session.tried]
    for chain in untried if session.settings.verify != "never" else ():
        assert chain.reducer is not None
        session.tried.add(chain.text)
        found = depends_on_split(chain.reducer)
        told = f"samples in several batches have another result ({found}) than in one"
        if found is not None and ".py:" in chain.text:  # a user's own reducer is only named
            session.notes.append(f"{chain.text}: {told}: see its `merge`")
        elif found is not None:
            raise CertificateError(told, where=f"chain {chain.text!r}")
    ready = tuple(map(session.labels.chain, chains))
    while first := {c.text: c for c in (chain.first_pass for chain in ready) if c is not None}:
        session.notes += [f"an earlier pass over the data for: {text}" for text in first]
        passes = [session.labels.chain(chain) for chain in first.values()]
        asked = Request(left=left, factors=request_of(passes).factors)
        states = fold(session, batches(), passes, request=asked).states
        means: dict[str, dict[str, Tensor]] = {}
        for text, chain in first.items():
            # let go of: it may be as large as its result
            state = over_ranks(session.problem, chain, states.pop(0))
            if state is not None:
                state = carried_state(state)
                means[text] = chain.taken_result(state)
        if not means:
            raise SpecError("no sample has a finite gradient, so there is nothing to start from")
        ready = tuple(
            chain
            if chain.first_pass is None
            else chain.given(means[chain.first_pass.text], rehearsed=session.rehearses)
            for chain in ready
        )
    notes = (chain.reducer.note for chain in ready if chain.reducer is not None)
    session.notes += [note for note in notes if note and note not in session.notes]
    return ready


def state_of_none(problem: Problem, chain: Chain) -> State:
    """Return a chain's state of no sample: zeros, where its reducer takes sums over samples.

    Raises:
        DatasetError: Its result is not defined then, such as a mean.
    """
    reducer = chain.reducer
    assert reducer is not None
    evaluates = any(isinstance(step, NeedsProblem) for step in chain.before)
    if reducer.additive and chain.first_pass is None and not evaluates:
        own = {name: p.detach() for name, p in problem.parameters.items()}
        zeros = {name: DenseBlock(p.new_zeros(1, *p.shape)) for name, p in own.items()}
        rows = chain.rows(Gradients(zeros, torch.zeros(1, dtype=torch.int64)))
        start = reducer.start(rows.asked(reducer.powers))
        state = {key: torch.zeros_like(value) for key, value in start.items()}
        if all(bool(value.isfinite().all()) for value in reducer.result({**state}).values()):
            return state
    raise DatasetError(
        f"the batch holds no sample, and {chain.text!r} has no value without samples",
        remedy="Use the reducer sum, which is 0 then, and divide by the expected number of "
        "samples; or leave such batches out.",
    )


def over_ranks(problem: Problem, chain: Chain, state: State | None) -> State | None:
    """Return a chain's state over the samples of all processes that train a model together."""
    if problem.ranks is None:
        return state
    assert chain.reducer is not None
    found: State | None = None
    for other in problem.ranks.states(None if state is None else carried_state(state)):
        if other is not None:
            found = other if found is None else carried_state(chain.reducer.merge(found, other))
    return found


def usable(session: Session, batch: Batch, evaluation: Evaluation) -> Usable | None:
    """Return what chains reduce of a batch: the samples with a finite gradient, or None."""
    labelled, asked = session.labels.of(batch), session.settings.nonfinite
    gradients = evaluation.gradients
    if isinstance(labelled, Expanded):
        gradients = gradients.weighted(labelled.weights)
    if asked == "keep":
        return gradients, session.problem, labelled
    finite = over_labels(finite_samples(evaluation), labelled)
    if bool(finite.all()):
        return gradients, session.problem, labelled
    if asked == "fail":
        worst = int((~finite).nonzero()[0])
        raise NonFiniteError(
            "its gradient is not finite",
            where=labelled.one(worst).told,
            remedy='Use nonfinite="skip" to leave such samples out, or nonfinite="keep".',
        )
    if not bool(finite.any()):
        return None
    kept, part = gradients.select(finite), chosen(labelled, finite.cpu())
    if isinstance(part, Expanded):
        kept = kept.weighted(part.weights)
    return kept, session.problem, part


def request_of(
    chains: Iterable[Chain], *, left: int | None = None, stored: bool = False
) -> Request:
    """Return what chains will ask of a batch, for a backend that can compute it along."""
    every = list(chains)
    known = {chain.key: chain for chain in every if chain.key is not None}
    ways = {key: chain.way for key, chain in known.items()}

    def starts(keys: Sequence[str], gradients: Gradients) -> dict[str, State]:
        found = _starts([known[k] for k in keys], [ways[k] for k in keys], gradients)
        return dict(zip(keys, found, strict=True))

    rows = any(chain.key is None for chain in every)
    factors = any(chain.reducer is not None and chain.reducer.raw for chain in every)
    return Request(rows, tuple(known), starts, stored=stored, left=left, factors=factors)


def _started_if_finite(chains: Sequence[Chain], evaluation: Evaluation) -> list[State] | None:
    """Return the states after one batch, or None: they do not show that all of it is finite.

    A sum over samples is finite only if every one of them is, and so are norms. What has to be
    computed anyway then tells, and the gradients need not be looked through beforehand.
    """
    gradients = evaluation.gradients
    if not all(chain.tells for chain in chains) or not evaluation.losses.isfinite().all():
        return None
    if gradients.norms_known and not bool(gradients.norms.isfinite().all()):
        return None
    found = _started(chains, evaluation.states, gradients)
    if gradients.norms_known:
        return found if bool(gradients.norms.isfinite().all()) else None
    raw = (state for chain, state in zip(chains, found, strict=True) if not chain.before)
    sums = next(raw, None)
    if sums is None:
        return None
    shown = torch.stack([value.sum().abs() for value in sums.values()])
    dtypes = {torch.promote_types(block.dtype, torch.float32) for block in gradients.values()}
    # beyond the root of the largest number a norm is no longer finite
    limit = min(torch.finfo(dtype).max for dtype in dtypes) ** 0.5
    return found if bool((shown < limit).all()) else None


def _started(
    chains: Sequence[Chain],
    computed: Mapping[str, State],
    gradients: Gradients,
    problem: Problem | None = None,
    batch: Batch | None = None,
) -> list[State]:
    """Return chains' states after a batch of raw gradients, of which some are `computed`."""
    starts = [computed.get(chain.key or "") for chain in chains]
    missing = [chain for chain, start in zip(chains, starts, strict=True) if start is None]
    made = iter(_starts(missing, [chain.way for chain in missing], gradients, problem, batch))
    return [next(made) if start is None else {**start} for start in starts]


def _starts(
    chains: Sequence[Chain],
    ways: Sequence[Way],
    gradients: Gradients,
    problem: Problem | None = None,
    batch: Batch | None = None,
) -> list[State]:
    """Return the states after one batch; chains of one way share what happens to each sample."""
    powers: dict[Way, frozenset[int]] = {}
    for chain, way in zip(chains, ways, strict=True):
        assert chain.reducer is not None
        powers[way] = powers.get(way, frozenset()) | chain.reducer.powers
    rows: dict[Way, Gradients] = {}
    found: list[State] = []
    done: dict[str, State] = {}  # by text: a chain that is asked for twice is computed once
    for chain, way in zip(chains, ways, strict=True):
        assert chain.reducer is not None
        if way not in rows:
            rows[way] = chain.rows(gradients, problem, batch).asked(powers[way])
        known = done.get(chain.text) if chain.lasting else None
        found.append(chain.reducer.start(rows[way]) if known is None else {**known})
        done[chain.text] = found[-1]
    return found
