"""Writing a result file: `OUT.h5.part` first, which becomes `OUT.h5` when complete and verified."""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
from torch import Tensor

from gradscope.errors import OutputError
from gradscope.storage import complete
from gradscope.storage import resume as resuming
from gradscope.storage.build import build
from gradscope.storage.commits import Commits, Kept
from gradscope.storage.disk import Disk
from gradscope.storage.editing import editing
from gradscope.storage.integrity import joined
from gradscope.storage.places import Place
from gradscope.storage.plan import FilePlan, Rows, States
from gradscope.storage.relayout import make_dense
from gradscope.storage.sidecar import LONGEST, Paths, Progress
from gradscope.storage.slots import Slots, bind
from gradscope.storage.structure import Structure
from gradscope.storage.trouble import require_place, secure_space, writing

KEEP_BYTES = 2**26  # states up to this size are copied with every batch, for a stop in between


@contextmanager
def open_writer(
    path: str | Path, plan: FilePlan, overwrite: bool = False, resume: bool = False
) -> Iterator["Writer"]:
    """Open a result file for writing; yields a `Writer`.

    When the body ends without `finish`, by an exception or not, what is complete is kept for
    `resume`; where nothing is, nothing stays behind.

    Args:
        path: The final file; the work goes on in `path`.part.
        plan: What will be stored.
        overwrite: Replace a file that is there; it stays untouched until the new one is complete.
        resume: Go on with an unfinished run of the same plan, or find that nothing is left to do.

    Raises:
        OutputError: The file cannot be written, is there already, or belongs to another run.
    """
    paths = Paths(Path(path))
    if plan.n < 1:
        raise OutputError("there is no sample to store", where=str(path))
    require_place(paths.final, LONGEST)
    with writing(paths.final):
        is_done = resuming.is_done(paths, plan, overwrite=overwrite, resume=resume)
    if is_done:
        yield Writer.of_complete(paths, plan)
        return
    with ExitStack() as stack:
        with writing(paths.final):
            descriptor = stack.enter_context(resuming.locked(paths.part))
            found = resuming.start(paths, descriptor, plan, overwrite=overwrite, resume=resume)
        replaces = overwrite or (found is not None and found.replaces)
        writer = Writer(paths, plan, descriptor, found, replaces)
        stack.callback(writer.close)
        yield writer


