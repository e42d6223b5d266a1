"""Merge the partial files of a run into the file that a single process would have written.

    with merging(paths, output) as under_way:
        for part in under_way.parts.files:
            under_way.add(part)
        report = under_way.finish()

To show progress, the caller wraps the iterator of files. A few samples of each file are checked
first. If model and data are given, these samples are recomputed and compared.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import ValidationError

from gradscope.config import ComputeSpec, RunSpec, parse_compression
from gradscope.core.batch import Batch
from gradscope.core.grammar import Stage, parse
from gradscope.core.precision import dtype_name
from gradscope.engine.audit import derive_seed
from gradscope.engine.chains import bind
from gradscope.errors import RefusedError, ResultFileError, SpecError
from gradscope.run.execute import REPRODUCED, require_reproduced, rows_of
from gradscope.run.job import Job, file_plan, prepare, require_one_pass, stages_digests
from gradscope.run.outcome import (
    COUNTS,
    MEAN_GRADIENT,
    NONFINITE,
    combine_certificates,
    mean_gradient_norms,
    nonfinite_of_file,
    require_written,
    results_of,
)
from gradscope.stages.chain import Chain, reducer_of
from gradscope.stages.reducers.accumulator import Accumulator
from gradscope.stages.reducers.base import reducers
from gradscope.stats import Json, Record, require_consistent, spot_check_rows, tolerances, wide
from gradscope.storage import (
    ChainPlan,
    FilePlan,
    Joiner,
    PartialFile,
    RunFiles,
    check_files,
    differences,
    dtype_named,
    open_file,
    open_joiner,
    require_output,
    writing,
)

_FACTS = ("loss", "dtype", "kwargs", "mode", "dataset", "digests")
_ROUNDINGS = 32.0  # allowed rounding errors of a sample's number, relative to the largest in a file
_USUAL_BATCH = 256


class MergeReport(Record):
    """The report of `gradscope merge`, for its output and its `--json`."""

    schema_: Literal["gradscope.merge"] = "gradscope.merge"
    version: Literal[1] = 1
    path: str  # the path of the merged file
    bytes: int
    files: int  # the number of partial files
    virtual: bool  # whether the rows remain in the partial files
    noun: str = "sample"  # the word for a row: sample or token
    samples: int
    nonfinite: int  # samples that are not finite
    chains_nonfinite: tuple[int, ...] = ()  # per chain: nonfinite numbers of finite samples
    chains: tuple[str, ...]
    certificate: Json  # the combined certificate of the files
    recomputed: int = 0  # samples that were recomputed with the same numbers
    notes: tuple[str, ...] = ()  # the reason if no sample was recomputed
    seconds: float


@dataclass
class Merge:
    """A merge in progress."""

    parts: RunFiles  # the checked files
    chains: Mapping[int, Chain]  # the reduced chains
    path: Path
    joiner: Joiner  # writes the merged file
    start_time: float  # on the performance counter
    virtual: bool = False
    recomputed: int = 0  # the number of recomputed samples
    notes: tuple[str, ...] = ()  # the reason if no sample was recomputed

    def __post_init__(self) -> None:
        own = {str(k): reducer_of(chain) for k, chain in self.chains.items()}
        self.total = Accumulator({**own, MEAN_GRADIENT: reducers.get("mean")(), NONFINITE: COUNTS})

    def add(self, part: PartialFile) -> None:
        """Copy the rows of the next file, and add its reducers' states."""
        self.total.add(self.joiner.add(part))

    def finish(self) -> MergeReport:
        """Write the aggregates, verify the file and rename it to its final path."""
        results, _, states = results_of(self.chains, self.total.states, keep_states=True)
        certificate = combine_certificates(self.parts.files, self.parts.noun)
        index = range(self.parts.start, self.parts.stop)
        nonfinite = self.parts.run.get("spec", {}).get("compute", {}).get("nonfinite", "skip")
        self.joiner.finish(
            results=results,
            certificate=certificate,
            norm_attributes=mean_gradient_norms(states, self.parts.parameters),
            states=states,
            look=lambda file: require_written(
                file, index, self.chains, states, nonfinite=nonfinite
            ),
        )
        with writing(self.path):
            size = self.path.stat().st_size
        with open_file(self.path) as file:
            samples = int(np.count_nonzero(~file.samples["finite"].astype(bool)))
            chains = nonfinite_of_file(file, aggregates=False)
        return MergeReport(
            path=str(self.path),
            bytes=size,
            files=len(self.parts.files),
            virtual=self.virtual,
            samples=len(self.parts),
            nonfinite=samples,
            chains_nonfinite=chains,
            chains=tuple(text for text, _ in self.parts.chains),
            certificate=certificate,
            recomputed=self.recomputed,
            notes=self.notes,
            seconds=time.perf_counter() - self.start_time,
            noun=self.parts.noun,
        )


