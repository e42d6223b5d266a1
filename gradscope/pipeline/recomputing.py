"""A few samples of files that are merged, computed anew from model and data, one by one."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from gradscope.core.spec import ComputeSpec, RunSpec
from gradscope.errors import ResultFileError
from gradscope.pipeline.job import Job, prepare
from gradscope.pipeline.run import rows_of
from gradscope.pipeline.start import ALIKE, file_plan
from gradscope.proof import drawn
from gradscope.stats.base import wide
from gradscope.stats.spot_checks import FEW, few
from gradscope.storage import GradientFile, Part, Parts, open_file
from gradscope.storage.resume import differences

_FACTS = ("loss", "dtype", "kwargs", "mode", "dataset", "digests")
_ROUNDINGS = 32.0  # of the largest number of its kind, that a sample's may have
_SHARE = 1e3  # roundings of its whole gradient that a parameter's may have


@dataclass(frozen=True)
class Recomputed:
    """What was computed anew.

    Attributes:
        samples: How many, each as a batch of its own.
        notes: Why others were not.
    """

    samples: int = 0
    notes: tuple[str, ...] = ()


def recompute(parts: Parts, spec: RunSpec) -> Recomputed:
    """Compute a few samples of each file anew by the backend `loop`, and compare the numbers.

    Args:
        parts: The files.
        spec: Where model, weights, data and loss are; what else the numbers depend on is taken
            from the files.

    Raises:
        ResultFileError: `spec` is of another run, or numbers differ.
    """
    reason = _not_by_themselves(parts)
    if reason is not None:
        return Recomputed(notes=(f"no sample was computed anew: {reason}",))
    job = prepare(_as_they_were(parts, spec))
    _require_same_run(parts, job)
    return Recomputed(sum(_recomputed(job, part) for part in parts.files))


def _not_by_themselves(parts: Parts) -> str | None:
    """Say why samples computed one by one need not give the numbers of the files."""
    if parts.identity.get("coupling") == "own-loss":
        return "with own-loss coupling the numbers depend on which samples share a batch"
    unproved = not all(part.certificate.get("verified") for part in parts.files)
    if parts.identity.get("mode") == "train" and unproved:
        return (
            "numbers of a model in train mode may depend on which samples share a batch, and on "
            "chance, and nothing was proved of some (verify = never)"
        )
    return None


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


def _recomputed(job: Job, part: Part) -> int:
    """Compute a few samples of a file anew; return how many."""
    seed = drawn(job.scope.seed, part.start)
    with open_file(part.path) as file:
        rows = few(file, seed, FEW)
        for row in rows.tolist():
            for what, stored, found, slack in _numbers(job, file, row):
                _require_alike(job, file, row, what, stored, found, slack)
    return len(rows)


def _numbers(job: Job, file: GradientFile, row: int) -> Iterator[tuple[str, float, float, float]]:
    """Yield the numbers of a sample: which, as stored, as computed, what may be rounding."""
    batch = job.load(int(file.samples["index"][row]), 1)
    made = rows_of(job, (), batch, job.scope.evaluate(batch))
    eps, rtol = torch.finfo(job.scope.problem.precision).eps, ALIKE[job.scope.problem.precision]
    share = min(_ROUNDINGS * eps, rtol)
    norm = float(made.norm)
    for what, column, found in (("loss", "loss", made.loss), ("gradient norm", "norm", made.norm)):
        values = wide(file.samples[column])
        largest = float(np.abs(values[np.isfinite(values)]).max(initial=0.0))
        yield what, float(values[row]), float(found), share * largest
    largest = share * largest + min(_SHARE * eps, rtol) * norm
    for name, value in made.norms.items():
        stored = float(file.norms[name][row])
        yield f"gradient norm by {name!r}", stored, float(value), largest


def _require_alike(
    job: Job, file: GradientFile, row: int, what: str, stored: float, found: float, slack: float
) -> None:
    tolerance = ALIKE[job.scope.problem.precision] * max(abs(stored), abs(found)) + slack
    if abs(stored - found) <= tolerance:
        return
    raise ResultFileError(
        f"sample {int(file.samples['index'][row])} has the {what} {stored:.6g} in this file, and "
        f"{found:.6g} when it is computed anew: model, loss, data or what they use have changed",
        where=str(file.path),
        remedy="Compute the file again with the code and the data of today, or merge where they "
        "are as they were.",
    )
