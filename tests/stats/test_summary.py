"""What a file is, what of it is left out, its JSON, and the registry of statistics."""

import json

import numpy as np
import pytest

from gradscope.errors import ResultFileError, SpecError
from gradscope.stats import Data, Options, Summary, difference, statistic, summarize
from gradscope.stats.certificate import Proof
from tests.stats.fakes import FakeChain, FakeFile, assert_holds, fake, plain

AUDITED = {
    "verified": True,
    "positions": [0, 6],
    "proves": True,
    "unproved": ["c"],
    "audit": {
        "verify": "audit",
        "batches": 50,
        "proved": 3,
        "audited": [[0, 6], [203, 209], [343, 349]],
        "error": 2e-7,
        "parameter": "a",
        "unproved": ["b", "c"],
        "proves": True,
    },
}


def test_facts_of_a_file(tmp_path):
    (tmp_path / "out.h5").write_bytes(b"12345")
    given = {"path": str(tmp_path / "out.h5"), "run": {"compute": {"backend": "auto"}}}
    facts = summarize(fake(25, **given, certificate={"backend": "hooks"})).file
    assert (facts.backend, facts.samples, facts.parameters, facts.entries) == ("hooks", 25, 4, 71)
    assert (facts.bytes, facts.path) == (5, given["path"])
    assert [(chain.text, chain.reduced) for chain in facts.chains] == [("identity", False)]
    assert summarize(fake(25, **given)).file.backend == "auto"


def test_samples_that_are_not_finite_change_nothing_else():
    broken, whole = fake(50, broken=(3, 17)), fake(50)
    kept = np.delete(np.arange(50), [3, 17])
    gradients = {name: g[kept] for name, g in whole.gradients.items()}
    reduced = FakeFile(gradients, whole.loss[kept], whole.target[kept], whole.index[kept])
    found, expected = summarize(broken).to_json(), summarize(reduced).to_json()
    assert found["nonfinite"] == {"count": 2, "index": broken.index[[3, 17]].tolist()}
    assert_holds({**found, "file": 0, "nonfinite": 0}, {**expected, "file": 0, "nonfinite": 0})


def test_few_samples_or_none():
    none = summarize(fake(3, broken=(0, 1, 2)))
    assert none.nonfinite.count == 3
    assert none.loss is none.norm is none.noise_scale.simple is None
    assert none.samples == ()
    assert all(row.mean_norm is None for row in none.parameters)
    one = summarize(plain(np.random.default_rng(1).normal(size=(1, 9)) / 3))
    assert one.norm.std is one.parameters[0].signal_to_noise is one.signal.signal_to_noise is None
    g = np.tile(np.array([[3.0, 4.0]]), (5, 1))
    rows = summarize(FakeFile({"w": g, "unused": 0 * g}, np.ones(5))).parameters
    assert [(row.signal_to_noise, row.share) for row in rows] == [(None, 1.0), (None, 0.0)]


def test_rows_are_more_exact_than_recorded_norms():
    """Where the mean is large against the noise, norms rounded to float32 lose the noise."""
    g = 1 + 1e-4 * np.random.default_rng(0).normal(size=(50, 8))
    rounded = {"norms": {"w": np.linalg.norm(g, axis=1).astype(np.float32)}}
    (row,) = summarize(plain(g, wrong=rounded)).parameters
    assert row.signal_to_noise == pytest.approx(g.mean(0) @ g.mean(0) / g.var(0).sum(), rel=1e-6)
    without = summarize(plain(g, rows=False, wrong=rounded)).parameters[0]
    assert without.signal_to_noise is None  # it cannot be told from rounding


def test_rows_that_overflowed_are_not_used():
    g = np.random.default_rng(0).normal(size=(20, 4))
    g[3] *= 1e5
    with np.errstate(over="ignore"):
        half = FakeChain("identity", {"w": g.astype(np.float16)})
    file = plain(g, rows=False, more=(half,), attributes={"dataset_sha256": "a"})
    summary = summarize(file)
    assert summary.directions is summary.spectrum is None
    assert "overflowed" in summary.missing[0].needs
    assert summary.noise_scale.trace_covariance == pytest.approx(g.var(0, ddof=1).sum(), rel=1e-9)
    found = difference(file, file)
    assert (found.exact, found.cosine) == (False, None)


def test_sums_that_a_file_keeps_give_the_mean():
    """A small file keeps Σgᵢ to be merged with others: second moments then need no chain mean."""
    file = fake(30)
    sums = {f"sum:{k}": g.sum(0) for k, g in file.gradients.items()}
    kept = {"mean_gradient": sums | {"n": np.array(30.0)}}
    given = {"rows": False, "more": (file.chain("second"),), "states": kept}
    found = summarize(fake(30, **given)).signal
    assert found.mean_entry == pytest.approx(summarize(file).signal.mean_entry, rel=1e-9)


