"""One pass over batches for several chains: each batch is evaluated, and added to their states.

Work that chains share is done once. The states are kept by an `Accumulator`.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from gradscope.backends.base import Request
from gradscope.blocks import DenseBlock, Evaluation, Gradients
from gradscope.core.batch import Batch, is_empty
from gradscope.engine.certificate import finite_samples
from gradscope.engine.session import Session
from gradscope.errors import CertificateError, DatasetError, NonFiniteError, SpecError
from gradscope.model.problem import Problem
from gradscope.stages.chain import Chain, reducer_of
from gradscope.stages.labels import LabelledBatch, chosen, over_labels, samples
from gradscope.stages.reducers.accumulator import Accumulator, depends_on_split
from gradscope.stages.reducers.base import State, carried_state
from gradscope.stages.transforms.base import NeedsProblem

Sink = Callable[[Batch, Evaluation], None]
Usable = tuple[Gradients, Problem, Batch]
K = TypeVar("K", bound=Hashable)


def fold(
    session: Session,
    batches: Iterable[Batch],
    chains: Mapping[K, Chain],
    sink: Sink | None = None,
    *,
    request: Request | None = None,
    ordinal: int | None = None,
    count: int | None = None,
) -> tuple[Accumulator[K], int]:
    """Evaluate batches and accumulate them by the reducers of chains.

    Args:
        session: Evaluates.
        batches: Of samples, one after the other; one without samples is left out.
        chains: With reducers, by any key.
        sink: Is given each batch with its evaluation, before it is reduced.
        request: What is asked of each batch, by the sink too; if None, what the chains ask.
        ordinal: The number of the first batch in its run; counted when not given.
        count: How many batches there are until the run ends, if it does: the last is audited.

    Returns:
        The states by key, and how many samples without a finite gradient were left out. After a
        single batch a state is as the reducer has made it, after several it is in float64.

    Raises:
        RefusedError: No backend has an exact, proved answer.
        NonFiniteError: A gradient is not finite, and that is to be an error.
    """
    every = [*chains.values()]
    asked = request_of(every) if request is None else request
    total, skipped = Accumulator({key: reducer_of(chain) for key, chain in chains.items()}), 0
    for k, batch in enumerate(batches):
        if is_empty(batch):
            continue  # it changes no state
        total.carry()
        number = None if ordinal is None else ordinal + k
        evaluation = session.evaluate(batch, asked, ordinal=number, last=k + 1 == count)
        if sink is not None:
            sink(batch, evaluation)
        starts, left_out = _states_after_batch(session, every, batch, evaluation)
        del evaluation  # before the next one
        total.add(dict(zip(chains, starts, strict=False)), carry=False)
        del starts
        skipped += left_out
    return total, skipped


def _states_after_batch(
    session: Session, chains: Sequence[Chain], batch: Batch, evaluation: Evaluation
) -> tuple[list[State], int]:
    """Return chains' states after one batch, none where no sample is usable; how many are not."""
    if session.labels.mode != "exact":
        found = _start_states_if_finite(chains, evaluation)
        if found is not None:
            return found, 0
    kept = usable(session, batch, evaluation)
    if kept is None:
        return [], len(batch)
    skipped = len(batch) - samples(kept[2])
    return _start_states(chains, {} if skipped else evaluation.states, *kept), skipped


def prepare_chains(
    session: Session,
    chains: Sequence[Chain],
    batches: Callable[[], Iterable[Batch]],
    batches_left: int | None = None,
) -> tuple[Chain, ...]:
    """Try reducers in parts, and run the earlier passes that chains need (`center`).

    All passes of one round are run in one.

    Args:
        session: Evaluates.
        chains: Any.
        batches: Starts a pass over the data.
        batches_left: How many batches are to come in all, if that is known.
    """
    for chain in chains:
        chain.prepare(session.problem)
    untried = [c for c in chains if c.reducer is not None and c.text not in session.checked_chains]
    for chain in untried if session.settings.verify != "never" else ():
        session.checked_chains.add(chain.text)
        found = depends_on_split(reducer_of(chain))
        what = f"samples in several batches have another result ({found}) than in one"
        if found is not None and ".py:" in chain.text:  # a user's own reducer is only named
            session.notes.append(f"{chain.text}: {what}: see its `merge`")
        elif found is not None:
            raise CertificateError(what, where=f"chain {chain.text!r}")
    ready = tuple(map(session.labels.chain, chains))
    while first := {c.text: c for c in (chain.first_pass for chain in ready) if c is not None}:
        session.notes += [f"an earlier pass over the data for: {text}" for text in first]
        passes = {text: session.labels.chain(chain) for text, chain in first.items()}
        asked = Request(batches_left=batches_left, factors=request_of(passes.values()).factors)
        total, _ = fold(session, batches(), passes, request=asked)
        total.carry()
        means: dict[str, dict[str, Tensor]] = {}
        for text, chain in first.items():
            merge_ranks(session.problem, total, text)
            if text in total.states:
                means[text] = chain.finish(total.result(text))
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
    reducer = reducer_of(chain)
    evaluates = any(isinstance(step, NeedsProblem) for step in chain.before)
    if reducer.additive and chain.first_pass is None and not evaluates:
        own = {name: p.detach() for name, p in problem.parameters.items()}
        zeros = {name: DenseBlock(p.new_zeros(1, *p.shape)) for name, p in own.items()}
        start = chain.start(Gradients(zeros, torch.zeros(1, dtype=torch.int64)))
        state = {key: torch.zeros_like(value) for key, value in start.items()}
        if all(bool(value.isfinite().all()) for value in reducer.result({**state}).values()):
            return state
    raise DatasetError(
        f"the batch holds no sample, and {chain.text!r} has no value without samples",
        remedy="Use the reducer sum, which is 0 then, and divide by the expected number of "
        "samples; or leave such batches out.",
    )


