"""What a run reads: the user's code, a model, its weights, a data set."""

from gradscope.sources.code import code_digests, load_function
from gradscope.sources.data.datasets import Dataset, open_dataset
from gradscope.sources.data.readers import checkpoint_readers, dataset_readers
from gradscope.sources.digests import sha256
from gradscope.sources.loading import LoadedModel, load_model
from gradscope.sources.models import build
from gradscope.sources.weights.checkpoints import CheckpointReport, load_into

__all__ = [
    "CheckpointReport",
    "Dataset",
    "LoadedModel",
    "build",
    "checkpoint_readers",
    "code_digests",
    "dataset_readers",
    "load_function",
    "load_into",
    "load_model",
    "open_dataset",
    "sha256",
]
