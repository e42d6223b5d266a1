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
from gradscope.stats.rows import Limits
from tests.stats.fakes import FakeChain, FakeFile, assert_holds, fake, plain

CLOSE = 1e-9


@pytest.fixture
def file():
    return fake(80, seed=3)


def moments(values):
    return {
        "mean": stdlib.fmean(values.tolist()),
        "std": stdlib.stdev(values.tolist()),
        "min": values.min(),
        "max": values.max(),
    }


def of_parameter(name, g, whole):
    flat = g.reshape(len(g), -1)
    n, mean, variance = len(g), flat.mean(0), flat.var(0)
    lengths = [math.hypot(*sample) for sample in flat.tolist()]
    signal = mean @ mean - variance.sum() / (n - 1)
    return {
        "name": name,
        "shape": list(g.shape[1:]),
        "entries": flat.shape[1],
        "mean_norm": stdlib.fmean(lengths),
        "max_norm": max(lengths),
        "share": np.sum(flat**2) / whole,
        "mean_gradient_norm": math.hypot(*mean),
        # the denominator is the population variance, summed over entries
        "signal_to_noise": mean @ mean / variance.sum(),
        "noise_scale": variance.sum() * n / (n - 1) / signal if signal > 0 else None,
        "entry_signal_to_noise": np.mean(mean**2 / variance),
        "opposing": np.mean(flat @ mean < 0),
    }


def of_class(file, target, along):
    mine, mean = file.target == target, file.flat.mean(0)
    g, centre = file.flat[mine], file.flat[mine].mean(0)
    return {
        "target": int(target),
        "samples": len(g),
        "mean_loss": file.loss[mine].mean(),
        "mean_norm": np.linalg.norm(g, axis=1).mean(),
        "mean_cosine": along[mine].mean(),
        "opposing": np.mean(g @ mean < 0),
        "mean_gradient_norm": np.linalg.norm(centre),
        "cosine": centre @ mean / np.linalg.norm(centre) / np.linalg.norm(mean),
        "trace_covariance": np.sum(g.var(0, ddof=1)),
    }


def listed(file, order):
    norms = np.linalg.norm(file.flat, axis=1)
    columns = {"index": file.index, "loss": file.loss, "norm": norms, "target": file.target}
    columns["times_median"] = norms / stdlib.median(norms.tolist())
    return [{key: column[k].item() for key, column in columns.items()} for k in order]


def expected(file):
    """The document, from gradients (n, P) in float64."""
    g, n = file.flat, file.n
    mean, variance, norms = g.mean(0), g.var(0), np.linalg.norm(g, axis=1)
    big, dots, trace = mean @ mean, g @ mean, np.trace(np.cov(g, rowvar=False))
    along, ratios, whole = dots / norms / np.sqrt(big), mean**2 / variance, np.sum(g**2)
    across = g - np.outer(dots / big, mean)
    pairs = np.mean([g[i] @ g[j] for i in range(n) for j in range(n) if i != j])
    values = np.linalg.svd(g, compute_uv=False) ** 2 / n
    p = values / values.sum()
    classes = [of_class(file, target, along) for target in np.unique(file.target)]
    centres = {row["target"]: g[file.target == row["target"]].mean(0) for row in classes}
    own = np.array([centres[target] for target in file.target])
    unit = g / norms[:, None]
    near = sorted(range(n), key=lambda k: -(unit[k] @ unit[7]))[1:]
    evidence = 1 - (n - 1) * ratios.mean()
    cuts = {str(k): np.percentile(norms, k) for k in (1, 5, 25, 50, 75, 90, 95, 99)}
    return {
        "loss": moments(file.loss),
        "norm": moments(norms) | {"percentiles": cuts},
        "noise_scale": {
            "trace_covariance": trace,
            "gradient_norm_squared": pairs,
            "simple": trace / pairs if pairs > 0 else None,
        },
        # variances of the mean gradient: whole, along itself, across
        "batch_tests": {
            "norm": trace / n / big,
            "inner_product": np.var(dots, ddof=1) / n / big**2,
            "orthogonality": np.sum(across**2) / (n - 1) / n / big,
            "plug_in_noise_scale": trace / big,
        },
        "cabs": {"variance": variance.sum(), "unclipped": 0.5 * variance.sum() / file.loss.mean()},
        "signal": {
            "mean_entry": ratios.mean(),
            "evidence": evidence,
            "stop": bool(evidence > 0),
            "entries": g.shape[1],
            "noiseless": 0,
        },
        "directions": {
            "cosine": moments(along),
            "percentiles": {"25": np.percentile(along, 25)},
            "opposing": np.mean(along < 0),
            "histogram": {"counts": np.histogram(along, 20, (-1, 1))[0].tolist()},
        },
        "parameters": [of_parameter(name, g, whole) for name, g in file.gradients.items()],
        "classes": {
            "rows": classes,
            "within": np.sum((g - own) ** 2) / n,
            "between": np.sum((own - mean) ** 2) / n,
        },
        "spectrum": {
            "eigenvalues": [*values.tolist(), *[0.0] * (n - len(values))],
            "effective_rank": math.exp(-np.sum(p * np.log(p))),
            "participation": 1 / np.sum(p**2),
            "directions_for_90": int(np.sum(np.cumsum(p) < 0.9)) + 1,
            "samples": n,
            "of": n,
        },
        "fisher": {"kind": "empirical", "trace": np.trace(g.T @ g) / n},
        "samples": listed(file, np.argsort(-norms)),
        "largest_losses": listed(file, np.argsort(-file.loss)),
        "most_opposed": listed(file, [k for k in np.argsort(dots) if dots[k] < 0]),
        "nearest": {
            "aligned": [{"index": int(file.index[k]), "cosine": unit[k] @ unit[7]} for k in near],
            "opposed": [{"index": int(file.index[k])} for k in near[::-1]],
            "exact": True,
        },
    }


