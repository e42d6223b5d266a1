"""Runs with a row for each token: files, shards, a run that goes on, what reads them."""

import json
import re
from base64 import b64decode
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

Rows = np.ndarray[Any, Any]
N, T, V = 40, 7, 11
MODEL = """
from torch import nn

class Model(nn.Module):
    def __init__(self, mixed):
        super().__init__()
        self.words, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)
        self.layer = nn.GRU(6, 6, batch_first=True) if mixed else nn.Linear(6, 6)
        self.mixed = mixed

    def forward(self, ids):
        h = self.layer(self.words(ids))
        return self.head((h[0] if self.mixed else h).tanh())

def build(mixed=False):
    return Model(mixed)

def mixed():
    return Model(True)

def loss(outputs, ids):
    return nn.functional.cross_entropy(outputs.mT, ids, reduction="none")
"""

WRONG = """
import torch

def second_row(model, loss, ids, targets):
    values, counts = loss(model(ids), targets)
    names, ps = zip(*model.named_parameters())
    rows = (torch.autograd.grad(v, ps, retain_graph=True) for v in values[counts])
    found = dict(zip(names, map(torch.stack, zip(*rows))))
    found["head.bias"][1] *= 3
    return found
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two language models and 40 sequences of 7 tokens, some of them padded, one empty."""
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    made: dict[str, object] = {}
    exec(MODEL, made)  # our own text
    torch.manual_seed(0)
    for name in ("build", "mixed"):
        model = made[name]()  # type: ignore[operator]
        assert isinstance(model, nn.Module)
        torch.save(model.state_dict(), f"{name}.pt")
    ids = np.random.default_rng(0).integers(0, V, (N, T))
    targets = ids.copy()
    targets[::3, 4:] = -100
    targets[5] = -100
    np.savez("data.npz", inputs=ids, targets=targets)
    return tmp_path


def words(model: str, *more: object) -> list[object]:
    """Return the arguments of a run of one of the models."""
    return [
        *("compute", f"{model}.pt", "data.npz", "--model", f"model.py:{model}", "-q"),
        *("--loss", "causal_lm", "--rows", "token", "--dtype", "float64", *more),
    ]


def whole(model: str, *more: object) -> list[object]:
    """Return those of a run whose samples' rows are the sums of their tokens'."""
    last = {"--loss": "causal_lm:per_sample=sum", "--rows": "sample", "-o": "whole.h5"}
    return [*words(model, *more), *(word for pair in last.items() for word in pair)]


@pytest.mark.parametrize("model", ["build", "mixed"])
def test_a_file_has_a_row_for_each_token_that_counts(
    gradscope: Gradscope, project: Path, model: str
) -> None:
    chains = ("-t", "identity", "-t", "mean", "-t", "project:dim=4 | gram")
    for name in ("a.h5", "b.h5"):
        done = gradscope(*words(model, *chains, "-o", name))
        assert done.code == 0, done.err
    assert Path("a.h5").read_bytes() == Path("b.h5").read_bytes()
    assert gradscope(*whole(model, "-t", "identity")).code == 0
    targets = np.load("data.npz")["targets"]
    with package.open("a.h5") as file, package.open("whole.h5") as samples:
        sample, position = (np.asarray(file.samples[k]) for k in ("sample", "position"))
        np.testing.assert_array_equal(
            np.stack([sample, position]), (targets[:, 1:] != -100).nonzero()
        )
        np.testing.assert_array_equal(file.samples["index"], np.arange(len(sample)))
        for name, rows in file.chains[0].items():
            right = samples.chains[0][name][...]
            found = np.zeros_like(right)
            np.add.at(found, sample, rows[...])
            np.testing.assert_allclose(found, right, rtol=1e-9, atol=1e-12)
            mean = file.chains[1][name][...]  # over tokens
            np.testing.assert_allclose(mean, right.sum(0) / len(sample), rtol=1e-9, atol=1e-12)
        loss = np.bincount(sample, file.samples["loss"], len(right))
        np.testing.assert_allclose(loss, samples.samples["loss"])


