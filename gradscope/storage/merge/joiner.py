"""The file of a whole run, which is put together from parts: `OUT.h5.part` first."""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor

from gradscope.blocks.base import TILE_BYTES
from gradscope.errors import OutputError, RefusedError, ResultFileError
from gradscope.storage.format.files import (
    locked,
    reading,
    require_place,
    secure_space,
    writing,
)
from gradscope.storage.format.forms import (
    DENSE,
    create_columns,
    describe,
    factors_group,
    in_table,
    utf8_links,
)
from gradscope.storage.format.layout import SOURCES, Shape
from gradscope.storage.format.numbers import h5_type, numpy_dtype, unescape
from gradscope.storage.merge.parts import Part, Parts
from gradscope.storage.plan import FilePlan, States, to_json
from gradscope.storage.read.arrays import column, dense_rows, stored_states
from gradscope.storage.read.checks import Checks
from gradscope.storage.read.opening import Opened, opened_again
from gradscope.storage.write.create import describe_run
from gradscope.storage.write.finish import Ending, Look, complete
from gradscope.storage.write.journal import LONGEST, Paths, require_not_there
from gradscope.storage.write.region import Region, Regions
from gradscope.storage.write.target import Target

Owned = dict[str, dict[str, Tensor]]  # {owner: {key: tensor}}


@contextmanager
def open_joiner(
    path: Path,
    plan: FilePlan,
    parts: Parts,
    batch: int,
    *,
    overwrite: bool = False,
    virtual: bool = False,
) -> Iterator["Joiner"]:
    """Open the file of a whole run for its parts; unless it gets finished, nothing stays behind.

    Args:
        path: The final file.
        plan: The run, as if it had been one.
        parts: Its files.
        batch: The samples of a batch, on which the chunks of the new file depend.
        overwrite: Replace a file that is there.
        virtual: Leave the rows where they are, and refer to them.

    Raises:
        RefusedError: The rows cannot be referred to, because their forms differ.
        OutputError: The file cannot be written, is there already or is one of the parts.
    """
    paths = Paths(path)
    require_free(path, parts, overwrite=overwrite)
    with ExitStack() as stack:
        with writing(path):
            descriptor = stack.enter_context(locked(paths.part))
            require_not_there(paths, descriptor, overwrite=overwrite)
            if paths.progress.exists() and os.fstat(descriptor).st_size and not overwrite:
                raise OutputError(
                    "an unfinished file of a stopped run is there",
                    where=str(paths.part),
                    remedy="Choose another name, or give --overwrite to give it up.",
                )
            paths.progress.unlink(missing_ok=True)  # an unfinished merge has nothing worth keeping
        joiner = Joiner(paths, descriptor, parts, virtual=virtual)
        stack.callback(joiner.close)
        joiner.lay_out(plan, batch)
        yield joiner


class Joiner:
    """The file of a whole run, which is put together from parts."""

    def __init__(self, paths: Paths, descriptor: int, parts: Parts, *, virtual: bool) -> None:
        self._paths, self._descriptor = paths, descriptor
        self._parts, self._virtual = parts, virtual
        self._target = Target(descriptor)
        self._regions: Regions | None = None
        self._done = False

    def lay_out(self, plan: FilePlan, batch: int) -> None:
        """Create all groups and data sets with a sample axis."""
        with writing(self._paths.final):
            os.ftruncate(self._descriptor, 0)
            with self._target.editing() as file:
                describe_run(file, plan)
                forms = self._parts.forms
                if self._virtual:
                    _create_virtual(file, self._parts, self._paths.final.parent)
                    forms = {path: form for path, form in forms.items() if in_table(path)}
                create_columns(file, forms, plan.n, min(batch, plan.n))
                self._regions = Regions.of(file)
            secure_space(self._paths.part, self._descriptor)

    def add(self, part: Part) -> Owned:
        """Copy the rows of the next part, and return its reducers' states."""
        assert self._regions is not None  # it is laid out
        with opened_again(part.path, part.seal) as source:
            index = column(source.file["samples/index"], source.checks)
            if not np.array_equal(index, np.arange(part.start, part.stop)):
                raise ResultFileError(
                    f"its samples are not {part.start:,} to {part.stop:,}, as it says",
                    where=str(part.path),
                    remedy="Compute it again, and merge then.",
                )
            states = _states(source, part)
            for region, values in self._rows(source, len(part), self._regions.by_path):
                with writing(self._paths.final):
                    region.add(values, self._target)
        with writing(self._paths.final):
            self._target.flush()
        return states

    def finish(
        self,
        results: Mapping[int, Mapping[str, Tensor]],
        certificate: Mapping[str, Any],
        norm_attributes: Mapping[str, Mapping[str, float]],
        states: States,
        look: Look | None = None,
    ) -> None:
        """Complete the file, as `Writer.finish` does."""
        assert self._regions is not None  # it is laid out
        ending = Ending(results, certificate, norm_attributes, states, look)
        with writing(self._paths.final):
            complete(self._paths, self._descriptor, self._target, self._regions, ending)
        self._done = True

    def close(self) -> None:
        """Remove the file unless it is complete."""
        with suppress(OSError):
            self._target.close()
        if not self._done:
            with suppress(OSError):  # what stopped the merge has been said
                self._paths.part.unlink(missing_ok=True)

    def _rows(
        self, source: Opened, n: int, regions: Mapping[str, Region]
    ) -> Iterator[tuple[Region, Tensor]]:
        """Yield what is written of a part of n samples, in the form that all parts have."""
        for path, form in self._parts.forms.items():
            item = source.file[path]
            is_dense = isinstance(item, h5py.Dataset)
            places = [path] if is_dense else [f"{path}/{name}" for name in form.parts]
            for region, place in ((regions[p], p) for p in places if p in regions):
                lost = int(source.file[place].attrs.get("overflowed", 0))
                region.mark = replace(region.mark, overflowed=region.mark.overflowed + lost)
            if in_table(path):
                values = column(item, source.checks, decode=False)
                values = values.view(np.uint8) if values.dtype.kind == "S" else values
                yield regions[path], torch.from_numpy(values)
            elif not self._virtual and (is_dense or form.kind is None):
                yield from _copied(item, source.checks, regions[path], n)
            elif not self._virtual:
                for place in places:
                    yield from _copied(source.file[place], source.checks, regions[place], n)


