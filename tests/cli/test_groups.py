"""Runs with a row for each group: files, shards, a run that goes on, what reads them."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradscope as package
from gradscope.attribution import open_scores
from gradscope.view import View
from tests.cli.conftest import Gradscope
from tests.cli.forked import Forked
from tests.cli.test_tokens import MODEL

N, T, V = 40, 7, 11
Arrays = dict[str, np.ndarray[Any, Any]]
GROUPS = np.random.default_rng(3).integers(0, 9, N)  # of 1 to 8 samples, in scrambled order
NAMES = np.array([f"üser {k}" for k in GROUPS])


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two language models and 40 sequences of 7 tokens, with the user of each of them."""
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    made: dict[str, object] = {}
    exec(MODEL, made)  # our own text
    torch.manual_seed(0)
    for name in ("build", "mixed"):
        model = made[name]()  # type: ignore[operator]
        assert isinstance(model, nn.Module)
        torch.save(model.state_dict(), f"{name}.pt")
    draw = np.random.default_rng(0)
    ids, targets = draw.integers(0, V, (2, N, T))
    targets[::3, 4:] = -100
    documents = (np.arange(N)[:, None] * T + np.arange(T)) // 5  # of five tokens, across sequences
    documents[:, 1:][targets[:, 1:] == -100] = -1
    arrays = {"inputs": ids, "targets": targets, "number": GROUPS, "user": NAMES}
    arrays |= {"whole": documents, "documents": documents[:, 1:]}
    np.savez("data.npz", **arrays)
    return tmp_path


def words(model: str, *more: object) -> list[object]:
    """Return the arguments of a run of one of the models."""
    return [
        *("compute", f"{model}.pt", "data.npz", "--model", f"model.py:{model}", "-q"),
        *("--loss", "causal_lm", "--dtype", "float64", *more),
    ]


def rows_of(path: str) -> tuple[Arrays, Arrays]:
    """Return the sample table of a file, and the rows of its first chain."""
    with package.open(path) as file:
        table = {k: np.asarray(v) for k, v in file.samples.items()}
        return table, {name: rows[...] for name, rows in file.chains[0].items()}


def added(rows: Arrays, own: np.ndarray[Any, Any], n: int) -> Arrays:
    """Return {name: (n, ...)}, the sums of rows of the same number."""
    found = {name: np.zeros((n, *value.shape[1:])) for name, value in rows.items()}
    for name, value in rows.items():
        np.add.at(found[name], own, value)
    return found


