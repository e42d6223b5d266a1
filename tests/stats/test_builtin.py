"""Every number of a summary against numpy on the raw gradients."""

import math
import statistics as stdlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradscope.stats import Data, Options, noise_scale, summarize
from gradscope.stats.builtin.batch import student
from gradscope.stats.builtin.norms import histogram
from gradscope.stats.products import Limits
from tests.stats.fakes import FakeChain, FakeFile, fake, plain

CLOSE = 1e-9


@pytest.fixture
def file():
    return fake(80, seed=3)


def cosines(file):
    return file.chain("cosine")["cosine"]


def noise_of(g):
    return noise_scale(np.linalg.norm(g, axis=1), float(np.sum(g.mean(0) ** 2)))


def test_loss_norm_and_percentiles(file):
    summary = summarize(file)
    norms = [math.sqrt(math.fsum(x * x for x in row)) for row in file.flat.tolist()]
    for found, values in ((summary.norm, norms), (summary.loss, file.loss.tolist())):
        assert found.mean == pytest.approx(stdlib.fmean(values), rel=1e-12)
        assert found.std == pytest.approx(stdlib.stdev(values), rel=1e-12)
        assert (found.min, found.max) == pytest.approx((min(values), max(values)))
    values = sorted(norms)
    for percent, found in summary.norm.percentiles.items():
        place = int(percent) / 100 * (len(values) - 1)
        low, part = int(place), place % 1
        expected = values[low] * (1 - part) + values[min(low + 1, len(values) - 1)] * part
        assert found == pytest.approx(expected, rel=1e-12)


def test_histograms_are_numpys():
    narrow = np.random.default_rng(0).uniform(1.0, 90.0, 500)
    counts, edges = np.histogram(narrow, bins=len(histogram(narrow).counts))
    found = histogram(narrow)
    assert (found.scale, found.counts) == ("linear", tuple(counts))
    assert found.edges == pytest.approx(edges)
    wide = np.exp(np.random.default_rng(0).normal(0, 3, 800))
    found = histogram(wide)
    assert found.scale == "log"
    assert found.counts == tuple(np.histogram(np.log(wide), bins=len(found.counts))[0])
    found = histogram(np.full(7, 2.5))
    assert (found.counts, found.edges) == ((7,), (2.5, 2.5))


@given(st.lists(st.floats(0.0, 1e150, allow_subnormal=True, width=64), min_size=1, max_size=60))
def test_every_value_is_counted_once(values):
    found = histogram(np.array(values))
    assert sum(found.counts) + found.zeros == len(values)
    if found.counts:
        positive = [v for v in values if v > 0]
        assert len(found.edges) == len(found.counts) + 1
        assert (found.edges[0], found.edges[-1]) == (min(positive), max(positive))
        assert list(found.edges) == sorted(found.edges)


def test_clipping(file):
    norms = sorted(np.linalg.norm(file.flat, axis=1))
    found = summarize(file, clip=(norms[19], 1e9)).clipping
    assert [c.clipped for c in found.asked] == [60 / 80, 0.0]
    for percent, clip in found.by_share.items():
        assert clip.norm == pytest.approx(np.percentile(norms, 100 - float(percent)), rel=1e-12)
        assert clip.clipped == pytest.approx(float(percent) / 100, abs=1 / 80)


