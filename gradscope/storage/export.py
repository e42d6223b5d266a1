"""Export of numbers from a result file to .npy, .safetensors, .parquet and .csv.

Only a few rows are in memory at a time. An exported file is complete, or it does not exist.

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
] = {  # whether a file that begins with these bytes has the format; CSV must be a sample table
    ".npy": lambda head: head.startswith(b"\x93NUMPY"),
    ".safetensors": lambda head: head[8:10] == b'{"',
    ".parquet": lambda head: head.startswith(b"PAR1"),
    ".csv": lambda head: (
        {b"index", b"loss", b"norm", b"finite"} <= {*head.split(b"\n")[0].split(b",")}
    ),
}
_BLOCK_BYTES = 2**25  # size of the dense numbers in memory
_TABLE_ROWS = 2**16  # rows of a table in memory
_DTYPES = {"float16": "F16", "float32": "F32", "float64": "F64", "complex64": "C64"}
_DTYPES |= {"int64": "I64", "int32": "I32", "uint8": "U8", "bool": "BOOL"}
_ALIGNMENT = 8


@dataclass(frozen=True)
class ExportedFile:
    """A file that was written."""

    path: str
    names: tuple[str, ...]  # the parameters, or the columns of the table
    # the shape of the array, (rows, columns) of the table, or None if the file has several arrays
    shape: tuple[int, ...] | None
    bytes: int  # the size of the file


# the file with its minimum size, and the function that writes it
ExportTask = tuple[ExportedFile, Write]


@dataclass(frozen=True)
class _ArrayRows:
    """Rows of one array by position; an aggregate has `rows=None`."""

    array: StoredArray
    rows: np.ndarray | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape if self.rows is None else (len(self.rows), *self.array.shape[1:])

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * int(self.array.dtype.itemsize)

    def write(self, out: BinaryIO) -> None:
        """Write the numbers little-endian and in C order, a few rows at a time."""
        if self.rows is None:
            _write_numbers(np.atleast_1d(self.array[...]), out)
            return
        for _, gradients in stored_gradients({"": self.array}, self.rows, _BLOCK_BYTES):
            _write_numbers(as_numpy(gradients[""].dense()), out)

    def write_npy(self, out: BinaryIO) -> None:
        """Write the array in numpy's format, version 1.0."""
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
    """Write a part of a result file; the suffix of `path` selects the format.

    Args:
        file: The open result.
        path: .npy holds one parameter of a chain, .safetensors several. A path without suffix is
            a folder with one .npy file per parameter. .parquet and .csv hold the sample table.
        chain: The chain's number or text; the first chain if None. Not for the sample table.
        parameters: Globs of parameters; all parameters if empty. In the sample table, the norms
            of matching parameters become columns.
        samples: Positions in the data set.
        overwrite: Replace existing files.

    Raises:
        SpecError: The format does not support the selection.
        ResultFileError: The data are damaged; no file is written.
        OutputError: A file cannot be written.
    """
    require_short(path, DRAFT if path.suffix else "")
    with reporting_errors(path):
        require_distinct(path, [file.path])
        suffix = "" if path.is_dir() else path.suffix.lower()
    if suffix in _TABLES:
        if chain is not None:
            raise SpecError(
                "--chain does not apply to .parquet and .csv, which hold the sample table",
                remedy="Remove --chain, or export the chain to .npy or .safetensors.",
            )
        made = [_table(file, parameters, samples, path)]
    elif suffix in FORMATS or not suffix:
        found, selected = _select(file, chain or "0", parameters, samples)
        if suffix == ".safetensors":
            made = [_arrays(file, found, selected, path)]
        else:
            made = [_array(selected, path)] if suffix else _folder(selected, path)
    else:
        raise SpecError(
            f"export to {suffix!r} is not supported",
            where=str(path),
            remedy=f"Give a file name with {', '.join(FORMATS)}, or a folder for .npy files.",
        )
    _require_room([Path(one.path) for one, _ in made], sum(one.bytes for one, _ in made), overwrite)
    return [replace(one, bytes=written(Path(one.path), write)) for one, write in made]


def _require_room(places: Sequence[Path], size: int, overwrite: bool) -> None:
    """Raise if a file cannot be replaced, or if the disk lacks `size` bytes for all files."""
    for place in places:
        require_place(place, DRAFT)
        with reporting_errors(place):
            free = shutil.disk_usage(place.absolute().parent).free
            ending = place.suffix.lower()
            kind = f"export to {ending}"
            require_free(place, overwrite=overwrite, kind=kind, known=_HEAD_TESTS[ending])
        if size > free:
            raise OutputError(
                f"the export needs {size:,} bytes; the disk has {free:,} bytes free",
                where=str(place),
                remedy="Choose another disk, or export fewer samples or parameters.",
            )


