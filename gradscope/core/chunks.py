"""The index of an HDF5 data set's chunks, looked at before HDF5 reads by it."""

from typing import Any


def index_is_sound(dataset: Any, size: int) -> bool:
    """Whether chunks lie inside a file of `size` bytes, and none is there twice.

    HDF5 itself crashes when it reads by some indices that are not.

    Args:
        dataset: An h5py data set with chunks.
        size: Of its file.
    """
    places = set()

    def wrong(chunk: Any) -> bool | None:
        inside = 0 < chunk.byte_offset < chunk.byte_offset + chunk.size <= size
        if not inside or chunk.chunk_offset in places:
            return True
        places.add(chunk.chunk_offset)
        return None  # None goes on

    return not dataset.id.chunk_iter(wrong)
