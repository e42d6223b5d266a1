"""`merge` looks at a few samples of each shard, and with --config computes them anew."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import h5py
import numpy as np
import pytest

from gradscope.storage import open_file
from tests.cli.conftest import Gradscope
from tests.cli.forked import Forked
from tests.run import project
from tests.storage.test_hostile import _sealed

RUN = "version = 1\n" + project.RUN + '[compute]\ndtype = "{dtype}"\n'

Shards = Callable[..., list[Path]]
NAMES = ("first.weight", "first.bias", "last.weight", "last.bias")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with three run files: of its run, of another, and of another number format."""
    path = project.write(tmp_path_factory.mktemp("home"))
    for name, loss, dtype in (
        ("run", "loss", "float64"), ("other", "weighted", "float64"), ("half", "loss", "bfloat16")
    ):  # fmt: skip
        (path / f"{name}.toml").write_text(RUN.format(loss=f"model.py:{loss}", dtype=dtype))
    return path


@pytest.fixture(scope="module")
def shards(forked: Forked, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Shards:
    """Return a function that gives the three shards of a run, the last one computed with `last`."""

    @cache
    def computed(*options: str, last: tuple[str, ...] = ()) -> list[Path]:
        place = tmp_path_factory.mktemp("shards")
        words = ["compute", "--config", "run.toml", "--batch-size", "7", "-q", *options]
        for k in range(3):
            shard = (*(last if k == 2 else ()), "--shard", f"{k}/3", "-o", place / "o.h5")
            done = forked.run(*words, *shard, cwd=home)
            assert done.code == 0, done.err
        return sorted(place.iterdir())

    return computed


@pytest.mark.parametrize(("dtype", "chain"), [("float64", "identity"), ("float32", "mean")])
def test_samples_are_computed_anew(
    gradscope: Gradscope, home: Path, shards: Shards, tmp_path: Path, dtype: str, chain: str
) -> None:
    """The settings of the run are the files' own: the run file need not have them."""
    files = shards("--dtype", dtype, "-t", chain, "--parameters", "first.*", "--seed", "4")
    given = ("merge", *files, "-o", tmp_path / "o.h5", "--config", home / "half.toml")
    done = gradscope(*given)
    assert done.code == 0, done.err
    assert "recomputed   12 samples one by one, with equal losses and norms" in done.out
    document = json.loads(gradscope(*given, "--overwrite", "--json").out)
    assert (document["recomputed"], document["notes"]) == (12, [])
    with open_file(tmp_path / "o.h5") as file:
        rows = {k: v for k, v in project.expected(home).items() if k.startswith("first")}
        norms = np.sqrt(sum(np.square(g).sum(axis=tuple(range(1, g.ndim))) for g in rows.values()))
        np.testing.assert_allclose(file.samples["norm"], norms, rtol=1e-4)


@pytest.mark.parametrize(
    ("column", "names", "words"),
    [
        ("loss", ["samples/loss"], "the loss of sample "),
        (
            "norm",
            ["samples/norm", *(f"norms/{name}" for name in NAMES)],
            "gradient norm of sample ",
        ),
        (None, ["samples/norm"], "the norms of its parameters give"),
        (None, ["norms/first.bias"], "norm of its gradient for 'first.bias'"),
    ],
)
def test_other_numbers_are_refused_and_nothing_is_written(
    gradscope: Gradscope,
    home: Path,
    shards: Shards,
    tmp_path: Path,
    column: str | None,
    names: list[str],
    words: str,
) -> None:
    """Those that contradict each other without a model; others where they are computed anew."""

    def spoil(file: h5py.File) -> None:
        for name in names:
            file[name][...] *= 1.01

    files, bad = [*shards("-t", "mean" if column else "identity")], tmp_path / "bad.h5"
    _sealed(files[1], bad, spoil)  # nothing but its numbers can tell
    files[1] = bad
    given = ("merge", *files, "-o", tmp_path / "o.h5")
    refused = gradscope(*given, *(("--config", home / "run.toml") if column else ()))
    assert (refused.code, refused.out) == (3, "")
    told = " ".join(refused.err.split())
    assert str(bad) in told and words in told
    assert [*tmp_path.iterdir()] == [bad]
    if column:
        with open_file(bad) as file:
            place = int(told.partition("sample ")[2].split()[0])
            row = file.samples["index"].tolist().index(place)
            stored = float(file.samples[column][row])
        anew = f"and {stored / 1.01:.3g} when it is recomputed"
        assert f"{stored:.3g} in this file {anew}" in told
        assert gradscope(*given).code == 0  # nothing else can tell


def test_the_run_file_of_another_run(
    gradscope: Gradscope, home: Path, shards: Shards, tmp_path: Path
) -> None:
    given = ("merge", *shards("-t", "mean"), "-o", tmp_path / "o.h5", "--config")
    refused = gradscope(*given, home / "other.toml")
    assert (
        refused.code == 3 and "the run file does not match this result: loss.name is" in refused.err
    )
    code = (home / "model.py").read_text()
    (home / "model.py").write_text(f"{code}\n# changed\n")
    refused = gradscope(*given, home / "run.toml")
    assert refused.code == 3 and "model.py has changed" in refused.err
    (home / "model.py").write_text(code)
    assert gradscope(*given, home / "none.toml").code == 2
    assert not (tmp_path / "o.h5").exists()


@pytest.mark.full
def test_what_cannot_be_computed_by_itself_is_told(
    gradscope: Gradscope, home: Path, shards: Shards, tmp_path: Path
) -> None:
    given = ("-o", tmp_path / "o.h5", "--config", home / "run.toml", "--overwrite")
    files = shards("-t", "mean", "--coupling", "own-loss", "--backend", "vmap")
    done = gradscope("merge", *files, *given)
    assert done.code == 0 and "depend on which samples share a batch" in " ".join(done.out.split())
    options = ("--mode", "train")
    files = shards("-t", "mean", *options, last=("--verify", "never"))
    document = json.loads(gradscope("merge", *files, *given, "--json").out)
    assert document["recomputed"] == 0 and "train mode" in document["notes"][0]
    files = shards("-t", "mean", *options)
    assert json.loads(gradscope("merge", *files, *given, "--json").out)["recomputed"] == 12


def test_shards_that_were_not_audited_are_told(
    gradscope: Gradscope,
    home: Path,
    shards: Shards,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    files = shards("-t", "mean", last=("--verify", "never"))
    done = gradscope("merge", *files, "-o", tmp_path / "o.h5")
    assert "NOT VERIFIED: samples 42 to 59 (verify = never)" in done.out
    page = tmp_path / "o.html"
    document = json.loads(gradscope("stats", tmp_path / "o.h5", "--html", page, "--json").out)
    proof = document["file"]["proof"]
    assert (proof["verified"], proof["batches"], proof["proved"]) == (False, 9, 4)
    assert proof["merged"]["unverified"] == [[42, 59]]
    assert "4 of 9 batches audited" in page.read_text()


@pytest.mark.parametrize(
    ("model", "options"),
    [
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
