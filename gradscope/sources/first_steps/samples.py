"""The samples of a script: those of its DataLoader, or those of its first batches."""

import copy
import math
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from gradscope.core.texts import count
from gradscope.model.randomness import seeded
from gradscope.sources.first_steps.lines import Lines
from gradscope.sources.first_steps.places import Place
from gradscope.sources.first_steps.values import checksum, copied, is_object, leaves, size_of

CLOSE = 1e-4  # the largest relative difference of two losses that are equal
_BYTES = 2**28  # of samples that are kept in memory
_AUGMENTED = "samples are random, as with augmentation: each sample is one draw, seeded with its "
_AUGMENTED += "position"


class Samples(Dataset[Any]):
    """The samples of a DataLoader in the order of its data set."""

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self._data, self._collate = loader.dataset, loader.collate_fn or default_collate
        self.size = loader.batch_size  # the size of the script's batches
        if loader.batch_size is None and loader.batch_sampler is None:  # samples are batches
            self._collate = lambda samples: samples[0]
        self._checksums: dict[int, int] = {}
        self._kept: OrderedDict[int, tuple[Any, int]] = OrderedDict()
        self._bytes = 0
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
    """The samples of batches that a script made: single rows, or whole batches."""

    def __init__(self, place: Place, lines: Lines) -> None:
        batches = [(each.batch, lines.carried_of(each)) for each in place.done]
        self.axis, notes = _axis_of(*batches[-1], lines)
        axes = [_same_axis(batch, self.axis) for batch, _ in batches]
        self.size = None if self.axis is None else self.axis[1]  # the size of the script's batches
        kept = [pair for pair in zip(batches, axes, strict=True) if pair[1] or self.axis is None]
        self._samples = [one for batch, axis in kept for one in _split(*batch, axis)]
        n = count(len(self._samples), "sample")
        self.notes = (f"The samples are those of the script's first batches, {n}.", *notes)

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
    """Return (axis, size) of the samples of a batch, or None for a single sample, and notes.

    The loss decides: n copies of a sample have the loss of the sample, or n times this loss.
    """
    modes = {module: module.training for module in lines.model.modules()}
    lines.model.eval()
    try:
        for axis, n in _axes(batch):
            with suppress(Exception), torch.no_grad():
                parts = _split(batch, carried, (axis, n))
                each = [lines.value(part, own, size=n) for part, own in parts]
                copies = [
                    lines.value(*_part((batch, carried), [k] * n, n, axis)) for k in (0, n - 1)
                ]
                alike = [*zip(copies, (each[0], each[-1]), strict=True)]
                if not lines.draws and not any(
                    all(math.isclose(a, b * times, rel_tol=CLOSE) for a, b in alike)
                    for times in (1, n)
                ):
                    continue
                whole, total = lines.value(batch, carried), math.fsum(each)
                if any(math.isclose(whole, t, rel_tol=CLOSE) for t in (total / n, total)):
                    return (axis, n), ()
                return (axis, n), (
                    f"The loss of a batch, {whole:.4g}, is neither the mean of the losses of its "
                    f"{n} samples, {total / n:.4g}, nor their sum. A row belongs to the loss of a "
                    "batch with one sample.",
                )
    finally:
        for module, mode in modes.items():
            module.training = mode
    told = (
        "Each batch is one row: its loss is not a loss of independent samples. If the script has "
        "an argument for the batch size, 1 makes each sample a row."
    )
    return None, (told,) * (size_of(batch) > 1)


def _axes(batch: Any) -> list[tuple[int, int]]:
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
    return next((own for own in _axes(batch) if axis is not None and own[0] == axis[0]), None)


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
