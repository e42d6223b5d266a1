"""Result files open for reading, including virtual files, whose rows are in source files.

If a source file of a virtual data set is missing, HDF5 silently returns fill values. So virtual
rows are not read through HDF5. Each source is opened as a separate result file with all checks.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from math import prod
from pathlib import Path
from types import EllipsisType
from typing import Self, TypeVar

import h5py
import numpy as np
import torch
from torch import Tensor

from gradscope import markup
from gradscope.blocks import Block, DenseBlock, Gradients, joined
from gradscope.core.texts import count
from gradscope.errors import ResultFileError, SpecError
from gradscope.process.memory import slices
from gradscope.storage.format.files import reading
from gradscope.storage.format.layout import AXES, KEYS, KINDS, SOURCES
from gradscope.storage.format.numbers import as_numpy, dtype_named, escape, numpy_dtype, unescape
from gradscope.storage.format.seal import Checks, seal_of
from gradscope.storage.read.opening import OpenFile, document, open_checked, reopen

T = TypeVar("T")
Selection = int | slice | np.ndarray | list[int] | list[bool] | EllipsisType


class StoredArray:
    """One parameter's array in the file.

    Attributes:
        name: The parameter's name.
        representation: "dense" or "factored".
        shape: (N, *shape) for rows, (*shape) for an aggregate.
        dtype: The dtype of returned arrays; float32 if bfloat16 is stored.
    """

    def __init__(self, name: str, item: h5py.HLObject, checks: Checks) -> None:
        self.name = name
        self._item, self._checks = item, checks
        self._where = f"{item.file.filename}: {item.name}"
        if isinstance(item, h5py.Dataset):
            self.representation = "dense"
            self.shape = tuple(int(s) for s in item.shape)
            self.dtype = item.dtype
        else:
            self.representation = "factored"
            with reading(self._where):
                self.shape = _factored_shape(item)
                self.dtype = numpy_dtype(dtype_named(str(item.attrs["dtype"])))

    @property
    def nbytes(self) -> int:
        """The array's size in the file, in bytes."""
        is_dense = isinstance(self._item, h5py.Dataset)
        own = [self._item] if is_dense else [self._item[k] for k in self._item if k in AXES]
        return sum(int(dataset.id.get_storage_size()) for dataset in own)

    @property
    def overflowed(self) -> int:
        """The count of finite numbers that became infinite in the stored format."""
        with reading(self._where):
            return int(self._item.attrs.get("overflowed", 0))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Selection) -> np.ndarray:
        """Return the entries `rows` of the first axis."""
        if not self.shape:
            with reading(self._where):
                return self._checks.read_all(self._item)
        every = range(self.shape[0])
        if isinstance(rows, int | np.integer):
            one: np.ndarray = self._read(every[rows], every[rows] + 1)[0]
            return one
        rows = slice(None) if isinstance(rows, EllipsisType) else rows
        chosen = every[rows] if isinstance(rows, slice) else np.arange(len(every))[_indices(rows)]
        wanted, order = np.unique(np.asarray(chosen, np.int64), return_inverse=True)
        runs = np.split(wanted, np.flatnonzero(np.diff(wanted) > 1) + 1) if len(wanted) else []
        found = [self._read(int(run[0]), int(run[-1]) + 1) for run in runs] or [self._read(0, 0)]
        whole = found[0] if len(found) == 1 else np.concatenate(found)
        return whole if np.array_equal(order, np.arange(len(whole))) else whole[order]

    def block(self, start: int, stop: int) -> Block:
        """Return rows start:stop as a block, with factors if the file stores factors."""
        with reading(self._where):
            return self._checks.block(self._item, start, stop)

    @property
    def row_bytes(self) -> int:
        """The bytes of a row in memory: dense or as factors, whichever is larger."""
        dense: int = prod(self.shape[1:]) * self.dtype.itemsize
        if isinstance(self._item, h5py.Dataset):
            return dense
        factors = (self._item[name] for name in KINDS[str(self._item.attrs["kind"])])
        stored: int = sum(prod(f.shape[1:]) * f.dtype.itemsize for f in factors)
        return max(dense, stored)

    def _read(self, start: int, stop: int) -> np.ndarray:
        with reading(self._where):
            return as_numpy(self.block(start, stop).dense())

    def __repr__(self) -> str:
        return f"<StoredArray {self.name!r} {self.shape} {self.dtype} {self.representation}>"


