"""Clipping, batch size, Jensen gap, Fisher: each against its definition."""

import numpy as np
import pytest

from gradscope.errors import SpecError
from gradscope.stats import summarize
from tests.stats.fakes import FakeChain, FakeFile, fake


@pytest.fixture
def file():
    return fake(200, seed=5)


def test_clipping(file):
    norms = sorted(np.linalg.norm(file.flat, axis=1))
    found = summarize(file, clip=(norms[49], 1e9)).clipping
    assert [c.clipped for c in found.asked] == [150 / 200, 0.0]
    for percent, clip in found.by_share.items():
        assert clip.norm == pytest.approx(np.percentile(norms, 100 - float(percent)), rel=1e-12)
        assert clip.clipped == float(percent) / 100


def test_cabs(file):
    found = summarize(file, learning_rate=0.5).cabs
    variance = np.sum(np.var(file.flat, axis=0))
    assert found.variance == pytest.approx(variance, rel=1e-9)
    assert found.unclipped == pytest.approx(0.5 * variance / file.loss.mean(), rel=1e-9)
    for rate, size in ((1e-6, 16), (1e6, 2048), (100 / found.per_learning_rate, 100)):
        assert summarize(file, learning_rate=rate).cabs.batch_size == size
    assert summarize(file).cabs.batch_size is None


def test_cabs_needs_a_positive_loss(file):
    found = summarize(FakeFile(file.gradients, -file.loss), learning_rate=1.0).cabs
    assert found.batch_size is None
    assert "loss" in found.flag


@pytest.mark.parametrize(
    "bad",
    [{"learning_rate": 0.0}, {"learning_rate": float("nan")}, {"clip": (-1.0,)}, {"nearest": 1}],
)
def test_arguments_out_of_range(file, bad):
    with pytest.raises(SpecError):
        summarize(file, **bad)


def test_jensen(file):
    inside = {k: np.sign(g).mean(0) for k, g in file.gradients.items()}
    outside = {k: np.sign(g.mean(0)) for k, g in file.gradients.items()}
    more = (
        FakeChain("sign | mean", inside, True),
        FakeChain("mean | sign", outside, True),
        FakeChain("clip:max_norm=1 | mean", inside, True),
        FakeChain("mean | clip:max_norm=2", outside, True),
    )
    (found,) = summarize(fake(200, seed=5, more=more)).jensen
    a, b = (np.concatenate([v.ravel() for v in side.values()]) for side in (inside, outside))
    assert found.transform == "sign"
    assert found.gap == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(b), rel=1e-12)
    assert found.cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), rel=1e-12)


def test_fisher(file):
    found = summarize(file).fisher
    moment = sum(np.outer(g, g) for g in file.flat) / file.n
    assert found.trace == pytest.approx(np.trace(moment), rel=1e-9)
    assert found.kind == "empirical"


def test_exact_fisher_is_the_stored_second_moment(file):
    """With exact labels a stored norm is an expectation: its square is no square norm."""
    run = {"spec": {"compute": {"labels": "exact"}}}
    assert summarize(fake(20, run=run)).fisher.trace is None
    second = {k: np.mean(g**2, 0) for k, g in file.gradients.items()}
    more = (FakeChain("second_moment", second, True),)
    found = summarize(fake(200, seed=5, run=run, more=more)).fisher
    assert found.kind == "exact"
    assert found.trace == pytest.approx(np.sum(file.flat**2) / file.n, rel=1e-9)
