"""`gradscope compare` and `gradscope list` from the outside."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradscope.cli.names import registries
from tests.cli.conftest import SAMPLES, Gradscope

MINE = """
import torch

def right(model, loss, inputs, targets):
    parameters = dict(model.named_parameters())
    losses = loss(model(inputs), targets)
    rows = [torch.autograd.grad(l, list(parameters.values()), retain_graph=True) for l in losses]
    return {name: torch.stack(g) for name, g in zip(parameters, zip(*rows))}

def averaged(model, loss, inputs, targets):
    return {name: g / len(g) for name, g in right(model, loss, inputs, targets).items()}
"""


@pytest.mark.parametrize("name", ["digits_mlp", "sunspots_lstm"])
def test_all_backends_agree_on_sample_models(gradscope: Gradscope, name: str) -> None:
    config = SAMPLES / name / "run.toml"
    done = gradscope("compare", "--config", config, "--samples", "3:9", "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["agrees"] is True
    status = {row["backend"]: row["status"] for row in document["rows"]}
    assert set(status) == {"loop", "hooks", "vmap", "expand"}
    assert status["loop"] == status["hooks"] == "agrees"
    for row in document["rows"]:
        assert row["status"] == "agrees" or (row["reason"] and row["remedy"])


def test_ones_own_implementation_is_judged(
    gradscope: Gradscope, digits: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    run = ["compare", "--config", digits, "--samples", ":4", "--backends", "hooks", "--json"]
    right = gradscope(*run, "--against", f"{mine}:right")
    assert right.code == 0, right.err
    wrong = gradscope(*run, "--against", f"{mine}:averaged")
    assert wrong.code == 5
    row = next(r for r in json.loads(wrong.out)["rows"] if r["backend"].endswith("averaged"))
    assert row["status"] == "disagrees"
    assert "mean" in json.dumps(row)
    assert row["parameters"][0]["factor"] == pytest.approx(1 / 4)
    code = json.loads(wrong.out)["digests"]
    assert set(code[f"{mine}:averaged"]) == {"mine.py"} and set(code["model"]) == {"model.py"}


def test_a_stored_result_is_judged(gradscope: Gradscope, digits: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.h5"
    options = ["--config", digits, "--samples", ":12"]
    assert gradscope("compute", *options, "-t", "identity", "-o", out, "-q").code == 0
    done = gradscope("compare", *options, "--backends", "hooks", "--against", out, "--json")
    assert done.code == 0, done.err
    assert {r["status"] for r in json.loads(done.out)["rows"]} == {"agrees"}


def test_another_library_is_judged(gradscope: Gradscope, digits: Path) -> None:
    words = ["--config", digits, "--samples", ":12", "--backends", "hooks"]
    done = gradscope("compare", *words, "--against", "opacus", "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert {r["backend"]: r["status"] for r in document["rows"]}["opacus"] == "agrees"
    assert set(document["libraries"]) == {"opacus"}


def test_compare_speaks_to_people_and_names_kernels_when_asked(
    gradscope: Gradscope, digits: Path
) -> None:
    words = ["--config", digits, "--samples", ":4"]
    done = gradscope("compare", *words)
    assert done.code == 0
    assert all(name in done.out for name in ("loop", "hooks", "vmap", "expand", "agrees"))
    assert "Kernels" not in done.out
    assert gradscope("compare", *words, "--backends", "hooks", "-q") == (0, "", "")
    planned = gradscope("compare", *words, "--dry-run")
    assert planned.out == "would compare loop, hooks, vmap, expand on 4 samples\n"
    words = ["--config", SAMPLES / "digits_cnn" / "run.toml", "--samples", ":64"]
    done = gradscope("compare", *words, "--backends", "hooks", "--verbose")
    assert "Kernels and their times" in done.out


@pytest.mark.full
def test_compile_adds_a_row(gradscope: Gradscope, folder: Path) -> None:
    words = ["--model", f"{folder}/model.py:build", "--loss", "cross_entropy", "--backends", "vmap"]
    run = [folder / "w.pt", folder / "data.npz", *words, "--compile", "--json"]
    done = gradscope("compare", *run)
    assert done.code == 0, done.err
    rows = {row["backend"]: row["status"] for row in json.loads(done.out)["rows"]}
    assert rows == {"vmap": "agrees", "vmap compiled": "agrees"}


@pytest.mark.parametrize("kind", registries())
def test_list_shows_every_name_with_a_summary(gradscope: Gradscope, kind: str) -> None:
    document = json.loads(gradscope("list", kind, "--json").out)
    shown = {row["name"]: row["summary"] for row in document["entries"]}
    assert all(shown.values())
    assert {name for each in registries()[kind] for name in each.names()} <= set(shown)
    assert all(name in gradscope("list", kind).out for name in shown)


CLOSURE = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 3)
        self.mlp = lambda x: self.down(torch.tanh(self.up(x)))
    def forward(self, x):
        return self.head(x + self.mlp(x))
def build():
    torch.manual_seed(0)
    return Net()
PARTS = {}
class Global(Net):
    def __init__(self):
        super().__init__()
        PARTS["down"], self.mlp = self.down, None
    def forward(self, x):
        return self.head(x + PARTS["down"](torch.tanh(self.up(x))))
def through_a_global():
    return Global()
def zeros_for_the_mlp(model, loss, inputs, targets):
    named = dict(model.named_parameters())
    rows = {k: [] for k in named}
    for i in range(len(inputs)):
        value = loss(model(inputs[i : i + 1]), targets[i : i + 1]).sum()
        for k, g in zip(named, torch.autograd.grad(value, [*named.values()], allow_unused=True)):
            rows[k].append(torch.zeros_like(named[k]) if g is None else g * k.startswith("head"))
    return {k: torch.stack(v) for k, v in rows.items()}
"""


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_model_that_holds_a_function_over_its_own_layers(
    gradscope: Gradscope, tmp_path: Path, dtype: str
) -> None:
    """The float64 copy is the model: a peer that leaves layers out does not agree."""
    net, scope = tmp_path / "net.py", dict[str, Any]()
    net.write_text(CLOSURE)
    exec(CLOSURE, scope)
    torch.save(scope["build"]().state_dict(), tmp_path / "w.pt")
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((8, 6)).astype("float32"), draw.integers(3, size=8)
    np.savez(tmp_path / "d.npz", inputs=x, targets=y)
    files = [tmp_path / "w.pt", tmp_path / "d.npz", "--loss", "cross_entropy", "--dtype", dtype]
    peer = ["--against", f"{net}:zeros_for_the_mlp", "--json"]
    done = gradscope("compare", *files, "--model", f"{net}:build", *peer)
    rows = {row["backend"]: row for row in json.loads(done.out)["rows"]}
    assert done.code == 5 and rows[f"{net}:zeros_for_the_mlp"]["status"] == "disagrees"
    assert [rows[k]["status"] for k in ("loop", "hooks", "vmap", "expand")] == ["agrees"] * 4
    assert gradscope("check", *files, "--model", f"{net}:build").code == 0
    held = gradscope("compare", *files, "--model", f"{net}:through_a_global", *peer)
    assert held.code == 4 and "uses down" in held.err and "through self" in held.err