def test_samples_have_their_own_names():
    g = np.random.default_rng(0).normal(size=(12, 5))
    g[7] = g[2]
    names = {"samples": {"id": np.array([f"image-{k}" for k in range(12)])}}
    file = plain(g, attributes={"dataset_sha256": "a"}, wrong=names)
    summary = summarize(file, nearest=2)
    assert summary.samples[0].id == f"image-{summary.samples[0].index}"
    assert summary.nearest.aligned[0].id == "image-7"
    (pair,) = summary.duplicates.same
    assert (pair.first_id, pair.second_id) == ("image-2", "image-7")
    assert difference(file, file).samples[0].id is not None


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"top": -1}, "-1"),
        ({"learning_rate": 0.0}, "learning rate"),
        ({"learning_rate": float("nan")}, "learning rate"),
        ({"clip": (-1.0,)}, "clipping norm"),
        ({"nearest": 1}, "the index 1"),
    ],
)
def test_arguments_out_of_range(asked, word):
    with pytest.raises(SpecError, match=word):
        summarize(fake(9), **asked)


def test_the_norm_of_the_mean_must_be_recorded():
    with pytest.raises(ResultFileError, match=r"'w' is not recorded"):
        summarize(plain(np.ones((2, 2)), wrong={"norm_attributes": {"w": {}}}))


def test_json_names_are_stable_and_read_back():
    summary = summarize(fake(30, broken=(2,), certificate=AUDITED | {"nan": float("nan")}))
    document = json.loads(json.dumps(summary.to_json(), allow_nan=False))
    assert set(document) == {
        "schema", "version", "file", "loss", "norm", "clipping", "noise_scale", "batch_tests",
        "cabs", "signal", "directions", "parameters", "classes", "samples", "largest_losses",
        "most_opposed", "nearest", "duplicates", "predictions", "spectrum", "fisher", "jensen",
        "nonfinite", "checks", "missing",
    }  # fmt: skip
    assert (document["schema"], document["version"]) == ("gradscope.stats", 1)
    for part, keys in {
        "parameters": "name shape entries mean_norm max_norm share mean_gradient_norm "
        "signal_to_noise noise_scale entry_signal_to_noise opposing",
        "norm": "mean std min max percentiles histogram",
        "samples": "index id size loss norm target prediction times_median cosine",
        "noise_scale": "trace_covariance gradient_norm_squared simple flag simple_interval "
        "trace_covariance_interval gradient_norm_squared_interval",
    }.items():
        found = document[part][0] if isinstance(document[part], list) else document[part]
        assert set(found) == set(keys.split())
    assert set(document["clipping"]["by_share"]) == {"1", "5", "10", "50"}
    assert document["file"]["certificate"]["nan"] is None
    assert document["file"]["proof"]["audited"] == AUDITED["audit"]["audited"]
    read = Summary.from_json(document)
    assert read.to_json() == document
    assert read.file.proof == Proof.of(AUDITED)


def test_a_statistic_reads_the_rows_of_the_finite_samples():
    """Shown and in JSON it is in tests/test_extend.py."""
    file = fake(12, broken=(3,))
    found = {name: np.zeros((12, g[0].size)) for name, g in file.gradients.items()}
    for name, places, rows in Data(file, Options()).rows():
        found[name][np.delete(np.arange(12), 3)[places]] = rows
    for name, g in file.gradients.items():
        flat = g.reshape(12, -1)
        assert np.array_equal(found[name], np.where(np.arange(12)[:, None] == 3, 0, flat))
    assert not list(Data(file, Options(rows=False)).rows())
    with pytest.raises(SpecError, match="registered twice"):
        statistic("norm")(lambda data: None)


def test_what_was_audited() -> None:
    proof = Proof.of(AUDITED)
    assert (proof.verified, proof.verify, proof.positions) == (True, "audit", (0, 6))
    assert (proof.batches, proof.proved) == (50, 3)
    assert proof.audited == ((0, 6), (203, 209), (343, 349))
    assert (proof.error, proof.parameter, proof.unproved) == (2e-7, "a", ("c", "b"))
    assert proof.merged is None


@pytest.mark.parametrize(
    ("certificate", "verified", "verify"),
    [
        ({}, None, None),
        ({"verified": False}, False, "never"),
        ({"verified": True}, True, None),  # of a version without audits
        ({"verified": True, "audit": "x"}, True, None),
        ({"verified": True, "audit": {"batches": "many"}}, True, None),
        ({"verified": True, "audit": {"audited": [[1]]}}, True, None),
        ({"verified": True, "audit": {"audited": 3, "unproved": {"a": 1}}}, True, None),
        ({"verified": True, "audit": {"error": float("nan")}}, True, None),
        ({"verified": True, "merged": [1]}, True, None),
        ({"verified": True, "positions": None}, True, None),
        ({"verified": True, "unproved": 7}, True, None),
        ({"verified": True, "proves": "perhaps not"}, True, None),
        ({"verified": [3], "proves": "perhaps not"}, None, None),
    ],
)
def test_what_is_missing_or_malformed_is_not_made_up(certificate, verified, verify) -> None:
    proof = Proof.of(certificate)
    assert (proof.verified, proof.verify) == (verified, verify)
    assert (proof.batches, proof.proved, proof.error, proof.audited) == (None, None, None, ())
