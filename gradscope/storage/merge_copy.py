"""Rows of one result file as pieces of another.

A chunk that lies in the new file as it did in the old one is copied with its checksum, which is
compared on the way; all other rows are cut into the new file's chunks.
"""

from collections.abc import Iterator
from dataclasses import replace

import h5py
import numpy as np
import torch

from gradscope.blocks.base import TILE_BYTES
from gradscope.storage.arrays import reading
from gradscope.storage.checks import Checks
from gradscope.storage.factors import KINDS, stored_rows
from gradscope.storage.stream import Piece, Stream


def copied(dataset: h5py.Dataset, checks: Checks, stream: Stream) -> Iterator[list[Piece]]:
    """Yield pieces for the rows of `dataset`, which follow those that `stream` has taken.

    Args:
        dataset: In chunks.
        checks: Of its file.
        stream: Of the same row shape and format.

    Raises:
        ResultFileError: The data cannot be read, or a checksum does not match.
    """
    where = f"{dataset.file.filename}: {dataset.name}"
    with reading(where):
        place, lost = checks.known(dataset).place, int(dataset.attrs.get("overflowed", 0))
    if place.packed:
        yield from _unpacked(dataset, checks, stream, where)
    else:
        for number in range(len(place.offsets)):
            with reading(where):
                chunk = checks.stored(dataset, number)
            yield _taken(stream, chunk, place.room(place.start(number)), place.piece)
    stream.mark = replace(stream.mark, overflowed=stream.mark.overflowed + lost)


def _unpacked(
    dataset: h5py.Dataset, checks: Checks, stream: Stream, where: str
) -> Iterator[list[Piece]]:
    """Yield pieces for compressed rows, some chunks at a time."""
    step = stream.together * max(1, TILE_BYTES // max(1, stream.place.piece))
    for start in range(0, len(dataset), step):
        with reading(where):
            rows = checks.rows(dataset, start, min(start + step, len(dataset)))
        yield stream.add(torch.from_numpy(rows).to(stream.dtype))


def multiplied(group: h5py.Group, checks: Checks, stream: Stream) -> Iterator[list[Piece]]:
    """Yield pieces for the rows of a factored group, which are dense in the new file.

    Raises:
        ResultFileError: The factors cannot be read.
    """
    n = len(group[KINDS[str(group.attrs["kind"])][0]])
    row = max(1, stream.place.size // stream.shape[0])
    step = max(1, TILE_BYTES // row)
    for start in range(0, n, step):
        with reading(f"{group.file.filename}: {group.name}"):
            rows = stored_rows(group, slice(start, min(start + step, n)), checks)
        yield stream.add(torch.from_numpy(rows).to(stream.dtype))


def _taken(stream: Stream, chunk: np.ndarray, length: int, piece: int) -> list[Piece]:
    """Let the stream take the data of a chunk: as it is, if it is a chunk of the stream's too."""
    place, mark = stream.place, stream.mark
    if piece != place.piece or len(mark.tail) or place.room(mark.position) != length:
        return stream.add(torch.from_numpy(chunk[:length]))
    stream.mark = replace(mark, position=mark.position + length)
    number = place.number(mark.position)
    return [Piece(int(place.offsets[number]), chunk, len(chunk), False, stream.sums, number)]
