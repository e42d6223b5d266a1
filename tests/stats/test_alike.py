"""Duplicates that are planted are found, and flipped labels rank high."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import gradscope
from gradscope.stats import measure, summarize
from tests.stats.fakes import FakeChain, FakeFile
from tests.stats.test_file import write

DIGITS = Path(__file__).parents[2] / "sample_models" / "digits_mlp"


def with_copies(noise=0.0):
    """Sixty gradients, of which 41 is 7, and 52 is 30 but for a little noise."""
    rng = np.random.default_rng(0)
    g = rng.normal(size=(60, 40)) * np.exp(rng.normal(size=(60, 1)))
    g[41], g[52] = g[7], g[30] * (1 + 0.001 * rng.normal(size=40))
    g[11] = g[12] = 0.0
    loss = np.linalg.norm(g, axis=1) + 1
    return FakeFile({"w": g[:, :30].reshape(60, 5, 6), "v": g[:, 30:]}, loss, np.arange(60) % 3)


def pairs(found):
    return [(pair.first, pair.second) for pair in found]


def test_duplicates_from_rows():
    found = summarize(with_copies()).duplicates
    assert (found.source, found.complete) == ("rows", True)
    assert pairs(found.same) == [(7, 41)]
    assert pairs(found.near) == [(30, 52)]
    assert found.same[0].distance == 0.0
    assert found.same[0].same_target is False
    g = with_copies().flat
    apart = np.linalg.norm(g[30] - g[52]) / max(np.linalg.norm(g[30]), np.linalg.norm(g[52]))
    assert found.near[0].distance == pytest.approx(apart, rel=1e-9)


def test_duplicates_from_a_file(tmp_path):
    write(tmp_path / "out.h5", with_copies(), torch.float32)
    with gradscope.open(tmp_path / "out.h5") as file:
        found = summarize(file).duplicates
    assert pairs(found.same) == [(7, 41)]
    assert pairs(found.near) == [(30, 52)]


def test_duplicates_from_gram_and_from_norms():
    file = with_copies()
    gram = FakeChain("gram", {"gram": file.flat @ file.flat.T}, True)
    for more, source, near in (((gram,), "gram", [(30, 52)]), ((), "norms", [])):
        found = summarize(
            FakeFile(file.gradients, file.loss, file.target, rows=False, more=more)
        ).duplicates
        assert found.source == source
        assert pairs(found.same) == [(7, 41)]
        assert pairs(found.near) == near


def test_no_duplicates_among_random_gradients():
    rng = np.random.default_rng(1)
    found = summarize(FakeFile({"w": rng.normal(size=(500, 30))}, rng.random(500))).duplicates
    assert (found.same, found.near) == ((), ())


@pytest.fixture(scope="module")
def digits():
    sys.path.insert(0, str(DIGITS))
    try:
        from model import build
    finally:
        sys.path.remove(str(DIGITS))
        sys.modules.pop("model", None)
    model = build()
    model.load_state_dict(load_file(DIGITS / "weights.safetensors"))
    data = np.load(DIGITS / "data.npz")
    images = torch.tensor(data["images"] / 16.0, dtype=torch.float64)
    return model.double().eval(), images, torch.tensor(data["labels"]).long()


def test_flipped_labels_rank_high(digits):
    """1% of the digits get another label: they have the largest losses, and large norms."""
    model, images, labels = digits
    generator = torch.Generator().manual_seed(0)
    n = len(labels) // 100
    flipped = torch.randperm(len(labels), generator=generator)[:n]
    labels = labels.clone()
    labels[flipped] = (labels[flipped] + torch.randint(1, 10, (n,), generator=generator)) % 10
    with gradscope.Scope(model, "cross_entropy") as scope:
        summary = measure(scope, images, labels, top=5 * n)
    planted = set(flipped.tolist())

    def found(rows, k):
        return len(planted & {row.index for row in rows[:k]})

    assert found(summary.largest_losses, n) == 16  # of 17: precision at 17 is 0.94
    assert found(summary.samples, n) == 6  # images that the model gets wrong have norms as large
    assert found(summary.samples, 5 * n) == 17  # but all are among the largest 5%
    assert found(summary.most_opposed, n) == 5


def test_a_copied_image_is_found(digits):
    model, images, labels = digits
    images, labels = images[:300].clone(), labels[:300].clone()
    images[200], labels[200] = images[17], labels[17]
    with gradscope.Scope(model, "cross_entropy") as scope:
        found = measure(scope, images, labels).duplicates
    assert pairs(found.same) == [(17, 200)]