def merge_ranks(problem: Problem, total: Accumulator[K], key: K) -> None:
    """Add to a state the states of other processes, if several train the model together."""
    if problem.ranks is None:
        return
    own = total.pop(key)
    for state in problem.ranks.states(None if own is None else carried_state(own)):
        if state is not None:
            total.add({key: state})


def usable(session: Session, batch: Batch, evaluation: Evaluation) -> Usable | None:
    """Return what chains reduce of a batch: the samples with a finite gradient, or None."""
    labelled, asked = session.labels.of(batch), session.settings.nonfinite
    gradients = evaluation.gradients
    if isinstance(labelled, LabelledBatch):
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
            where=labelled.one(worst).description,
            remedy='Use nonfinite="skip" to leave such samples out, or nonfinite="keep".',
        )
    if not bool(finite.any()):
        return None
    kept, part = gradients.select(finite), chosen(labelled, finite.cpu())
    if isinstance(part, LabelledBatch):
        kept = kept.weighted(part.weights)
    return kept, session.problem, part


def request_of(
    chains: Iterable[Chain], *, batches_left: int | None = None, stored: bool = False
) -> Request:
    """Return what chains will ask of a batch, for a backend that can compute it along."""
    every = list(chains)
    known = {chain.key: chain for chain in every if chain.key is not None}
    transforms = {key: chain.transforms for key, chain in known.items()}

    def starts(keys: Sequence[str], gradients: Gradients) -> dict[str, State]:
        found = _starts([known[k] for k in keys], [transforms[k] for k in keys], gradients)
        return dict(zip(keys, found, strict=True))

    rows = any(chain.key is None for chain in every)
    factors = any(chain.reducer is not None and chain.reducer.raw for chain in every)
    return Request(
        rows, tuple(known), starts, stored=stored, batches_left=batches_left, factors=factors
    )


def _start_states_if_finite(chains: Sequence[Chain], evaluation: Evaluation) -> list[State] | None:
    """Return the states after one batch, or None: they do not show that all of it is finite.

    A sum over samples is finite only if every one of them is, and so are norms. What has to be
    computed anyway then tells, and the gradients need not be looked through beforehand.
    """
    gradients = evaluation.gradients
    if not all(chain.tells for chain in chains) or not evaluation.losses.isfinite().all():
        return None
    if gradients.has_norms and not bool(gradients.norms.isfinite().all()):
        return None
    found = _start_states(chains, evaluation.states, gradients)
    if gradients.has_norms:
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


def _start_states(
    chains: Sequence[Chain],
    computed: Mapping[str, State],
    gradients: Gradients,
    problem: Problem | None = None,
    batch: Batch | None = None,
) -> list[State]:
    """Return chains' states after a batch of raw gradients, of which some are `computed`."""
    starts = [computed.get(chain.key or "") for chain in chains]
    missing = [chain for chain, start in zip(chains, starts, strict=True) if start is None]
    transforms = [chain.transforms for chain in missing]
    made = iter(_starts(missing, transforms, gradients, problem, batch))
    return [next(made) if start is None else {**start} for start in starts]


def _starts(
    chains: Sequence[Chain],
    transforms: Sequence[tuple[str, ...]],
    gradients: Gradients,
    problem: Problem | None = None,
    batch: Batch | None = None,
) -> list[State]:
    """Return the states after one batch; chains with the same transforms share their rows."""
    powers: dict[tuple[str, ...], frozenset[int]] = {}
    for chain, text in zip(chains, transforms, strict=True):
        powers[text] = powers.get(text, frozenset()) | reducer_of(chain).powers
    rows: dict[tuple[str, ...], Gradients] = {}
    found: list[State] = []
    done: dict[str, State] = {}  # by text: a chain that is asked for twice is computed once
    for chain, text in zip(chains, transforms, strict=True):
        if text not in rows:
            rows[text] = chain.rows(gradients, problem, batch).with_powers(powers[text])
        known = done.get(chain.text) if chain.lasting else None
        found.append(reducer_of(chain).start(rows[text]) if known is None else {**known})
        done[chain.text] = found[-1]
    return found
