"""Measuring in memory, and recording a training step by step."""

import json
import os

import numpy as np
import pytest
import torch
from torch import nn

import gradscope
from gradscope.errors import OutputError, ResultFileError
from gradscope.stats import summarize
from gradscope.training import History, measure, read_history, record
from gradscope.training.history import End, HistoryReader, append
from tests.stats.fakes import fake


@pytest.fixture
def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    return model, torch.randn(40, 5, dtype=torch.float64), torch.randint(3, (40,))


def test_a_measurement_has_the_numbers_of_the_gradients(problem):
    model, inputs, targets = problem
    with gradscope.Scope(model, "cross_entropy") as scope:
        summary = measure(scope, inputs, targets, top=40)
        rows = scope.per_sample_gradients(inputs, targets)
    g = torch.cat([row.flatten(1) for row in rows.values()], 1).numpy()
    norms, mean = np.linalg.norm(g, axis=1), g.mean(0)
    assert summary.norm.mean == pytest.approx(norms.mean(), rel=1e-9)
    trace = np.trace(np.cov(g, rowvar=False))
    assert summary.noise_scale.trace_covariance == pytest.approx(trace, rel=1e-9)
    cosines = {row.index: row.cosine for row in summary.samples}
    expected = g @ mean / norms / np.linalg.norm(mean)
    assert [cosines[i] for i in range(40)] == pytest.approx(list(expected), rel=1e-9)
    assert summary.noise_scale.simple_interval is not None
    assert len(summary.classes.rows) == 3
    assert all(check.passed for check in summary.checks)


def test_samples_that_are_not_finite_are_left_out(problem):
    model, inputs, targets = problem
    inputs[3] = float("nan")
    kept = torch.arange(40) != 3
    with gradscope.Scope(model, "cross_entropy", verify="never") as scope:
        found = measure(scope, inputs, targets)
        without = measure(scope, inputs[kept], targets[kept])
    assert found.nonfinite.index == (3,)
    for key in ("trace_covariance", "gradient_norm_squared"):
        expected = getattr(without.noise_scale, key)
        assert getattr(found.noise_scale, key) == pytest.approx(expected, rel=1e-9)
    assert found.directions.opposing == without.directions.opposing


def test_steps_are_recorded_and_read(tmp_path):
    path = tmp_path / "run.jsonl"
    for step in (0, 10, 20, 10):  # step 10 again, after a restart
        record(path, step, summarize(fake(30, seed=step)))
    found = read_history(path)
    assert [step.step for step in found.steps] == [0, 10, 20]
    assert len(path.read_text().splitlines()) == 4
    summary = summarize(fake(30, seed=20))
    assert found.steps[2].noise_scale == summary.noise_scale
    assert found.steps[2].norm_median == summary.norm.median
    assert found.steps[2].parameters[0].signal_to_noise == summary.parameters[0].signal_to_noise
    lengths = [row.mean_gradient_norm for row in summary.parameters]
    assert found.steps[2].mean_gradient_norm == pytest.approx(np.linalg.norm(lengths))
    assert History.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize("text", ["", "{}\n", "no\n", '{"schema": "gradscope.step"}\n', "\xff"])
def test_what_is_no_history(tmp_path, text):
    path = tmp_path / "run.jsonl"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ResultFileError):
        read_history(path)


def test_a_history_is_read_as_it_grows(tmp_path):
    path = tmp_path / "run.jsonl"
    append(path)
    reader = HistoryReader(path)
    assert reader.read() == (None, [])
    first, second = (record(path, step, summarize(fake(9, seed=step))) for step in (5, 10))
    history, new = reader.read()
    assert list(history.steps) == new == [first, second]
    whole = path.read_bytes()
    third = record(path, 15, summarize(fake(9)))
    all_of_it = path.read_bytes()
    for cut in (len(whole) + 1, len(all_of_it) - 2):  # what a writer has not finished
        path.write_bytes(all_of_it[:cut])
        assert reader.read() == (history, [])
        assert read_history(path) == history
    path.write_bytes(all_of_it[:-1])  # all but the end of the line
    assert reader.read()[1] == [third]
    path.write_bytes(all_of_it)
    assert reader.read()[1] == []
    append(path, End(step=20, reason="why"))
    assert reader.read()[0].end.text == "ended at step 20: why"
    again = record(path, 15, summarize(fake(8)))  # it was continued
    history, new = reader.read()
    assert history.end is None
    assert history.steps == (first, second, again)
    path.unlink()
    record(path, 1, summarize(fake(9)))
    assert [step.step for step in reader.read()[0].steps] == [1]
    assert read_history(path) == reader.read()[0]


def test_lines_that_are_none_are_left_out_and_told(tmp_path):
    path = tmp_path / "run.jsonl"
    step = record(path, 5, summarize(fake(9)))
    good = path.read_text()
    later = json.dumps({**json.loads(good), "step": 6, "of a later version": 1})
    hostile = [
        good[:40],
        "[" * 100_000,
        "\x00\x1b[2J",
        good.replace('"step": 5', '"step": 1e999').strip(),
        good.replace('"step": 5', f'"step": {10**400}').strip(),
        good.replace('"step": 5', '"step": -1').strip(),
        '{"schema": "gradscope.end"}',
        "null",
    ]
    path.write_text("\n".join([good.strip(), "", *hostile, later, good[:30]]), "utf-8")
    record(path, 7, summarize(fake(9)))  # after what a stop has cut short
    found = read_history(path)
    assert [one.step for one in found.steps] == [5, 6, 7]
    assert found.steps[0] == step
    assert found.broken == (*range(3, 11), 12)
    (warning,) = found.overview().warnings
    assert warning.startswith("ignored 9 lines")
    assert "3, 4, 5, 6, 7, ..." in warning


def test_steps_with_samples_left_out_are_told(tmp_path):
    path = tmp_path / "run.jsonl"
    for step, broken in ((1, ()), (2, (0, 4)), (3, ()), (4, range(9))):
        record(path, step, summarize(fake(9, broken=tuple(broken))))
    (warning,) = read_history(path).overview().warnings
    assert warning == "samples without a finite gradient are ignored at 2 steps: 2, 4"


def test_where_nothing_can_be_written(tmp_path):
    summary = summarize(fake(5))
    with pytest.raises(OutputError, match="jsonl"):
        record(tmp_path / "run.json", 0, summary)
    with pytest.raises(OutputError, match="No such file"):
        record(tmp_path / "absent" / "run.jsonl", 0, summary)
    os.mkfifo(tmp_path / "pipe.jsonl")  # would be waited for
    for name, told in (("absent", "No such file"), ("pipe", "not a regular file")):
        with pytest.raises(ResultFileError, match=told):
            read_history(tmp_path / f"{name}.jsonl")
