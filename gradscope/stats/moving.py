"""What two files give together: products of their mean gradients, and how far samples moved."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from gradscope.core.shortage import started
from gradscope.stats import stored
from gradscope.stats.base import Floats, Source
from gradscope.stats.table import Positions, Table
from gradscope.stats.tiles import Tiles

_TILE = 2**21  # numbers of a file in work at a time

Sources = tuple[Source, Source]
Tables = tuple[Table, Table]


def common(tables: Tables) -> tuple[Positions, Positions]:
    """Return where in each table the samples are that both have, in the same order (m,) each."""
    _, first, second = np.intersect1d(tables[0].index, tables[1].index, return_indices=True)
    order = np.argsort(first)
    return first[order], second[order]


def mean_products(
    files: Sources, tables: Tables, names: Sequence[str], rows: bool
) -> dict[str, float] | None:
    """Return ⟨G, G′⟩ of each parameter, or None where a file has neither `mean` nor rows."""
    means = [_means(file, table, names, rows) for file, table in zip(files, tables, strict=True)]
    if means[0] is None or means[1] is None:
        return None
    pairs = zip(names, means[0], means[1], strict=True)
    found = {name: float(np.vdot(a, b).real) for name, a, b in pairs}
    return found if np.isfinite(list(found.values())).all() else None


def distances(
    files: Sources, tables: Tables, places: tuple[Positions, Positions], names: Sequence[str]
) -> Floats | None:
    """Return ‖gᵢ′ − gᵢ‖ (m,) over `names` of the samples at `places`; None without both rows."""
    arrays = [stored.rows_of(file) for file in files]
    if arrays[0] is None or arrays[1] is None or any(map(stored.rows_unusable, files)):
        return None
    rows = [table.rows[p] for table, p in zip(tables, places, strict=True)]
    squares = np.zeros(len(rows[0]))
    for name in names:
        both = arrays[0][name], arrays[1][name]
        step = max(1, _TILE // max(1, prod(both[0].shape[1:])))
        for start in range(0, len(squares), step):
            part = slice(start, start + step)
            a, b = (_wide(array[_run(r[part])]) for array, r in zip(both, rows, strict=True))
            squares[part] += np.square(np.abs(b - a)).reshape(len(a), -1).sum(1)
    return np.sqrt(squares) if np.isfinite(squares).all() else None


def _means(file: Source, table: Table, names: Sequence[str], rows: bool) -> list[Any] | None:
    mean = stored.mean_of(file)
    if mean is not None:
        return [mean[name] for name in names]
    arrays = stored.rows_of(file)
    if arrays is None or not rows or not table.n or stored.rows_unusable(file):
        return None
    found = []
    with started(1, "gradscope-reader") as reader:
        for name in names:
            tiles = Tiles(arrays[name], table, reader)
            total = np.zeros(tiles.width)
            for _, values in tiles.walk(keep=False):
                for _, columns, block in tiles.blocks(values):
                    total[columns] += np.ones(len(block)) @ block
            found.append(total / table.n)
    return found


def _run(rows: Positions) -> Any:
    """Return rows that follow one another as a slice, which reads them as one."""
    if len(rows) and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def _wide(values: Any) -> Any:
    return np.asarray(values, dtype=np.result_type(values.dtype, np.float64))
