"""Two files against numpy on both."""

from dataclasses import replace

import numpy as np
import pytest

from gradscope.errors import SpecError
from gradscope.stats import Difference, difference
from tests.stats.fakes import fake

DATA = {"dataset_sha256": "same"}


@pytest.fixture
def files():
    first = fake(50, seed=1, attributes=DATA)
    moved = {k: g + 0.1 * fake(50, seed=2).gradients[k] for k, g in first.gradients.items()}
    return first, replace(first, gradients=moved, loss=first.loss * 0.8)


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


@pytest.mark.parametrize("chain", ["rows", "mean"])
def test_directions(files, chain):
    found = difference(*(file.holding(chain) for file in files))
    means = [file.flat.mean(0) for file in files]
    assert found.cosine == pytest.approx(cosine(*means), rel=1e-9)
    for row in found.parameters:
        a, b = (file.gradients[row.name].mean(0).ravel() for file in files)
        assert row.cosine == pytest.approx(cosine(a, b), rel=1e-9)
        assert row.mean_gradient_norm.ratio == pytest.approx(
            np.linalg.norm(b) / np.linalg.norm(a), rel=1e-9
        )
        norms = [np.linalg.norm(f.gradients[row.name].reshape(50, -1), axis=1) for f in files]
        assert row.mean_norm.second == pytest.approx(norms[1].mean(), rel=1e-9)


def test_samples_that_moved_most(files):
    found = difference(*files, top=50)
    assert found.same_data
    assert found.exact
    apart = np.linalg.norm(files[1].flat - files[0].flat, axis=1)
    order = np.argsort(-apart)
    assert [row.index for row in found.samples] == [files[0].index[k] for k in order]
    assert [row.moved for row in found.samples] == pytest.approx(list(apart[order]), rel=1e-9)


def test_samples_are_matched_by_index(files):
    first, second = files
    order = np.random.default_rng(0).permutation(50)[:30]
    part = replace(
        second,
        gradients={k: g[order] for k, g in second.gradients.items()},
        loss=second.loss[order],
        index=second.index[order],
        target=second.target[order],
    )
    found = difference(first, part, top=30)
    assert found.common == 30
    apart = dict(zip(first.index, np.linalg.norm(second.flat - first.flat, axis=1), strict=True))
    for row in found.samples:
        assert row.moved == pytest.approx(apart[row.index], rel=1e-9)


def test_without_rows_the_least_movement(files):
    found = difference(*(file.holding() for file in files), top=50)
    assert not found.exact
    assert found.cosine is None
    norms = [np.linalg.norm(file.flat, axis=1) for file in files]
    assert [row.moved for row in found.samples] == pytest.approx(
        sorted(abs(norms[1] - norms[0]), reverse=True)
    )


def test_other_data_are_not_matched(files):
    found = difference(files[0], replace(files[1], attributes={"dataset_sha256": "other"}))
    assert (found.same_data, found.samples, found.common) == (False, (), 0)
    assert found.cosine is not None


def test_parameters_of_one_alone(files):
    first, second = files
    other = {k: g for k, g in second.gradients.items() if k != "scale"} | {
        "fc.weight": np.ones((50, 2, 2))
    }
    found = difference(first, replace(second, gradients=other))
    assert [row.name for row in found.parameters] == ["[conv1].weight", "[conv1].bias"]
    assert found.only_first == ("fc.weight", "scale")
    assert found.only_second == ("fc.weight",)
    with pytest.raises(SpecError, match="no parameter"):
        difference(first, replace(second, gradients={"scale": np.ones((50, 2, 2))}))


def test_ratio_of_the_empirical_to_the_exact_fisher(files):
    first = files[0]
    moments = first.chain("second")
    moments.update({name: 2 * values for name, values in moments.items()})
    run = {"spec": {"compute": {"labels": "exact"}}}
    exact = replace(first, run=run, more=(moments,))
    found = difference(first, exact)
    assert [f.kind for f in found.fisher] == ["empirical", "exact"]
    assert found.fisher_trace.ratio == pytest.approx(2.0)


def test_json_round_trip(files):
    found = difference(*files)
    assert Difference.from_json(found.to_json()) == found.model_copy(update={"norms": ()})
    assert found.to_json()["schema"] == "gradscope.stats.difference"