def same(found: Arrays, right: Arrays) -> None:
    assert found.keys() == right.keys()
    for name, value in right.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("column", ["user", "number"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_file_has_a_row_for_each_group(
    gradscope: Gradscope, project: Path, column: str, reduction: str
) -> None:
    """Whatever batches the groups fill; the file of the same run is the same."""
    chains = ("-t", "identity", "-t", "clip:max_norm=0.4 | sum", "-t", "project:dim=4 | gram")
    group = ("--group", column, "--group-reduction", reduction)
    for name, size in (("a.h5", 9), ("b.h5", 9), ("c.h5", 40)):
        done = gradscope(*words("mixed", *chains, *group, "--batch-size", size, "-o", name))
        assert done.code == 0, done.err
    assert Path("a.h5").read_bytes() == Path("b.h5").read_bytes()
    assert gradscope(*words("mixed", "-o", "samples.h5")).code == 0
    samples, each = rows_of("samples.h5")
    names, own, sizes = np.unique(
        {"user": NAMES, "number": GROUPS}[column], return_inverse=True, return_counts=True
    )
    share = sizes if reduction == "mean" else np.ones(len(names))
    right = {k: v / share.reshape(-1, *[1] * (v.ndim - 1)) for k, v in added(each, own, 9).items()}
    table, rows = rows_of("a.h5")
    same(rows, right)
    same(rows_of("c.h5")[1], right)
    np.testing.assert_array_equal(table["index"], np.arange(9))
    found = [k.decode() if isinstance(k, bytes) else k for k in table["id"].tolist()]
    assert found == names.tolist()
    np.testing.assert_array_equal(table["size"], sizes)
    np.testing.assert_allclose(table["loss"], np.bincount(own, samples["loss"]) / share)
    flat = np.concatenate([v.reshape(9, -1) for v in right.values()], 1)
    norms = np.linalg.norm(flat, axis=1)
    np.testing.assert_allclose(table["norm"], norms)
    clipped = (flat * np.minimum(1, 0.4 / norms)[:, None]).sum(0)
    with package.open("a.h5") as file:
        ours = np.concatenate([file.chains[1][k][...].ravel() for k in right])
        np.testing.assert_allclose(ours, clipped, rtol=1e-9, atol=1e-12)
        assert file.run["groups"]["groups"] == 9
    assert set(table) == {"index", "loss", "norm", "finite", "id", "size"}


def test_a_row_for_each_document_of_packed_sequences(gradscope: Gradscope, project: Path) -> None:
    """With a GRU, a row has the tokens' losses: what they owe to earlier documents included."""
    for model in ("build", "mixed"):
        run = words(model, "--rows", "token")
        for more in (("-o", "tokens.h5"), ("--group", "documents", "-o", "groups.h5")):
            done = gradscope(*run, *more, "--batch-size", 2, "--overwrite")
            assert done.code == 0, done.err
        tokens, each = rows_of("tokens.h5")
        ids = np.load("data.npz")["documents"][tokens["sample"], tokens["position"]]
        names, own, sizes = np.unique(ids, return_inverse=True, return_counts=True)
        table, rows = rows_of("groups.h5")
        np.testing.assert_array_equal(table["id"], names)
        np.testing.assert_array_equal(table["size"], sizes)
        same(rows, added(each, own, len(names)))
    wrong = gradscope(*run, "--group", "whole", "-o", "x.h5")
    assert wrong.code == 3
    assert wrong.err == (
        f"error: {project}/data.npz: whole: a sample has 7 ids, but the loss has 6 positions\n"
        "Give one id for each position of the loss. A loss of next tokens has no loss at position "
        "0: give the ids of positions 1 and later.\n"
    )


def test_shards_are_the_whole_run(gradscope: Gradscope, project: Path) -> None:
    run = words("build", "-t", "identity", "-t", "mean", "--group", "user", "--samples", "2:37")
    assert gradscope(*run, "-o", "whole.h5").code == 0
    for k in range(3):
        done = gradscope(*run, "-o", "o.h5", "--shard", f"{k}/3")
        assert done.code == 0, done.err
    shards = sorted(project.glob("o.shard-*.h5"))
    done = gradscope("merge", *shards, "-o", "merged.h5")
    assert done.code == 0, done.err
    assert "groups of 3 files" in " ".join(done.out.split())
    with package.open("whole.h5") as one, package.open("merged.h5") as other:
        assert one.run["groups"] == other.run["groups"]
        for key in one.samples:
            left, right = one.samples[key], other.samples[key]
            if key in ("norm", "loss"):
                np.testing.assert_allclose(left, right)
            else:
                np.testing.assert_array_equal(left, right)
        for k in (0, 1):
            for name, rows in one.chains[k].items():
                np.testing.assert_allclose(rows[...], other.chains[k][name][...], atol=1e-12)
    lacking = gradscope("merge", *shards[:2], "-o", "y.h5")
    assert lacking.code == 3
    assert "groups are missing" in lacking.err


def test_a_merge_computes_groups_anew(gradscope: Gradscope, project: Path) -> None:
    Path("run.toml").write_text(
        'version = 1\n[model]\nfactory = "model.py:build"\n[checkpoint]\npath = "build.pt"\n'
        '[dataset]\npath = "data.npz"\ngroup = "user"\n[loss]\nname = "causal_lm"\n'
        '[compute]\nsamples = "2:37"\ngroup_reduction = "mean"\n'
    )
    for k in range(2):
        run = ("compute", "--config", "run.toml", "-o", "o.h5", "--shard", f"{k}/2")
        assert gradscope(*run).code == 0
    shards = sorted(project.glob("o.shard-*.h5"))
    done = gradscope("merge", *shards, "-o", "merged.h5", "--config", "run.toml")
    assert done.code == 0, done.err
    assert "with equal losses and norms" in done.out


@pytest.mark.parametrize("signal", [2, 9])
def test_a_stopped_run_goes_on(forked: Forked, project: Path, signal: int) -> None:
    Path("model.py").write_text(
        MODEL.replace("def forward(self, ids):\n", "def forward(self, ids):\n        stop()\n")
        + "import os\ndef stop():\n    with open('calls', 'a') as file:\n"
        "        if (file.write('x') and file.tell()) == 50:\n"
        f"            os.kill(os.getpid(), {signal})\n"
    )
    run = words("build", "-t", "identity", "-t", "mean", "--batch-size", 9, "--backend", "loop")
    run = [str(word) for word in (*run, "--verify", "first", "--group", "user")]
    assert forked.run(*run, "-o", "out.h5", cwd=project).code == {2: 130, 9: -9}[signal]
    assert not Path("out.h5").exists()
    if signal == 2:  # a killed process may not have written its first rows
        other = [word if word != "user" else "number" for word in run]
        refused = forked.run(*other, "-o", "out.h5", "--resume", cwd=project)
        assert refused.code == 6
        assert "group" in refused.err
    assert forked.run(*run, "-o", "out.h5", "--resume", cwd=project).code == 0
    assert forked.run(*run, "-o", "whole.h5", cwd=project).code == 0
    with package.open("whole.h5") as one, package.open("out.h5") as other_file:
        for key, column in one.samples.items():
            np.testing.assert_array_equal(column, other_file.samples[key])
        for k in (0, 1):
            for name, rows in one.chains[k].items():
                np.testing.assert_array_equal(rows[...], other_file.chains[k][name][...])


def test_memory_that_runs_out_divides_batches_between_groups(
    gradscope: Gradscope, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until one group does not fit, which the error names."""
    from gradscope.engine.session import Session

    evaluate, limit = Session.evaluate, [16]

    def short(session: Session, batch: Any, *given: Any, **more: Any) -> Any:
        if batch.work > limit[0]:
            raise MemoryError("no more")
        return evaluate(session, batch, *given, **more)

    monkeypatch.setattr(Session, "evaluate", short)
    run = words("build", "--group", "user", "--batch-size", 40)
    assert gradscope(*run, "-o", "some.h5").code == 0
    limit[0] = 40
    assert gradscope(*run, "-o", "whole.h5").code == 0
    same(rows_of("some.h5")[1], rows_of("whole.h5")[1])
    limit[0] = 6
    largest = int(np.bincount(GROUPS).max())
    done = gradscope(*run, "-o", "x.h5")
    assert done.code == 2
    assert "members, but a batch holds 5, and a group must be in one batch" in done.err
    assert "a `batch_size`" not in done.err and largest > 5


def test_the_memory_of_a_run_holds_its_largest_group(gradscope: Gradscope, project: Path) -> None:
    done = gradscope(*words("build", "--group", "user", "--memory", "2GB", "-o", "out.h5"))
    assert done.code == 0, done.err
    done = gradscope(*words("build", "--group", "user", "--memory", "1MB", "-o", "x.h5"))
    assert done.code == 2
    largest = int(np.bincount(GROUPS).max())
    assert f"a batch of {largest} samples takes about" in done.err
    assert "and a group must be in one batch" in done.err


def test_attribution_by_user(gradscope: Gradscope, project: Path) -> None:
    """A user's score is the sum of the scores of its samples, with the samples' curvature."""
    run = words("mixed", "-t", "identity")
    assert gradscope(*run, "--group", "user", "-o", "users.h5").code == 0
    assert gradscope(*run, "-o", "train.h5").code == 0
    assert gradscope(*run, "--samples", "0:4", "-o", "query.h5").code == 0
    assert gradscope(*words("mixed", "-t", "ekfac"), "-o", "factors.h5").code == 0
    ekfac = ("--curvature", "ekfac", "--factors", "factors.h5")
    for how in (("--curvature", "identity"), ekfac, (*ekfac, "--stream")):
        for train in ("users", "train"):
            words_ = ("attribute", f"{train}.h5", "query.h5", *how, "-q", "--overwrite")
            done = gradscope(*words_, "-o", f"of_{train}.h5")
            assert done.code == 0, done.err
        with open_scores("of_users.h5") as users, open_scores("of_train.h5") as samples:
            each = np.asarray(samples.values[...])
            _, own = np.unique(NAMES, return_inverse=True)
            right = np.stack([np.bincount(own, row) for row in each])
            found = np.asarray(users.values[...])
            np.testing.assert_allclose(found, right, rtol=1e-9, atol=1e-12 * np.abs(right).max())
            assert users.noun == "group"
    data = dict(np.load("data.npz"))
    del data["user"]
    np.savez("asked.npz", **{k: v[:4] for k, v in data.items()})
    how = ("--curvature", "identity", "-q")
    for query in ("asked.npz", "query.h5"):  # without a column of groups
        done = gradscope("attribute", "users.h5", query, *how, "-o", "asked.h5", "--overwrite")
        assert done.code == 0, done.err
        with open_scores("asked.h5") as scores:
            assert scores.values.shape == (4, 9)
    shown = gradscope("stats", "of_users.h5")
    assert "9 groups" in shown.out and "üser" in shown.out
    refused = gradscope("attribute", "users.h5", "query.h5", "-o", "x.h5")
    assert refused.code == 2
    assert refused.err == (
        "error: users.h5: curvature auto cannot be computed from rows of groups: the "
        "Fisher needs the gradients of single samples\n"
        "Compute factors without group (gradscope compute -t ekfac), and give them as --factors "
        "with --curvature ekfac. Or use --curvature identity. Or score samples, and add up the "
        "scores: gradscope stats SCORES.h5 --by COLUMN.\n"
    )
    with package.open("query.h5") as file, open_scores("of_users.h5") as scores:
        view = View(file, scores=scores).document()
    assert view["scores"]["noun"] == "group"
    assert set(view["scores"]["ids"]) <= set(NAMES.tolist())
    untrained = gradscope("validate", "of_users.h5", "--train", "model.py:build")
    assert untrained.code == 2
    assert "the scores are for groups, but retraining leaves out single samples" in untrained.err
    mixed_up = gradscope("view", "users.h5", "query.h5", "-o", "page.html")
    assert mixed_up.code == 2
    assert "have different rows: groups and samples" in mixed_up.err


def test_projected_groups_are_refined(gradscope: Gradscope, project: Path) -> None:
    run = words("build", "-t", "project:dim=8")
    assert gradscope(*run, "--group", "user", "-o", "users.h5").code == 0
    assert gradscope(*run, "--samples", "0:2", "-o", "query.h5").code == 0
    how = ("--curvature", "identity", "--refine", 3, "-q", "-o", "scores.h5")
    done = gradscope("attribute", "users.h5", "query.h5", *how)
    assert done.code == 0, done.err
    assert gradscope(*words("build", "--group", "user", "-o", "full.h5")).code == 0
    assert gradscope(*words("build", "--samples", "0:2", "-o", "asked.h5")).code == 0
    train, query = (
        np.concatenate([v.reshape(len(v), -1) for v in rows_of(name)[1].values()], 1)
        for name in ("full.h5", "asked.h5")
    )
    with open_scores("scores.h5") as scores:
        places = np.asarray(scores.refined["places"][...]).astype(int)
        found = np.asarray(scores.refined["scores"][...])
    right = query @ train.T / N
    np.testing.assert_allclose(found, np.take_along_axis(right, places, 1), atol=1e-12)


def test_what_is_shown_is_said_of_groups(gradscope: Gradscope, project: Path) -> None:
    chains = ("-t", "identity", "-t", "mean", "--group", "user")
    made = gradscope(*[w for w in words("build", *chains, "-o", "out.h5") if w != "-q"])
    assert made.code == 0, made.err
    assert "computed 9 groups in" in " ".join(made.out.split())
    shown = gradscope("stats", "out.h5", "--full")
    assert shown.code == 0, shown.err
    document = json.loads(gradscope("stats", "out.h5", "--json").out)
    assert document["file"]["noun"] == "group"
    first = document["samples"][0]
    assert f"group {first['index']} ({first['id']}), " in shown.out
    with package.open("out.h5") as file:
        view = View(file).document()
    assert view["noun"] == "group"
    assert view["why"]["samples"] == "the rows are groups: the table has their ids and sizes"
    assert gradscope("export", "out.h5", "-o", "table.csv").code == 0
    with Path("table.csv").open(encoding="utf-8") as file:
        rows = [*csv.DictReader(file)]
    assert [row["id"] for row in rows] == np.unique(NAMES).tolist()
    assert [int(row["size"]) for row in rows] == np.unique(NAMES, return_counts=True)[1].tolist()
    # in another run the groups are the same, if their ids are
    assert gradscope(*words("build", *chains, "--samples", "3:40", "-o", "other.h5")).code == 0
    moved = json.loads(gradscope("stats", "out.h5", "other.h5", "--json").out)
    assert moved["common"] == len(np.unique(NAMES[3:]))
    run = [word for word in words("build", *chains)[1:] if word != "-q"]
    checked = gradscope("check", *run)
    assert checked.code == 0, checked.err
    told = " ".join(checked.out.split())
    assert "The first batch groups 9 groups" in told and "groups 9 groups, 40 at a time" in told
    started = gradscope("init", *words("build", *chains)[1:3], "--model", "model.py:build",
                        "--loss", "causal_lm", "--group", "user", "-o", "run.toml")  # fmt: skip
    assert started.code == 0, started.err
    assert 'group = "user"' in Path("run.toml").read_text()


@pytest.mark.full
@pytest.mark.parametrize("rows", ["sample", "token"])
def test_groups_are_compared(gradscope: Gradscope, project: Path, rows: str) -> None:
    group = ("--group", "user" if rows == "sample" else "documents", "--rows", rows)
    assert gradscope(*words("mixed", *group, "-o", "out.h5")).code == 0
    run = ["compare", *words("mixed", *group)[1:], "--against", "out.h5", "--json"]
    for more in ((), ("--samples", "0:40")):
        done = gradscope(*run, *more)
        assert done.code == 0, done.out + done.err
        found = json.loads(done.out)
        assert {row["status"] for row in found["rows"]} == {"agrees"}
        assert len(found["groups"]) == found["samples"]
    other = gradscope(*run, "--samples", "0:30")
    assert other.code == 2
    assert other.err == (
        "error: out.h5: the result file has other groups\n"
        "Compute it with the same data, --samples, --rows and --group.\n"
    )
    refused = gradscope(*run[:-2], "opacus")
    assert refused.code == 2
    assert "does not support rows of groups" in refused.err


WRONG = {
    "no such column": (("--group", "users"), 3, "there is no array 'users' in the file"),
    "a small batch": (
        ("--group", "user", "--batch-size", "3"),
        2,
        "members, but a batch holds 3, and a group must be in one batch",
    ),
    "of positions": (
        ("--group", "documents"),
        3,
        "the ids have shape (40, 6), one id for each position of a sample, but a row is a sample",
    ),
    "numbers": (("--group", "inputs", "--rows", "token"), 3, "a sample has 7 ids"),
    "kfac": (("--group", "user", "-t", "kfac"), 2, "has a reducer that needs the layers' inputs"),
    "hvp": (("--group", "user", "-t", "hvp"), 2, ""),
    "labels": (("--group", "user", "--labels", "exact", "-t", "mean"), 2, "labels exact"),
    "own-loss": (("--group", "user", "--coupling", "own-loss"), 2, "coupling own-loss"),
    "factored": (("--group", "user", "--layout", "factored"), 2, "layout"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_groups_cannot_do_is_refused(gradscope: Gradscope, project: Path, name: str) -> None:
    more, code, message = WRONG[name]
    done = gradscope(*words("build", *more, "-o", "x.h5"))
    assert (done.code, message in done.err) == (code, True), done.err
    assert not Path("x.h5").exists()


MISSING = {
    ("", ""): "1 id of 12 is missing (None, NaN or empty): sample 5\n",
    ("parquet", "user"): "user, rows 0 to 11: sample 5 has no text (null)\n",
    ("jsonl", "user"): "user: its values have different types",
    ("parquet", "n"): "n, rows 0 to 11: 1 integers are missing (null)\n",
}


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl", "python"])
def test_ids_in_files_of_all_kinds(gradscope: Gradscope, project: Path, kind: str) -> None:
    """Text and numbers, and missing ones, which are an error that names the samples."""
    rows = [{"x": float(k), "y": k % 2, "user": f"u{k % 3}", "n": k % 4} for k in range(12)]
    for missing in (False, True):
        if missing:
            rows[5] |= {"user": None, "n": None}
        write(kind, rows)
        Path("linear.py").write_text(
            "from torch import nn\ndef build():\n    return nn.Linear(1, 2)\n"
        )
        torch.save(nn.Linear(1, 2).state_dict(), "linear.pt")
        path = "own.py:make" if kind == "python" else f"own.{kind}"
        columns = "" if kind == "python" else 'columns = { inputs = ["x"], targets = "y" }\n'
        Path("spec.toml").write_text(f'path = "{path}"\n{columns}')
        for column in ("n",) if kind == "python" else ("user", "n"):
            run = ("compute", "linear.pt", "spec.toml", "--model", "linear.py:build", "-q")
            run = (*run, "--loss", "cross_entropy", "--group", column, "-o", "o.h5", "--overwrite")
            done = gradscope(*run)
            if missing:
                assert done.code == 3
                assert MISSING.get((kind, column), MISSING["", ""]) in done.err, done.err
                continue
            assert done.code == 0, done.err
            table, _ = rows_of("o.h5")
            own = [str(row[column]) for row in rows]
            names = [k.decode() if isinstance(k, bytes) else str(k) for k in table["id"].tolist()]
            assert names == sorted(set(own))
            assert table["size"].tolist() == [own.count(k) for k in names]


def write(kind: str, rows: list[dict[str, Any]]) -> None:
    """Write rows as a file of a kind, or as code that returns a data set."""
    if kind == "csv":
        with Path("own.csv").open("w") as file:
            writer = csv.DictWriter(file, [*rows[0]])
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "jsonl":
        Path("own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        pa = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pa.Table.from_pylist(rows), "own.parquet")
    else:
        numbers = ["nan" if row["n"] is None else row["n"] for row in rows]
        Path("own.py").write_text(
            "import torch\nclass Own(torch.utils.data.Dataset):\n"
            "    def __len__(self):\n        return 12\n"
            "    def __getitem__(self, k):\n"
            f"        n = {numbers}[k]\n"
            "        return {'inputs': torch.tensor([float(k)]), 'targets': k % 2, 'n': float(n)}\n"
            "def make():\n    return Own()\n"
        )
