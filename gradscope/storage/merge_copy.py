"""Rows of one result file as pieces of another.

A chunk that lies in the new file as it did in the old one is copied with its checksum, which is
verified on the way; all other rows are cut into the new file's chunks.
"""

import os
from collections.abc import Iterator
from dataclasses import replace

import h5py
import numpy as np
import torch

from gradscope.blocks.base import TILE_BYTES
from gradscope.errors import ResultFileError
from gradscope.storage.arrays import reading
from gradscope.storage.checksum import CHECKSUM_BYTES, fletcher32
from gradscope.storage.factors import KINDS, stored_rows
from gradscope.storage.formats import read_rows
from gradscope.storage.places import place_of
from gradscope.storage.stream import Piece, Stream


def copied(dataset: h5py.Dataset, source: int, stream: Stream) -> Iterator[list[Piece]]:
    """Yield pieces for the rows of `dataset`, which follow those that `stream` has taken.

    Args:
        dataset: In chunks.
        source: A descriptor of its file.
        stream: Of the same row shape and format.

    Raises:
        ResultFileError: The data cannot be read, or a checksum does not match.
    """
    where = f"{dataset.file.filename}: {dataset.name}"
    with reading(where):
        place, lost = place_of(dataset), int(dataset.attrs.get("overflowed", 0))
    if place.packed:
        yield from _unpacked(dataset, stream, where)
    position = place.size if place.packed else 0
    while position < place.size:
        length = place.room(position)
        with reading(where):
            chunk = _read(source, place.piece + CHECKSUM_BYTES, place.offset(position))
        if fletcher32(chunk[: place.piece], place.piece) != chunk[place.piece :].tobytes():
            raise ResultFileError(
                "its data are damaged (a checksum does not match)",
                where=where,
                remedy="Compute this file again with --overwrite, and merge then.",
            )
        yield _taken(stream, chunk, length, place.piece)
        position += length
    stream.mark = replace(stream.mark, overflowed=stream.mark.overflowed + lost)


def _unpacked(dataset: h5py.Dataset, stream: Stream, where: str) -> Iterator[list[Piece]]:
    """Yield pieces for compressed rows, some chunks at a time."""
    step = stream.together * max(1, TILE_BYTES // max(1, stream.place.piece))
    for start in range(0, len(dataset), step):
        with reading(where):
            rows = read_rows(dataset, start, min(start + step, len(dataset)))
        yield stream.add(torch.from_numpy(rows).to(stream.dtype))


def multiplied(group: h5py.Group, stream: Stream) -> Iterator[list[Piece]]:
    """Yield pieces for the rows of a factored group, which are dense in the new file.

    Raises:
        ResultFileError: The factors cannot be read.
    """
    n = len(group[KINDS[str(group.attrs["kind"])][0]])
    row = max(1, stream.place.size // stream.shape[0])
    step = max(1, TILE_BYTES // row)
    for start in range(0, n, step):
        with reading(f"{group.file.filename}: {group.name}"):
            rows = stored_rows(group, slice(start, min(start + step, n)))
        yield stream.add(torch.from_numpy(rows).to(stream.dtype))


def _taken(stream: Stream, chunk: np.ndarray, length: int, piece: int) -> list[Piece]:
    """Let the stream take the data of a chunk: as it is, if it is a chunk of the stream's too."""
    place, mark = stream.place, stream.mark
    if piece != place.piece or len(mark.tail) or place.room(mark.position) != length:
        return stream.add(torch.from_numpy(chunk[:length]))
    stream.mark = replace(mark, position=mark.position + length)
    return [Piece(place.offset(mark.position), chunk, len(chunk), checked=False)]


def _read(source: int, size: int, offset: int) -> np.ndarray:
    """Return bytes of a file, fewer at its end."""
    found, done = np.empty(size, np.uint8), 0
    while done < size and (count := os.preadv(source, [found[done:].data], offset + done)):
        done += count
    return found[:done]
