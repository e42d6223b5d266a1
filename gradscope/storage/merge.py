"""Joining the files of one run: `OUT.h5.part` first, as for any result file."""

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

from gradscope.errors import OutputError, ResultFileError
from gradscope.storage import complete, resume
from gradscope.storage.build import describe_run
from gradscope.storage.checks import Checks
from gradscope.storage.contents import StoredStates, stored_column
from gradscope.storage.disk import Disk
from gradscope.storage.editing import editing
from gradscope.storage.merge_copy import copied, multiplied
from gradscope.storage.merge_forms import Form, create_columns, in_table
from gradscope.storage.merge_parts import Part, Parts
from gradscope.storage.merge_virtual import create_virtual
from gradscope.storage.opening import Opened, opened_again
from gradscope.storage.plan import FilePlan, States
from gradscope.storage.sidecar import LONGEST, Paths
from gradscope.storage.slots import Slots, bind
from gradscope.storage.stream import Piece, Stream
from gradscope.storage.trouble import require_place, secure_space, writing

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
            descriptor = stack.enter_context(resume.locked(paths.part))
            resume.require_not_there(paths, descriptor, overwrite=overwrite)
            _require_none_unfinished(paths, descriptor, overwrite)
        joiner = Joiner(paths, descriptor, parts, virtual=virtual)
        stack.callback(joiner.close)
        joiner.lay_out(plan, batch)
        yield joiner


class Joiner:
    """The file of a whole run, which is put together from parts."""

    def __init__(self, paths: Paths, descriptor: int, parts: Parts, *, virtual: bool) -> None:
        self._paths, self._descriptor = paths, descriptor
        self._parts, self._virtual = parts, virtual
        self._disk = Disk(descriptor)
        self._slots: Slots | None = None
        self._done = False

    def lay_out(self, plan: FilePlan, batch: int) -> None:
        """Create all groups and data sets with a sample axis.

        Raises:
            OutputError: They cannot be written, or there is not enough space.
        """
        with writing(self._paths.final):
            os.ftruncate(self._descriptor, 0)
            with editing(self._descriptor) as file:
                describe_run(file, plan)
                forms = self._parts.forms
                if self._virtual:
                    create_virtual(file, self._parts, self._paths.final.parent)
                    forms = {path: form for path, form in forms.items() if in_table(path)}
                create_columns(file, forms, plan.n, min(batch, plan.n))
                self._slots = bind(file)
            secure_space(self._paths.part, self._descriptor)

    def add(self, part: Part) -> Owned:
        """Copy the rows of the next part, and return its reducers' states.

        Raises:
            ResultFileError: It is damaged, has changed meanwhile or has no states.
            OutputError: It cannot be copied.
        """
        with opened_again(part.path, part.seal) as source:
            _require_order(source, part)
            states = _states(source, part)
            for pieces in self._pieces(source):
                with writing(self._paths.final):
                    self._disk.write(pieces)
        with writing(self._paths.final):
            self._disk.wait()
        return states

    def finish(
        self,
        results: Mapping[int, Mapping[str, Tensor]],
        certificate: Mapping[str, Any],
        norm_attributes: Mapping[str, Mapping[str, float]],
        states: States,
        look: complete.Look | None = None,
    ) -> None:
        """Complete the file: verify it, and put it in its final place.

        Args:
            results: {chain: {name: (*shape)}} for the reduced chains.
            certificate: Stored as JSON.
            norm_attributes: {parameter: {attribute: value}}, for /norms.
            states: {owner: {key: tensor}}, the whole run's.
            look: Called with the file while it is open for its verification.

        Raises:
            OutputError: It cannot be completed.
        """
        assert self._slots is not None  # it is laid out
        with writing(self._paths.final):
            complete.complete(
                self._paths,
                self._descriptor,
                self._disk,
                self._slots,
                results,
                certificate,
                norm_attributes,
                states,
                look,
            )
        self._done = True

    def close(self) -> None:
        """Remove the file unless it is complete."""
        with suppress(OSError):
            self._disk.wait()
        self._disk.close()
        if not self._done:
            with suppress(OSError):  # what stopped the merge has been said
                self._paths.part.unlink(missing_ok=True)

    def _pieces(self, source: Opened) -> Iterator[list[Piece]]:
        """Yield what is to be written of a part, column by column."""
        assert self._slots is not None  # it is laid out
        streams, file = self._slots.streams, source.file
        for path, form in self._parts.forms.items():
            if in_table(path):
                column = stored_column(file[path], source.checks)
                values = column.view(np.uint8) if column.dtype.kind == "S" else column
                yield streams[path].add(torch.from_numpy(values))
            elif self._virtual:
                _count_overflowed(file, path, streams)
            else:
                yield from _rows(file[path], source.checks, form, streams)


def _rows(
    item: h5py.HLObject, checks: Checks, form: Form, streams: Mapping[str, Stream]
) -> Iterator[list[Piece]]:
    """Yield one column's rows in the form that all parts have in common."""
    if isinstance(item, h5py.Dataset):
        yield from copied(item, checks, streams[item.name])
    elif form.kind is None:
        yield from multiplied(item, checks, streams[item.name])
    else:
        for name in form.parts:
            yield from copied(item[name], checks, streams[f"{item.name}/{name}"])


def _count_overflowed(file: h5py.File, path: str, streams: Mapping[str, Stream]) -> None:
    """Add what a file says of rows that stay in it."""
    item = file[path]
    for place in [path] if isinstance(item, h5py.Dataset) else [f"{path}/{name}" for name in item]:
        if place in streams:
            mark = streams[place].mark
            lost = int(file[place].attrs.get("overflowed", 0))
            streams[place].mark = replace(mark, overflowed=mark.overflowed + lost)


def _states(source: Opened, part: Part) -> Owned:
    """Read the reducers' states.

    Raises:
        ResultFileError: They are damaged, or were not kept.
    """
    file, checks = source.file, source.checks
    kept = file.get("states", {})
    if not kept and bool(np.any(stored_column(file["samples/finite"], checks))):
        raise ResultFileError(
            "the file holds no states of reducers, which are kept in shards and where small",
            where=str(part.path),
            remedy="Compute it as a shard: --shard I/N.",
        )
    return {
        owner: {
            key: torch.from_numpy(values) for key, values in StoredStates(state, checks).items()
        }
        for owner, state in kept.items()
    }


def _require_order(source: Opened, part: Part) -> None:
    """Check that a file has the samples that it says, in their order."""
    index = stored_column(source.file["samples/index"], source.checks)
    if not np.array_equal(index, np.arange(part.start, part.stop)):
        raise ResultFileError(
            f"its samples are not {part.start:,} to {part.stop:,}, as it says",
            where=str(part.path),
            remedy="Compute it again, and merge then.",
        )


def require_free(path: Path, parts: Parts, *, overwrite: bool) -> None:
    """Check that the final file of some parts may be written.

    Raises:
        OutputError: It is there already, or one of the parts.
    """
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


def _require_none_unfinished(paths: Paths, descriptor: int, overwrite: bool) -> None:
    """Check that no unfinished run is in the way; an unfinished merge has nothing worth keeping."""
    if paths.progress.exists() and os.fstat(descriptor).st_size and not overwrite:
        raise OutputError(
            "an unfinished file of a stopped run is there",
            where=str(paths.part),
            remedy="Choose another name, or give --overwrite to give it up.",
        )
    paths.progress.unlink(missing_ok=True)
