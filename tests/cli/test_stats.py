"""`gradscope stats` from the outside: against numpy on the rows; options, two files, a history."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.cli.conftest import SAMPLES, Gradscope
from tests.cli.forked import Forked
from tests.storage.test_hostile import _sealed

CLOSE = 1e-6


def rows_of(path: Path) -> dict[str, np.ndarray]:
    """Return {name: (N, p)} of a dense file."""
    with h5py.File(path) as file:
        names = json.loads(file.attrs["parameters"])
        rows = {item.attrs["name"]: item[...] for item in file["chains/0"].values()}
    return {name: rows[name].reshape(len(rows[name]), -1).astype(np.float64) for name in names}


def near(value: float) -> object:
    return pytest.approx(value, rel=CLOSE)


@pytest.mark.parametrize(("name", "samples"), [("digits_mlp", 90), ("text_transformer", 8)])
def test_numbers_of_every_kind(
    gradscope: Gradscope, tmp_path: Path, name: str, samples: int
) -> None:
    """`tests/stats` has each of them; here they come from a run, by way of a file."""
    path = tmp_path / "out.h5"
    config = ["--config", SAMPLES / name / "run.toml", "--samples", f":{samples}", "-q"]
    chains = ["-t", "identity", "-t", "sign | mean", "-t", "mean | sign"]
    done = gradscope("compute", *config, *chains, "--dtype", "float32", "-o", path)
    assert done.code == 0, done.err
    found = json.loads(gradscope("stats", path, "--lr", "0.1", "--json").out)
    parts = rows_of(path)
    with h5py.File(path) as file:
        loss = file["samples/loss"][...].astype(np.float64)
    g = np.concatenate(list(parts.values()), 1)
    n, mean, norms, dots = len(g), g.mean(0), np.linalg.norm(g, axis=1), g @ g.mean(0)
    big, variance = mean @ mean, g.var(0, ddof=1).sum()
    assert found["norm"]["percentiles"]["99"] == near(np.percentile(norms, 99))
    assert found["noise_scale"]["trace_covariance"] == near(variance)
    assert found["cabs"]["unclipped"] == near(0.1 * g.var(0).sum() / loss.mean())
    assert found["batch_tests"]["norm"] == near(variance / n / big)
    assert found["directions"]["cosine"]["mean"] == near(np.mean(dots / norms) / np.sqrt(big))
    (gap,) = found["jensen"]
    inside, outside = np.sign(g).mean(0), np.sign(mean)
    assert gap["gap"] == near(np.linalg.norm(inside - outside) / np.linalg.norm(outside))
    assert found["fisher"]["trace"] == near(np.mean(norms**2))
    for row, part in zip(found["parameters"], parts.values(), strict=True):
        own, spread = part.mean(0) @ part.mean(0), part.var(0).sum()
        assert row["signal_to_noise"] == near(own / spread)
        assert row["share"] == near(np.square(part).sum() / np.square(g).sum())
    assert all(check["passed"] for check in found["checks"])
    assert found["missing"] == []


def test_flipped_labels_and_a_duplicate_are_found(gradscope: Gradscope, tmp_path: Path) -> None:
    """1% of the digits' labels are wrong: nine in ten are among the 5% largest norms."""
    data = np.load(SAMPLES / "digits_mlp" / "data.npz")
    rng = np.random.default_rng(1)
    images, labels = data["images"], data["labels"].copy()
    wrong = rng.choice(len(labels), len(labels) // 100, replace=False)
    labels[wrong] = (labels[wrong] + rng.integers(1, 10, len(wrong))) % 10
    twin = next(k for k in range(len(labels)) if k not in wrong)
    np.savez(
        tmp_path / "data.npz",
        images=np.concatenate([images, images[[twin]]]),
        labels=np.append(labels, labels[twin]),
    )
    spec = (SAMPLES / "digits_mlp" / "dataset.toml").read_text()
    (tmp_path / "dataset.toml").write_text(spec)
    options = ["--config", SAMPLES / "digits_mlp" / "run.toml", "-t", "identity", "-q"]
    weights = SAMPLES / "digits_mlp" / "weights.safetensors"
    path = tmp_path / "out.h5"
    done = gradscope("compute", weights, tmp_path / "dataset.toml", *options, "-o", path)
    assert done.code == 0, done.err
    found = json.loads(gradscope("stats", path, "--top", "90", "--json").out)
    flipped = set(wrong.tolist())
    large = {row["index"] for row in found["samples"]}
    assert len(large & flipped) >= 0.9 * len(flipped)
    first = {row["index"] for row in found["largest_losses"][: len(flipped)]}
    assert len(first & flipped) >= 0.9 * len(flipped)
    pairs = [(pair["first"], pair["second"]) for pair in found["duplicates"]["same"]]
    assert pairs == [(twin, len(labels))]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_fails_no_check(gradscope: Gradscope, tmp_path: Path, dtype: str) -> None:
    """Rows are rounded, norms are not: what differs between them is no fault of the file."""
    path, config = tmp_path / "out.h5", SAMPLES / "digits_mlp" / "run.toml"
    options = ["--samples", ":100", "--dtype", dtype, "-t", "identity", "-q", "-o", path]
    assert gradscope("compute", "--config", config, *options).code == 0
    found = json.loads(gradscope("stats", path, "--json").out)
    assert all(check["passed"] for check in found["checks"])


@pytest.fixture(scope="module")
def results(forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("results")
    for name, samples in (("a.h5", ":80"), ("b.h5", "20:120")):
        options = ["--config", SAMPLES / "digits_mlp" / "run.toml", "--samples", samples, "-q"]
        chains = ["-t", "identity", "-t", "mean"]
        assert forked.run("compute", *options, *chains, "-o", name, cwd=folder).code == 0
    return folder / "a.h5", folder / "b.h5"


def test_options_reach_the_numbers(gradscope: Gradscope, results: tuple[Path, Path]) -> None:
    options = ["--lr", "0.5", "--clip", "0.1", "--clip", "1", "--nearest", "3", "--top", "4"]
    document = json.loads(gradscope("stats", results[0], *options, "--json").out)
    assert document["cabs"]["learning_rate"] == 0.5
    assert [clip["norm"] for clip in document["clipping"]["asked"]] == [0.1, 1.0]
    assert document["nearest"]["index"] == 3
    assert len(document["nearest"]["aligned"]) == len(document["most_opposed"]) == 4
    assert all(check["passed"] for check in document["checks"])
    assert document["missing"] == []


def test_rows_can_be_left_alone(gradscope: Gradscope, results: tuple[Path, Path]) -> None:
    document = json.loads(gradscope("stats", results[0], "--no-rows", "--json").out)
    assert document["directions"] is None
    assert "--no-rows" in document["missing"][0]["needs"]


def test_two_files(gradscope: Gradscope, results: tuple[Path, Path], tmp_path: Path) -> None:
    page, plot = tmp_path / "out.html", tmp_path / "out.svg"
    done = gradscope("stats", *results, "--json", "--html", page, "--plot", plot)
    document = json.loads(done.out)
    assert document["schema"] == "gradscope.stats.difference"
    assert document["common"] == 60
    assert {sample["moved"] for sample in document["samples"]} == {0.0}
    assert page.exists()
    assert plot.exists()
    assert "What changed" in gradscope("stats", *results).out


def test_a_history(gradscope: Gradscope, results: tuple[Path, Path], tmp_path: Path) -> None:
    import gradscope as library
    from gradscope.stats import summarize
    from gradscope.training import record

    path = tmp_path / "run.jsonl"
    for step, result in enumerate(results):
        with library.open(result) as file:
            record(path, step, summarize(file))
    done = gradscope("stats", path, "--plot", tmp_path / "out.png", "--html", tmp_path / "out.html")
    assert done.code == 0, done.err
    assert "Over time" in done.out
    assert len(json.loads(gradscope("stats", path, "--json").out)["steps"]) == 2


def test_piped_output_is_plain(
    gradscope: Gradscope, results: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    done = gradscope("stats", results[0], "--nearest", "0")
    assert "\x1b" not in done.out
    assert all(len(line) <= 40 for line in done.out.splitlines()[1:])


def test_a_chain_in_the_file_that_is_none_is_a_fault_of_the_file(
    gradscope: Gradscope, results: tuple[Path, Path], tmp_path: Path
) -> None:
    bad, out = tmp_path / "bad.h5", tmp_path / "out.h5"
    for text in ("clip:max_norm", "mean |", "a b", "|", "project:dim=3,dim=4", "", "x" * 20_000):

        def spoil(file: h5py.File, text: str = text) -> None:
            file["chains/1"].attrs["chain"] = text

        _sealed(results[0], bad, spoil)
        for arguments in (["stats", bad], ["merge", bad, "-o", out]):
            done = gradscope(*arguments)
            known = text.startswith("x") and arguments[0] == "stats"
            assert done.code == (0 if known else 3), done.err
            if done.code:
                assert str(bad) in done.err
                assert "Traceback" not in done.err
    assert not out.exists()
