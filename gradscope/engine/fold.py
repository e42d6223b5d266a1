"""A pass over batches for several chains: each batch is evaluated and added to their states.

Work that chains share is done once. An `Accumulator` holds the states.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from gradscope.backends.base import Request
from gradscope.blocks import DenseBlock, Evaluation, Gradients
from gradscope.core.batch import Batch, is_empty
from gradscope.core.precision import all_finite
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
Start = State | Callable[[State], State]  # a batch's state, or a function that adds it to a state


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
    """Evaluate batches and accumulate them with the reducers of chains.

    Args:
        session: Evaluates the batches.
        batches: Batches of samples; empty batches are skipped.
        chains: {key: chain with a reducer}.
        sink: Called with each batch and its evaluation before it is reduced.
        request: The request for each batch, including the sink's; by default the chains' request.
        ordinal: The number of the first batch in its run; counted if not given.
        count: The number of batches until the end of the run, whose last batch is audited.

    Returns:
        The states by key, and the number of skipped samples without a finite gradient. After a
        single batch, a state has the reducer's dtypes; after several batches, it is in float64.

    Raises:
        RefusedError: No backend gives an exact, proved result.
        NonFiniteError: A gradient is not finite, with nonfinite="fail".
    """
    every = [*chains.values()]
    asked = request_of(every) if request is None else request
    total, skipped = Accumulator({key: reducer_of(chain) for key, chain in chains.items()}), 0
    for k, batch in enumerate(batches):
        if is_empty(batch):
            continue
        total.carry()
        number = None if ordinal is None else ordinal + k
        evaluation = session.evaluate(batch, asked, ordinal=number, last=k + 1 == count)
        if sink is not None:
            sink(batch, evaluation)
        starts, left_out = _states_after_batch(session, every, batch, evaluation)
        del evaluation  # release memory before the next evaluation
        _add(total, dict(zip(chains, starts, strict=False)))
        del starts  # functions hold the gradients
        skipped += left_out
    return total, skipped


def _add(total: Accumulator[K], starts: Mapping[K, Start]) -> None:
    """Add what the chains have for a batch."""
    total.add({k: start for k, start in starts.items() if isinstance(start, dict)}, carry=False)
    for key, start in starts.items():
        if not isinstance(start, dict):
            total.update(key, start)


def _states_after_batch(
    session: Session, chains: Sequence[Chain], batch: Batch, evaluation: Evaluation
) -> tuple[list[Start], int]:
    """Return what chains add for one batch (nothing if no sample is usable), and the skipped."""
    if session.labels.mode != "exact":
        found = _start_states_if_finite(chains, evaluation)
        if found is not None:
            return [*found], 0
    kept = usable(session, batch, evaluation)
    if kept is None:
        return [], len(batch)
    skipped = len(batch) - samples(kept[2])
    adds = [reducer_of(chain).add for chain in chains]
    others = [chain for chain, add in zip(chains, adds, strict=True) if add is None]
    states = iter(_start_states(others, {} if skipped else evaluation.states, *kept))
    starts: list[Start] = []
    for chain, add in zip(chains, adds, strict=True):
        starts.append(next(states) if add is None else partial(add, chain.rows(*kept)))
    return starts, skipped


def prepare_chains(
    session: Session,
    chains: Sequence[Chain],
    batches: Callable[[], Iterable[Batch]],
    batches_left: int | None = None,
) -> tuple[Chain, ...]:
    """Check reducers on split samples, and run the earlier passes that chains need (`center`).

    Chains that need an earlier pass at the same stage share it.

    Args:
        session: Evaluates the batches.
        chains: Any chains.
        batches: Returns a new iterator over the data.
        batches_left: The number of batches of the run, if known.

    Raises:
        CertificateError: A reducer's result depends on how samples are split into batches.
        SpecError: No sample has a finite gradient in an earlier pass.
    """
    for chain in chains:
        if session.settings.group is not None:
            _require_rows_only(chain)
        chain.prepare(session.problem)
    untried = [c for c in chains if c.reducer is not None and c.text not in session.checked_chains]
    for chain in untried if session.settings.verify != "never" else ():
        session.checked_chains.add(chain.text)
        found = depends_on_split(reducer_of(chain))
        what = f"the result ({found}) changes when the same samples are split into batches"
        if found is not None and ".py:" in chain.text:  # only a note for a user's reducer
            session.notes.append(f"{chain.text}: {what}: check its `merge`")
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
            raise SpecError(
                "no sample has a finite gradient, so the earlier pass over the data has no result"
            )
        ready = tuple(
            chain
            if chain.first_pass is None
            else chain.given(means[chain.first_pass.text], rehearsed=session.rehearses)
            for chain in ready
        )
    notes = (chain.reducer.note for chain in ready if chain.reducer is not None)
    session.notes += [note for note in notes if note and note not in session.notes]
    return ready


def _require_rows_only(chain: Chain) -> None:
    """Raise if a chain needs more than the rows of groups."""
    if any(isinstance(step, NeedsProblem) for step in chain.before):
        what = "has a stage that evaluates the model for each sample"
    elif chain.reducer is not None and chain.reducer.raw:
        what = "has a reducer that needs the layers' inputs of each sample"
    else:
        return
    raise SpecError(
        f"the chain {chain.text!r} {what}, but the rows are groups",
        where="group",
        remedy="Compute this chain without group.",
    )


def state_of_none(problem: Problem, chain: Chain) -> State:
    """Return a chain's state without samples: zeros, if its reducer computes sums.

    Raises:
        DatasetError: The result is not defined without samples, such as a mean.
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
        f"the batch is empty, and {chain.text!r} has no value without samples",
        remedy="Use the reducer sum, which is 0 for an empty batch, and divide by the expected "
        "number of samples; or skip empty batches.",
    )