def _copied(
    item: h5py.HLObject, checks: Checks, region: Region, n: int
) -> Iterator[tuple[Region, Tensor]]:
    """Yield n rows of a data set, or of factors that are to be dense, some at a time."""
    is_dense = isinstance(item, h5py.Dataset)
    step = max(1, TILE_BYTES // max(1, region.row) // region.together) * region.together
    for start in range(0, n, step):
        stop = min(start + step, n)
        with reading(f"{item.file.filename}: {item.name}"):
            if is_dense:
                rows = checks.rows(item, start, stop)
            else:
                rows = dense_rows(item, slice(start, stop), checks)
        yield region, torch.from_numpy(rows).to(region.dtype)


def _states(source: Opened, part: Part) -> Owned:
    """Read the reducers' states."""
    file, checks = source.file, source.checks
    kept = file.get("states", {})
    if not kept and bool(np.any(column(file["samples/finite"], checks))):
        raise ResultFileError(
            "the file holds no states of reducers, which are kept in shards and where small",
            where=str(part.path),
            remedy="Compute it as a shard: --shard I/N.",
        )
    return {
        owner: {key: torch.from_numpy(v) for key, v in stored_states(state, checks).items()}
        for owner, state in kept.items()
    }


def require_free(path: Path, parts: Parts, *, overwrite: bool) -> None:
    """Check that the final file of some parts may be written."""
    require_place(path, LONGEST)
    with writing(path):
        is_there = path.exists()
        is_part = is_there and any(path.samefile(part.path) for part in parts.files)
    if is_part:
        raise OutputError(
            "the result would replace a file that it is made from",
            where=str(path),
            remedy="Choose another name.",
        )
    if is_there and not overwrite:
        raise OutputError(
            "the file exists already",
            where=str(path),
            remedy="Choose another name, or give --overwrite.",
        )


def _create_virtual(file: h5py.File, parts: Parts, folder: Path) -> None:
    """Create virtual data sets for the rows of all chains, and record where they are.

    Other programs read them through HDF5, which looks for the files beside the virtual one and
    reads what is missing as the fill value: NaN here, and -1 for indices. gradscope never does.
    `folder` is that of the file, which the parts' paths are relative to.
    """
    if parts.uneven:
        raise RefusedError(
            f"{', '.join(sorted(parts.uneven))}: stored as factors of other sizes in other files, "
            "which one data set cannot refer to",
            where="virtual",
            remedy="Merge without --virtual, or compute with --layout dense.",
        )
    names = {part.path: os.path.relpath(part.path, folder) for part in parts.files}
    rows = {part.path: (part.start - parts.start, part.stop - parts.start) for part in parts.files}
    records = [
        {"path": names[part.path], "seal": part.seal.hex(), "rows": rows[part.path]}
        for part in parts.files
    ]
    file.attrs[SOURCES] = to_json(records)
    sources = [(names[part.path], *rows[part.path]) for part in parts.files]
    for path, form in parts.forms.items():
        if in_table(path):
            continue
        place, _, escaped = path.rpartition("/")
        if form.kind is None:
            made = _virtual(file[place], escaped, *form.parts[DENSE], path, sources)
            describe(made, unescape(escaped), "dense")
        else:
            group = factors_group(file[place], escaped, form)
            for part, (shape, dtype) in form.parts.items():
                _virtual(group, part, shape, dtype, f"{path}/{part}", sources)


def _virtual(
    group: h5py.Group,
    escaped: str,
    row: Shape,
    dtype: torch.dtype,
    path: str,
    sources: list[tuple[str, int, int]],
) -> h5py.Dataset:
    """Create a data set (N, *row) whose rows are in the data sets `path` of the files."""
    space = h5py.h5s.create_simple((sources[-1][2], *row))
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_obj_track_times(False)  # the same run gives the same bytes
    numbers = numpy_dtype(dtype)
    plist.set_fill_value(np.array(np.nan if numbers.kind in "fc" else -1, numbers))
    for name, start, stop in sources:
        source = h5py.h5s.create_simple((stop - start, *row))
        if not source.get_simple_extent_npoints():
            continue
        space.select_hyperslab((start, *[0] * len(row)), (stop - start, *row))
        plain = (text.replace("%", "%%") for text in (name, path))  # %b stands for a number
        plist.set_virtual(space, *(t.encode("utf-8", "surrogateescape") for t in plain), source)
    space.select_all()
    made = h5py.h5d.create(group.id, escaped.encode(), h5_type(dtype), space, plist, utf8_links())
    return h5py.Dataset(made)
