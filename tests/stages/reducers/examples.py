"""Gradients of every kind of block with their dense rows, and ways to split and merge them."""

import random
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from gradscope.blocks import (
    Block,
    ConvolutionBlock,
    DenseBlock,
    Geometry,
    Gradients,
    MappedBlock,
    OuterBlock,
    ScatterBlock,
    SquaredBlock,
    TotalBlock,
)
from gradscope.stages.reducers import Reducer, State, carried_state

N = 23
DTYPES = [torch.float32, torch.float64, torch.complex128]
Rows = dict[str, np.ndarray]


def example(dtype: torch.dtype, n: int = N, seed: int = 3) -> tuple[Gradients, Rows]:
    """Return gradients whose samples differ in scale, and dense rows in float64 or complex128."""
    draw = _Draw(dtype, n, seed)
    outer, deep = draw.outer(1, 1, 4, 3, (4, 3)), draw.outer(1, 3, 6, 5, (6, 5))
    grouped = draw.outer(2, 3, 3, 4, (6, 2, 2))
    scatter, dense = draw.scatter(4, 3, 6), draw.dense(4, 3)
    pairs: dict[str, tuple[Block, np.ndarray]] = {
        "outer": outer,
        "positions": deep,
        "grouped": grouped,
        "groups": draw.outer(3, 1, 2, 3, (6, 3)),
        "scatter": scatter,
        "dense": dense,
        "scalar": draw.dense(),
        "total": (TotalBlock((outer[0], scatter[0])), outer[1] + scatter[1]),
        "everything": (
            TotalBlock((outer[0], scatter[0], dense[0])),
            outer[1] + scatter[1] + dense[1],
        ),
        "squared": (SquaredBlock(outer[0]), np.abs(outer[1]) ** 2),
        "mapped": (MappedBlock(deep[0], torch.abs), np.abs(deep[1])),
    }
    if not dtype.is_complex:  # torch computes complex convolutions as real ones
        pairs["convolution"] = draw.convolution()
    blocks = {name: block for name, (block, _) in pairs.items()}
    index = torch.arange(n) * 3 + 1
    return Gradients(blocks, index), {name: rows for name, (_, rows) in pairs.items()}


class _Draw:
    def __init__(self, dtype: torch.dtype, n: int, seed: int) -> None:
        self.dtype, self.n = dtype, n
        self.generator = torch.Generator().manual_seed(seed)
        self.scale = torch.logspace(-1, 1, n, dtype=torch.float64)

    def normal(self, *shape: int) -> Tensor:
        wide = torch.complex128 if self.dtype.is_complex else torch.float64
        values = torch.randn(self.n, *shape, generator=self.generator, dtype=wide) + 0.3
        return (values * self.scale.reshape(-1, *[1] * len(shape))).to(self.dtype)

    def outer(self, k, t, r, c, shape) -> tuple[Block, np.ndarray]:
        left, right = self.normal(k, t, r), self.normal(k, t, c)
        rows = np.einsum("nktr,nktc->nkrc", wide(left), wide(right)).reshape(self.n, *shape)
        return OuterBlock(left, right, shape), rows

    def scatter(self, v, d, t) -> tuple[Block, np.ndarray]:
        index = torch.randint(0, v, (self.n, t), generator=self.generator)
        values = self.normal(t, d)
        rows = np.zeros((self.n, v, d), dtype=wide(values).dtype)
        for i in range(self.n):
            np.add.at(rows[i], index[i].numpy(), wide(values)[i])
        return ScatterBlock(index, values, v), rows

    def dense(self, *shape) -> tuple[Block, np.ndarray]:
        values = self.normal(*shape)
        return DenseBlock(values), wide(values)

    def convolution(self) -> tuple[Block, np.ndarray]:
        """One frame, 2 groups, kernel 3 with padding 1: correlate by hand."""
        inputs, gradients = self.normal(1, 4, 7), self.normal(1, 2, 7)
        padded = np.pad(wide(inputs)[:, 0], ((0, 0), (0, 0), (1, 1)))
        rows = np.zeros((self.n, 2, 2, 3), dtype=padded.dtype)
        for o, c, k in np.ndindex(2, 2, 3):
            window = padded[:, o * 2 + c, k : k + 7]
            rows[:, o, c, k] = (window * wide(gradients)[:, 0, o]).sum(1)
        geometry = Geometry((1,), (1,), (1,), (0,), 2, False)
        return ConvolutionBlock(inputs, gradients, (2, 2, 3), geometry), rows


def wide(values: Tensor) -> np.ndarray:
    """Return float64 or complex128."""
    return values.to(torch.complex128 if values.is_complex() else torch.float64).numpy()


def real(gradients: Gradients, rows: Rows) -> tuple[Gradients, Rows]:
    """Return |g|, which can be ordered, of complex gradients; real ones as they are."""
    if not any(block.dtype.is_complex for block in gradients.values()):
        return gradients, rows
    absolute = gradients.map(lambda block: MappedBlock(block, torch.abs))
    return absolute, {name: np.abs(values) for name, values in rows.items()}


def whole(reducer: Reducer, gradients: Gradients) -> dict[str, np.ndarray]:
    """Reduce all samples as one batch."""
    return _arrays(reducer.result(_stored(reducer.start(gradients))))


def split(reducer: Reducer, gradients: Gradients, seed: int) -> dict[str, np.ndarray]:
    """Reduce random batches, in random order, merged along a random tree."""
    chance = random.Random(seed)
    n = gradients.n
    cuts = sorted(chance.sample(range(1, n), chance.randint(1, min(9, n - 1))))
    parts = [slice(a, b) for a, b in pairwise([0, *cuts, n])]
    chance.shuffle(parts)
    states = [_stored(reducer.start(gradients.select(part))) for part in parts]
    while len(states) > 1:
        at = chance.randrange(len(states) - 1)
        states[at : at + 2] = [merged(reducer, *states[at : at + 2])]
    return _arrays(reducer.result(states[0]))


def _stored(state: State) -> State:
    return carried_state(state)


def merged(reducer: Reducer, a: State, b: State) -> State:
    """Merge, and check that both arguments are as before and that states hold tensors only."""
    before = [{k: v.clone() for k, v in state.items()} for state in (a, b)]
    state = reducer.merge(a, b)
    assert all(isinstance(v, Tensor) and isinstance(k, str) for k, v in state.items())
    for old, new in zip(before, (a, b), strict=True):
        assert list(old) == list(new)
        assert all(torch.equal(old[k].nan_to_num(7), new[k].nan_to_num(7)) for k in old)
    return state


def close(ours: dict[str, np.ndarray], right: Rows, rtol: float, atol: float = 0.0) -> None:
    """Compare by name; `atol` is in units of the largest number."""
    assert set(ours) == set(right)
    for name, value in right.items():
        assert ours[name].shape == np.shape(value), name
        size = np.abs(np.nan_to_num(value)).max()
        np.testing.assert_allclose(ours[name], value, rtol=rtol, atol=atol * size, err_msg=name)


def _arrays(result: dict[str, Tensor]) -> dict[str, np.ndarray]:
    for value in result.values():
        assert value.dtype in (torch.float64, torch.complex128)
    return {name: value.numpy() for name, value in result.items()}
