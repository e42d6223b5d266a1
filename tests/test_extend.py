"""`gradscope.extend`: one addition of each kind, in a package of its own with entry points."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import gradscope

EXTENSION = '''
"""One addition of each kind, through one import."""

import json
import os
from pathlib import Path

import numpy as np
import torch

from gradscope import extend


@extend.transform("damped", extend.TransformScope.FACTOR)
def damped(gamma: float = 0.01):
    """g / (norm + gamma)."""
    return lambda gradients: gradients.scale(1 / (gradients.norms + gamma))


@extend.reducer("rms")
def rms():
    """The root of the mean square."""
    return extend.for_each_parameter(
        start=lambda block: {"squares": extend.wide(block).squared_sum()},
        merge=lambda a, b, n_a, n_b: {"squares": a["squares"] + b["squares"]},
        result=lambda part, n: {"": (part["squares"] / n).sqrt()},
    )


@extend.loss("fourth")
def fourth(outputs, targets, *, scale: float = 1.0):
    """The fourth power of the error."""
    return extend.per_sample_loss(scale * (outputs - targets) ** 4, "sum")


@extend.node_rule("MaximumBackward0")
def maximum(site):
    """The gradient goes to the larger of two."""
    Path(os.environ["RULE_WAS_USED"]).touch()
    own, other = site.saved("self"), site.saved("other")
    if site.slot == 1:
        own, other = other, own
    return site.reduced(site.gradient * ((own > other) + 0.5 * (own == other)))


@extend.dataset_reader("rows", lambda head: head.startswith(b"rows"))
def read_rows(path):
    """Numbers behind the word rows."""
    values = np.loadtxt(path, skiprows=1)
    arrays = {"x": torch.tensor(values[:, :3]), "y": torch.tensor(values[:, 3:])}
    return extend.StoredArrays(("x", "y"), arrays.__getitem__)


@extend.checkpoint_reader("plain json", lambda head: head.startswith(b'{"'))
def read_json(path):
    """Nested lists of numbers by parameter name."""
    return {name: torch.tensor(value) for name, value in json.loads(path.read_text()).items()}


class Kurtosis(extend.Record):
    excess: float


def shown(found, summary):
    return [extend.Section("Tail of the norms", [("excess kurtosis", f"{found.excess:.6f}")])]


@extend.statistic("kurtosis", place=35, sections=shown)
def kurtosis(data: extend.Data) -> Kurtosis:
    """The excess kurtosis of the norms."""
    x = data.samples.norm - data.samples.norm.mean()
    return Kurtosis(excess=(x**4).mean() / (x**2).mean() ** 2 - 3)
'''
GROUPS = {
    "statistics": "kurtosis = extension:kurtosis",
    "transforms": "damped = extension:damped",
    "reducers": "rms = extension:rms",
    "losses": "fourth = extension:fourth",
    "node_rules": "MaximumBackward0 = extension:maximum",
    "dataset_formats": "rows = extension:read_rows",
    "checkpoint_formats": "plain json = extension:read_json",
}
MODEL = """
import torch
from torch import nn


