"""The samples' own names: one number or text each, no two the same."""

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from gradscope.errors import DatasetError
from gradscope.sources.data.columns import Ragged, Stored, Texts, length_of, runs

_SLICE = 2**14  # samples that are looked at together
_REMEDY = "Every sample needs an id of its own; or leave [dataset] id out."

Ids = Callable[[Tensor], Tensor]


def ids_of(stored: Stored, n: int) -> Ids:
    """Check the ids of n samples, and return a function from positions (m,) to their ids.

    Returns:
        Integers (m,) int64; or texts as UTF-8 (m, w) uint8, zeros behind a text, w for all.

    Raises:
        DatasetError: They are neither, too few or too many, or two are the same.
    """
    if isinstance(stored, Ragged) or not (isinstance(stored, Texts) or _are_integers(stored)):
        raise DatasetError("ids must be one integer or text a sample", remedy=_REMEDY)
    if length_of(stored) != n:
        raise DatasetError(f"there are {length_of(stored):,} ids for {n:,} samples", remedy=_REMEDY)
    if not isinstance(stored, Texts):
        column = stored
        _require_distinct(
            column[0:n].to(torch.int64).numpy(), lambda k: str(int(column[k : k + 1]))
        )
        return lambda index: torch.cat([column[a:b] for a, b in runs(index.tolist())]).long()
    digests, width = np.empty(n, np.uint64), 1
    for start in range(0, n, _SLICE):
        for k, text in enumerate(_bytes(stored, start, min(start + _SLICE, n)), start):
            digests[k] = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
            width = max(width, len(text))
    _require_distinct(digests, lambda k: repr(stored.read(k, k + 1)[0]))

    def texts(index: Tensor) -> Tensor:
        found = [text for a, b in runs(index.tolist()) for text in _bytes(stored, a, b)]
        padded = b"".join(text.ljust(width, b"\0") for text in found)
        return torch.frombuffer(bytearray(padded), dtype=torch.uint8).reshape(len(found), width)

    return texts


def _are_integers(stored: Stored) -> bool:
    if isinstance(stored, Texts | Ragged):
        return False
    kind = stored.dtype
    return len(stored.shape) == 1 and not (kind.is_floating_point or kind.is_complex)


def _bytes(texts: Texts, start: int, stop: int) -> list[bytes]:
    found = [text.encode("utf-8", "surrogatepass") for text in texts.read(start, stop)]
    if any(b"\0" in text for text in found):
        raise DatasetError("an id holds a NUL character", remedy=_REMEDY)
    return found


def _require_distinct(values: np.ndarray, shown: Callable[[int], str]) -> None:
    order = np.argsort(values, kind="stable")
    same = np.flatnonzero(values[order][1:] == values[order][:-1])
    if len(same):
        first, second = (int(k) for k in order[same[0] : same[0] + 2])
        raise DatasetError(
            f"two samples have the same id: samples {first} and {second} are both {shown(first)}",
            remedy=_REMEDY,
        )
