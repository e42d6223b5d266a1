"""How large a result file will be, known before anything is written."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gradscope.storage.build import Shapes, result_array, state_arrays, table_array
from gradscope.storage.columns import arrays_of
from gradscope.storage.factors import AXES
from gradscope.storage.layout import Array
from gradscope.storage.names import escape
from gradscope.storage.plan import FilePlan, Rows, to_json

# What HDF5 1.10's format takes, measured; a test compares it with files.
_FILE = 8_000  # groups, the chains' texts, the certificate
_DATASET, _AXIS, _NAMED, _NUMBER = 285, 75, 120, 95  # with its link; an axis, two texts, a number
_CHUNKED, _INDEXED, _ENTRY = 25, 100, 16  # an index of several chunks, and each entry
_FACTOR, _SCALE = 350, 600  # half of a group of two factors; the name of an axis
_RECORD = 24  # of the seal


@dataclass(frozen=True)
class _Object:
    """A data set as it is to be: its array, the parameter it is of, and what else it has."""

    array: Array
    name: str = ""
    numbers: int = 0  # attributes
    factor: str = ""  # its name in a group of factors

    @property
    def structure(self) -> int:
        """About how many bytes HDF5 and the seal need besides the numbers."""
        array, named = self.array, _NAMED + self.numbers * _NUMBER + 2 * len(escape(self.name))
        size = _DATASET + _AXIS * len(array.shape) + (named if self.name else 0)
        if array.chunks is not None:
            size += _CHUNKED + (_INDEXED + _ENTRY * array.pieces if array.pieces > 1 else 0)
        return size + _RECORD * max(1, array.pieces)


def file_bytes(
    plan: FilePlan, rows: Rows, results: Sequence[Shapes], states: Sequence[Shapes] = ()
) -> tuple[int, int]:
    """Return the bytes of a file: of its numbers, exactly; and of its structure, about.

    Args:
        plan: What will be stored; with its layout and number format.
        rows: Any batch: how blocks are structured decides how they are stored.
        results: {name: (shape, dtype)} of the aggregates of each reduced chain.
        states: {key: (shape, dtype)} of each reducer whose state is kept.
    """
    objects = [*_tables(plan, rows), *_rows(plan, rows)]
    for shapes in results:
        objects += (_Object(result_array(*one), name) for name, one in shapes.items())
    for shapes in states:
        objects += (_Object(array) for array in state_arrays(shapes).values())
    documents: list[Any] = [plan.run, plan.identity, plan.parameters]
    documents += [[[key, "float64", shape] for key, (shape, _) in s.items()] for s in states]
    axes = {pair for o in objects if not o.factor for pair in enumerate(o.array.shape)}
    factored = [o for o in objects if o.factor]
    structure = _FILE + sum(len(to_json(document).encode()) for document in documents)
    structure += sum(o.structure for o in objects) + _SCALE * len(axes)
    structure += sum(_SCALE * len(AXES[o.factor]) + _FACTOR for o in factored)
    return sum(o.array.nbytes for o in objects), structure


def _tables(plan: FilePlan, rows: Rows) -> Iterator[_Object]:
    yield from (_Object(table_array(plan.n, column)) for column in rows.samples.values())
    for name, column in rows.norms.items():
        yield _Object(table_array(plan.n, column), name, numbers=1)


def _rows(plan: FilePlan, rows: Rows) -> Iterator[_Object]:
    for gradients in rows.chains:
        for name, block in (gradients or {}).items():
            kind, arrays = arrays_of(block, plan.n, plan.dtype, plan.layout)
            for part, array in arrays.items():
                yield _Object(array, name) if kind is None else _Object(array, factor=part)
