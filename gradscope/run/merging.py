"""Merging: the files of one run become the file that one process would have written.

    with merging(paths, output) as under_way:
        for part in under_way.remaining():
            under_way.add(part)
        report = under_way.finish()

The caller may wrap the iterator of files, as for a run.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain as chained
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ValidationError

from gradscope.config import RunSpec, parse_compression
from gradscope.core.grammar import Stage, parse
from gradscope.errors import RefusedError, ResultFileError, SpecError
from gradscope.run.job import require_one_pass, stages_digests
from gradscope.run.outcome import (
    MEAN_GRADIENT,
    NONFINITE,
    mean_gradient_norms,
    nonfinite_of_file,
    require_written,
    results_of,
    with_counts,
)
from gradscope.run.recomputing import Recomputed, looked_at, recompute
from gradscope.stages.chain import Chain, bind
from gradscope.stages.reducers import State, reducers
from gradscope.stages.reducers.base import Merge as MergeStates
from gradscope.stats import Json, Proof, Record
from gradscope.storage import (
    ChainPlan,
    FilePlan,
    GradientFile,
    Joiner,
    Part,
    Parts,
    check_parts,
    differences,
    named,
    open_file,
    open_joiner,
    require_free,
    writing,
)

_USUAL_BATCH = 256


class MergeReport(Record):
    """What one `gradscope merge` did, for its last words and its `--json`."""

    schema_: Literal["gradscope.merge"] = "gradscope.merge"
    version: Literal[1] = 1
    path: str  # of the file that was written
    bytes: int
    files: int  # that it was made from
    virtual: bool  # whether the rows stay in them
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

    parts: Parts  # the files, checked
    chains: Mapping[int, Chain]  # the reduced ones
    path: Path
    joiner: Joiner  # the file that is written, open
    begun: float  # on the performance counter
    virtual: bool = False
    recomputed: Recomputed = field(default_factory=Recomputed)
    states: dict[str, State] = field(default_factory=dict)  # of reducers, by number and owner

    def remaining(self) -> Iterator[Part]:
        """Yield the files, in the order of their samples."""
        yield from self.parts.files

    def add(self, part: Part) -> None:
        """Copy the rows of the next file, and merge its reducers' states with those so far."""
        for owner, state in self.joiner.add(part).items():
            before = self.states.get(owner)
            self.states[owner] = state if before is None else self._merge_of(owner)(before, state)

    def finish(self) -> MergeReport:
        """Write the aggregates, verify the file and put it in its place."""
        results, counts = results_of(self.chains, self.states)
        self.states = with_counts(self.states, counts)
        certificate = combined(self.parts.files)
        self.joiner.finish(
            results=results,
            certificate=certificate,
            norm_attributes=mean_gradient_norms(self.states, self.parts.parameters),
            states=self.states,
            look=self._look,
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
            recomputed=self.recomputed.samples,
            notes=self.recomputed.notes,
            seconds=time.perf_counter() - self.begun,
        )

    def _look(self, file: GradientFile) -> None:
        """Hold the file against itself before it takes its place."""
        own = {str(k) for k, c in self.chains.items() if ".py:" in c.text}
        counting = {owner: state for owner, state in self.states.items() if owner not in own}
        kept = file.run.get("spec", {}).get("compute", {}).get("nonfinite") == "keep"
        require_written(file, range(self.parts.start, self.parts.stop), counting, kept=kept)

    def _merge_of(self, owner: str) -> MergeStates:
        if owner == NONFINITE:
            return _counted
        if owner == MEAN_GRADIENT:
            return reducers.get("mean")().merge
        reducer = self.chains[int(owner)].reducer
        assert reducer is not None  # of reduced chains only
        return reducer.merge


@contextmanager
def merging(
    paths: Iterable[Path],
    output: Path,
    *,
    overwrite: bool = False,
    virtual: bool = False,
    code: Iterable[Path] = (),
    anew: RunSpec | None = None,
) -> Iterator[Merge]:
    """Check that files are the parts of one run, and yield their merge.

    Leaving the block early leaves nothing behind.

    Args:
        paths: The files, in any order.
        output: The file of the whole run.
        overwrite: Replace a file that is there.
        virtual: Leave the rows where they are, and refer to them.
        code: Python files that chains name and that may be run.
        anew: The run, of which a few samples of each file are computed anew and compared.

    Raises:
        ResultFileError: A file cannot be read or is of another run; samples are missing or twice;
            numbers contradict each other, or are not what is found anew.
        RefusedError: The parts cannot be merged exactly, or only with code that may not be run.
        OutputError: The file exists or cannot be written.
    """
    begun = time.perf_counter()
    parts = check_parts(paths)
    chains = _reduced_chains(parts, code)
    require_free(output, parts, overwrite=overwrite)
    samples = [sample for part in parts.files for sample in looked_at(part)]
    recomputed = Recomputed() if anew is None else recompute(parts, samples, anew)
    plan = _plan(parts)
    batch = plan.run.get("batch_size", _USUAL_BATCH)
    with open_joiner(output, plan, parts, batch, overwrite=overwrite, virtual=virtual) as joiner:
        yield Merge(parts, chains, output, joiner, begun, virtual, recomputed)


