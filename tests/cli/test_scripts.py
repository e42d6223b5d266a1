"""The model of a checkpoint, found in scripts that are written as training scripts are."""

import ast
import importlib.util
import json
import tomllib
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradscope as package
from gradscope.sources.models import Config
from gradscope.sources.scripts import find_models, losses_called
from tests.cli.conftest import Gradscope

HEAD = """
import argparse
from dataclasses import dataclass
import torch
import torch.nn as nn
import torch.nn.functional as F
"""
TRAIN = """
def main():
    raise SystemExit("nothing of this is to run")
if __name__ == "__main__":
    main()
"""

PLAIN = """
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.fc1 = nn.Linear(64, 5)
    def forward(self, x):
        return self.fc1(torch.flatten(F.relu(self.conv1(x)), 1))
class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.drop = nn.Dropout(0.5)
        self.fc1 = nn.Linear(144, 10)
    def forward(self, x):
        return F.log_softmax(self.fc1(self.drop(F.relu(self.conv1(x))).flatten(1)), 1)
def train(model, x, y):
    F.nll_loss(model(x), y).backward()
"""
SIZES = """
class Upscale(nn.Module):
    def __init__(self, factor, width):
        super().__init__()
        self.first = nn.Conv2d(1, width, (3, 3), padding=1)
        self.last = nn.Conv2d(width, factor ** 2, 3, padding=1)
        self.shuffle = nn.PixelShuffle(factor)
    def forward(self, x):
        return self.shuffle(self.last(self.first(x).relu()))
criterion = nn.MSELoss()
"""
OPTIONS = """
parser = argparse.ArgumentParser()
parser.add_argument("--cell", type=str, default="LSTM")
parser.add_argument("--dropout", type=float, default=0.1)
class Tagger(nn.Module):
    def __init__(self, cell, ntoken, ninp, nhid, nlayers, dropout):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        if cell == "LSTM":
            self.rnn = nn.LSTM(ninp, nhid, nlayers, batch_first=True)
        else:
            self.rnn = nn.GRU(ninp, nhid, nlayers, batch_first=True)
        self.decoder = nn.Linear(nhid, ntoken)
    def forward(self, ids):
        return self.decoder(self.drop(self.rnn(self.encoder(ids))[0]))
def main():
    args = parser.parse_args()
    model = Tagger(args.cell, 50, 8, 8, 1, args.dropout)
    loss = F.cross_entropy(model(ids).view(-1, 50), targets.view(-1))
"""
CONFIG = """
@dataclass
class Settings:
    block: int = 64
    vocab: int = 100
    layers: int = 12
    width: int = 48
    bias: bool = True
class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self.mlp = nn.ModuleDict(dict(
            up=nn.Linear(config.width, 4 * config.width, bias=config.bias),
            down=nn.Linear(4 * config.width, config.width, bias=config.bias),
        ))
    def forward(self, x):
        return x + self.mlp["down"](self.mlp["up"](self.norm(x)).relu())
class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.body = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab, config.width),
            wpe=nn.Embedding(config.block, config.width),
            h=nn.ModuleList([Layer(config) for _ in range(config.layers)]),
        ))
        self.head = nn.Linear(config.width, config.vocab, bias=False)
    def forward(self, ids):
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.body["wte"](ids) + self.body["wpe"](positions)
        for layer in self.body["h"]:
            x = layer(x)
        return self.head(x)
def loss(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())
"""
BLOCKS = """
class Block(nn.Module):
    def __init__(self, inside, outside, stride=1):
        super().__init__()
        self.conv = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn = nn.BatchNorm2d(outside)
        self.shortcut = nn.Sequential()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False))
    def forward(self, x):
        return F.relu(self.bn(self.conv(x)) + self.shortcut(x))
class Other(Block):
    def __init__(self, inside, outside, stride=1):
        super().__init__(inside, outside, stride)
        self.gate = nn.Linear(outside, outside)
class Deep(nn.Module):
    def __init__(self, block, blocks, classes=3):
        super().__init__()
        self.inside = 4
        self.conv = nn.Conv2d(1, 4, 3, 1, 1, bias=False)
        self.layer1 = self._layer(block, 4, blocks[0], 1)
        self.layer2 = self._layer(block, 8, blocks[1], 2)
        self.linear = nn.Linear(8, classes)
    def _layer(self, block, outside, count, stride):
        layers = []
        for step in [stride] + [1] * (count - 1):
            layers.append(block(self.inside, outside, step))
            self.inside = outside
        return nn.Sequential(*layers)
    def forward(self, x):
        return self.linear(self.layer2(self.layer1(self.conv(x))).mean((2, 3)))
def Deep4():
    return Deep(Block, [2, 2])
def Deep6():
    return Deep(Block, [2, 4])
def OtherDeep6():
    return Deep(Other, [2, 4])
criterion = nn.CrossEntropyLoss()
"""

