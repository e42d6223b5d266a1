"""Taking numbers out of a result file: to .npy, .safetensors, .parquet and .csv.

Whatever the size, a few rows at a time are in memory. A file is complete, or it is not there.

Source: `numpy.lib.format`; https://github.com/huggingface/safetensors#format.
"""

import csv
import fnmatch
import io
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gradscope.core.registry import suggestion
from gradscope.core.texts import printable
from gradscope.errors import OutputError, SpecError
from gradscope.storage.format.files import (
    DRAFT,
    HeadTest,
    Write,
    excess,
    reporting_errors,
    require_distinct,
    require_free,
    require_place,
    require_short,
    written,
)
from gradscope.storage.format.numbers import as_numpy, escape
from gradscope.storage.read.file import (
    GradientFile,
    StoredArray,
    StoredChain,
    find_chain,
    stored_gradients,
)

FORMATS = (".npy", ".safetensors", ".parquet", ".csv")

_TABLES = (".parquet", ".csv")
_HEAD_TESTS: dict[
    str, HeadTest
] = {  # whether a file that begins so is of the format; a table, of ours
    ".npy": lambda head: head.startswith(b"\x93NUMPY"),
    ".safetensors": lambda head: head[8:10] == b'{"',
    ".parquet": lambda head: head.startswith(b"PAR1"),
    ".csv": lambda head: (
        {b"index", b"loss", b"norm", b"finite"} <= {*head.split(b"\n")[0].split(b",")}
    ),
}
_BLOCK_BYTES = 2**25  # of dense numbers in memory at a time
_TABLE_ROWS = 2**16  # at a time
_DTYPES = {"float16": "F16", "float32": "F32", "float64": "F64", "complex64": "C64"}
_DTYPES |= {"int64": "I64", "int32": "I32", "uint8": "U8", "bool": "BOOL"}
_ALIGNMENT = 8


@dataclass(frozen=True)
class ExportedFile:
    """A file that was written."""

    path: str  # where
    names: tuple[str, ...]  # the parameters, or the columns of the table
    # of the array, where it is one; of the table otherwise: rows and columns
    shape: tuple[int, ...] | None
    bytes: int  # its size


ExportTask = tuple[ExportedFile, Write]  # with the least of bytes that it takes, and what writes it


@dataclass(frozen=True)
class _ArrayRows:
    """Some rows of one array, by their positions in it; None: all of an aggregate."""

    array: StoredArray
    rows: np.ndarray | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape if self.rows is None else (len(self.rows), *self.array.shape[1:])

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * int(self.array.dtype.itemsize)

    def write(self, out: BinaryIO) -> None:
        """Write the numbers, little-endian, in C order, some rows at a time."""
        if self.rows is None:
            _write_numbers(np.atleast_1d(self.array[...]), out)
            return
        for _, gradients in stored_gradients({"": self.array}, self.rows, _BLOCK_BYTES):
            _write_numbers(as_numpy(gradients[""].dense()), out)

    def write_npy(self, out: BinaryIO) -> None:
        """Write numpy's own format, version 1.0."""
        descr = np.lib.format.dtype_to_descr(self.array.dtype)
        header = {"descr": descr, "fortran_order": False, "shape": self.shape}
        np.lib.format.write_array_header_1_0(out, header)
        self.write(out)


def _write_numbers(values: np.ndarray, out: BinaryIO) -> None:
    out.write(np.ascontiguousarray(values, values.dtype.newbyteorder("<")).data)


