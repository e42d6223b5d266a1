"""Arrays as .npy and .safetensors, a few rows at a time.

Both are a header and then the numbers, little-endian, in C order; numpy and safetensors themselves
take whole arrays only.

Source: `numpy.lib.format`; https://github.com/huggingface/safetensors#format.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from gradscope.core.texts import printable
from gradscope.errors import SpecError
from gradscope.storage.selection import Part

_DTYPES = {"float16": "F16", "float32": "F32", "float64": "F64", "complex64": "C64"}
_DTYPES |= {"int64": "I64", "int32": "I32", "uint8": "U8", "bool": "BOOL"}
_ALIGNED = 8
_METADATA = "__metadata__"


def write_npy(out: BinaryIO, part: Part) -> None:
    """Write one array as numpy's own format, version 1.0."""
    header = {
        "descr": np.lib.format.dtype_to_descr(part.array.dtype),
        "fortran_order": False,
        "shape": part.shape,
    }
    np.lib.format.write_array_header_1_0(out, header)
    _write_numbers(out, part)


def write_safetensors(out: BinaryIO, parts: Sequence[Part], facts: Mapping[str, str]) -> None:
    """Write arrays by their parameters' names.

    Raises:
        SpecError: The format has no such numbers.
    """
    out.write(_header(parts, facts))
    for part in parts:
        _write_numbers(out, part)


def safetensors_bytes(parts: Sequence[Part], facts: Mapping[str, str]) -> int:
    """Return the size of what `write_safetensors` writes.

    Raises:
        SpecError: The format has no such numbers.
    """
    return len(_header(parts, facts)) + sum(part.nbytes for part in parts)


def _header(parts: Sequence[Part], facts: Mapping[str, str]) -> bytes:
    table: dict[str, Any] = {_METADATA: dict(facts)}
    at = 0
    for part in parts:
        name, dtype = part.array.name, part.array.dtype.name
        odd = name in table or printable(name) != name
        if dtype not in _DTYPES or odd:
            what = f"has no array {name!r}" if odd else f"holds no {dtype}"
            raise SpecError(f"safetensors itself {what}", remedy="Export .npy files to a folder.")
        place = [at, at + part.nbytes]
        table[name] = {"dtype": _DTYPES[dtype], "shape": part.shape, "data_offsets": place}
        at += part.nbytes
    text = json.dumps(table, ensure_ascii=True).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text


def _write_numbers(out: BinaryIO, part: Part) -> None:
    for block in part.blocks():
        out.write(np.ascontiguousarray(block, block.dtype.newbyteorder("<")).data)
