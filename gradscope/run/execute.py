"""Execution of a run: it computes batches and writes them to a result file."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradscope.blocks import Evaluation, Tuner
from gradscope.core.batch import Batch, Tokens
from gradscope.core.groups import Groups
from gradscope.core.texts import unequal
from gradscope.engine.audit import Audits
from gradscope.engine.certificate import finite_samples
from gradscope.engine.chains import bind
from gradscope.engine.fold import fold
from gradscope.engine.session import Session
from gradscope.errors import (
    CertificateError,
    GradscopeError,
    NonFiniteError,
    OutputError,
    RefusedError,
    ResultFileError,
)
from gradscope.model.ranks import OtherProcessError
from gradscope.run.job import Job
from gradscope.run.outcome import (
    COUNTS,
    MEAN_GRADIENT,
    NONFINITE,
    RunReport,
    mean_gradient_norms,
    nonfinite_of_file,
    nonfinite_of_rows,
    require_written,
    results_of,
)
from gradscope.run.overlap import BatchSize, BatchWriter, prefetch
from gradscope.stages.chain import Chain, reducer_of
from gradscope.stages.labels import mean_loss, mean_norm
from gradscope.stages.reducers.accumulator import Accumulator
from gradscope.stages.reducers.base import State
from gradscope.stats import parameter_rows, require_consistent
from gradscope.storage import FinishedBatch, GradientFile, open_file, writing

PROGRESS = "progress"  # key of `Progress` among the reducers' states of an unfinished file
REPRODUCED = {  # allowed relative difference of a sample's recomputed numbers
    torch.float64: 1e-6,
    torch.float32: 1e-3,
    torch.bfloat16: 5e-2,
    torch.float16: 5e-2,
}
_NOT_VERIFIED = {"verified": False, "verdict": "not asked for (verify = never)"}
_MEAN = bind("mean")
_FEW = 64  # samples of the first batch that a resumed run must reproduce
_SMALL_STATES = 2**24  # a dense file stores reducers' states up to this size, for merging


@dataclass(frozen=True)
class Progress:
    """The data of a stopped run that a resumed run needs, without rows and reducers' states."""

    batch_size: int | None = None
    certificate: Mapping[str, Any] | None = None  # the proof so far, with its audits
    first: tuple[tuple[float, ...], tuple[float, ...]] | None = None  # see `first_of`
    choices: Mapping[str, str] | None = None  # chosen kernel variants, after the first batch

    def to_state(self) -> State:
        """Return the progress as a tensor of bytes."""
        text = json.dumps(vars(self)).encode()
        return {"json": torch.frombuffer(bytearray(text), dtype=torch.uint8)}

    def audits(self, done: int) -> Audits:
        """Return the audits of the first `done` samples."""
        kept = (self.certificate or {}).get("audit")
        if kept is not None:
            return Audits.of_json(kept)
        return Audits(batches=-(-done // self.batch_size) if self.batch_size else 0)

    @classmethod
    def of(cls, states: Mapping[str, State]) -> "Progress":
        """Return the progress stored by `to_state` in the states of an unfinished file."""
        kept = states.get(PROGRESS)
        return cls() if kept is None else cls(**json.loads(bytes(kept["json"].tolist())))


@dataclass
class Run:
    """A run in progress; leaving it before `finish` keeps the written rows."""

    job: Job
    chains: tuple[Chain, ...]  # the chains, after their earlier passes
    path: Path
    writer: BatchWriter
    size: BatchSize
    start_time: float = 0.0  # on the performance counter
    notes: tuple[str, ...] = ()  # notes from before the start
    before: InitVar[Mapping[str, State] | None] = None  # the reducers' states of a stopped run
    progress: Progress = Progress()
    tuner: Tuner = field(default_factory=lambda: Tuner(measures=False))
    record: dict[str, Any] = field(default_factory=dict)  # the description of the run in the file
    done: int = 0  # samples computed
    returns: int = 0  # how often the run returned to the last proved batch to change the backend

    def __post_init__(self, before: Mapping[str, State] | None) -> None:
        self.total = self._accumulator(before or {})

    @property
    def warnings(self) -> list[str]:
        """Notes about the loss's inputs, and about gradients that are all zero."""
        return [*self.job.session.warnings, *self.job.session.zeros]

    def remaining(self) -> Iterator[Batch]:
        """Yield the batches that are not computed yet."""
        while self.done < len(self.job.rows):
            returns = self.returns
            for batch in batches(self.job, self.size, self.done):
                yield batch
                if self.returns != returns:
                    break

    def add(self, batch: Batch) -> None:
        """Compute one batch and append it, in parts if memory runs out.

        If an audit fails and `auto` has a further backend, the run returns to the last proved
        batch, and `remaining` yields the batches after it.
        """
        left, returns = batch, self.returns
        while len(left) and self.returns == returns:
            try:
                done = self.size.fitting(partial(self._add, left), left.work)
                left = left.select(slice(done, None))
            except RefusedError as error:
                if isinstance(error, OtherProcessError):  # the error is in another process
                    raise
                self._go_back(error)

    def _go_back(self, error: RefusedError) -> None:
        """Return to the last proved batch; raise `error` unless a further backend can continue."""
        if not self.done:
            raise error
        stopped = self.done
        self.done, kept = self.writer.go_back()
        self.total = self._accumulator(without_progress(kept))
        self.progress = replace(Progress.of(kept), batch_size=self.size.samples)
        self.job.session.auditor.audits = self.progress.audits(self.done)
        self.returns += 1
        if not (isinstance(error, CertificateError) and self.job.session.has_fallback):
            proved = f"The first {self.done:,} samples were" if self.done else "No sample was"
            error.remedy = f"{error.remedy}\n{proved} proved before; only proved samples are kept."
            raise error
        self.job.session.notes.append(
            f"{error}".partition("\n")[0]
            + f"; a different backend computed all samples from {self.done:,} on (the audit failed "
            f"after sample {stopped:,})"
        )

    def finish(self) -> RunReport:
        """Write the aggregates, verify the file and rename it to its final path."""
        seen: list[RunReport] = []
        self.writer.wait()  # it may still use the states, which are released here
        states = self.states
        size = sum(t.nbytes for state in states.values() for t in state.values())
        kept = keeps_states(self.job, size)
        norms = mean_gradient_norms(states, self.job.shapes)
        if not kept and MEAN_GRADIENT in states:
            states[MEAN_GRADIENT] = {"n": states[MEAN_GRADIENT]["n"]}
        chains = dict(enumerate(self.chains))
        results, counts, self.total.states = results_of(chains, states, keep_states=kept)
        self._judge(counts)
        self.writer.finish(
            results=results,
            certificate=self.progress.certificate or _NOT_VERIFIED,
            norm_attributes=norms,
            states=self.states if kept else {},
            look=lambda file: seen.append(self._check_file(file)),
        )
        if not seen:  # the file was complete before
            with open_file(self.path) as file:
                seen.append(self._report(file, aggregates=True))
        with writing(self.path):
            size = self.path.stat().st_size
        more = {"bytes": size, "seconds": time.perf_counter() - self.start_time}
        return seen[0].model_copy(update=more)

    def _check_file(self, file: GradientFile) -> RunReport:
        """Raise if the finished file's numbers are inconsistent; return its report."""
        chains, nonfinite = dict(enumerate(self.chains)), self.job.session.settings.nonfinite
        require_written(file, self.job.rows, chains, self.states, nonfinite=nonfinite)
        try:
            require_consistent(file, self.job.session.settings.seed)
        except ResultFileError as error:
            raise OutputError(
                f"the numbers in the written file are inconsistent: {error.what}",
                where=str(self.path),
                remedy="Run gradscope compute again with --overwrite. If the error occurs again, "
                "it is a bug in gradscope: please report it.",
            ) from error
        return self._report(file, aggregates=False)

    def _report(self, file: GradientFile, *, aggregates: bool) -> RunReport:
        session, certificate = self.job.session, dict(file.certificate)
        finite = np.asarray(file.samples["finite"], dtype=bool)
        notes = (*self.job.notes, *self.notes, *session.notes, *self.size.notes)
        own = {int(k): int(n) for k, n in self.states.get(NONFINITE, {}).items()}
        found = enumerate(nonfinite_of_file(file, aggregates=aggregates))
        return RunReport(
            parameters=parameter_rows(file, finite),
            certificate=certificate,
            backend=str(certificate.get("backend", session.backend)),
            notes=tuple(dict.fromkeys(notes)),
            samples=len(self.job.rows),
            nonfinite=int((~finite).sum()),
            chains_nonfinite=tuple(max(n, own.get(k, 0)) for k, n in found),
            seconds=0.0,
            path=str(self.path),
            chains=tuple(chain.text for chain in self.job.chains),
            audits=session.auditor.audits.text if session.settings.verify == "audit" else None,
            noun=self.job.noun,
        )

    def _add(self, batch: Batch, n: int) -> int:
        """Compute and append the first rows of a batch, of n samples or tokens; return how many.

        An error leaves the run unchanged.
        """
        part = batch.head(n)
        rows, states = self.reduce_batch(part, samples_left=len(self.job.rows) - self.done)
        self.writer.wait()  # it may still use the states, which change here
        self.total.add(states)
        if self._sum_owner in self.states:
            self.states[MEAN_GRADIENT] = self.states[self._sum_owner]
        choices = self.tuner.freeze()  # after the first batch; stored for a resumed run
        self.record["kernels"] = choices
        self.progress = Progress(
            batch_size=self.size.samples,
            certificate=self._proof(),
            first=self.progress.first or first_of(rows),
            choices=choices,
        )
        progress = {PROGRESS: self.progress.to_state()}
        self.writer.append(rows, self.states | progress, proved=self.job.session.last_is_proved)
        self.done += len(part)
        return len(part)

    def reduce_batch(
        self, batch: Batch, samples_left: int
    ) -> tuple[FinishedBatch, dict[str, State]]:
        """Compute a batch; return its rows, and its states by owner.

        Args:
            batch: Any samples.
            samples_left: The number of remaining samples, including the batch.
        """
        made: list[tuple[FinishedBatch, State]] = []

        def sink(batch: Batch, evaluation: Evaluation) -> None:
            rows = rows_of(self.job, self.chains, batch, evaluation)
            made.append((rows, self._count_nonfinite(rows)))

        n = len(batch)
        found, _ = fold(
            self.job.session,
            [batch],
            self._reducing_chains,
            sink,
            request=self.job.request(batches_left=-(-samples_left // n)),
            ordinal=self.job.work(0, self.done) // (self.progress.batch_size or batch.work),
            count=1 if n == samples_left else None,
        )
        ((rows, overflowed),) = made
        return rows, found.states | ({NONFINITE: overflowed} if overflowed else {})

    @property
    def _reducing_chains(self) -> dict[str, Chain]:
        """{owner of a state: chain} for the chains with a reducer."""
        found = {str(k): chain for k, chain in enumerate(self.chains) if chain.reducer is not None}
        return found | {self._sum_owner: self.job.session.labels.chain(_MEAN)}

    @property
    def _sum_owner(self) -> str:
        """The owner of the raw gradients' sum: the chain `mean`, if given, or the run."""
        chains = enumerate(self.chains)
        return next((str(k) for k, c in chains if c.text == "mean" and c.lasting), MEAN_GRADIENT)

    def _accumulator(self, states: Mapping[str, State]) -> Accumulator[str]:
        """Return an accumulator that adds batches to `states`, by owner."""
        reducers = {key: reducer_of(chain) for key, chain in self._reducing_chains.items()}
        return Accumulator({**reducers, NONFINITE: COUNTS}, states)

    @property
    def states(self) -> dict[str, State]:
        """{owner: state} of the reducers over all batches so far."""
        return self.total.states

    def _count_nonfinite(self, rows: FinishedBatch) -> State:
        """Return the count of numbers, by chain, that a stage has made infinite or NaN."""
        found: State = {}
        for k, (chain, made) in enumerate(zip(self.chains, rows.chains, strict=True)):
            if made is not None and chain.before and chain.text != "identity":
                count = nonfinite_of_rows(made, rows.samples["finite"])
                if int(count):
                    self._judge({k: int(count)})
                    found[str(k)] = count.cpu()
        return found

    def _judge(self, counts: Mapping[int, int]) -> None:
        """Raise if a count by chain of infinite or NaN numbers is positive and nonfinite="fail"."""
        if self.job.spec.compute.nonfinite != "fail":
            return
        for k, chain in enumerate(self.chains):
            if counts.get(k, 0):
                raise NonFiniteError(
                    f"{counts[k]:,} numbers of the result are infinite or NaN, although the "
                    "gradients are finite",
                    where=f"chain {chain.text!r}",
                    remedy='Scale the gradients first, or use nonfinite="skip" to only count them.',
                )

    def _proof(self) -> Mapping[str, Any] | None:
        """Return the proof of the first batch with a gradient, with all later audits."""
        session, before = self.job.session, dict(self.progress.certificate or {})
        proof, found = dict(before), session.certificate
        if found is not None and not before.get("proves"):
            proof = found.to_json()
            del proof["seconds"], proof["phases"]  # no times, so the same run writes the same file
        if not proof:
            return None
        used = dict.fromkeys((*before.get("backend", session.backend).split(", "), session.backend))
        audit = {"verify": session.settings.verify, **session.auditor.audits.to_json()}
        return {**proof, "backend": ", ".join(used), "audit": audit}


def without_progress(states: Mapping[str, State]) -> dict[str, State]:
    """Return the states without `Progress`."""
    return {k: state for k, state in states.items() if k != PROGRESS}


def batches(job: Job, size: BatchSize, done: int = 0) -> Iterator[Batch]:
    """Yield the batches after the first `done` samples; a thread loads the next batch."""

    def loaded() -> Iterator[Batch]:
        start = done
        while start < len(job.rows):
            batch = size.fitting(partial(job.load, start), job.work(start))
            start += len(batch)
            yield batch

    return prefetch(loaded(), job.session.problem.device)


def rows_of(
    job: Job, chains: Sequence[Chain], batch: Batch, evaluation: Evaluation
) -> FinishedBatch:
    """Return the rows to store for a batch; dense rows are formed when they are written."""
    gradients, shown = evaluation.gradients, job.session.labels.of(batch)
    rows = (
        None if chain.reducer is not None else chain.rows(gradients, job.session.problem, shown)
        for chain in chains
    )
    norms = {
        name: mean_norm(value.sqrt(), shown) for name, value in gradients.squared_norms.items()
    }
    return FinishedBatch(samples_of(job, batch, evaluation), norms, tuple(rows))


def samples_of(job: Job, batch: Batch, evaluation: Evaluation) -> dict[str, Tensor]:
    """Return the columns of the sample table for a batch: `table_of`, ids and previews."""
    table = table_of(job.session, batch, evaluation)
    ids = None
    if not isinstance(batch, Groups):
        ids = job.dataset.ids(batch.samples if isinstance(batch, Tokens) else batch.index)
    if ids is not None:
        table["id"] = ids
    if job.previews is not None:  # tokens have no previews
        table["preview"] = job.previews.of(batch.index.tolist())
    return table


def table_of(session: Session, batch: Batch, evaluation: Evaluation) -> dict[str, Tensor]:
    """Return columns (n,) of the sample table that need only the batch and its gradients."""
    shown = session.labels.of(batch)  # the table stores the targets of the data
    table = {
        "index": batch.index,
        "loss": mean_loss(evaluation.losses, shown),
        "norm": mean_norm(evaluation.gradients.norms, shown),
        "finite": finite_samples(evaluation).reshape(len(batch), -1).all(1),
    }
    targets = batch.targets
    if isinstance(batch, Tokens):
        table |= {"sample": batch.samples, "position": batch.position}
    elif isinstance(batch, Groups):
        table |= {"id": batch.ids, "size": batch.sizes}
    elif isinstance(targets, Tensor) and targets.dim() > 0 and targets[0].numel() == 1:
        table["target"] = targets.flatten()  # targets of more than one number are not stored
    return table | session.predictions_of(batch, evaluation)


def keeps_states(job: Job, size: int) -> bool:
    """Whether a file stores its reducers' states, of `size` bytes.

    A shard does. A whole run does if they are small and the layout is dense.
    """
    return job.shard is not None or (job.spec.compute.layout == "dense" and size <= _SMALL_STATES)


def require_reproduced(
    sample: Batch,
    numbers: Iterable[tuple[str, float, float, float]],
    precision: torch.dtype,
    error: Callable[[str, str, str, str], GradscopeError],
) -> None:
    """Raise if a recomputed number of a sample differs from the stored number.

    Args:
        sample: A batch of one.
        numbers: (name, stored, recomputed, allowed difference in addition to `REPRODUCED`).
        precision: The dtype of the model.
        error: Returns the error for (sample, name, stored, recomputed), all texts.
    """
    for what, stored, found, slack in numbers:
        most = REPRODUCED[precision] * max(abs(stored), abs(found)) + slack
        same = stored == found or (isnan(stored) and isnan(found))
        if not same and not abs(stored - found) <= most:
            raise error(sample.description, what, *unequal(stored, found))


def first_of(rows: FinishedBatch) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return losses and norms of up to 64 samples of a run's first batch."""
    losses, norms = (rows.samples[k][:_FEW].tolist() for k in ("loss", "norm"))
    return tuple(losses), tuple(norms)
