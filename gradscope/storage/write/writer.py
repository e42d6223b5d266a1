"""Writes a result file: `OUT.h5.part`, renamed to `OUT.h5` when complete and verified."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
from torch import Tensor

from gradscope.errors import OutputError, ResultFileError
from gradscope.storage.format.files import (
    locked,
    require_free,
    require_place,
    secure_space,
    writing,
)
from gradscope.storage.format.layout import create_columns, stored_form
from gradscope.storage.format.seal import Checks
from gradscope.storage.plan import FilePlan, FinishedBatch, States
from gradscope.storage.read.file import open_file
from gradscope.storage.write.create import Inspect, complete, forms_of, lay_out
from gradscope.storage.write.journal import (
    LONGEST,
    Entry,
    Journal,
    NonRowBytes,
    Paths,
    Point,
    recover,
    require_same,
)
from gradscope.storage.write.region import ASIDE, Mark, Regions, copy_rows
from gradscope.storage.write.target import Target

KEEP_BYTES = 2**26  # states up to this size are copied after every batch, in case the run stops


@contextmanager
def open_writer(
    path: str | Path, plan: FilePlan, overwrite: bool = False, resume: bool = False
) -> Iterator["Writer"]:
    """Open a result file for writing; yield a `Writer`.

    Rows are written to `path`.part. If the body ends without `finish`, complete rows are kept for
    `resume`; a file without complete rows is removed.

    Args:
        path: The final file.
        plan: The plan of the file.
        overwrite: Replace an existing file when the new file is complete.
        resume: Continue an unfinished run of the same plan. If the file is complete, the writer
            has nothing left to do.

    Raises:
        OutputError: The file cannot be written, exists already, or belongs to another run.
    """
    paths = Paths(Path(path))
    if plan.n < 1:
        raise OutputError("the data set has no samples to store", where=str(path))
    require_place(paths.final, LONGEST)
    with writing(paths.final):
        is_done = _is_done(paths, plan, overwrite=overwrite, resume=resume)
    if is_done:
        yield Writer(paths, plan, -1, None, is_done=True)
        return
    with ExitStack() as stack:
        with writing(paths.final):
            descriptor = stack.enter_context(locked(paths.part))
            found = recover(paths, descriptor, plan, overwrite=overwrite, resume=resume)
        writer = Writer(paths, plan, descriptor, found, replaces=overwrite)
        stack.callback(writer.close)
        yield writer


class Writer:
    """A result file that is being written."""

    def __init__(
        self,
        paths: Paths,
        plan: FilePlan,
        descriptor: int,
        found: Entry | None,
        *,
        replaces: bool = False,
        is_done: bool = False,
    ) -> None:
        self._paths, self._plan, self._recovered = paths, plan, found
        self._done = is_done
        self._point = self._proved_point = Point() if found is None else found.point
        # the number of rows in the file, and the reducers' states after them; a resumed run
        # continues from here
        self.completed = plan.n if is_done else self._point.completed
        self.states: Any = self._point.states
        self._target = Target(descriptor)
        replaces = replaces or (found is not None and found.replaces)
        self._journal = Journal(paths, descriptor, plan, replaces)
        self._journal.completed = self._point.completed
        self._regions: Regions | None = None
        self._structure = found.structure if found else None

    def append(
        self, rows: FinishedBatch, states: States | None = None, *, proved: bool = False
    ) -> None:
        """Write the rows of the next batch, and the reducers' states after it.

        The caller may change states in place later, because they are copied or written here.
        `go_back` returns to the last batch that was appended with `proved`.
        """
        n = len(rows)
        if self.completed + n > self._plan.n:
            raise OutputError(
                f"rows {self.completed} to {self.completed + n} exceed the {self._plan.n} samples "
                "of the file",
                where=str(self._paths.final),
            )
        with writing(self._paths.final, again=True):
            regions = self._ready(rows)
            try:
                if changed := regions.misfits(rows):
                    regions = self._densify(regions, changed, n)
                regions.add(rows, self._target)
            except BaseException:
                if self._regions is not None:
                    self._regions.return_to(self._point.marks)
                raise
            self.completed += n
            kept: States | None = None
            size = sum(t.nbytes for s in (states or {}).values() for t in s.values())
            if size <= KEEP_BYTES:
                kept = {o: {k: t.clone() for k, t in s.items()} for o, s in (states or {}).items()}
            self._point = Point(self.completed, kept, regions.marks)
            if proved:
                self._proved_point = self._point
            if self._journal.is_due(0 if kept is not None else size):
                self._commit(replace(self._point, states=states or {}))

    def go_back(self) -> tuple[int, dict[str, dict[str, Tensor]]]:
        """Discard the batches after the last proved batch; return the remaining rows and states.

        If the states are too large to keep a copy, or rows are compressed, all rows are discarded.
        """
        point, regions = self._proved_point, self._regions
        with writing(self._paths.final):
            self._target.flush()
            if regions is None or regions.packed or not point.completed or point.states is None:
                self._target.close()
                point, self._regions, self._recovered = Point(), None, None
                self._paths.progress.unlink(missing_ok=True)
            else:
                regions.return_to(point.marks)
                self._commit(point)
            self.completed = self._journal.completed = point.completed
            self._point = self._proved_point = point
        return point.completed, {k: dict(state) for k, state in (point.states or {}).items()}

    def finish(
        self,
        results: Mapping[int, Mapping[str, Tensor]],
        certificate: Mapping[str, Any],
        norm_attributes: Mapping[str, Mapping[str, float]] | None = None,
        states: States | None = None,
        look: Inspect | None = None,
    ) -> None:
        """Complete and verify the file, and rename it to its final path.

        Args:
            results: {chain: {name: (*shape)}} for the reduced chains.
            certificate: Stored as JSON.
            norm_attributes: {parameter: {attribute: value}}, for /norms.
            states: {owner: {key: tensor}}, for /states, from which aggregates are merged.
            look: Called with the open file when it is verified.
        """
        if self._done:
            return
        if self.completed != self._plan.n:
            raise OutputError(
                f"only {self.completed} of {self._plan.n} samples are complete",
                where=str(self._paths.part),
                remedy="Give resume=True to compute the missing samples.",
            )
        with writing(self._paths.final):
            regions = self._ready(None)
        if self._journal.is_due() or regions.packed:  # a packed structure must be committed now
            self._commit_point()
        with self._journal.trusting():
            self._put_back(regions)
            ending = (results, certificate, norm_attributes or {}, states or {}, look)
            complete(self._paths, self._target, regions, *ending)
        self._done = True

    def close(self) -> None:
        """Keep complete rows for `resume`; remove the file if it has none."""
        with suppress(OutputError, MemoryError), writing(self._paths.final):
            self._target.close()
        is_known = not (self._target.failed and self._regions and self._regions.packed)
        if not self._done and self._journal.trusted and is_known:
            with suppress(OutputError, MemoryError):  # the last commit remains valid
                self._commit_point()
        if not self._done and self._journal.completed == 0:
            with suppress(OSError):  # the first error is the one to report
                self._paths.progress.unlink(missing_ok=True)
                self._paths.part.unlink(missing_ok=True)

    def _ready(self, rows: FinishedBatch | None) -> Regions:
        """Return the regions; the first batch lays out the file."""
        if self._regions is not None:
            return self._regions
        if self._recovered is None:
            assert rows is not None
            forms, batch_size = forms_of(self._plan, rows), len(rows)
            regions = lay_out(self._paths, self._target, self._plan, forms, batch_size)
            self._structure = NonRowBytes.of(self._target.descriptor, regions)
        else:
            with h5py.File(self._paths.part, "r", locking=False) as file:
                regions = Regions.of(file)
            point = self._recovered.point
            for path, region in regions.without_aside.by_path.items():
                mark = replace(point.marks.get(path, Mark()), position=point.completed * region.row)
                region.start_at(mark, self._recovered.records)
        self._regions = regions
        self._point = replace(self._point, marks=regions.marks)
        return regions

    def _put_back(self, regions: Regions) -> None:
        """Restore the structure of the laid-out file."""
        self._target.close()
        if self._structure is not None and not regions.packed:
            self._structure.put_back(self._target.descriptor)

    def _commit_point(self) -> None:
        if self._journal.completed < self._point.completed and self._point.states is not None:
            self._commit(self._point)

    def _commit(self, point: Point) -> None:
        regions = self._regions
        assert self._structure is not None and regions is not None
        with writing(self._paths.final):
            if regions.packed:  # new chunks have changed the structure
                self._target.close()
                self._structure = NonRowBytes.of(self._target.descriptor, regions)
            else:
                self._target.flush()
        self._journal.commit(point, self._structure, regions.records(point.marks))

    def _densify(self, regions: Regions, columns: Sequence[str], batch_size: int) -> Regions:
        """Convert columns whose blocks have changed their structure to a dense layout.

        The old factors stay in the file until it is completed. They are needed if the run is
        stopped before the change is committed.
        """
        target = self._target
        for path, region in regions.by_path.items():
            if path.startswith(tuple(f"{column}/" for column in columns)):
                region.write_tail(target)
        records = regions.records(regions.marks, tails=True)
        self._put_back(regions)
        before = NonRowBytes.of(self._target.descriptor, regions)
        moved: dict[str, str] = {}  # {column: new path of its old group}
        try:
            with target.editing() as file:
                aside = file.require_group(ASIDE)
                for column in columns:
                    moved[column] = f"{aside.name}/{len(aside)}"
                    file.move(column, moved[column])
                    form = stored_form(file[moved[column]]).dense
                    create_columns(file, {column: form}, self._plan.n, batch_size)
                made = Regions.of(file)
            made.take_over(regions)
            with h5py.File(self._paths.part, "r", locking=False) as file:
                checks = Checks(lambda: self._target.descriptor, records)
                for column, place in moved.items():
                    new = made.by_path[column]
                    copy_rows(file[place], checks, new, self.completed, target, self._paths.final)
            target.close()
            secure_space(self._paths.part, self._target.descriptor)
        except BaseException:
            with suppress(OSError):
                target.close()
            before.put_back(self._target.descriptor)
            raise
        self._regions, self._structure = made, NonRowBytes.of(self._target.descriptor, made)
        self._point = replace(self._point, marks=made.marks)
        self._proved_point = Point()  # its rows have moved
        return made


def is_complete(path: Path, plan: FilePlan, *, overwrite: bool = False) -> bool:
    """Whether the file at `path` exists and is the complete result of a plan.

    Raises:
        OutputError: The file belongs to another run, and may not be overwritten.
    """
    return _is_done(Paths(path), plan, overwrite=overwrite, resume=True)


def _is_done(paths: Paths, plan: FilePlan, *, overwrite: bool, resume: bool) -> bool:
    """Whether the final file exists and is the complete result of this run.

    With both `overwrite` and `resume`, a file of another run is replaced.
    """
    require_free(paths.final, overwrite=overwrite or resume)
    if not paths.final.exists() or not resume:
        return False
    try:
        with open_file(paths.final) as file:
            found = file.identity
    except ResultFileError as error:
        if overwrite:
            return False
        raise OutputError(
            f"the existing file is not a valid result: {error.what}",
            where=str(paths.final),
            remedy="Choose another name, or give overwrite=True.",
        ) from error
    if found != plan.identity:
        entry = Entry.load(paths.progress) if paths.part.exists() and not overwrite else None
        if overwrite or (entry and entry.replaces and entry.identity == plan.identity):
            return False  # this run was started with overwrite, and stopped
        require_same(found, plan.identity, paths.final)
    if not paths.part.exists():
        paths.progress.unlink(missing_ok=True)  # left if the process was killed after the rename
    return True
