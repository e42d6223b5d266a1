"""The settings of a run: their definition, sources and validation.

This package loads no data or model, and does not import torch.
"""

from gradscope.config.resolve import MAX_ERRORS, combine_errors, load, resolve
from gradscope.config.spec import (
    CheckpointSpec,
    ComputeSpec,
    DatasetSpec,
    ModelSpec,
    Option,
    RunSpec,
    options_of,
    run_options,
)
from gradscope.config.values import (
    FROM_CHECKPOINT,
    NONE,
    Compression,
    Shard,
    Worker,
    file_of,
    function_of,
    is_folder,
    is_script,
    memory_text,
    nested_factory,
    parse_compression,
    parse_loss,
    parse_memory,
    parse_samples,
    parse_shard,
    split_reference,
    this_worker,
)

__all__ = [
    "FROM_CHECKPOINT",
    "MAX_ERRORS",
    "NONE",
    "CheckpointSpec",
    "Compression",
    "ComputeSpec",
    "DatasetSpec",
    "ModelSpec",
    "Option",
    "RunSpec",
    "Shard",
    "Worker",
    "combine_errors",
    "file_of",
    "function_of",
    "is_folder",
    "is_script",
    "load",
    "memory_text",
    "nested_factory",
    "options_of",
    "parse_compression",
    "parse_loss",
    "parse_memory",
    "parse_samples",
    "parse_shard",
    "resolve",
    "run_options",
    "split_reference",
    "this_worker",
]
