"""Arrow arrays as what the rest reads: numbers, sequences of numbers, texts, images."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradscope.errors import DatasetError
from gradscope.sources.data.columns import Ragged, Sliced, Stored, Texts, from_numpy, torch_dtype
from gradscope.sources.data.images import decoded
from gradscope.sources.extras import need

Read = Callable[[int, int], list[Any]]
_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}  # numpy's


@dataclass(frozen=True)
class Sizes:
    """What is known of a column of lists.

    Attributes:
        lengths: (N,) int64.
        row: The shape of one entry of a list.
    """

    lengths: np.ndarray
    row: tuple[int, ...]


def stored_column(kind: Any, n: int, read: Read, sizes: Callable[[], Sizes]) -> Stored:
    """Return a column of a table.

    Args:
        kind: Its Arrow type.
        n: The number of rows.
        read: Returns rows from a start up to a stop, as Arrow arrays.
        sizes: Returns those of a column of lists.

    Raises:
        DatasetError: It holds something else.
    """
    types = need("pyarrow", "Arrow").types
    value = kind.value_type if types.is_dictionary(kind) else kind
    if types.is_string(value) or types.is_large_string(value):
        return Texts(n, lambda a, b: [_text(t, k) for k, t in enumerate(_python(read(a, b)), a)])
    if types.is_struct(kind) and {f.name for f in kind} >= {"bytes", "path"}:  # Hugging Face's
        return _images(n, read)
    inner = _leaf(types, kind)
    if not (types.is_boolean(inner) or types.is_integer(inner) or types.is_floating(inner)):
        raise DatasetError(
            f"it holds {kind}, not numbers", remedy="Store numbers, texts, or lists of numbers."
        )
    dtype = np.dtype(_NAMES.get(str(inner), str(inner)))
    if not is_list(kind):
        return Sliced((n,), torch_dtype(dtype), lambda a, b: _together(map(_values, read(a, b))))
    found = sizes()
    return Ragged(
        torch.from_numpy(found.lengths),
        found.row,
        torch_dtype(dtype),
        lambda a, b: [t for part in read(a, b) for t in _sequences(part)],
    )


def sizes_of(batches: Iterator[Any], names: Sequence[str]) -> dict[str, Sizes | DatasetError]:
    """Return the sizes of columns of lists, or what is wrong with a column.

    Args:
        batches: Yields the whole columns, part by part, in the order of `names`.
        names: Theirs.
    """
    lengths: dict[str, list[np.ndarray]] = {name: [np.empty(0, np.int64)] for name in names}
    rows: dict[str, tuple[int, ...]] = {}
    wrong: dict[str, DatasetError] = {}
    for batch in batches:
        for k, name in enumerate(names):
            part = batch.column(k)
            try:
                lengths[name].append(_lengths(part))
                if len(part) and name not in rows:
                    rows[name] = _values(_flat(part)).shape[1:]
            except DatasetError as error:
                wrong.setdefault(name, error)
    return {
        name: wrong.get(name) or Sizes(np.concatenate(lengths[name]), rows.get(name, ()))
        for name in names
    }


def is_list(kind: Any) -> bool:
    """Whether an Arrow type is one of lists."""
    kind = getattr(kind, "storage_type", kind)
    types = need("pyarrow", "Arrow").types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _images(n: int, read: Read) -> Stored:
    first = decoded(_python(read(0, 1))[0], 0) if n else torch.empty(0)

    def images(start: int, stop: int) -> Tensor:
        values = _python(read(start, stop))
        return torch.stack([decoded(v, k, first.shape) for k, v in enumerate(values, start)])

    return Sliced((n, *first.shape), torch.uint8, images)


def _together(parts: Any) -> Tensor:
    return from_numpy(np.concatenate(list(parts)))


def _python(parts: list[Any]) -> list[Any]:
    return list(chain.from_iterable(part.to_pylist() for part in parts))


def _text(value: Any, k: int) -> str:
    if not isinstance(value, str):
        raise _missing(f"sample {k} has no text")
    return value


def _sequences(part: Any) -> list[Tensor]:
    """Return one tensor (length, *row) a row."""
    ends = np.cumsum(_lengths(part))
    return [from_numpy(values) for values in np.split(_values(_flat(part)), ends[:-1])]


def _values(part: Any) -> np.ndarray:
    """Return the numbers of an array (n, ...), whose lists are all of one length."""
    part = _storage(part)
    if not is_list(part.type):
        if part.null_count and not _is_float(part):
            raise _missing(f"{part.null_count} integers are missing (null)")
        found: np.ndarray = part.to_numpy(zero_copy_only=False)
        return found
    lengths = set(_lengths(part).tolist())
    if len(lengths) > 1:
        raise DatasetError(
            f"the lists inside a sample have several lengths, such as {sorted(lengths)[:3]}",
            remedy="Only the first axis of a sample may differ from sample to sample.",
        )
    inner = _values(_flat(part))
    return inner.reshape(len(part), lengths.pop() if lengths else 0, *inner.shape[1:])


def _lengths(part: Any) -> np.ndarray:
    part = _storage(part)
    if part.null_count:
        raise _missing(f"{part.null_count} samples have no list (null)")
    found = need("pyarrow.compute", "Arrow").list_value_length(part)
    return np.asarray(found.to_numpy(zero_copy_only=False), np.int64)


def _flat(part: Any) -> Any:
    return _storage(part).flatten()


def _storage(part: Any) -> Any:
    """Return an extension array (a fixed-shape tensor, say) as the lists it is stored as."""
    return part.storage if hasattr(part, "storage") else part


def _is_float(part: Any) -> bool:
    return bool(need("pyarrow", "Arrow").types.is_floating(part.type))


def _leaf(types: Any, kind: Any) -> Any:
    while is_list(kind):
        kind = getattr(kind, "storage_type", kind).value_type
    return kind


def _missing(what: str) -> DatasetError:
    return DatasetError(what, remedy="Fill the gaps, or leave these samples out.")