def _indices(rows: np.ndarray | list[int] | list[bool]) -> np.ndarray:
    """Return positions or a mask as an array; an empty list selects no position."""
    found = np.asarray(rows)
    return found if found.size else found.astype(np.int64)


class Lazy(Mapping[str, T]):
    """A mapping {name: value} that reads values on access; `kept` caches them."""

    def __init__(
        self, names: Iterable[str], read: Callable[[str], T], *, kept: bool = False
    ) -> None:
        self._names, self._read = dict.fromkeys(names), cache(read) if kept else read

    def __getitem__(self, name: str) -> T:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class StoredChain(Lazy[StoredArray]):
    """One chain: {parameter name: StoredArray}, in the model's order.

    Attributes:
        text: The chain's canonical spelling.
        reduced: Whether the arrays are aggregates (True) or rows (False).
    """

    def __init__(
        self,
        group: h5py.Group,
        checks: Checks,
        order: list[str],
        make: Callable[[str, h5py.HLObject, Checks], StoredArray] = StoredArray,
    ) -> None:
        self.text = str(group.attrs["chain"])
        self.reduced = bool(group.attrs["reduced"])
        found = {unescape(name): name for name in group}

        def read(name: str) -> StoredArray:
            with reading(f"{group.file.filename}: {group.name}"):
                return make(name, group[found[name]], checks)

        names = [name for name in dict.fromkeys([*order, *found]) if name in found]
        super().__init__(names, read, kept=True)


def stored_gradients(
    arrays: Mapping[str, StoredArray], rows: np.ndarray, size: int
) -> Iterator[tuple[Tensor, Gradients]]:
    """Yield (positions (b,), gradients) of selected rows of a chain, part by part.

    Statistics, attribution, export and `iterate` use this function.

    Args:
        arrays: {name: array} of a chain without reducer, or of some of its parameters.
        rows: Positions of the selected rows in the file, (m,) int64, ascending.
        size: The maximum bytes of rows in memory; at least one row. This includes the rows between
            two selected rows.
    """
    row = sum(array.row_bytes for array in arrays.values())
    for part in slices(int(rows[-1]) + 1 if len(rows) else 0, row, size):
        some = rows[np.searchsorted(rows, part.start) : np.searchsorted(rows, part.stop)]
        if len(some) == 0:
            continue
        start, stop = int(some[0]), int(some[-1]) + 1
        found = Gradients({name: array.block(start, stop) for name, array in arrays.items()})
        wanted = torch.from_numpy(some)
        yield wanted, found if len(some) == stop - start else found.select(wanted - start)


def stored_states(group: h5py.Group, checks: Checks) -> Lazy[np.ndarray]:
    """Return the state of one reducer, {key: array}."""
    places: dict[str, tuple[str, int, tuple[int, ...]]] = {}
    ends = dict.fromkeys(group, 0)
    for key, name, shape in json.loads(group.attrs[KEYS]):
        places[key] = name, ends[name], tuple(shape)
        ends[name] += prod(shape)

    def read(key: str) -> np.ndarray:
        name, start, shape = places[key]
        with reading(f"{group.file.filename}: {group.name}"):
            return checks.rows(group[name], start, start + prod(shape)).reshape(shape)

    return Lazy(places, read)


def column(dataset: h5py.Dataset, checks: Checks, *, decode: bool = True) -> np.ndarray:
    """Return a column (N,) of a table; UTF-8 texts are decoded if `decode` is true."""
    with reading(f"{dataset.file.filename}: {dataset.name}"):
        values = checks.read_all(dataset)
    return np.char.decode(values, "utf-8") if decode and values.dtype.kind == "S" else values


