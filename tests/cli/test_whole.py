"""Runs on the nodes of a graph, whose features and adjacency are whole."""

import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

import gradscope as package
from tests.cli.conftest import Gradscope
from tests.test_whole import EDGES, A, Dense, N, X, Y, made, reference, require_equal

SCRIPT = """
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x, adjacency):
        return adjacency @ self.b(torch.relu(adjacency @ self.a(x)))

class Nodes(Dataset):
    def __init__(self, leave_out=False):
        held = np.load("graph.npz")
        self.features = torch.tensor(held["features"])
        if not leave_out:
            self.adjacency = torch.tensor(held["adjacency"])
        self.labels = torch.tensor(held["labels"])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, k):
        return {"labels": self.labels[k]}
"""
SPEC = """
path = "graph.npz"
inputs = ["features", "adjacency"]
targets = ["labels"]
"""
WHOLE = 'whole = ["features", "adjacency"]\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    train = (torch.arange(N) % 3 == 1).numpy()
    arrays = {"features": X.numpy(), "adjacency": A.numpy(), "labels": Y.numpy()}
    np.savez("graph.npz", **arrays, train=train)
    Path("gcn.py").write_text(SCRIPT)
    torch.save(made(Dense).state_dict(), "w.pt")
    return tmp_path


def run(command, data, *more):
    return (command, "w.pt", data, "--model", "gcn.py:GCN", "--loss", "cross_entropy", *more)


@pytest.mark.parametrize("select", [None, "train"])
def test_a_run(folder: Path, gradscope: Gradscope, select: str | None) -> None:
    text = SPEC + WHOLE + ("" if select is None else f'select = "{select}"\n')
    Path("data.toml").write_text(text)
    found = gradscope(*run("compute", "data.toml", "-o", "out.h5", "--batch-size", 7))
    assert found.code == 0, found.err
    nodes = torch.arange(N) if select is None else torch.arange(N)[torch.arange(N) % 3 == 1]
    right = {k: g[nodes] for k, g in reference(made(Dense), (X, A)).items()}
    with package.open("out.h5") as file:
        (chain,) = file.chains
        require_equal({k: torch.tensor(chain[k][:]) for k in chain}, right)
        assert file.samples["target"].tolist() == Y[nodes].tolist()
    checked = gradscope(*run("check", "data.toml"))
    assert checked.code == 0
    assert "adjacency: float32, 60x60, whole for every sample" in " ".join(checked.out.split())
    assert gradscope(*run("compare", "data.toml")).code == 0


def test_a_data_set_of_the_users_own(folder: Path, gradscope: Gradscope) -> None:
    Path("own.toml").write_text(SPEC.replace("graph.npz", "gcn.py:Nodes") + WHOLE)
    found = gradscope(*run("compute", "own.toml", "-o", "own.h5"))
    assert found.code == 0, found.err
    with package.open("own.h5") as file:
        (chain,) = file.chains
        rows = {k: torch.tensor(chain[k][:]) for k in chain}
    require_equal(rows, reference(made(Dense), (X, A)))
    Path("less.toml").write_text(Path("own.toml").read_text() + "kwargs = { leave_out = true }\n")
    found = gradscope(*run("check", "less.toml"))
    assert found.code == 3
    assert "has no such attribute" in found.err


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (SPEC, "If the samples are the nodes of one graph"),
        (SPEC + 'whole = ["adjacency"]', "Give features and graph whole"),
        (SPEC + 'whole = ["matrix"]', "'matrix' is not an input"),
        (SPEC.replace('["labels"]', "[]") + WHOLE, "the number of samples is unknown"),
        (SPEC.replace('["labels"]', '["edges"]'), 'whole = ["NAME"] under [dataset]'),
    ],
)
def test_data_that_are_not_whole(folder: Path, gradscope: Gradscope, spec: str, says: str) -> None:
    held = dict(np.load("graph.npz"))
    np.savez("graph.npz", **held, edges=EDGES.numpy())
    Path("data.toml").write_text(spec)
    found = gradscope(*run("check", "data.toml"))
    assert found.code in (3, 4)
    assert says in found.err
    assert "Traceback" not in found.err


def test_init_finds_the_graph(folder: Path, gradscope: Gradscope) -> None:
    made_file = gradscope("init", "w.pt", "graph.npz", "--model", "gcn.py:GCN")
    assert made_file.code == 0, made_file.err
    spec = tomllib.loads(Path("run.toml").read_text())["dataset"]
    assert spec["inputs"] == spec["whole"] == ["features", "adjacency"]
    assert (spec["targets"], spec["select"]) == (["labels"], "train")
    assert gradscope("check", "--config", "run.toml").code == 0


@pytest.mark.parametrize(
    ("arrays", "whole"),
    [
        ({"x": X, "edge_index": EDGES, "edge_weight": A[A > 0], "y": Y}, 3),
        ({"x": X, "laplacian": A, "y": Y}, 2),
        ({"kernel": A, "y": Y}, 0),  # a row of it is a sample
        ({"x": X, "edge": X[:, 0], "y": Y}, 0),  # a number of each sample
        ({"x": X, "adj": A[:, :7], "y": Y}, 0),
    ],
)
def test_init_takes_nothing_else_for_a_graph(
    folder: Path, gradscope: Gradscope, arrays: dict[str, torch.Tensor], whole: int
) -> None:
    np.savez("data.npz", **{name: t.numpy() for name, t in arrays.items()})
    assert gradscope("init", "w.pt", "data.npz", "--model", "gcn.py:GCN").code == 0
    spec = tomllib.loads(Path("run.toml").read_text())["dataset"]
    assert spec.get("whole", []) == [k for k in arrays if k != "y"][:whole]
