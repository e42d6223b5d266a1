"""Floor 3: result files: HDF5, format version 1 (docs/format.md). The only importer of h5py."""

from gradscope.storage.arrays import StoredArray
from gradscope.storage.plan import ChainPlan, FilePlan, Rows
from gradscope.storage.reader import GradientFile, StoredChain, open_file
from gradscope.storage.writer import Writer, open_writer

__all__ = [
    "ChainPlan",
    "FilePlan",
    "GradientFile",
    "Rows",
    "StoredArray",
    "StoredChain",
    "Writer",
    "open_file",
    "open_writer",
]
