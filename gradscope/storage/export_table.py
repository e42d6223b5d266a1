"""The sample table as .csv and .parquet, one row a sample."""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, BinaryIO

import numpy as np

from gradscope.core.texts import printable
from gradscope.errors import SpecError
from gradscope.storage.reader import GradientFile
from gradscope.storage.selection import find_rows, matching

_ROWS = 2**16  # at a time


@dataclass(frozen=True)
class Table:
    """Columns of one row a sample.

    Attributes:
        columns: {name: (N,)}.
        rows: Those that are wanted, (m,).
    """

    columns: dict[str, np.ndarray]
    rows: np.ndarray

    @property
    def names(self) -> tuple[str, ...]:
        """The columns' names."""
        return tuple(self.columns)

    def blocks(self) -> Iterator[dict[str, np.ndarray]]:
        """Yield {name: (m,)}, some rows at a time."""
        for at in range(0, len(self.rows), _ROWS):
            rows = self.rows[at : at + _ROWS]
            yield {name: column[rows] for name, column in self.columns.items()}


Write = Callable[[BinaryIO, Table], None]


def table_of(file: GradientFile, globs: Sequence[str], samples: slice | None) -> Table:
    """Return the sample table, and as `norm:NAME` the norms of parameters that match a glob.

    Raises:
        SpecError: Nothing matches, or there is no such sample.
    """
    columns = dict(file.samples)
    if globs:
        names = matching([*file.norms], globs)
        columns |= {f"norm:{printable(name)}": file.norms[name] for name in names}
    return Table(columns, find_rows(file, samples))


def csv_writer() -> Write:
    """Return what writes a table as CSV: UTF-8, shortest numbers that come back, true and false."""
    return _write_csv


def parquet_writer() -> Write:
    """Return what writes a table as Parquet.

    Raises:
        SpecError: pyarrow is not installed.
    """
    try:
        arrow, parquet = map(import_module, ("pyarrow", "pyarrow.parquet"))
    except ImportError as error:
        raise SpecError(
            "Parquet needs pyarrow, which is not installed",
            remedy="pip install 'gradscope[data]', or export .csv.",
        ) from error

    def write(out: BinaryIO, table: Table) -> None:
        first = arrow.table({k: v[:0] for k, v in table.columns.items()})
        with parquet.ParquetWriter(out, first.schema) as writer:
            for block in table.blocks():
                writer.write_table(arrow.table(block))

    return write


TABLES: dict[str, Callable[[], Write]] = {".parquet": parquet_writer, ".csv": csv_writer}


def _write_csv(out: BinaryIO, table: Table) -> None:
    text = io.TextIOWrapper(out, encoding="utf-8", newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.names)
    for block in table.blocks():
        writer.writerows(zip(*(_texts(column) for column in block.values()), strict=True))
    text.flush()
    text.detach()


def _texts(column: np.ndarray) -> list[Any]:
    if column.dtype.kind == "b":
        return ["true" if value else "false" for value in column.tolist()]
    if column.dtype.kind in "fc":  # numpy's own text: the shortest that comes back in its precision
        return [str(value) for value in column]
    found: list[Any] = column.tolist()
    return found
