"""The samples of a script, from its DataLoader or from its first batches."""

import copy
import math
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from gradscope.core.texts import count
from gradscope.model.randomness import seeded
from gradscope.sources.first_steps.lines import Lines, evaluating
from gradscope.sources.first_steps.places import Place
from gradscope.sources.first_steps.values import checksum, copied, is_object, leaves, size_of

CLOSE = 1e-4  # the largest relative difference of two losses that are equal
_COPIES, _DRAWS = 4, 16  # copies of a sample, and draws of random numbers, to compare losses
_EQUAL = 1e-5  # the largest relative difference of losses that are equal but for rounding
_CLEAR = 0.05  # the largest relative spread of random losses that decides anything
_COUPLED = 0.2  # the relative difference to the loss of copies of a sample that is refused
_BYTES = 2**28  # of samples that are kept in memory
_AUGMENTED = "samples are random, as with augmentation: each sample is one draw, seeded with its "
_AUGMENTED += "position"


class Samples(Dataset[Any]):
    """The samples of a DataLoader in the order of its data set.

    `size` is (the size of the script's batches, 1).
    """

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self._data, self._collate = loader.dataset, loader.collate_fn or default_collate
        if loader.batch_size is None and loader.batch_sampler is None:  # samples are batches
            self._collate = lambda samples: samples[0]
        self._checksums: dict[int, int] = {}
        self._kept: OrderedDict[int, tuple[Any, int]] = OrderedDict()
        self._bytes = 0
        self.size = None if loader.batch_size is None else (loader.batch_size, 1)
        drawn = checksum(self._read(0, 0)) != checksum(self._read(0, 1))
        self.notes = (_AUGMENTED,) * drawn

    def __len__(self) -> int:
        return len(self._data)  # type: ignore[arg-type]

    def __getitem__(self, k: int) -> Tensor:
        return torch.tensor([k, self.checksum(k)])

    def checksum(self, k: int) -> int:
        """Return a number that depends on the tensors of sample k."""
        if k not in self._checksums:
            self._checksums[k] = checksum(self.batch(k)[0])
        return self._checksums[k]

    def _read(self, k: int, seed: int) -> Any:
        with seeded(seed):
            return self._collate([self._data[k]])

    def batch(self, k: int) -> tuple[Any, dict[str, Any]]:
        """Return the batch that has only sample k, and no carried variables."""
        if k not in self._kept:
            made = self._read(k, k)
            size = sum(t.nbytes for t in leaves(made))
            self._kept[k] = made, size
            self._bytes += size
            while self._bytes > _BYTES and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1][1]
        return copied(self._kept[k][0]), {}


class Recordings(Dataset[Any]):
    """The samples of batches that a script made: single rows, or whole batches.

    `size` is (the size of the last of these batches, 1), or None if batches are not divided.
    """

    def __init__(self, place: Place, lines: Lines) -> None:
        batches = [(each.batch, lines.carried_of(each)) for each in place.done]
        self.axis, notes = _axis_of(*batches[-1], lines)
        axes = [_same_axis(batch, self.axis) for batch, _ in batches]
        self.size = None if self.axis is None else (self.axis[1], 1)
        kept = [pair for pair in zip(batches, axes, strict=True) if pair[1] or self.axis is None]
        self._samples = [one for batch, axis in kept for one in _split(*batch, axis)]
        n = count(len(self._samples), "sample")
        self.notes = (
            f"The samples are those of the script's batches after the first, {n}.",
            *notes,
        )

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, k: int) -> Tensor:
        return torch.tensor([k, self.checksum(k)])

    def checksum(self, k: int) -> int:
        """Return a number that depends on the tensors of sample k."""
        return checksum(self._samples[k])

    def batch(self, k: int) -> tuple[Any, dict[str, Any]]:
        """Return the batch that has only sample k, and variables of the round before."""
        return copied(self._samples[k])  # type: ignore[no-any-return]


def _axis_of(
    batch: Any, carried: Mapping[str, Any], lines: Lines
) -> tuple[tuple[int, int] | None, tuple[str, ...]]:
    """Return (axis, size) of the samples of a batch, or None for a single sample, and notes."""
    for axis in sorted(axes_of(batch), key=lambda each: each[1] not in lines.sizes):
        found = independence(batch, carried, lines, axis)
        if found is not None and found.independent:
            return axis, found.notes
    told = (
        "Each batch is one row: its loss is not a loss of independent samples. If the script has "
        "an argument for the batch size, 1 makes each sample a row."
    )
    return None, (told,) * (size_of(batch) > 1)


@dataclass(frozen=True)
class Independence:
    """Whether the samples of a batch are independent, and the losses that show it."""

    independent: bool
    nearly: bool  # whether a weight of the whole batch may be the only reason
    alone: float  # the loss of a sample
    several: float  # the loss of a batch of copies of this sample
    notes: tuple[str, ...]


def independence(
    batch: Any, carried: Mapping[str, Any], lines: Lines, axis: tuple[int, int]
) -> Independence | None:
    """Return whether a loss is a sum over its samples, or nearly the same for copies of a sample.

    A mean with weights, and the Dice loss, are nearly the same for copies; contrastive losses are
    not. If the lines draw random numbers, the means over several draws are compared. The result is
    None if the lines cannot be run for samples along this axis.
    """
    for m in sorted({min(axis[1], _COPIES), axis[1]}):
        with evaluating(lines.model), torch.no_grad(), suppress(Exception):
            return _independence(batch, carried, lines, axis, m)
    return None