class Floored(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.floor = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return torch.maximum(self.linear(x), self.floor)


def build():
    return Floored().double()
"""
RUN = """
version = 1
[model]
factory = "model.py:build"
[checkpoint]
path = "weights.json"
[dataset]
path = "data.rows"
inputs = ["x"]
targets = ["y"]
[loss]
name = "fourth"
kwargs = {scale = 0.5}
[compute]
backend = "hooks"
batch_size = 4
transform = ["damped:gamma=0.5 | rms", "identity"]
"""
PROGRAM = """
import sys
from gradscope.cli import main
for words in sys.argv[1:]:
    sys.argv = ["gradscope", *words.split()]
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, (words, stop.code)
"""


Done = tuple[Path, list[dict], str]  # the folder, the JSON documents, what `stats` printed


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Install the package in a folder, list, compute and show statistics in a fresh process."""
    folder = tmp_path_factory.mktemp("extended")
    (folder / "extension.py").write_text(EXTENSION)
    info = folder / "extension-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extension\nVersion: 1.0\n")
    points = "\n".join(f"[gradscope.{group}]\n{point}" for group, point in GROUPS.items())
    (info / "entry_points.txt").write_text(points)
    (folder / "model.py").write_text(MODEL)
    (folder / "run.toml").write_text(RUN)
    torch.manual_seed(0)
    weights = {"linear.weight": torch.randn(2, 3), "linear.bias": torch.randn(2)}
    weights["floor"] = torch.randn(2) / 2
    (folder / "weights.json").write_text(json.dumps({k: v.tolist() for k, v in weights.items()}))
    np.savetxt(folder / "data.rows", torch.randn(10, 5).numpy(), header="rows", comments="")
    kinds = ["transforms", "reducers", "losses", "formats"]
    commands = [f"list {kind} --json" for kind in kinds]
    commands += ["compute --config run.toml -o out.h5 --json", "stats out.h5 --json"]
    commands.append("stats out.h5 --full")
    here = str(Path(gradscope.__file__).parents[1])
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, *commands],
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": f"{folder}{os.pathsep}{here}", "RULE_WAS_USED": str(folder / "used")},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    decoder, documents, rest = json.JSONDecoder(), [], found.stdout.strip()
    while rest.startswith("{"):
        document, end = decoder.raw_decode(rest)
        documents.append(document)
        rest = rest[end:].lstrip()
    return folder, documents, rest


def rows(folder: Path) -> np.ndarray:
    """Every sample's gradient (n, p), by plain autograd on a model that is written out here."""
    values = json.loads((folder / "weights.json").read_text())
    data = torch.tensor(np.loadtxt(folder / "data.rows", skiprows=1))
    found = []
    for row in data:
        names = ("linear.weight", "linear.bias", "floor")
        weight, bias, floor = (
            torch.tensor(values[k], dtype=torch.float32).double().requires_grad_() for k in names
        )
        outputs = torch.maximum(nn.functional.linear(row[:3], weight, bias), floor)
        loss = 0.5 * ((outputs - row[3:]) ** 4).sum()
        gradients = torch.autograd.grad(loss, (floor, weight, bias))
        found.append(torch.cat([g.flatten() for g in gradients]).numpy())
    return np.stack(found)


def test_what_is_added_is_listed(done: Done) -> None:
    shown = [{row["name"]: row["summary"] for row in d["entries"]} for d in done[1][:4]]
    assert shown[0]["damped"] == "g / (norm + gamma)."
    assert shown[1]["rms"] == "The root of the mean square."
    assert shown[2]["fourth"] == "The fourth power of the error."
    assert shown[3]["rows"] == "Numbers behind the word rows."
    assert shown[3]["plain json"] == "Nested lists of numbers by parameter name."


def test_what_is_added_computes(done: Done) -> None:
    folder, *_ = done
    right = rows(folder)
    assert (folder / "used").exists()  # the rule, instead of the masked fallback
    with gradscope.open(folder / "out.h5") as file:
        found = {k: v[:] for k, v in file.chains[1].items()}
        names = sorted(found, key=["floor", "linear.weight", "linear.bias"].index)
        ours = np.concatenate([found[k].reshape(10, -1) for k in names], 1)
        np.testing.assert_allclose(ours, right, rtol=1e-10, atol=1e-12)
        factors = 1 / (np.linalg.norm(right, axis=1, keepdims=True) + 0.5)
        root = np.sqrt(((factors * right) ** 2).mean(0))
        reduced = np.concatenate([file.chains[0][k][:].ravel() for k in names])
        np.testing.assert_allclose(reduced, root, rtol=1e-10, atol=1e-12)


def test_what_is_added_is_a_section_of_the_statistics(done: Done) -> None:
    folder, documents, printed = done
    x = np.linalg.norm(rows(folder), axis=1)
    x -= x.mean()
    right = (x**4).mean() / (x**2).mean() ** 2 - 3
    assert documents[-1]["kurtosis"]["excess"] == pytest.approx(right, rel=1e-6)
    assert "Tail of the norms" in printed and f"{right:.4f}" in printed