def test_shards_are_the_whole_run(gradscope: Gradscope, project: Path) -> None:
    run = words("build", "-t", "identity", "-t", "mean", "--batch-size", 4, "--samples", "2:37")
    assert gradscope(*run, "-o", "whole.h5").code == 0
    for k in range(3):
        assert gradscope(*run, "-o", "o.h5", "--shard", f"{k}/3").code == 0
    shards = sorted(project.glob("o.shard-*.h5"))
    assert gradscope("merge", *shards, "-o", "merged.h5", "-q").code == 0
    with package.open("whole.h5") as one, package.open("merged.h5") as other:
        assert one.run["tokens"]["samples"] == [2, 37]
        for key, column in one.samples.items():
            np.testing.assert_array_equal(column, other.samples[key])
        for name, rows in one.chains[0].items():
            np.testing.assert_array_equal(rows[...], other.chains[0][name][...])
    other_span = words("build", "-t", "identity", "--samples", "3:38", "--batch-size", 4)
    assert gradscope(*other_span, "-o", "x.h5", "--shard", "2/3").code == 0
    lacking = gradscope("merge", *shards[:2], "-o", "y.h5")
    assert lacking.code == 3
    assert "tokens are missing" in lacking.err
    mixed_up = gradscope("merge", *shards[:2], project / "x.shard-2-of-3.h5", "-o", "y.h5")
    assert mixed_up.code == 3
    assert "tokens" in mixed_up.err


def test_a_merge_computes_tokens_anew(gradscope: Gradscope, project: Path) -> None:
    Path("run.toml").write_text(
        'version = 1\n[model]\nfactory = "model.py:build"\n[checkpoint]\npath = "build.pt"\n'
        '[dataset]\npath = "data.npz"\n[loss]\nname = "causal_lm"\n'
        '[compute]\nrows = "token"\nsamples = "2:37"\nbatch_size = 4\n'
    )
    for k in range(2):
        assert (
            gradscope("compute", "--config", "run.toml", "-o", "o.h5", "--shard", f"{k}/2").code
            == 0
        )
    shards = sorted(project.glob("o.shard-*.h5"))
    done = gradscope("merge", *shards, "-o", "merged.h5", "--config", "run.toml")
    assert done.code == 0, done.err
    assert "with equal losses and norms" in done.out


def test_a_stopped_run_goes_on(forked: Forked, project: Path) -> None:
    Path("model.py").write_text(
        MODEL.replace("def forward(self, ids):\n", "def forward(self, ids):\n        stop()\n")
        + "import os\ndef stop():\n    with open('calls', 'a') as file:\n"
        "        if (file.write('x') and file.tell()) == 150:\n"
        "            os.kill(os.getpid(), 2)\n"
    )
    run = words("build", "-t", "identity", "-t", "mean", "--batch-size", 3, "--backend", "loop")
    run = [str(word) for word in (*run, "--verify", "first")]
    assert forked.run(*run, "-o", "out.h5", cwd=project).code == 130
    assert not Path("out.h5").exists()
    assert forked.run(*run, "-o", "out.h5", "--resume", cwd=project).code == 0
    assert forked.run(*run, "-o", "whole.h5", cwd=project).code == 0
    with package.open("whole.h5") as one, package.open("out.h5") as other:
        for key, column in one.samples.items():
            np.testing.assert_array_equal(column, other.samples[key])
        for k in (0, 1):
            for name, rows in one.chains[k].items():
                np.testing.assert_array_equal(rows[...], other.chains[k][name][...])


def flat(path: str) -> tuple[Rows, Rows, Rows]:
    """Return the rows (n, p) of a file's first chain, and sample and position of each (n,)."""
    with package.open(path) as file:
        every = [v[...].reshape(file.n, -1) for v in file.chains[0].values()]
        table = file.samples
        of = [np.asarray(table[k]) for k in ("sample", "position") if k in table]
        return np.concatenate(every, 1), *(of or [np.arange(file.n), np.zeros(file.n, int)])