SCRIPTS: dict[str, tuple[str, str, dict[str, Any]]] = {  # the text, what built it, its arguments
    "plain": (PLAIN, "Net", {}),
    "a factor of a size": (SIZES, "Upscale", {"factor": 3, "width": 6}),
    "options": (
        OPTIONS,
        "Tagger",
        {"cell": "LSTM", "ntoken": 30, "ninp": 6, "nhid": 7, "nlayers": 2, "dropout": 0.1},
    ),
    "a config": (
        CONFIG,
        "Model",
        {"config": {"block": 9, "vocab": 11, "layers": 3, "width": 8, "bias": True}},
    ),
    "blocks": (BLOCKS, "Deep6", {}),
}


def imported(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"script_{path.parent.name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built(path: Path, name: str, arguments: dict[str, Any]) -> nn.Module:
    given = {k: Config(v) if isinstance(v, dict) else v for k, v in arguments.items()}
    torch.manual_seed(0)
    model: nn.Module = getattr(imported(path), name)(**given)
    return model


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}


@pytest.mark.parametrize("case", SCRIPTS)
def test_the_model_and_its_arguments_are_found(tmp_path: Path, case: str) -> None:
    _, name, arguments = SCRIPTS[case]
    for k, other in enumerate(SCRIPTS.values()):  # every script is beside the right one
        (tmp_path / f"{k}.py").write_text(HEAD + other[0] + TRAIN)
    path = tmp_path / f"{list(SCRIPTS).index(case)}.py"
    model = built(path, name, arguments)
    best, *others = find_models(sorted(tmp_path.glob("*.py")), shapes(model))
    assert (best.file, best.name, list(best.unknown)) == (path, name, [])
    assert all(other.fit < best.fit or other.file == path for other in others)
    found: dict[str, Any] = {}
    for key, argument in best.arguments.items():
        table, _, last = key.rpartition(".")
        (found.setdefault(table, {}) if table else found)[last] = argument.value
    assert found == arguments
    assert shapes(built(path, best.name, found)) == shapes(model)


def test_keys_of_a_wrapper_and_arguments_in_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(HEAD + CONFIG + TRAIN)
    sizes = {"block": 9, "vocab": 11, "layers": 3, "width": 8, "bias": False}
    of_model = shapes(built(path, "Model", {"config": sizes}))
    wrapped = {f"_orig_mod.module.{key}": shape for key, shape in of_model.items()}
    for stored in (
        {"model_args": sizes},
        {"args": Namespace(**sizes)},
        {"hyper_parameters": sizes},
    ):
        (best, *_) = find_models([path], wrapped, stored)
        assert best.fit == 1
        assert {k: a.value for k, a in best.arguments.items()} == {
            f"config.{key}": value for key, value in sizes.items()
        }


