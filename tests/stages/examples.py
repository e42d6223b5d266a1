"""Gradients of every kind of block beside their dense rows, which the blocks' code did not make.

And ways to run chains and reducers on them, in one batch or in several.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

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
    segmented,
)
from gradscope.engine.chains import READERS, bind
from gradscope.stages import chain as chains
from gradscope.stages.chain import Chain, reducer_of
from gradscope.stages.reducers.accumulator import Accumulator
from gradscope.stages.reducers.base import Reducer, carried_state
from gradscope.stages.transforms.base import Vector

MANY = 23
N = 5
INDEX = torch.tensor([11, 3, 40, 7, 2**40])  # positions in some data set, in no order
DTYPES = [torch.float32, torch.float64, torch.complex128]
Rows = dict[str, np.ndarray]


def example(dtype: torch.dtype, n: int = MANY, seed: int = 3) -> tuple[Gradients, Rows]:
    """Return gradients whose samples differ in scale, and dense rows in float64 or complex128."""
    draw = Draw(dtype, n, seed)
    outer, deep = draw.outer(1, 1, 4, 3, (4, 3)), draw.outer(1, 3, 6, 5, (6, 5))
    scatter, dense = draw.scatter(4, 3, 6), draw.dense(4, 3)
    every = TotalBlock((outer[0], scatter[0], dense[0]))
    pairs: dict[str, tuple[Block, np.ndarray]] = {
        "outer": outer,
        "positions": deep,
        "grouped": draw.outer(2, 3, 3, 4, (6, 2, 2)),
        "groups": draw.outer(3, 1, 2, 3, (6, 3)),
        "scatter": scatter,
        "dense": dense,
        "experts": draw.segments(40, 3, 4, 3, (3, 4, 3), everybody=True),
        "scalar": draw.dense(),
        "total": (TotalBlock((outer[0], scatter[0])), outer[1] + scatter[1]),
        "everything": (every, outer[1] + scatter[1] + dense[1]),
        "squared": (SquaredBlock(outer[0]), np.abs(outer[1]) ** 2),
        "mapped": (MappedBlock(deep[0], torch.abs), np.abs(deep[1])),
    }
    if not dtype.is_complex:  # torch computes complex convolutions as real ones
        pairs["convolution"] = draw.convolution()
    blocks = {name: block for name, (block, _) in pairs.items()}
    index = INDEX if n == N else torch.arange(n) * 3 + 1
    return Gradients(blocks, index), {name: rows for name, (_, rows) in pairs.items()}


def everything(dtype: torch.dtype = torch.float64) -> tuple[Gradients, Rows]:
    """Five samples, real and complex parameters together."""
    gradients, rows = example(dtype, N)
    draw = Draw(torch.complex128 if dtype == torch.float64 else torch.complex64, N, 9)
    more = {"complex": draw.dense(2, 3), "complex outer": draw.outer(1, 1, 4, 3, (4, 3))}
    blocks = dict(gradients) | {name: block for name, (block, _) in more.items()}
    return Gradients(blocks, INDEX), rows | {name: dense for name, (_, dense) in more.items()}


class Draw:
    def __init__(self, dtype: torch.dtype, n: int, seed: int) -> None:
        self.dtype, self.n = dtype, n
        self.generator = torch.Generator().manual_seed(seed)
        self.scale = torch.logspace(-1, 1, n, dtype=torch.float64)

    def normal(self, *shape: int) -> Tensor:
        wide = torch.complex128 if self.dtype.is_complex else torch.float64
        values = torch.randn(self.n, *shape, generator=self.generator, dtype=wide) + 0.3
        return (values * self.scale.reshape(-1, *[1] * len(shape))).to(self.dtype)

    def outer(
        self, k: int, t: int, r: int, c: int, shape: tuple[int, ...]
    ) -> tuple[Block, np.ndarray]:
        left, right = self.normal(k, t, r), self.normal(k, t, c)
        rows = np.einsum("nktr,nktc->nkrc", wide(left), wide(right)).reshape(self.n, *shape)
        return OuterBlock(left, right, shape), rows

    def segments(
        self, m: int, k: int, r: int, c: int, shape: tuple[int, ...], *, everybody: bool = False
    ) -> tuple[Block, np.ndarray]:
        """Rows in any order; the last of several groups has none, nor has the last sample."""
        sample = torch.randint(0, self.n - 1, (m,), generator=self.generator)
        if everybody:
            sample[: self.n] = torch.randperm(self.n, generator=self.generator)
        group = torch.randint(0, max(1, k - 1), (m,), generator=self.generator)
        left, right = (self.normal(m, width)[0] for width in (r, c))
        left = left * self.scale[sample].unsqueeze(1).to(left.dtype)
        rows = np.zeros((self.n, k, r, c), dtype=wide(left).dtype)
        products = np.einsum("mr,mc->mrc", wide(left), wide(right))
        np.add.at(rows, (sample.numpy(), group.numpy()), products)
        block = segmented((left, right, sample, group), (self.n, k), shape)
        return block, rows.reshape(self.n, *shape)

    def scatter(self, v: int, d: int, t: int) -> tuple[Block, np.ndarray]:
        index = torch.randint(0, v, (self.n, t), generator=self.generator)
        values = self.normal(t, d)
        rows = np.zeros((self.n, v, d), dtype=wide(values).dtype)
        for i in range(self.n):
            np.add.at(rows[i], index[i].numpy(), wide(values)[i])
        return ScatterBlock(index, values, v), rows

    def dense(self, *shape: int) -> tuple[Block, np.ndarray]:
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


def one_parameter(values: object) -> Gradients:
    return Gradients({"w": DenseBlock(torch.as_tensor(values, dtype=torch.float64))})


def each(fn: Callable[[np.ndarray], np.ndarray]) -> Callable[[Rows], Rows]:
    return lambda rows: {name: fn(values) for name, values in rows.items()}


def scaled(rows: Rows, factors: np.ndarray) -> Rows:
    return {k: factors.reshape(-1, *[1] * (v.ndim - 1)) * v for k, v in rows.items()}


def flat(rows: Mapping[str, np.ndarray]) -> np.ndarray:
    """All parameters side by side (n, entries)."""
    return np.concatenate([v.reshape(len(v), -1) for v in rows.values()], axis=1)


def mean(rows: Rows) -> Rows:
    return {name: values.mean(0) for name, values in rows.items()}


def settled(chain: Chain, gradients: Gradients, cuts: Sequence[int] = ()) -> Chain:
    """Run the earlier passes that a chain waits for."""
    while (first := chain.first_pass) is not None:
        chain = chain.given(reduced(first, gradients, cuts))
    return chain


def reduced(chain: Chain, gradients: Gradients, cuts: Sequence[int] = ()) -> dict[str, Tensor]:
    """Run a reducing chain over the batches between `cuts`."""
    chain = settled(chain, gradients, cuts)
    parts = [(gradients.select(slice(a, b)),) for a, b in pairwise([0, *cuts, gradients.n])]
    return accumulated(chain, parts)


def accumulated(chain: Chain, batches: Iterable[tuple[Any, ...]]) -> dict[str, Tensor]:
    """Return a chain's result over batches of gradients, or of what `usable` gives."""
    total = Accumulator({"all": reducer_of(chain)})
    for batch in batches:
        total.add({"all": chain.start(*batch)})
    return chain.finish(total.result("all"))


