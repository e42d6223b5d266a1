"""What is asked of a result file: one chain, some parameters, some samples."""

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from gradscope.core.registry import suggestion
from gradscope.errors import SpecError
from gradscope.storage.arrays import StoredArray
from gradscope.storage.contents import StoredChain
from gradscope.storage.reader import GradientFile

BLOCK_BYTES = 2**25  # of dense numbers in memory at a time


@dataclass(frozen=True)
class Part:
    """Some rows of one array, or all of an aggregate.

    Attributes:
        array: What is stored.
        rows: Positions along its first axis, or None for all of an aggregate.
    """

    array: StoredArray
    rows: np.ndarray | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is selected."""
        return self.array.shape if self.rows is None else (len(self.rows), *self.array.shape[1:])

    @property
    def nbytes(self) -> int:
        """The bytes of the selected numbers, dense."""
        return prod(self.shape) * int(self.array.dtype.itemsize)

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield the numbers (m, ...), some rows at a time; those of a scalar (1,).

        Raises:
            ResultFileError: The data are damaged.
        """
        if not self.shape:
            yield self.array[...].reshape(1)
            return
        rows = np.arange(self.shape[0]) if self.rows is None else self.rows
        row = max(1, prod(self.shape[1:]) * self.array.dtype.itemsize)
        step = max(1, BLOCK_BYTES // row)
        for at in range(0, len(rows), step):
            yield np.ascontiguousarray(self.array[rows[at : at + step]])


def find_chain(file: GradientFile, name: str) -> StoredChain:
    """Return the chain of that number or text.

    Raises:
        SpecError: The file has none.
    """
    plain = "".join(name.split())
    for k, chain in enumerate(file.chains):
        if plain in (str(k), "".join(chain.text.split())):
            return chain
    known = ", ".join(f"{k} ({chain.text})" for k, chain in enumerate(file.chains))
    raise SpecError(
        f"there is no chain {name!r}",
        where=str(file.path),
        remedy=f"Give the number or the text of one of: {known}.",
    )


def find_parts(
    file: GradientFile, chain: StoredChain, globs: Sequence[str], samples: slice | None
) -> list[Part]:
    """Return the parameters of a chain that match a glob (all without any), and their samples.

    Raises:
        SpecError: Nothing matches, or an aggregate is asked for samples.
    """
    if chain.reduced and samples is not None:
        raise SpecError(
            f"the chain {chain.text!r} is an aggregate and has no samples",
            where=str(file.path),
            remedy="Leave out --samples, or choose a chain of rows.",
        )
    rows = None if chain.reduced else find_rows(file, samples)
    return [Part(chain[name], rows) for name in matching(list(chain), globs)]


def matching(names: list[str], globs: Sequence[str]) -> list[str]:
    """Return the names that match a glob, all without any.

    Raises:
        SpecError: A glob matches nothing.
    """
    for glob in globs:
        if not any(fnmatch.fnmatchcase(name, glob) for name in names):
            raise SpecError(
                f"no parameter of the file matches {glob!r}", remedy=suggestion(glob, names)
            )
    return [n for n in names if not globs or any(fnmatch.fnmatchcase(n, g) for g in globs)]


def find_rows(file: GradientFile, samples: slice | None) -> np.ndarray:
    """Return where the samples with these positions in their data set are, (m,) int64.

    Raises:
        SpecError: The file has none of them.
    """
    index = file.samples["index"]
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
