"""Batches of any form: their tensors, copies, and the states of random generators."""

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from gradscope.core.batch import tensors

ELSE = (
    "Name the parts instead: `gradscope init CHECKPOINT FILE.py:LOADER` reads the script without "
    "running it."
)


def plain(value: Any, depth: int = 1) -> Any:
    """Return a value with arrays of numpy as tensors, and objects as their attributes."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.as_tensor(value)
    if isinstance(value, Mapping):
        return {key: plain(v, depth) for key, v in value.items()}
    if isinstance(value, tuple | list):
        return tuple(plain(v, depth) for v in value)
    if depth and not isinstance(value, Tensor) and is_object(value):
        return plain(vars(value), depth - 1)
    return value


def leaves(batch: Any) -> list[Tensor]:
    """Return all tensors and arrays of a batch."""
    return tensors(plain(batch))


def size_of(batch: Any) -> int:
    """Return the number of samples that a batch may have, 0 if it has no samples."""
    if isinstance(batch, list):
        return len(batch)
    found = leaves(batch)
    return max([*(t.shape[0] for t in found if t.dim()), len(found) > 0])


def is_object(value: Any) -> bool:
    """Whether a value is a batch with attributes, such as torchtext makes."""
    others = (type, ModuleType, nn.Module, Dataset, DataLoader, Optimizer, Iterator)
    return hasattr(value, "__dict__") and not isinstance(value, others) and not callable(value)


def same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether two lists have the same tensors, or tensors with equal numbers."""
    if not some or len(some) != len(others):
        return False
    pairs = zip(some, others, strict=True)
    return all(a is b or (a.shape == b.shape and torch.equal(a, b)) for a, b in pairs)


def copied(value: Any) -> Any:
    """Return a deep copy of a batch, or the batch if it cannot be copied."""
    with suppress(Exception):
        return copy.deepcopy(value)
    return value


def checksum(batch: Any) -> int:
    """Return a number that depends on all tensors of a batch."""
    found = 0
    for t in leaves(batch):
        plain = t.detach().cpu().contiguous().reshape(-1)
        found = crc32(plain.view(torch.uint8).numpy().data, found)
    return found


def random_states() -> tuple[Any, ...]:
    """Return the states of the random generators of Python, NumPy and torch."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def same_states(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two results of `random_states` are equal."""
    numpy = all(np.array_equal(a, b) for a, b in zip(some[1], others[1], strict=True))
    return numpy and some[0] == others[0] and torch.equal(some[2], others[2])


def restore(states: Sequence[Any]) -> None:
    """Set the states of the random generators; () means that they are not known."""
    if states:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
