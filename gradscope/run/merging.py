"""Merging: the files of one run become the file that one process would have written.

    with merging(paths, output) as under_way:
        for part in under_way.parts.files:
            under_way.add(part)
        report = under_way.finish()

The caller may wrap the iterator of files, as for a run. A few samples of each file are looked at
before, and computed anew from model and data where these are given.
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
_ROUNDINGS = 32.0  # of the largest number of its kind, that a sample's may have
_USUAL_BATCH = 256


class MergeReport(Record):
    """What one `gradscope merge` did, for its last words and its `--json`."""

    schema_: Literal["gradscope.merge"] = "gradscope.merge"
    version: Literal[1] = 1
    path: str  # of the file that was written
    bytes: int
    files: int  # that it was made from
    virtual: bool  # whether the rows stay in them
    noun: str = "sample"  # what has a row: sample or token
    samples: int
    nonfinite: int  # samples that are not finite
    chains_nonfinite: tuple[int, ...] = ()  # numbers by chain, of samples that are finite
    chains: tuple[str, ...]
    certificate: Json  # what was proved of the files, together
    recomputed: int = 0  # samples that were computed anew and gave the same numbers
    notes: tuple[str, ...] = ()  # why no more of them were
    seconds: float


@dataclass
class Merge:
    """A merge under way."""

    parts: RunFiles  # the files, checked
    chains: Mapping[int, Chain]  # the reduced ones
    path: Path
    joiner: Joiner  # the file that is written, open
    start_time: float  # on the performance counter
    virtual: bool = False
    recomputed: int = 0  # samples
    notes: tuple[str, ...] = ()  # why no more of them were

    def __post_init__(self) -> None:
        own = {str(k): reducer_of(chain) for k, chain in self.chains.items()}
        self.total = Accumulator({**own, MEAN_GRADIENT: reducers.get("mean")(), NONFINITE: COUNTS})

    def add(self, part: PartialFile) -> None:
        """Copy the rows of the next file, and add its reducers' states to those so far."""
        self.total.add(self.joiner.add(part))

    def finish(self) -> MergeReport:
        """Write the aggregates, verify the file and put it in its place."""
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
    paths: Iterable[Path],  # in any order
    output: Path,  # the file of the whole run
    *,
    overwrite: bool = False,  # a file that is there
    virtual: bool = False,  # leave the rows where they are, and refer to them
    code: Iterable[Path] = (),  # Python files that chains name and that may be run
    recompute: RunSpec | None = None,  # the run, to compute a few samples of each file anew
) -> Iterator[Merge]:
    """Check that files are the parts of one run, and yield their merge.

    Leaving the block early leaves nothing behind.

    Raises:
        ResultFileError: A file cannot be read or is of another run; samples are missing or twice;
            numbers contradict each other, or are not what is found anew.
        RefusedError: The parts cannot be merged exactly, or only with code that may not be run.
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
    """Return what one process would have planned to write."""
    samples = [parts.start, parts.stop]
    facts = {k: v for k, v in parts.identity.items() if k not in ("stored", "shard")}
    stored = parts.identity["stored"]
    compression = stored.get("compression")
    run = deepcopy(parts.run) | {"samples": samples}
    compute = run.get("spec", {}).get("compute", {})
    if (
        run.pop("shard", None) is None and compute.get("rows") != "token"
    ):  # these have numbers of their own
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
    """Return the reduced chains by number, from their reducers on.

    A file says which code its chains run, and a file comes from somewhere else: nothing is run
    unless it is among `code`.
    """
    try:
        stages = [parse(text) for text, _ in parts.chains]
        if not parts.identity["shard"]:  # of a shard this is known
            known = [[s for s in chain if ".py:" not in s.name] for chain in stages]
            require_one_pass([_bind(chain) for chain in known if chain])
        ends = {}
        for k, chain in enumerate(stages):
            if parts.chains[k][1]:
                # where the reducer is the user's own, all stages count
                first = next((i for i, stage in enumerate(chain) if stage.name in reducers), 0)
                ends[k] = chain[first:]
        if any(".py:" in stage.name for end in ends.values() for stage in end):
            _require_known_code(parts, stages, code)
        return {k: _bind(end) for k, end in ends.items()}
    except SpecError as error:  # the chain is the files' own, not what the user wrote
        raise ResultFileError(
            f"the files hold a chain that is none here: {error.what}",
            where=str(parts.files[0].path),
            remedy=f"{error.remedy or ''}\nMerge them with what computed them: the same version, "
            "and the packages that its stages are from.".lstrip(),
        ) from error


def _bind(stages: Sequence[Stage]) -> Chain:
    return bind(" | ".join(map(str, stages)))


def _require_known_code(
    parts: RunFiles, stages: Iterable[tuple[Stage, ...]], code: Iterable[Path]
) -> None:
    """Check that the user's own stages may be run, and are those of the run."""
    own = [stage.name for chain in stages for stage in chain if ".py:" in stage.name]
    named = {Path(name.rpartition(":")[0]).resolve() for name in own}
    missing = sorted(map(str, named - {path.resolve() for path in code}))
    if missing:
        raise RefusedError(
            f"merging needs code that the files name: {', '.join(missing)}",
            where="chains",
            remedy="Give gradscope merge --code FILE.py for each of them, if you trust it.",
        )
    found = stages_digests([bind(text) for text, _ in parts.chains])
    recorded = (parts.identity.get("digests") or {}).get("stages")
    changed = list(differences(recorded, found, "digests.stages"))
    if changed:
        raise RefusedError(
            f"this is not the code that the run had: {'; '.join(changed)}",
            where="chains",
            remedy="Take the files as they were, or compute the shards again.",
        )


