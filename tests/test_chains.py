"""Chains against numpy, from dense gradients; E[T(g)] is not T(E[g])."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscope.blocks import DenseBlock, Gradients, OuterBlock, ScatterBlock, total
from gradscope.errors import SpecError
from gradscope.stages.chain import bind

N = 7


def gradients(n=N, seed=8):
    """An outer product, a table tied to one, a complex tensor and a vector, scales uneven."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64)

    scale = torch.logspace(-2, 2, n, dtype=torch.float64)
    index = torch.randint(0, 4, (n, 6), generator=g)
    blocks = {
        "w": OuterBlock.matrix(draw(n, 2, 4), draw(n, 2, 3)),
        "e": total(
            [ScatterBlock(index, draw(n, 6, 3), 4), OuterBlock.matrix(draw(n, 1, 4), draw(n, 1, 3))]
        ),
        "c": DenseBlock(torch.complex(draw(n, 2, 2), draw(n, 2, 2))),
        "b": DenseBlock(draw(n, 4)),
    }
    return Gradients(blocks).scale(scale)


def arrays(grads):
    return {name: value.numpy() for name, value in grads.dense().items()}


def norms(rows):
    return np.sqrt(sum((np.abs(a) ** 2).reshape(len(a), -1).sum(1) for a in rows.values()))


def times(factors, array):
    return factors.reshape(-1, *[1] * (array.ndim - 1)) * array


def reduced(text, grads, cuts=()):
    """Run a reducing chain over the batches between `cuts`."""
    chain, state = bind(text, reduced=True), None
    edges = [0, *cuts, grads.n]
    for a, b in pairwise(edges):
        state = chain.update(state, grads.select(slice(a, b)))
    return chain.result(state)


def compare(ours, right, rtol=1e-10):
    assert list(ours) == list(right)
    for name, value in right.items():
        assert tuple(ours[name].shape) == np.shape(value)
        size = np.abs(value).max()
        np.testing.assert_allclose(ours[name].numpy(), value, rtol=rtol, atol=1e-12 * size)


CUTS = [(), (3,), (1, 2, 6)]


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("max_norm", [0.1, 2.0, 1e9])
def test_mean_of_clipped(max_norm, cuts):
    grads = gradients()
    rows = arrays(grads)
    factors = np.minimum(1, max_norm / norms(rows))
    right = {name: times(factors, a).mean(0) for name, a in rows.items()}
    compare(reduced(f"clip:max_norm={max_norm} | mean", grads, cuts), right)
    compare(reduced(f"clip:max_norm={max_norm}", grads, cuts), right)  # mean is implied


@pytest.mark.parametrize("cuts", CUTS)
def test_clipped_mean(cuts):
    grads = gradients()
    means = {name: a.mean(0) for name, a in arrays(grads).items()}
    norm = np.sqrt(sum((np.abs(a) ** 2).sum() for a in means.values()))
    right = {name: a * min(1, 0.1 / norm) for name, a in means.items()}
    compare(reduced("mean | clip:max_norm=0.1", grads, cuts), right)


def test_the_order_matters():
    grads = gradients()
    inside = reduced("clip:max_norm=0.1 | mean", grads)
    outside = reduced("mean | clip:max_norm=0.1", grads)
    assert not torch.allclose(inside["w"], outside["w"], rtol=0.1)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(
    ("text", "fn"),
    [
        ("sum", lambda a, n: a.sum(0)),
        ("mean", lambda a, n: a.mean(0)),
        ("square | mean", lambda a, n: (np.abs(a) ** 2).mean(0)),
        ("square | sum", lambda a, n: (np.abs(a) ** 2).sum(0)),
        ("abs | mean", lambda a, n: np.abs(a).mean(0)),
        ("sign | mean", lambda a, n: (a / np.abs(a)).mean(0)),
        ("normalize | mean", lambda a, n: times(1 / n, a).mean(0)),
        ("normalize | square | mean", lambda a, n: (np.abs(times(1 / n, a)) ** 2).mean(0)),
        ("var", lambda a, n: a.var(0, ddof=1)),
        ("var:ddof=0", lambda a, n: a.var(0)),
        ("mean | square", lambda a, n: np.abs(a.mean(0)) ** 2),
        ("abs | var", lambda a, n: np.abs(a).var(0, ddof=1)),
    ],
)
def test_chains_against_numpy(text, fn, cuts):
    grads = gradients()
    rows = arrays(grads)
    sizes = norms(rows)
    compare(reduced(text, grads, cuts), {name: fn(a, sizes) for name, a in rows.items()})


