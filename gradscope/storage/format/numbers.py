"""Number formats and parameter names in torch, numpy and HDF5.

numpy has no bfloat16. In the file, bfloat16 is an HDF5 float of 2 bytes, which other readers can
convert. gradscope reads its bytes directly and returns float32.

In HDF5 names, `/` separates groups, NUL ends a name, and `.` is the group itself. Control
characters break terminals. These characters and `%` are percent-encoded, so each name has one
spelling and can be decoded.
"""

import unicodedata
from urllib.parse import unquote

import h5py
import numpy as np
import torch
from torch import Tensor

from gradscope.errors import ResultFileError

_FIELDS = (15, 7, 8, 0, 7)  # offsets and sizes in bits: sign, exponent (2), mantissa (2)
_BIAS = 127


def stored_dtype(dtype: torch.dtype, wanted: torch.dtype) -> torch.dtype:
    """Return `wanted`, made complex for complex gradients and real for real ones."""
    if dtype.is_complex == wanted.is_complex:
        return wanted
    if dtype.is_complex:
        return torch.complex128 if wanted == torch.float64 else torch.complex64
    return torch.float64 if wanted == torch.complex128 else torch.float32


def dtype_named(name: str) -> torch.dtype:
    """Return the torch dtype with this name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ResultFileError(
            f"the number format {name!r} is unknown",
            remedy="The file is damaged; compute it again.",
        )
    return dtype


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """Return the numpy dtype of a tensor dtype; float32 for bfloat16, which numpy lacks."""
    if dtype == torch.bfloat16:
        return np.dtype(np.float32)
    return torch.empty(0, dtype=dtype).numpy().dtype


def as_numpy(values: Tensor) -> np.ndarray:
    """Return `values` as a contiguous array, without a copy if no conversion is needed."""
    plain = _plain(values)
    if plain.dtype == torch.bfloat16:
        plain = plain.float()
    array: np.ndarray = plain.numpy()
    return array


def as_bytes(values: Tensor) -> np.ndarray:
    """Return the bytes of `values`, (m,) uint8; copied only if not contiguous or not on the CPU."""
    plain = _plain(values).reshape(-1)
    plain = torch.view_as_real(plain).reshape(-1) if plain.is_complex() else plain
    memory: np.ndarray = plain.view(torch.uint8).numpy()
    return memory


def h5_type(dtype: torch.dtype) -> h5py.h5t.TypeID:
    """Return the HDF5 type for a torch dtype."""
    if dtype != torch.bfloat16:
        return h5py.h5t.py_create(numpy_dtype(dtype), logical=True)
    made = h5py.h5t.py_create(np.dtype(np.float16)).copy()
    made.set_fields(*_FIELDS)
    made.set_ebias(_BIAS)
    return made


def format_of(dataset: h5py.Dataset) -> torch.dtype:
    """Return the torch dtype of a data set; uint8 for texts."""
    if dataset.dtype.kind == "S":
        return torch.uint8
    if _is_bfloat16(dataset):
        return torch.bfloat16
    return torch.from_numpy(np.empty(0, dataset.dtype)).dtype


def read_rows(dataset: h5py.Dataset, start: int, stop: int) -> np.ndarray:
    """Return rows start:stop; bfloat16 becomes float32 without HDF5's slow conversion."""
    if not _is_bfloat16(dataset):
        values: np.ndarray = dataset[start:stop]
        return values
    halves = np.empty((stop - start, *dataset.shape[1:]), np.int16)
    if halves.size:
        inside = dataset.id.get_space()
        inside.select_hyperslab((start, *[0] * (halves.ndim - 1)), halves.shape)
        plain = h5py.h5s.create_simple(halves.shape)
        dataset.id.read(plain, inside, halves, dataset.id.get_type())
    return as_numpy(torch.from_numpy(halves).view(torch.bfloat16))


def escape(name: str) -> str:
    """Return the HDF5 name of a parameter."""
    if name in ("", "."):
        return "%2E" if name else "%"
    special = (c for c in set(name) if c in "/%" or unicodedata.category(c) in ("Cc", "Cs"))
    codes = {c: "".join(f"%{b:02X}" for b in c.encode("utf-8", "surrogatepass")) for c in special}
    return "".join(codes.get(c, c) for c in name)


def unescape(name: str) -> str:
    """Return the parameter's name; the inverse of `escape`."""
    return "" if name == "%" else unquote(name, errors="surrogatepass")


def _is_bfloat16(dataset: h5py.Dataset) -> bool:
    kind = dataset.id.get_type()
    if not isinstance(kind, h5py.h5t.TypeFloatID) or kind.get_size() != 2:
        return False
    return bool(kind.get_fields() == _FIELDS and kind.get_ebias() == _BIAS)


def _plain(values: Tensor) -> Tensor:
    return values.detach().cpu().resolve_conj().resolve_neg().contiguous()