ALWAYS = ("loss", "norm", "cabs", "fisher", "samples", "largest_losses")
WITH_MEAN = (*ALWAYS, "noise_scale", "batch_tests", "directions", "most_opposed")
PAIRWISE = (*WITH_MEAN, "classes", "spectrum", "nearest")
KNOWN = {
    "rows": (*PAIRWISE, "signal", "parameters"),
    "gram": PAIRWISE,
    "cosine": WITH_MEAN,
    "mean second": (*ALWAYS, "signal"),
}


@pytest.mark.parametrize("chains", KNOWN)
def test_every_number(file, chains):
    options = {"top": 80, "learning_rate": 0.5, "nearest": int(file.index[7])}
    found = summarize(file.holding(*chains.split()), **options)
    wanted = expected(file)
    assert_holds(found.to_json(), {key: wanted[key] for key in KNOWN[chains]})
    if "directions" in KNOWN[chains]:
        along = dict(zip(file.index, file.chain("cosine")["cosine"], strict=True))
        for row in found.samples:
            assert row.cosine == pytest.approx(along[row.index], rel=CLOSE)
    assert (summarize(file, top=0).samples, len(summarize(file, top=3).samples)) == ((), 3)


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


def noise_of(g):
    mean = g.mean(0)
    return noise_scale(np.linalg.norm(g, axis=1), float(mean @ mean), g @ mean)


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


def test_a_noise_scale_beyond_its_samples_is_a_guess_where_it_has_no_interval():
    opposed = np.vstack([np.eye(4) * 3, -np.eye(4) * 3]) + 0.65
    known, bare = noise_of(opposed), noise_scale(np.linalg.norm(opposed, axis=1), 4 * 0.65**2)
    assert known.simple == pytest.approx(bare.simple) and bare.simple > 8
    assert (
        bare.flag == "uncertain: larger than the 8 samples of the file, without an interval"
        and "guess" not in str(known.flag)
    )
    together = noise_scale(np.ones(8), 0.5)  # trΣ = 4/7, |G|² = 3/7
    assert together.simple == pytest.approx(4 / 3) and together.flag is None


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
        interval = noise_of(rng.normal(mean, 1.0, (n, entries))).simple_interval
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


def test_the_batch_size_of_cabs_is_clipped(file):
    found = summarize(file, learning_rate=0.5).cabs
    for rate, size in ((1e-6, 16), (1e6, 2048), (100 / found.per_learning_rate, 100)):
        assert summarize(file, learning_rate=rate).cabs.batch_size == size
    assert summarize(file).cabs.batch_size is None
    negative = summarize(plain(file.flat, loss=-file.loss), learning_rate=1.0).cabs
    assert (negative.batch_size, "loss" in negative.flag) == (None, True)


def test_entries_without_noise_are_left_out_and_pure_noise_is_time_to_stop():
    g = np.random.default_rng(0).normal(1.0, 1.0, (40, 6))
    g[:, 2], g[:, 4] = 0.0, 3.0
    found = summarize(plain(g)).signal
    kept = g[:, [0, 1, 3, 5]]
    assert (found.entries, found.noiseless, found.stop) == (4, 2, False)
    assert found.mean_entry == pytest.approx(np.mean(kept.mean(0) ** 2 / kept.var(0)), rel=CLOSE)
    assert summarize(plain(g - 0.9 * g.mean(0))).signal.stop is True


