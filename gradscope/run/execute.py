"""A run under way: batches in, a result file out."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, field, replace
from functools import partial
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradscope.blocks import Evaluation, Tuner
from gradscope.core.batch import Batch, Tokens
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
from gradscope.run.overlap import BatchSize, RowWriter, prefetch
from gradscope.stages.chain import Chain, reducer_of
from gradscope.stages.labels import mean_loss, mean_norm
from gradscope.stages.reducers.accumulator import Accumulator
from gradscope.stages.reducers.base import State
from gradscope.stats import parameter_rows, require_consistent
from gradscope.storage import FinishedBatch, GradientFile, open_file, writing

PROGRESS = "progress"  # beside the reducers' states of an unfinished file: see `Progress`
REPRODUCED = {  # relative difference of a sample's numbers when it is computed again
    torch.float64: 1e-6,
    torch.float32: 1e-3,
    torch.bfloat16: 5e-2,
    torch.float16: 5e-2,
}
_NOT_VERIFIED = {"verified": False, "verdict": "not asked for (verify = never)"}
_FEW = 64  # samples of the first batch that a run going on has to find again
_SMALL_STATES = 2**24  # bytes of reducers' states that a dense file keeps, to be merged with others


@dataclass(frozen=True)
class Progress:
    """What a stopped run that goes on keeps to, besides its rows and its reducers' states."""

    batch_size: int | None = None
    certificate: Mapping[str, Any] | None = None  # the proof so far, with its audits
    first: tuple[tuple[float, ...], tuple[float, ...]] | None = None  # see `first_of`
    choices: Mapping[str, str] | None = None  # of kernel variants; None before the first batch

    def to_state(self) -> State:
        """Return the whole as a tensor of bytes."""
        text = json.dumps(asdict(self)).encode()
        return {"json": torch.frombuffer(bytearray(text), dtype=torch.uint8)}

    def audits(self, done: int) -> Audits:
        """Return what was audited of the samples so far, of which there are `done`."""
        kept = (self.certificate or {}).get("audit")
        if kept is not None:
            return Audits.of_json(kept)
        return Audits(batches=-(-done // self.batch_size) if self.batch_size else 0)

    @classmethod
    def of(cls, states: Mapping[str, State]) -> "Progress":
        """Return what `to_state` gave, from among the states of an unfinished file."""
        kept = states.get(PROGRESS)
        return cls() if kept is None else cls(**json.loads(bytes(kept["json"].tolist())))


@dataclass
class Run:
    """A run under way; leaving it before `finish` keeps what is written."""

    job: Job
    chains: tuple[Chain, ...]  # after the earlier passes that some of them need
    path: Path
    writer: RowWriter
    size: BatchSize
    start_time: float = 0.0  # on the performance counter
    notes: tuple[str, ...] = ()  # before it began
    before: InitVar[Mapping[str, State] | None] = None  # states of reducers, of a stopped run
    progress: Progress = Progress()
    tuner: Tuner = field(default_factory=lambda: Tuner(measures=False))
    record: dict[str, Any] = field(default_factory=dict)  # what the file will say of the run
    done: int = 0  # samples computed
    returns: int = 0  # how often it went back to what was proved, to go on with another backend

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
        """Compute one batch and append it, in parts where memory does not suffice for it.

        Where an audit finds the backend wrong, and `auto` has another, the run goes back to what
        was proved: `remaining` goes on from there.
        """
        done, returns = 0, self.returns
        while done < len(batch) and self.returns == returns:
            part = partial(self._add, batch, done)
            try:
                done += self.size.fitting(part, len(batch) - done)
            except RefusedError as error:
                if isinstance(error, OtherProcessError):  # nothing was found wrong here
                    raise
                self._go_back(error)

    def _go_back(self, error: RefusedError) -> None:
        """Go back to the last batch that was proved whole; raise unless there is another way."""
        if not self.done:
            raise error
        stopped = self.done
        self.done, kept = self.writer.go_back()
        self.total = self._accumulator(without_progress(kept))
        self.progress = replace(Progress.of(kept), batch_size=self.size.samples)
        self.job.session.auditor.audits = self.progress.audits(self.done)
        self.returns += 1
        if not (isinstance(error, CertificateError) and self.job.session.has_fallback):
            proved = f"The first {self.done:,} samples are kept" if self.done else "Nothing is kept"
            error.remedy = f"{error.remedy}\n{proved}: what was proved before."
            raise error
        self.job.session.notes.append(
            f"{error}".partition("\n")[0]
            + f"; from sample {self.done:,} on (of {stopped:,}) computed by another backend"
        )

    def finish(self) -> RunReport:
        """Write the aggregates, verify the file and put it in its place."""
        seen: list[RunReport] = []
        self.writer.wait()  # it may still write what is let go of now
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
        if not seen:  # it was complete before
            with open_file(self.path) as file:
                seen.append(self._report(file, aggregates=True))
        with writing(self.path):
            size = self.path.stat().st_size
        more = {"bytes": size, "seconds": time.perf_counter() - self.start_time}
        return seen[0].model_copy(update=more)

    def _check_file(self, file: GradientFile) -> RunReport:
        """Hold the file against itself before it gets to its place."""
        chains, nonfinite = dict(enumerate(self.chains)), self.job.session.settings.nonfinite
        require_written(file, self.job.rows, chains, self.states, nonfinite=nonfinite)
        try:
            require_consistent(file, self.job.session.settings.seed)
        except ResultFileError as error:
            raise OutputError(
                f"the file just written contradicts itself: {error.what}",
                where=str(self.path),
                remedy="Run gradscope compute again with --overwrite. If that does not help, "
                "please report this: it is a bug in gradscope.",
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
            noun=self.job.spec.compute.rows,
        )

    def _add(self, batch: Batch, start: int, n: int) -> int:
        """Compute and append n samples of a batch, or leave everything as it was."""
        part = batch if n == len(batch) else batch.select(slice(start, start + n))
        rows, states = self.reduce_batch(part, samples_left=len(self.job.rows) - self.done)
        self.writer.wait()  # it may still write what changes now
        self.total.add(states)
        if self._sum_owner in self.states:
            self.states[MEAN_GRADIENT] = self.states[self._sum_owner]
        choices = self.tuner.freeze()  # of the first batch: it is known when a run goes on
        self.record["kernels"] = choices
        self.progress = Progress(
            batch_size=self.size.samples,
            certificate=self._proof(),
            first=self.progress.first or first_of(rows),
            choices=choices,
        )
        progress = {PROGRESS: self.progress.to_state()}
        self.writer.append(rows, self.states | progress, proved=self.job.session.last_is_proved)
        self.done += n
        return n

    def reduce_batch(
        self, batch: Batch, samples_left: int
    ) -> tuple[FinishedBatch, dict[str, State]]:
        """Compute a batch; return its rows and, by owner, its states.

        Args:
            batch: Any samples.
            samples_left: How many there are to come, these included.
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
            ordinal=self.done // (self.progress.batch_size or n),
            count=1 if n == samples_left else None,
        )
        ((rows, overflowed),) = made
        return rows, found.states | ({NONFINITE: overflowed} if overflowed else {})

    @property
    def _reducing_chains(self) -> dict[str, Chain]:
        """The chains with a reducer, by owner of a state."""
        found = {str(k): chain for k, chain in enumerate(self.chains) if chain.reducer is not None}
        return found | {self._sum_owner: self.job.session.labels.chain(bind("mean"))}

    @property
    def _sum_owner(self) -> str:
        """Who owns the sum of the raw gradients: a chain that is their mean has it anyway."""
        chains = enumerate(self.chains)
        return next((str(k) for k, c in chains if c.text == "mean" and c.lasting), MEAN_GRADIENT)

    def _accumulator(self, states: Mapping[str, State]) -> Accumulator[str]:
        """Return what adds batches to the states of the batches before, by owner."""
        reducers = {key: reducer_of(chain) for key, chain in self._reducing_chains.items()}
        return Accumulator({**reducers, NONFINITE: COUNTS}, states)

    @property
    def states(self) -> dict[str, State]:
        """The states of reducers over all batches so far, by number and owner."""
        return self.total.states

    def _count_nonfinite(self, rows: FinishedBatch) -> State:
        """Return, by chain, how many numbers of rows a stage has made infinite or NaN."""
        found: State = {}
        for k, (chain, made) in enumerate(zip(self.chains, rows.chains, strict=True)):
            if made is not None and chain.before and chain.text != "identity":
                count = nonfinite_of_rows(made, rows.samples["finite"])
                if int(count):
                    self._judge({k: int(count)})
                    found[str(k)] = count.cpu()
        return found

    def _judge(self, counts: Mapping[int, int]) -> None:
        """Refuse numbers by chain that a stage has made infinite or NaN, if that is asked for."""
        if self.job.spec.compute.nonfinite != "fail":
            return
        for k, chain in enumerate(self.chains):
            if counts.get(k, 0):
                raise NonFiniteError(
                    f"{counts[k]:,} of its numbers are not finite, though the gradients are",
                    where=f"chain {chain.text!r}",
                    remedy='Scale the gradients first, or use nonfinite="skip" to have them told.',
                )

    def _proof(self) -> Mapping[str, Any] | None:
        """Return the proof of the first batch that has a gradient, with the audits since."""
        session, before = self.job.session, dict(self.progress.certificate or {})
        proof, found = dict(before), session.certificate
        if found is not None and not before.get("proves"):
            proof = found.to_json()
            del proof["seconds"], proof["phases"]  # the same run gives the same file
        if not proof:
            return None
        used = dict.fromkeys((*before.get("backend", session.backend).split(", "), session.backend))
        audit = {"verify": session.settings.verify, **session.auditor.audits.to_json()}
        return {**proof, "backend": ", ".join(used), "audit": audit}


def without_progress(states: Mapping[str, State]) -> dict[str, State]:
    """Return the reducers' states alone, by number."""
    return {k: state for k, state in states.items() if k != PROGRESS}


def batches(job: Job, size: BatchSize, done: int = 0) -> Iterator[Batch]:
    """Yield the batches after the first `done` samples; the next is loaded in the meantime."""

    def loaded() -> Iterator[Batch]:
        start = done
        while start < len(job.rows):
            batch = size.fitting(partial(job.load, start), len(job.rows) - start)
            start += len(batch)
            yield batch

    return prefetch(loaded(), job.session.problem.device)


def rows_of(
    job: Job, chains: Sequence[Chain], batch: Batch, evaluation: Evaluation
) -> FinishedBatch:
    """Return what is stored of a batch, not computed where a block can do it later."""
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
    """Return what the sample table keeps of a batch: `table_of`, names and previews."""
    table = table_of(job.session, batch, evaluation)
    ids = job.dataset.ids(batch.samples if isinstance(batch, Tokens) else batch.index)
    if ids is not None:
        table["id"] = ids
    if job.previews is not None:  # never of tokens
        table["preview"] = job.previews.of(batch.index.tolist())
    return table


def table_of(session: Session, batch: Batch, evaluation: Evaluation) -> dict[str, Tensor]:
    """Return what a batch tells of its samples by itself, a column each (n,)."""
    shown = session.labels.of(batch)  # the table keeps the data's own targets
    table = {
        "index": batch.index,
        "loss": mean_loss(evaluation.losses, shown),
        "norm": mean_norm(evaluation.gradients.norms, shown),
        "finite": finite_samples(evaluation).reshape(len(batch), -1).all(1),
    }
    targets = batch.targets
    if isinstance(batch, Tokens):
        table |= {"sample": batch.samples, "position": batch.position}
    elif isinstance(targets, Tensor) and targets.dim() > 0 and targets[0].numel() == 1:
        table["target"] = targets.flatten()  # any other kind is not stored
    return table | session.predictions_of(batch, evaluation)


def keeps_states(job: Job, size: int) -> bool:
    """Whether a file keeps its reducers' states, of `size` bytes.

    A shard does, and others where they are small; not where factors were chosen to save space.
    """
    return job.shard is not None or (job.spec.compute.layout == "dense" and size <= _SMALL_STATES)


def require_reproduced(
    sample: Batch,
    numbers: Iterable[tuple[str, float, float, float]],
    precision: torch.dtype,
    error: Callable[[str, str, str, str], GradscopeError],
) -> None:
    """Raise an error if a number of a sample is not computed again as it was stored.

    Args:
        sample: A batch of one.
        numbers: What each number is, as stored, as computed, and the difference that is allowed in
            addition to `REPRODUCED`.
        precision: That of the model.
        error: Makes the error from sample and number in words, as stored, and as computed.
    """
    for what, stored, found, slack in numbers:
        most = REPRODUCED[precision] * max(abs(stored), abs(found)) + slack
        same = stored == found or (isnan(stored) and isnan(found))
        if not same and not abs(stored - found) <= most:
            raise error(sample.description, what, *unequal(stored, found))


def first_of(rows: FinishedBatch) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return losses and norms of a few samples of a run's first batch."""
    losses, norms = (rows.samples[k][:_FEW].tolist() for k in ("loss", "norm"))
    return tuple(losses), tuple(norms)
