"""Writing a result file: `OUT.h5.part` first, which becomes `OUT.h5` when complete and verified."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import h5py
import torch
from torch import Tensor

from gradscope.errors import OutputError
from gradscope.storage import complete
from gradscope.storage import resume as resuming
from gradscope.storage.build import build
from gradscope.storage.columns import Column, bind_column, unwritten_chunks
from gradscope.storage.editing import DescriptorFile, editing, open_for_writing
from gradscope.storage.layout import CACHE_BYTES, as_numpy, write_rows
from gradscope.storage.names import escape, unescape
from gradscope.storage.plan import FilePlan, Rows, States
from gradscope.storage.relayout import make_dense
from gradscope.storage.sidecar import Paths, Progress, save_progress
from gradscope.storage.trouble import check_space, writing

COMMIT_SECONDS = 1.0
COMMIT_SHARE = 20  # a commit may take one part in so many of the time
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
    if not paths.final.absolute().parent.is_dir():
        folder = paths.final.parent
        raise OutputError(f"there is no folder {str(folder)!r}", remedy="Create it first.")
    if resuming.is_done(paths, plan, overwrite=overwrite, resume=resume):
        yield Writer(paths, plan, -1, Progress(plan.n, plan.identity, {}), done=True)
        return
    with ExitStack() as stack:
        with writing(paths.final):
            descriptor = stack.enter_context(resuming.locked(paths.part))
            found = resuming.start(paths, descriptor, plan, overwrite=overwrite, resume=resume)
        writer = Writer(paths, plan, descriptor, found)
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
        done: bool = False,
    ) -> None:
        self.completed = 0 if found is None else found.completed
        self.states = {} if found is None else found.states
        self._paths, self._plan, self._descriptor = paths, plan, descriptor
        self._identity = plan.identity
        self._resumed, self._done, self._broken = found is not None, done, False
        self._committed = self.completed
        self._last_commit, self._commit_cost = time.monotonic(), 0.0
        self._kept: States | None = self.states
        self._file: h5py.File | None = None
        self._behind: DescriptorFile | None = None
        self._tables: dict[str, h5py.Dataset] = {}
        self._norms: dict[str, h5py.Dataset] = {}
        self._columns: list[dict[str, Column]] = []
        self._scratch: dict[torch.dtype, Tensor] = {}

    def append(self, rows: Rows, states: States | None = None) -> None:
        """Write one batch.

        Args:
            rows: The batch's rows, which follow those that are complete.
            states: The reducers' states after this batch. They may be changed in place later:
                what is to be kept is copied or written before this returns.

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
        with self._writing():
            if self._file is None:
                self._open(rows)
            self._fit(rows)
            self._write(rows)
            self.completed += n
            self._kept = _copied(states)
            if self._due():
                self._commit(states)

    def finish(
        self,
        results: Mapping[int, Mapping[str, Tensor]],
        certificate: Mapping[str, Any],
        norm_attributes: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """Complete the file: verify it, and put it in its final place.

        Args:
            results: {chain: {name: (*shape)}} for the reduced chains.
            certificate: Stored as JSON.
            norm_attributes: {parameter: {attribute: value}}, for /norms.

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
        with self._writing():
            self._close_file()
            complete.complete(
                self._paths, self._descriptor, results, certificate, norm_attributes or {}
            )
        self._done = True

    def close(self) -> None:
        """Keep what is complete for `resume`; remove the file when that is nothing."""
        if self._done:
            return
        if not self._broken:
            with suppress(OutputError), self._writing():  # the last commit still stands
                if self._is_kept and self._committed < self.completed:
                    self._commit(self._kept)
        with suppress(OSError, RuntimeError):
            self._close_file()
        if self._committed == 0:
            self._paths.clear()
            self._paths.part.unlink(missing_ok=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with writing(self._paths.final):
                yield
        except OutputError:
            self._broken = True
            raise

    @property
    def _is_kept(self) -> bool:
        return self._kept is not _NOT_KEPT

    def _open(self, rows: Rows) -> None:
        if not self._resumed and os.fstat(self._descriptor).st_size == 0:
            with editing(self._descriptor) as file:
                build(file, self._plan, rows)
            check_space(self._paths.part)
        self._bind()

    def _bind(self) -> None:
        """Open the file; its data sets stay open, so that partly filled chunks stay in memory."""
        file, self._behind = open_for_writing(self._descriptor, rdcc_nbytes=CACHE_BYTES)
        self._file = file
        self._tables = dict(file["samples"].items())
        self._norms = {unescape(name): dataset for name, dataset in file["norms"].items()}
        self._columns = [
            {
                unescape(name): bind_column(item, self._scratch)
                for name, item in file["chains"][str(k)].items()
            }
            for k in range(len(self._plan.chains))
        ]

    def _fit(self, rows: Rows) -> None:
        """Give parameters whose blocks have changed their structure a dense layout."""
        changed = [
            f"/chains/{k}/{escape(name)}"
            for k, gradients in enumerate(rows.chains)
            for name, block in (gradients or {}).items()
            if not self._columns[k][name].fits(block)
        ]
        if not changed:
            return
        self._close_file()
        make_dense(self._paths, self._descriptor, changed, self.completed, len(rows.index))
        check_space(self._paths.part)
        self._bind()

    def _write(self, rows: Rows) -> None:
        for table, columns in ((self._tables, rows.samples), (self._norms, rows.norms)):
            if set(table) != set(columns):
                raise OutputError(
                    f"this batch has the columns {sorted(columns)}, the first {sorted(table)}",
                    where=str(self._paths.part),
                )
            for name, column in columns.items():
                write_rows(table[name], self.completed, as_numpy(column, table[name].dtype))
        for chain, gradients in zip(self._columns, rows.chains, strict=True):
            for name, block in (gradients or {}).items():
                chain[name].write(self.completed, block, self._prepare)
        assert self._behind is not None
        self._behind.check()

    def _prepare(self, dataset: h5py.Dataset, start: int, stop: int) -> None:
        """After a kill, chunks beyond the complete rows may be cut short: never read them."""
        if self._resumed and dataset.chunks is not None:
            for offset in unwritten_chunks(dataset, start, stop):
                resuming.clear_chunk(dataset, offset)

    def _due(self) -> bool:
        if self.completed == self._plan.n:
            return True
        passed = time.monotonic() - self._last_commit
        return passed >= max(COMMIT_SECONDS, COMMIT_SHARE * self._commit_cost)

    def _commit(self, states: States | None) -> None:
        """Make the rows durable, then say so."""
        begin = time.monotonic()
        self._flush()
        os.fsync(self._descriptor)
        save_progress(self._paths.progress, self.completed, self._identity, states)
        self._committed = self.completed
        self._last_commit = time.monotonic()
        self._commit_cost = self._last_commit - begin

    def _flush(self) -> None:
        if self._file is not None and self._behind is not None:
            self._file.flush()
            self._behind.check()

    def _close_file(self) -> None:
        file, behind = self._file, self._behind
        self._file, self._behind = None, None
        self._tables, self._norms, self._columns = {}, {}, []
        if file is not None and behind is not None:
            file.close()
            behind.check()


_NOT_KEPT: States = {}


def _copied(states: States | None) -> States | None:
    """Return a copy of the states, or `_NOT_KEPT` where they are large."""
    if states is None:
        return None
    size = sum(t.nbytes for state in states.values() for t in state.values())
    if size > KEEP_BYTES:
        return _NOT_KEPT
    return {owner: {k: t.clone() for k, t in state.items()} for owner, state in states.items()}
