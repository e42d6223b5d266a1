"""Result files: HDF5, format version 1 (docs/format.md). It alone writes HDF5."""

from gradscope.storage.export import ExportedFile, export
from gradscope.storage.format.files import (
    deferring_signals,
    locked,
    put_in_place,
    require_distinct,
    require_free,
    require_place,
    write_page,
    writing,
    written,
)
from gradscope.storage.format.layout import require_compression
from gradscope.storage.format.numbers import dtype_named
from gradscope.storage.merge import (
    Joiner,
    PartialFile,
    RunFiles,
    check_files,
    open_joiner,
    require_output,
)
from gradscope.storage.plan import ChainPlan, FilePlan, FinishedBatch, Layout, States, differences
from gradscope.storage.read.file import (
    GradientFile,
    StoredArray,
    StoredChain,
    find_chain,
    open_file,
    stored_gradients,
)
from gradscope.storage.write.create import file_bytes, forms_of
from gradscope.storage.write.journal import LONGEST
from gradscope.storage.write.region import PART_BYTES, Scratch
from gradscope.storage.write.writer import KEEP_BYTES, Writer, is_complete, open_writer

__all__ = [
    "KEEP_BYTES",
    "LONGEST",
    "PART_BYTES",
    "ChainPlan",
    "ExportedFile",
    "FilePlan",
    "FinishedBatch",
    "GradientFile",
    "Joiner",
    "Layout",
    "PartialFile",
    "RunFiles",
    "Scratch",
    "States",
    "StoredArray",
    "StoredChain",
    "Writer",
    "check_files",
    "deferring_signals",
    "differences",
    "dtype_named",
    "export",
    "file_bytes",
    "find_chain",
    "forms_of",
    "is_complete",
    "locked",
    "open_file",
    "open_joiner",
    "open_writer",
    "put_in_place",
    "require_compression",
    "require_distinct",
    "require_free",
    "require_output",
    "require_place",
    "stored_gradients",
    "write_page",
    "writing",
    "written",
]
