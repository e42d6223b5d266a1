"""What needs products of gradients, against numpy on the raw gradients."""

import math

import numpy as np
import pytest

from gradscope.stats import Data, Options, summarize
from gradscope.stats.products import Limits
from tests.stats.fakes import FakeChain, FakeFile, fake

CLOSE = 1e-9


@pytest.fixture
def file():
    return fake(80, seed=3)


def fakes_with(file, **chains):
    """The same file without rows, with these chains instead."""
    known = {
        "gram": FakeChain("gram", {"gram": file.flat @ file.flat.T}, True),
        "cosine": FakeChain("cosine:to=mean", {"cosine": cosines(file)}),
        "mean": FakeChain("mean", {k: g.mean(0) for k, g in file.gradients.items()}, True),
        "second": FakeChain(
            "second_moment", {k: np.mean(g**2, 0) for k, g in file.gradients.items()}, True
        ),
        "project": FakeChain("project:dim=6", {"project": file.flat[:, :6]}),
    }
    more = tuple(known[name] for name in chains.pop("chains"))
    given = {k: getattr(file, k) for k in ("gradients", "loss", "target", "index")}
    return FakeFile(**(given | {"rows": False, "more": more} | chains))


def cosines(file):
    g = file.flat
    mean = g.mean(0)
    return np.array([row @ mean / math.hypot(*row) / math.hypot(*mean) for row in g])


@pytest.mark.parametrize("chains", ["rows", ("gram",), ("cosine",)])
def test_batch_tests(file, chains):
    given = file if chains == "rows" else fakes_with(file, chains=chains)
    found = summarize(given).batch_tests
    g, n = file.flat, file.n
    mean = g.mean(0)
    deviations, along = g - mean, g @ mean
    # variances of the mean gradient: whole, along itself, across
    scale = n * (mean @ mean)
    assert found.norm == pytest.approx(np.sum(deviations**2) / (n - 1) / scale, rel=CLOSE)
    inner = np.var(along, ddof=1) / scale / (mean @ mean)
    assert found.inner_product == pytest.approx(inner, rel=CLOSE)
    across = g - np.outer(along / (mean @ mean), mean)
    assert found.orthogonality == pytest.approx(np.sum(across**2) / (n - 1) / scale, rel=CLOSE)
    assert found.norm == pytest.approx(found.inner_product + found.orthogonality, rel=1e-12)
    plug_in = np.trace(np.cov(g, rowvar=False)) / (mean @ mean)
    assert found.plug_in_noise_scale == pytest.approx(plug_in, rel=CLOSE)


def test_jackknife_is_leaving_each_sample_out(file):
    found = summarize(file).noise_scale
    g, n = file.flat, file.n

    def estimates(rows):
        trace = np.trace(np.cov(rows, rowvar=False))
        return trace, rows.mean(0) @ rows.mean(0) - trace / len(rows)

    left = np.array([estimates(np.delete(g, i, axis=0)) for i in range(n)])
    covariance = (n - 1) / n * (left - left.mean(0)).T @ (left - left.mean(0))
    half = (found.trace_covariance_interval.high - found.trace_covariance_interval.low) / 2
    t = 1.9904502  # 97.5th percentile of Student's t with 79 degrees of freedom, from a table
    assert half == pytest.approx(t * np.sqrt(covariance[0, 0]), rel=1e-6)
    trace, signal = estimates(g)
    for end in (found.simple_interval.low, found.simple_interval.high):
        if end:  # Fieller: at the ends trace − B·signal is t standard errors from zero
            error = np.sqrt([1, -end] @ covariance @ [1, -end])
            assert abs(trace - end * signal) == pytest.approx(t * error, rel=1e-6)


@pytest.mark.parametrize(("n", "entries", "mean"), [(60, 30, 0.3), (200, 50, 0.1), (100, 20, 0.05)])
def test_the_planted_noise_scale_is_in_its_interval(n, entries, mean):
    """95 times in 100: 400 draws of isotropic Gaussians, to within two binomial deviations."""
    rng = np.random.default_rng(n)
    inside, bounded = 0, 0
    for _ in range(400):
        g = rng.normal(mean, 1.0, (n, entries))
        interval = summarize(FakeFile({"w": g}, np.ones(n)), top=0).noise_scale.simple_interval
        inside += interval.low <= 1 / mean**2 <= (interval.high or math.inf)
        bounded += interval.high is not None
    assert inside >= 400 * 0.95 - 2 * math.sqrt(400 * 0.95 * 0.05)
    if mean == 0.3:
        assert bounded > 390  # an interval that says something


@pytest.mark.parametrize("chains", ["rows", ("mean", "second")])
def test_signal_by_entry(file, chains):
    summary = summarize(file if chains == "rows" else fakes_with(file, chains=chains))
    g, n = file.flat, file.n
    ratios = g.mean(0) ** 2 / g.var(0)
    assert summary.signal.mean_entry == pytest.approx(ratios.mean(), rel=CLOSE)
    evidence = 1 - n * np.mean(g.mean(0) ** 2 / g.var(0, ddof=1))
    assert summary.signal.evidence == pytest.approx(evidence, rel=CLOSE)
    assert summary.signal.stop is bool(evidence > 0)
    assert (summary.signal.entries, summary.signal.noiseless) == (g.shape[1], 0)
    for row, gradient in zip(summary.parameters, file.gradients.values(), strict=True):
        each = gradient.mean(0) ** 2 / gradient.var(0)
        assert row.entry_signal_to_noise == pytest.approx(each.mean(), rel=CLOSE)