def merge(
    paths: Iterable[Path],
    output: Path,
    *,
    overwrite: bool = False,
    virtual: bool = False,
    code: Iterable[Path] = (),
    anew: RunSpec | None = None,
) -> MergeReport:
    """Merge files; see `merging`."""
    options = {"overwrite": overwrite, "virtual": virtual}
    with merging(paths, output, **options, code=code, anew=anew) as under_way:
        for part in under_way.remaining():
            under_way.add(part)
        return under_way.finish()


def _counted(a: State, b: State) -> State:
    """Add counts by chain."""
    return {k: sum(s[k] for s in (a, b) if k in s) + torch.tensor(0) for k in (a | b)}


def _plan(parts: Parts) -> FilePlan:
    """Return what one process would have planned to write."""
    samples = [parts.start, parts.stop]
    facts = {k: v for k, v in parts.identity.items() if k not in ("stored", "shard")}
    stored = parts.identity["stored"]
    compression = stored.get("compression")
    run = deepcopy(parts.run) | {"samples": samples}
    compute = run.get("spec", {}).get("compute", {})
    if run.pop("shard", None) is None:
        compute["samples"] = f"{parts.start}:{parts.stop}"
    compute["shard"] = None
    return FilePlan(
        run=run,
        fingerprint=facts | {"samples": samples},
        attributes=parts.attributes,
        n=len(parts),
        parameters=parts.parameters,
        chains=tuple(ChainPlan(text, reduced) for text, reduced in parts.chains),
        dtype=named(stored["dtype"]),
        layout=stored["layout"],
        compression=None if compression is None else parse_compression(compression),
    )


def _reduced_chains(parts: Parts, code: Iterable[Path]) -> dict[int, Chain]:
    """Return the reduced chains by number, from their reducers on.

    A file says which code its chains run, and a file comes from somewhere else: nothing is run
    unless it is among `code`.
    """
    try:
        stages = [parse(text) for text, _ in parts.chains]
        if not parts.identity["shard"]:  # of a shard this is known
            known = [[s for s in chain if ".py:" not in s.name] for chain in stages]
            require_one_pass([_bound(chain) for chain in known if chain])
        ends = {}
        for k, chain in enumerate(stages):
            if parts.chains[k][1]:
                # where the reducer is the user's own, all stages count
                first = next((i for i, stage in enumerate(chain) if stage.name in reducers), 0)
                ends[k] = chain[first:]
        if any(".py:" in stage.name for end in ends.values() for stage in end):
            _require_known_code(parts, stages, code)
        return {k: _bound(end) for k, end in ends.items()}
    except SpecError as error:  # the chain is the files' own, not what the user wrote
        raise ResultFileError(
            f"the files hold a chain that is none here: {error.what}",
            where=str(parts.files[0].path),
            remedy=f"{error.remedy or ''}\nMerge them with what computed them: the same version, "
            "and the packages that its stages are from.".lstrip(),
        ) from error


def _bound(stages: Sequence[Stage]) -> Chain:
    return bind(" | ".join(map(str, stages)))


