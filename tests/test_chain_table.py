"""Forty chains against brute force from dense float64 rows: every backend, uneven batches.

The model has an embedding, a convolution, a normalisation, a recurrent and a linear layer.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.backends import backends
from gradscope.core.batch import Batch
from gradscope.engine import settled, usable
from gradscope.stages.chain import bind
from tests.oracle import per_sample_gradients

N = 9
Rows = dict[str, np.ndarray]
Result = dict[str, np.ndarray]


class Everything(nn.Module):
    """(n, t) ids to (n, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 5)
        self.conv = nn.Conv1d(5, 4, 3, padding=1, groups=1)
        self.norm = nn.LayerNorm(4)
        self.rnn = nn.GRU(4, 3, batch_first=True)
        self.head = nn.Linear(3, 3)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.conv(self.table(ids).mT).tanh().mT
        out, _ = self.rnn(self.norm(h))
        return self.head(out[:, -1])


@pytest.fixture(scope="module")
def setting() -> tuple[nn.Module, Tensor, Tensor, Rows]:
    torch.manual_seed(8)
    model = Everything().double()
    ids, targets = torch.randint(0, 6, (N, 7)), torch.randint(0, 3, (N,))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    _, rows = per_sample_gradients(model, loss, ids, targets)
    return model, ids, targets, {name: g.numpy() for name, g in rows.items()}


def flat(rows: Rows) -> np.ndarray:
    return np.concatenate([g.reshape(len(g), -1) for g in rows.values()], axis=1)


def norms(rows: Rows, p: float = 2) -> np.ndarray:
    return np.linalg.norm(flat(rows), p, axis=1)


def scaled(rows: Rows, factors: np.ndarray) -> Rows:
    return {k: g * factors.reshape(-1, *[1] * (g.ndim - 1)) for k, g in rows.items()}


def each(fn: Callable[[np.ndarray], np.ndarray]) -> Callable[[Rows], Rows]:
    return lambda rows: {k: fn(g) for k, g in rows.items()}


def clip(rows: Rows, level: float, p: float = 2) -> Rows:
    return scaled(rows, np.minimum(1, level / norms(rows, p)))


def clip_each(rows: Rows, level: float) -> Rows:
    return {k: clip({k: g}, level)[k] for k, g in rows.items()}


def centred(rows: Rows) -> Rows:
    return {k: g - g.mean(0) for k, g in rows.items()}


def top(rows: Rows, k: int) -> Rows:
    whole = flat(rows)
    kept = np.zeros_like(whole)
    order = np.argsort(-np.abs(whole), axis=1)[:, :k]
    np.put_along_axis(kept, order, np.take_along_axis(whole, order, 1), 1)
    ends = np.cumsum([g[0].size for g in rows.values()])[:-1]
    parts = np.split(kept, ends, axis=1)
    return {
        name: part.reshape(g.shape) for (name, g), part in zip(rows.items(), parts, strict=True)
    }


mean, total = each(lambda g: g.mean(0)), each(lambda g: g.sum(0))


def one(rows: Rows) -> Rows:
    """An aggregate as a batch of one."""
    return {k: g[None] for k, g in rows.items()}


def first(rows: Rows) -> Rows:
    return {k: g[0] for k, g in rows.items()}


