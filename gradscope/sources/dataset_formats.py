"""The data formats: numpy's .npz and safetensors. Nothing in a file is ever executed."""

import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from gradscope.core.locate import first_line
from gradscope.errors import DatasetError
from gradscope.sources.readers import dataset_readers, is_safetensors, is_zip, matching

_WIDER = {"uint16": np.int32, "uint32": np.int64}  # torch hardly computes with these


@dataclass(frozen=True)
class StoredArrays:
    """The arrays of a file, each read whole when it is asked for.

    Attributes:
        names: What there is.
        load: Returns the array (N, ...) of that name.
    """

    names: tuple[str, ...]
    load: Callable[[str], Tensor]


@dataset_readers.register("npz")
@matching(is_zip)
def open_npz(path: Path) -> StoredArrays:
    """Named arrays of numbers, as numpy.savez writes them."""
    with _reading(path), zipfile.ZipFile(path) as archive:
        names = tuple(n.removesuffix(".npy") for n in archive.namelist() if n.endswith(".npy"))
        if not names:
            raise DatasetError(
                "this zip archive holds no numpy arrays",
                where=str(path),
                remedy="Write the data with numpy.savez, one array a name.",
            )

    def load(name: str) -> Tensor:
        with _reading(path, name), np.load(path, allow_pickle=False) as file:
            array = file[name]
            if not isinstance(array, np.ndarray):  # numpy hands out whatever else is in the archive
                raise DatasetError(
                    "this part of the file is no numpy array",
                    where=f"{path}: {name}",
                    remedy="Write the data with numpy.savez, one array a name.",
                )
            return _tensor(array, path, name)

    return StoredArrays(names, load)


@dataset_readers.register("safetensors")
@matching(is_safetensors)
def open_safetensors(path: Path) -> StoredArrays:
    """Named tensors, as safetensors writes them."""
    with _reading(path), safe_open(path, framework="pt") as file:
        names = tuple(file.keys())

    def load(name: str) -> Tensor:
        with _reading(path, name), safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    return StoredArrays(names, load)


def _tensor(array: np.ndarray, path: Path, name: str) -> Tensor:
    if array.dtype.name in _WIDER:
        array = array.astype(_WIDER[array.dtype.name])
    if array.dtype.name == "uint64":
        if array.size and array.max() >= 2**63:
            raise DatasetError(
                f"it holds {array.max()}, which int64 cannot hold",
                where=f"{path}: {name}",
                remedy="Store smaller integers, or floating-point numbers.",
            )
        array = array.astype(np.int64)
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    try:
        return torch.from_numpy(native)
    except TypeError:
        raise DatasetError(
            f"its dtype {array.dtype} cannot be made a tensor",
            where=f"{path}: {name}",
            remedy="Store numbers: floats, integers, booleans or complex numbers.",
        ) from None


@contextmanager
def _reading(path: Path, name: str | None = None) -> Iterator[None]:
    """Turn what the libraries raise about a file into a `DatasetError` of our own words."""
    where = str(path) if name is None else f"{path}: {name}"
    try:
        yield
    except DatasetError:
        raise
    except MemoryError as error:
        raise DatasetError(
            f"it needs more memory than there is: {first_line(error)}",
            where=where,
            remedy="Split the file, or write it again if it should not be that large.",
        ) from error
    except Exception as error:  # a damaged file can make a parser raise anything
        if isinstance(error, ValueError) and "allow_pickle" in str(error):
            raise DatasetError(
                "this array holds Python objects, which could execute code and are never loaded",
                where=where,
                remedy="Store numbers; pad ragged rows to one length.",
            ) from error
        raise DatasetError(
            f"the data are damaged or cut off: {first_line(error)}",
            where=where,
            remedy="Write or download the file again.",
        ) from error