def test_noise_scale_is_the_trace_over_the_mean_product_of_pairs():
    g = np.random.default_rng(0).normal(0.5, 1.0, (20, 6)) * np.arange(1, 7)
    found = noise_of(g)
    assert found.trace_covariance == pytest.approx(np.trace(np.cov(g, rowvar=False)), rel=1e-12)
    pairs = [g[i] @ g[j] for i in range(20) for j in range(20) if i != j]
    assert found.gradient_norm_squared == pytest.approx(np.mean(pairs), rel=1e-10)
    assert found.simple == pytest.approx(found.trace_covariance / np.mean(pairs), rel=1e-9)
    assert found.flag is None


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (noise_of(np.vstack([np.eye(3), -np.eye(3)])), "6 samples"),
        (noise_scale(np.array([1e200, 1e200]), 1.0), "overflow"),
        (noise_scale(np.ones(1), 1.0), "two"),
        (noise_scale(np.ones(5), None), "no finite mean"),
    ],
)
def test_a_noise_scale_that_does_not_exist_is_flagged(found, word):
    assert found.simple is None
    assert word in found.flag


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
        interval = summarize(plain(rng.normal(mean, 1.0, (n, entries))), top=0)
        interval = interval.noise_scale.simple_interval
        inside += interval.low <= 1 / mean**2 <= (interval.high or math.inf)
        bounded += interval.high is not None
    assert inside >= 400 * 0.95 - 2 * math.sqrt(400 * 0.95 * 0.05)
    assert bounded > 390 or mean < 0.3  # an interval that says something


@pytest.mark.parametrize(
    ("freedom", "expected"),  # from tables
    [(1, 12.7062047364), (2, 4.30265272991), (3, 3.18244630528), (10, 2.22813885196),
     (79, 1.99045021), (200, 1.97189622363), (1000, 1.96233908083)],
)  # fmt: skip
def test_student(freedom, expected):
    assert student(freedom) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("chain", ["rows", "gram", "cosine"])
def test_batch_tests(file, chain):
    found = summarize(file.holding(chain)).batch_tests
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
    plug_in = np.trace(np.cov(g, rowvar=False)) / (mean @ mean)
    assert found.plug_in_noise_scale == pytest.approx(plug_in, rel=CLOSE)


def test_cabs(file):
    found = summarize(file, learning_rate=0.5).cabs
    variance = np.sum(np.var(file.flat, axis=0))
    assert found.variance == pytest.approx(variance, rel=CLOSE)
    assert found.unclipped == pytest.approx(0.5 * variance / file.loss.mean(), rel=CLOSE)
    for rate, size in ((1e-6, 16), (1e6, 2048), (100 / found.per_learning_rate, 100)):
        assert summarize(file, learning_rate=rate).cabs.batch_size == size
    assert summarize(file).cabs.batch_size is None
    negative = summarize(plain(file.flat, loss=-file.loss), learning_rate=1.0).cabs
    assert negative.batch_size is None
    assert "loss" in negative.flag


@pytest.mark.parametrize("chains", [("rows",), ("mean", "second")])
def test_signal_by_entry(file, chains):
    summary = summarize(file.holding(*chains))
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


def test_entries_without_noise_are_left_out_and_pure_noise_is_time_to_stop():
    g = np.random.default_rng(0).normal(1.0, 1.0, (40, 6))
    g[:, 2], g[:, 4] = 0.0, 3.0
    found = summarize(plain(g)).signal
    kept = g[:, [0, 1, 3, 5]]
    assert (found.entries, found.noiseless, found.stop) == (4, 2, False)
    assert found.mean_entry == pytest.approx(np.mean(kept.mean(0) ** 2 / kept.var(0)), rel=CLOSE)
    assert summarize(plain(g - 0.9 * g.mean(0))).signal.stop is True


@pytest.mark.parametrize("chain", ["rows", "gram", "cosine"])
def test_directions(file, chain):
    summary = summarize(file.holding(chain), top=80)
    expected, found = cosines(file), summary.directions
    assert found.cosine.mean == pytest.approx(expected.mean(), rel=CLOSE)
    assert found.percentiles["25"] == pytest.approx(np.percentile(expected, 25), rel=CLOSE)
    assert found.opposing == np.mean(expected < 0)
    assert found.histogram.counts == tuple(np.histogram(expected, 20, (-1, 1))[0])
    by_index = {row.index: row.cosine for row in summary.samples}
    assert [by_index[i] for i in file.index] == pytest.approx(list(expected), rel=CLOSE)
    products = file.flat @ file.flat.mean(0)
    order = [int(file.index[k]) for k in np.argsort(products) if products[k] < 0]
    assert [row.index for row in summary.most_opposed] == order


