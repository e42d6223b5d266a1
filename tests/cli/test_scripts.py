"""The model of a checkpoint, found in scripts that are written as training scripts are."""

import ast
import importlib.util
import json
import sys
import tomllib
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradscope as package
from gradscope.sources.code import Config
from gradscope.sources.scripts.losses import losses_called
from gradscope.sources.scripts.models import find_models, find_trained
from gradscope.sources.scripts.sample_loss import step_loss
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

ADDED = """
class Chain(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.net = nn.Sequential()
        self.net.add_module("first", nn.Linear(2, wide))
        for k in range(2):
            self.net.add_module("layer_%d" % k, nn.Linear(wide, wide))
        self.heads = nn.ModuleList()
        for k in range(3):
            self.heads.append(nn.Linear(wide, 1))
    def forward(self, x):
        return torch.cat([head(self.net(x)) for head in self.heads], 1)
"""

NAMED = """
class Head(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size=(inside, outside)))
        nn.init.normal_(self.weight)
    def forward(self, x):
        return x @ self.weight
class Heads(nn.Module):
    def __init__(self, inside, hidden, classes, heads, depth, *, scale):
        super().__init__()
        self.heads = [Head(inside, hidden) for _ in range(heads)]
        for i, head in enumerate(self.heads):
            self.add_module("head_{}".format(i), head)
        for k in range(depth):
            setattr(self, f"norm{k + 1}", nn.LayerNorm(hidden * heads))
        self.last = Head(hidden * heads, classes)
        self.depth, self.scale = depth, scale
    def forward(self, x):
        x = torch.cat([head(x) for head in self.heads], dim=1)
        for k in range(self.depth):
            x = getattr(self, f"norm{k + 1}")(x)
        return F.log_softmax(self.scale * self.last(x), dim=1)
parser = argparse.ArgumentParser()
parser.add_argument("--scale", type=float, default=0.2)
def main():
    args = parser.parse_args()
    criterion = nn.NLLLoss()
    model = Heads(features.shape[1], 8, int(labels.max()) + 1, 8, 1, scale=args.scale)
"""
PASSED = """
import copy
def clones(module, count):
    return nn.ModuleList([copy.deepcopy(module) for _ in range(count)])
class Forward(nn.Module):
    def __init__(self, size, inner=None, span=5):
        super().__init__()
        inner = inner or 4 * size
        self.up, self.down = nn.Linear(size, inner), nn.Linear(inner, size)
        self.positions = nn.Parameter(torch.zeros(span, size))
    def forward(self, x):
        return x + self.down(self.up(x + self.positions).relu())
class Stack(nn.Module):
    def __init__(self, layers, norm=None):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = norm
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)
class Copies(nn.Module):
    def __init__(self, layer, count):
        super().__init__()
        self.layers = clones(layer, count)
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
class Stacked(nn.Module):
    def __init__(self, span, size, inner, depth, count):
        super().__init__()
        self.stack = Stack([Forward(size, inner) for _ in range(depth)], norm=nn.LayerNorm(size))
        layer = Forward(size)
        self.copies = Copies(layer, count)
        self.last = nn.Linear(size, span)
    def forward(self, x):
        return self.last(self.copies(self.stack(x)))
"""

