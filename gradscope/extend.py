"""Extensions: one module to import, and one decorator for each kind of extension.

    from gradscope import extend

    @extend.transform("damped", extend.TransformScope.FACTOR)
    def damped(gamma: float = 0.01) -> extend.Transform: ...

| decorator | above | found as |
|---|---|---|
| `transform(name, scope)` | options to a function of `Gradients` | a stage of a chain |
| `reducer(name)` | options to a `Reducer` | a stage of a chain |
| `loss(name)` | `(outputs, targets, *, options) -> (n,)` | `--loss name` |
| `node_rule(node_type)` | a `Site` to a `Block` | the rule of `hooks` for that operation |
| `dataset_reader(name, matches)` | a path to `StoredArrays` | reads files that `matches` accepts |
| `checkpoint_reader(name, matches)` | a path to containers of tensors | the same |
| `statistic(name)` | `Data` to a `Record` | a section of `gradscope stats` |

A name that is already registered raises an error. A package can name the decorated function in the
entry point group of its kind (`gradscope.transforms`, ...). gradscope loads it when it looks up
names.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradscope.backends.hooks.rules import Rule, Site, node_rules
from gradscope.blocks import (
    Block,
    DenseBlock,
    Gradients,
    MappedBlock,
    OuterBlock,
    ScatterBlock,
    wide,
)
from gradscope.model.problem import Predictive, model_loss
from gradscope.sources.data.columns import NumberColumn, SequenceColumn, StoredArrays, TextColumn
from gradscope.sources.formats import Reader, checkpoint_readers, dataset_readers, matching
from gradscope.stages.losses import Normaliser, loss, per_sample_loss
from gradscope.stages.reducers.base import (
    FirstPass,
    Reducer,
    State,
    added,
    count,
    entries,
    for_each_parameter,
    on_one_device,
    ordered,
    reducers,
    tiles,
)
from gradscope.stages.transforms import random
from gradscope.stages.transforms.base import (
    NeedsMean,
    NeedsProblem,
    ReadsNorms,
    Transform,
    TransformScope,
    Vector,
    blockwise,
    transform,
    widened,
)
from gradscope.stats import Data, Picture, Record, Section, Summary, numbers, statistic

__all__ = [
    "Block",
    "Data",
    "DenseBlock",
    "FirstPass",
    "Gradients",
    "MappedBlock",
    "NeedsMean",
    "NeedsProblem",
    "Normaliser",
    "NumberColumn",
    "OuterBlock",
    "Picture",
    "Predictive",
    "ReadsNorms",
    "Record",
    "Reducer",
    "ScatterBlock",
    "Section",
    "SequenceColumn",
    "Site",
    "State",
    "StoredArrays",
    "Summary",
    "TextColumn",
    "Transform",
    "TransformScope",
    "Vector",
    "added",
    "blockwise",
    "checkpoint_reader",
    "count",
    "dataset_reader",
    "entries",
    "for_each_parameter",
    "loss",
    "model_loss",
    "node_rule",
    "numbers",
    "on_one_device",
    "ordered",
    "per_sample_loss",
    "random",
    "reducer",
    "statistic",
    "tiles",
    "transform",
    "wide",
    "widened",
]

Matches = Callable[[bytes], bool]


def reducer(name: str) -> Callable[[Callable[..., Reducer]], Callable[..., Reducer]]:
    """Register a function from a stage's arguments to a `Reducer`.

    Args:
        name: The stage's name in a chain.
    """
    return reducers.register(name)


def node_rule(node_type: str) -> Callable[[Rule], Rule]:
    """Register how the backend `hooks` handles an operation on samples and parameters.

    Args:
        node_type: The name of its node in the autograd graph, such as "MaximumBackward0". The rule
            takes a `Site` and returns the block of the input at `site.slot`, or None if the rule
            does not apply. Then the operation is evaluated sample by sample.
    """
    return node_rules.register(node_type)


def dataset_reader(
    name: str, matches: Matches
) -> Callable[[Callable[[Path], StoredArrays]], Reader[StoredArrays]]:
    """Register a reader of data files; its exceptions are reported as errors of the file.

    Args:
        name: The format's name.
        matches: Takes the first bytes of a file, at most 4,096; returns whether it has the format.
    """
    return lambda read: dataset_readers.register(name)(matching(matches)(read))


def checkpoint_reader(
    name: str, matches: Matches
) -> Callable[[Callable[[Path], Any]], Reader[Any]]:
    """Register a reader of checkpoints, which returns plain containers of tensors.

    Args:
        name: The format's name.
        matches: Takes the first bytes of a file, at most 4,096; returns whether it has the format.
    """
    return lambda read: checkpoint_readers.register(name)(matching(matches)(read))
