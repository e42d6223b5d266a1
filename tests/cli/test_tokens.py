"""Runs with a row for each token: files, shards, a run that goes on, what reads them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import gradscope as package
from tests.cli.conftest import Gradscope
from tests.cli.forked import Forked

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


@pytest.mark.parametrize("model", ["build", "mixed"])
def test_a_file_has_a_row_for_each_token_that_counts(
    gradscope: Gradscope, project: Path, model: str
) -> None:
    chains = ("-t", "identity", "-t", "mean", "-t", "project:dim=4 | gram")
    for name in ("a.h5", "b.h5"):
        done = gradscope(*words(model, *chains, "-o", name))
        assert done.code == 0, done.err
    assert Path("a.h5").read_bytes() == Path("b.h5").read_bytes()
    whole = words(model, "-t", "identity", "-o", "whole.h5")
    whole[whole.index("causal_lm")], whole[whole.index("token")] = (
        "causal_lm:per_sample=sum",
        "sample",
    )
    assert gradscope(*whole).code == 0
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
    assert "the same losses and norms" in done.out


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


def test_commands_read_it_or_say_why_not(gradscope: Gradscope, project: Path) -> None:
    assert gradscope(*words("build", "-t", "identity", "-o", "out.h5")).code == 0
    shown = gradscope("stats", "out.h5", "--full")
    assert shown.code == 0
    with package.open("out.h5") as file:
        top = int(np.argmax(file.samples["norm"]))
        name = f"{file.samples['sample'][top]}:{file.samples['position'][top]}"
    assert name in shown.out
    refused = gradscope("attribute", "out.h5", "out.h5", "-o", "scores.h5")
    assert refused.code == 2
    assert "rows are tokens" in refused.err
    compare = ["compare", *words("build", "--samples", "0:5", "--against", "out.h5")[1:]]
    done = gradscope(*compare)
    assert done.code == 0, done.out + done.err
    wrong = gradscope(*words("build", "--labels", "sampled", "-o", "x.h5"))
    assert wrong.code == 2
    hint = words("build", "-o", "x.h5")
    hint[hint.index("causal_lm")], hint[hint.index("token")] = "model.py:loss", "sample"
    done = gradscope(*hint)
    assert done.code == 2
    assert "--rows token" in done.err
