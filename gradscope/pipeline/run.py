"""A run: batches in, a result file out.

    with start(job, path) as run:
        for batch in run.remaining():
            run.add(batch)
        report = run.finish()

Whoever runs it may wrap the iterator of batches; progress is no parameter of any computation.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import nan
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradscope.blocks import Evaluation
from gradscope.certificate import finite_samples
from gradscope.chains import Chain, bind
from gradscope.core.batch import Batch
from gradscope.errors import OutputError
from gradscope.labels import mean
from gradscope.pipeline.job import Job
from gradscope.reducers import State
from gradscope.stats import ParameterRow, RunReport, parameter_rows
from gradscope.storage import ChainPlan, FilePlan, Rows, Writer, open_file, open_writer

NOT_VERIFIED = {"verified": False, "verdict": "not asked for (verify = never)"}
_MEAN_GRADIENT = "mean_gradient"  # kept in every run, for signal-to-noise


@contextmanager
def start(
    job: Job, path: Path, *, overwrite: bool = False, resume: bool = False
) -> Iterator["Run"]:
    """Open the result file and yield the run; leaving the block early keeps what is finished.

    Raises:
        OutputError: The file exists, cannot be written, or belongs to another run.
    """
    begun = time.perf_counter()
    _refuse_inputs(job, path)
    with open_writer(path, _plan(job), overwrite=overwrite, resume=resume) as writer:
        settled = job.scope.settled(job.chains, job.batches)
        yield Run(job, settled, path, writer, begun, dict(writer.states))


def compute(job: Job, path: Path, *, overwrite: bool = False, resume: bool = False) -> RunReport:
    """Run a job to its end."""
    with start(job, path, overwrite=overwrite, resume=resume) as run:
        for batch in run.remaining():
            run.add(batch)
        return run.finish()


@dataclass
class Run:
    """A run under way.

    Attributes:
        job: What is computed.
        chains: Its chains, after the earlier passes that some of them need.
        path: The result file.
        writer: The open file.
        begun: When, on the performance counter.
        states: The reducers' states, by "chain:K" and "mean_gradient".
    """

    job: Job
    chains: tuple[Chain, ...]
    path: Path
    writer: Writer
    begun: float
    states: dict[str, State] = field(default_factory=dict)

    def remaining(self) -> Iterator[Batch]:
        """Yield the batches that are not in the file yet."""
        return self.job.batches(self.writer.completed)

    def add(self, batch: Batch) -> None:
        """Compute one batch and append it."""
        evaluation = self.job.scope.evaluate(batch)
        kept = self.job.scope.usable(batch, evaluation)
        if kept is not None:
            for key, chain in self._reduced():
                self.states[key] = chain.update(self.states.get(key), *kept)
        self.writer.append(self._rows(batch, evaluation), self.states)

    def finish(self) -> RunReport:
        """Write the aggregates, verify the file and put it in its place."""
        certificate = self.job.scope.certificate
        self.writer.finish(
            results={
                k: chain.result(self.states[f"chain:{k}"])
                for k, chain in enumerate(self.chains)
                if chain.reducer is not None and f"chain:{k}" in self.states
            },
            certificate=NOT_VERIFIED if certificate is None else certificate.to_json(),
            norm_attributes=self._mean_gradient_norms(),
        )
        return self._report()

    def _reduced(self) -> Iterator[tuple[str, Chain]]:
        yield _MEAN_GRADIENT, self.job.scope.labels.chain(bind("mean"))
        for k, chain in enumerate(self.chains):
            if chain.reducer is not None:
                yield f"chain:{k}", chain

    def _rows(self, batch: Batch, evaluation: Evaluation) -> Rows:
        gradients, problem = evaluation.gradients, self.job.scope.problem
        shown = self.job.scope.labels.of(batch)  # the table keeps the data's own targets
        squared = gradients.squared_norms
        return Rows(
            index=batch.index,
            loss=mean(evaluation.losses, shown),
            norm=mean(gradients.norms, shown),
            finite=finite_samples(evaluation).reshape(len(batch), -1).all(1),
            target=_one_number(batch.targets),
            norms={name: mean(value.sqrt(), shown) for name, value in squared.items()},
            chains=tuple(
                None if chain.reducer is not None else chain.rows(gradients, problem, shown)
                for chain in self.chains
            ),
        )

    def _mean_gradient_norms(self) -> dict[str, dict[str, float]]:
        state = self.states.get(_MEAN_GRADIENT)
        if state is None:  # no sample is finite
            return {name: {"mean_gradient_norm": nan} for name in self.job.shapes}
        mean = bind("mean").result(state)
        return {name: {"mean_gradient_norm": float(g.norm())} for name, g in mean.items()}

    def _report(self) -> RunReport:
        scope = self.job.scope
        with open_file(self.path) as file:
            finite = np.asarray(file.samples["finite"], dtype=bool)
            rows: tuple[ParameterRow, ...] = parameter_rows(file, finite)
            certificate = dict(file.certificate)
        return RunReport(
            parameters=rows,
            certificate=certificate,
            backend=str(certificate.get("backend", scope.backend)),
            notes=(*self.job.notes, *scope.notes),
            samples=len(self.job.rows),
            nonfinite=int((~finite).sum()),
            seconds=time.perf_counter() - self.begun,
            path=str(self.path),
            bytes=self.path.stat().st_size,
            chains=tuple(chain.text for chain in self.job.chains),
        )


def _refuse_inputs(job: Job, path: Path) -> None:
    """Refuse to write over what the run reads."""
    spec = job.spec
    code = [ref.rpartition(":")[0] for ref in (spec.model.factory, spec.loss.name) if ":" in ref]
    for kind, source in (
        ("checkpoint", spec.checkpoint.path),
        ("data", spec.dataset.path),
        *(("code", Path(place)) for place in code),
    ):
        if source.exists() and path.exists() and path.samefile(source):
            raise OutputError(
                f"the result would replace the {kind} that it is computed from",
                where=str(path),
                remedy="Choose another name.",
            )


def _plan(job: Job) -> FilePlan:
    digests = {key: value for key, value in job.digests.items() if value is not None}
    return FilePlan(
        run=job.record(),
        fingerprint=job.fingerprint(),
        attributes={f"{key}_sha256": digests[key] for key in ("checkpoint", "dataset")},
        n=len(job.rows),
        parameters=job.shapes,
        chains=tuple(ChainPlan(chain.text, chain.reducer is not None) for chain in job.chains),
        dtype=_stored(job.scope.problem.dtype),
        layout=job.spec.compute.layout,
    )


def _stored(dtype: torch.dtype) -> np.dtype:
    """Return the dtype of stored rows; bfloat16 is widened, which loses nothing."""
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    return torch.zeros((), dtype=wide).numpy().dtype


def _one_number(targets: object) -> Tensor | None:
    """Return the targets (n,) when they are one number a sample."""
    if isinstance(targets, Tensor) and targets.dim() and targets[0].numel() == 1:
        return targets.flatten()
    return None
