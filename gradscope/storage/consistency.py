"""Whether the parts of a result file fit together, told by names, shapes and types alone.

A file may be whole and sealed and still not be a result: whoever makes one can seal it. What is
found here once need not be thought of wherever something is read.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import h5py
import numpy as np

from gradscope.errors import ResultFileError
from gradscope.storage.integrity import TABLES
from gradscope.storage.names import unescape

_PLAIN = ("identity", "mean")  # chains of gradients as they are
_KINDS = {"index": "iu", "loss": "f", "norm": "f", "finite": "b"}  # of the columns always there


def check(file: h5py.File) -> None:
    """Check the tables, the chains, and that every row belongs to a sample.

    Raises:
        ResultFileError: Something is missing, or is of another shape or type.
    """
    for name in (*TABLES, "chains"):
        _require(isinstance(file.get(name), h5py.Group), f"there is no group /{name}")
    for name, kinds in _KINDS.items():
        column = file["samples"].get(name)
        sound = isinstance(column, h5py.Dataset) and column.dtype.kind in kinds and column.ndim == 1
        _require(sound, f"the column /samples/{name} is missing or of another type")
    n = len(file["samples/index"])
    for table in TABLES:
        for item in _items(file[table]):
            sound = isinstance(item, h5py.Dataset) and item.shape == (n,)
            _require(sound, f"{item.name} is no column of {n} samples")
            _require_attributes(item, {"sha256": _is_text})
    for k in range(len(file["chains"])):
        chain = file["chains"].get(str(k))
        _require(isinstance(chain, h5py.Group), f"there is no chain {k}")
        _require_attributes(chain, {"chain": _is_text, "reduced": _is_flag})
        for item in _items(chain):
            _check_array(item, None if chain.attrs["reduced"] else n)
        if chain.attrs["chain"] in _PLAIN:
            _check_parameters(file, chain, () if chain.attrs["reduced"] else (n,))
    for owner in _items(file["states"]) if "states" in file else ():
        _require(isinstance(owner, h5py.Group), f"{owner.name} is no group")
        for item in _items(owner):
            _check_array(item, None)


def _check_array(item: h5py.HLObject, n: int | None) -> None:
    """Check an array, or a group of factors, with one row for each of n samples if given."""
    if "overflowed" in item.attrs:
        _require_attributes(item, {"overflowed": _is_count})
    if isinstance(item, h5py.Dataset):
        _require(n is None or item.shape[:1] == (n,), f"{item.name} has not {n} rows")
        return
    _require_attributes(item, {"kind": _is_text, "dtype": _is_text, "shape": _is_shape})
    for factor in item.values():
        sound = isinstance(factor, h5py.Dataset) and factor.ndim > 0
        _require(sound, f"{factor.name} is no factor")


def _check_parameters(file: h5py.File, chain: h5py.Group, front: tuple[int, ...]) -> None:
    """Check that the arrays of a chain of gradients are the parameters', after `front` axes.

    There is no mean where no sample was finite.
    """
    document = json.loads(str(file.attrs.get("parameters")))
    sound = isinstance(document, dict) and all(isinstance(s, list) for s in document.values())
    _require(sound, "the attribute 'parameters' does not hold shapes")
    wanted = {name: (*front, *shape) for name, shape in document.items()}
    found = {unescape(name): _shape(item, front) for name, item in chain.items()}
    none = not found and not front
    _require(none or wanted == found, f"the arrays of {chain.name} are not the parameters'")


def _shape(item: h5py.HLObject, front: tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(item, h5py.Dataset):
        return tuple(item.shape)
    return (*front, *(int(size) for size in item.attrs["shape"]))


def _items(group: h5py.Group) -> Sequence[h5py.HLObject]:
    names = [unescape(name) for name in group]
    _require(len(set(names)) == len(names), f"{group.name} names a parameter twice")
    return list(group.values())


def _require_attributes(item: h5py.HLObject, tests: dict[str, Callable[[Any], bool]]) -> None:
    for name, test in tests.items():
        sound = name in item.attrs and test(item.attrs[name])
        _require(sound, f"the attribute {name!r} of {item.name} is missing or of another type")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)


def _is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and bool(value >= 0)


def _is_shape(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu"


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ResultFileError(
            f"{what}: this is no result file, or a damaged one",
            remedy="Give the file that gradscope compute -o wrote.",
        )