def test_parameters(file):
    rows = {row.name: row for row in summarize(file).parameters}
    assert list(rows) == list(file.gradients)
    whole = np.sum(file.flat**2)
    for name, g in file.gradients.items():
        row, flat = rows[name], g.reshape(file.n, -1)
        lengths, mean = [math.hypot(*sample) for sample in flat.tolist()], flat.mean(0)
        assert (row.shape, row.entries) == (g.shape[1:], flat.shape[1])
        assert row.mean_norm == pytest.approx(stdlib.fmean(lengths), rel=1e-12)
        assert row.max_norm == pytest.approx(max(lengths), rel=1e-12)
        assert row.share == pytest.approx(np.einsum("np,np->", flat, flat) / whole, rel=1e-10)
        assert row.mean_gradient_norm == pytest.approx(math.hypot(*mean), rel=1e-12)
        # the denominator is the population variance, summed over entries
        expected = np.sum(mean**2) / np.sum(flat.var(axis=0, ddof=0))
        assert row.signal_to_noise == pytest.approx(expected, rel=CLOSE)
        assert row.opposing == np.mean(flat @ mean < 0)
        trace = np.sum((flat - mean) ** 2) / (file.n - 1)
        signal = mean @ mean - trace / file.n
        scale = pytest.approx(trace / signal, rel=1e-7) if signal > 0 else None
        assert row.noise_scale == scale


@pytest.mark.parametrize("chain", ["rows", "gram"])
def test_classes(file, chain):
    found = summarize(file.holding(chain)).classes
    g, mean = file.flat, file.flat.mean(0)
    rows = {row.target: row for row in found.rows}
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
        along = cosines(file)[file.target == target]
        assert row.mean_cosine == pytest.approx(along.mean(), rel=CLOSE)
        assert row.trace_covariance == pytest.approx(np.sum(mine.var(0, ddof=1)), rel=CLOSE)
        within += np.sum((mine - centre) ** 2) / len(g)
        between += len(mine) / len(g) * np.sum((centre - mean) ** 2)
    assert found.within == pytest.approx(within, rel=CLOSE)
    assert found.between == pytest.approx(between, rel=1e-7)


@pytest.mark.parametrize(
    "target", [np.linspace(0, 1, 80), np.arange(80), np.zeros(80, int), np.ones((80, 2), int), None]
)
def test_what_is_no_class(file, target):
    assert summarize(FakeFile(file.gradients, file.loss, target)).classes is None


@pytest.mark.parametrize("chain", ["rows", "gram"])
def test_spectrum(file, chain):
    found = summarize(file.holding(chain)).spectrum
    values = np.linalg.svd(file.flat / math.sqrt(file.n), compute_uv=False) ** 2
    assert found.eigenvalues[: len(values)] == pytest.approx(
        values[:100], rel=1e-6, abs=1e-9 * values[0]
    )
    p = values / values.sum()
    assert found.effective_rank == pytest.approx(math.exp(-np.sum(p * np.log(p))), rel=1e-6)
    assert found.participation == pytest.approx(values.sum() ** 2 / np.sum(values**2), rel=1e-6)
    assert sum(p[: found.directions_for_90]) >= 0.9 > sum(p[: found.directions_for_90 - 1])
    assert (found.samples, found.of) == (80, 80)


@pytest.mark.parametrize("chain", ["rows", "gram"])
def test_nearest(file, chain):
    found = summarize(file.holding(chain), top=5, nearest=int(file.index[7])).nearest
    g = file.flat / np.linalg.norm(file.flat, axis=1)[:, None]
    expected = {int(i): c for i, c in zip(file.index, g @ g[7], strict=True) if i != file.index[7]}
    ranked = sorted(expected, key=lambda i: -expected[i])
    assert [row.index for row in found.aligned] == ranked[:5]
    assert [row.index for row in found.opposed] == ranked[::-1][:5]
    along = [row.cosine for row in found.aligned]
    assert along == pytest.approx([expected[i] for i in ranked[:5]], rel=CLOSE)
    assert found.exact