class Writer:
    """A result file that is being written.

    Attributes:
        completed: The number of rows in the file; after resuming, go on with this row.
        states: The reducers' states after these rows, as stored; empty at the beginning.
    """

    def __init__(
        self,
        paths: Paths,
        plan: FilePlan,
        descriptor: int,
        found: Progress | None,
        replaces: bool = False,
    ) -> None:
        self.completed = found.completed if found else 0
        self.states = found.states if found else {}
        self._paths, self._plan, self._descriptor, self._found = paths, plan, descriptor, found
        self._disk = Disk(descriptor)
        self._commits = Commits(paths, descriptor, plan.identity, self.completed, replaces)
        self._slots: Slots | None = None
        self._structure = found.structure if found else None
        self._kept = Kept(self.completed, self.states)
        self._proved = self._kept
        self._done = False

    @classmethod
    def of_complete(cls, paths: Paths, plan: FilePlan) -> "Writer":
        """Return a writer that has nothing left to do."""
        writer = cls(paths, plan, -1, None)
        writer.completed, writer._done = plan.n, True
        return writer

    def append(self, rows: Rows, states: States | None = None, *, proved: bool = False) -> None:
        """Write one batch.

        Args:
            rows: The batch's rows, which follow those that are complete.
            states: The reducers' states after this batch. They may be changed in place later:
                what is to be kept is copied or written before this returns.
            proved: Whether `go_back` may go back to it.

        Raises:
            OutputError: It cannot be written; what was complete before stays so.
        """
        n = int(rows.index.shape[0])
        if self.completed + n > self._plan.n:
            raise OutputError(
                f"rows {self.completed} to {self.completed + n} do not fit into a file of "
                f"{self._plan.n} samples",
                where=str(self._paths.final),
            )
        with writing(self._paths.final, again=True):
            slots = self._ready(rows)
            try:
                slots = self._fit(slots, rows)
                slots.write(rows, self._disk)
            except BaseException:
                self._go_back()
                raise
            self.completed += n
            self._kept = Kept(self.completed, _copied(states or {}), slots.marks)
            last = self.completed == self._plan.n and self._kept.states is None
            if proved:
                self._proved = self._kept
            if self._commits.are_due() or last:
                self._commit(states or {})

    def go_back(self) -> tuple[int, dict[str, dict[str, Tensor]]]:
        """Forget the batches after the last one that was proved.

        Where that is not possible (states too large to be kept twice, compressed rows, which lie
        where they were put), the file begins anew.

        Returns:
            How many rows are left, and the reducers' states after them.
        """
        kept, slots = self._proved, self._slots
        with writing(self._paths.final):
            self._disk.wait()
            if slots is None or slots.packed or not kept.completed or kept.states is None:
                kept, self._slots, self._found = Kept(0, {}), None, None
                self._paths.progress.unlink(missing_ok=True)
            else:
                slots.return_to(kept.marks)
            self.completed = kept.completed
            self._kept = self._proved = kept
            if kept.completed:
                self._commit(kept.states or {})
            self._commits.completed = kept.completed
        return kept.completed, {k: dict(state) for k, state in (kept.states or {}).items()}

    def finish(
        self,
        results: Mapping[int, Mapping[str, Tensor]],
        certificate: Mapping[str, Any],
        norm_attributes: Mapping[str, Mapping[str, float]] | None = None,
        states: States | None = None,
        look: complete.Look | None = None,
    ) -> None:
        """Complete the file: verify it, and put it in its final place.

        Args:
            results: {chain: {name: (*shape)}} for the reduced chains.
            certificate: Stored as JSON.
            norm_attributes: {parameter: {attribute: value}}, for /norms.
            states: {owner: {key: tensor}}, for /states: what files are merged from.
            look: Called with the file while it is open for its verification.

        Raises:
            OutputError: Rows are missing, or the file cannot be completed.
        """
        if self._done:
            return
        if self.completed != self._plan.n:
            raise OutputError(
                f"only {self.completed} of {self._plan.n} samples are complete",
                where=str(self._paths.part),
                remedy="Go on with --resume.",
            )
        with writing(self._paths.final):
            slots = self._ready(None)
        if self._commits.are_due() or slots.packed:  # whose structure cannot be committed later
            self._commit_kept()
        with self._commits.trusting():
            if not slots.packed:
                self._restore()
            complete.complete(
                self._paths,
                self._descriptor,
                self._disk,
                slots,
                results,
                certificate,
                norm_attributes or {},
                states or {},
                look,
            )
        self._done = True

    def close(self) -> None:
        """Keep what is complete for `resume`; remove the file when that is nothing."""
        if not self._done and self._commits.trusted and not self._disk.packer.failed:
            with suppress(OutputError, MemoryError):  # the last commit still stands
                self._commit_kept()
        self._disk.close()
        if not self._done and self._commits.completed == 0:
            with suppress(OSError):  # what stopped the run has been said
                self._paths.progress.unlink(missing_ok=True)
                self._paths.part.unlink(missing_ok=True)

    def _ready(self, rows: Rows | None) -> Slots:
        """Find the places of everything; the first batch lays them out."""
        if self._slots is not None:
            return self._slots
        if self._found is None:
            assert rows is not None  # there is a first batch
            os.ftruncate(self._descriptor, 0)
            with editing(self._descriptor) as file:
                build(file, self._plan, rows)
                slots = bind(file)
            extents = joined(stream.place for stream in slots.streams.values())
            self._structure = Structure.of(self._descriptor, extents)
            secure_space(self._paths.part, self._descriptor)
        else:
            with h5py.File(self._paths.part, "r", locking=False) as file:
                slots = bind(file)
            found = self._found
            slots.start_at(found.completed, found.tails, found.overflowed, found.records)
            if slots.packed:
                self._disk.packer.know(found.records)
        self._slots = slots
        self._kept = replace(self._kept, marks=slots.marks)
        return slots

    def _fit(self, slots: Slots, rows: Rows) -> Slots:
        """Give parameters whose blocks have changed their structure a dense layout."""
        changed = slots.misfits(rows)
        if not changed:
            return slots
        if not slots.packed:
            self._restore()
        try:
            made = make_dense(
                self._paths.part,
                self._descriptor,
                self._disk,
                slots,
                changed,
                self.completed,
                len(rows.index),
            )
            secure_space(self._paths.part, self._descriptor)
        except BaseException:
            self._restore()
            raise
        with h5py.File(self._paths.part, "r", locking=False) as file:
            extents = joined(made.places(file).values())
        self._slots, self._structure = made, Structure.of(self._descriptor, extents)
        self._kept = replace(self._kept, marks=made.marks)
        self._proved = Kept(0, {})  # rows up to there lie where they do no more
        return made

    def _restore(self) -> None:
        """Make the file's structure what it was: the disk may have changed it since."""
        assert self._structure is not None  # there are slots
        self._structure.put_back(self._descriptor)

    def _go_back(self) -> None:
        """Forget a batch that was not written to its end."""
        with suppress(OSError):
            self._disk.wait()
        if self._slots is not None:
            self._slots.return_to(self._kept.marks)

    def _commit_kept(self) -> None:
        if self._commits.completed < self._kept.completed and self._kept.states is not None:
            self._commit(self._kept.states)

    def _commit(self, states: States) -> None:
        slots, structure = self._slots, self._structure
        assert structure is not None and slots is not None  # there are rows
        places: Mapping[str, Place] = {}
        if slots.packed:  # chunks have come, and the structure with them
            with h5py.File(self._paths.part, "r", locking=False) as file:
                places = slots.places(file)
            structure = Structure.of(self._descriptor, joined(places.values()))
            self._structure = structure
        records = slots.records(self._kept.marks, places, self._disk.packer)
        self._commits.make(self._kept, states, structure, records)


def _copied(states: States) -> States | None:
    """Return a copy of the states, or None where they are large."""
    size = sum(t.nbytes for state in states.values() for t in state.values())
    if size > KEEP_BYTES:
        return None
    return {owner: {k: t.clone() for k, t in state.items()} for owner, state in states.items()}
