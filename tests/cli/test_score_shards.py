"""Many workers score: their files, merged, are the file of one process."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradscope as library
from gradscope.attribution import open_scores
from tests.attribution.test_scoring import N, Place, close
from tests.cli.conftest import Gradscope
from tests.cli.test_shards import written

QUERY = "query.npz"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    return Place(tmp_path)


def done(gradscope: Gradscope, *words: object) -> str:
    found = gradscope(*words)
    assert found.code == 0, found.err
    return str(found.err)


def score(gradscope: Gradscope, count: int, train: Path, *words: object) -> list[Path]:
    """Score in shards, merge them, and return their files."""
    out = train.parent / "s.h5"
    for k in range(count):
        done(gradscope, "attribute", train, QUERY, *words, "--shard", f"{k}/{count}", "-o", out)
    files = sorted(out.parent.glob("s.shard-*.h5"))
    assert len(files) == count
    done(gradscope, "merge", *files[::-1], "-o", out, "--overwrite")
    return files


def assert_same(path: Path, alone: Path, rtol: float = 1e-12) -> None:
    with open_scores(path) as found, open_scores(alone) as right:
        scores = right.values[...]
        atol = rtol * np.nanmax(np.abs(scores))
        np.testing.assert_allclose(found.values[...], scores, rtol=0, atol=atol)
        assert found.values.dtype == right.values.dtype
        for mine, other in ((found.samples, right.samples), (found.queries, right.queries)):
            assert list(mine) == list(other)
            for name, column in other.items():
                np.testing.assert_allclose(mine[name], column, rtol=rtol, err_msg=name)
        one, whole = (json.loads(json.dumps(r)) for r in (found.record, right.record))
        for mine, other in zip(one["checkpoints"], whole["checkpoints"], strict=True):
            assert mine.pop("damping", 0) == pytest.approx(other.pop("damping", 0))
            assert mine.pop("lambda", 0) == pytest.approx(other.pop("lambda", 0))
            for record in (mine, other):
                record.pop("projection_error", 0)  # an estimate from the first samples of a file
        assert one == whole
        assert found.file is not None and right.file is not None
        there, here = (dict(r.file.identity) for r in (right, found))  # type: ignore[union-attr]
        here.pop("factors", None)
        assert there == here


@pytest.mark.sampled
@pytest.mark.parametrize(("count", "form"), [(2, "influence"), (3, "relative"), (2, "cosine")])
def test_parts_of_computed_samples(
    gradscope: Gradscope, place: Place, count: int, form: str
) -> None:
    """With a sample that is not finite, which the shards but one do not know of."""
    data = dict(np.load(place.folder / "train.npz"))
    data["inputs"][25] = np.nan
    np.savez(place.folder / "train.npz", **data)
    words = ("--curvature", "identity", "--score", form)
    run = place.run_file("train")
    done(gradscope, "attribute", run, QUERY, *words, "-o", "alone.h5")
    score(gradscope, count, run, *words)
    assert_same(place.folder / "s.h5", place.folder / "alone.h5")


@pytest.mark.full
@pytest.mark.parametrize("curvature", ["ekfac", "kfac", "diagonal"])
def test_factors_in_parts(gradscope: Gradscope, place: Place, curvature: str) -> None:
    """Automatic damping, which needs the mean gradient; TRAIN is a run, then a file of rows."""
    run, made = place.run_file("train"), [place.folder / "factors.h5"]
    chains = {"ekfac": "kfac:bias=column,full=512", "kfac": "kfac:bias=column"}
    steps = [chains.get(curvature, "second_moment")]
    if curvature == "ekfac":
        steps.append("ekfac:with=factors.h5:0")
        made.append(place.folder / "moments.h5")
    for chain, path in zip(steps, made, strict=True):
        for k in range(2):
            words = ("-t", chain, "-t", "mean", "--shard", f"{k}/2", "-o", path)
            done(gradscope, "compute", "--config", run, *words)
        files = path.parent.glob(f"{path.stem}.shard-*.h5")
        done(gradscope, "merge", *files, "-o", path)
    done(gradscope, "attribute", run, QUERY, "--curvature", curvature, "-o", "alone.h5")
    words = ("--curvature", curvature, "--factors", made[-1])
    score(gradscope, 3, run, *words)
    assert_same(place.folder / "s.h5", place.folder / "alone.h5", 1e-8)
    with open_scores(place.folder / "alone.h5") as right:
        right_values = right.values[...]
    for path in place.folder.glob("s.*"):
        path.unlink()
    score(gradscope, 2, place.result("train"), *words)
    with open_scores(place.folder / "s.h5") as found:
        close(found.values, right_values, 1e-8)


def test_parts_of_a_result_with_a_chain_of_two_passes(gradscope: Gradscope, place: Place) -> None:
    """Streamed: only the rows are computed, and the shards use the stored factors."""
    train = place.result("train", "ekfac", "identity")
    words = ("--stream", "--curvature", "ekfac", "--damping", 0.1)
    done(gradscope, "attribute", train, QUERY, *words, "-o", "alone.h5")
    score(gradscope, 2, train, *words, "--factors", train)
    assert_same(place.folder / "s.h5", place.folder / "alone.h5", 1e-8)


def test_parts_of_stored_rows(gradscope: Gradscope, place: Place) -> None:
    """Shards of `compute`, merged without copies; projections, inverted as they are."""
    run = place.run_file("train", "project:dim=6,seed=2")
    for k in range(2):
        done(gradscope, "compute", "--config", run, "--shard", f"{k}/2", "-o", "rows.h5")
    files = place.folder.glob("rows.shard-*.h5")
    done(gradscope, "merge", *files, "--virtual", "-o", "rows.h5")
    rows = place.folder / "rows.h5"
    done(gradscope, "attribute", rows, QUERY, "-o", "alone.h5")
    score(gradscope, 3, rows)
    with library.open(place.folder / "alone.h5") as file:
        assert file.run["attribution"]["checkpoints"][0]["curvature"] == "fisher"
    assert_same(place.folder / "s.h5", place.folder / "alone.h5")


def test_only_what_is_missing_is_computed(gradscope: Gradscope, place: Place) -> None:
    run = place.run_file("train")
    words = ("attribute", run, QUERY, "--curvature", "identity", "-o", "s.h5")
    for k in (0, 2):
        done(gradscope, *words, "--shard", f"{k}/3")
    files = [place.folder / f"s.shard-{k}-of-3.h5" for k in range(3)]
    refused = gradscope("merge", place.folder, "-o", "s.h5")
    assert (refused.code, refused.out) == (3, "")
    assert "samples are missing: 8 to 16 (shard 1)" in refused.err
    before = [written(files[k]) for k in (0, 2)]
    found = gradscope(*words, "--shard", "0/3")
    assert found.code == 0
    assert "gradscope merge s.shard-*-of-3.h5 joins all parts" in " ".join(found.out.split())
    done(gradscope, *words, "--shard", "1/3")
    assert [written(files[k]) for k in (0, 2)] == before
    document = json.loads(gradscope("merge", place.folder, "-o", "s.h5", "--json").out)
    assert (document["files"], document["samples"], document["nonfinite"]) == (3, N, 0)
    done(gradscope, *words, "--resume")  # it is this very attribution


@pytest.mark.full
def test_parts_that_do_not_belong_together(gradscope: Gradscope, place: Place) -> None:
    def part(k: int, run: Path, out: str, *words: object) -> Path:
        own = ("--curvature", "identity", *words, "--shard", f"{k}/2", "-o", out)
        done(gradscope, "attribute", run, QUERY, *own)
        return place.folder / f"{out.removesuffix('.h5')}.shard-{k}-of-2.h5"

    first = part(0, place.run_file("train"), "a.h5")
    data = dict(np.load(place.folder / "train.npz"))
    np.savez(place.folder / "other.npz", inputs=data["inputs"] + 1, targets=data["targets"])
    for name, run, words, text in (
        ("b", place.run_file("train", weights="w1"), (), "w1.safetensors' here"),
        ("c", place.run_file("other"), (), "other.npz' here"),
        ("d", place.run_file("train"), ("--score", "cosine"), "score is 'influence' there"),
        ("e", place.run_file("train"), ("--curvature", "diagonal", "--factors", "f.h5"), "factors"),
    ):
        if name == "e":
            done(gradscope, "compute", "--config", run, "-t", "second_moment", "-o", "f.h5")
        second = part(1, run, f"{name}.h5", *words)
        refused = gradscope("merge", first, second, "-o", "s.h5")
        assert (refused.code, refused.out) == (3, "")
        assert text in refused.err
        assert not (place.folder / "s.h5").exists()
    for words, code, text in (
        ((first, first), 3, "the file is given twice"),
        ((first, place.result("train")), 3, "does not record its run"),
        ((first, "--virtual"), 2, "--virtual applies to gradients"),
    ):
        refused = gradscope("merge", *words, "-o", "s.h5")
        assert (refused.code, refused.out) == (code, "")
        assert text in refused.err
    again = ("--curvature", "identity", "--damping", "0.3", "--shard", "0/2", "-o", "a.h5")
    refused = gradscope("attribute", place.run_file("train"), QUERY, *again)
    assert refused.code == 6 and "damping is 'auto' there, '0.3' here" in refused.err


def cases() -> list[tuple[tuple[str, ...], int, str]]:
    shard = ("--shard", "1/3", "-o", "s.h5")
    return [
        (("--shard", "3/3", "-o", "s.h5"), 2, "found '3/3'"),
        (("--shard", "1/3"), 2, "Give -o SCORES.h5"),
        (shard, 2, "curvature mean needs the products of all pairs of training samples"),
        ((*shard, "--curvature", "fisher"), 2, "curvature fisher needs the products of all pairs"),
        ((*shard, "--curvature", "ekfac"), 2, "Give a file with 'ekfac' as --factors"),
        ((*shard, "--curvature", "identity", "--refine", "2"), 2, "chosen among all"),
        (("--shard", "1/9", "-o", "s.h5", "--curvature", "identity"), 2, "at most 4 shards"),
    ]


@pytest.mark.parametrize(("words", "code", "text"), cases())
def test_what_a_part_refuses(
    gradscope: Gradscope, place: Place, words: tuple[str, ...], code: int, text: str
) -> None:
    found = gradscope("attribute", place.run_file("train"), QUERY, *words)
    assert (found.code, found.out) == (code, "")
    assert text in " ".join(found.err.split())
    assert not [*place.folder.glob("s.*")]


@pytest.mark.full
def test_several_checkpoints(gradscope: Gradscope, place: Place) -> None:
    runs = [place.run_file("train", weights=f"w{k}") for k in (0, 1)]
    words: Any = ("--curvature", "identity", "--checkpoints", runs[1], "--weights", "2,0.5")
    done(gradscope, "attribute", runs[0], QUERY, *words, "-o", "alone.h5")
    score(gradscope, 2, runs[0], *words)
    assert_same(place.folder / "s.h5", place.folder / "alone.h5")


def test_what_a_low_rank_of_queries_drops_is_in_the_files(
    gradscope: Gradscope, place: Place
) -> None:
    run, path = place.run_file("train"), place.folder / "factors.h5"
    done(gradscope, "compute", "--config", run, "-t", "ekfac", "-t", "mean", "-o", path)
    words = ("--curvature", "ekfac", "--query-rank", "1")
    shown = gradscope("attribute", run, QUERY, *words, "-o", "alone.h5")
    assert shown.code == 0, shown.err
    with open_scores("alone.h5") as scores:
        shares = np.asarray(scores.queries["truncation"])
        assert scores.record["checkpoints"][0]["query_rank"] == 1
    assert ((shares > 0) & (shares < 1)).all()
    line = next(line for line in shown.out.splitlines() if line.startswith("query rank"))
    assert f"{shares.max():.3g}" in line and f"{np.median(shares):.3g}" in line
    record = json.loads(gradscope("stats", "alone.h5", "--json").out)["record"]
    assert record["truncation"] == {"median": np.median(shares), "max": shares.max()}
    score(gradscope, 2, run, *words, "--factors", path)
    assert_same(place.folder / "s.h5", place.folder / "alone.h5")
    other = gradscope("attribute", run, QUERY, *words[:-1], "2", "-o", "alone.h5", "--resume")
    assert other.code == 6, other.err
