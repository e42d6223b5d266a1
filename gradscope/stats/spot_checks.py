"""A few samples of a result file, drawn by seed: do its numbers of them belong together?"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscope.errors import ResultFileError
from gradscope.stats.records import Floats, wide
from gradscope.stats.source import Source, finite_samples, labels_of, rows_of

Rows = NDArray[np.intp]

_FEW = 4  # samples of a file
_MOST = 64  # parameters whose rows are read: of a file with thousands, that takes its time
# by the run's dtype, relative to a norm, and to that of the sample's whole gradient: where terms
# cancel, norms lose half their digits
_HALF, _SINGLE, _DOUBLE = (0.02, 0.05), (1e-3, 0.02), (1e-6, 1e-5)
_PRECISIONS = {"float16": _HALF, "bfloat16": _HALF, "float64": _DOUBLE, "complex128": _DOUBLE}
_PIECE = 2**20  # entries that are squared at a time


def few(file: Source, seed: int) -> Rows:
    """Return the rows of up to four finite samples: the last, and others drawn by seed."""
    finite = np.flatnonzero(finite_samples(file))
    draw = np.random.default_rng(seed)
    others = finite[:-1]
    drawn = draw.choice(others, min(_FEW - 1, len(others)), replace=False)
    return np.sort(np.append(finite[-1:], drawn).astype(np.intp))


def tolerances(dtype: str) -> tuple[float, float]:
    """Return how far norms may differ: a share of the norm, and of that of the whole gradient."""
    return _PRECISIONS.get(dtype, _SINGLE)


def require_consistent(file: Source, seed: int = 0) -> None:
    """Check a few samples: their parameters' norms make up their norm, and are those of the rows.

    Rows of a chain `identity` are read where there is one: of thousands of parameters, of some.

    Raises:
        ResultFileError: They do not.
    """
    rows = few(file, seed)
    if labels_of(file) == "exact" or not len(rows):  # expectations over labels do not add up so
        return
    index = [int(i) for i in np.asarray(file.samples["index"])[rows]]
    whole, squares = wide(file.samples["norm"])[rows], np.zeros(len(rows))
    stored: Mapping[str, Any] = rows_of(file) or {}
    read = set(np.random.default_rng(seed).permutation(list(stored))[:_MOST].tolist())
    limit, share = tolerances(str(dict(file.run).get("dtype")))

    def require(recorded: Floats, found: Floats, slack: Floats, by: str, source: str) -> None:
        for i, a, b, most in zip(index, recorded, found, slack, strict=True):
            if not abs(a - b) <= most:
                raise ResultFileError(
                    f"the gradient of sample {i} {by}is recorded with the norm {a:.6g}, "
                    f"and {source} {b:.6g}",
                    where=str(file.path),
                    remedy="Its numbers do not belong together: compute it again.",
                )

    for name in file.norms:
        norms = wide(file.norms[name])[rows]
        squares += np.square(norms)
        if name in read and not getattr(stored[name], "overflowed", 0):
            found = np.array([_norm(stored[name][int(row)]) for row in rows])
            slack = limit * norms + share * whole
            require(norms, found, slack, f"by {name!r} ", "its stored row has")
    slack = limit * whole + np.finfo(np.float32).tiny
    require(whole, np.sqrt(squares), slack, "", "those of its parameters make")


def _norm(row: np.ndarray) -> float:
    """Return the L2 norm of a row (*shape), in float64."""
    flat, total = row.reshape(-1), 0.0
    for start in range(0, flat.size, _PIECE):
        piece = np.abs(flat[start : start + _PIECE]).astype(np.float64)
        total += float(piece @ piece)
    return math.sqrt(total)
