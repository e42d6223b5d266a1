"""A file that has just been written, held against itself before it takes its place.

The checksums tell that the bytes are those that were handed over. Whether these were the right
ones, its parts tell of each other: which samples it is about, how many of them the aggregates have
seen, and that stored rows have the norms that are stored of them.
"""

from collections.abc import Mapping, Sequence
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from gradscope.errors import OutputError
from gradscope.reducers import State
from gradscope.storage import GradientFile

_ROWS = 8  # that are read, of a chain of gradients as they are
_BYTES = 2**26  # of them, but two rows in any case
# relative to a norm, and to that of the whole gradient: norms by Gram matrices lose half the digits
_TOLERANCES = {torch.float64: (1e-6, 1e-5), torch.float32: (1e-3, 0.02)}
_HALF = (0.02, 0.05)
_REMEDY = "This is a mistake in gradscope: please report it."


def require_samples(file: GradientFile, index: Sequence[int]) -> None:
    """Compare the samples of a file with those that it is to be about.

    Raises:
        OutputError: They are others.
    """
    if not np.array_equal(file.samples["index"], np.asarray(index)):
        raise OutputError(
            "its rows are of other samples than were asked for",
            where="/samples/index",
            remedy=_REMEDY,
        )


def require_counts(file: GradientFile, states: Mapping[str, State], kept: bool) -> None:
    """Compare how many samples reducers have seen with how many there are.

    Args:
        file: The file.
        states: By owner; those that count samples do so under "n".
        kept: Whether samples count that are not finite.

    Raises:
        OutputError: There are more or less.
    """
    right = file.n if kept else int(np.count_nonzero(file.samples["finite"]))
    for owner, state in states.items():
        n = state.get("n")
        if isinstance(n, Tensor) and n.numel() == 1 and float(n) != right:
            raise OutputError(
                f"its aggregates are of {float(n):,.0f} samples, of {right:,} that there are",
                where=owner,
                remedy=_REMEDY,
            )


def require_rows(file: GradientFile, dtype: torch.dtype) -> None:
    """Compare a few stored rows with the norms that are stored of them.

    Args:
        file: Of gradients against one label a sample.
        dtype: What they were computed in.

    Raises:
        OutputError: These are the norms of others.
    """
    chain = next((c for c in file.chains if c.text == "identity" and not c.reduced), None)
    if chain is None or any(array.overflowed for array in chain.values()):
        return
    row = max(1, sum(array.nbytes for array in chain.values()) // file.n)
    count = max(2, min(_ROWS, _BYTES // row))
    tolerance, share = _TOLERANCES.get(dtype.to_real(), _HALF)
    tiny = torch.finfo(torch.promote_types(dtype.to_real(), torch.float32)).tiny
    for k in np.unique(np.linspace(0, file.n - 1, count).astype(int)).tolist():
        size, squared = float(file.samples["norm"][k]), 0.0
        for name, array in chain.items():
            values = array[k]
            found, told = _norm(values), float(file.norms[name][k])
            limit = max(tolerance * max(found, told), share * size, (tiny * values.size) ** 0.5)
            _require(abs(found - told) <= limit, found, told, f"row {k:,} of {name!r}")
            squared += found**2
        whole = squared**0.5
        limit = max(tolerance * max(whole, size), (tiny * 2**20) ** 0.5)
        _require(abs(whole - size) <= limit, whole, size, f"row {k:,}")


def _norm(row: np.ndarray) -> float:
    return float(np.linalg.norm(row.astype(np.result_type(row.dtype, np.float64)).ravel()))


def _require(holds: bool, found: float, told: float, where: str) -> None:
    """Refuse norms that differ; those that are not finite are flagged elsewhere.

    Raises:
        OutputError: They do.
    """
    if not holds and isfinite(found) and isfinite(told):
        raise OutputError(
            f"a stored row has the norm {found:.6g}, and the norm {told:.6g} is stored of it",
            where=where,
            remedy=_REMEDY,
        )
