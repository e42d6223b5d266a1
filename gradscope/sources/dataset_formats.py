"""The data formats. Nothing in a file is ever executed."""

from gradscope.sources import (  # noqa: F401 (they register themselves)
    data_hdf5,
    data_numpy,
    data_safetensors,
    data_tables,
    data_text,
)
from gradscope.sources.data_columns import StoredArrays

__all__ = ["StoredArrays"]