@pytest.mark.sampled
@pytest.mark.parametrize("model", ["build", "mixed"])
def test_tokens_are_scored_for_tokens_and_for_samples(
    gradscope: Gradscope, project: Path, model: str
) -> None:
    assert gradscope(*words(model, "--samples", "2:37", "-o", "train.h5")).code == 0
    assert gradscope(*words(model, "--samples", "0:4", "-o", "tokens.h5")).code == 0
    assert gradscope(*whole(model, "--samples", "0:4")).code == 0
    train, sample, position = flat("train.h5")
    how = ("--curvature", "identity", "-q", "-o")
    for query, more in (("tokens.h5", ()), ("whole.h5", ()), ("tokens.h5", ("--stream",))):
        done = gradscope("attribute", "train.h5", query, *more, *how, "scores.h5", "--overwrite")
        assert done.code == 0, done.err
        right, own, at = flat(query)
        with open_scores("scores.h5") as scores:
            found = np.asarray(scores.values[...])
            np.testing.assert_allclose(found, right @ train.T / len(train), atol=1e-12)
            np.testing.assert_array_equal(scores.samples["sample"], sample)
            np.testing.assert_array_equal(scores.samples["position"], position)
            if "position" in scores.queries:
                np.testing.assert_array_equal(scores.queries["sample"], own)
                np.testing.assert_array_equal(scores.queries["position"], at)
    best = found[0].argmax()
    shown = gradscope("stats", "scores.h5")
    assert f"{sample[best]}:{position[best]}" in shown.out
    assert f"{len(train)} tokens" in shown.out
    assert "target" not in shown.out and "prediction" not in shown.out  # columns of nothing
    assert gradscope("export", "scores.h5", "-o", "queries.csv").code == 0
    header, first, *_ = Path("queries.csv").read_text().splitlines()
    row = dict(zip(header.split(","), first.split(","), strict=True))
    assert (int(row["sample"]), int(row["position"])) == (own[0], at[0])
    with package.open("tokens.h5") as file, open_scores("scores.h5") as scores:
        view = View(file, scores=scores).document()
    (name, _), *_ = view["scores"]["of"]["0"][0]
    places = np.frombuffer(b64decode(view["scores"]["places"]["i4"]), "<i4").tolist()
    assert view["scores"]["ids"][places.index(name)] == f"{sample[best]}:{position[best]}"
    moved = json.loads(gradscope("stats", "train.h5", "tokens.h5", "--json").out)
    assert moved["common"] == np.isin(own, sample).sum() > 0  # rows are counted anew in each run
    assert all(row["moved"] < 1e-12 for row in moved["samples"])
    mixed_up = gradscope("view", "whole.h5", "--scores", "scores.h5", "-o", "page.html")
    assert mixed_up.code == 2
    assert "have different rows: samples and tokens" in mixed_up.err
    untrained = gradscope("validate", "scores.h5", "--train", "model.py:build")
    assert untrained.code == 2
    assert "for tokens" in untrained.err


def test_projected_tokens_are_refined_with_full_gradients(
    gradscope: Gradscope, project: Path
) -> None:
    random = ("-t", "project:dim=8", "--randomness", "fixed")
    assert gradscope(*words("build", "--samples", "3:30", *random, "-o", "train.h5")).code == 0
    assert gradscope(*words("build", "--samples", "0:2", *random, "-o", "query.h5")).code == 0
    how = ("--curvature", "identity", "--refine", 3, "-q", "-o", "scores.h5")
    done = gradscope("attribute", "train.h5", "query.h5", *how)
    assert done.code == 0, done.err
    for name, samples in (("full.h5", "3:30"), ("asked.h5", "0:2")):
        assert gradscope(*words("build", "--samples", samples, "-o", name)).code == 0
    (train, *_), (query, *_) = flat("full.h5"), flat("asked.h5")
    right = query @ train.T / len(train)
    with open_scores("scores.h5") as scores:
        places = np.asarray(scores.refined["places"][...]).astype(int)
        found = np.asarray(scores.refined["scores"][...])
    assert places.shape == (len(query), 6) and (places >= 0).all()
    np.testing.assert_allclose(found, np.take_along_axis(right, places, 1), atol=1e-12)