@contextmanager
def merging(
    paths: Iterable[Path],  # the partial files, in any order
    output: Path,  # the merged file
    *,
    overwrite: bool = False,  # replace an existing file
    virtual: bool = False,  # leave the rows in the partial files, and refer to them
    code: Iterable[Path] = (),  # trusted Python files that chains name
    recompute: RunSpec | None = None,  # the run, to recompute a few samples of each file
) -> Iterator[Merge]:
    """Check that files are the parts of one run, and yield their merge.

    Leaving the block early removes the unfinished file.

    Raises:
        ResultFileError: A file cannot be read or is of another run; samples are missing or in two
            files; numbers are inconsistent, or differ when they are recomputed.
        RefusedError: The parts cannot be merged exactly, or need code that is not in `code`.
        OutputError: The file exists or cannot be written.
    """
    begun = time.perf_counter()
    parts = check_files(paths)
    chains = _reduced_chains(parts, code)
    require_output(output, parts, overwrite=overwrite)
    samples = [sample for part in parts.files for sample in _spot_check(part)]
    recomputed, notes = (0, ()) if recompute is None else _recompute(parts, samples, recompute)
    plan = _plan(parts)
    size = plan.run.get("batch_size", _USUAL_BATCH)
    with open_joiner(output, plan, parts, size, overwrite=overwrite, virtual=virtual) as joiner:
        yield Merge(parts, chains, output, joiner, begun, virtual, recomputed, notes)


def merge(paths: Iterable[Path], output: Path, **how: Any) -> MergeReport:
    """Merge files; see `merging`."""
    with merging(paths, output, **how) as under_way:
        for part in under_way.parts.files:
            under_way.add(part)
        return under_way.finish()


def _plan(parts: RunFiles) -> FilePlan:
    """Return the plan of the same run in a single process."""
    samples = [parts.start, parts.stop]
    facts = {k: v for k, v in parts.identity.items() if k not in ("stored", "shard")}
    stored = parts.identity["stored"]
    compression = stored.get("compression")
    run = deepcopy(parts.run) | {"samples": samples}
    compute = run.get("spec", {}).get("compute", {})
    if run.pop("shard", None) is None and parts.noun == "sample":  # other rows have own numbers
        compute["samples"] = f"{parts.start}:{parts.stop}"
    compute["shard"] = None
    return FilePlan(
        run=run,
        fingerprint=facts | {"samples": samples},
        attributes=parts.attributes,
        n=len(parts),
        parameters=parts.parameters,
        chains=tuple(ChainPlan(text, reduced) for text, reduced in parts.chains),
        dtype=dtype_named(stored["dtype"]),
        layout=stored["layout"],
        compression=None if compression is None else parse_compression(compression),
    )


