"""The numbers of a summary against other formulas for the same things."""

import json
import math
import statistics

import numpy as np
import pytest

from gradscope.errors import ResultFileError, SpecError
from gradscope.stats import RunReport, Summary, summarize
from tests.stats.fakes import FakeChain, FakeFile, fake


@pytest.fixture
def file():
    return fake(60, seed=1)


def test_loss_and_norm_moments(file):
    summary = summarize(file)
    norms = [math.sqrt(math.fsum(x * x for x in row)) for row in file.flat.tolist()]
    assert summary.norm.mean == pytest.approx(statistics.fmean(norms), rel=1e-12)
    assert summary.norm.std == pytest.approx(statistics.stdev(norms), rel=1e-12)
    assert (summary.norm.min, summary.norm.max) == pytest.approx((min(norms), max(norms)))
    assert summary.loss.mean == pytest.approx(statistics.fmean(file.loss.tolist()), rel=1e-12)
    assert summary.loss.std == pytest.approx(statistics.stdev(file.loss.tolist()), rel=1e-12)
    assert (summary.loss.min, summary.loss.max) == (min(file.loss), max(file.loss))


def test_percentiles_interpolate_between_the_two_nearest(file):
    values = sorted(np.linalg.norm(file.flat, axis=1))
    for percent in (1, 5, 25, 50, 75, 90, 95, 99):
        place = percent / 100 * (len(values) - 1)
        low, part = int(place), place % 1
        expected = values[low] * (1 - part) + values[min(low + 1, len(values) - 1)] * part
        found = summarize(file).norm.percentiles[str(percent)]
        assert found == pytest.approx(expected, rel=1e-12)


def test_parameter_rows(file):
    rows = {row.name: row for row in summarize(file).parameters}
    assert list(rows) == list(file.gradients)
    whole = np.sum(np.var(file.flat, axis=0) + np.mean(file.flat, axis=0) ** 2) * file.n
    for name, g in file.gradients.items():
        row, flat = rows[name], g.reshape(file.n, -1)
        lengths = [math.hypot(*sample) for sample in flat.tolist()]
        assert row.shape == g.shape[1:]
        assert row.entries == flat.shape[1]
        assert row.mean_norm == pytest.approx(statistics.fmean(lengths), rel=1e-12)
        assert row.max_norm == pytest.approx(max(lengths), rel=1e-12)
        assert row.share == pytest.approx(np.einsum("np,np->", flat, flat) / whole, rel=1e-10)
        assert row.mean_gradient_norm == pytest.approx(math.hypot(*flat.mean(0)), rel=1e-12)
        # the denominator is the population variance, summed over entries
        expected = np.sum(flat.mean(0) ** 2) / np.sum(flat.var(axis=0, ddof=0))
        assert row.signal_to_noise == pytest.approx(expected, rel=1e-9)
    assert math.fsum(row.share for row in rows.values()) == pytest.approx(1.0, rel=1e-12)


def test_signal_to_noise_is_null_without_noise():
    g = np.tile(np.array([[3.0, 4.0]]), (5, 1))
    row = summarize(FakeFile({"w": g, "unused": 0 * g}, np.ones(5))).parameters
    assert row[0].signal_to_noise is None
    assert row[1].signal_to_noise is None
    assert (row[0].share, row[1].share) == (1.0, 0.0)


def test_largest_samples(file):
    rows = summarize(file, top=7).samples
    norms = np.linalg.norm(file.flat, axis=1)
    order = sorted(range(file.n), key=lambda i: -norms[i])[:7]
    assert [row.index for row in rows] == [file.index[i] for i in order]
    assert [row.loss for row in rows] == [file.loss[i] for i in order]
    assert [row.target for row in rows] == [file.target[i] for i in order]
    median = statistics.median(norms.tolist())
    assert [r.times_median for r in rows] == pytest.approx([norms[i] / median for i in order])


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (np.array([b"cat", b"dog"]), ["dog", "cat"]),
        (np.array([0.5, np.nan]), [None, 0.5]),
        (np.array([[1, 2], [3, 4]]), [None, None]),
        (None, [None, None]),
    ],
)
def test_targets_are_plain_values(target, expected):
    file = FakeFile({"w": np.array([[1.0], [2.0]])}, np.ones(2), target=target)
    assert [row.target for row in summarize(file).samples] == expected


def test_top_bounds(file):
    assert summarize(file, top=0).samples == ()
    assert len(summarize(file, top=1000).samples) == file.n
    with pytest.raises(SpecError, match="-1"):
        summarize(file, top=-1)