def test_projections_give_neighbours_approximately(file):
    summary = summarize(file.holding("project"), nearest=int(file.index[0]))
    assert not summary.nearest.exact
    assert summary.nearest.source == summary.spectrum.source == "project:dim=6"


def test_largest_samples(file):
    rows = summarize(file, top=7).samples
    norms = np.linalg.norm(file.flat, axis=1)
    order = sorted(range(file.n), key=lambda i: -norms[i])[:7]
    assert [row.index for row in rows] == [file.index[i] for i in order]
    assert [row.loss for row in rows] == [file.loss[i] for i in order]
    assert [row.target for row in rows] == [file.target[i] for i in order]
    median = stdlib.median(norms.tolist())
    assert [r.times_median for r in rows] == pytest.approx([norms[i] / median for i in order])
    assert (summarize(file, top=0).samples, len(summarize(file, top=1000).samples)) == ((), 80)


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
    file = plain(np.array([[1.0], [2.0]]), target=target)
    assert [row.target for row in summarize(file).samples] == expected


def test_points_keep_the_largest():
    n = 9000
    size = np.random.default_rng(0).permutation(n) + 1.0
    points = summarize(plain(size[:, None], loss=size / 2)).points
    assert (points.of, len(points.norm), len(set(points.norm))) == (n, 4000, 4000)
    assert set(points.norm) >= set(range(n - 1999, n + 1))
    assert min(points.norm) == 1
    assert np.allclose(np.array(points.loss) * 2, points.norm)


def with_copies():
    """Sixty gradients, of which 41 is 7, and 52 is 30 but for a little noise."""
    rng = np.random.default_rng(0)
    g = rng.normal(size=(60, 40)) * np.exp(rng.normal(size=(60, 1)))
    g[41], g[52] = g[7], g[30] * (1 + 0.001 * rng.normal(size=40))
    g[11] = g[12] = 0.0
    parts = {"w": g[:, :30].reshape(60, 5, 6), "v": g[:, 30:]}
    return FakeFile(parts, np.linalg.norm(g, axis=1) + 1, np.arange(60) % 3)


@pytest.mark.parametrize(("chain", "source"), [("rows",) * 2, ("gram",) * 2, ("project", "norms")])
def test_planted_duplicates_are_found(chain, source):
    file = with_copies()
    found = summarize(file.holding(chain)).duplicates
    assert (found.source, found.complete) == (source, True)
    assert [(pair.first, pair.second, pair.same_target) for pair in found.same] == [(7, 41, False)]
    near, g = [(pair.first, pair.second) for pair in found.near], file.flat
    assert near == ([] if source == "norms" else [(30, 52)])
    if near:
        apart = np.linalg.norm(g[30] - g[52]) / max(map(np.linalg.norm, (g[30], g[52])))
        assert found.near[0].distance == pytest.approx(apart, rel=1e-6)


def test_no_duplicates_among_random_gradients():
    found = summarize(plain(np.random.default_rng(1).normal(size=(500, 30)))).duplicates
    assert (found.same, found.near) == ((), ())


def test_jensen(file):
    inside = {k: np.sign(g).mean(0) for k, g in file.gradients.items()}
    outside = {k: np.sign(g.mean(0)) for k, g in file.gradients.items()}
    more = (
        FakeChain("sign | mean", inside, True),
        FakeChain("mean | sign", outside, True),
        FakeChain("clip:max_norm=1 | mean", inside, True),
        FakeChain("mean | clip:max_norm=2", outside, True),
    )
    (found,) = summarize(fake(80, seed=3, more=more)).jensen
    a, b = (np.concatenate([v.ravel() for v in side.values()]) for side in (inside, outside))
    assert found.transform == "sign"
    assert found.gap == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(b), rel=1e-12)
    assert found.cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), rel=1e-12)


