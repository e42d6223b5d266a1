"""Merging: partial files (shards) of one run are checked and joined into one result file.

Each partial file must be sealed and belong to the run, and their samples must be contiguous. The
result is written to `OUT.h5.part` first.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor

from gradscope.core.texts import noun_of
from gradscope.errors import OutputError, RefusedError, ResultFileError
from gradscope.storage.format.files import (
    locked,
    reading,
    require_distinct,
    require_free,
    require_place,
    writing,
)
from gradscope.storage.format.layout import (
    SOURCES,
    TABLES,
    Form,
    describe,
    factors_group,
    in_table,
    stored_form,
    utf8_links,
)
from gradscope.storage.format.numbers import h5_type, numpy_dtype, unescape
from gradscope.storage.plan import FilePlan, FinishedBatch, States, differences, to_json
from gradscope.storage.read.file import column, stored_states
from gradscope.storage.read.opening import OpenFile, document, open_checked, reopen
from gradscope.storage.write.create import Inspect, complete, lay_out
from gradscope.storage.write.journal import LONGEST, Paths, require_not_there
from gradscope.storage.write.region import copy_rows
from gradscope.storage.write.target import Target

StatesByOwner = dict[str, dict[str, Tensor]]  # {owner: {key: tensor}}

ROWS = "samples/index"  # the column of a file's rows
_NUMBER = re.compile(r"\.shard-\d+-of-")


@dataclass(frozen=True)
class PartialFile:
    """One partial file. Its samples are start:stop of the data set."""

    path: Path
    start: int
    stop: int
    index: int | None  # the shard's number, or None if the file is not a shard
    seal: bytes  # the SHA-256 of the seal
    certificate: Mapping[str, Any]  # the certificate of the run that wrote the file
    batch_size: int | None  # the batch size of that run, if recorded

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class RunFiles:
    """The files of one run, which computes samples start:stop of the data set."""

    files: tuple[PartialFile, ...]  # in the order of their samples
    start: int
    stop: int
    # the part of `FilePlan.identity` that is equal in all files
    identity: dict[str, Any]
    run: dict[str, Any]  # the resolved run of the first file
    attributes: dict[str, str]  # the hashes of the run's inputs
    parameters: dict[str, tuple[int, ...]]  # {name: shape}
    chains: tuple[tuple[str, bool], ...]  # (text, whether it ends in an aggregate)
    forms: Mapping[str, Form]  # {path: form of the column in the merged file}
    # the paths of columns that have different forms in different files
    uneven: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def noun(self) -> str:
        """The word for a row: sample, token or group."""
        return noun_of(self.run)


def check_files(paths: Iterable[Path], samples: str = ROWS) -> RunFiles:
    """Open and check every file; raise if they are not all of one run, or leave gaps.

    `samples` is the column with the samples of which each file has some: its rows, or the columns
    of its rows.
    """
    found: RunFiles | None = None
    for path in paths:
        with open_checked(path) as source, reading(str(path)):
            one = _parts(path, source, samples)
        found = one if found is None else _joined(found, one)
    if found is None:
        raise ResultFileError("there is no file to merge", remedy="Give shards, or their folder.")
    return _in_order(found)


def _parts(path: Path, source: OpenFile, samples: str) -> RunFiles:
    """Return one file as a `RunFiles`."""
    file = source.file
    if SOURCES in file.attrs:
        raise ResultFileError(
            "this is a virtual file: its rows are in other files",
            where=str(path),
            remedy="Give the files from which it was merged.",
        )
    facts = document(file.attrs, "identity")
    try:
        n = len(file[samples])
        start, stop = (int(position) for position in facts.pop("samples"))
        shard = facts.get("shard") or {}
        index = shard.get("index")
        whole = [int(position) for position in shard.get("samples", (start, stop))]
        if by_rows := samples == ROWS:
            facts["stored"] = {k: v for k, v in facts["stored"].items() if k != "samples"}
        facts["shard"] = {k: v for k, v in shard.items() if k != "index"}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ResultFileError(
            "the file does not record its run and its range of samples",
            where=str(path),
            remedy="Give files that gradscope compute wrote, or shards of gradscope attribute.",
        ) from error
    if n != stop - start:
        raise ResultFileError(
            f"the file records samples {start:,} to {stop:,}, but has {n:,} samples",
            where=str(path),
            remedy="Compute this file again.",
        )
    run = document(file.attrs, "run")
    batch_size = run.get("batch_size")
    groups = [f"/{table}" for table in TABLES]
    groups += [f"/chains/{k}" for k, c in file["chains"].items() if not c.attrs["reduced"]]
    columns = [(f"{g}/{name}", item) for g in groups for name, item in file[g].items()]
    part = PartialFile(
        path=path,
        start=start,
        stop=stop,
        index=index,
        seal=source.seal,
        certificate=document(file.attrs, "certificate"),
        batch_size=batch_size if isinstance(batch_size, int) and batch_size > 0 else None,
    )
    return RunFiles(
        files=(part,),
        start=whole[0],
        stop=whole[-1],
        identity=facts,
        run=run,
        attributes={key: str(file.attrs[key]) for key in file.attrs if key.endswith("_sha256")},
        parameters={k: tuple(s) for k, s in document(file.attrs, "parameters").items()},
        chains=tuple(
            (str(chain.attrs["chain"]), bool(chain.attrs["reduced"]))
            for chain in (file["chains"][str(k)] for k in range(len(file["chains"])))
        ),
        forms={key: stored_form(item) for key, item in columns} if by_rows else {},
    )


def _joined(a: RunFiles, b: RunFiles) -> RunFiles:
    """Return `a` with the file of `b` added; raise if it belongs to another run."""
    path = b.files[0].path
    different = list(differences(a.identity, b.identity))
    different = different or list(differences(a.attributes, b.attributes))
    if different or a.chains != b.chains:
        raise ResultFileError(
            f"this file and {a.files[0].path} are of different runs: "
            + "; ".join(different or ["the chains differ"]),
            where=str(path),
            remedy="Give files of one run only.",
        )
    return replace(
        a,
        files=(*a.files, *b.files),
        start=min(a.start, b.start),
        stop=max(a.stop, b.stop),
        forms=_common_forms(a.forms, b.forms, path),
        uneven=a.uneven | {key for key, form in a.forms.items() if form != b.forms.get(key)},
    )


def _common_forms(a: Mapping[str, Form], b: Mapping[str, Form], path: Path) -> dict[str, Form]:
    """Return a form for each column that can hold the rows of both files.

    If the factors' sizes differ, the rows become dense, as in a run whose sizes change.
    """
    kept = {}
    for key, form in a.items():
        other = b.get(key)
        if form == other:
            kept[key] = form
        elif other and (form.shape, form.dtype) == (other.shape, other.dtype):
            kept[key] = form.dense
    if len(kept) < len(a) or len(a) != len(b):
        raise ResultFileError(
            f"{', '.join(sorted((a.keys() | b.keys()) - kept.keys()))}: "
            "shape or dtype differs from the other files",
            where=str(path),
            remedy="Give files of one run only.",
        )
    return kept


def _in_order(parts: RunFiles) -> RunFiles:
    """Return the files sorted by samples; raise if a sample is missing or in two files."""
    files = sorted(parts.files, key=lambda part: (part.start, part.stop))
    for before, after in pairwise(files):
        if after.start < before.stop:
            what = f"{parts.noun}s {after.start:,} to {min(before.stop, after.stop):,} are in two "
            what += f"files: here and in {before.path}"
            raise ResultFileError(
                "the file is given twice" if after.path.samefile(before.path) else what,
                where=str(after.path),
                remedy="Give each file once, and only shards I/N with the same N.",
            )
    gaps = list(_gaps(parts, files))
    if gaps:
        more = f", and {len(gaps) - 3:,} more gaps" if len(gaps) > 3 else ""
        raise ResultFileError(
            f"{parts.noun}s are missing: {'; '.join(gaps[:3])}{more}",
            where=str(files[0].path.parent.absolute()),
            remedy="Compute the missing shards with the same command, then merge again.",
        )
    batch_size = parts.identity.get("batch_size") or 1  # stored if gradients depend on it
    for part in files:
        if (part.start - parts.start) % batch_size:
            raise ResultFileError(
                f"the file begins in the middle of a batch of {batch_size:,}; with own-loss "
                "coupling, gradients depend on which samples share a batch",
                where=str(part.path),
                remedy="Compute the files with `gradscope compute --shard I/N`, which splits "
                "between batches.",
            )
    return replace(parts, files=tuple(files))


def _gaps(parts: RunFiles, files: list[PartialFile]) -> Iterator[str]:
    """Yield a text for each range of samples that is in no file."""
    position = parts.start
    last, count = -1, parts.identity["shard"].get("count")
    for part in files:
        if part.start > position:
            yield f"{position:,} to {part.start:,}{_absent(part, last, part.index)}"
        position, last = part.stop, -1 if part.index is None else part.index
    if parts.stop > position:
        yield f"{position:,} to {parts.stop:,}{_absent(files[-1], last, count)}"


def _absent(like: PartialFile, last: int, index: int | None) -> str:
    """Return a text on the missing shards between two files, and which are unfinished."""
    numbers = range(last + 1, last + 1 if index is None else index)
    if not numbers:
        return ""
    places = [like.path.with_name(_NUMBER.sub(f".shard-{k}-of-", like.path.name)) for k in numbers]
    begun = [path.name for path in places if path.with_name(f"{path.name}.part").exists()]
    which = f"shard {numbers[0]}" if len(numbers) == 1 else f"shards {numbers[0]} to {numbers[-1]}"
    return f" ({which}{'; not finished: ' + ', '.join(begun[:3]) if begun else ''})"


@contextmanager
def open_joiner(
    path: Path,
    plan: FilePlan,
    parts: RunFiles,
    batch_size: int,
    *,
    overwrite: bool = False,
    virtual: bool = False,
) -> Iterator["Joiner"]:
    """Open the merged file for writing; it is removed if it is not finished.

    Args:
        path: The merged file.
        plan: The plan of the whole run.
        parts: The partial files.
        batch_size: Samples of a batch, which determine the chunks of the merged file.
        overwrite: Replace an existing file.
        virtual: Leave the rows in the partial files, and refer to them.

    Raises:
        RefusedError: `virtual`, and the partial files store rows in different forms.
        OutputError: The file cannot be written, exists already or would replace a partial file.
    """
    paths = Paths(path)
    require_output(path, parts, overwrite=overwrite)
    with ExitStack() as stack:
        with writing(path):
            descriptor = stack.enter_context(locked(paths.part))
            require_not_there(paths, descriptor, overwrite=overwrite)
            if paths.progress.exists() and os.fstat(descriptor).st_size and not overwrite:
                raise OutputError(
                    "an unfinished file of a stopped run exists",
                    where=str(paths.part),
                    remedy="Choose another name, or give overwrite=True to discard that run.",
                )
            paths.progress.unlink(missing_ok=True)  # an unfinished merge starts again
        joiner = Joiner(paths, descriptor, parts, virtual)
        stack.callback(joiner.close)
        joiner.lay_out(plan, min(batch_size, plan.n))
        yield joiner


class Joiner:
    """The merged file while it is written."""

    def __init__(self, paths: Paths, descriptor: int, parts: RunFiles, virtual: bool) -> None:
        self._paths, self._parts, self._virtual = paths, parts, virtual
        self._target = Target(descriptor)
        self._done = False

    def lay_out(self, plan: FilePlan, batch_size: int) -> None:
        """Create all groups, and all data sets with a sample axis."""
        forms, more = self._parts.forms, []
        if self._virtual:
            more = [partial(_create_virtual, parts=self._parts, folder=self._paths.final.parent)]
            forms = {path: form for path, form in forms.items() if in_table(path)}
        with writing(self._paths.final):
            self._regions = lay_out(self._paths, self._target, plan, forms, batch_size, *more)

    def add(self, part: PartialFile) -> StatesByOwner:
        """Copy the rows of the next partial file, and return its reducers' states."""
        with reopen(part.path, part.seal) as source:
            file, checks = source.file, source.checks
            index = column(file["samples/index"], checks)
            if not np.array_equal(index, np.arange(part.start, part.stop)):
                raise ResultFileError(
                    f"the file records samples {part.start:,} to {part.stop:,}, but its column "
                    "/samples/index differs",
                    where=str(part.path),
                    remedy="Compute this file again, then merge.",
                )
            kept = file.get("states", {})
            if not kept and bool(np.any(column(file["samples/finite"], checks))):
                what = (
                    "the file does not store the reducers' states, which merging aggregates needs"
                )
                remedy = "Compute the file again with gradscope compute --shard I/N."
                raise ResultFileError(what, where=str(part.path), remedy=remedy)
            states = {
                owner: {key: torch.from_numpy(v) for key, v in stored_states(group, checks).items()}
                for owner, group in kept.items()
            }
            for path, form in self._parts.forms.items():
                for name in form.parts:
                    self._copy(source, path, name, len(part))
        with writing(self._paths.final):
            self._target.flush()
        return states

    def append(self, rows: FinishedBatch) -> None:
        """Write rows that are not in one of the partial files, but made of several."""
        with writing(self._paths.final):
            self._regions.add(rows, self._target)

    def _copy(self, source: OpenFile, path: str, name: str, n: int) -> None:
        """Copy n rows of a column or of a factor."""
        place = f"{path}/{name}" if name else path
        item, region = source.file[place], self._regions.by_path[place]
        lost = int(item.attrs.get("overflowed", 0))
        region.mark = replace(region.mark, overflowed=region.mark.overflowed + lost)
        if in_table(path):
            values = column(item, source.checks, decode=False)
            values = values.view(np.uint8) if values.dtype.kind == "S" else values
            with writing(self._paths.final):
                region.add(torch.from_numpy(values), self._target)
        elif not self._virtual:
            copy_rows(item, source.checks, region, n, self._target, self._paths.final)

    def finish(
        self,
        results: Mapping[int, Mapping[str, Tensor]],
        certificate: Mapping[str, Any],
        norm_attributes: Mapping[str, Mapping[str, float]],
        states: States,
        look: Inspect | None = None,
    ) -> None:
        """Complete the file, as `Writer.finish` does."""
        ending = (results, certificate, norm_attributes, states, look)
        with writing(self._paths.final):
            complete(self._paths, self._target, self._regions, *ending)
        self._done = True

    def close(self) -> None:
        """Remove the file unless it is complete."""
        with suppress(OSError):
            self._target.close()
        if not self._done:
            with suppress(OSError):  # the first error is the one to report
                self._paths.part.unlink(missing_ok=True)