def test_evidence_tells_noise_from_signal():
    noise = np.random.default_rng(0).normal(size=(300, 400))
    for shift, stop in ((0.0, False), (0.5, False)):
        found = summarize(FakeFile({"w": noise + shift}, np.ones(300))).signal
        assert found.stop is stop or abs(found.evidence) < 0.3
    centred = noise - 0.9 * noise.mean(0)
    assert summarize(FakeFile({"w": centred}, np.ones(300))).signal.stop is True


def test_noiseless_entries_are_left_out():
    g = np.random.default_rng(0).normal(1.0, 1.0, (40, 6))
    g[:, 2], g[:, 4] = 0.0, 3.0
    found = summarize(FakeFile({"w": g}, np.ones(40))).signal
    kept = g[:, [0, 1, 3, 5]]
    assert (found.entries, found.noiseless) == (4, 2)
    assert found.mean_entry == pytest.approx(np.mean(kept.mean(0) ** 2 / kept.var(0)), rel=CLOSE)


@pytest.mark.parametrize("chains", ["rows", ("gram",), ("cosine",)])
def test_directions(file, chains):
    summary = summarize(file if chains == "rows" else fakes_with(file, chains=chains), top=80)
    expected = cosines(file)
    found = summary.directions
    assert found.cosine.mean == pytest.approx(expected.mean(), rel=CLOSE)
    assert found.percentiles["25"] == pytest.approx(np.percentile(expected, 25), rel=CLOSE)
    assert found.opposing == np.mean(expected < 0)
    assert sum(found.histogram.counts) == found.samples == 80
    by_index = {row.index: row.cosine for row in summary.samples}
    assert [by_index[i] for i in file.index] == pytest.approx(list(expected), rel=CLOSE)
    products = file.flat @ file.flat.mean(0)
    order = [int(file.index[k]) for k in np.argsort(products) if products[k] < 0]
    assert [row.index for row in summary.most_opposed] == order


def test_opposition_by_parameter(file):
    for row, g in zip(summarize(file).parameters, file.gradients.values(), strict=True):
        flat = g.reshape(file.n, -1)
        assert row.opposing == np.mean(flat @ flat.mean(0) < 0)
        deviations = flat - flat.mean(0)
        trace = np.sum(deviations**2) / (file.n - 1)
        signal = flat.mean(0) @ flat.mean(0) - trace / file.n
        expected = pytest.approx(trace / signal, rel=1e-7) if signal > 0 else None
        assert row.noise_scale == expected


@pytest.mark.parametrize("chains", ["rows", ("gram",)])
def test_classes(file, chains):
    summary = summarize(file if chains == "rows" else fakes_with(file, chains=chains))
    g, mean = file.flat, file.flat.mean(0)
    rows = {row.target: row for row in summary.classes.rows}
    assert list(rows) == sorted(set(file.target.tolist()))
    within = between = 0.0
    for target, row in rows.items():
        mine = g[file.target == target]
        centre = mine.mean(0)
        assert row.samples == len(mine)
        assert row.mean_norm == pytest.approx(np.linalg.norm(mine, axis=1).mean(), rel=CLOSE)
        assert row.mean_loss == pytest.approx(file.loss[file.target == target].mean(), rel=CLOSE)
        assert row.mean_gradient_norm == pytest.approx(np.linalg.norm(centre), rel=CLOSE)
        cosine = centre @ mean / np.linalg.norm(centre) / np.linalg.norm(mean)
        assert row.cosine == pytest.approx(cosine, rel=CLOSE)
        assert row.mean_cosine == pytest.approx(
            cosines(file)[file.target == target].mean(), rel=CLOSE
        )
        trace = np.sum(mine.var(0, ddof=1))
        assert row.trace_covariance == pytest.approx(trace, rel=CLOSE)
        within += np.sum((mine - centre) ** 2) / len(g)
        between += len(mine) / len(g) * np.sum((centre - mean) ** 2)
    assert summary.classes.within == pytest.approx(within, rel=CLOSE)
    assert summary.classes.between == pytest.approx(between, rel=1e-7)


@pytest.mark.parametrize(
    "target", [np.linspace(0, 1, 80), np.arange(80), np.zeros(80, int), np.ones((80, 2), int), None]
)
def test_what_is_no_class(file, target):
    given = {k: getattr(file, k) for k in ("gradients", "loss", "index")}
    assert summarize(FakeFile(**given, target=target)).classes is None


