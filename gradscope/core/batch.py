"""Batches of samples, or of positions in samples: inputs, targets, and an index.

Inputs are a tensor, a tuple (positional arguments of the model) or a dict (keyword arguments). The
first axis of every tensor among inputs and targets is the sample axis n. All samples share a tensor
without axes: it is a constant. An input may also be `Whole`: every sample has all of it.

In a batch of `Tokens`, each row has a sample i, a position t and a loss L_it. The loss
returns (n, t), so the positions of a sample stay separate. ∂L_it/∂θ is defined for any model: it
includes everything that position t depends on.
"""

from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from operator import is_
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from gradscope.core.precision import doubled, on_host
from gradscope.core.texts import count
from gradscope.errors import DatasetError, ModelError, SpecError

_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device))


Rebuild = Callable[[list[Any]], Any]  # makes a new container with other values


class Whole:
    """An input that every sample has whole, such as the adjacency matrix of a graph.

    It has no sample axis and is never divided. Where all inputs of a model are whole, the model's
    answer must have one row a sample: node i of a graph is sample i.

    Args:
        value: A tensor, which may be sparse, or a tuple or dict of tensors.

    Raises:
        SpecError: There is no tensor in it.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        if not tensors(value):
            kind = type(value).__name__
            raise SpecError(
                f"Whole takes tensors, and {kind} holds none",
                where="inputs",
                remedy="Give the tensors that the model computes with, such as (Whole(data.x), "
                "Whole(data.edge_index)). A module of yours can make another object of them.",
            )

    def __repr__(self) -> str:
        return f"Whole({', '.join(str(tuple(t.shape)) for t in tensors(self.value))})"


def map_tensors(fn: Callable[[Tensor], Any], tree: Any, *, whole: bool = False) -> Any:
    """Apply `fn` to every tensor in nested containers; leave other values unchanged.

    With `whole`, also apply it to the tensors inside `Whole`.

    Containers keep their types, and no constructor of a user's class runs. The containers are
    tuples, lists, dicts and their subclasses (named tuples, `PackedSequence`, transformers'
    outputs), other mappings, dataclasses, and types that are registered with torch's pytree.
    """
    if isinstance(tree, Tensor):
        return fn(tree)
    kind = type(tree)
    if kind is dict:
        return {key: map_tensors(fn, value, whole=whole) for key, value in tree.items()}
    if kind is tuple or kind is list:
        return kind([map_tensors(fn, value, whole=whole) for value in tree])
    if kind is Whole:
        return Whole(map_tensors(fn, tree.value)) if whole else tree
    opened = None if kind in _PLAIN else _opened(tree)
    if opened is None:
        return tree
    values, rebuild = opened
    found = [map_tensors(fn, value, whole=whole) for value in values]
    return tree if all(map(is_, values, found)) else rebuild(found)


def tensors(tree: Any) -> list[Tensor]:
    """Return every tensor in nested containers, in order; see `map_tensors`."""
    if isinstance(tree, Tensor):
        return [tree]
    return [t for value in _values(tree) for t in tensors(value)]


def _values(tree: Any) -> Iterable[Any]:
    """Return the values in a container; nothing if `tree` is not a container."""
    kind = type(tree)
    if kind is dict:
        return tree.values()  # type: ignore[no-any-return]
    if kind is tuple or kind is list:
        return tree  # type: ignore[no-any-return]
    opened = None if kind in _PLAIN else _opened(tree)
    return () if opened is None else opened[0]


def _opened(tree: Any) -> tuple[list[Any], Rebuild] | None:
    """Return the values in a container and a function that rebuilds it, or None."""
    kind = type(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_make"):  # a constructor may check its arguments
        return [*tree], partial(_with_attributes, tree, tree._make)
    if kind in pytree.SUPPORTED_NODES and not isinstance(tree, dict):
        node = pytree.SUPPORTED_NODES[kind]
        values, context = node.flatten_fn(tree)
        return [*values], lambda own: node.unflatten_fn(own, context)
    if isinstance(tree, tuple):
        make = kind if hasattr(tree, "n_sequence_fields") else partial(tuple.__new__, kind)
        return [*tree], partial(_with_attributes, tree, make)
    if isinstance(tree, list):
        return [*tree], partial(_copied, tree, [*range(len(tree))])
    if isinstance(tree, Mapping):
        return [*tree.values()], partial(_copied, tree, [*tree])
    if is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in fields(tree) if hasattr(tree, field.name)]
        return [getattr(tree, name) for name in names], partial(_filled, tree, names)
    return None


def _with_attributes(tree: Any, make: Rebuild, values: list[Any]) -> Any:
    """Return a container of a user's class with other values and the same attributes."""
    made = make(values)
    if hasattr(tree, "__dict__"):
        made.__dict__.update(tree.__dict__)
    return made


