"""Taking numbers out of a result file: to .npy, .safetensors, .parquet and .csv.

Whatever the size, a few rows at a time are in memory. A file is complete, or it is not there.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gradscope.errors import OutputError, SpecError
from gradscope.storage.export_arrays import (
    safetensors_bytes,
    write_npy,
    write_safetensors,
)
from gradscope.storage.export_table import TABLES, Table, table_of
from gradscope.storage.names import escape
from gradscope.storage.reader import GradientFile
from gradscope.storage.replacing import SUFFIX, check_free, replacing, reported
from gradscope.storage.selection import Part, find_chain, find_parts
from gradscope.storage.trouble import excess, require_short

FORMATS = (".npy", ".safetensors", *TABLES)


@dataclass(frozen=True)
class Exported:
    """A file that was written.

    Attributes:
        path: Where.
        names: The parameters, or the columns of the table.
        shape: Of the array, where it is one; of the table otherwise: rows and columns.
        bytes: Its size.
    """

    path: str
    names: tuple[str, ...]
    shape: tuple[int, ...] | None
    bytes: int


def export(
    file: GradientFile,
    path: Path,
    chain: str | None = None,
    parameters: Sequence[str] = (),
    samples: slice | None = None,
    *,
    overwrite: bool = False,
) -> list[Exported]:
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
    require_short(path, SUFFIX if path.suffix else "")
    suffix = path.suffix.lower()
    with reported(path):
        is_same = path.exists() and path.samefile(file.path)
    if is_same:
        raise OutputError(
            "the export would replace the result that it is taken from",
            where=str(path),
            remedy="Choose another name.",
        )
    if suffix in TABLES and not path.is_dir():
        if chain is not None:
            raise SpecError("the sample table belongs to no chain", remedy="Leave out --chain.")
        return [_table(table_of(file, parameters, samples), path, overwrite)]
    parts = find_parts(file, find_chain(file, chain or "0"), parameters, samples)
    if suffix == ".npy" and not path.is_dir():
        return [_array(_only(parts), path, overwrite)]
    if suffix == ".safetensors" and not path.is_dir():
        return [_arrays(file, chain or "0", parts, path, overwrite)]
    if suffix and not path.is_dir():
        raise SpecError(
            f"there is no export to {suffix!r}",
            where=str(path),
            remedy=f"Supported: {', '.join(FORMATS)}, and a folder of .npy files.",
        )
    return _folder(parts, path, overwrite)


def _folder(parts: Sequence[Part], path: Path, overwrite: bool) -> list[Exported]:
    names = [f"{escape(part.array.name)}.npy" for part in parts]
    if len({name.casefold() for name in names}) < len(names):
        raise SpecError(
            "parameters differ in small and capital letters only, which not every disk tells apart",
            where=str(path),
            remedy="Choose one of them with --parameter, or export .safetensors.",
        )
    for name in names:
        if excess(name + SUFFIX, path.absolute().parent):
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
    places = [path / name for name in names]
    for place in places:
        check_free(place, sum(part.nbytes for part in parts), overwrite=overwrite)
    return [_array(part, place, overwrite) for part, place in zip(parts, places, strict=True)]


def _array(part: Part, path: Path, overwrite: bool) -> Exported:
    check_free(path, part.nbytes, overwrite=overwrite)
    size = _written(path, lambda out: write_npy(out, part))
    return Exported(str(path), (part.array.name,), part.shape, size)


def _arrays(
    file: GradientFile, chain: str, parts: Sequence[Part], path: Path, overwrite: bool
) -> Exported:
    facts = {"chain": find_chain(file, chain).text, "result": file.path.name}
    check_free(path, safetensors_bytes(parts, facts), overwrite=overwrite)
    size = _written(path, lambda out: write_safetensors(out, parts, facts))
    return Exported(str(path), tuple(part.array.name for part in parts), None, size)


def _table(table: Table, path: Path, overwrite: bool) -> Exported:
    check_free(path, 0, overwrite=overwrite)
    write = TABLES[path.suffix.lower()]()
    size = _written(path, lambda out: write(out, table))
    return Exported(str(path), table.names, (len(table.rows), len(table.names)), size)


def _written(path: Path, write: Callable[[BinaryIO], None]) -> int:
    with replacing(path) as out:
        write(out)
    with reported(path):
        return path.stat().st_size


def _only(parts: Sequence[Part]) -> Part:
    if len(parts) == 1:
        return parts[0]
    names = ", ".join(part.array.name for part in parts[:8])
    raise SpecError(
        f"a .npy file holds one array, and {len(parts)} parameters are selected",
        remedy=f"Choose one with --parameter ({names}{', …' if len(parts) > 8 else ''}), export "
        ".safetensors, or give a folder.",
    )
