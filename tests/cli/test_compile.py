"""`--compile`: the same numbers, and a note that says what was done."""

import json
from pathlib import Path

import h5py
import numpy as np

from tests.cli.conftest import Gradscope

CHAIN = "clip:max_norm=1 | mean"


def test_a_compiled_run_gives_the_same_file(
    gradscope: Gradscope, digits: Path, tmp_path: Path
) -> None:
    files, notes = {}, {}
    for way, words in (("plain", ["--no-compile"]), ("compiled", ["--compile"])):
        files[way] = tmp_path / f"{way}.h5"
        run = ["--backend", "vmap", "--batch-size", "64", "--samples", "0:150", "-t", CHAIN]
        done = gradscope("compute", "--config", digits, *run, *words, "--json", "-o", files[way])
        assert done.code == 0, done.err
        notes[way] = json.loads(done.out)["notes"]
    assert not any("compiled" in note for note in notes["plain"])
    assert any(note.startswith("vmap compiled in") for note in notes["compiled"])
    with h5py.File(files["plain"]) as plain, h5py.File(files["compiled"]) as compiled:
        for group in ("samples", "norms", "chains/0"):
            assert plain[group].keys() == compiled[group].keys()
            for name, values in plain[group].items():
                np.testing.assert_allclose(compiled[group][name], values, rtol=1e-9, atol=1e-12)


def test_a_run_of_one_batch_is_not_compiled(
    gradscope: Gradscope, digits: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.h5"
    run = ["--samples", "0:40", "--compile", "--json", "-o", out]
    done = gradscope("compute", "--config", digits, *run)
    assert done.code == 0, done.err
    assert any(note.startswith("not compiled: about 0 s") for note in json.loads(done.out)["notes"])


def test_the_run_file_may_ask_for_it(gradscope: Gradscope, digits: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    text = digits.read_text().replace("[compute]", "[compute]\ncompile = true")
    assert "compile = true" in text
    config.write_text(text)
    for name in digits.parent.iterdir():
        if name.suffix != ".toml" or name.name != "run.toml":
            (tmp_path / name.name).symlink_to(name)
    run = ["--samples", "0:40", "--dry-run", "--json"]
    asked = gradscope("compute", "--config", config, *run)
    assert any("not compiled" in note for note in json.loads(asked.out)["notes"]), asked.err
    refused = gradscope("compute", "--config", config, *run, "--no-compile")
    assert not any("compiled" in note for note in json.loads(refused.out)["notes"])


def test_compare_adds_a_row(gradscope: Gradscope, digits: Path) -> None:
    words = ["--backends", "vmap", "--samples", "0:8", "--compile", "--json"]
    done = gradscope("compare", "--config", digits, *words)
    assert done.code == 0, done.err
    rows = {row["backend"]: row["status"] for row in json.loads(done.out)["rows"]}
    assert rows == {"vmap": "agrees", "vmap compiled": "agrees"}