def _copied(tree: Any, keys: list[Any], values: list[Any]) -> Any:
    """Return a copy of a list or mapping with other values; a plain container if immutable."""
    kind: Any = type(tree)
    new = partial(_with_attributes, tree, lambda _: kind.__new__(kind))
    for duplicate in (copy, new):  # copying calls the constructor in some classes
        with suppress(TypeError):
            made = duplicate(tree)
            for key, value in zip(keys, values, strict=True):
                made[key] = value
            return made
    return values if isinstance(tree, list) else dict(zip(keys, values, strict=True))


def _filled(tree: Any, names: list[str], values: list[Any]) -> Any:
    """Return a copy of a dataclass with other values in its fields, also if it is frozen."""
    made = copy(tree)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


def strided(t: Tensor) -> Tensor:
    """Return a tensor that autograd accepts: tensors of inference mode are cloned.

    Raises:
        DatasetError: The tensor is sparse or nested.
    """
    if t.is_nested or t.layout != torch.strided:
        kind = "nested" if t.is_nested else str(t.layout).removeprefix("torch.")
        raise DatasetError(
            f"inputs or targets contain a {kind} tensor, which has no sample axis",
            remedy="Give dense tensors (n, ...): pad the sequences and mask the loss.",
        )
    if not t.is_inference():
        return t
    with torch.inference_mode(False):
        return t.clone()


def _require_padded(tree: Any) -> None:
    """Raise for packed sequences, in which one row has positions of many samples, and for numpy."""
    if isinstance(tree, np.ndarray):
        raise DatasetError(
            f"inputs or targets contain a numpy array {tree.shape}, not a tensor",
            remedy="Convert it: torch.from_numpy(x).",
        )
    if isinstance(tree, PackedSequence):
        steps, entries = tree.batch_sizes, tuple(tree.data.shape)
        raise DatasetError(
            f"inputs or targets contain a PackedSequence of {int(steps[0])} sequences: its data "
            f"{entries} has no sample axis",
            remedy="Give padded sequences (n, t, ...) and their lengths (n,) as inputs, and call "
            "pack_padded_sequence in forward.",
        )
    for value in () if isinstance(tree, Tensor) else _values(tree):
        _require_padded(value)


@dataclass(frozen=True)
class WholeInputs:
    """Inputs that are all `Whole`: row i of the model's answer belongs to sample i."""

    inputs: Any
    rows: Tensor  # (n,) int64, the samples of a batch
    count: int | None  # the number of rows in the answer, or None for any number

    def pick(self, answer: Any) -> Any:
        """Return the model's answer with the batch's rows (n, ...) alone."""
        fits = [t.dim() > 0 and self.count in (None, len(t)) for t in tensors(answer)]
        try:
            if any(fits):
                each = iter(fits)
                return map_tensors(lambda t: t[self.rows] if next(each) else t, answer)
        except IndexError:
            pass
        wanted = "one row" if self.count is None else f"{count(self.count, 'row')}, one"
        found = ", ".join(str(tuple(t.shape)) for t in tensors(answer)) or type(answer).__name__
        raise ModelError(
            f"the model returned {found}; with all inputs whole, its answer must have {wanted} for "
            "each sample",
            remedy="Give a target for each row of the answer, and select the samples that count: "
            'select = "train_mask" in [dataset], or index=positions in Python, with their targets. '
            "A leading axis of 1 is removed in forward.",
        )