def bind_with(text: str, values: Mapping[str, Tensor]) -> Chain:
    """Bind a chain whose `with=` stands for a stored vector of these values."""
    vectors = {Vector: lambda reference: Vector(values, reference)}
    readers = replace(READERS, arguments={**READERS.arguments, **vectors})
    return chains.bind(text, readers=readers)


def run(
    text: str, gradients: Gradients, cuts: Sequence[int] = (), vector: Rows | None = None
) -> dict[str, Tensor]:
    """Return the rows of a chain, or its aggregate if it reduces; `with=` stands for `vector`."""
    values = {k: torch.from_numpy(np.asarray(v)) for k, v in (vector or {}).items()}
    chain = bind_with(text, values)
    if chain.reducer is not None:
        return reduced(chain, gradients, cuts)
    chain = settled(chain, gradients, cuts)
    parts = [
        chain.rows(gradients.select(slice(a, b))).dense()
        for a, b in pairwise([0, *cuts, gradients.n])
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def reducer(text: str) -> Reducer:
    found = bind(text).reducer
    assert found is not None
    return found


def whole(reducer: Reducer, gradients: Gradients) -> Rows:
    """Reduce all samples as one batch."""
    return arrays(reducer.result(carried_state(reducer.start(gradients))))


def split(reducer: Reducer, gradients: Gradients, seed: int) -> Rows:
    """Reduce random batches, in random order, merged along a random tree."""
    chance = random.Random(seed)
    n = gradients.n
    cuts = sorted(chance.sample(range(1, n), chance.randint(1, min(9, n - 1))))
    parts = [slice(a, b) for a, b in pairwise([0, *cuts, n])]
    chance.shuffle(parts)
    states = [carried_state(reducer.start(gradients.select(part))) for part in parts]
    while len(states) > 1:
        at = chance.randrange(len(states) - 1)
        a, b = states[at : at + 2]
        before = [{k: v.clone() for k, v in state.items()} for state in (a, b)]
        states[at : at + 2] = [reducer.merge(a, b)]
        for old, new in zip(before, (a, b), strict=True):  # a merge leaves both as they were
            assert list(old) == list(new)
            assert all(torch.equal(old[k].nan_to_num(7), new[k].nan_to_num(7)) for k in old)
    return arrays(reducer.result(states[0]))


def arrays(result: Mapping[str, Tensor]) -> Rows:
    assert all(value.dtype in (torch.float64, torch.complex128) for value in result.values())
    return {name: value.numpy() for name, value in result.items()}


def compare(
    ours: Mapping[str, Any], right: Rows, rtol: float = 1e-11, atol: float | None = None
) -> None:
    """Compare by name, shape and kind; `atol` is in units of the largest number."""
    assert ours.keys() == right.keys()
    for name, values in right.items():
        found, values = np.asarray(ours[name]), np.asarray(values)
        assert found.shape == values.shape, name
        assert np.iscomplexobj(found) == np.iscomplexobj(values), name
        size = np.abs(np.nan_to_num(values)).max(initial=0)
        least = (rtol if atol is None else atol) * size
        np.testing.assert_allclose(found, values, rtol, least, err_msg=name)
