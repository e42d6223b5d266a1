"""A few samples of files that are merged, computed anew from model and data, one by one."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from gradscope.config import ComputeSpec, RunSpec
from gradscope.engine import drawn
from gradscope.errors import ResultFileError
from gradscope.run.execute import ALIKE, rows_of
from gradscope.run.job import Job, file_plan, prepare
from gradscope.stats import few, require_consistent, tolerances, wide
from gradscope.storage import Part, Parts, differences, open_file

_FACTS = ("loss", "dtype", "kwargs", "mode", "dataset", "digests")
_ROUNDINGS = 32.0  # of the largest number of its kind, that a sample's may have


@dataclass(frozen=True)
class Stored:
    """What a file says of one sample: loss and gradient norms, and the file's largest of each."""

    path: Path
    index: int  # in the data set
    loss: float
    norm: float
    norms: Mapping[str, float]
    largest: tuple[float, float]


@dataclass(frozen=True)
class Recomputed:
    """How many samples were computed anew, and why others were not."""

    samples: int = 0
    notes: tuple[str, ...] = ()


def looked_at(part: Part) -> list[Stored]:
    """Return what a file says of a few samples; refuse one whose numbers contradict each other."""
    seed = drawn(part.start)
    with open_file(part.path) as file:
        require_consistent(file, seed)
        rows = few(file, seed)
        names = {name: wide(file.norms[name])[rows] for name in file.norms}
        loss, norm, index = (file.samples[key] for key in ("loss", "norm", "index"))
        sizes = [np.abs(wide(column)) for column in (loss, norm)]
        largest = [float(size[np.isfinite(size)].max(initial=0.0)) for size in sizes]
    return [
        Stored(
            path=part.path,
            index=int(index[row]),
            loss=float(loss[row]),
            norm=float(norm[row]),
            norms={name: float(values[k]) for name, values in names.items()},
            largest=(largest[0], largest[1]),
        )
        for k, row in enumerate(rows.tolist())
    ]


def recompute(parts: Parts, samples: Sequence[Stored], spec: RunSpec) -> Recomputed:
    """Compute samples anew by the backend `loop`, each as a batch of its own, and compare.

    `spec` says where model, weights, data and loss are; what else the numbers depend on is taken
    from the files.

    Raises:
        ResultFileError: `spec` is of another run, or numbers differ.
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
        return Recomputed(notes=(f"no sample was computed anew: {reason}",))
    with chdir(Path.cwd()):  # to which it goes back, wherever the user's code may go
        job = prepare(_as_they_were(parts, spec))
        _require_same_run(parts, job)
        for sample in samples:
            for what, stored, found, tolerance in _numbers(job, sample):
                if not abs(stored - found) <= tolerance:
                    raise ResultFileError(
                        f"sample {sample.index} has the {what} {stored:.6g} in this file, and "
                        f"{found:.6g} when it is computed anew: model, loss, data or what they use "
                        "have changed",
                        where=str(sample.path),
                        remedy="Compute the file again with the code and the data of today, or "
                        "merge where they are as they were.",
                    )
    return Recomputed(len(samples))


def _as_they_were(parts: Parts, spec: RunSpec) -> RunSpec:
    """Return a run of single samples on what `spec` names, with the files' own settings."""
    kept: Any = parts.run.get("spec", {}).get("compute", {})
    own = {key: kept.get(key) for key in ("parameters", "dtype", "seed", "labels", "coupling")}
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


def _require_same_run(parts: Parts, job: Job) -> None:
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


def _numbers(job: Job, sample: Stored) -> Iterator[tuple[str, float, float, float]]:
    """Yield a sample's numbers: which, as stored, as computed, by how much they may differ."""
    batch = job.load(sample.index, 1)
    made = rows_of(job, (), batch, job.scope.evaluate(batch))
    eps, alike = torch.finfo(job.scope.problem.precision).eps, ALIKE[job.scope.problem.precision]
    loss, norm = (min(_ROUNDINGS * eps, alike) * largest for largest in sample.largest)

    def compared(what: str, stored: float, found: Any, slack: float) -> Any:
        return what, stored, float(found), alike * max(abs(stored), abs(float(found))) + slack

    yield compared("loss", sample.loss, made.loss, loss)
    yield compared("gradient norm", sample.norm, made.norm, norm)
    _, share = tolerances(str(job.scope.problem.precision).removeprefix("torch."))
    slack = norm + share * sample.norm
    for name, value in made.norms.items():
        yield compared(f"gradient norm by {name!r}", sample.norms[name], value, slack)