TABLE: dict[str, Callable[[Rows], Result]] = {
    "identity": lambda r: r,
    "mean": mean,
    "sum": total,
    "var": each(lambda g: g.var(0, ddof=1)),
    "var:ddof=0": each(lambda g: g.var(0)),
    "std": each(lambda g: g.std(0, ddof=1)),
    "second_moment": each(lambda g: (g**2).mean(0)),
    "moment:k=3": each(lambda g: (g**3).mean(0)),
    "min": each(lambda g: g.min(0)),
    "max": each(lambda g: g.max(0)),
    "abs | mean": each(lambda g: np.abs(g).mean(0)),
    "square | mean": each(lambda g: (g**2).mean(0)),
    "square | var": each(lambda g: (g**2).var(0, ddof=1)),
    "sign | mean": each(lambda g: np.sign(g).mean(0)),
    "power:p=3 | mean": each(lambda g: (g**3).mean(0)),
    "clamp:min=-0.01,max=0.02 | mean": each(lambda g: np.clip(g, -0.01, 0.02).mean(0)),
    "threshold:value=0.01 | mean": each(lambda g: np.where(np.abs(g) > 0.01, g, 0).mean(0)),
    "scale:by=-2.5 | sum": each(lambda g: -2.5 * g.sum(0)),
    "clip:max_norm=0.5": lambda r: clip(r, 0.5),
    "clip:max_norm=0.5 | mean": lambda r: mean(clip(r, 0.5)),
    "mean | clip:max_norm=0.1": lambda r: first(clip(one(mean(r)), 0.1)),
    "clip:max_norm=2,p=1 | mean": lambda r: mean(clip(r, 2, 1)),
    "clip:max_norm=0.05,p=inf | mean": lambda r: mean(clip(r, 0.05, np.inf)),
    "clip:max_norm=0.1,per=parameter | mean": lambda r: mean(clip_each(r, 0.1)),
    "clip:max_norm=0.5 | square | mean": lambda r: mean(each(np.square)(clip(r, 0.5))),
    "clip:max_norm=0.5 | var": lambda r: each(lambda g: g.var(0, ddof=1))(clip(r, 0.5)),
    "normalize | mean": lambda r: mean(scaled(r, 1 / norms(r))),
    "normalize:p=1 | mean": lambda r: mean(scaled(r, 1 / norms(r, 1))),
    "normalize | mean | norm": lambda r: {"norm": norms(one(mean(scaled(r, 1 / norms(r)))))[0]},
    "norm": lambda r: {"norm": norms(r)},
    "norm:p=1": lambda r: {"norm": norms(r, 1)},
    "norm:per=parameter": lambda r: {k: norms({k: g}) for k, g in r.items()},
    "norm | mean": lambda r: {"norm": norms(r).mean()},
    "norm | var": lambda r: {"norm": norms(r).var(ddof=1)},
    "norm | max": lambda r: {"norm": norms(r).max()},
    "mean | norm": lambda r: {"norm": norms(one(mean(r)))[0]},
    "topk:k=20 | mean": lambda r: mean(top(r, 20)),
    "center | square | mean": lambda r: each(lambda g: (g**2).mean(0))(centred(r)),
    "center | norm": lambda r: {"norm": norms(centred(r))},
    "clip:max_norm=0.5 | center | norm": lambda r: {"norm": norms(centred(clip(r, 0.5)))},
    "cosine:to=mean": lambda r: {
        "cosine": flat(r) @ flat(one(mean(r)))[0] / norms(r) / norms(one(mean(r)))
    },
    "gram": lambda r: {"gram": flat(r) @ flat(r).T},
}


@pytest.mark.parametrize("backend", backends.names())
@pytest.mark.parametrize("text", TABLE)
def test_a_chain_equals_brute_force(text: str, backend: str, setting) -> None:
    model, ids, targets, rows = setting
    scope = gradscope.Scope(model, "cross_entropy", backend=backend)
    whole = Batch.of(ids, targets)

    def batches() -> list[Batch]:
        return [whole.select(part) for part in (slice(0, 4), slice(4, 5), slice(5, N))]

    (chain,) = settled(scope.session, [bind(text)], batches)
    state, parts = None, []
    for batch in batches():
        used = usable(scope.session, batch, scope.evaluate(batch))
        assert used is not None
        if chain.reducer is None:
            parts.append(chain.rows(*used).dense())
        else:
            state = chain.update(state, *used)
    if state is None:
        found = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    else:
        found = chain.result(state)
    wanted = TABLE[text](rows)
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        scale = np.abs(value).max()
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-10 * scale)


def test_the_order_of_clip_and_mean_matters(setting) -> None:
    model, ids, targets, _ = setting
    scope = gradscope.Scope(model, "cross_entropy")
    inside = scope.expectation("clip:max_norm=0.1 | mean", ids, targets)
    outside = scope.expectation("mean | clip:max_norm=0.1", ids, targets)
    gap = sum(float((inside[k] - outside[k]).square().sum()) for k in inside) ** 0.5
    assert gap > 0.01