def _independence(
    batch: Any, carried: Mapping[str, Any], lines: Lines, axis: tuple[int, int], m: int
) -> Independence:
    """Compare the losses of m samples and of m copies of a sample."""
    k, n = axis

    def of(rows: list[int], seed: int = 0) -> float:
        part, own = _part((batch, carried), rows, n, k)
        return lines.value(part, own, size=(n, len(rows)), seed=seed)

    each = [of([row]) for row in range(m)]
    seeds = range(_DRAWS if lines.draws else 1)

    def draws(rows: list[int]) -> Tensor:
        return torch.tensor([of(rows, seed) for seed in seeds], dtype=torch.float64)

    alone = torch.stack([draws([row]) for row in (0, m - 1)])
    calls: float = lines.calls
    several = torch.stack([draws([row] * m) for row in (0, m - 1)])
    calls = lines.calls / max(calls, 1)
    pairs = torch.stack([draws([a % m, b % m]) for a, b in ((0, 1), (0, 2), (3, 2), (3, 1))])
    first, others = alone.mean(1), several.mean(1)

    def differ(times: float, share: float) -> bool:
        """Whether the loss of copies is not `times` the loss of the sample, within a share."""
        change = several - alone * times
        noise = 4 * change.std(1) / math.sqrt(len(seeds)) if lines.draws else torch.zeros(2)
        size = torch.maximum(others.abs(), (first * times).abs())
        return bool((change.mean(1).abs() > share * size + noise).any())

    # L(a, b) - L(a, c) is the same for each a: the loss is a sum over the samples
    mixed = pairs[0] - pairs[1] + pairs[2] - pairs[3]
    size = pairs.abs().max()
    spread = 4 * mixed.std() / math.sqrt(len(seeds)) if lines.draws else torch.zeros(())
    is_sum = bool(mixed.mean().abs() <= _EQUAL * size + spread) and bool(spread <= _CLEAR * size)
    factors = (1, m, calls)  # a mean, a sum, a sum over parts of the batch
    independent = is_sum or not all(differ(times, _EQUAL) for times in factors)
    close = not all(differ(times, _COUPLED) for times in factors)
    notes: tuple[str, ...] = ()
    whole, total = of([*range(m)]), math.fsum(each)
    is_mean = any(math.isclose(whole, t, rel_tol=CLOSE) for t in (total / m, total))
    if not lines.draws and not is_mean:
        notes = (
            f"The loss of {m} samples together, {whole:.4g}, is neither the mean of their losses, "
            f"{total / m:.4g}, nor the sum. Each row is of the loss of a batch with one sample.",
        )
    return Independence(independent, independent or close, float(first[0]), float(others[0]), notes)


def axes_of(batch: Any) -> list[tuple[int, int]]:
    """Return the axes that may be the samples', of the first entry of a batch, with their sizes."""
    if _are_samples(batch):
        return [(0, len(batch))]
    entries = [batch]
    if isinstance(batch, Mapping):
        entries = [*batch.values()]
    elif isinstance(batch, tuple | list):
        entries = [*batch]
    elif is_object(batch):
        entries = [*vars(batch).values()]
    sizes = [each for entry in entries if (each := _sizes(entry))]
    found = [*enumerate(sizes[0][:2])] if sizes else []
    return [(axis, n) for axis, n in found if n > 1 and all(n in each for each in sizes)]


def _same_axis(batch: Any, axis: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the sample axis of another batch, which may have another number of samples."""
    return next((own for own in axes_of(batch) if axis is not None and own[0] == axis[0]), None)


def _sizes(entry: Any) -> list[int]:
    """Return the sizes of axes that may be the samples', [] for a value without axes."""
    if isinstance(entry, Tensor | np.ndarray):
        return [*entry.shape]
    if not isinstance(entry, tuple | list):
        return []
    inner = [each for value in entry if (each := _sizes(value))]
    shared = [n for n in inner[0] if all(n in each for each in inner)] if inner else []
    return [*shared, len(entry)]


def _are_samples(batch: Any) -> bool:
    """Whether a batch is a list of samples."""
    several = isinstance(batch, list) and len(batch) > 1
    return several and not any(isinstance(v, Tensor | np.ndarray) for v in batch)


def _split(batch: Any, carried: Mapping[str, Any], axis: tuple[int, int] | None) -> list[Any]:
    """Return batches of one sample each, with their carried variables."""
    if axis is None:
        return [(batch, carried)]
    return [_part((batch, carried), [k], axis[1], axis[0]) for k in range(axis[1])]


def _part(value: Any, rows: list[int], n: int, axis: int, depth: int = 1) -> Any:
    """Return some of the n samples of a value; an axis of size n belongs to the samples."""
    if isinstance(value, Tensor | np.ndarray):
        every = [axis, *(k for k in range(value.ndim) if k != axis)]
        own = next((k for k in every if k < value.ndim and value.shape[k] == n), None)
        return value if own is None else value[(slice(None),) * own + (rows,)]
    part = partial(_part, rows=rows, n=n, axis=axis, depth=depth)
    if isinstance(value, Mapping):
        return {key: part(v) for key, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(map(part, value))
    if isinstance(value, tuple | list):
        if len(value) == n and _sizes(value)[:-1].count(n) == 0:
            return type(value)([value[k] for k in rows])
        return type(value)([part(v) for v in value])
    if depth and is_object(value):
        made = copy.copy(value)
        vars(made).update({k: part(v, depth=depth - 1) for k, v in vars(value).items()})
        return made
    return value


def is_stream(loader: "DataLoader[Any]") -> bool:
    """Whether the samples of a loader have no positions."""
    data = loader.dataset
    return isinstance(data, IterableDataset) or not hasattr(type(data), "__len__")