def _reduced_chains(parts: RunFiles, code: Iterable[Path]) -> dict[int, Chain]:
    """Return {number: chain from the reducer on} of the reduced chains.

    The files name the code of their stages, but files are not trusted. Only code in `code` is run.
    """
    try:
        stages = [parse(text) for text, _ in parts.chains]
        if not parts.identity["shard"]:  # shards were checked when they were computed
            known = [[s for s in chain if ".py:" not in s.name] for chain in stages]
            require_one_pass([_bind(chain) for chain in known if chain])
        ends = {}
        for k, chain in enumerate(stages):
            if parts.chains[k][1]:
                # if the reducer is the user's code, keep all stages
                first = next((i for i, stage in enumerate(chain) if stage.name in reducers), 0)
                ends[k] = chain[first:]
        if any(".py:" in stage.name for end in ends.values() for stage in end):
            _require_known_code(parts, stages, code)
        return {k: _bind(end) for k, end in ends.items()}
    except SpecError as error:  # the chain is from the files, not from the user
        raise ResultFileError(
            f"a chain in the files is not valid in this installation: {error.what}",
            where=str(parts.files[0].path),
            remedy=f"{error.remedy or ''}\nMerge with the same version of gradscope that computed "
            "the files, and install the packages that define the stages.".lstrip(),
        ) from error


def _bind(stages: Sequence[Stage]) -> Chain:
    return bind(" | ".join(map(str, stages)))


def _require_known_code(
    parts: RunFiles, stages: Iterable[tuple[Stage, ...]], code: Iterable[Path]
) -> None:
    """Raise if a stage's code is not in `code`, or has changed since the run."""
    own = [stage.name for chain in stages for stage in chain if ".py:" in stage.name]
    named = {Path(name.rpartition(":")[0]).resolve() for name in own}
    missing = sorted(map(str, named - {path.resolve() for path in code}))
    if missing:
        raise RefusedError(
            f"merging runs code that the files name: {', '.join(missing)}",
            where="chains",
            remedy="If you trust this code, give gradscope merge --code FILE.py for each file.",
        )
    found = stages_digests([bind(text) for text, _ in parts.chains])
    recorded = (parts.identity.get("digests") or {}).get("stages")
    changed = list(differences(recorded, found, "digests.stages"))
    if changed:
        raise RefusedError(
            f"the code has changed since the run: {'; '.join(changed)}",
            where="chains",
            remedy="Restore the code files, or compute the shards again.",
        )


@dataclass(frozen=True)
class _StoredSample:
    """The stored loss and gradient norms of one sample."""

    path: Path
    index: int  # position in the data set
    loss: float
    norm: float
    norms: Mapping[str, float]
    largest: tuple[float, float]  # the largest loss and norm in the file


def _spot_check(part: PartialFile) -> list[_StoredSample]:
    """Return the stored numbers of a few samples; raise if the file is inconsistent."""
    seed = derive_seed(part.start)
    with open_file(part.path) as file:
        require_consistent(file, seed)
        rows = spot_check_rows(file, seed)
        names = {name: wide(file.norms[name])[rows] for name in file.norms}
        loss, norm, index = (file.samples[key] for key in ("loss", "norm", "index"))
        sizes = [np.abs(wide(column)) for column in (loss, norm)]
        largest = [float(size[np.isfinite(size)].max(initial=0.0)) for size in sizes]
    return [
        _StoredSample(
            path=part.path,
            index=int(index[row]),
            loss=float(loss[row]),
            norm=float(norm[row]),
            norms={name: float(values[k]) for name, values in names.items()},
            largest=(largest[0], largest[1]),
        )
        for k, row in enumerate(rows.tolist())
    ]


