"""A batch of samples, or of positions in them: inputs, targets, and which samples they are.

Inputs are a tensor, a tuple (positional arguments of the model) or a dict (keyword arguments).
Every tensor among inputs and targets with at least one axis has the sample axis n first; a tensor
without axes is a constant that all samples share.

In a batch of `Tokens` a row is one position t of a sample i, with its loss L_it. A loss that
returns (n, t) keeps the positions of a sample apart. ∂L_it/∂θ is defined for any model: it goes
through all that position t depends on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradscope.core.precision import doubled, on_host
from gradscope.errors import DatasetError, SpecError


def map_tensors(fn: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply `fn` to every tensor in nested tuples, lists and dicts; leave the rest as it is."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(fn, value) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):  # torch.compile of 2.8 traces no A | B
        items = [map_tensors(fn, value) for value in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return tree


def strided(t: Tensor) -> Tensor:
    """Return a tensor that autograd takes, as it does not take those of inference mode.

    Raises:
        DatasetError: It is sparse or nested.
    """
    if t.is_nested or t.layout != torch.strided:
        kind = "nested" if t.is_nested else str(t.layout).removeprefix("torch.")
        raise DatasetError(
            f"a {kind} tensor among inputs and targets has no sample axis to go by",
            remedy="Give dense tensors (n, ...); pad sequences, and mask the loss.",
        )
    with torch.inference_mode(False):
        return t.clone() if t.is_inference() else t


def tensors(tree: Any) -> list[Tensor]:
    """Return every tensor in nested tuples, lists and dicts, in order."""
    found: list[Tensor] = []
    map_tensors(found.append, tree)
    return found


def call(model: nn.Module | Callable[..., Any], inputs: Any) -> Any:
    """Call the model as the form of `inputs` says: one argument, positional, or by keyword."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def output(answer: Any) -> Any:
    """Return what losses by name take of a model's answer: a tensor, its logits, its only tensor.

    As transformers, diffusers and torchvision answer; anything else is returned as it is.
    """
    if isinstance(answer, Tensor):
        return answer
    of_mapping = isinstance(answer, Mapping)
    logits = answer.get("logits") if of_mapping else getattr(answer, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    held = tensors(answer)
    return held[0] if len(held) == 1 else answer


@dataclass(frozen=True)
class Batch:
    """Some samples."""

    inputs: Any  # a tensor, tuple or dict of tensors (n, ...)
    targets: Any  # likewise, or None
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
        """Check that all tensors agree on n and wrap them; n = 0 is allowed if `empty`."""
        inputs, targets = map_tensors(strided, (inputs, targets))
        sizes = [t.shape[0] for t in tensors((inputs, targets)) if t.dim()]
        if not sizes or (set(sizes) == {0} and not empty):
            raise DatasetError("the batch holds no sample", remedy="Give tensors (n, ...), n ≥ 1.")
        if len(set(sizes)) > 1:
            shapes = [tuple(t.shape) for t in tensors((inputs, targets))]
            raise DatasetError(
                f"inputs and targets have different numbers of samples: {sizes}",
                remedy=f"Their first axis must be the sample axis; the shapes are {shapes}.",
            )
        index = torch.arange(sizes[0]) if index is None else index.cpu()
        if tuple(index.shape) != (sizes[0],) or index.dtype != torch.int64:
            raise DatasetError(
                f"the index is {tuple(index.shape)} of {index.dtype}, and there are {sizes[0]} "
                "samples",
                remedy="Give one number of dtype int64 for each sample: its position in the data.",
            )
        return cls(inputs, targets, index)

    def __len__(self) -> int:
        return int(self.index.shape[0])

    @property
    def told(self) -> str:
        """Which samples these are, in words."""
        if not len(self):
            return "no sample"
        first, last = int(self.index.min()), int(self.index.max())
        return f"sample {first}" if first == last else f"samples {first} to {last}"

    def select(self, rows: slice | Tensor) -> "Batch":
        """Return the samples `rows` (a slice, or a tensor of positions or a mask) of this batch."""

        def chosen(t: Tensor) -> Tensor:
            if not t.dim():
                return t
            return t[rows.to(t.device) if isinstance(rows, Tensor) else rows]

        return replace(self.map(chosen), index=self.index[rows])

    def one(self, position: int) -> "Batch":
        """Return the sample at `position` as a batch of one; the model sees the axis n = 1."""
        return self.select(slice(position, position + 1))

    def resized(self, n: int) -> "Batch":
        """Return a batch of `n` samples made of this one's, repeated from the first if need be."""
        return self.select(torch.arange(n) % len(self))

    def map(self, fn: Callable[[Tensor], Tensor]) -> "Batch":
        """Return the batch with `fn` applied to every tensor among inputs and targets."""
        inputs, targets = map_tensors(fn, (self.inputs, self.targets))
        return Batch(inputs, targets, self.index)

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> "Batch":
        """Move to `device`; cast floating-point tensors (not integers, not complex) to `dtype`."""
        return self.map(
            lambda t: t.to(device=device, dtype=dtype if t.is_floating_point() else None)
        )

    def in_double_precision(self) -> "Batch":
        """Return the batch in float64 and complex128; on the CPU where its device has neither."""

        def wide(t: Tensor) -> Tensor:
            t = on_host(t)
            return doubled(t) if t.is_floating_point() or t.is_complex() else t

        return self.map(wide)

    def detached(self) -> "Batch":
        """Return the batch with every tensor cut from any graph it came with."""
        return self.map(Tensor.detach)


@dataclass(frozen=True)
class Tokens(Batch):
    """Some positions of some samples: m rows of n samples, of which each is held once.

    Inputs and targets are those of the samples (n, ...); the index (m,) tells rows apart.
    """

    held: Tensor  # (n,) int64, where in the data set each sample is
    sample: Tensor  # (m,) int64, which of the samples at hand each row is of
    position: Tensor  # (m,) int64, and which of its positions
    positions: int  # t

    @classmethod
    def among(cls, batch: Batch, counted: Tensor) -> "Tokens":
        """Return the rows of a batch that count, by a mask (n, t), sample after sample."""
        sample, position = counted.cpu().nonzero().unbind(1)
        t = counted.shape[1]
        used, own = torch.unique(sample, return_inverse=True)
        held = batch if len(used) == len(batch) else batch.select(used)
        index = batch.index[sample] * t + position
        return cls(held.inputs, held.targets, index, held.index, own, position, t)

    @property
    def whole(self) -> Batch:
        """The samples (n, ...)."""
        return Batch(self.inputs, self.targets, self.held)

    @property
    def told(self) -> str:
        """Which tokens these are, in words."""
        what = f"position {int(self.position)}" if len(self) == 1 else f"{len(self)} tokens"
        return f"{what} of {self.whole.told}"

    @property
    def samples(self) -> Tensor:
        """Where in the data set the sample of each row is (m,)."""
        return self.held[self.sample]

    @property
    def named(self) -> list[str]:
        """SAMPLE:POSITION of each row, the sample by where it is in the data set."""
        pairs = zip(self.samples.tolist(), self.position.tolist(), strict=True)
        return [f"{sample}:{position}" for sample, position in pairs]

    def apart(self) -> Batch:
        """Return m samples, one a row, for `Problem.apart`: targets (targets, position (m,))."""
        many = self.whole.select(self.sample)
        return Batch(many.inputs, (many.targets, self.position), many.index)

    def select(self, rows: slice | Tensor) -> "Tokens":
        """Return the rows `rows` of this batch, with the samples that they are of."""
        used, sample = torch.unique(self.sample[rows], return_inverse=True)
        held = self.whole
        held = held if len(used) == len(held) else held.select(used)
        own = {"index": self.index[rows], "sample": sample, "position": self.position[rows]}
        return replace(self, inputs=held.inputs, targets=held.targets, held=held.index, **own)

    def map(self, fn: Callable[[Tensor], Tensor]) -> "Tokens":
        """Return the batch with `fn` applied to every tensor among inputs and targets."""
        mapped = self.whole.map(fn)
        return replace(self, inputs=mapped.inputs, targets=mapped.targets)


def whole_of(batch: Batch) -> Batch:
    """Return the samples that a batch is of: itself, unless its rows are tokens."""
    return batch.whole if isinstance(batch, Tokens) else batch


def is_empty(batch: Batch) -> bool:
    """Whether there is no sample; tokens are always of some samples, even if none counts."""
    return not len(batch) and not isinstance(batch, Tokens)


def samples_of(batch: Batch) -> Tensor:
    """Return which of the samples at hand each row is of (m,): itself, unless it is a token's."""
    return batch.sample if isinstance(batch, Tokens) else torch.arange(len(batch))


def with_samples(batch: Batch, samples: Batch) -> Batch:
    """Return a batch with other samples in the place of its own: as many, of the same shapes."""
    if not isinstance(batch, Tokens):
        return samples
    inputs, targets = samples.inputs, samples.targets
    return replace(batch, inputs=inputs, targets=targets, held=samples.index)


def require_counted(rows: int) -> None:
    """Refuse samples of which so many positions count, if that is none."""
    if not rows:
        raise SpecError(
            "no position of these samples counts",
            where="rows token",
            remedy="The loss says which positions count: see its mask or ignore_index.",
        )


def token_losses(found: Any, n: int, name: str) -> tuple[Tensor, Tensor | None]:
    """Check what a loss has returned: losses (n, t), or these and which of them count (n, t) bool.

    Raises:
        SpecError: It has another shape.
    """
    values, counted = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    fits = isinstance(values, Tensor) and values.dim() == 2 and values.shape[0] == n
    if not fits or not values.is_floating_point() or not values.shape[1]:
        shape = type(values).__name__
        if isinstance(values, Tensor):
            shape = f"{tuple(values.shape)} of {str(values.dtype).removeprefix('torch.')}"
        raise SpecError(
            f"with rows token the loss {name!r} must return one number a position, shape ({n}, t) "
            f"of floating point; it returned {shape}",
            where="loss",
            remedy="Use reduction='none', and flatten all axes but the first into one; or rows "
            "sample. Of positions that do not count, return (losses, counted), both (n, t).",
        )
    mask = isinstance(counted, Tensor) and counted.dtype == torch.bool
    if counted is not None and not (mask and counted.shape == values.shape):
        raise SpecError(
            f"the loss {name!r} must say which positions count as booleans {tuple(values.shape)}",
            where="loss",
        )
    return values, counted