def _select(
    file: GradientFile, name: str, globs: Sequence[str], samples: slice | None
) -> tuple[StoredChain, list[_ArrayRows]]:
    """Return the chain `name`, and the rows of each parameter that matches a glob."""
    chain = find_chain(file, name)
    if chain is None:
        known = ", ".join(f"{k} ({one.text})" for k, one in enumerate(file.chains))
        raise SpecError(
            f"there is no chain {name!r}",
            where=str(file.path),
            remedy=f"Give the number or the text of a chain: {known}.",
        )
    if chain.reduced and samples is not None:
        raise SpecError(
            f"the chain {chain.text!r} is an aggregate and has no samples",
            where=str(file.path),
            remedy="Remove --samples, or choose a chain without a reducer.",
        )
    rows = None if chain.reduced else _find_rows(file, samples)
    return chain, [_ArrayRows(chain[own], rows) for own in _matching(list(chain), globs)]


def _matching(names: list[str], globs: Sequence[str]) -> list[str]:
    """Return the names that match a glob, or all names without globs."""
    for glob in globs:
        if not fnmatch.filter(names, glob):
            raise SpecError(
                f"no parameter in the file matches {glob!r}", remedy=suggestion(glob, names)
            )
    return [n for n in names if not globs or any(fnmatch.fnmatchcase(n, g) for g in globs)]


def _find_rows(file: GradientFile, samples: slice | None) -> np.ndarray:
    """Return the rows of the samples with these positions in their data set, (m,) int64."""
    index = file.samples.get("sample", file.samples["index"])  # with tokens, each row's sample
    start = 0 if samples is None else samples.start or 0
    stop = None if samples is None else samples.stop
    chosen = (index >= start) & (True if stop is None else index < stop)
    if not chosen.any():
        raise SpecError(
            f"--samples {start}:{'' if stop is None else stop} selects no sample of the file",
            where=str(file.path),
            remedy=f"Choose from samples {index.min()} to {index.max()}.",
        )
    return np.flatnonzero(chosen)


def _folder(selected: Sequence[_ArrayRows], path: Path) -> list[ExportTask]:
    names = [f"{escape(one.array.name)}.npy" for one in selected]
    if len({name.casefold() for name in names}) < len(names):
        raise SpecError(
            "parameter names differ only in upper and lower case, so they may have the same file "
            "name on this disk",
            where=str(path),
            remedy="Choose one of these parameters with --parameter, or export .safetensors.",
        )
    for name in names:
        if excess(name + DRAFT, path.absolute().parent):
            raise SpecError(
                f"the parameter name {name[:40]}… is too long for a file name",
                where=str(path),
                remedy="Export .safetensors, or export this parameter to a .npy file with "
                "--parameter.",
            )
    if not os.path.isdir(path):  # noqa: PTH112 (which raises on a failing disk)
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"the folder cannot be created: {error.strerror}",
                where=str(path),
                remedy="Create its parent folder, or choose another path.",
            ) from error
    return [_array([one], path / name) for one, name in zip(selected, names, strict=True)]


def _array(selected: Sequence[_ArrayRows], path: Path) -> ExportTask:
    """Return the task to write one array as .npy."""
    if len(selected) > 1:
        names = ", ".join(one.array.name for one in selected[:8])
        more = ", …" if len(selected) > 8 else ""
        raise SpecError(
            f"a .npy file holds one array, but {len(selected)} parameters are selected",
            remedy=f"Choose one with --parameter ({names}{more}), export .safetensors, or give "
            "a folder.",
        )
    (one,) = selected
    return ExportedFile(str(path), (one.array.name,), one.shape, one.nbytes), one.write_npy


def _arrays(
    file: GradientFile, chain: StoredChain, selected: Sequence[_ArrayRows], path: Path
) -> ExportTask:
    """Return the task to write arrays by parameter name as .safetensors."""
    table: dict[str, Any] = {"__metadata__": {"chain": chain.text, "result": file.path.name}}
    at = 0
    for one in selected:
        name, dtype = one.array.name, one.array.dtype.name
        odd = name in table or printable(name) != name
        if dtype not in _DTYPES or odd:
            what = f"does not allow the name {name!r}" if odd else f"does not support {dtype}"
            raise SpecError(f"safetensors {what}", remedy="Export .npy files to a folder.")
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
    """Return the task to write the sample table, with `norm:NAME` for names that match a glob."""
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
    """Write a table as CSV: UTF-8, shortest texts that parse to the same numbers, true/false."""

    def texts(column: np.ndarray) -> list[Any]:
        if column.dtype.kind == "b":
            return ["true" if value else "false" for value in column.tolist()]
        if column.dtype.kind in "fc":  # numpy's text is the shortest that parses to the number
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