def _recompute(
    parts: RunFiles, samples: Sequence[_StoredSample], spec: RunSpec
) -> tuple[int, tuple[str, ...]]:
    """Recompute samples with the backend `loop`, each as a batch of one, and compare.

    `spec` names model, weights, data and loss. The files give the remaining settings. Returns the
    number of recomputed samples, and a note if no sample could be recomputed.
    """
    reason = None  # why recomputing single samples may give different numbers
    if parts.identity.get("coupling") == "own-loss":
        reason = "with own-loss coupling, the numbers depend on which samples share a batch"
    elif parts.identity.get("mode") == "train" and not all(
        part.certificate.get("verified") for part in parts.files
    ):
        reason = (
            "the model is in train mode and some files were not verified (verify = never), so "
            "the numbers may depend on the batch and on random numbers"
        )
    if reason is not None:
        return 0, (f"no sample was recomputed: {reason}",)
    with chdir(Path.cwd()):  # restores the working directory if the user's code changes it
        job = prepare(_single_sample_spec(parts, spec))
        _require_same_run(parts, job)
        for sample in samples:
            k, error = sample.index, partial(_not_reproduced, sample.path)
            batch = job.load(k, job.work(k, k + 1))
            numbers = _numbers(job, sample, batch)
            require_reproduced(batch, numbers, job.session.problem.precision, error)
    return len(samples), ()


def _single_sample_spec(parts: RunFiles, spec: RunSpec) -> RunSpec:
    """Return a spec with the inputs of `spec` and the files' settings, for batches of one."""
    kept: Any = parts.run.get("spec", {}).get("compute", {})
    settings = ("parameters", "dtype", "seed", "labels", "coupling", "randomness")
    own = {key: kept[key] for key in settings if key in kept}
    if parts.noun != "sample":  # other rows are numbered from the first selected sample
        own |= {k: kept[k] for k in ("rows", "samples", "group_reduction") if k in kept}
    size = None if parts.noun == "group" else 1
    more = {"backend": "loop", "transform": ["mean"], "batch_size": size, "verify": "never"}
    try:
        compute = ComputeSpec.model_validate(own | more | {"device": spec.compute.device})
    except ValidationError as error:
        raise ResultFileError(
            "the attribute 'run' does not describe a run",
            where=str(parts.files[0].path),
            remedy="Give files that gradscope compute wrote.",
        ) from error
    mode = "train" if parts.identity.get("mode") == "train" else "eval"
    model = spec.model.model_copy(update={"mode": mode})
    return spec.model_copy(update={"compute": compute, "model": model})


def _require_same_run(parts: RunFiles, job: Job) -> None:
    """Raise if checkpoint, data, loss or code differ from the run of the files."""
    there, here = ({k: f.get(k) for k in _FACTS} for f in (parts.identity, file_plan(job).identity))
    for facts in (there, here):  # chains are not run
        facts["digests"] = {k: v for k, v in (facts["digests"] or {}).items() if k != "stages"}
    different = list(differences(there, here, ""))
    if list(job.shapes.items()) != list(parts.parameters.items()):
        different.append("the names or shapes of its parameters differ")
    if different:
        raise ResultFileError(
            f"the run file does not match this result: {'; '.join(different)}",
            where=str(parts.files[0].path),
            remedy="Give the run file with which the results were computed, with the same code "
            "and data; or merge without a run file.",
        )


def _not_reproduced(path: Path, sample: str, what: str, stored: str, now: str) -> ResultFileError:
    return ResultFileError(
        f"the {what} of {sample} is {stored} in this file and {now} when it is recomputed: "
        "model, loss, data or their dependencies have changed",
        where=str(path),
        remedy="Compute the file again with the current code and data, or merge with the code and "
        "data of the run.",
    )


def _numbers(
    job: Job, sample: _StoredSample, batch: Batch
) -> Iterator[tuple[str, float, float, float]]:
    """Yield (name, stored, recomputed, allowed difference) for each number of a sample."""
    made = rows_of(job, (), batch, job.session.evaluate(batch))
    precision = job.session.problem.precision
    most = min(_ROUNDINGS * torch.finfo(precision).eps, REPRODUCED[precision])
    loss, norm = (most * largest for largest in sample.largest)
    yield "loss", sample.loss, float(made.samples["loss"]), loss
    yield "gradient norm", sample.norm, float(made.samples["norm"]), norm
    _, share = tolerances(dtype_name(precision))
    slack = norm + share * sample.norm
    for name, value in made.norms.items():
        yield f"gradient norm by {name!r}", sample.norms[name], float(value), slack