def export(
    file: GradientFile,
    path: Path,
    chain: str | None = None,
    parameters: Sequence[str] = (),
    samples: slice | None = None,
    *,
    overwrite: bool = False,
) -> list[ExportedFile]:
    """Write a part of a result file in the format that the ending of `path` says.

    Args:
        file: The open result.
        path: .npy takes one parameter of a chain, .safetensors all of them; without an ending it
            is a folder, of one .npy a parameter. .parquet and .csv take the sample table.
        chain: Its number or its text; the first if None. The table belongs to no chain.
        parameters: Globs; all without any. With the table, whose norms are to be columns, too.
        samples: Positions in the data set.
        overwrite: Replace files that are there.

    Raises:
        SpecError: The selection and the format do not go together.
        ResultFileError: The data are damaged; nothing is written then.
        OutputError: A file cannot be written.
    """
    require_short(path, DRAFT if path.suffix else "")
    with reporting_errors(path):
        require_distinct(path, [file.path])
        suffix = "" if path.is_dir() else path.suffix.lower()
    if suffix in _TABLES:
        if chain is not None:
            raise SpecError("the sample table belongs to no chain", remedy="Leave out --chain.")
        made = [_table(file, parameters, samples, path)]
    elif suffix in FORMATS or not suffix:
        found, selected = _select(file, chain or "0", parameters, samples)
        if suffix == ".safetensors":
            made = [_arrays(file, found, selected, path)]
        else:
            made = [_array(selected, path)] if suffix else _folder(selected, path)
    else:
        raise SpecError(
            f"there is no export to {suffix!r}",
            where=str(path),
            remedy=f"Supported: {', '.join(FORMATS)}, and a folder of .npy files.",
        )
    _require_room([Path(one.path) for one, _ in made], sum(one.bytes for one, _ in made), overwrite)
    return [replace(one, bytes=written(Path(one.path), write)) for one, write in made]


def _require_room(places: Sequence[Path], size: int, overwrite: bool) -> None:
    """Check that files of `size` bytes in all may be written, and that the disk has room."""
    for place in places:
        require_place(place, DRAFT)
        with reporting_errors(place):
            free = shutil.disk_usage(place.absolute().parent).free
            ending = place.suffix.lower()
            kind = f"export to {ending}"
            require_free(place, overwrite=overwrite, kind=kind, known=_HEAD_TESTS[ending])
        if size > free:
            raise OutputError(
                f"the file would take {size:,} bytes, the disk has {free:,}",
                where=str(place),
                remedy="Choose another disk, or export fewer samples or parameters.",
            )


def _select(
    file: GradientFile, name: str, globs: Sequence[str], samples: slice | None
) -> tuple[StoredChain, list[_ArrayRows]]:
    """Return the chain `name`, its parameters that match a glob (all without any), of samples."""
    chain = find_chain(file, name)
    if chain is None:
        known = ", ".join(f"{k} ({one.text})" for k, one in enumerate(file.chains))
        raise SpecError(
            f"there is no chain {name!r}",
            where=str(file.path),
            remedy=f"Give the number or the text of one of: {known}.",
        )
    if chain.reduced and samples is not None:
        raise SpecError(
            f"the chain {chain.text!r} is an aggregate and has no samples",
            where=str(file.path),
            remedy="Leave out --samples, or choose a chain of rows.",
        )
    rows = None if chain.reduced else _find_rows(file, samples)
    return chain, [_ArrayRows(chain[own], rows) for own in _matching(list(chain), globs)]


def _matching(names: list[str], globs: Sequence[str]) -> list[str]:
    """Return the names that match a glob, all without any."""
    for glob in globs:
        if not fnmatch.filter(names, glob):
            raise SpecError(
                f"no parameter of the file matches {glob!r}", remedy=suggestion(glob, names)
            )
    return [n for n in names if not globs or any(fnmatch.fnmatchcase(n, g) for g in globs)]


def _find_rows(file: GradientFile, samples: slice | None) -> np.ndarray:
    """Return the rows of the samples with these positions in their data set, (m,) int64."""
    index = file.samples.get("sample", file.samples["index"])  # of tokens, and of samples
    start = 0 if samples is None else samples.start or 0
    stop = None if samples is None else samples.stop
    chosen = (index >= start) & (True if stop is None else index < stop)
    if not chosen.any():
        raise SpecError(
            f"the file has no sample from {start} up to, not with, {stop}",
            where=str(file.path),
            remedy=f"Its samples are from {index.min()} to {index.max()}.",
        )
    return np.flatnonzero(chosen)


def _folder(selected: Sequence[_ArrayRows], path: Path) -> list[ExportTask]:
    names = [f"{escape(one.array.name)}.npy" for one in selected]
    if len({name.casefold() for name in names}) < len(names):
        raise SpecError(
            "parameters differ in small and capital letters only, which not every disk tells apart",
            where=str(path),
            remedy="Choose one of them with --parameter, or export .safetensors.",
        )
    for name in names:
        if excess(name + DRAFT, path.absolute().parent):
            raise SpecError(
                f"the name of the parameter {name[:40]}… is too long for a file of its own",
                where=str(path),
                remedy="Export .safetensors, or this one to a .npy file with --parameter.",
            )
    if not os.path.isdir(path):  # noqa: PTH112 (which raises on a failing disk)
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"the folder cannot be made: {error.strerror}",
                where=str(path),
                remedy="Create the folder it is to be in first, or choose another.",
            ) from error
    return [_array([one], path / name) for one, name in zip(selected, names, strict=True)]