def test_norms_of_samples_and_parameters():
    grads = gradients()
    rows = arrays(grads)
    compare(bind("norm").rows(grads).dense(), {"norm": norms(rows)})
    right = {name: norms({name: a}) for name, a in rows.items()}
    compare(bind("norm:per=parameter").rows(grads).dense(), right)


def test_rows_without_a_reducer():
    grads = gradients()
    rows = arrays(grads)
    chain = bind("clip:max_norm=0.5")
    assert chain.reducer is None
    factors = np.minimum(1, 0.5 / norms(rows))
    compare(chain.rows(grads).dense(), {k: times(factors, a) for k, a in rows.items()})


def test_a_zero_gradient_stays_zero():
    zero = Gradients({"w": DenseBlock(torch.zeros(3, 2))})
    for text in ["clip:max_norm=1", "normalize", "sign", "square", "abs", "identity"]:
        assert torch.equal(bind(text).rows(zero).dense()["w"], torch.zeros(3, 2))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(2, 12),
    st.data(),
    st.sampled_from([0, 1]),
    st.sampled_from([0.0, 1e3]),
)
def test_variance_of_any_split_is_numpys(seed, n, data, ddof, shift):
    """Also where the mean is a thousand times the spread."""
    cuts = data.draw(st.lists(st.integers(1, n - 1), unique=True, max_size=4).map(sorted))
    g = torch.Generator().manual_seed(seed)
    values = shift + torch.randn(n, 3, generator=g, dtype=torch.float64)
    grads = Gradients({"w": DenseBlock(values)})
    ours = reduced(f"var:ddof={ddof}", grads, cuts)["w"].numpy()
    right = values.numpy().var(0, ddof=ddof)
    # within a batch squares are summed uncentred, so shift² is what rounding is relative to
    np.testing.assert_allclose(ours, right, rtol=1e-10, atol=1e-14 * n * (1 + shift**2))


def test_variance_of_too_few_samples_is_nan():
    one = Gradients({"w": DenseBlock(torch.ones(1, 2))})
    assert reduced("var", one)["w"].isnan().all()
    assert torch.equal(reduced("var:ddof=0", one)["w"], torch.zeros(2, dtype=torch.float64))


def test_float32_sums_are_carried_in_float64():
    values = torch.full((4096, 1), 1e8)
    values[::2] = 1.0
    ours = reduced("mean", Gradients({"w": DenseBlock(values)}), cuts=range(1, 4096))
    assert ours["w"].dtype == torch.float64
    assert float(ours["w"]) == (1e8 + 1) / 2


def test_the_canonical_spelling_parses_to_itself():
    chain = bind(" clip : max_norm = 1 |mean| square ")
    assert chain.text == "clip:max_norm=1 | mean | square"
    assert bind(chain.text).text == chain.text
    assert bind("square", reduced=True).text == "square | mean"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("clop:max_norm=1", "'clip'"),
        ("clip", "max_norm"),
        ("clip:max_norm=0", "positive"),
        ("clip:max_norm=nan", "positive"),
        ("clip:max_norm=big", "float"),
        ("mean | sum", "second reducer"),
        ("sum:x=1", "takes no arguments"),
        ("norm:per=layer", "parameter"),
        ("var:ddof=-1", "negative"),
        ("var:ddof=0.5", "int"),
    ],
)
def test_chains_that_do_not_bind(text, words):
    with pytest.raises(SpecError) as caught:
        bind(text)
    assert words in str(caught.value) and "^" in str(caught.value)
