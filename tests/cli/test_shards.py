"""Many workers: their files, merged, are the file of one process."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from gradscope.storage import open_file
from tests.cli.conftest import Gradscope
from tests.cli.forked import Forked
from tests.run import project
from tests.run.test_pipeline import contents

CHAINS = (
    "identity",
    "clip:max_norm=1 | mean",
    "mean:standard_error=true | scale:by=2",
    "var | norm:p=1",
    "histogram:bins=8",
    "quantile:q=0.3",
    "abs | max",
    "project:dim=6,seed=1 | gram",
    "project:dim=6,kind=sjlt,nonzeros=2",
    "project:dim=6,kind=sjlt,per=parameter",
    "noise:std=0.1 | second_moment",
    "norm",
)


def run_of(folder: Path, chains: tuple[str, ...] = CHAINS) -> list[str]:
    """Return a run of 60 samples in batches of 7."""
    return [
        *("compute", f"{folder}/weights.pt", f"{folder}/data.npz"),
        *("--model", f"{folder}/model.py:build", "--loss", f"{folder}/model.py:loss"),
        *("--batch-size", "7", "--dtype", "float64"),
        *(word for chain in chains for word in ("-t", chain)),
    ]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return run_of(project.write(tmp_path_factory.mktemp("project")))


@pytest.fixture(scope="module")
def made(forked: Forked, options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole run, its three shards, and one of another seed."""
    folder = tmp_path_factory.mktemp("made")
    for words in (
        ("-o", "whole.h5"),
        *(("-o", "o.h5", "--shard", f"{k}/3") for k in range(3)),
        ("-o", "other.h5", "--shard", "1/3", "--seed", "5"),
    ):
        done = forked.run(*options, *words, "-q", cwd=folder)
        assert done.code == 0, done.err
    return folder


@pytest.fixture
def files(made: Path, tmp_path: Path) -> list[Path]:
    """The shards, to do with as one likes."""
    found = sorted(made.glob("o.shard-*.h5"))
    return [Path(shutil.copy2(path, tmp_path)) for path in found]


def assert_same_run(path: Path, whole: Path) -> None:
    """Rows to the last bit, aggregates to 1e-12; and the same words."""
    found, wanted = contents(path), contents(whole)
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        if key.startswith(("samples", "norms", "chains/0", "chains/9")):
            assert found[key].tobytes() == value.tobytes(), key
        else:
            np.testing.assert_allclose(found[key], value, rtol=1e-12, atol=1e-14, err_msg=key)
    with open_file(path) as file, open_file(whole) as single:
        assert file.run == single.run
        assert file.identity == single.identity
        assert file.attributes == single.attributes
        for name, numbers in single.norm_attributes.items():
            assert file.norm_attributes[name] == pytest.approx(numbers, rel=1e-12)


def shard(gradscope: Gradscope, options: list[str], out: Path, index: int, count: int) -> Path:
    done = gradscope(*options, "--shard", f"{index}/{count}", "-o", out)
    assert done.code == 0, done.err
    return out.with_name(f"{out.stem}.shard-{index}-of-{count}.h5")


@pytest.mark.sampled
@pytest.mark.parametrize("count", [3, 7])
def test_shards_equal_the_single_run(
    gradscope: Gradscope,
    options: list[str],
    made: Path,
    files: list[Path],
    tmp_path: Path,
    count: int,
) -> None:
    out = tmp_path / "o.h5"
    if count != 3:
        files = [shard(gradscope, options, out, k, count) for k in range(count)]
    assert not out.exists()
    done = gradscope("merge", *files[::-1], "-o", out)
    assert done.code == 0, done.err
    assert f"60 samples of {count} files" in done.out
    assert_same_run(out, made / "whole.h5")
    first = project.expected(Path(options[1]).parent)["first.weight"]
    np.testing.assert_allclose(contents(out)["chains/0/first.weight"], first, rtol=1e-9)
    assert gradscope(*options, "-o", out, "--resume", "-q").code == 0  # it is this very run