@dataclass(frozen=True)
class _StoredSample:
    """What a file says of one sample: loss and gradient norms, and the file's largest of each."""

    path: Path
    index: int  # in the data set
    loss: float
    norm: float
    norms: Mapping[str, float]
    largest: tuple[float, float]


def _spot_check(part: PartialFile) -> list[_StoredSample]:
    """Return what a file says of a few samples; refuse one whose numbers contradict each other."""
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
    """Compute samples anew by the backend `loop`, each as a batch of its own, and compare.

    `spec` says where model, weights, data and loss are; what else the numbers depend on is taken
    from the files. Returns how many were, and why others were not.
    """
    reason = None  # why samples computed one by one need not give the numbers of the files
    if parts.identity.get("coupling") == "own-loss":
        reason = "with own-loss coupling the numbers depend on which samples share a batch"
    elif parts.identity.get("mode") == "train" and not all(
        part.certificate.get("verified") for part in parts.files
    ):
        reason = (
            "numbers of a model in train mode may depend on which samples share a batch, and on "
            "chance, and nothing was proved of some (verify = never)"
        )
    if reason is not None:
        return 0, (f"no sample was computed anew: {reason}",)
    with chdir(Path.cwd()):  # to which it goes back, wherever the user's code may go
        job = prepare(_single_sample_spec(parts, spec))
        _require_same_run(parts, job)
        for sample in samples:
            batch, error = job.load(sample.index, 1), partial(_not_reproduced, sample.path)
            numbers = _numbers(job, sample, batch)
            require_reproduced(batch, numbers, job.session.problem.precision, error)
    return len(samples), ()


def _single_sample_spec(parts: RunFiles, spec: RunSpec) -> RunSpec:
    """Return a run of single samples on what `spec` names, with the files' own settings."""
    kept: Any = parts.run.get("spec", {}).get("compute", {})
    settings = ("parameters", "dtype", "seed", "labels", "coupling", "randomness")
    own = {key: kept[key] for key in settings if key in kept}
    if kept.get("rows") == "token":  # whose rows are counted from the first sample on
        own |= {"rows": "token", "samples": kept.get("samples")}
    more = {"backend": "loop", "transform": ["mean"], "batch_size": 1, "verify": "never"}
    try:
        compute = ComputeSpec.model_validate(own | more | {"device": spec.compute.device})
    except ValidationError as error:
        raise ResultFileError(
            "its attribute 'run' is none of a run",
            where=str(parts.files[0].path),
            remedy="Give files that gradscope compute wrote.",
        ) from error
    mode = "train" if parts.identity.get("mode") == "train" else "eval"
    model = spec.model.model_copy(update={"mode": mode})
    return spec.model_copy(update={"compute": compute, "model": model})


def _require_same_run(parts: RunFiles, job: Job) -> None:
    """Check that checkpoint, data, loss and code are those of the files."""
    there, here = ({k: f.get(k) for k in _FACTS} for f in (parts.identity, file_plan(job).identity))
    for facts in (there, here):  # chains are not run
        facts["digests"] = {k: v for k, v in (facts["digests"] or {}).items() if k != "stages"}
    different = list(differences(there, here, ""))
    if list(job.shapes.items()) != list(parts.parameters.items()):
        different.append("its parameters have other names or shapes")
    if different:
        raise ResultFileError(
            f"the run file is of another run: {'; '.join(different)}",
            where=str(parts.files[0].path),
            remedy="Give the run file that they were computed with, and its code and data as they "
            "were; or merge without it.",
        )


def _not_reproduced(path: Path, sample: str, what: str, stored: str, now: str) -> ResultFileError:
    return ResultFileError(
        f"{sample} has the {what} {stored} in this file, and {now} when it is computed anew: "
        "model, loss, data or what they use have changed",
        where=str(path),
        remedy="Compute the file again with the code and the data of today, or merge where they "
        "are as they were.",
    )


def _numbers(
    job: Job, sample: _StoredSample, batch: Batch
) -> Iterator[tuple[str, float, float, float]]:
    """Yield a sample's numbers: which, as stored, as computed, their slack."""
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
