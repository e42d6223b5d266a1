"""Reading result files."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property, partial
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import h5py
import numpy as np

from gradscope.errors import ResultFileError, SpecError
from gradscope.storage.arrays import reading
from gradscope.storage.checks import Checks
from gradscope.storage.contents import (
    Norms,
    StoredChain,
    StoredStates,
    number_attributes,
    read_column,
)
from gradscope.storage.joined import JoinedArray, Sources, sources_of
from gradscope.storage.names import unescape
from gradscope.storage.opening import Opened, opened
from gradscope.storage.safety import SOURCES

_BATCH_BYTES = 2**28  # of dense rows, unless the caller says how many
_MOST_ROWS = 256


class GradientFile:
    """An open result file.

    Attributes:
        path: Where it is.
        hdf5: The open HDF5 file, for what has no name here.
        attributes: The root's short attributes: versions and hashes.
        run: The resolved run.
        certificate: The proof of the numbers.
        identity: What must be equal for a run to be resumed.
        parameters: {name: shape}, in the model's order.
        n: The number of samples.
        samples: The sample table: index, loss, norm, finite; target and id where stored; each (N,).
        norms: {parameter: (N,)}, L2 norms of the raw gradients.
        chains: The chains, in the order given.
        states: {owner: {key: tensor}}, what the aggregates were made from, where kept.
        sources: The files that the rows of a virtual file are in, else None.
    """

    def __init__(self, path: Path, file: h5py.File, checks: Checks) -> None:
        self.path = path
        self.hdf5, self._checks = file, checks
        texts = {key: value for key, value in file.attrs.items() if isinstance(value, str)}
        documents = ("run", "certificate", "identity", "parameters")
        self.run, self.certificate, self.identity, shapes = (
            document(texts, key) for key in documents
        )
        self.attributes = {k: v for k, v in texts.items() if k not in documents}
        self.parameters: dict[str, tuple[int, ...]] = {k: tuple(s) for k, s in shapes.items()}
        order = list(self.parameters)
        self.samples = {
            name: read_column(column, checks) for name, column in file["samples"].items()
        }
        self.n = len(self.samples["index"])
        self.norms: Mapping[str, np.ndarray] = Norms(file["norms"], checks, order)
        self.sources: Sources | None = None
        if SOURCES in texts:
            self.sources = sources_of(self.attributes.pop(SOURCES), path.parent)
        self.chains = tuple(self._chain(k, order) for k in range(len(file["chains"])))
        kept = file.get("states", {})
        self.states: Mapping[str, Mapping[str, np.ndarray]] = {
            owner: StoredStates(group, checks) for owner, group in kept.items()
        }

    @cached_property
    def norm_attributes(self) -> dict[str, dict[str, float]]:
        """{parameter: {attribute: number}}."""
        with reading(str(self.path)):
            norms = self.hdf5["norms"]
            return {unescape(name): number_attributes(norms[name]) for name in norms}

    def iterate(
        self, chain: int = 0, batch_size: int | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yield {name: rows (n, *shape)}, batch by batch.

        Args:
            chain: Its number.
            batch_size: Rows at a time; as many as a moderate amount of memory holds if None.

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
        row = sum(prod(array.shape[1:]) * array.dtype.itemsize for array in stored.values())
        step = batch_size or min(_MOST_ROWS, max(1, _BATCH_BYTES // max(1, row)))
        for start in range(0, self.n, step):
            rows = slice(start, start + step)
            yield {name: array[rows] for name, array in stored.items()}

    def _chain(self, k: int, order: list[str]) -> StoredChain:
        group = self.hdf5["chains"][str(k)]
        if self.sources is None or group.attrs["reduced"]:
            return StoredChain(group, self._checks, order)
        make = partial(JoinedArray, chain=k, sources=self.sources)
        return StoredChain(group, self._checks, order, make)

    def close(self) -> None:
        """Close the file; what was read stays valid."""
        if self.sources is not None:
            self.sources.close()
        self.hdf5.close()

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
    found = opened(Path(path))
    try:
        with reading(str(path)):
            return _contents(Path(path), found)
    except BaseException:
        found.file.close()
        raise


def _contents(path: Path, found: Opened) -> GradientFile:
    try:
        return GradientFile(path, found.file, found.checks)
    except (AttributeError, TypeError, ValueError) as error:
        raise ResultFileError(
            f"groups or attributes are not those of a result file ({error})",
            remedy="Give the file that gradscope compute -o wrote.",
        ) from error


def document(texts: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a JSON document among attributes.

    Raises:
        ResultFileError: It is none.
    """
    with suppress(ValueError):
        found = json.loads(texts.get(key, "{}"))
        if isinstance(found, dict):
            return found
    raise ResultFileError(f"the attribute {key!r} is not a JSON document")
