"""`stats` from the outside: its options, two files, a history."""

import json
from pathlib import Path

import h5py
import pytest

from tests.cli.conftest import Gradscope
from tests.storage.test_hostile import _sealed


@pytest.fixture
def results(gradscope: Gradscope, digits: Path, tmp_path: Path) -> tuple[Path, Path]:
    paths = tmp_path / "a.h5", tmp_path / "b.h5"
    for path, samples in zip(paths, (":80", "20:120"), strict=True):
        options = ["--config", digits, "--samples", samples, "-q", "-t", "identity"]
        assert gradscope("compute", *options, "-o", path).code == 0
    return paths


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
    from gradscope.stats import record, summarize

    path = tmp_path / "run.jsonl"
    for step, result in enumerate(results):
        with library.open(result) as file:
            record(path, step, summarize(file))
    done = gradscope("stats", path, "--plot", tmp_path / "out.png", "--html", tmp_path / "out.html")
    assert done.code == 0, done.err
    assert "Over time" in done.out
    assert len(json.loads(gradscope("stats", path, "--json").out)["steps"]) == 2


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["a.h5", "b.h5", "a.h5"], "3 files"),
        (["a.h5", "b.h5", "--nearest", "0"], "--nearest"),
        (["a.h5", "--nearest", "100"], "sample 100"),
        (["a.h5", "--lr", "-1"], "learning rate"),
        (["run.jsonl", "a.h5"], "2 files"),
        (["run.jsonl", "--clip", "1"], "--clip"),
    ],
)
def test_usage_errors(
    gradscope: Gradscope,
    results: tuple[Path, Path],
    arguments: list[str],
    word: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(results[0].parent)
    done = gradscope("stats", *arguments)
    assert done.code == 2
    assert word in done.err
    assert done.out == ""


@pytest.mark.parametrize("width", ["40", "80", "200"])
def test_piped_output_is_plain(
    gradscope: Gradscope,
    results: tuple[Path, Path],
    width: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    monkeypatch.setenv("FORCE_COLOR", "1")
    done = gradscope("stats", results[0], "--nearest", "0")
    assert "\x1b" not in done.out
    assert all(len(line) <= int(width) for line in done.out.splitlines()[1:])


@pytest.mark.parametrize(
    "text", ["clip:max_norm", "mean |", "a b", "|", "project:dim=3,dim=4", "", "x" * 20_000]
)
def test_a_chain_in_the_file_that_is_none_is_a_fault_of_the_file(
    gradscope: Gradscope, digits: Path, tmp_path: Path, text: str
) -> None:
    def spoil(file: h5py.File) -> None:
        file["chains/0"].attrs["chain"] = text

    part, bad, out = tmp_path / "part.h5", tmp_path / "bad.h5", tmp_path / "out.h5"
    options = ["--config", digits, "--samples", ":20", "-q", "-t", "mean"]
    assert gradscope("compute", *options, "-o", part).code == 0
    _sealed(part, bad, spoil)
    for arguments in (["stats", bad], ["merge", bad, "-o", out]):
        done = gradscope(*arguments)
        assert done.code == (0 if text.startswith("x") and arguments[0] == "stats" else 3), done.err
        if done.code:
            assert str(bad) in done.err
            assert "Traceback" not in done.err
    assert not out.exists()
