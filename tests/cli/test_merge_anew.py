"""`merge` looks at a few samples of each shard, and with --config computes them anew."""

import json
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from gradscope.storage import open_file
from tests.cli.conftest import Gradscope
from tests.run import project
from tests.storage.test_hostile import _sealed

RUN = """version = 1
[model]
factory = "model.py:build"
[checkpoint]
path = "weights.pt"
[dataset]
path = "data.npz"
[loss]
name = "model.py:{loss}"
[compute]
dtype = "{dtype}"
"""

Shards = Callable[..., list[Path]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    project.write(tmp_path)
    (tmp_path / "run.toml").write_text(RUN.format(loss="loss", dtype="float64"))
    return tmp_path


@pytest.fixture
def shards(gradscope: Gradscope, folder: Path) -> Shards:
    """Return a function that computes the three shards of a run, the last one with `last`."""

    def make(*options: str, last: tuple[str, ...] = ()) -> list[Path]:
        words = ["compute", "--config", folder / "run.toml", "--batch-size", "7", "-q", *options]
        for k in range(3):
            more = last if k == 2 else ()
            done = gradscope(*words, *more, "--shard", f"{k}/3", "-o", folder / "o.h5")
            assert done.code == 0, done.err
        return sorted(folder.glob("o.shard-*.h5"))

    return make


def spoil(path: Path, change: Callable[[h5py.File], None]) -> None:
    """Change a file, and seal it again: nothing but its numbers can tell."""
    _sealed(path, path.with_suffix(".new"), change)
    path.with_suffix(".new").replace(path)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("chain", ["identity", "mean"])
def test_samples_are_computed_anew(
    gradscope: Gradscope, folder: Path, shards: Shards, dtype: str, chain: str
) -> None:
    """The settings of the run are the files' own: the run file need not have them."""
    (folder / "run.toml").write_text(RUN.format(loss="loss", dtype="bfloat16"))
    files = shards("--dtype", dtype, "-t", chain, "--parameters", "first.*", "--seed", "4")
    given = ("merge", *files, "-o", folder / "o.h5", "--config", folder / "run.toml")
    done = gradscope(*given)
    assert done.code == 0, done.err
    assert "recomputed   12 samples one by one: the same losses and norms" in done.out
    document = json.loads(gradscope(*given, "--overwrite", "--json").out)
    assert (document["recomputed"], document["notes"]) == (12, [])
    with open_file(folder / "o.h5") as file:
        rows = {k: v for k, v in project.expected(folder).items() if k.startswith("first")}
        norms = np.sqrt(sum(np.square(g).sum(axis=tuple(range(1, g.ndim))) for g in rows.values()))
        np.testing.assert_allclose(file.samples["norm"], norms, rtol=1e-4)


def scaled(paths: tuple[str, ...], factor: float) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        for path in paths:
            file[path][...] = factor * file[path][...]

    return change


ALL_NORMS = ("samples/norm", *(f"norms/{name}" for name in
             ("first.weight", "first.bias", "last.weight", "last.bias")))  # fmt: skip


@pytest.mark.parametrize(
    ("paths", "what"),
    [
        (("samples/loss",), "loss"),
        (ALL_NORMS, "gradient norm"),
    ],
)
def test_other_numbers_are_refused_and_nothing_is_written(
    gradscope: Gradscope, folder: Path, shards: Shards, paths: tuple[str, ...], what: str
) -> None:
    files = shards("-t", "mean")
    spoil(files[1], scaled(paths, 1.01))
    before = sorted(folder.iterdir())
    config = ("--config", folder / "run.toml")
    refused = gradscope("merge", *files, "-o", folder / "o.h5", *config)
    assert (refused.code, refused.out) == (3, "")
    told = " ".join(refused.err.split())
    assert str(files[1]) in told and f"has the {what} " in told and "computed anew" in told
    with open_file(files[1]) as file:
        column = "loss" if what == "loss" else "norm"
        place = int(told.partition("sample ")[2].split()[0])
        row = file.samples["index"].tolist().index(place)
        stored = float(file.samples[column][row])
    assert f"{stored:.6g} in this file, and {stored / 1.01:.6g} when" in told
    assert sorted(folder.iterdir()) == before
    assert gradscope("merge", *files, "-o", folder / "o.h5").code == 0  # nothing else can tell


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (("samples/norm",), "and those of its parameters make"),
        (("norms/first.bias",), "by 'first.bias' is recorded"),
    ],
)
def test_numbers_that_contradict_each_other_need_no_model(
    gradscope: Gradscope, folder: Path, shards: Shards, paths: tuple[str, ...], words: str
) -> None:
    files = shards("-t", "identity")
    spoil(files[2], scaled(paths, 1.01))
    before = sorted(folder.iterdir())
    refused = gradscope("merge", *files, "-o", folder / "o.h5")
    assert (refused.code, refused.out) == (3, "")
    told = " ".join(refused.err.split())
    assert str(files[2]) in told and words in told
    assert sorted(folder.iterdir()) == before


