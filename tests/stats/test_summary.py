"""What a file is, what of it is left out, its JSON, and the registry of statistics."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import gradscope
from gradscope.blocks import DenseBlock, Gradients
from gradscope.errors import ResultFileError, SpecError
from gradscope.report import render
from gradscope.stats import Record, Section, Summary, difference, measure, statistic, summarize
from gradscope.stats.certificate import Proof
from gradscope.stats.summary import statistics
from gradscope.storage import ChainPlan, FilePlan, Rows, open_file, open_writer
from tests.report.shown import screen
from tests.stats.fakes import FakeChain, FakeFile, fake, plain

DIGITS = Path(__file__).parents[2] / "sample_models" / "digits_mlp"
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


def write(path, file):
    """Store the gradients of a fake file in two batches."""
    plan = FilePlan(
        run={"compute": {"backend": "auto"}},
        fingerprint={},
        attributes={},
        n=file.n,
        parameters=file.parameters,
        chains=(ChainPlan("identity", False),),
        dtype=torch.float64,
        layout="auto",
    )
    with open_writer(path, plan) as writer:
        for rows in (slice(0, file.n // 3), slice(file.n // 3, None)):
            part = {name: torch.from_numpy(g[rows]) for name, g in file.gradients.items()}
            samples = {k: torch.from_numpy(np.asarray(v[rows])) for k, v in file.samples.items()}
            norms = {name: torch.from_numpy(v[rows]) for name, v in file.norms.items()}
            chains = (Gradients({name: DenseBlock(g) for name, g in part.items()}),)
            writer.append(Rows(**samples, norms=norms, chains=chains), {})
        writer.finish(
            results={},
            certificate={"verified": True, "backend": "hooks"},
            norm_attributes=file.norm_attributes,
        )


def assert_close(found, expected):
    """Equal, numbers to the order in which they were added."""
    if isinstance(found, dict):
        assert found.keys() == expected.keys()
        found, expected = list(found.values()), list(expected.values())
    if isinstance(found, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    elif isinstance(found, float):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
    else:
        assert found == expected


@pytest.mark.parametrize("broken", [(), (2, 9)], ids=["finite", "broken"])
def test_a_stored_file_has_the_statistics_of_its_gradients(tmp_path, broken):
    memory = fake(25, broken=broken)
    write(tmp_path / "out.h5", memory)
    with open_file(tmp_path / "out.h5") as file:
        stored = summarize(file)
    found, expected = stored.to_json(), summarize(memory).to_json()
    assert_close({**found, "file": None}, {**expected, "file": None})
    assert (stored.file.backend, stored.file.samples, stored.file.entries) == ("hooks", 25, 71)
    assert stored.file.bytes == (tmp_path / "out.h5").stat().st_size
    assert [(chain.text, chain.reduced) for chain in stored.file.chains] == [("identity", False)]


def test_samples_that_are_not_finite_change_nothing_else():
    broken, whole = fake(50, broken=(3, 17)), fake(50)
    kept = np.delete(np.arange(50), [3, 17])
    gradients = {name: g[kept] for name, g in whole.gradients.items()}
    reduced = FakeFile(gradients, whole.loss[kept], whole.target[kept], whole.index[kept])
    with_them, without = summarize(broken), summarize(reduced)
    assert with_them.nonfinite.count == 2
    assert with_them.nonfinite.index == tuple(broken.index[[3, 17]])
    for part in ("loss", "norm", "noise_scale", "parameters", "samples"):
        assert getattr(with_them, part) == getattr(without, part)


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
    assert "not finite" in summary.missing[0].needs
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


def test_flipped_labels_rank_high():
    """1% of the digits get another label: they have the largest losses, and large norms."""
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
    labels, generator = torch.tensor(data["labels"]).long(), torch.Generator().manual_seed(0)
    n = len(labels) // 100
    flipped = torch.randperm(len(labels), generator=generator)[:n]
    labels[flipped] = (labels[flipped] + torch.randint(1, 10, (n,), generator=generator)) % 10
    with gradscope.Scope(model.double().eval(), "cross_entropy") as scope:
        summary = measure(scope, images, labels, top=5 * n)
    planted = set(flipped.tolist())

    def found(rows, k):
        return len(planted & {row.index for row in rows[:k]})

    assert found(summary.largest_losses, n) == 16  # of 17: precision at 17 is 0.94
    assert found(summary.samples, n) == 6  # images that the model gets wrong have norms as large
    assert found(summary.samples, 5 * n) == 17  # but all are among the largest 5%
    assert found(summary.most_opposed, n) == 5


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"top": -1}, "-1"),
        ({"learning_rate": 0.0}, "learning rate"),
        ({"learning_rate": float("nan")}, "learning rate"),
        ({"clip": (-1.0,)}, "clipping norm"),
        ({"nearest": 1}, "sample 1"),
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
        "most_opposed", "nearest", "duplicates", "spectrum", "fisher", "jensen", "nonfinite",
        "checks", "missing",
    }  # fmt: skip
    assert (document["schema"], document["version"]) == ("gradscope.stats", 1)
    assert set(document["parameters"][0]) == {
        "name", "shape", "entries", "mean_norm", "max_norm", "share", "mean_gradient_norm",
        "signal_to_noise", "noise_scale", "entry_signal_to_noise", "opposing",
    }  # fmt: skip
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
    assert document["file"]["certificate"]["nan"] is None
    assert document["file"]["proof"]["audited"] == AUDITED["audit"]["audited"]
    read = Summary.from_json(document)
    assert read.to_json() == document
    assert read.file.proof == Proof.of(AUDITED)
    del document["file"]["proof"]  # as an earlier version wrote it
    assert Summary.from_json(document).file.proof == Proof()


def test_a_statistic_is_one_registration(monkeypatch):
    """Computed from rows, it is in the JSON, in short, and on the terminal, and reads back."""

    class Extremes(Record):
        largest: float

    def show(found, summary):
        yield Section("Entries", [("largest [red]\x1b[2J", f"{found.largest:.3g}")])

    monkeypatch.setattr(statistics, "_entries", dict(statistics._entries))
    monkeypatch.setitem(globals(), "Extremes", Extremes)

    @statistic("extremes", place=25, sections=show, answers=lambda found, _: [("how far", "!")])
    def extremes(data) -> Extremes:
        return Extremes(largest=max(float(abs(g).max()) for _, _, g in data.rows()))

    file = fake(12)
    summary = summarize(file)
    expected = max(float(abs(g).max()) for g in file.gradients.values())
    assert summary.to_json()["extremes"] == {"largest": expected}
    assert Summary.from_json(summary.to_json()).extremes == summary.extremes
    text = screen(render, summary, 80)
    assert r"largest [red]\x1b[2J" in text
    assert text.index("Which clipping") < text.index("\nEntries") < text.index("How large a batch")
    assert "how far" in text
    with pytest.raises(SpecError, match="registered twice"):
        statistic("extremes")(extremes)


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
