"""What rounding, overflow and few samples do to the numbers."""

import dataclasses

import numpy as np
import pytest

from gradscope.stats import Data, Options, difference, summarize
from gradscope.stats.builtin.batch import student
from gradscope.stats.products import Limits
from tests.stats.fakes import FakeChain, FakeFile, fake


@pytest.mark.parametrize(
    ("freedom", "expected"),  # from tables
    [(1, 12.7062047364), (2, 4.30265272991), (3, 3.18244630528), (10, 2.22813885196),
     (79, 1.99045021), (200, 1.97189622363), (1000, 1.96233908083)],
)  # fmt: skip
def test_student(freedom, expected):
    assert student(freedom) == pytest.approx(expected, rel=1e-8)


def test_large_parameters_are_summed_as_stored():
    """In float32 a block at a time: no worse than float32, and the classes' sums as well."""
    file = fake(80, seed=3)
    single = {k: g.astype(np.float32) for k, g in file.gradients.items()}
    file = dataclasses.replace(file, gradients=single)
    exact = summarize(file, nearest=100)
    limits = Limits(long=0, tile=2000, piece=300, kept=500)
    found = Data(file, Options(nearest=100, limits=limits)).result
    assert found("noise_scale").simple == pytest.approx(exact.noise_scale.simple, rel=1e-5)
    assert found("signal").evidence == pytest.approx(exact.signal.evidence, rel=1e-5)
    assert found("classes").between == pytest.approx(exact.classes.between, rel=1e-5)
    assert found("directions").cosine.std == pytest.approx(exact.directions.cosine.std, rel=1e-5)
    assert [row.index for row in found("nearest").aligned] == [
        row.index for row in exact.nearest.aligned
    ]


class Rounded(FakeFile):
    """Norms in float32, as a run in float32 records them."""

    @property
    def norms(self):
        return {name: norm.astype(np.float32) for name, norm in super().norms.items()}


def test_rows_are_exacter_than_recorded_norms():
    """Where the mean is large against the noise, rounded norms lose the noise."""
    g = 1 + 1e-4 * np.random.default_rng(0).normal(size=(50, 8))
    (row,) = summarize(Rounded({"w": g}, np.ones(50))).parameters
    assert row.signal_to_noise == pytest.approx(g.mean(0) @ g.mean(0) / g.var(0).sum(), rel=1e-6)
    without = summarize(Rounded({"w": g}, np.ones(50), rows=False)).parameters[0]
    assert without.signal_to_noise is None  # it cannot be told from rounding


def test_one_sample_has_no_noise():
    file = FakeFile({"w": np.random.default_rng(1).normal(size=(1, 9)) / 3}, np.ones(1))
    summary = summarize(file)
    assert summary.parameters[0].signal_to_noise is None
    assert summary.signal.signal_to_noise is None


class Overflowed(FakeFile):
    """Norms are finite, two of the rows are not."""

    @property
    def chains(self):
        with np.errstate(over="ignore"):
            rows = {k: g.astype(np.float16) for k, g in self.gradients.items()}
        return (FakeChain("identity", rows), *self.more)


def test_rows_that_overflowed_are_not_used():
    g = np.random.default_rng(0).normal(size=(20, 4))
    g[3] *= 1e5
    first = Overflowed({"w": g}, np.ones(20), attributes={"dataset_sha256": "a"})
    summary = summarize(first)
    assert summary.directions is summary.spectrum is None
    assert "not finite" in summary.missing[0].needs
    assert summary.noise_scale.trace_covariance == pytest.approx(g.var(0, ddof=1).sum(), rel=1e-9)
    found = difference(first, first)
    assert not found.exact
    assert found.cosine is None


def test_sums_that_a_file_keeps_give_the_mean():
    """A small file keeps Σgᵢ to be merged with others: second moments then need no chain mean."""
    file = fake(30)
    second = FakeChain("second_moment", {k: np.mean(g**2, 0) for k, g in file.gradients.items()})
    second.reduced = True
    sums = {f"sum:{k}": g.sum(0) for k, g in file.gradients.items()}
    given = {k: getattr(file, k) for k in ("gradients", "loss", "target", "index")}

    class Kept(FakeFile):
        states = {"mean_gradient": sums | {"n": np.array(30.0)}}  # noqa: RUF012

    found = summarize(Kept(**given, rows=False, more=(second,))).signal
    assert found.mean_entry == pytest.approx(summarize(file).signal.mean_entry, rel=1e-9)


def test_samples_have_their_own_names():
    file = fake(12)
    g = {k: v.copy() for k, v in file.gradients.items()}
    for v in g.values():
        v[7] = v[2]

    class Named(FakeFile):
        @property
        def samples(self):
            return super().samples | {"id": np.array([f"image-{k}" for k in range(self.n)])}

    named = Named(g, np.ones(12), attributes={"dataset_sha256": "a"})
    summary = summarize(named, nearest=2)
    assert {row.id for row in summary.samples} >= {f"image-{summary.samples[0].index}"}
    assert summary.nearest.aligned[0].id == "image-7"
    (pair,) = summary.duplicates.same
    assert (pair.first_id, pair.second_id) == ("image-2", "image-7")
    assert difference(named, named).samples[0].id is not None