def test_samples_that_are_not_finite_change_nothing_else():
    broken, whole = fake(50, broken=(3, 17)), fake(50)
    kept = np.delete(np.arange(50), [3, 17])
    reduced = FakeFile(
        {name: g[kept] for name, g in whole.gradients.items()},
        whole.loss[kept],
        target=whole.target[kept],
        index=whole.index[kept],
    )
    with_them, without = summarize(broken), summarize(reduced)
    assert with_them.nonfinite.count == 2
    assert with_them.nonfinite.index == tuple(broken.index[[3, 17]])
    for part in ("loss", "norm", "noise_scale", "parameters", "samples"):
        assert getattr(with_them, part) == getattr(without, part)


def test_nothing_finite():
    summary = summarize(fake(3, broken=(0, 1, 2)))
    assert summary.nonfinite.count == 3
    assert summary.loss is None
    assert summary.norm is None
    assert summary.samples == ()
    assert all(row.mean_norm is None for row in summary.parameters)


def test_one_sample_has_no_spread():
    summary = summarize(fake(1))
    assert summary.norm.std is None
    assert summary.noise_scale.simple is None
    assert "two" in summary.noise_scale.flag


def test_file_facts(tmp_path):
    path = tmp_path / "out.h5"
    path.write_bytes(b"x" * 1234)
    clipped = FakeChain("clip:max_norm=1 | mean", reduced=True)
    given = {"path": str(path), "certificate": {"error": float("nan")}, "more": (clipped,)}
    facts = summarize(fake(5, **given)).file
    assert (facts.samples, facts.parameters, facts.entries) == (5, 4, 36 + 4 + 30 + 1)
    assert facts.bytes == 1234
    assert [(c.text, c.reduced) for c in facts.chains] == [
        ("identity", False),
        ("clip:max_norm=1 | mean", True),
    ]
    assert facts.backend == "hooks"
    assert facts.certificate == {"error": None}


def test_json_round_trip():
    summary = summarize(fake(30, broken=(2,)))
    text = json.dumps(summary.to_json(), allow_nan=False)
    document = json.loads(text)
    assert (document["schema"], document["version"]) == ("gradscope.stats", 1)
    assert "points" not in document
    read = Summary.from_json(document)
    assert read.to_json() == document
    assert read.noise_scale == summary.noise_scale


def test_json_names_are_stable():
    document = summarize(fake(12)).to_json()
    assert list(document) == [
        "schema", "version", "file", "loss", "norm", "clipping", "noise_scale", "batch_tests",
        "cabs", "signal", "directions", "parameters", "classes", "spectrum", "fisher", "jensen",
        "missing", "nonfinite", "duplicates", "nearest", "largest_losses", "most_opposed",
        "samples", "checks",
    ]  # fmt: skip
    assert list(document["parameters"][0]) == [
        "name", "shape", "entries", "mean_norm", "max_norm", "share", "mean_gradient_norm",
        "signal_to_noise", "noise_scale", "entry_signal_to_noise", "opposing",
    ]  # fmt: skip
    assert set(document["norm"]) == {"mean", "std", "min", "max", "percentiles", "histogram"}
    assert set(document["norm"]["percentiles"]) == {"1", "5", "25", "50", "75", "90", "95", "99"}
    assert set(document["clipping"]["by_share"]) == {"1", "5", "10", "50"}
    assert set(document["samples"][0]) == {
        "index", "id", "loss", "norm", "target", "times_median", "cosine"
    }  # fmt: skip
    assert set(document["noise_scale"]) == {
        "trace_covariance", "gradient_norm_squared", "simple", "flag", "simple_interval",
        "trace_covariance_interval", "gradient_norm_squared_interval",
    }  # fmt: skip


def test_run_report_json():
    report = RunReport(
        parameters=summarize(fake(5)).parameters,
        certificate={"error": float("inf"), "compared": (0, 3)},
        backend="hooks",
        samples=5,
        nonfinite=0,
        seconds=1.5,
    )
    document = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert (document["schema"], document["version"]) == ("gradscope.compute", 1)
    assert document["certificate"] == {"error": None, "compared": [0, 3]}
    assert document["path"] is None
    assert RunReport.from_json(document) == report


def test_mean_gradient_norm_must_be_recorded():
    class Old(FakeFile):
        @property
        def norm_attributes(self):
            return {}

    with pytest.raises(ResultFileError, match=r"'w' is not recorded"):
        summarize(Old({"w": np.ones((2, 2))}, np.ones(2)))


def test_points_keep_the_largest():
    n = 9000
    size = np.random.default_rng(0).permutation(n) + 1.0
    points = summarize(FakeFile({"w": size[:, None]}, size / 2)).points
    assert points.of == n
    assert len(points.norm) == len(set(points.norm)) == 4000
    assert set(points.norm) >= set(range(n - 1999, n + 1))
    assert min(points.norm) == 1
    assert np.allclose(np.array(points.loss) * 2, points.norm)
