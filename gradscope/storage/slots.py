"""Where the parts of a batch go in a file that is laid out."""

from collections.abc import Mapping
from dataclasses import dataclass

import h5py
import numpy as np

from gradscope.errors import OutputError
from gradscope.storage import integrity
from gradscope.storage.columns import Column, bind_column
from gradscope.storage.disk import Disk
from gradscope.storage.names import escape, unescape
from gradscope.storage.places import datasets, place_of
from gradscope.storage.plan import Rows
from gradscope.storage.scratch import Scratch
from gradscope.storage.stream import Mark, Stream

Marks = Mapping[str, Mark]


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
    def extents(self) -> np.ndarray:
        """The bytes of the file that are rows, offsets and sizes (m, 2) int64.

        Of compressed rows those that were there when the places were found.
        """
        return integrity.joined([stream.place for stream in self.streams.values()])

    def found_again(self, file: h5py.File) -> np.ndarray:
        """Return the extents with those compressed rows that are in the file by now."""
        places = [
            place_of(file[path]) if stream.place.packed else stream.place
            for path, stream in self.streams.items()
        ]
        return integrity.joined(places)

    @property
    def marks(self) -> dict[str, Mark]:
        """Where every stream stands."""
        return {path: stream.mark for path, stream in self.streams.items()}

    def return_to(self, marks: Marks) -> None:
        """Go back to where streams stood."""
        for path, mark in marks.items():
            self.streams[path].mark = mark

    def start_at(
        self, completed: int, tails: Mapping[str, np.ndarray], overflowed: Mapping[str, int]
    ) -> None:
        """Go on after `completed` rows; what did not fill a chunk is given by path."""
        for path, stream in self.streams.items():
            position = completed * (stream.place.size // stream.shape[0])
            tail = tails.get(path, Mark().tail)
            stream.mark = Mark(position, tail, overflowed.get(path, 0))

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
