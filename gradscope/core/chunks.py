"""Check of the chunk index of an HDF5 data set, before HDF5 uses the index."""

from typing import Any


def index_is_sound(dataset: Any, size: int) -> bool:
    """Whether all chunks lie inside a file of `size` bytes, and no chunk is listed twice.

    HDF5 itself can crash when it reads with an unsound index.

    Args:
        dataset: An h5py data set with chunks.
        size: The size of its file.
    """
    places = set()

    def wrong(chunk: Any) -> bool | None:
        inside = 0 < chunk.byte_offset < chunk.byte_offset + chunk.size <= size
        if not inside or chunk.chunk_offset in places:
            return True
        places.add(chunk.chunk_offset)
        return None  # h5py stops at any other value

    return not dataset.id.chunk_iter(wrong)
