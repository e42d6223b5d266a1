"""Chains: every backend against brute force from dense float64 rows, in uneven batches.

The model has an embedding, a convolution, a normalisation, a recurrent and a linear layer.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.backends.base import backends
from gradscope.blocks import DenseBlock, Gradients
from gradscope.core.batch import Batch
from gradscope.engine.chains import bind
from gradscope.engine.fold import prepare_chains, usable
from gradscope.errors import SpecError
from gradscope.model.problem import Problem
from tests.oracle import cross_entropy, per_sample_gradients
from tests.stages.examples import Rows, accumulated, each, flat, mean, run
from tests.stages.test_transforms import (
    by_parameter,
    clipped,
    cosines,
    normalized,
    norms,
    one,
    top,
)

N = 9


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


Setting = tuple[nn.Module, Tensor, Tensor, Rows]


@pytest.fixture(scope="module")
def setting() -> Setting:
    torch.manual_seed(8)
    model = Everything().double()
    ids, targets = torch.randint(0, 6, (N, 7)), torch.randint(0, 3, (N,))
    _, rows = per_sample_gradients(model, cross_entropy, ids, targets)
    return model, ids, targets, {name: g.numpy() for name, g in rows.items()}


def norm(rows: Rows) -> Rows:
    return {"norm": norms(rows, 2)}


def centred(rows: Rows) -> Rows:
    return {k: g - g.mean(0) for k, g in rows.items()}


def aggregate(rows: Rows, then: Callable[[Rows], Rows]) -> Rows:
    return {k: g[0] for k, g in then(one(mean(rows))).items()}


TABLE: dict[str, Callable[[Rows], Rows]] = {
    "identity": lambda r: r,
    "mean": mean,
    "var": each(lambda g: g.var(0, ddof=1)),
    "second_moment": each(lambda g: (g**2).mean(0)),
    "gram": lambda r: {"gram": flat(r) @ flat(r).T},
    "clip:max_norm=0.5 | mean": lambda r: mean(clipped(0.5)(r)),
    "mean | clip:max_norm=0.1": lambda r: aggregate(r, clipped(0.1)),
    "clip:max_norm=0.1,per=parameter | mean": lambda r: mean(by_parameter(clipped(0.1))(r)),
    "clip:max_norm=0.5 | square | mean": lambda r: mean(each(np.square)(clipped(0.5)(r))),
    "normalize | mean | norm": lambda r: aggregate(normalized()(r), norm),
    "norm:per=parameter": lambda r: {k: norms({k: g}, 2) for k, g in r.items()},
    "norm | var": lambda r: {"norm": norms(r, 2).var(ddof=1)},
    "topk:k=20 | mean": lambda r: mean(top(20)(r)),
    "center | square | mean": lambda r: mean(each(np.square)(centred(r))),
    "clip:max_norm=0.5 | center | norm": lambda r: norm(centred(clipped(0.5)(r))),
    "cosine:to=mean": lambda r: cosines(r, mean(r)),
}


Parts = list[tuple[Batch, tuple[Gradients, Problem, Batch]]]


@pytest.fixture(scope="module", params=backends.names())
def parts(request: pytest.FixtureRequest, setting: Setting) -> tuple[gradscope.Scope, Parts]:
    """What chains are given of three uneven batches."""
    scope = gradscope.Scope(setting[0], "cross_entropy", backend=request.param)
    whole, found = Batch.of(*setting[1:3]), []
    for rows in (slice(0, 4), slice(4, 5), slice(5, N)):
        batch = whole.select(rows)
        used = usable(scope.session, batch, scope.evaluate(batch))
        assert used is not None
        found.append((batch, used))
    return scope, found


@pytest.mark.parametrize("text", TABLE)
def test_a_chain_equals_brute_force(
    text: str, parts: tuple[gradscope.Scope, Parts], setting: Setting
) -> None:
    scope, given = parts
    (chain,) = prepare_chains(scope.session, [bind(text)], lambda: [batch for batch, _ in given])
    if chain.reducer is None:
        every = [chain.rows(*used).dense() for _, used in given]
        found = {name: torch.cat([rows[name] for rows in every]) for name in every[0]}
    else:
        found = accumulated(chain, (used for _, used in given))
    wanted = TABLE[text](setting[3])
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        scale = np.abs(value).max()
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-10 * scale)


def test_the_order_of_clip_and_mean_matters(setting: Setting) -> None:
    model, ids, targets, _ = setting
    scope = gradscope.Scope(model, "cross_entropy")
    inside = scope.expectation("clip:max_norm=0.1 | mean", ids, targets)
    outside = scope.expectation("mean | clip:max_norm=0.1", ids, targets)
    gap = sum(float((inside[k] - outside[k]).square().sum()) for k in inside) ** 0.5
    assert gap > 1e-3


def test_float32_sums_are_carried_in_float64() -> None:
    values = torch.full((512, 1), 1e8)
    values[::2] = 1.0
    found = run("mean", Gradients({"w": DenseBlock(values)}), range(1, 512))["w"]
    assert found.dtype == torch.float64 and float(found) == (1e8 + 1) / 2


def test_the_canonical_spelling_parses_to_itself() -> None:
    chain = bind(" clip : max_norm = 1 |mean| square ")
    assert chain.text == "clip:max_norm=1 | mean | square"
    assert bind(chain.text).text == chain.text
    assert bind("square", reduced=True).text == "square | mean"


@pytest.mark.parametrize(
    ("text", "words"),
    [("mean | sum", "one reducer only"), ("square | kfac", "cannot follow a transform")],
)
def test_chains_that_do_not_bind(text: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        bind(text)
    assert words in str(caught.value) and "^" in str(caught.value)


def test_a_function_is_a_stage(setting: Setting) -> None:
    """Alone, in a list with text, and two of one name in one pass; against dense rows."""
    model, ids, targets, rows = setting

    def halved(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: g / 2 for name, g in gradients.items()}

    def signed(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: g.sign() for name, g in gradients.items()}

    absolute = lambda g: {k: v.abs() for k, v in g.items()}  # noqa: E731
    negative = lambda g: {k: -v for k, v in g.items()}  # noqa: E731
    dense = {name: torch.from_numpy(np.asarray(value)) for name, value in rows.items()}
    with gradscope.Scope(model, "cross_entropy") as scope:
        alone = scope.expectation(halved, ids, targets)
        listed = scope.expectation([signed, "mean | abs"], ids, targets)
        several = scope.expectations([absolute, [negative, "sum"]], ids, targets)
    for name, g in dense.items():
        torch.testing.assert_close(alone[name], g.mean(0) / 2)
        torch.testing.assert_close(listed[name], g.sign().mean(0).abs(), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(several[0][name], g.abs().mean(0))
        torch.testing.assert_close(several[1][name], -g.sum(0))


def test_a_function_that_is_no_stage(setting: Setting) -> None:
    model, ids, targets, _ = setting
    mixed = lambda g: {k: v - v.mean(0) for k, v in g.items()}  # noqa: E731
    with gradscope.Scope(model, "cross_entropy") as scope:
        with pytest.raises(SpecError, match="returns a different"):
            scope.expectation(mixed, ids, targets)
        with pytest.raises(SpecError, match="Return a dict"):
            scope.expectation(lambda g: 1, ids, targets)
