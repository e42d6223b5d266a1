"""The data formats. Nothing in a file is ever executed."""

from gradscope.sources.data import hdf5, numpy, safetensors, tables, text  # noqa: F401 (register)
from gradscope.sources.data.columns import StoredArrays

__all__ = ["StoredArrays"]