def _require_known_code(
    parts: Parts, stages: Iterable[tuple[Stage, ...]], code: Iterable[Path]
) -> None:
    """Check that the user's own stages may be run, and are those of the run."""
    own = [stage.name for chain in stages for stage in chain if ".py:" in stage.name]
    named = {Path(name.rpartition(":")[0]).resolve() for name in own}
    missing = sorted(map(str, named - {path.resolve() for path in code}))
    if missing:
        raise RefusedError(
            f"merging needs code that the files name: {', '.join(missing)}",
            where="chains",
            remedy="Give --code FILE.py for each of them, if you trust it.",
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


class _Check(BaseModel, extra="allow"):
    error: float = 0.0
    tolerance: float = 0.0
    parameter: str = ""

    @property
    def rank(self) -> float:
        """How near it was to failing."""
        return self.error / self.tolerance if self.tolerance else self.error


class _FirstBatch(BaseModel):
    """What a file's certificate says of its first batch; nothing, where that is malformed."""

    verdict: str = ""
    backend: str = ""
    dtype: str = ""
    samples: int = 0
    nonfinite: int = 0
    completeness: _Check | None = None
    agreement: _Check | None = None
    compared: list[int] = []
    unused: list[str] = []

    @classmethod
    def of(cls, certificate: Mapping[str, Any]) -> "_FirstBatch":
        try:
            return cls.model_validate(certificate, strict=True)
        except ValidationError:
            return cls()


def combined(parts: Sequence[Part]) -> dict[str, Any]:
    """Return the certificate of files that become one, given in the order of their samples.

    The proofs of their first batches stand together: counts are sums, errors the largest. It is
    verified if all of them are; `merged` says of which samples nothing was proved.
    """
    if len(parts) == 1:
        return dict(parts[0].certificate)
    proofs = [(part, Proof.of(part.certificate)) for part in parts]
    proved = [(part, proof) for part, proof in proofs if proof.verified]
    first_only = [
        part
        for part, proof in proved  # with batches after the first, none of which was audited
        if proof.verify in ("first", None) and (proof.batches is None or proof.batches > 1)
    ]
    merged = {
        "count": len(parts),
        "verified": len(proved),
        "unverified": _spans(part for part, proof in proofs if not proof.verified),
        "first_only": _spans(first_only),
    }
    if not proved:
        return {**parts[0].certificate, "merged": merged}
    return {
        "verified": len(proved) == len(parts),
        **_first_batches([_FirstBatch.of(part.certificate) for part, _ in proved]),
        "unproved": sorted(set(chained(*(proof.unproved for _, proof in proofs)))),
        "proves": any(proof.proves for _, proof in proved),
        "audit": _audit(proofs),
        "merged": merged,
    }


def _audit(proofs: Sequence[tuple[Part, Proof]]) -> dict[str, Any]:
    counted = [proof for _, proof in proofs if proof.error is not None]
    worst = max(counted, key=lambda proof: proof.error or 0.0, default=Proof())
    words = {proof.verify for _, proof in proofs}
    batches = [
        p.batches or (-(-len(part) // part.batch) if part.batch else 0) for part, p in proofs
    ]
    return {
        "verify": words.pop() if len(words) == 1 else "mixed",
        "batches": sum(batches),
        "proved": sum(proof.proved or int(bool(proof.verified)) for _, proof in proofs),
        "audited": _joined(chained(*(proof.audited for _, proof in proofs))),
        "error": worst.error or 0.0,
        "parameter": worst.parameter or "",
    }


def _first_batches(found: Sequence[_FirstBatch]) -> dict[str, Any]:
    """Return what the proofs of several batches are together."""
    checks = {
        key: max(
            filter(None, (getattr(one, key) for one in found)),
            key=lambda c: c.rank,
            default=_Check(),
        )
        for key in ("completeness", "agreement")
    }
    counts = {key: sum(getattr(one, key) for one in found) for key in ("samples", "nonfinite")}
    compared = sorted(chained(*(one.compared for one in found)))
    names = dict.fromkeys(chained(*(one.backend.split(", ") for one in found)))
    verdict = (
        f"passed: sums of {counts['samples'] - counts['nonfinite']} samples to "
        f"{checks['completeness'].error:.0e}, {len(compared)} of them alone to "
        f"{checks['agreement'].error:.0e} ({found[0].dtype})"
    )
    scaled = [one for one in found if one.completeness and one.completeness.rank > 1]
    return {
        "verdict": scaled[0].verdict if scaled else verdict,
        "backend": ", ".join(name for name in names if name),
        "dtype": found[0].dtype,
        **counts,
        **{key: check.model_dump() for key, check in checks.items()},
        "compared": compared,
        "unused": [name for name in found[0].unused if all(name in one.unused for one in found)],
    }


def _spans(parts: Iterable[Part]) -> list[list[int]]:
    return _joined((part.start, part.stop - 1) for part in parts)


def _joined(spans: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Return first and last positions, neighbours as one."""
    found: list[list[int]] = []
    for first, last in spans:
        if found and found[-1][1] + 1 == first:
            found[-1][1] = last
        else:
            found.append([first, last])
    return found