@pytest.mark.parametrize("chains", ["rows", ("gram",)])
def test_spectrum(file, chains):
    found = summarize(file if chains == "rows" else fakes_with(file, chains=chains)).spectrum
    values = np.linalg.svd(file.flat / math.sqrt(file.n), compute_uv=False) ** 2
    k = len(values)
    assert found.eigenvalues[:k] == pytest.approx(values[:100], rel=1e-6, abs=1e-9 * values[0])
    p = values / values.sum()
    assert found.effective_rank == pytest.approx(math.exp(-np.sum(p * np.log(p))), rel=1e-6)
    assert found.participation == pytest.approx(values.sum() ** 2 / np.sum(values**2), rel=1e-6)
    assert sum(p[: found.directions_for_90]) >= 0.9 > sum(p[: found.directions_for_90 - 1])
    assert (found.samples, found.of) == (80, 80)


def test_spectrum_of_directions_that_are_planted():
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(50, 4)))[0].T
    g = np.repeat(basis, 10, axis=0)  # four directions, ten samples of each
    found = summarize(FakeFile({"w": g}, np.ones(40))).spectrum
    assert found.effective_rank == pytest.approx(4.0)
    assert found.eigenvalues[:5] == pytest.approx([0.25] * 4 + [0.0], abs=1e-12)


@pytest.mark.parametrize("chains", ["rows", ("gram",)])
def test_nearest(file, chains):
    given = file if chains == "rows" else fakes_with(file, chains=chains)
    found = summarize(given, top=5, nearest=int(file.index[7])).nearest
    g = file.flat / np.linalg.norm(file.flat, axis=1)[:, None]
    expected = {int(i): c for i, c in zip(file.index, g @ g[7], strict=True) if i != file.index[7]}
    ranked = sorted(expected, key=lambda i: -expected[i])
    assert [row.index for row in found.aligned] == ranked[:5]
    assert [row.index for row in found.opposed] == ranked[::-1][:5]
    assert [row.cosine for row in found.aligned] == pytest.approx(
        [expected[i] for i in ranked[:5]], rel=CLOSE
    )
    assert found.exact


def test_projections_give_neighbours_approximately(file):
    given = fakes_with(file, chains=("project",))
    summary = summarize(given, nearest=int(file.index[0]))
    assert not summary.nearest.exact
    assert summary.nearest.source == summary.spectrum.source == "project:dim=6"


def test_what_is_missing_is_said(file):
    summary = summarize(fakes_with(file, chains=()))
    assert summary.directions is summary.spectrum is summary.most_opposed is None
    assert summary.signal.mean_entry is summary.batch_tests.inner_product is None
    assert summary.noise_scale.simple_interval is None
    needs = " ".join(missing.needs for missing in summary.missing)
    for chain in ("identity", "gram", "cosine:to=mean", "second_moment", "project"):
        assert chain in needs
    assert summarize(file).missing == ()
    assert "--no-rows" in summarize(file, rows=False).missing[0].needs


def test_identities_hold_and_are_broken_by_a_wrong_number(file):
    checks = summarize(file).checks
    assert len(checks) == 6
    assert all(check.passed and check.error < 1e-12 for check in checks)

    class Wrong(FakeFile):
        @property
        def norms(self):
            return super().norms | {"scale": 2 * super().norms["scale"] + 1}

    given = {k: getattr(file, k) for k in ("gradients", "loss", "target", "index")}
    broken = [check.name for check in summarize(Wrong(**given)).checks if not check.passed]
    assert broken == ["‖gᵢ‖² = Σₚ ‖gᵢ,ₚ‖², all samples"]


@pytest.mark.parametrize("stored", [False, True], ids=["two walks", "mean stored"])
@pytest.mark.parametrize("kept", [0, 3000, 2**30])
def test_small_tiles_change_nothing(file, kept, stored):
    means = {k: g.mean(0) for k, g in file.gradients.items()}
    more = (FakeChain("mean", means, True),) if stored else ()
    given = {k: getattr(file, k) for k in ("gradients", "loss", "target", "index")}
    whole = summarize(file, nearest=100).to_json()
    limits = Limits(tile=700, kept=kept, block=40, widest=7)
    pieces = Data(FakeFile(**given, more=more), Options(nearest=100, limits=limits))
    for key in ("noise_scale", "signal", "directions", "classes", "spectrum", "nearest"):
        assert flat_numbers(pieces.result(key).to_json()) == pytest.approx(
            flat_numbers(whole[key]), rel=1e-7, abs=1e-9
        )


def flat_numbers(document):
    if isinstance(document, dict):
        document = list(document.values())
    if isinstance(document, list):
        return [x for item in document for x in flat_numbers(item)]
    return [document] if isinstance(document, float) else []


def test_complex_gradients():
    rng = np.random.default_rng(0)
    g = rng.normal(0.3, 1, (30, 5)) + 1j * rng.normal(size=(30, 5))
    parts = np.concatenate([g.real, g.imag], axis=1)
    found, expected = (summarize(FakeFile({"w": values}, np.ones(30))) for values in (g, parts))
    assert found.directions.cosine.mean == pytest.approx(expected.directions.cosine.mean, rel=CLOSE)
    assert found.signal.mean_entry == pytest.approx(expected.signal.mean_entry, rel=CLOSE)
    assert found.spectrum.effective_rank == pytest.approx(expected.spectrum.effective_rank)
