"""The attribution benchmark on a tiny task."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import gradscope
from benchmarks.attribution import forms, run, size, truth
from benchmarks.attribution.__main__ import document, table
from benchmarks.attribution.methods import METHODS, Method
from benchmarks.attribution.tasks import TASKS, Task
from gradscope.attribution.lds import Lds, lds


@pytest.fixture(params=list(TASKS))
def tiny(request: pytest.FixtureRequest) -> Task:
    """Each task with few samples and few steps."""
    return replace(TASKS[request.param], size=12, queries=5, epochs=2, batch=6)


def test_the_same_indices_and_seed_give_the_same_model(tiny: Task) -> None:
    before = torch.get_rng_state()
    first, second = (tiny.fit(np.arange(9), seed=3) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    other = tiny.fit(np.arange(9), seed=4)
    assert not np.array_equal(tiny.losses(first), tiny.losses(other))


def test_queries_are_no_training_samples(tiny: Task) -> None:
    whole = replace(tiny, size=300, queries=100)
    inputs, _ = whole.samples
    assert whole.train[0].shape == (300, *inputs.shape[1:])
    rows = {tuple(x.flatten().tolist()) for x in whole.query[0]}
    assert not rows & {tuple(x.flatten().tolist()) for x in whole.train[0]}


def test_losses_are_the_training_loss(tiny: Task) -> None:
    model = tiny.fit(np.arange(12), seed=0)
    inputs, targets = tiny.query
    logits = model(inputs).detach().double().flatten(0, -2)
    chosen = logits.gather(1, targets.reshape(-1, 1)).squeeze(1)
    expected = (logits.exp().sum(1).log() - chosen).reshape(5, -1).mean(1)
    np.testing.assert_allclose(tiny.losses(model), expected, rtol=1e-5)


def test_a_truth_that_was_stopped_goes_on_to_the_same_file(tiny: Task, tmp_path: Path) -> None:
    whole = truth.make(tmp_path / "whole.npz", tiny, seeds=2, subsets=3)
    part = tmp_path / "part.npz"
    stopped = truth.start(part, tiny, seeds=2, subsets=3)
    for _ in zip(range(4), truth.retrain(tiny, stopped), strict=False):
        pass
    assert np.isnan(stopped.losses).any() and not np.isnan(stopped.losses).all()
    truth.save(part, stopped)
    np.testing.assert_array_equal(
        truth.make(part, tiny, seeds=2, subsets=3).losses.astype(np.float16),
        whole.losses.astype(np.float16),
    )
    model = tiny.fit(np.flatnonzero(whole.subsets[2]), truth.FIRST_SEED + 1)
    np.testing.assert_array_equal(whole.losses[1, 2], tiny.losses(model))


def test_halves_hold_half_of_the_samples() -> None:
    drawn = truth.halves(11, 50)
    assert drawn.shape == (50, 11) and (drawn.sum(1) == 5).all()
    assert len(np.unique(drawn, axis=0)) > 45


@pytest.mark.parametrize("name", list(TASKS))
def test_the_shipped_truth_fits_its_task(name: str) -> None:
    found = truth.load(truth.FOLDER / f"{name}.npz")
    task = TASKS[name]
    assert found.subsets.shape == (truth.SUBSETS, task.size)
    assert found.losses.shape[1:] == (truth.SUBSETS, task.queries)
    assert np.isfinite(found.mean).all()
    one, other = found.complete[0].T, found.complete[1].T  # another seed: the same subsets matter
    alike = np.nanmean([stats.spearmanr(a, b).statistic for a, b in zip(one, other, strict=True)])
    assert alike > 0.2


@pytest.mark.sampled
@pytest.mark.filterwarnings("default")  # those of other libraries are no errors of ours
@pytest.mark.parametrize("method", [k for k, m in METHODS.items() if m.present])
def test_a_method_scores_every_pair(method: str, tiny: Task) -> None:
    scores = METHODS[method].scores(tiny, tiny.fit(np.arange(12), seed=0))
    assert scores.shape == (5, 12) and np.isfinite(scores).all()
    assert len(np.unique(scores)) > 20


@pytest.mark.full
def test_a_cell_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    task, right = TASKS["mlp"], truth.load(truth.FOLDER / "mlp.npz")
    for seed in (0, 1):
        torch.save(task.module.build().state_dict(), tmp_path / f"{seed}.pt")
    found = run.measure("mlp", "products of inputs", (0, 1), tmp_path)
    scores = METHODS["products of inputs"].scores(task, torch.nn.Identity())
    expected = lds(scores, right.subsets, right.mean)
    assert found.one is not None and found.several is not None
    np.testing.assert_allclose(found.one.by_query, expected.by_query, rtol=1e-9)
    assert found.one.mean == pytest.approx(found.several.mean) == pytest.approx(expected.mean)
    assert found.seconds is not None and found.seconds >= 0.0


@pytest.mark.full
def test_a_library_that_is_absent_or_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = Method(METHODS["chance"].scores, needs="no_such_package")
    monkeypatch.setitem(METHODS, "chance", absent)
    assert run.measure("mlp", "chance", (0,), tmp_path).reason == "no_such_package is not installed"
    (tmp_path / "0.pt").write_bytes(b"no checkpoint")
    assert "UnpicklingError" in run.measure("mlp", "products of inputs", (0,), tmp_path).reason


def test_the_table_shows_the_best_and_what_failed() -> None:
    def cell(mean: float) -> run.Cell:
        found = Lds(np.full(2, mean), mean, mean - 0.1, mean + 0.1, 9)
        return run.Cell(found, found, 1.5, 2_000_000)

    rows = {"a": {"mlp": cell(0.5)}, "b": {"mlp": run.Cell(reason="gone")}, "c": {"mlp": cell(0.4)}}
    lines = table(rows, ["mlp"], 5)
    told = "(0.400 to 0.600)"
    assert lines[2] == f"| a | **0.500** {told} | **0.500** {told} |"
    assert lines[3] == "| b | (1) |  |" and lines[-1] == "1. gone"
    assert lines[4] == "| c | 0.400 (0.300 to 0.500) | 0.400 (0.300 to 0.500) |"
    assert "| a | 1.50 | 2 |" in lines and "| b |  |  |" in lines
    assert json.dumps(document(rows))


@pytest.mark.parametrize("kind", ["faults", "outliers", "copies"])
def test_planted_samples_are_what_they_are_called(kind: str) -> None:
    task = replace(TASKS["mlp"], size=50, queries=6)
    made, places = forms.planted(task, kind, seed=1)
    (inputs, labels), (before, own) = made.train, task.train
    same = np.setdiff1d(np.arange(50), places)
    assert torch.equal(inputs[same], before[same]) and torch.equal(labels[same], own[same])
    if kind == "faults":
        assert len(places) == 5 and (labels[places] != own[places]).all()
        assert torch.equal(inputs, before) and labels.max() < 10
    elif kind == "outliers":
        first, second = np.split(places, 2)
        assert torch.equal(inputs[first], inputs[second])
        assert (labels[first] != labels[second]).all()
    else:
        query, wanted = task.query
        assert torch.equal(labels[places], wanted)
        assert 0.05 < float((inputs[places] - query).std()) < 0.2


def test_shares_count_planted_samples() -> None:
    values, places = np.zeros((3, 50)), np.array([4, 8, 9])
    values[:, [4, 8]], values[:, 9], values[0, :5] = -1, 2, 3
    wrong = np.array([False, True, False])
    each, by_sum = forms.shares("faults", values, places, wrong)
    assert each == pytest.approx(2 / 3) and by_sum == pytest.approx(1 / 3)
    assert forms.shares("outliers", values, places, wrong) == [pytest.approx(3 / 15)]
    assert forms.shares("copies", values, places, wrong) == [pytest.approx(1 / 3)]


def test_each_curvature_and_form_is_a_line_of_the_table() -> None:
    task = replace(TASKS["mlp"], size=40, queries=8, epochs=1)
    small = truth.start(Path("none.npz"), task, 1, 4)
    small.losses[:] = np.random.default_rng(0).random(small.losses.shape)
    found = forms.measure(task, small, (0,))
    lines = forms.table("MLP", found)
    assert len(lines) == 2 + 2 * len(forms.CURVATURES) and all(
        line.count("|") == 8 for line in lines
    )
    np.testing.assert_allclose(
        found["ekfac", "relative"][[0, 1, 3, 4]], found["ekfac", "cosine"][[0, 1, 3, 4]]
    )


def test_a_size_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = size.Size(1, 8, 2, 16, train=3, query=2, tied=True)
    monkeypatch.setitem(size.SIZES, "tiny", tiny)
    cell = size.run("tiny", "gradscope")
    assert [*cell.seconds] == ["factors", "scores"] and min(cell.seconds.values()) > 0
    layers = ["blocks.0.attention.*", "blocks.0.mlp.*"]  # no table, no norm, and the head is tied
    scope = gradscope.Scope(tiny.model(), size.loss, layers)
    data = tiny.samples(3, 1), tiny.samples(2, 2)
    train, query = ((scope, *samples) for samples in data)
    wanted = gradscope.attribute(train, query, "ekfac", 0.1).values
    np.testing.assert_allclose(cell.scores, wanted, rtol=1e-4)


@pytest.mark.skipif(find_spec("kronfluence") is None, reason="needs kronfluence")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_both_tools_have_the_same_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors, eigenvalues, damping and layers agree, as two libraries compute them."""
    tiny = size.Size(2, 16, 2, 32, train=6, query=3)
    monkeypatch.setitem(size.SIZES, "tiny", tiny)
    ours, theirs = (np.array(size.run("tiny", tool).scores) for tool in size.TOOLS)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(ours).max())