def _factored_shape(group: h5py.Group) -> tuple[int, ...]:
    """Return (N, *shape); raise if the factors' shapes do not match it."""
    shape = tuple(int(s) for s in group.attrs["shape"])
    first, second = (group[name] for name in KINDS[str(group.attrs["kind"])])
    n, t = first.shape[0], first.shape[-2] if first.ndim == 4 else first.shape[-1]
    if first.ndim == 4:  # outer
        fits = second.ndim == 4 and second.shape[:3] == (n, first.shape[1], t)
        fits = fits and first.shape[1] * first.shape[3] * second.shape[3] == prod(shape)
    else:
        fits = first.ndim == 2 and second.ndim == 3 and second.shape[:2] == (n, t)
        fits = fits and len(shape) == 2 and second.shape[2] == shape[1]
    if not fits or min(shape, default=1) < 0:
        raise ResultFileError(
            f"factors of shapes {first.shape} and {second.shape} do not match rows of {shape}",
            remedy="The file is damaged; compute it again.",
        )
    return (n, *shape)


_BATCH_BYTES = 2**28  # default size of the dense rows in one part
_MOST_ROWS = 256
_OPEN = 4  # the maximum number of open sources


class GradientFile:
    """An open result file.

    Attributes:
        path: The path of the file.
        hdf5: The open HDF5 file, for data without an attribute here.
        attributes: The root's short attributes: versions and hashes.
        run: The resolved run.
        certificate: The proof of the numbers.
        identity: The values that must be equal to resume the run.
        parameters: {name: shape}, in the model's order.
        n: The number of samples.
        samples: The sample table: index, loss, norm, finite; target and id where stored; each (N,).
        norms: {parameter: (N,)}, L2 norms of the raw gradients.
        chains: The chains, in the order given.
        states: {owner: {key: array}}, the states of the reducers, if stored.
        sources: The source files of a virtual file, else None.
    """

    def __init__(self, path: Path, file: h5py.File, checks: Checks) -> None:
        self.path, self.hdf5 = path, file
        texts = {key: value for key, value in file.attrs.items() if isinstance(value, str)}
        documents = ("run", "certificate", "identity", "parameters")
        self.run, self.certificate, self.identity, shapes = (
            document(texts, key) for key in documents
        )
        self.attributes = {k: v for k, v in texts.items() if k not in documents}
        self.parameters: dict[str, tuple[int, ...]] = {k: tuple(s) for k, s in shapes.items()}
        order = list(self.parameters)
        self.samples = {name: column(item, checks) for name, item in file["samples"].items()}
        self.n = len(self.samples["index"])
        table, found = file["norms"], {unescape(name): name for name in file["norms"]}
        self.norms: Mapping[str, np.ndarray] = Lazy(
            (name for name in order if name in found),
            lambda name: column(table[found[name]], checks),
        )
        self.sources: Sources | None = None
        if SOURCES in texts:
            self.sources = _sources_of(self.attributes.pop(SOURCES), path.parent)
        chains = []
        for k in range(len(file["chains"])):
            group = file["chains"][str(k)]
            make: Callable[..., StoredArray] = StoredArray
            if self.sources is not None and not group.attrs["reduced"]:
                make = partial(VirtualArray, chain=k, sources=self.sources)
            chains.append(StoredChain(group, checks, order, make))
        self.chains = tuple(chains)
        kept = file.get("states", {})
        self.states: Mapping[str, Mapping[str, np.ndarray]] = {
            owner: stored_states(group, checks) for owner, group in kept.items()
        }

    @cached_property
    def norm_attributes(self) -> dict[str, dict[str, float]]:
        """{parameter: {attribute: number}}."""
        found: dict[str, dict[str, float]] = {}
        with reading(str(self.path)):
            for escaped, dataset in self.hdf5["norms"].items():
                numbers = found[unescape(escaped)] = {}
                for k in range(h5py.h5a.get_num_attrs(dataset.id)):
                    attribute = h5py.h5a.open(dataset.id, index=k)
                    if attribute.dtype.kind == "f" and attribute.shape == ():
                        value = np.empty((), attribute.dtype)
                        attribute.read(value)
                        numbers[attribute.name.decode(errors="replace")] = float(value)
        return found

    def iterate(
        self, chain: int = 0, batch_size: int | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yield {name: rows (n, *shape)}, batch by batch.

        Args:
            chain: The chain's number.
            batch_size: Rows per batch; by default at most 256 rows and 256 MiB.

        Raises:
            SpecError: There is no such chain, or it has no rows.
        """
        if not 0 <= chain < len(self.chains):
            raise SpecError(
                f"there is no chain {chain}",
                where=str(self.path),
                remedy=f"The file has {count(len(self.chains), 'chain')}. Give a number from 0.",
            )
        stored = self.chains[chain]
        if stored.reduced:
            raise SpecError(
                f"chain {chain} ({stored.text}) is an aggregate and has no rows",
                where=str(self.path),
                remedy=f"Read file.chains[{chain}][name][...].",
            )
        row = sum(array.row_bytes for array in stored.values())
        step = batch_size or min(_MOST_ROWS, max(1, _BATCH_BYTES // max(1, row)))
        for _, gradients in stored_gradients(stored, np.arange(self.n), step * max(1, row)):
            yield {name: as_numpy(block.dense()) for name, block in gradients.items()}

    def _repr_html_(self) -> str:
        """Return a table of the file's content, for a notebook."""
        entries = sum(map(prod, self.parameters.values()))
        rows = [
            ("samples", f"{self.n:,}"),
            ("parameters", f"{len(self.parameters):,} ({entries:,} entries)"),
            ("sample table", ", ".join(self.samples)),
            ("certificate", str(self.certificate.get("verdict", "not recorded"))),
            *((f"chain {k}", chain.text) for k, chain in enumerate(self.chains)),
        ]
        return markup.document(str(self.path), markup.facts(rows))

    def close(self) -> None:
        """Close the file; arrays that were read remain valid."""
        if self.sources is not None:
            self.sources.close()
        self.hdf5.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close()


def open_file(path: str | Path) -> GradientFile:
    """Open a result file; use it in a `with` statement.

    The structure is checked before any data are read: see docs/format.md.

    Raises:
        ResultFileError: The file is absent, unfinished, damaged, not a result file, newer than
            this gradscope, or refers to other files.
    """
    found = open_checked(Path(path))
    try:
        with reading(str(path)):
            try:
                return GradientFile(Path(path), found.file, found.checks)
            except (AttributeError, TypeError, ValueError) as error:
                raise ResultFileError(
                    f"this is not a result file: a group or attribute is wrong ({error})",
                    remedy="Give the file that gradscope compute -o wrote.",
                ) from error
    except BaseException:
        found.file.close()
        raise


def find_chain(file: GradientFile, name: str, *, reduced: bool | None = None) -> StoredChain | None:
    """Return the chain with this number or text (and this `reduced`, if given), or None."""
    wanted = "".join(name.split())
    for k, chain in enumerate(file.chains):
        if wanted in (str(k), "".join(chain.text.split())) and reduced in (None, chain.reduced):
            return chain
    return None


@dataclass(frozen=True)
class SourceFile:
    """A file that holds rows start:stop of a virtual file."""

    path: Path
    seal: bytes  # the SHA-256 of its seal when it was merged
    start: int
    stop: int

    def require_unchanged(self) -> None:
        """Raise if the file is missing, or differs from the merged file."""
        state = "is missing"
        if self.path.is_file():
            seal = seal_of(self.path)
            if seal is not None and seal.intact and seal.digest == self.seal:
                return
            state = "has changed"
        raise ResultFileError(
            f"this file, which holds rows of a virtual file, {state}",
            where=str(self.path),
            remedy="Restore the file, or merge the files again.",
        )


class Sources:
    """The source files of a virtual file in row order; each is opened when first read."""

    def __init__(self, files: tuple[SourceFile, ...]) -> None:
        self.files = files
        self._open: OrderedDict[int, OpenFile] = OrderedDict()
        self._sound: set[int] = set()  # numbers of the sources whose structure was checked

    def read(self, chain: int, name: str, like: StoredArray, start: int, stop: int) -> Block:
        """Return rows start:stop of one parameter's array."""
        blocks = []
        for k, source in enumerate(self.files):
            first, last = max(start, source.start), min(stop, source.stop)
            if first >= last:
                continue
            opened_ = self._open_source(k)
            group = opened_.file["chains"].get(str(chain))
            if group is None or group.attrs["reduced"] or escape(name) not in group:
                raise _wrong_source(source, f"it has no rows of {name!r} in chain {chain}")
            array = StoredArray(name, group[escape(name)], opened_.checks)
            if (len(array), *array.shape[1:]) != (source.stop - source.start, *like.shape[1:]):
                raise _wrong_source(source, f"its {name!r} has the shape {array.shape}")
            blocks.append(array.block(first - source.start, last - source.start))
        none = torch.from_numpy(np.empty((0, *like.shape[1:]), like.dtype))
        return joined(blocks, torch.arange(stop - start)) if blocks else DenseBlock(none)

    def close(self) -> None:
        """Close all open sources."""
        while self._open:
            self._open.popitem()[1].file.close()

    def _open_source(self, k: int) -> OpenFile:
        """Open a source, and close the least recently used one if too many are open."""
        if k not in self._open:
            source = self.files[k]
            source.require_unchanged()
            known = k in self._sound
            self._open[k] = reopen(source.path, source.seal) if known else open_checked(source.path)
            self._sound.add(k)
            if SOURCES in self._open[k].file.attrs:
                raise _wrong_source(source, "it is a virtual file itself")
            if len(self._open) > _OPEN:
                self._open.popitem(last=False)[1].file.close()
        self._open.move_to_end(k)
        return self._open[k]


class VirtualArray(StoredArray):
    """One parameter's rows in several source files."""

    def __init__(
        self, name: str, item: h5py.HLObject, checks: Checks, chain: int, sources: Sources
    ) -> None:
        super().__init__(name, item, checks)
        self._chain, self._sources = chain, sources
        rows = sources.files[-1].stop if sources.files else 0
        if not self.shape or self.shape[0] != rows:
            raise ResultFileError(
                f"an array of shape {self.shape} does not match the {rows:,} rows of the sources",
                where=self._where,
            )

    @property
    def nbytes(self) -> int:
        """Zero: the rows are in other files."""
        return 0

    def block(self, start: int, stop: int) -> Block:
        """Return rows start:stop as a block, from the files that hold them."""
        return self._sources.read(self._chain, self.name, self, start, stop)


def _sources_of(text: str, folder: Path) -> Sources:
    """Return the sources of a virtual file in `folder`; raise if a source has changed."""
    files: list[SourceFile] = []
    try:
        for record in json.loads(text):
            path = Path(str(record["path"]))
            if path.is_absolute() or "\0" in str(path):
                raise ValueError(record)
            start, stop = (int(row) for row in record["rows"])
            files.append(SourceFile(folder / path, bytes.fromhex(record["seal"]), start, stop))
    except (ValueError, KeyError, TypeError) as error:
        raise ResultFileError(f"the attribute {SOURCES!r} is not a list of files") from error
    ends = [0, *(file.stop for file in files)]
    if not files or any(s.start != end for s, end in zip(files, ends, strict=False)):
        raise ResultFileError(f"the files in the attribute {SOURCES!r} do not cover all rows")
    for file in files:
        file.require_unchanged()
    return Sources(tuple(files))


def _wrong_source(source: SourceFile, what: str) -> ResultFileError:
    return ResultFileError(
        what, where=str(source.path), remedy="Run gradscope merge again without --virtual."
    )