def test_what_merge_takes_and_says(gradscope: Gradscope, files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "o.h5"
    (tmp_path / "o.shard-9-of-10.h5.part").write_bytes(b"")
    document = json.loads(gradscope("merge", tmp_path, "-o", out, "--json").out)
    assert (document["schema"], document["version"]) == ("gradscope.merge", 1)
    assert (document["files"], document["samples"], document["nonfinite"]) == (3, 60, 0)
    assert document["path"] == str(out) and document["bytes"] == out.stat().st_size
    assert document["certificate"]["verified"] and not document["virtual"]
    refused = gradscope("merge", *files, "-o", out)
    assert refused.code == 6 and "--overwrite" in refused.err
    done = gradscope("merge", tmp_path / "o.shard-*.h5", "-o", out, "--overwrite", "-q")
    assert done == (0, "", "")
    done = gradscope("merge", tmp_path, "--virtual", "-o", tmp_path / "v.h5")
    assert done.code == 0 and "the rows stay in these files" in done.out
    with open_file(out) as copied, open_file(tmp_path / "v.h5") as virtual:
        rows, same = (f.chains[0]["last.weight"][...] for f in (copied, virtual))
        np.testing.assert_array_equal(rows, same)
    files[1].unlink()
    refused = gradscope("stats", tmp_path / "v.h5")
    assert refused.code == 3 and "is missing" in refused.err and str(files[1]) in refused.err


def test_what_merge_refuses(
    gradscope: Gradscope, made: Path, files: list[Path], tmp_path: Path
) -> None:
    other, before = made / "other.shard-1-of-3.h5", sorted(tmp_path.iterdir())
    for arguments, words in (
        ([files[0], files[2]], "samples are missing: 21 to 42 (shard 1)"),
        ([*files, files[1]], "o.shard-1-of-3.h5: the file is given twice"),
        ([files[0], other, files[2]], "seed is 0 there, 5 here"),
    ):
        done = gradscope("merge", *arguments, "-o", tmp_path / "o.h5")
        assert (done.code, done.out) == (3, ""), arguments
        assert words in done.err
        assert sorted(tmp_path.iterdir()) == before


def written(path: Path) -> tuple[int, int, int]:
    """Which file it is, how long, and when it was written; reading it changes none of them."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def test_a_finished_shard_is_left_alone(
    gradscope: Gradscope, options: list[str], files: list[Path], tmp_path: Path
) -> None:
    out, before = tmp_path / "o.h5", written(files[1])
    assert written(shard(gradscope, options, out, 1, 3)) == before
    refused = gradscope(*options, "--seed", "5", "--shard", "1/3", "-o", out)
    assert refused.code == 6 and "seed is 0 there, 5 here" in refused.err
    assert written(files[1]) == before
    redone = gradscope(*options, "--seed", "5", "--shard", "1/3", "-o", out, "--overwrite")
    assert redone.code == 0 and written(files[1])[0] != before[0]


def test_workers_of_torchrun(
    gradscope: Gradscope,
    options: list[str],
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "o.h5"
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        done = gradscope(*options, "-o", out)
        assert done.code == 0 and bool(done.out) == (rank == 0)  # one of them speaks
    own = gradscope(*options, "--shard", "0/1", "--samples", ":9", "-o", tmp_path / "own.h5")
    assert own.code == 0  # the whole
    monkeypatch.setenv("RANK", "2")
    refused = gradscope(*options, "-o", out)
    assert refused.code == 2 and "RANK='2' and WORLD_SIZE='2'" in refused.err
    assert {p.name for p in tmp_path.glob("*.h5")} == {
        "o.shard-0-of-2.h5",
        "o.shard-1-of-2.h5",
        "own.h5",
    }
    monkeypatch.delenv("WORLD_SIZE")
    assert gradscope("merge", *tmp_path.glob("o.shard*"), "-o", out).code == 0
    assert_same_run(out, made / "whole.h5")


def test_restarted_workers_replace_what_is_of_another_run(
    gradscope: Gradscope,
    options: list[str],
    files: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With --overwrite: the old run's shard is replaced, the new run's is left alone."""
    run = [*options, "--seed", "5", "-o", tmp_path / "o.h5", "--overwrite"]
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    assert gradscope(*run).code == 0
    new, old = written(files[0]), written(files[1])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        assert gradscope(*run).code == 0
    assert written(files[0]) == new and written(files[1]) != old
    assert "seed is 5" in gradscope("merge", *files, "-o", tmp_path / "m.h5").err


def test_ordinary_files_of_neighbouring_samples(
    gradscope: Gradscope, options: list[str], tmp_path: Path
) -> None:
    for samples in ("5:26", "26:40", "5:40"):
        path = tmp_path / f"{samples.replace(':', '-')}.h5"
        assert gradscope(*options, "--samples", samples, "-o", path).code == 0
    files = [tmp_path / "5-26.h5", tmp_path / "26-40.h5"]
    assert gradscope("merge", *files, "-o", tmp_path / "o.h5").code == 0
    assert_same_run(tmp_path / "o.h5", tmp_path / "5-40.h5")
    paths = [tmp_path / "a.h5", tmp_path / "b.h5"]
    for samples, path in zip(("0:7", "7:14"), paths, strict=True):
        passes = ["--samples", samples, "-t", "center | var", "-o", path]
        assert gradscope(*options[: options.index("-t")], *passes).code == 0
    done = gradscope("merge", *paths, "-o", tmp_path / "c.h5")
    assert done.code == 4 and "a shard has only some samples" in done.err


def test_samples_that_are_not_finite(gradscope: Gradscope, tmp_path: Path) -> None:
    """One shard has none that is finite, and no state to merge."""
    options = run_of(project.write(tmp_path), ("identity", "mean", "quantile:q=0.3"))
    with np.load(tmp_path / "data.npz") as data:
        inputs, targets = data["inputs"], data["targets"]
    inputs[:14] = np.nan
    np.savez(tmp_path / "data.npz", inputs=inputs, targets=targets)
    out, options = tmp_path / "o.h5", [*options, "--backend", "vmap"]
    files = [shard(gradscope, options, out, k, 4) for k in range(4)]  # each exits with 0
    merged = gradscope("merge", *files, "-o", out)
    assert merged.code == 7 and "14 of 60 samples" in merged.out
    whole = gradscope(*options, "-o", tmp_path / "whole.h5")
    assert whole.code == 7
    assert_same_run(out, tmp_path / "whole.h5")


OWN = """
import torch
import gradscope
from pathlib import Path

Path(__file__).with_name("ran").touch()

@gradscope.reducer
def largest():
    def start(gradients):
        return {"norm": gradients.norms.max().double()}
    def merge(a, b):
        return {"norm": torch.maximum(a["norm"], b["norm"])}
    return gradscope.Reducer(start, merge, lambda state: state)
"""


def test_code_of_ones_own_runs_only_when_it_is_named(
    gradscope: Gradscope, options: list[str], tmp_path: Path
) -> None:
    code, out = tmp_path / "own.py", tmp_path / "o.h5"
    code.write_text(OWN)
    words = [*options[: options.index("-t")], "-t", f"{code}:largest"]
    files = [shard(gradscope, words, out, k, 2) for k in range(2)]
    (tmp_path / "ran").unlink()
    refused = gradscope("merge", *files, "-o", out)
    assert refused.code == 4 and "--code" in refused.err
    assert not (tmp_path / "ran").exists() and not out.exists()
    assert gradscope("merge", *files, "-o", out, "--code", code).code == 0
    with open_file(out) as file:
        assert float(file.chains[-1]["norm"][...]) == file.samples["norm"].max()
    code.write_text(OWN.replace("maximum", "minimum"))
    refused = gradscope("merge", *files, "-o", out, "--code", code, "--overwrite")
    assert refused.code == 4 and "the code has changed since the run" in refused.err


def test_fewer_samples_than_a_usual_batch_are_divided(
    gradscope: Gradscope, options: list[str], tmp_path: Path
) -> None:
    """60 samples in eight shards, without a batch size: rows of one process."""
    size = options.index("--batch-size")
    words = [*options[:size], *options[size + 2 :]]
    every = [*words[: words.index("-t")], "-t", "identity"]
    whole, out = tmp_path / "whole.h5", tmp_path / "o.h5"
    for more in (("-o", whole), *(("-o", out, "--shard", f"{k}/8") for k in range(8))):
        done = gradscope(*every, *more, "-q")
        assert done.code == 0, done.err
    done = gradscope("merge", *sorted(tmp_path.glob("o.shard-*.h5")), "-o", out)
    assert done.code == 0, done.err
    found, wanted = contents(out), contents(whole)
    rows = [key for key in wanted if key.startswith("chains/0")]
    assert rows
    for key in rows:
        np.testing.assert_allclose(found[key], wanted[key], rtol=1e-9, atol=1e-12)
