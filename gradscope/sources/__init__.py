"""What a run reads: the user's code, a model, its weights, a data set."""

from gradscope.sources.code import code_digests, load_function
from gradscope.sources.data import Dataset, open_dataset, words
from gradscope.sources.data.columns import (
    NumberColumn,
    SequenceColumn,
    StoredArrays,
    TextColumn,
)
from gradscope.sources.formats import checkpoint_readers, dataset_readers, matching, sha256
from gradscope.sources.models import LoadedModel, build, load_model
from gradscope.sources.weights import CheckpointReport, load_into

__all__ = [
    "CheckpointReport",
    "Dataset",
    "LoadedModel",
    "NumberColumn",
    "SequenceColumn",
    "StoredArrays",
    "TextColumn",
    "build",
    "checkpoint_readers",
    "code_digests",
    "dataset_readers",
    "load_function",
    "load_into",
    "load_model",
    "matching",
    "open_dataset",
    "sha256",
    "words",
]
