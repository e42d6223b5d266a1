"""Reading result files."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import h5py
import numpy as np

from gradscope.errors import ResultFileError, SpecError
from gradscope.storage import integrity, safety
from gradscope.storage.arrays import StoredArray, reading
from gradscope.storage.build import FORMAT, FORMAT_VERSION
from gradscope.storage.names import unescape


class _ByName(Mapping[str, StoredArray]):
    """Arrays of a group by parameter name, in the model's order."""

    def __init__(self, group: h5py.Group, order: list[str]) -> None:
        found = {unescape(name): item for name, item in group.items()}
        names = [*(n for n in order if n in found), *(n for n in found if n not in order)]
        self._arrays = {name: StoredArray(name, found[name]) for name in names}

    def __getitem__(self, name: str) -> StoredArray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


class StoredChain(_ByName):
    """One chain: {name: StoredArray}.

    Attributes:
        text: The chain's canonical spelling.
        reduced: Whether its arrays are aggregates rather than rows.
    """

    def __init__(self, group: h5py.Group, order: list[str]) -> None:
        super().__init__(group, order)
        self.text = str(group.attrs["chain"])
        self.reduced = bool(group.attrs["reduced"])


class _Norms(Mapping[str, np.ndarray]):
    """{parameter: (N,)}, each read and checked when asked for."""

    def __init__(self, group: h5py.Group, order: list[str]) -> None:
        self._columns = {unescape(name): dataset for name, dataset in group.items()}
        self._names = [n for n in order if n in self._columns]

    def __getitem__(self, name: str) -> np.ndarray:
        return _column(self._columns[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class GradientFile:
    """An open result file.

    Attributes:
        path: Where it is.
        attributes: The root's short attributes: versions and hashes.
        run: The resolved run.
        certificate: The proof of the numbers.
        identity: What must be equal for a run to be resumed.
        parameters: {name: shape}, in the model's order.
        n: The number of samples.
        samples: The sample table: index, loss, norm, finite, and target if stored, each (N,).
        norms: {parameter: (N,)}, L2 norms of the raw gradients.
        norm_attributes: {parameter: {attribute: number}}.
        chains: The chains, in the order given.
    """

    def __init__(self, path: Path, file: h5py.File) -> None:
        self.path = path
        self._file = file
        texts = {key: value for key, value in file.attrs.items() if isinstance(value, str)}
        documents = ("run", "certificate", "identity", "parameters")
        self.run, self.certificate, self.identity, shapes = (
            _document(texts, key) for key in documents
        )
        self.attributes = {k: v for k, v in texts.items() if k not in documents}
        self.parameters: dict[str, tuple[int, ...]] = {k: tuple(s) for k, s in shapes.items()}
        order = list(self.parameters)
        self.samples = {name: _column(column) for name, column in file["samples"].items()}
        self.n = len(self.samples["index"])
        self.norms: Mapping[str, np.ndarray] = _Norms(file["norms"], order)
        self.norm_attributes = {
            unescape(name): _numbers(column) for name, column in file["norms"].items()
        }
        groups = [file["chains"][str(k)] for k in range(len(file["chains"]))]
        self.chains = tuple(StoredChain(group, order) for group in groups)

    def iterate(self, chain: int = 0, batch_size: int = 256) -> Iterator[dict[str, np.ndarray]]:
        """Yield {name: rows (n, *shape)}, batch by batch.

        Raises:
            SpecError: There is no such chain, or it has no rows.
        """
        if not 0 <= chain < len(self.chains):
            raise SpecError(
                f"there is no chain {chain}",
                where=str(self.path),
                remedy=f"The file has {len(self.chains)} chains, counted from 0.",
            )
        stored = self.chains[chain]
        if stored.reduced:
            raise SpecError(
                f"chain {chain} ({stored.text}) is an aggregate and has no rows",
                where=str(self.path),
                remedy=f"Read file.chains[{chain}][name][...].",
            )
        for start in range(0, self.n, batch_size):
            rows = slice(start, start + batch_size)
            yield {name: array[rows] for name, array in stored.items()}

    def close(self) -> None:
        """Close the file; what was read stays valid."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_file(path: str | Path) -> GradientFile:
    """Open a result file; use it in a `with` statement.

    The structure is checked before anything is read from it: see docs/format.md.

    Raises:
        ResultFileError: The file is absent, unfinished, damaged, not a result file, newer than
            this gradscope, or reaches outside itself.
    """
    path = Path(path)
    try:
        with reading(str(path)):
            file, sealed = _opened(path)
            try:
                _check(file, path.stat().st_size, sealed)
                return _contents(path, file)
            except BaseException:
                file.close()
                raise
    except ResultFileError as error:
        raise error if error.where else error.at(str(path)) from error.__cause__


def _contents(path: Path, file: h5py.File) -> GradientFile:
    try:
        return GradientFile(path, file)
    except (AttributeError, TypeError, ValueError) as error:
        raise ResultFileError(
            f"groups or attributes are not those of a result file ({error})",
            remedy="Give the file that gradscope compute -o wrote.",
        ) from error


def _opened(path: Path) -> tuple[h5py.File, bool]:
    """Open the file, having checked its seal, and return whether it has one."""
    if not path.is_file():
        part = path.with_name(path.name + ".part")
        raise ResultFileError(
            "there is no such file",
            remedy=f"{part.name} is there: the run is not finished; give --resume."
            if part.exists()
            else "Check the path.",
        )
    intact = integrity.is_intact(path)
    if intact is False:
        raise _changed("its structure was changed after it was written")
    if not h5py.is_hdf5(path):
        raise ResultFileError(
            "this is not an HDF5 file", remedy="Give the file that gradscope compute -o wrote."
        )
    try:
        return h5py.File(path, "r", locking=False), intact is not None
    except OSError as error:
        if "truncated" not in str(error):
            raise
        raise ResultFileError(
            "the file is cut short", remedy="Take another copy of it, or compute it again."
        ) from error


def _check(file: h5py.File, size: int, sealed: bool) -> None:
    safety.check_attributes(file, size)
    found = file.attrs.get("format")
    if not isinstance(found, str) or found != FORMAT:
        raise ResultFileError(
            "this HDF5 file was not written by gradscope",
            remedy="Give the file that gradscope compute -o wrote.",
        )
    version = int(file.attrs.get("format_version", 0))
    if version > FORMAT_VERSION:
        raise ResultFileError(
            f"the file has format version {version}, this gradscope reads {FORMAT_VERSION}",
            remedy="Install a newer gradscope.",
        )
    if file.attrs.get("status") != "complete":
        raise ResultFileError(
            "the file is not finished: its run was stopped, or is still going on",
            remedy="Go on with it: the same command and --resume.",
        )
    if not sealed:
        raise _changed("its seal is missing: it was cut short, or changed after it was written")
    safety.check(file, size)


def _changed(what: str) -> ResultFileError:
    return ResultFileError(what, remedy="Take another copy of the file, or compute it again.")


def _column(dataset: h5py.Dataset) -> np.ndarray:
    where = f"{dataset.file.filename}: {dataset.name}"
    with reading(where):
        values: np.ndarray = dataset[()]
        expected = dataset.attrs["sha256"]
    if integrity.column_digest(values) != expected:
        raise ResultFileError(
            "the column's data are damaged: its checksum does not match",
            where=where,
            remedy="Take another copy of the file, or compute it again.",
        )
    return values


def _numbers(dataset: h5py.Dataset) -> dict[str, float]:
    items = dataset.attrs.items()
    return {key: float(value) for key, value in items if isinstance(value, float | np.floating)}


def _document(texts: dict[str, str], key: str) -> dict[str, Any]:
    with suppress(ValueError):
        document = json.loads(texts.get(key, "{}"))
        if isinstance(document, dict):
            return document
    raise ResultFileError(f"the attribute {key!r} is not a JSON document")