def require_output(path: Path, parts: RunFiles, *, overwrite: bool) -> None:
    """Raise if the merged file cannot be written."""
    require_place(path, LONGEST)
    with writing(path):
        require_distinct(path, [part.path for part in parts.files])
        require_free(path, overwrite=overwrite)


def _create_virtual(file: h5py.File, parts: RunFiles, folder: Path) -> None:
    """Create virtual data sets for the rows of all chains, and record their source files.

    Other programs read the rows through HDF5, which searches the folder of the virtual file. HDF5
    reads rows of a missing file as the fill value: NaN, or -1 for indices. gradscope opens the
    source files directly. Paths are relative to `folder`, the virtual file's folder.
    """
    if parts.uneven:
        raise RefusedError(
            f"{', '.join(sorted(parts.uneven))}: the sizes of the factors differ between files, "
            "so one virtual data set cannot hold them",
            where="virtual",
            remedy="Run gradscope merge without --virtual, or gradscope compute --layout dense.",
        )
    sources = [
        (os.path.relpath(part.path, folder), part.start - parts.start, part.stop - parts.start)
        for part in parts.files
    ]
    file.attrs[SOURCES] = to_json(
        [
            {"path": name, "seal": part.seal.hex(), "rows": rows}
            for part, (name, *rows) in zip(parts.files, sources, strict=True)
        ]
    )
    for path, form in parts.forms.items():
        if in_table(path):
            continue
        place, _, escaped = path.rpartition("/")
        group = file[place] if form.kind is None else factors_group(file[place], escaped, form)
        for name, (row, dtype) in form.parts.items():
            origin = f"{path}/{name}" if name else path
            made = _virtual(group, name or escaped, row, dtype, origin, sources)
            if form.kind is None:
                describe(made, unescape(escaped), "dense")


def _virtual(
    group: h5py.Group,
    escaped: str,
    row: tuple[int, ...],
    dtype: torch.dtype,
    path: str,
    sources: list[tuple[str, int, int]],
) -> h5py.Dataset:
    """Create a data set (N, *row) whose rows are in the data set `path` of each source file."""
    space = h5py.h5s.create_simple((sources[-1][2], *row))
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_obj_track_times(False)  # no times, so the same run writes the same bytes
    numbers = numpy_dtype(dtype)
    plist.set_fill_value(np.array(np.nan if numbers.kind in "fc" else -1, numbers))
    for name, start, stop in sources:
        source = h5py.h5s.create_simple((stop - start, *row))
        if not source.get_simple_extent_npoints():
            continue
        space.select_hyperslab((start, *[0] * len(row)), (stop - start, *row))
        plain = (text.replace("%", "%%") for text in (name, path))  # HDF5 replaces %b by a number
        plist.set_virtual(space, *(t.encode("utf-8", "surrogateescape") for t in plain), source)
    space.select_all()
    made = h5py.h5d.create(group.id, escaped.encode(), h5_type(dtype), space, plist, utf8_links())
    return h5py.Dataset(made)