@pytest.mark.parametrize(
    "target", [np.linspace(0, 1, 80), np.arange(80), np.zeros(80, int), np.ones((80, 2), int), None]
)
def test_what_is_no_class(file, target):
    assert summarize(FakeFile(file.gradients, file.loss, target)).classes is None


def test_projections_give_neighbours_approximately(file):
    summary = summarize(file.holding("project"), nearest=int(file.index[0]))
    assert not summary.nearest.exact
    assert summary.nearest.source == summary.spectrum.source == "project:dim=6"


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
    points = Data(plain(size[:, None], loss=size / 2), Options(rows=False)).result("points")
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


@pytest.mark.parametrize("width", [1, 3])
def test_equal_norms_are_found_as_by_all_pairs(width):
    """Three numbers of dense ranges: a sort by one number leaves many neighbours."""
    rng, n, limit = np.random.default_rng(width), 1000, 1e-5
    g = rng.uniform(0.5, 2, (n, width)) * 2.0 ** rng.integers(-3, 4, (n, 1))
    g[n // 2 : n // 2 + 300] = g[:300] * (1 + rng.uniform(-1.2, 1.2, (300, width)) * limit)
    file = FakeFile({f"p{k}": g[:, [k]] for k in range(width)}, g.max(1) ** 2, None, rows=False)
    own = np.column_stack([np.linalg.norm(g, axis=1), g.max(1) ** 2, g])
    sizes = own[:, :2].max(1)
    apart = np.linalg.norm(own[:, None] - own, axis=2) / np.maximum(sizes[:, None], sizes)
    first, second = np.nonzero(np.triu(apart <= limit, 1))
    assert 20 < len(first) < 200
    found = summarize(file).duplicates
    assert found.complete
    pairs = {(pair.first, pair.second) for pair in found.same}
    assert pairs == set(zip(first.tolist(), second.tolist(), strict=True))


def test_many_equal_samples_are_listed_in_part():
    found = summarize(FakeFile({"w": np.ones((3000, 2))}, np.ones(3000), rows=False)).duplicates
    assert (found.complete, len(found.same)) == (False, 200)


def test_no_duplicates_among_random_gradients():
    found = summarize(plain(np.random.default_rng(1).normal(size=(200, 30)))).duplicates
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


def test_fisher_of_exact_labels(file):
    """A stored norm is then an expectation: its square is no square norm."""
    exact = fake(80, seed=3, run={"spec": {"compute": {"labels": "exact"}}})
    assert summarize(exact).fisher.trace is None
    wanted = expected(file)["fisher"] | {"kind": "exact"}
    assert_holds(summarize(exact.holding("rows", "second")).fisher.to_json(), wanted)


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
@pytest.mark.parametrize("tile", [1, 700, 2**30])
def test_small_tiles_change_nothing(file, tile, more):
    limits = Limits(tile=tile)
    options = Options(nearest=int(file.index[7]), limits=limits, top=80)
    pieces, wanted = Data(file.holding("rows", *more), options), expected(file)
    for key in ("noise_scale", "signal", "directions", "classes", "spectrum", "nearest"):
        assert_holds(pieces.result(key).to_json(), wanted[key], 1e-7)


def test_large_parameters_are_summed_as_stored(file):
    """In float32 a tile at a time: no worse than float32, and the classes' sums as well."""
    single = {k: g.astype(np.float32) for k, g in file.gradients.items()}
    limits = Limits(long=0, long_tile=300)
    found = Data(FakeFile(single, file.loss, file.target), Options(limits=limits))
    for key in ("noise_scale", "signal", "directions"):
        assert_holds(found.result(key).to_json(), expected(file)[key], 1e-4)
    assert found.result("classes").between == pytest.approx(
        expected(file)["classes"]["between"], rel=1e-5
    )


def test_complex_gradients():
    rng = np.random.default_rng(0)
    g = rng.normal(0.3, 1, (30, 5)) + 1j * rng.normal(size=(30, 5))
    parts = np.concatenate([g.real, g.imag], axis=1)
    found, expected = (summarize(plain(values)) for values in (g, parts))
    assert found.directions.cosine.mean == pytest.approx(expected.directions.cosine.mean, rel=CLOSE)
    assert found.signal.mean_entry == pytest.approx(expected.signal.mean_entry, rel=CLOSE)
    assert found.spectrum.effective_rank == pytest.approx(expected.spectrum.effective_rank)