def test_what_cannot_be_known_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(HEAD + OPTIONS.replace('default="LSTM"', "required=True") + TRAIN)
    arguments = SCRIPTS["options"][2]
    (best, *_) = find_models([path], shapes(built(path, "Tagger", arguments)))
    assert list(best.unknown) == ["cell"]


def test_nothing_is_found_in_what_fits_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(HEAD + PLAIN)
    (tmp_path / "broken.py").write_text("def (:")
    (tmp_path / "binary.py").write_bytes(b"\0\xff")
    files = sorted(tmp_path.glob("*.py"))
    assert find_models(files, {"encoder.weight": (3, 4), "7": (2,)}) == []
    assert losses_called(files) == ["nll"]


def test_losses_that_scripts_call(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "def f(): return F.binary_cross_entropy(a, b) + F.mse_loss(a, b)\nloss = nn.BCELoss()\n"
    )
    assert losses_called([tmp_path / "a.py"]) == ["bce", "mse"]


X = np.random.default_rng(0).standard_normal
IDS = np.arange(20).reshape(4, 5) % 10
DATA: dict[str, tuple[Any, Any, str]] = {  # inputs, targets, the loss that is written
    "plain": (X((12, 1, 8, 8)), np.arange(12) % 10, "nll"),
    "a factor of a size": (X((6, 1, 4, 4)), X((6, 1, 12, 12)), "mse"),
    "options": (
        np.arange(20).reshape(4, 5),
        np.arange(20).reshape(4, 5) + 1,
        "token_cross_entropy",
    ),
    "a config": (
        np.arange(10).reshape(2, 5),
        np.arange(10).reshape(2, 5) + 1,
        "token_cross_entropy",
    ),
    "blocks": (X((6, 1, 8, 8)), np.arange(6) % 3, "cross_entropy"),
}


@pytest.mark.parametrize("case", SCRIPTS)
def test_from_a_script_to_an_answer_without_an_edit(
    gradscope: Gradscope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """init, check and compute; the norms are those of autograd, sample by sample."""
    text, name, arguments = SCRIPTS[case]
    (tmp_path / "train.py").write_text(HEAD + text + TRAIN)
    model = built(tmp_path / "train.py", name, arguments).eval()
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "model.pt")
    inputs, targets, loss = DATA[case]
    inputs = inputs.astype(np.float32) if inputs.dtype == np.float64 else inputs
    targets = targets.astype(np.float32) if targets.dtype == np.float64 else targets
    np.savez(tmp_path / "data.npz", x=inputs, y=targets)
    monkeypatch.chdir(tmp_path)
    done = gradscope("init", "model.pt", "data.npz", "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["missing"] == []
    spec = tomllib.loads(Path("run.toml").read_text())
    assert spec["model"]["factory"] == f"train.py:{name}" and spec["loss"]["name"] == loss
    done = gradscope("compute", "--config", "run.toml", "-o", "out.h5", "--json")
    assert done.code == 0, done.err
    with package.open("out.h5") as file:
        stored = file.samples["norm"][:]
    for k, found in enumerate(stored):
        model.zero_grad()
        outputs, y = model(torch.tensor(inputs[k : k + 1])), torch.tensor(targets[k : k + 1])
        if loss == "mse":
            value = nn.functional.mse_loss(outputs, y)
        elif loss == "nll":
            value = nn.functional.nll_loss(outputs, y)
        else:
            value = nn.functional.cross_entropy(outputs.flatten(0, -2), y.flatten())
        value.backward()
        gradients = [p.grad.double() for p in model.parameters() if p.grad is not None]
        norm = sum(float(g.square().sum()) for g in gradients)
        assert found == pytest.approx(norm**0.5, rel=1e-4)


def test_nothing_is_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise RuntimeError\n" + HEAD + PLAIN)
    ast.parse((tmp_path / "train.py").read_text())
    assert find_models([tmp_path / "train.py"], {"conv1.weight": (4, 1, 3, 3)})
