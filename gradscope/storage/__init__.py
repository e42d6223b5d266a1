"""Result files: HDF5, format version 2 (docs/format.md). It alone writes HDF5."""

from gradscope.storage.arrays import StoredArray
from gradscope.storage.compression import require as require_compression
from gradscope.storage.contents import StoredChain
from gradscope.storage.export import Exported, export
from gradscope.storage.merge import Joiner, open_joiner, require_free
from gradscope.storage.merge_parts import Part, Parts, check_parts
from gradscope.storage.plan import ChainPlan, FilePlan, Layout, Rows
from gradscope.storage.reader import GradientFile, open_file
from gradscope.storage.sidecar import LONGEST
from gradscope.storage.sizes import file_bytes
from gradscope.storage.trouble import require_place
from gradscope.storage.writer import Writer, open_writer

__all__ = [
    "LONGEST",
    "ChainPlan",
    "Exported",
    "FilePlan",
    "GradientFile",
    "Joiner",
    "Layout",
    "Part",
    "Parts",
    "Rows",
    "StoredArray",
    "StoredChain",
    "Writer",
    "check_parts",
    "export",
    "file_bytes",
    "open_file",
    "open_joiner",
    "open_writer",
    "require_compression",
    "require_free",
    "require_place",
]
