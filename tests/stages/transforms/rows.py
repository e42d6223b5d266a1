"""Gradients of every kind of block beside their dense rows, which the blocks' code did not make."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch

from gradscope.blocks import Gradients
from gradscope.stages.chain import Chain, bind
from gradscope.stages.transforms import Vector
from tests.blocks.test_blocks import dense, kept, outer, scatter, summed

N = 5
INDEX = torch.tensor([11, 3, 40, 7, 2**40])  # positions in some data set, in no order
Rows = dict[str, np.ndarray]


def everything(dtype: torch.dtype = torch.float64) -> tuple[Gradients, Rows]:
    """A block of each kind, complex ones among them; sizes of samples are uneven."""
    torch.manual_seed(6)
    wide = torch.complex128 if dtype == torch.float64 else torch.complex64
    pairs = {
        "outer": outer(dtype),
        "positions": outer(dtype, t=2, r=6, c=7),
        "many": outer(dtype, t=40, shape=(2, 2, 3)),
        "groups": outer(dtype, k=3, t=2, r=2, c=4, shape=(6, 2, 2)),
        "table": scatter(dtype),
        "tied": summed(outer(dtype), scatter(dtype)),
        "mixed": kept(outer(dtype, t=2), dense(dtype, 4, 3)),
        "complex": dense(wide, 2, 3),
        "complex outer": outer(wide),
        "vector": dense(dtype, 4),
        "scalar": dense(dtype),
    }
    factors = torch.tensor([0.01, 3.0, 0.4, 1.0, 20.0], dtype=torch.float64)
    gradients = Gradients({k: b for k, (b, _) in pairs.items()}, INDEX).scale(factors)
    return gradients, {k: times(factors.numpy(), v.numpy()) for k, (_, v) in pairs.items()}


def real() -> tuple[Gradients, Rows]:
    """Without the complex ones."""
    gradients, rows = everything()
    names = [k for k in rows if not k.startswith("complex")]
    return gradients.of({k: gradients[k] for k in names}), {k: rows[k] for k in names}


def times(factors: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return factors.reshape(-1, *[1] * (rows.ndim - 1)) * rows


def each(fn: Callable[[np.ndarray], np.ndarray]) -> Callable[[Rows], Rows]:
    return lambda rows: {name: fn(values) for name, values in rows.items()}


def scaled(rows: Rows, factors: np.ndarray) -> Rows:
    return {name: times(factors, values) for name, values in rows.items()}


def flat(rows: Mapping[str, np.ndarray]) -> np.ndarray:
    """All parameters side by side (n, entries)."""
    return np.concatenate([v.reshape(len(v), -1) for v in rows.values()], axis=1)


def mean(rows: Rows) -> Rows:
    return {name: values.mean(0) for name, values in rows.items()}


def one(aggregate: Rows) -> Rows:
    return {name: values[None] for name, values in aggregate.items()}


def settled(chain: Chain, gradients: Gradients, cuts: Sequence[int] = ()) -> Chain:
    """Run the earlier passes that a chain waits for."""
    while (first := chain.first_pass) is not None:
        chain = chain.given(reduced(first, gradients, cuts))
    return chain


def reduced(
    chain: Chain, gradients: Gradients, cuts: Sequence[int] = ()
) -> dict[str, torch.Tensor]:
    """Run a reducing chain over the batches between `cuts`."""
    chain, state = settled(chain, gradients, cuts), None
    for a, b in pairwise([0, *cuts, gradients.n]):
        state = chain.update(state, gradients.select(slice(a, b)))
    return chain.result(state)


def run(
    text: str, gradients: Gradients, cuts: Sequence[int] = (), vector: Rows | None = None
) -> dict[str, torch.Tensor]:
    """Return the rows of a chain, or its aggregate if it reduces; `with=` stands for `vector`."""
    values = {k: torch.from_numpy(np.asarray(v)) for k, v in (vector or {}).items()}
    chain = bind(text, vectors=lambda reference: Vector(values, reference))
    if chain.reducer is not None:
        return reduced(chain, gradients, cuts)
    chain = settled(chain, gradients, cuts)
    parts = [
        chain.rows(gradients.select(slice(a, b))).dense()
        for a, b in pairwise([0, *cuts, gradients.n])
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def compare(ours: Mapping[str, torch.Tensor], right: Rows, tolerance: float = 1e-11) -> None:
    """Compare relative to each entry, and to a billionth of it to the largest one."""
    assert list(ours) == list(right)
    for name, values in right.items():
        found = ours[name].numpy()
        assert found.shape == values.shape, name
        assert np.iscomplexobj(found) == np.iscomplexobj(values), name
        size = np.abs(values).max(initial=0)
        np.testing.assert_allclose(found, values, tolerance, tolerance * size, err_msg=name)