def test_fisher(file):
    """With exact labels a stored norm is an expectation: its square is no square norm."""
    trace = np.trace(sum(np.outer(g, g) for g in file.flat) / file.n)
    found = summarize(file).fisher
    assert (found.kind, found.trace) == ("empirical", pytest.approx(trace, rel=CLOSE))
    exact = fake(80, seed=3, run={"spec": {"compute": {"labels": "exact"}}})
    assert summarize(exact).fisher.trace is None
    found = summarize(exact.holding("rows", "second")).fisher
    assert (found.kind, found.trace) == ("exact", pytest.approx(trace, rel=CLOSE))


def test_what_is_missing_is_said(file):
    summary = summarize(file.holding())
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
    norms = {"scale": 2 * file.norms["scale"] + 1}
    broken = summarize(fake(80, seed=3, wrong={"norms": norms})).checks
    names = [check.name for check in broken if not check.passed]
    assert names == ["‖gᵢ‖² = Σₚ ‖gᵢ,ₚ‖², all samples"]


@pytest.mark.parametrize("more", [(), ("mean",)], ids=["two walks", "mean stored"])
@pytest.mark.parametrize("kept", [0, 3000, 2**30])
def test_small_tiles_change_nothing(file, kept, more):
    whole = summarize(file, nearest=100)
    limits = Limits(tile=700, kept=kept, block=40, widest=7)
    pieces = Data(file.holding("rows", *more), Options(nearest=100, limits=limits))
    for key in ("noise_scale", "signal", "directions", "classes", "spectrum", "nearest"):
        found, expected = (
            flat_numbers(one.to_json()) for one in (pieces.result(key), getattr(whole, key))
        )
        assert found == pytest.approx(expected, rel=1e-7, abs=1e-9)


def flat_numbers(document):
    if isinstance(document, dict):
        document = list(document.values())
    if isinstance(document, list):
        return [x for item in document for x in flat_numbers(item)]
    return [document] if isinstance(document, float) else []


def test_large_parameters_are_summed_as_stored():
    """In float32 a block at a time: no worse than float32, and the classes' sums as well."""
    file = fake(80, seed=3)
    single = {k: g.astype(np.float32) for k, g in file.gradients.items()}
    file = FakeFile(single, file.loss, file.target, file.index)
    exact = summarize(file, nearest=100)
    limits = Limits(long=0, tile=2000, piece=300, kept=500)
    found = Data(file, Options(nearest=100, limits=limits)).result
    assert found("noise_scale").simple == pytest.approx(exact.noise_scale.simple, rel=1e-5)
    assert found("signal").evidence == pytest.approx(exact.signal.evidence, rel=1e-5)
    assert found("classes").between == pytest.approx(exact.classes.between, rel=1e-5)
    assert found("directions").cosine.std == pytest.approx(exact.directions.cosine.std, rel=1e-5)
    ranked = [[row.index for row in one.aligned] for one in (found("nearest"), exact.nearest)]
    assert ranked[0] == ranked[1]


def test_complex_gradients():
    rng = np.random.default_rng(0)
    g = rng.normal(0.3, 1, (30, 5)) + 1j * rng.normal(size=(30, 5))
    parts = np.concatenate([g.real, g.imag], axis=1)
    found, expected = (summarize(plain(values)) for values in (g, parts))
    assert found.directions.cosine.mean == pytest.approx(expected.directions.cosine.mean, rel=CLOSE)
    assert found.signal.mean_entry == pytest.approx(expected.signal.mean_entry, rel=CLOSE)
    assert found.spectrum.effective_rank == pytest.approx(expected.spectrum.effective_rank)