def test_the_run_file_of_another_run(gradscope: Gradscope, folder: Path, shards: Shards) -> None:
    files = shards("-t", "mean")
    given = ("merge", *files, "-o", folder / "o.h5", "--config", folder / "run.toml")
    (folder / "run.toml").write_text(RUN.format(loss="weighted", dtype="float64"))
    refused = gradscope(*given)
    assert refused.code == 3 and "the run file is of another run: loss.name is" in refused.err
    (folder / "run.toml").write_text(RUN.format(loss="loss", dtype="float64"))
    code = (folder / "model.py").read_text()
    (folder / "model.py").write_text(f"{code}\n# changed\n")
    refused = gradscope(*given)
    assert refused.code == 3 and "model.py has changed" in refused.err
    (folder / "model.py").write_text(code)
    (folder / "run.toml").unlink()
    assert gradscope(*given).code == 2
    assert not (folder / "o.h5").exists()


def test_what_cannot_be_computed_by_itself_is_told(
    gradscope: Gradscope, folder: Path, shards: Shards
) -> None:
    given = ("-o", folder / "o.h5", "--config", folder / "run.toml", "--overwrite")
    files = shards("-t", "mean", "--coupling", "own-loss", "--backend", "vmap")
    done = gradscope("merge", *files, *given)
    assert done.code == 0 and "depend on which samples share a batch" in " ".join(done.out.split())
    options = ("--mode", "train", "--overwrite")
    files = shards("-t", "mean", *options, last=("--verify", "never"))
    document = json.loads(gradscope("merge", *files, *given, "--json").out)
    assert document["recomputed"] == 0 and "train mode" in document["notes"][0]
    files = shards("-t", "mean", *options)
    assert json.loads(gradscope("merge", *files, *given, "--json").out)["recomputed"] == 12


def test_shards_that_were_not_audited_are_told(
    gradscope: Gradscope, folder: Path, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    files = shards("-t", "mean", last=("--verify", "never"))
    done = gradscope("merge", *files, "-o", folder / "o.h5")
    assert "NOT VERIFIED: samples 42 to 59 (verify = never)" in done.out
    page = folder / "o.html"
    document = json.loads(gradscope("stats", folder / "o.h5", "--html", page, "--json").out)
    proof = document["file"]["proof"]
    assert (proof["verified"], proof["batches"], proof["proved"]) == (False, 9, 4)
    assert proof["merged"]["unverified"] == [[42, 59]]
    assert "4 of 9 batches audited" in page.read_text()


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("digits_mlp", ("--labels", "sampled")),
        ("digits_mlp", ("--labels", "exact")),
        ("digits_batchnorm", ("--mode", "train", "--coupling", "frozen")),
    ],
)
def test_settings_of_the_run_hold_anew(
    gradscope: Gradscope, digits: Path, tmp_path: Path, model: str, options: tuple[str, ...]
) -> None:
    config = digits.parent.parent / model / "run.toml"
    words = ("compute", "--config", config, "-t", "second_moment", "-q", *options)
    for k in range(2):
        span = ("--samples", ":32", "--batch-size", "8", "--shard", f"{k}/2")
        done = gradscope(*words, *span, "-o", tmp_path / "o.h5")
        assert done.code == 0, done.err
    done = gradscope("merge", tmp_path, "-o", tmp_path / "o.h5", "--config", config)
    assert done.code == 0 and "8 samples one by one" in done.out, done.err