def _array(selected: Sequence[_ArrayRows], path: Path) -> ExportTask:
    """Return how to write one array as .npy."""
    if len(selected) > 1:
        names = ", ".join(one.array.name for one in selected[:8])
        more = ", …" if len(selected) > 8 else ""
        raise SpecError(
            f"a .npy file holds one array, and {len(selected)} parameters are selected",
            remedy=f"Choose one with --parameter ({names}{more}), export .safetensors, or give "
            "a folder.",
        )
    (one,) = selected
    return ExportedFile(str(path), (one.array.name,), one.shape, one.nbytes), one.write_npy


def _arrays(
    file: GradientFile, chain: StoredChain, selected: Sequence[_ArrayRows], path: Path
) -> ExportTask:
    """Return how to write arrays by their parameters' names as .safetensors."""
    table: dict[str, Any] = {"__metadata__": {"chain": chain.text, "result": file.path.name}}
    at = 0
    for one in selected:
        name, dtype = one.array.name, one.array.dtype.name
        odd = name in table or printable(name) != name
        if dtype not in _DTYPES or odd:
            what = f"has no array {name!r}" if odd else f"holds no {dtype}"
            raise SpecError(f"safetensors itself {what}", remedy="Export .npy files to a folder.")
        place = [at, at + one.nbytes]
        table[name] = {"dtype": _DTYPES[dtype], "shape": one.shape, "data_offsets": place}
        at += one.nbytes
    text = json.dumps(table, ensure_ascii=True).encode()
    text += b" " * (-len(text) % _ALIGNMENT)

    def write(out: BinaryIO) -> None:
        out.write(len(text).to_bytes(8, "little") + text)
        for one in selected:
            one.write(out)

    names = tuple(one.array.name for one in selected)
    return ExportedFile(str(path), names, None, 8 + len(text) + at), write


def _table(
    file: GradientFile, globs: Sequence[str], samples: slice | None, path: Path
) -> ExportTask:
    """Return how to write the sample table, with norms as `norm:NAME` where they match a glob."""
    columns = {name: column for name, column in file.samples.items() if name != "preview"}
    if globs:
        names = _matching([*file.norms], globs)
        columns |= {f"norm:{printable(name)}": file.norms[name] for name in names}
    rows = _find_rows(file, samples)
    parts = np.split(rows, range(_TABLE_ROWS, len(rows), _TABLE_ROWS))
    blocks = ({name: values[part] for name, values in columns.items()} for part in parts)
    write: Write = partial(_write_csv, blocks, list(columns))
    if path.suffix.lower() == ".parquet":
        try:
            write = partial(_write_parquet, blocks, import_module("pyarrow"))
            import_module("pyarrow.parquet")
        except ImportError as error:
            raise SpecError(
                "Parquet needs pyarrow, which is not installed",
                remedy="pip install 'torch-gradscope[data]', or export .csv.",
            ) from error
    return ExportedFile(str(path), tuple(columns), (len(rows), len(columns)), 0), write


def _write_parquet(blocks: Iterator[Mapping[str, np.ndarray]], arrow: Any, out: BinaryIO) -> None:
    first = arrow.table(next(blocks))
    with arrow.parquet.ParquetWriter(out, first.schema) as writer:
        writer.write_table(first)
        for block in blocks:
            writer.write_table(arrow.table(block))


def _write_csv(blocks: Iterator[Mapping[str, np.ndarray]], names: list[str], out: BinaryIO) -> None:
    """Write a table as CSV: UTF-8, shortest numbers that come back, true and false."""

    def texts(column: np.ndarray) -> list[Any]:
        if column.dtype.kind == "b":
            return ["true" if value else "false" for value in column.tolist()]
        if column.dtype.kind in "fc":  # numpy's own text: the shortest that comes back
            return [str(value) for value in column]
        found: list[Any] = column.tolist()
        return found

    text = io.TextIOWrapper(out, encoding="utf-8", newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for block in blocks:
        writer.writerows(zip(*map(texts, block.values()), strict=True))
    text.flush()
    text.detach()
