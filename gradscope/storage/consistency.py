"""Whether the parts of a result file fit together, told by names, shapes and types alone.

A file may be whole and sealed and still not be a result: whoever makes one can seal it. What is
found here once need not be thought of wherever something is read.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import h5py
import numpy as np

from gradscope.errors import ResultFileError
from gradscope.storage.integrity import TABLES
from gradscope.storage.names import unescape
from gradscope.storage.safety import Item

Inside = dict[str, list[str]]  # the paths of what is in each group, by its path

_PLAIN = ("identity", "mean")  # chains of gradients as they are
_KINDS = {"index": "iu", "loss": "f", "norm": "f", "finite": "b"}  # of the columns always there


def check(file: h5py.File, items: Mapping[str, Item]) -> None:
    """Check the tables, the chains, and that every row belongs to a sample.

    Args:
        file: Open.
        items: All that is in it, by path.

    Raises:
        ResultFileError: Something is missing, or is of another shape or type.
    """
    inside = _inside(items)
    for name in (*TABLES, "chains"):
        found = items.get(f"/{name}")
        _require(found is not None and found.shape is None, f"there is no group /{name}")
    for name, kinds in _KINDS.items():
        column = items.get(f"/samples/{name}")
        sound = column is not None and column.kind in tuple(kinds) and len(column.shape or ()) == 1
        _require(sound, f"the column /samples/{name} is missing or of another type")
    n = (items["/samples/index"].shape or ())[0]
    for path in (path for table in TABLES for path in inside[f"/{table}"]):
        _require(items[path].shape == (n,), f"{path} is no column of {n} samples")
        _require_attributes(file, items, path, {"sha256": _is_text}, always=False)
    for k in range(len(inside["/chains"])):
        chain = items.get(f"/chains/{k}")
        _require(chain is not None and chain.shape is None, f"there is no chain {k}")
        _check_chain(file, items, inside, f"/chains/{k}", n)
    for owner in inside.get("/states", []):
        _require(items[owner].shape is None, f"{owner} is no group")
        for path in inside[owner]:
            _check_array(file, items, inside, path, None)


def _check_chain(
    file: h5py.File, items: Mapping[str, Item], inside: Inside, path: str, n: int
) -> None:
    """Check a chain: of gradients as they are, that its arrays are the parameters'.

    There is no mean where no sample was finite.
    """
    _require_attributes(file, items, path, {"chain": _is_text, "reduced": _is_flag})
    attributes = file[path].attrs
    front = () if attributes["reduced"] else (n,)
    for array in inside[path]:
        _check_array(file, items, inside, array, None if attributes["reduced"] else n)
    if attributes["chain"] not in _PLAIN:
        return
    document = json.loads(str(file.attrs.get("parameters")))
    sound = isinstance(document, dict) and all(isinstance(s, list) for s in document.values())
    _require(sound, "the attribute 'parameters' does not hold shapes")
    wanted = {name: (*front, *shape) for name, shape in document.items()}
    arrays = {unescape(a.rpartition("/")[2]): _shape(file, items, a, front) for a in inside[path]}
    none = not arrays and not front
    _require(none or wanted == arrays, f"the arrays of {path} are not the parameters'")


def _check_array(
    file: h5py.File, items: Mapping[str, Item], inside: Inside, path: str, n: int | None
) -> None:
    """Check an array, or a group of factors, with one row for each of n samples if given."""
    _require_attributes(file, items, path, {"overflowed": _is_count}, always=False)
    shape = items[path].shape
    if shape is not None:
        _require(n is None or shape[:1] == (n,), f"{path} has not {n} rows")
        return
    tests = {"kind": _is_text, "dtype": _is_text, "shape": _is_shape}
    _require_attributes(file, items, path, tests)
    for factor in inside[path]:
        _require(bool(items[factor].shape), f"{factor} is no factor")


def _shape(
    file: h5py.File, items: Mapping[str, Item], path: str, front: tuple[int, ...]
) -> tuple[int, ...]:
    shape = items[path].shape
    return (*front, *(int(s) for s in file[path].attrs["shape"])) if shape is None else shape


def _inside(items: Mapping[str, Item]) -> Inside:
    """Return the paths of what is in each group."""
    inside: Inside = {path: [] for path, item in items.items() if item.shape is None}
    for path in items:
        if path:
            inside[path.rpartition("/")[0]].append(path)
    for group, paths in inside.items():
        names = {unescape(path.rpartition("/")[2]) for path in paths}
        _require(len(names) == len(paths), f"{group} names a parameter twice")
    return inside


def _require_attributes(
    file: h5py.File,
    items: Mapping[str, Item],
    path: str,
    tests: Mapping[str, Callable[[Any], bool]],
    *,
    always: bool = True,
) -> None:
    """Check attributes by name; those that need not be there `always`, where they are."""
    for name, test in tests.items():
        there = name in items[path].attributes
        sound = test(file[path].attrs[name]) if there else not always
        _require(sound, f"the attribute {name!r} of {path} is missing or of another type")


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