def merge_ranks(problem: Problem, total: Accumulator[K], key: K) -> None:
    """Add the states of other processes to a state, if several processes train the model."""
    if problem.ranks is None:
        return
    own = total.pop(key)
    for state in problem.ranks.states(None if own is None else carried_state(own)):
        if state is not None:
            total.add({key: state})


def usable(session: Session, batch: Batch, evaluation: Evaluation) -> Usable | None:
    """Return the samples with a finite gradient, which chains reduce, or None.

    Raises:
        NonFiniteError: A gradient is not finite, with nonfinite="fail".
    """
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
            "the gradient is not finite",
            where=labelled.one(worst).description,
            remedy='Use nonfinite="skip" to skip such samples, or nonfinite="keep" to keep them.',
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
    """Return the request of chains for a batch; a backend may compute it with the gradients."""
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
    """Return the states after one batch, or None if they do not show that all is finite.

    A sum over samples is finite only if all samples are finite, and the same holds for norms. So
    finite states replace a separate check of the gradients.
    """
    gradients = evaluation.gradients
    if not all(chain.tells for chain in chains) or not all_finite(evaluation.losses):
        return None
    checked = gradients.has_norms
    if checked and not all_finite(gradients.norms):
        return None
    found = _start_states(chains, evaluation.states, gradients)
    if gradients.has_norms:
        return found if checked or all_finite(gradients.norms) else None
    raw = (state for chain, state in zip(chains, found, strict=True) if not chain.before)
    sums = next(raw, None)
    if sums is None:
        return None
    shown = torch.stack([value.sum().abs() for value in sums.values()])
    dtypes = {torch.promote_types(block.dtype, torch.float32) for block in gradients.values()}
    # the square of a larger number would overflow in a norm
    limit = min(torch.finfo(dtype).max for dtype in dtypes) ** 0.5
    return found if bool((shown < limit).all()) else None


def _start_states(
    chains: Sequence[Chain],
    computed: Mapping[str, State],
    gradients: Gradients,
    problem: Problem | None = None,
    batch: Batch | None = None,
) -> list[State]:
    """Return chains' states after a batch of raw gradients; `computed` has some of them."""
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
    done: dict[str, State] = {}  # {text: state}: a chain given twice is computed once
    for chain, text in zip(chains, transforms, strict=True):
        if text not in rows:
            rows[text] = chain.rows(gradients, problem, batch).with_powers(powers[text])
        known = done.get(chain.text) if chain.lasting else None
        found.append(reducer_of(chain).start(rows[text]) if known is None else {**known})
        done[chain.text] = found[-1]
    return found