@pytest.mark.full
def test_what_is_shown_is_said_of_tokens(gradscope: Gradscope, project: Path) -> None:
    chains = ("-t", "identity", "-t", "mean")
    made = gradscope(*[w for w in words("build", *chains, "-o", "out.h5") if w != "-q"])
    assert made.code == 0, made.err
    page = gradscope("stats", "out.h5", "--html", "out.html")
    assert page.code == 0, page.err
    assert gradscope("view", "out.h5", "-o", "view.html").code == 0
    shown = [made.out, gradscope("stats", "out.h5").out, gradscope("stats", "out.h5", "--full").out]
    text = re.sub(r"<pre.*?</pre>", "", Path("out.html").read_text(), flags=re.DOTALL)
    shown.append(re.sub(r"<(style|script).*?</\1>|<[^>]*>", " ", text, flags=re.DOTALL))
    for found in shown:
        assert "tokens" in found
        assert not re.search(r"\b(?<!--)samples?\b", found, re.IGNORECASE), found
    mixed = gradscope(*[w for w in words("mixed", "--dry-run") if w != "-q"])
    told = " ".join(mixed.out.split())
    assert "tokens 192 tokens" in told and f"backward pass ({T - 1} per sample)" in told, told
    assert "List of tokens</h2>" in Path("view.html").read_text()
    document = json.loads(gradscope("stats", "out.h5", "--json").out)
    with package.open("out.h5") as file:
        assert document["file"]["samples"] == file.n
    first = document["samples"][0]
    assert f"token {first['index']} ({first['id']}), " in shown[1]
    documents = (
        document["file"],
        json.loads(gradscope(*words("build", "--dry-run", "--json")).out),
    )
    assert {found["noun"] for found in documents} == {"token"}


def test_commands_read_it_or_say_why_not(gradscope: Gradscope, project: Path) -> None:
    assert gradscope(*words("build", "-t", "identity", "-o", "out.h5")).code == 0
    shown = gradscope("stats", "out.h5", "--full")
    assert shown.code == 0
    with package.open("out.h5") as file:
        top = int(np.argmax(file.samples["norm"]))
        name = f"{file.samples['sample'][top]}:{file.samples['position'][top]}"
    assert name in shown.out
    compare = ["compare", *words("build", "--samples", "0:8")[1:], "--against"]  # one is empty
    done = gradscope(*compare, "out.h5", "--json")
    assert done.code == 0, done.out + done.err
    found = json.loads(done.out)
    assert found["tokens"][-1] == "7:5"
    Path("wrong.py").write_text(WRONG)
    told = gradscope(*compare, "wrong.py:second_row")
    assert told.code == 5
    assert "1 (0:1)" in told.out and "only token 1 of 33 differs" in told.out
    assert gradscope(*compare, "opacus").code == 2
    done = gradscope("export", "out.h5", "-o", "some.csv", "--samples", "4:7")  # 5 has none
    assert done.code == 0 and "9 rows" in done.out, done.out + done.err
    lines = [line.split(",") for line in Path("some.csv").read_text().splitlines()]
    assert {line[lines[0].index("sample")] for line in lines[1:]} == {"4", "6"}
    wrong = gradscope(*words("build", "--labels", "sampled", "-o", "x.h5"))
    assert wrong.code == 2
    hint = words("build", "-o", "x.h5")
    hint[hint.index("causal_lm")], hint[hint.index("token")] = "model.py:loss", "sample"
    done = gradscope(*hint)
    assert done.code == 2
    assert "--rows token" in done.err