def arguments(inputs: Any) -> Any:
    """Return inputs as the model takes them, with copies of what is `Whole`."""
    if isinstance(inputs, WholeInputs):
        return arguments(inputs.inputs)
    if isinstance(inputs, Whole):  # a forward pass may write into its arguments
        return map_tensors(torch.clone, inputs.value)
    if isinstance(inputs, dict):
        return {key: arguments(value) for key, value in inputs.items()}
    if type(inputs) in (tuple, list):
        return type(inputs)(map(arguments, inputs))
    return inputs


def wholes(tree: Any) -> list[Whole]:
    """Return what is `Whole` among inputs, in order."""
    if isinstance(tree, WholeInputs):
        return wholes(tree.inputs)
    if isinstance(tree, Whole):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree
    return [w for v in values for w in wholes(v)] if type(tree) in (dict, tuple, list) else []


def call(model: nn.Module | Callable[..., Any], inputs: Any) -> Any:
    """Call the model with `inputs`: one argument, a tuple of arguments, or a dict of keywords."""
    if isinstance(inputs, WholeInputs):
        return inputs.pick(call(model, inputs.inputs))
    inputs = arguments(inputs)
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def output(answer: Any) -> Any:
    """Return the part of a model's output that named losses use: a tensor.

    It is the output itself, its `logits`, or its only tensor, as in the outputs of transformers,
    diffusers and torchvision. Any other output is returned unchanged.
    """
    if isinstance(answer, Tensor):
        return answer
    of_mapping = isinstance(answer, Mapping)
    logits = answer.get("logits") if of_mapping else getattr(answer, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    found = tensors(answer)
    return found[0] if len(found) == 1 else answer


def _whole_inputs(inputs: Any, targets: Any, index: Tensor | None) -> WholeInputs:
    """Return inputs that are all whole, with the rows of the model's answer that are samples."""
    if index is not None:
        return WholeInputs(inputs, index, None)
    sizes = [len(t) for t in tensors(targets) if t.dim()]
    if not sizes:
        raise DatasetError(
            "all inputs are whole and there are no targets, so the number of samples is unknown",
            remedy="Give their positions in the model's answer: index=torch.arange(n).",
        )
    return WholeInputs(inputs, torch.arange(sizes[0]), sizes[0])


@dataclass(frozen=True)
class Batch:
    """Samples with inputs, targets, and positions in the data set."""

    inputs: Any  # a tensor, tuple or dict of tensors (n, ...)
    targets: Any  # the same, or None
    index: Tensor  # (n,) int64, the position of each sample in its data set

    @classmethod
    def of(
        cls,
        inputs: Any,
        targets: Any = None,
        index: Tensor | None = None,
        *,
        empty: bool = False,
    ) -> "Batch":
        """Check that all tensors have the same n and wrap them; n = 0 is allowed if `empty`."""
        if isinstance(inputs, UserDict):  # a tokenizer returns it
            inputs = dict(inputs)
        _require_padded((inputs, targets))
        inputs, targets = map_tensors(strided, (inputs, targets))
        if wholes(inputs) and not any(t.dim() for t in tensors(inputs)):
            inputs = _whole_inputs(inputs, targets, index)
        sizes = [t.shape[0] for t in tensors((inputs, targets)) if t.dim()]
        if not sizes or (set(sizes) == {0} and not empty):
            given = f"inputs: {type(inputs).__name__}, targets: {type(targets).__name__}"
            raise DatasetError(
                f"the batch holds no sample ({given})", remedy="Give tensors (n, ...), n ≥ 1."
            )
        if len(set(sizes)) > 1:
            shapes = [tuple(t.shape) for t in tensors((inputs, targets))]
            raise DatasetError(
                f"inputs and targets have different numbers of samples: {sizes}",
                remedy=f"The first axis must be the sample axis; the shapes are {shapes}. If all "
                "samples share an input, such as the adjacency matrix of a graph, use "
                "gradscope.Whole(x).",
            )
        index = torch.arange(sizes[0]) if index is None else index.cpu()
        if tuple(index.shape) != (sizes[0],) or index.dtype != torch.int64:
            raise DatasetError(
                f"the index has shape {tuple(index.shape)} and dtype {index.dtype}, but must have "
                f"shape ({sizes[0]},) and dtype torch.int64",
                remedy="Give the position of each sample in the data set.",
            )
        return cls(inputs, targets, index)

    def __len__(self) -> int:
        return int(self.index.shape[0])

    @property
    def work(self) -> int:
        """The number of samples or tokens to compute; a group is one row with several."""
        return len(self)

    @property
    def computed(self) -> "Batch":
        """The samples or tokens whose gradients a backend computes."""
        return self

    @property
    def sample_batch(self) -> "Batch":
        """The samples; of tokens, those they are positions of."""
        return self

    def head(self, most: int) -> "Batch":
        """Return the first rows, with at most `most` samples or tokens."""
        return self if len(self) <= most else self.select(slice(0, most))

    @property
    def description(self) -> str:
        """The samples of the batch in words."""
        if not len(self):
            return "no sample"
        first, last = int(self.index.min()), int(self.index.max())
        return f"sample {first}" if first == last else f"samples {first} to {last}"

    def select(self, rows: slice | Tensor) -> "Batch":
        """Return the selected samples; `rows` is a slice, or a tensor of positions or a mask."""

        def chosen(t: Tensor) -> Tensor:
            if not t.dim():
                return t
            return t[rows.to(t.device) if isinstance(rows, Tensor) else rows]

        return replace(self.map(chosen), index=self.index[rows])

    def one(self, position: int) -> "Batch":
        """Return the sample at `position` as a batch of one; the model sees the axis n = 1."""
        return self.select(slice(position, position + 1))

    def resized(self, n: int) -> "Batch":
        """Return a batch of `n` samples, taken from this batch in turn."""
        return self.select(torch.arange(n) % len(self))

    def map(self, fn: Callable[[Tensor], Tensor], *, whole: bool = False) -> "Batch":
        """Return the batch with `fn` applied to every tensor among inputs and targets.

        With `whole` also to inputs that are `Whole`.
        """
        inputs, targets = map_tensors(fn, (self.inputs, self.targets), whole=whole)
        return Batch(inputs, targets, self.index)

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> "Batch":
        """Move to `device`; cast floating-point tensors (not integers, not complex) to `dtype`."""
        return self.map(
            lambda t: t.to(device=device, dtype=dtype if t.is_floating_point() else None),
            whole=True,
        )

    def in_double_precision(self) -> "Batch":
        """Return the batch in float64 and complex128; on the CPU if its device has no float64."""

        def wide(t: Tensor) -> Tensor:
            t = on_host(t)
            return doubled(t) if t.is_floating_point() or t.is_complex() else t

        return self.map(wide, whole=True)

    def detached(self) -> "Batch":
        """Return the batch with every tensor detached from its graph."""
        return self.map(Tensor.detach, whole=True)


@dataclass(frozen=True)
class Tokens(Batch):
    """Positions of samples: m rows from n samples. Each sample is stored once.

    Inputs and targets belong to the samples (n, ...). The index (m,) identifies rows.
    """

    sample_index: Tensor  # (n,) int64, the position of each sample in the data set
    sample: Tensor  # (m,) int64, the sample of each row, as a position among the n samples
    position: Tensor  # (m,) int64, the position of each row in its sample
    positions: int  # t

    @classmethod
    def among(cls, batch: Batch, counted: Tensor) -> "Tokens":
        """Return the rows that a mask (n, t) selects, sample after sample."""
        sample, position = counted.cpu().nonzero().unbind(1)
        t = counted.shape[1]
        used, own = torch.unique(sample, return_inverse=True)
        samples = batch if len(used) == len(batch) else batch.select(used)
        index = batch.index[sample] * t + position
        return cls(samples.inputs, samples.targets, index, samples.index, own, position, t)

    @property
    def sample_batch(self) -> Batch:
        """The samples (n, ...)."""
        return Batch(self.inputs, self.targets, self.sample_index)

    @property
    def description(self) -> str:
        """The tokens of the batch in words."""
        what = f"position {int(self.position)}" if len(self) == 1 else f"{len(self)} tokens"
        return f"{what} of {self.sample_batch.description}"

    @property
    def samples(self) -> Tensor:
        """The position in the data set of each row's sample (m,)."""
        return self.sample_index[self.sample]

    @property
    def row_names(self) -> list[str]:
        """SAMPLE:POSITION of each row; SAMPLE is the position in the data set."""
        pairs = zip(self.samples.tolist(), self.position.tolist(), strict=True)
        return [f"{sample}:{position}" for sample, position in pairs]

    def as_samples(self) -> Batch:
        """Return m samples, one for each row, with targets (targets, position (m,)).

        `Problem.of_single_tokens` takes these batches.
        """
        many = self.sample_batch.select(self.sample)
        return Batch(many.inputs, (many.targets, self.position), many.index)

    def select(self, rows: slice | Tensor) -> "Tokens":
        """Return the selected rows, with their samples."""
        used, sample = torch.unique(self.sample[rows], return_inverse=True)
        held = self.sample_batch
        held = held if len(used) == len(held) else held.select(used)
        own = {"index": self.index[rows], "sample": sample, "position": self.position[rows]}
        return replace(
            self, inputs=held.inputs, targets=held.targets, sample_index=held.index, **own
        )

    def map(self, fn: Callable[[Tensor], Tensor], *, whole: bool = False) -> "Tokens":
        """Return the batch with `fn` applied to every tensor among inputs and targets."""
        mapped = self.sample_batch.map(fn, whole=whole)
        return replace(self, inputs=mapped.inputs, targets=mapped.targets)


def is_empty(batch: Batch) -> bool:
    """Whether there is no sample; `Tokens` always have samples, even if no position counts."""
    return not len(batch) and not isinstance(batch, Tokens)


def samples_of(batch: Batch) -> Tensor:
    """Return the sample of each row (m,), as a position among the batch's samples."""
    return batch.sample if isinstance(batch, Tokens) else torch.arange(len(batch))


def with_samples(batch: Batch, samples: Batch) -> Batch:
    """Return a batch with its samples replaced by `samples`, of the same number and shapes."""
    if not isinstance(batch, Tokens):
        return samples
    inputs, targets = samples.inputs, samples.targets
    return replace(batch, inputs=inputs, targets=targets, sample_index=samples.index)


def require_positions(rows: int) -> None:
    """Raise if no position of the batch counts towards the loss."""
    if not rows:
        raise SpecError(
            "no position of these samples counts towards the loss",
            where="rows token",
            remedy="Check the mask or ignore_index of the loss: it decides which positions count.",
        )


def token_losses(found: Any, n: int, name: str) -> tuple[Tensor, Tensor | None]:
    """Check the result of a loss: losses (n, t), or a pair of losses and a mask (n, t) bool.

    Raises:
        SpecError: The result has another shape or dtype.
    """
    values, counted = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    fits = isinstance(values, Tensor) and values.dim() == 2 and values.shape[0] == n
    if not fits or not values.is_floating_point() or not values.shape[1]:
        shape = type(values).__name__
        if isinstance(values, Tensor):
            shape = f"{tuple(values.shape)} of {str(values.dtype).removeprefix('torch.')}"
        raise SpecError(
            f"the loss {name!r} must return floating-point values of shape ({n}, t), one per "
            f"position; it returned {shape}",
            where='rows="token"',
            remedy='If a sample has one loss, use rows="sample". For tokens, use a loss of tokens, '
            "such as token_cross_entropy. Your own loss must use reduction='none', and flatten all "
            "axes but the first into one. If some positions do not count, it must return (losses, "
            "counted), both (n, t).",
        )
    mask = isinstance(counted, Tensor) and counted.dtype == torch.bool
    if counted is not None and not (mask and counted.shape == values.shape):
        raise SpecError(
            f"the second result of the loss {name!r} must be booleans of shape "
            f"{tuple(values.shape)}: which positions count",
            where="loss",
        )
    return values, counted
