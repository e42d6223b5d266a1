"""What a run reads: the user's code, a model, its weights, a data set."""

from gradscope.sources import data, weights  # noqa: F401  they register their readers
