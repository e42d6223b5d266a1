"""Writing a result file: `OUT.h5.part` first, which becomes `OUT.h5` when complete and verified."""

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
    Paths,
    Point,
    Structure,
    recover,
    require_same,
)
from gradscope.storage.write.region import ASIDE, Mark, Regions, copy_rows
from gradscope.storage.write.target import Target

KEEP_BYTES = 2**26  # states up to this size are copied with every batch, for a stop in between


@contextmanager
def open_writer(
    path: str | Path, plan: FilePlan, overwrite: bool = False, resume: bool = False
) -> Iterator["Writer"]:
    """Open a result file for writing; yields a `Writer`.

    The work goes on in `path`.part. When the body ends without `finish`, by an exception or not,
    what is complete is kept for `resume`; where nothing is, nothing stays behind. `overwrite`
    replaces a file that is there, which stays untouched until the new one is complete; `resume`
    goes on with an unfinished run of the same plan, or finds that nothing is left to do.

    Raises:
        OutputError: The file cannot be written, is there already, or belongs to another run.
    """
    paths = Paths(Path(path))
    if plan.n < 1:
        raise OutputError("there is no sample to store", where=str(path))
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
        # the rows that are in the file: a run that resumes goes on with this one, and with the
        # reducers' states after them
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
        """Write one batch, whose rows follow those that are complete, and the states after it.

        States may be changed in place later: what is to be kept is copied or written before this
        returns. To a batch that is `proved`, `go_back` may go back.
        """
        n = len(rows)
        if self.completed + n > self._plan.n:
            raise OutputError(
                f"rows {self.completed} to {self.completed + n} do not fit into a file of "
                f"{self._plan.n} samples",
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
        """Forget the batches after the last one that was proved; return rows and states left.

        Where that is not possible (states too large to be kept twice, compressed rows, which lie
        where they were put), the file begins anew.
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
        """Complete the file: verify it, and put it in its final place.

        Args:
            results: {chain: {name: (*shape)}} for the reduced chains.
            certificate: Stored as JSON.
            norm_attributes: {parameter: {attribute: value}}, for /norms.
            states: {owner: {key: tensor}}, for /states: what files are merged from.
            look: Called with the file while it is open for its verification.
        """
        if self._done:
            return
        if self.completed != self._plan.n:
            raise OutputError(
                f"only {self.completed} of {self._plan.n} samples are complete",
                where=str(self._paths.part),
                remedy="Go on with resume=True.",
            )
        with writing(self._paths.final):
            regions = self._ready(None)
        if self._journal.is_due() or regions.packed:  # whose structure cannot be committed later
            self._commit_point()
        with self._journal.trusting():
            self._put_back(regions)
            ending = (results, certificate, norm_attributes or {}, states or {}, look)
            complete(self._paths, self._target, regions, *ending)
        self._done = True

    def close(self) -> None:
        """Keep what is complete for `resume`; remove the file when that is nothing."""
        with suppress(OutputError, MemoryError), writing(self._paths.final):
            self._target.close()
        is_known = not (self._target.failed and self._regions and self._regions.packed)
        if not self._done and self._journal.trusted and is_known:
            with suppress(OutputError, MemoryError):  # the last commit still stands
                self._commit_point()
        if not self._done and self._journal.completed == 0:
            with suppress(OSError):  # what stopped the run has been said
                self._paths.progress.unlink(missing_ok=True)
                self._paths.part.unlink(missing_ok=True)

    def _ready(self, rows: FinishedBatch | None) -> Regions:
        """Return where everything goes; the first batch lays it out."""
        if self._regions is not None:
            return self._regions
        if self._recovered is None:
            assert rows is not None  # there is a first batch
            forms, batch_size = forms_of(self._plan, rows), len(rows)
            regions = lay_out(self._paths, self._target, self._plan, forms, batch_size)
            self._structure = Structure.of(self._target.descriptor, regions)
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
        """Make the structure what it was when the file was laid out."""
        self._target.close()
        if self._structure is not None and not regions.packed:
            self._structure.put_back(self._target.descriptor)

    def _commit_point(self) -> None:
        if self._journal.completed < self._point.completed and self._point.states is not None:
            self._commit(self._point)

    def _commit(self, point: Point) -> None:
        regions = self._regions
        assert self._structure is not None and regions is not None  # there are rows
        with writing(self._paths.final):
            if regions.packed:  # chunks have come, and the structure with them
                self._target.close()
                self._structure = Structure.of(self._target.descriptor, regions)
            else:
                self._target.flush()
        self._journal.commit(point, self._structure, regions.records(point.marks))

    def _densify(self, regions: Regions, columns: Sequence[str], batch_size: int) -> Regions:
        """Give parameters whose blocks have changed their structure a dense layout.

        The old factors stay in the file, aside, until it is completed: should the run be stopped
        before the change is recorded, they are still needed.
        """
        target = self._target
        for path, region in regions.by_path.items():
            if path.startswith(tuple(f"{column}/" for column in columns)):
                region.write_tail(target)
        records = regions.records(regions.marks, tails=True)
        self._put_back(regions)
        before = Structure.of(self._target.descriptor, regions)
        moved: dict[str, str] = {}  # where the old group of a column is
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
        self._regions, self._structure = made, Structure.of(self._target.descriptor, made)
        self._point = replace(self._point, marks=made.marks)
        self._proved_point = Point()  # rows up to there lie where they do no more
        return made


def _is_done(paths: Paths, plan: FilePlan, *, overwrite: bool, resume: bool) -> bool:
    """Whether the complete file of this very run is there already.

    With both `overwrite` and `resume`, what is of another run is replaced, and the rest gone on
    with.
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
            f"a file of another kind is in the way: {error.what}",
            where=str(paths.final),
            remedy="Choose another name, or give overwrite=True.",
        ) from error
    if found != plan.identity:
        entry = Entry.load(paths.progress) if paths.part.exists() and not overwrite else None
        if overwrite or (entry and entry.replaces and entry.identity == plan.identity):
            return False  # this run was begun with overwrite, and stopped
        require_same(found, plan.identity, paths.final)
    if not paths.part.exists():
        paths.progress.unlink(missing_ok=True)  # left by a kill right after the file took its place
    return True
