"""Where the parts of a batch go in a file that is laid out."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import h5py
import numpy as np

from gradscope.errors import OutputError
from gradscope.storage import integrity
from gradscope.storage.checks import NONE
from gradscope.storage.columns import Column, bind_column
from gradscope.storage.disk import Disk
from gradscope.storage.names import escape, unescape
from gradscope.storage.packer import Packer
from gradscope.storage.places import Place, datasets, place_of
from gradscope.storage.plan import Rows
from gradscope.storage.scratch import Scratch
from gradscope.storage.stream import Mark, Stream

Marks = Mapping[str, Mark]

ASIDE = "replaced"  # a group of factors that have become dense, until the file is complete


@dataclass(frozen=True)
class Slots:
    """Where the parts of a batch go.

    Attributes:
        streams: Every data set that is written, by its path.
        tables: The columns of /samples and of /norms.
        chains: {parameter: Column} for each chain; empty for a reduced one.
    """

    streams: dict[str, Stream]
    tables: tuple[dict[str, Stream], ...]
    chains: tuple[dict[str, Column], ...]

    @property
    def packed(self) -> bool:
        """Whether some rows are compressed."""
        return any(stream.place.packed for stream in self.streams.values())

    @property
    def without_aside(self) -> "Slots":
        """The same, but for factors that have become dense."""
        own = {k: s for k, s in self.streams.items() if not k.startswith(f"/{ASIDE}/")}
        return replace(self, streams=own)

    def places(self, file: h5py.File) -> dict[str, Place]:
        """Return where all streams lie, with those compressed chunks that are there by now."""
        return {
            path: place_of(file[path]) if stream.place.packed else stream.place
            for path, stream in self.streams.items()
        }

    def records(self, marks: Marks, places: Mapping[str, Place], packer: Packer) -> np.ndarray:
        """Return offset, size and CRC-32C of what is complete at `marks`, by offset (m, 3)."""
        found = [stream.records(marks[path]) for path, stream in self.streams.items()]
        found += [packer.records(place) for place in places.values() if place.packed]
        table = np.concatenate([NONE, *found])
        return table[np.argsort(table[:, 0])]

    @property
    def marks(self) -> dict[str, Mark]:
        """Where every stream stands."""
        return {path: stream.mark for path, stream in self.streams.items()}

    def return_to(self, marks: Marks) -> None:
        """Go back to where streams stood."""
        for path, mark in marks.items():
            self.streams[path].mark = mark

    def take_over(self, other: "Slots") -> None:
        """Go on where other streams of the same paths stand."""
        for path in self.streams.keys() & other.streams.keys():
            self.streams[path].mark = other.streams[path].mark
            self.streams[path].sums = other.streams[path].sums

    def start_at(
        self,
        completed: int,
        tails: Mapping[str, np.ndarray],
        overflowed: Mapping[str, int],
        records: np.ndarray,
    ) -> None:
        """Go on after `completed` rows; what did not fill a chunk is given by path."""
        known = np.append(records, [[np.iinfo(np.int64).max, 0, 0]], 0)
        for path, stream in self.without_aside.streams.items():
            position = completed * (stream.place.size // stream.shape[0])
            found = known[np.searchsorted(records[:, 0], stream.place.offsets)]
            right = found[:, 0] == stream.place.offsets
            stream.sums = np.where(right, found[:, 2], 0).astype(np.uint32)
            tail = tails.get(path, Mark().tail)
            whole = int(stream.sums[0]) if len(stream.sums) == 1 else 0
            stream.mark = Mark(position, tail, overflowed.get(path, 0), whole)

    def misfits(self, rows: Rows) -> list[str]:
        """Return the paths of columns that cannot hold their blocks."""
        return [
            f"/chains/{k}/{escape(name)}"
            for k, gradients in enumerate(rows.chains)
            for name, block in (gradients or {}).items()
            if not self.chains[k][name].fits(block)
        ]

    def write(self, rows: Rows, disk: Disk) -> None:
        """Write one batch, and return when it is written.

        Raises:
            OutputError: It has other columns than the first batch.
            OSError: It cannot be written.
        """
        pieces = []
        for table, columns in zip(self.tables, (rows.samples, rows.norms), strict=True):
            if set(table) != set(columns):
                raise OutputError(
                    f"this batch has the columns {sorted(columns)}, the first {sorted(table)}"
                )
            for name, column in columns.items():
                pieces += table[name].add(column.to(table[name].dtype))
        disk.write(pieces)
        for chain, gradients in zip(self.chains, rows.chains, strict=True):
            for name, block in (gradients or {}).items():
                for stream, values in chain[name].parts(block):
                    disk.write(stream.add(values))
        disk.wait()


def bind(file: h5py.File) -> Slots:
    """Find all places in an open file."""
    streams = {path: Stream(dataset) for path, dataset in datasets(file)}
    scratch, chains = Scratch(), file["chains"]
    return Slots(
        streams,
        tuple(
            {unescape(name): streams[f"/{table}/{name}"] for name in file[table]}
            for table in integrity.TABLES
        ),
        tuple(
            {
                unescape(name): bind_column(file, f"/chains/{k}/{name}", streams, scratch)
                for name in chains[str(k)]
            }
            for k in range(len(chains))
        ),
    )
