"""The inputs of a run: the user's code, a model, its weights and a data set."""

from gradscope.sources import data, weights  # noqa: F401  both register their readers
