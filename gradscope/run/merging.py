"""Merging: the files of one run become the file that one process would have written.

    with merging(paths, output) as under_way:
        for part in under_way.remaining():
            under_way.add(part)
        report = under_way.finish()

Whoever runs it may wrap the iterator of files, as for a run.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field

from gradscope.config import RunSpec, parse_compression
from gradscope.run import nonfinite, recorded
from gradscope.run.joint_proof import combined
from gradscope.run.recomputing import Recomputed, looked_at, recompute
from gradscope.run.run import MEAN_GRADIENT, mean_gradient_norms
from gradscope.run.stored_chains import reduced_chains
from gradscope.stages.chain import Chain
from gradscope.stages.reducers import State, reducers
from gradscope.stages.reducers.base import Merge as MergeStates
from gradscope.stats.base import Json, Record
from gradscope.storage import (
    ChainPlan,
    FilePlan,
    GradientFile,
    Joiner,
    Part,
    Parts,
    check_parts,
    open_file,
    open_joiner,
    require_free,
)
from gradscope.storage.formats import named
from gradscope.storage.trouble import writing

_USUAL_BATCH = 256


class MergeReport(Record):
    """What one `gradscope merge` did, for its last words and its `--json`.

    Attributes:
        path: The file that was written.
        bytes: Its size.
        files: How many it was made from.
        virtual: Whether the rows stay in them.
        samples: N.
        nonfinite: How many of them are not finite.
        chains_nonfinite: For each chain, how many of its numbers are not finite, the rows of
            such samples aside.
        chains: In canonical spelling.
        certificate: What was proved of the files, together.
        recomputed: How many samples were computed anew, and gave the same numbers.
        notes: Why no more of them were.
        seconds: Wall time.
    """

    schema_: Literal["gradscope.merge"] = Field(
        default="gradscope.merge", validation_alias="schema", serialization_alias="schema"
    )
    version: Literal[1] = 1
    path: str
    bytes: int
    files: int
    virtual: bool
    samples: int
    nonfinite: int
    chains_nonfinite: tuple[int, ...] = ()
    chains: tuple[str, ...]
    certificate: Json
    recomputed: int = 0
    notes: tuple[str, ...] = ()
    seconds: float


@dataclass
class Merge:
    """A merge under way.

    Attributes:
        parts: The files, checked.
        chains: The reduced chains, by number.
        path: The file that is written.
        joiner: The same, open.
        begun: When, on the performance counter.
        virtual: Whether rows stay in the files.
        recomputed: What was computed anew of them.
        states: The reducers' states so far, by chain number and "mean_gradient".
    """

    parts: Parts
    chains: Mapping[int, Chain]
    path: Path
    joiner: Joiner
    begun: float
    virtual: bool = False
    recomputed: Recomputed = field(default_factory=Recomputed)
    states: dict[str, State] = field(default_factory=dict)

    @property
    def certificate(self) -> dict[str, Any]:
        """What was proved of the files, together."""
        return combined(self.parts.files)

    def remaining(self) -> Iterator[Part]:
        """Yield the files, in the order of their samples."""
        yield from self.parts.files

    def add(self, part: Part) -> None:
        """Copy the rows of the next file, and merge its reducers' states with those so far."""
        for owner, state in self.joiner.add(part).items():
            merged = self._merge_of(owner)
            before = self.states.get(owner)
            self.states[owner] = state if before is None else merged(before, state)

    def finish(self) -> MergeReport:
        """Write the aggregates, verify the file and put it in its place."""
        found = {
            k: nonfinite.of_result(chain, self.states[str(k)])
            for k, chain in self.chains.items()
            if str(k) in self.states
        }
        self.states = nonfinite.recorded(self.states, {k: n for k, (_, n) in found.items()})
        self.joiner.finish(
            results={k: result for k, (result, _) in found.items()},
            certificate=self.certificate,
            norm_attributes=mean_gradient_norms(self.states, self.parts.parameters),
            states=self.states,
            look=self._look,
        )
        with writing(self.path):
            size = self.path.stat().st_size
        with open_file(self.path) as file:
            samples = int(np.count_nonzero(~file.samples["finite"].astype(bool)))
            chains = nonfinite.of_file(file, aggregates=False)
        return MergeReport(
            path=str(self.path),
            bytes=size,
            files=len(self.parts.files),
            virtual=self.virtual,
            samples=len(self.parts),
            nonfinite=samples,
            chains_nonfinite=chains,
            chains=tuple(text for text, _ in self.parts.chains),
            certificate=self.certificate,
            recomputed=self.recomputed.samples,
            notes=self.recomputed.notes,
            seconds=time.perf_counter() - self.begun,
        )

    def _look(self, file: GradientFile) -> None:
        """Hold the file against itself before it takes its place.

        Raises:
            OutputError: It contradicts itself.
        """
        built_in = {
            MEAN_GRADIENT,
            *(str(k) for k, c in self.chains.items() if ".py:" not in c.text),
        }
        counting = {owner: state for owner, state in self.states.items() if owner in built_in}
        kept = file.run.get("spec", {}).get("compute", {}).get("nonfinite") == "keep"
        recorded.require_samples(file, range(self.parts.start, self.parts.stop))
        recorded.require_counts(file, counting, kept=kept)

    def _merge_of(self, owner: str) -> MergeStates:
        if owner == nonfinite.OWNER:
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
    chains = reduced_chains(parts, code)
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