KEYS = """
parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float, default=0.25)
class Text(nn.Module):
    def __init__(self, config, **rest):
        super().__init__()
        sizes = config["kernel_sizes"]
        self.embed = nn.Embedding(config["words"], config["dim"])
        maps, dim = config["maps"], config["dim"]
        self.convs = nn.ModuleList([nn.Conv2d(1, maps, (k, dim)) for k in sizes])
        self.drop = nn.Dropout(rest["rate"])
        self.last = nn.Linear(len(sizes) * config["maps"], 3)
    def forward(self, ids):
        x = self.embed(ids)[:, None]
        return self.last(torch.cat([conv(x).amax((2, 3)) for conv in self.convs], 1))
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
    "parts added in a loop": (ADDED, "Chain", {"wide": 7}),
    "parts named in a loop": (
        NAMED,
        "Heads",
        {"inside": 9, "hidden": 3, "classes": 4, "heads": 5, "depth": 2, "scale": 0.2},
    ),
    "parts that a caller passes": (
        PASSED,
        "Stacked",
        {"span": 3, "size": 6, "inner": 10, "depth": 2, "count": 3},
    ),
    "keys of a config and of **kwargs, sizes in a list": (
        KEYS,
        "Text",
        {"config": {"words": 20, "dim": 5, "maps": 6, "kernel_sizes": [2, 4, 3]}, "rate": 0.25},
    ),
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
    text = OPTIONS.replace('default="LSTM"', 'default="L,S"')
    path.write_text(HEAD + text + 'def main(args):\n    args.cell = args.cell.split(",")\n')
    (best, *_) = find_models([path], shapes(built(path, "Tagger", arguments)))
    assert list(best.unknown) == ["cell"]  # its default is converted before use


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


def test_a_loss_that_adds_several_losses_is_an_example(
    gradscope: Gradscope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = "def train():\n    total = F.nll_loss(a, b) + 0.1 * penalty\n    total.backward()\n"
    monkeypatch.chdir(tmp_path)
    torch.save(nn.Linear(2, 2).state_dict(), "model.pt")
    np.savez("data.npz", x=np.ones((4, 2)), y=np.arange(4) % 2)
    later = step.replace(" + ", "\n    total += ")
    one = step.replace(" + 0.1 * penalty", "")
    for text, missing in ((step, True), (later, True), (one, False)):
        Path("train.py").write_text(text)
        done = gradscope("init", "model.pt", "data.npz", "--overwrite", "--json")
        assert ("loss.name" in json.loads(done.out)["missing"]) is missing
        example = "# AN EXAMPLE: a nearby script adds several losses; write a function, FILE.py:"
        assert (example in Path("run.toml").read_text()) is missing


def test_a_graph_whose_layers_are_in_another_script(
    gradscope: Gradscope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--model names the class; the nodes to train on are positions."""
    layer, model = NAMED.split("class Heads")
    (tmp_path / "layers.py").write_text(HEAD + layer)
    text = model.replace("forward(self, x)", "forward(self, x, adj)")
    text = text.replace("head(x)", "head(adj @ x)").replace("self.last(x)", "self.last(adj @ x)")
    (tmp_path / "models.py").write_text(f"{HEAD}from layers import Head\nclass Heads{text}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    made = imported(tmp_path / "models.py").Heads(9, 3, 4, 5, 2, scale=0.2)
    torch.save(made.state_dict(), "7.pkl")
    adjacency = (X((12, 12)) > 0).astype(np.float32)
    x, y, train = X((12, 9)).astype(np.float32), np.arange(12) % 4, np.array([7, 1, 4])
    np.savez("graph.npz", x=x, adj=adjacency, labels=y, idx_train=train)
    done = gradscope("init", "7.pkl", "graph.npz", "--model", "models.py:Heads", "--json")
    assert (done.code, json.loads(done.out)["missing"]) == (0, [])
    spec = tomllib.loads(Path("run.toml").read_text())
    assert spec["dataset"]["select"] == "idx_train"
    done = gradscope("compute", "--config", "run.toml", "-t", "identity", "-o", "out.h5", "--json")
    assert done.code == 0, done.err
    made = made.double()
    losses = nn.functional.nll_loss(
        made(torch.tensor(x).double(), torch.tensor(adjacency).double()),
        torch.tensor(y),
        reduction="none",
    )
    with package.open("out.h5") as file:
        for k, node in enumerate(train):
            for name, p in made.named_parameters():
                (expected,) = torch.autograd.grad(losses[node], p, retain_graph=True)
                found = torch.tensor(file.chains[0][name][k]).double()
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


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
    "parts added in a loop": (np.ones((4, 2)) * [[1], [2], [3], [4]], np.zeros((4, 3)), "mse"),
    "blocks": (X((6, 1, 8, 8)), np.arange(6) % 3, "cross_entropy"),
    "parts named in a loop": (X((6, 9)), np.arange(6) % 4, "nll"),
    "parts that a caller passes": (X((4, 5, 6)), X((4, 5, 3)), "mse"),
    "keys of a config and of **kwargs, sizes in a list": (
        np.arange(35).reshape(5, 7) % 20,
        np.arange(5) % 3,
        "cross_entropy",
    ),
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


TRAINED = """
import argparse
import sys
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 3)
    def forward(self, x):
        return self.last(self.first(x).tanh())
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, required=True)
args = parser.parse_args()
model = Net(args.width)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
data = torch.ones(6, 4), torch.zeros(6, dtype=torch.long)
LOOP
torch.save(model.state_dict(), "w.pt")
made_by_training = model(data[0])
class After(Net):
    pass
def late(default=made_by_training):
    return default
"""
LOOPS = {
    "loop": "for step in range(2):\n    criterion(model(data[0]), data[1]).backward()\n",
    "function": "def fit():\n    def closure():\n        criterion(model(data[0]), data[1])"
    ".backward()\n    optimizer.step(closure)\nfit()\n",
    "method": "class Solver:\n    def go(self):\n        criterion(model(data[0]), data[1])"
    ".backward()\n    def run(self):\n        self.go()\nSolver().run()\n",
    "imported function": "from engine import epoch\nepoch(model, *data)\n",
    "imported module": "if 1:\n    import tools.engine as of\nof.epoch(model, *data)\n",
    "module of a package": "from tools import engine\nengine.epoch(model, *data)\n",
    "module of the folder above": "sys.path.append('..')\nimport upper\nupper.all(model, *data)\n",
    "trainer": "from engine import Trainer\ntrainer = Trainer(model)\ntrainer.fit(data)\n",
}
ENGINE = """
from torch.nn.functional import cross_entropy
def epoch(model, x, y):
    cross_entropy(model(x), y).backward()
    raise RuntimeError("it trains")
class Trainer:
    def __init__(self, model):
        self.model = model
    def fit(self, data):
        raise RuntimeError("it trains")
"""


@pytest.mark.parametrize("kind", LOOPS)
def test_a_script_that_trains_on_import_does_not_train_and_keeps_its_checkpoint(
    gradscope: Gradscope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    Path(tmp_path, "run/tools").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "run")
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("engine.py").write_text(ENGINE)
    Path("tools/engine.py").write_text(ENGINE)
    above = "def all(model, *data):\n    from run.engine import epoch\n    epoch(model, *data)\n"
    Path("../upper.py").write_text(above)
    Path("train.py").write_text(TRAINED.replace("LOOP\n", LOOPS[kind]))
    torch.manual_seed(0)
    weights = {"first.weight": torch.randn(5, 4), "first.bias": torch.randn(5)}
    weights |= {"last.weight": torch.randn(3, 5), "last.bias": torch.randn(3)}
    torch.save({**weights, "classes": ["a", "b", "c"]}, "w.pt")  # and what is no tensor
    before = Path("w.pt").read_bytes()
    inputs, targets = torch.randn(7, 4), torch.arange(7) % 3
    torch.save((inputs, targets), "d.pt")
    assert gradscope("init", "w.pt", "d.pt").code == 0
    text = Path("run.toml").read_text()
    assert 'factory = "train.py:Net"' in text and "width = 5" in text
    assert 'name = "cross_entropy:label_smoothing=0.1"' in text
    done = gradscope("check", "--config", "run.toml")
    assert done.code == 3 and 'argv = ["ARGUMENT", "VALUE"]' in done.err, done.err
    assert "argv = []  # fill in: train.py parses arguments" in text  # one is required
    Path("run.toml").write_text(text.replace("argv = []", 'argv = ["--width", "64"]'))
    done = gradscope("compute", "--config", "run.toml", "-o", "o.h5", "--json")
    assert done.code == 0, done.err
    assert "train.py trains when it is imported" in done.out and "classes" in done.out
    assert Path("w.pt").read_bytes() == before
    with package.open("o.h5") as file:
        found = file.samples["norm"][:]
    for x, y, norm in zip(inputs, targets, found, strict=True):
        own = {k: v.double().requires_grad_() for k, v in weights.items()}
        hidden = torch.tanh(own["first.weight"] @ x.double() + own["first.bias"])
        logits = own["last.weight"] @ hidden + own["last.bias"]
        nn.functional.cross_entropy(logits[None], y[None], label_smoothing=0.1).backward()
        squares = [float(v.grad.square().sum()) for v in own.values() if v.grad is not None]
        assert norm == pytest.approx(sum(squares) ** 0.5, rel=1e-4)


def test_a_model_in_a_package_and_data_of_a_function(
    gradscope: Gradscope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("network/blocks", "checkpoints", "tests"):
        Path(folder).mkdir(parents=True)
    Path("network/__init__.py").write_text("from .model import Net\n")
    Path("network/blocks/__init__.py").write_text("")
    Path("network/blocks/head.py").write_text(
        "from torch import nn\nfrom network.sizes import OUT\nclass Head(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.fc = nn.Linear(4, OUT)\n"
        "    def forward(self, x): return self.fc(x)\n"
    )
    Path("network/sizes.py").write_text("OUT = 3\n")
    Path("network/model.py").write_text(
        "from torch import nn\nfrom .blocks.head import Head\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.head = Head()\n"
        "    def forward(self, x): return self.head(x)\n"
    )
    Path("train.py").write_text(
        "import torch\nfrom network import Net\nfrom torch.nn.functional import mse_loss\n"
        "def data():\n    x = torch.arange(24.0).reshape(6, 4)\n    return list(zip(x, x[:, :3]))\n"
        "def main():\n    mse_loss(Net()(torch.ones(1, 4)), torch.ones(1, 3)).backward()\n"
        'if __name__ == "__main__":\n    main()\n'
    )
    weights = {"head.fc.weight": torch.ones(3, 4), "head.fc.bias": torch.ones(3)}
    torch.save(weights, "checkpoints/w.pt")
    done = gradscope("init", "checkpoints/w.pt", "train.py:data", "--json")
    assert json.loads(done.out)["missing"] == [], done.err
    text = Path("run.toml").read_text()
    assert 'factory = "network/model.py:Net"' in text and 'name = "mse"' in text
    done = gradscope("check", "--config", "run.toml")
    assert done.code == 0, done.err
    monkeypatch.chdir("checkpoints")  # the package is found from any folder
    done = gradscope("check", "w.pt", "../train.py:data", "--model", "../network/model.py:Net",
                     "--loss", "mse")  # fmt: skip
    assert done.code == 0, done.err


def test_the_model_that_an_optimizer_is_made_for(
    gradscope: Gradscope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    imported = "import mylib.zoo as models\nfrom mylib import Net as Other\nfrom torch import nn\n"
    Path("a.py").write_text(
        imported + "def main(args):\n"
        "    if args.start:\n        model = models.__dict__[args.arch](pretrained=True)\n"
        "    else:\n        model = nn.parallel.DistributedDataParallel(model)\n"
        "    optim = SGD(model.parameters())\n"
    )
    Path("b.py").write_text(
        imported + "def main(args):\n    net = Other(width=8, depth=args.depth)\n"
        "    net = net.to('cpu')\n    Adam(net.parameters())\n"
    )
    (found,) = find_trained([Path("a.py")], {"arch": "deep4", "state_dict": {}})
    assert (found.reference, dict(found.arguments)) == ("mylib.zoo:deep4", {})
    (found,) = find_trained([Path("b.py")])
    assert (found.reference, list(found.unknown)) == ("mylib:Net", ["depth"])
    assert {name: value.value for name, value in found.arguments.items()} == {"width": 8}
    Path("a.py").unlink()
    Path("b.py").write_text(
        "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(4, 3))\n"
        "optim = torch.optim.SGD(model.parameters(), 0.1)\nloss = torch.nn.MSELoss()\n"
    )
    torch.save({"0.weight": torch.ones(3, 4), "0.bias": torch.ones(3)}, "w.pt")
    torch.save((torch.ones(5, 4), torch.zeros(5, 3)), "d.pt")
    assert gradscope("init", "w.pt", "d.pt").code == 0
    assert 'factory = "b.py:model"' in Path("run.toml").read_text()
    done = gradscope("compute", "--config", "run.toml", "-o", "o.h5")
    assert done.code == 0, done.err
    with package.open("o.h5") as file:  # (5, ..., 5)² / 3: 10 / 3 for each output
        norms = file.samples["norm"][:]
    np.testing.assert_allclose(norms, (3 * (4 + 1)) ** 0.5 * 10 / 3, rtol=1e-6)


def test_a_pickled_model_of_a_checkpoint_that_is_trusted(
    gradscope: Gradscope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(nn.Linear(4, 3), "w.pt")
    torch.save((torch.ones(5, 4), torch.zeros(5, 3)), "d.pt")
    assert "--unsafe-pickle" in gradscope("init", "w.pt", "d.pt").err
    assert gradscope("init", "w.pt", "d.pt", "--unsafe-pickle").code == 0
    assert 'factory = "checkpoint"' in Path("run.toml").read_text()
    assert gradscope("check", "--config", "run.toml").code == 0


def test_inputs_named_as_the_parameters_of_forward_and_integer_labels(
    gradscope: Gradscope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(
        "import torch\nfrom torch import nn\nclass Rank(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.users, self.items = nn.Embedding(5, 3), nn.Embedding(7, 3)\n"
        "    def forward(self, user, item):\n"
        "        return (self.users(user) * self.items(item)).sum(1)\n"
        "loss = nn.BCEWithLogitsLoss()\n"
    )
    torch.manual_seed(0)
    weights = {"users.weight": torch.randn(5, 3), "items.weight": torch.randn(7, 3)}
    user, item = torch.arange(6) % 5, torch.arange(6)
    label = torch.arange(6) % 2
    torch.save(weights, "w.pt")
    np.savez("d.npz", item=item.numpy(), user=user.numpy(), label=label.numpy())
    assert gradscope("init", "w.pt", "d.npz").code == 0
    text = Path("run.toml").read_text()
    assert 'inputs = ["user", "item"]' in text and 'dtype = { "label" = "float32" }' in text
    done = gradscope("compute", "--config", "run.toml", "-o", "o.h5")
    assert done.code == 0, done.err
    u, v = weights["users.weight"][user], weights["items.weight"][item]
    error = torch.sigmoid((u * v).sum(1)) - label  # the gradients are error * v and error * u
    norms = error.abs() * (u.square().sum(1) + v.square().sum(1)).sqrt()
    with package.open("o.h5") as file:
        np.testing.assert_allclose(file.samples["norm"][:], norms, rtol=1e-5)


def test_a_variable_that_holds_a_model_with_weight_norm(
    gradscope: Gradscope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("b.py").write_text(
        "import torch, warnings\nwarnings.simplefilter('ignore')\n"
        "layer = torch.nn.utils.weight_norm(torch.nn.Linear(4, 3, bias=False))\n"
        "model = torch.nn.Sequential(layer)\n"
    )
    torch.save({"0.weight_g": torch.ones(3, 1), "0.weight_v": torch.eye(4)[:3]}, "w.pt")
    torch.save((torch.ones(5, 4), torch.zeros(5, 3)), "d.pt")
    done = gradscope("compute", "w.pt", "d.pt", "--model", "b.py:model", "--loss", "mse",
                     "-o", "o.h5")  # fmt: skip
    assert done.code == 0, done.err
    with package.open("o.h5") as file:
        # w = g v / |v| = v, outputs 1: of each row g's gradient is 2/3, v's is 2/3 (x - v)
        expected = (3 * (2 / 3) ** 2 * (1 + 3)) ** 0.5
        np.testing.assert_allclose(file.samples["norm"][:], expected, rtol=1e-5)


OWN_LOSS = """
import torch
from torch import nn
class Density(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(2))
    def forward(self, x):
        return x - self.mean
    def log_prob(self, x):
        return -self(x).square().sum(-1, keepdim=True)
data = torch.utils.data.TensorDataset(torch.arange(12.0).reshape(6, 2))
def train(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for (x,) in torch.utils.data.DataLoader(data):
        loss = -model.log_prob(x).mean()
        loss.backward()
"""
OTHER = "from torch import nn\nnet = nn.Linear(1, 1)\nnn.SmoothL1Loss()(net(x), y).backward()\n"


def test_a_loss_of_the_models_method_and_samples_of_a_variable_without_targets(
    gradscope: Gradscope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("density.py").write_text(OWN_LOSS)
    Path("other.py").write_text(OTHER)  # its loss is not the density's
    torch.save({"mean": torch.tensor([1.0, 2.0])}, "w.pt")
    done = gradscope("init", "w.pt", "density.py:data", "--json")
    told = json.loads(done.out)
    assert (done.code, told["missing"], told["files"]) == (0, [], [])
    assert 'name = "density.py:train.loss"' in Path("run.toml").read_text()
    done = gradscope("compute", "--config", "run.toml", "-o", "o.h5")
    assert done.code == 0, done.err
    errors = torch.arange(12.0).reshape(6, 2) - torch.tensor([1.0, 2.0])
    with package.open("o.h5") as file:  # the gradient of |x - m|² is 2 (m - x)
        np.testing.assert_allclose(file.samples["norm"][:], 2 * errors.norm(dim=1), rtol=1e-6)


def test_a_loss_of_torch_that_is_an_attribute_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        self.loss = nn.BCELoss()\n"
    )
    (tmp_path / "main.py").write_text(
        "from net import *\nmodel = Net()\nopt = SGD(model.parameters())\n"
        "loss = model.loss(model(x), y)\nloss.backward()\n"
    )
    files = sorted(tmp_path.glob("*.py"))
    found = step_loss(files, tmp_path / "net.py", "Net", {})
    assert found is not None and found.name == "bce"
    assert losses_called(files, tmp_path / "net.py") == ["bce"]


OWN_CRITERION = """
import torch
from torch import nn
from torch.nn import functional as F
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)
    def forward(self, x):
        return self.fc(x)
class Focal(nn.Module):
    def __init__(self, power):
        super().__init__()
        self.power = power
    def forward(self, outputs, targets):
        p = F.softmax(outputs, 1).gather(1, targets[:, None])
        return (-((1 - p) ** self.power) * p.log()).mean()
class Smooth(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.CrossEntropyLoss(label_smoothing=0.1)
    def forward(self, outputs, targets):
        loss = self.inner(outputs, targets)
        return loss
def both(outputs, targets, weight):
    return F.cross_entropy(outputs, targets) + weight * outputs.square().mean()
"""
TRAINS = """
from losses import *
def normalize(x): return x / 2
def train(data, weight=0.5):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    focal, smooth = 1, 2
    criterion = {criterion}
    for x, y in data:
        loss = {line}
        loss.backward()
"""


@pytest.mark.parametrize(
    ("criterion", "line", "shown"),
    [
        ("Focal(power=2)", "criterion(model(normalize(x)), y)", "criterion = Focal(power=2)"),
        ("both", "both(model(x), y, weight)", "weight"),
        ("Smooth()", "criterion(model(normalize(x)), y)", "import Smooth"),
        ("nn.CrossEntropyLoss()", "criterion(model(x), y) / 4", "cross_entropy"),
        ("None", "F.cross_entropy(model(normalize(x)), y)", "cross_entropy"),
    ],
)
def test_a_loss_of_the_script_itself(
    gradscope: Gradscope,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    criterion: str,
    line: str,
    shown: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("losses.py").write_text(OWN_CRITERION)
    Path("train.py").write_text(TRAINS.format(criterion=criterion, line=line))
    net = nn.Linear(4, 3)
    torch.save({f"fc.{k}": v for k, v in net.state_dict().items()}, "w.pt")
    inputs, targets = torch.randn(5, 4), torch.arange(5) % 3
    torch.save((inputs, targets), "d.pt")
    done = gradscope("init", "w.pt", "d.pt", "--json")
    text = Path("run.toml").read_text()
    if shown == "cross_entropy":
        assert f'name = "{shown}' in text and json.loads(done.out)["missing"] == []
        return
    if shown == "weight":
        assert json.loads(done.out)["missing"] == ["loss.name"]
        assert f"# train.py: loss = {line}. Not found: weight\n" in text
        assert "#     from losses import both\n" in text and not Path("loss.py").exists()
        return
    code = Path("loss.py").read_text()
    if shown == "import Smooth":
        assert shown in code
        return
    assert code.startswith(f"# train.py: loss = {line}\n") and shown in code
    Path("loss.py").write_text("# my own\n")  # an existing file is kept
    again = gradscope("init", "w.pt", "d.pt", "--json", "--overwrite")
    assert json.loads(again.out)["files"] == ["sample_loss.py"]
    again = gradscope("init", "w.pt", "d.pt", "--json", "--overwrite")  # the code is shown
    assert json.loads(again.out)["missing"] == ["loss.name"]
    assert shown in Path("run.toml").read_text()
    assert Path("loss.py").read_text() == "# my own\n"
    assert Path("sample_loss.py").read_text() == code
    Path("run.toml").write_text(text)
    Path("loss.py").write_text(code)
    done = gradscope("compute", "--config", "run.toml", "-o", "o.h5")
    assert done.code == 0, done.err
    net = net.double()
    with package.open("o.h5") as file:
        for x, y, norm in zip(inputs.double(), targets, file.samples["norm"][:], strict=True):
            net.zero_grad()
            p = net(x).softmax(0)[y]
            (-((1 - p) ** 2) * p.log()).backward()
            squares = [float(v.grad.square().sum()) for v in net.parameters() if v.grad is not None]
            assert norm == pytest.approx(sum(squares) ** 0.5, rel=1e-4)


RECONSTRUCTS = """
import torch
from torch import nn
class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
    def forward(self, x):
        return self.fc(x)
data = torch.utils.data.TensorDataset(torch.arange(12.0).reshape(4, 3), torch.arange(4))
model = Coder().cuda()
criterion = nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for image, _ in data:
    image = image.cuda()
    output = model(image)
    loss = criterion(output, image)
    loss.backward()
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a CUDA device")
def test_an_autoencoder_that_is_trained_on_a_gpu(
    gradscope: Gradscope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(RECONSTRUCTS)
    net = nn.Linear(3, 3)
    torch.save({f"fc.{k}": v for k, v in net.state_dict().items()}, "w.pt")
    done = gradscope("init", "w.pt", "train.py:data", "--json")
    found = json.loads(done.out)
    line = "the model's inputs are the targets of train.py: loss = criterion(output, image)"
    assert found["missing"] == [] and line in Path("run.toml").read_text()
    done = gradscope("compute", "--config", "run.toml", "-o", "o.h5")
    assert done.code == 0, done.err
    x = torch.arange(12.0).reshape(4, 3).double()
    error = net.double()(x) - x
    rows = torch.cat([error[:, :, None] * x[:, None], error[:, :, None]], 2) * 2 / 3
    with package.open("o.h5") as file:
        expected = rows.detach().flatten(1).norm(dim=1)
        np.testing.assert_allclose(file.samples["norm"][:], expected, rtol=1e-5)


def test_a_python_file_of_definitions_as_data(gradscope: Gradscope, tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "w.pt")
    (tmp_path / "load.py").write_text("def samples():\n    return []\n")
    done = gradscope("init", str(tmp_path / "w.pt"), str(tmp_path / "load.py"))
    assert (done.code, done.err) == (
        3,
        f"error: {tmp_path / 'load.py'}: this file trains nothing when it is run: it has only "
        "definitions\nName a part of it, load.py:NAME, or give the script that trains. It has: "
        "samples.\n",
    )


def test_more_arrays_than_forward_takes_are_targets(
    gradscope: Gradscope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("policy.py").write_text(
        "from torch import nn\nclass Policy(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.fc = nn.Linear(4, 2)\n"
        "    def forward(self, state):\n        return self.fc(state)\n"
        "def finish(policy_loss):\n    policy_loss.backward()\n"
    )
    Path("other.py").write_text(OTHER)
    torch.save(nn.Linear(4, 2).state_dict(), "w.pt")
    torch.save({f"fc.{k}": v for k, v in nn.Linear(4, 2).state_dict().items()}, "w.pt")
    torch.save((torch.ones(5, 4), torch.arange(5) % 2, torch.ones(5)), "d.pt")
    done = gradscope("init", "w.pt", "d.pt", "--json")
    assert (done.code, json.loads(done.out)["missing"]) == (0, ["loss.name"])
    run = tomllib.loads(Path("run.toml").read_text())
    assert run["dataset"]["inputs"] == ["inputs_1"]
    assert run["dataset"]["targets"] == ["inputs_2", "targets"]


def test_a_class_of_another_file_that_an_optimizer_is_made_for(tmp_path: Path) -> None:
    (tmp_path / "encoder.py").write_text(
        "from torch import nn\nimport zoo\nclass Encoder(nn.Module):\n"
        "    def __init__(self, base, out, depth):\n        super().__init__()\n"
        "        self.net = zoo.__dict__[base](out)\n    def forward(self, views): pass\n"
    )
    (tmp_path / "run.py").write_text(
        "import argparse, torch\nfrom encoder import Encoder\np = argparse.ArgumentParser()\n"
        'p.add_argument("--out", type=int, default=128)\ndef main():\n    args = p.parse_args()\n'
        "    model = Encoder(args.arch, out=args.out, depth=args.depth)\n"
        "    torch.optim.Adam(model.parameters())\n"
    )
    (found,) = find_trained(sorted(tmp_path.glob("*.py")), {"arch": "deep4", "state_dict": {}})
    assert found.reference == f"{tmp_path / 'encoder.py'}:Encoder"
    assert {k: v.value for k, v in found.arguments.items()} == {"base": "deep4", "out": 128}
    assert (list(found.unknown), list(found.inputs)) == (["depth"], ["views"])


def test_a_variable_that_depends_on_arguments(
    gradscope: Gradscope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("main.py").write_text(
        "import argparse, torch\np = argparse.ArgumentParser()\n"
        'p.add_argument("--kind", default="large")\nargs = p.parse_args()\n'
        'width = {"small": 4}[args.kind]\nmodel = torch.nn.Sequential(torch.nn.Linear(width, 3))\n'
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\nloss = torch.nn.MSELoss()\n"
    )
    torch.save({"0.weight": torch.ones(3, 4), "0.bias": torch.ones(3)}, "w.pt")
    torch.save((torch.ones(5, 4), torch.zeros(5, 3)), "d.pt")
    done = gradscope("init", "w.pt", "d.pt", "--json")
    assert json.loads(done.out)["missing"] == []
    text = Path("run.toml").read_text()
    assert "argv = []  # guessed: the defaults of --kind. Write those of your training if" in text
    done = gradscope("check", "--config", "run.toml")
    assert done.code == 3
    lines = done.err.splitlines()
    assert lines[0].endswith("main.py: your code raised KeyError: 'large'")
    assert lines[1] == (
        "Write the arguments of the training under [model] in the run file: "
        'argv = ["ARGUMENT", "VALUE"]. Or correct your code:'
    )
    Path("run.toml").write_text(text.replace("argv = []", 'argv = ["--kind", "small"]'))
    assert gradscope("check", "--config", "run.toml").code == 0


def test_a_module_that_wraps_the_model_and_a_data_module(
    gradscope: Gradscope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lit.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n    def __init__(self, width, device):\n"
        "        super().__init__()\n        self.body = nn.Sequential(nn.Linear(4, width),"
        " nn.Tanh(), nn.Linear(width, 3))\n    def forward(self, x): return self.body(x)\n"
        "class Lit(LightningModule if 0 else nn.Module):\n    def __init__(self, net):\n"
        "        super().__init__()\n        self.net = net\n"
        "    def training_step(self, batch, k):\n"
        "        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])\n"
        "class Data:\n    def __init__(self, n=5): self.n = n\n"
        "    def setup(self, stage): self.stage = stage\n"
        "    def train_dataloader(self):\n        assert self.stage == 'fit'\n"
        "        x = torch.arange(self.n * 4.0).reshape(-1, 4) / 10\n"
        "        return [(a, torch.tensor(k % 3)) for k, a in enumerate(x)]\n"
    )
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    torch.save({f"net.body.{k}": v for k, v in net.state_dict().items()}, "w.pt")
    done = gradscope("init", "w.pt", "lit.py:Data", "--json")
    assert json.loads(done.out)["missing"] == [], done.err
    text = Path("run.toml").read_text()
    assert 'factory = "lit.py:Net"' in text and "width = 6" in text and 'device = "cpu"' in text
    done = gradscope("compute", "--config", "run.toml", "-o", "o.h5", "-t", "norm")
    assert done.code == 0, done.err
    with package.open("o.h5") as file:
        norms = file.samples["norm"][:]
    net.double()
    for k, norm in enumerate(norms):
        net.zero_grad()
        x = torch.arange(k * 4.0, k * 4.0 + 4).double()[None] / 10
        nn.functional.cross_entropy(net(x), torch.tensor([k % 3])).backward()
        squares = [float(p.grad.square().sum()) for p in net.parameters() if p.grad is not None]
        assert norm == pytest.approx(sum(squares) ** 0.5, rel=1e-5)


def test_samples_with_named_entries_are_used_by_their_names(
    gradscope: Gradscope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.fc = torch.nn.Linear(3, 2)\n"
        "    def forward(self, left=None, right=None): return self.fc(left - right)\n"
        "def data():\n    x = torch.arange(12.0).reshape(4, 3) / 7\n"
        "    return [{'idx': k, 'label': k % 2, 'right': a, 'left': a * a}"
        " for k, a in enumerate(x)]\n"
        "def single(): return [{'picture': e['left'], 'target': e['label']} for e in data()]\n"
    )
    fc = nn.Linear(3, 2)
    torch.save({f"fc.{k}": v for k, v in fc.state_dict().items()}, "w.pt")
    given = ("w.pt", "--model", "model.py:Net", "--loss", "cross_entropy", "-t", "norm")
    done = gradscope("compute", *given, "model.py:data", "-o", "o.h5", "--json")
    assert done.code == 0, done.err
    note = "the entries of a sample are used by their names: inputs right, left; targets label"
    assert note in done.out
    with package.open("o.h5") as file:
        norms = file.samples["norm"][:]
    x = torch.arange(12.0).reshape(4, 3).double() / 7
    off = fc.double()(x * x - x).softmax(1) - torch.eye(2, dtype=torch.float64)[[0, 1, 0, 1]]
    squares = off.square().sum(1) * ((x * x - x).square().sum(1) + 1)
    np.testing.assert_allclose(norms, squares.sqrt().detach(), rtol=1e-5)
    text = Path("model.py").read_text()
    Path("model.py").write_text(text.replace("left=None, right=None", "x").replace("left -", "x -"))
    Path("model.py").write_text(Path("model.py").read_text().replace("- right", "- 1"))
    done = gradscope("check", *given, "model.py:single")
    assert done.code == 0, done.err


def test_a_class_of_transformers_names_its_loss(
    gradscope: Gradscope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"fc.weight": torch.ones(2, 3)}, "w.pt")
    Path("train.py").write_text(
        "from transformers import AutoModelForSequenceClassification as Auto\n"
        "import transformers\n"
        "def data(): return []\n"
        "def main(args):\n"
        "    model = transformers.AutoModelForTokenClassification.from_pretrained('base', x=1)\n"
        "    AdamW(model.parameters())\n"
    )
    done = gradscope("init", "w.pt", "train.py:data", "--json")
    assert json.loads(done.out)["missing"] == [], done.err
    text = Path("run.toml").read_text()
    name = "AutoModelForTokenClassification"
    assert f'factory = "transformers:{name}.from_pretrained"' in text
    assert 'pretrained_model_name_or_path = "base"' in text
    assert f'# guessed: the loss of {name}\nname = "token_cross_entropy"' in text


def test_flags_of_argparse_have_defaults(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        HEAD + "class Net(nn.Module):\n    def __init__(self, wide, bias):\n"
        "        super().__init__()\n        self.fc = nn.Linear(4, 3)\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--wide', action='store_true')\n"
        "parser.add_argument('--no-bias', dest='bias', action='store_false')\n"
        "def main(args): Net(wide=args.wide, bias=args.bias)\n"
    )
    (found,) = find_models([script], {"fc.weight": (3, 4), "fc.bias": (3,)})
    values = {name: argument.value for name, argument in found.arguments.items()}
    assert (values, list(found.unknown)) == ({"wide": False, "bias": True}, [])


def test_a_module_of_the_folder_above_that_takes_a_module_and_trains_a_method(
    gradscope: Gradscope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(tmp_path, "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    Path("../parts.py").write_text(
        "from torch import nn\nclass MLP(nn.Module):\n    def __init__(self, n):\n"
        "        super().__init__()\n        self.fc = nn.Linear(n, 1)\n"
        "    def forward(self, x): return self.fc(x).tanh()\n"
    )
    Path("../field.py").write_text(
        "import torch\nfrom parts import MLP\nclass Field(torch.nn.Module):\n"
        "    def __init__(self, net):\n        super().__init__()\n        self.net = net\n"
        "    def forward(self, x): return self.net(x).split(1, 1)\n"
        "    def slope(self, x):\n"
        "        return torch.autograd.grad(self.net(x).sum(), x, create_graph=True)[0]\n"
    )
    Path("train.py").write_text(
        "import sys, torch\nsys.path.append('..')\nfrom field import Field\nfrom parts import MLP\n"
        "def distance(a, b): return (a - b).square().mean()\n"
        "def data():\n    x = torch.arange(8.0).reshape(4, 2)\n    return list(zip(x, x.flip(1)))\n"
        "def main(args):\n    net = MLP(args.n)\n    model = Field(net=net)\n"
        "    optim = torch.optim.SGD(model.parameters(), 0.1)\n"
        "    found = model.slope2(x) if args.other else model.slope(x)\n"
        "    loss = distance(y, found)\n    loss.backward()\n"
    )
    torch.save({"net.fc.weight": torch.ones(1, 2), "net.fc.bias": torch.ones(1)}, "w.pt")
    done = gradscope("init", "w.pt", "train.py:data", "--json")
    assert done.code == 0, done.err
    text = Path("run.toml").read_text()
    assert 'factory = "../field.py:Field"' in text
    assert '\n[model.kwargs.net]\nfactory = "../parts.py:MLP"  # guessed: the script passes' in text
    assert "\nn = 2  # guessed: the size of fc\n" in text
    each = "torch.stack([distance(y[None], model.slope(x[None])) for x, y in zip(inputs, targets)])"
    assert "# train.py: loss = distance(y, found). Not found: args" in text
    Path("own.py").write_text(
        "import gradscope, torch\nfrom train import Field, MLP, data, distance\n"
        "@gradscope.model_loss\n"
        "def loss(model, inputs, targets):\n    inputs = inputs.clone().requires_grad_()\n"
        f"    return {each}\n"
    )
    given = ("--loss", "own.py:loss", "-t", "norm", "-o", "o.h5")
    done = gradscope("compute", "--config", "run.toml", *given)
    assert done.code == 0, done.err
    with package.open("o.h5") as file:
        norms = file.samples["norm"][:]
    for k, norm in enumerate(norms):  # the slope is w (1 - tanh(wx + b)²)
        w = torch.ones(2, dtype=torch.float64, requires_grad=True)
        b = torch.ones(1, dtype=torch.float64, requires_grad=True)
        x = torch.tensor([2.0 * k, 2.0 * k + 1]).double()
        ((w * (1 - (w @ x + b).tanh() ** 2) - x.flip(0)) ** 2).mean().backward()
        assert w.grad is not None and b.grad is not None
        both = float(w.grad.square().sum() + b.grad.square().sum()) ** 0.5
        assert norm == pytest.approx(both, rel=1e-3, abs=1e-5)
