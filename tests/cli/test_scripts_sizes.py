"""Arguments of classes that init takes from the shapes and the names of a checkpoint's tensors."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from gradscope.sources.models import _argument
from gradscope.sources.scripts.models import defaults_left, find_models

CLASSES = """
import torch
from torch import nn


class Field(nn.Module):
    def __init__(self, depth=8, width=256, inputs=3, views=3, outputs=4, skips=(4,), seen=False):
        super().__init__()
        self.skips, self.seen = skips, seen
        self.points = nn.ModuleList(
            [nn.Linear(inputs, width)]
            + [
                nn.Linear(width + inputs, width) if k in self.skips else nn.Linear(width, width)
                for k in range(depth - 1)
            ]
        )
        self.view = nn.ModuleList([nn.Linear(views + width, width // 2)])
        if seen:
            self.feature = nn.Linear(width, width)
            self.alpha, self.color = nn.Linear(width, 1), nn.Linear(width // 2, 3)
        else:
            self.output = nn.Linear(width, outputs)


class Conv(nn.Module):
    def __init__(self, atom, bond):
        super().__init__()
        self.atom, self.bond = atom, bond
        self.full = nn.Linear(2 * self.atom + self.bond, 2 * self.atom)


class Crystal(nn.Module):
    def __init__(self, raw, bond, atom=64, layers=3, hidden=128, deep=1, classify=False):
        super().__init__()
        self.classify = classify
        self.embedding = nn.Linear(raw, atom)
        self.convs = nn.ModuleList([Conv(atom=atom, bond=bond) for _ in range(layers)])
        self.pool = nn.Linear(atom, hidden)
        if deep > 1:
            self.fcs = nn.ModuleList([nn.Linear(hidden, hidden) for _ in range(deep - 1)])
        if self.classify:
            self.out = nn.Linear(hidden, 2)
        else:
            self.out = nn.Linear(hidden, 1)
        if not self.classify:
            self.shift = nn.Parameter(torch.zeros(1))


class Tagger(nn.Module):
    def __init__(self, batch_size, classes, hidden, words, dim, vectors, both=True, bias=True):
        super().__init__()
        self.batch_size, self.hidden = batch_size, hidden
        self.embedding = nn.Embedding(words, dim)
        self.embedding.weight = nn.Parameter(vectors, requires_grad=False)
        self.lstm = nn.LSTM(dim, hidden, bidirectional=both)
        self.label = nn.Linear(hidden, classes, bias=bias)


class Pretrained(nn.Module):
    def __init__(self, vectors, n):
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(torch.as_tensor(vectors))
        self.out = nn.Linear(vectors.size(1), n)


class Widths(nn.Module):
    def __init__(self, sizes, out):
        super().__init__()
        layers = []
        for a, b in zip(sizes, sizes[1:]):
            layers += [nn.Linear(a, b), nn.ReLU()]
        layers.append(nn.Linear(sizes[-1], out))
        self.net = nn.Sequential(*layers)


class Counted(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.layers = nn.ModuleList()
        for k in range(len(sizes) - 1):
            self.layers.append(nn.Linear(sizes[k], sizes[k + 1]))


class Deep(nn.Module):
    def __init__(self, inputs, width, depth, out):
        super().__init__()
        blocks = [nn.Linear(inputs, width)]
        for _ in range(depth):
            blocks.append(nn.Linear(width, width))
            blocks.append(nn.Tanh())
        blocks.append(nn.Linear(width, out))
        self.body = nn.Sequential(*blocks)


class Head(nn.Linear):
    pass


class Masked(nn.Linear):
    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out)
        self.register_buffer("mask", torch.ones(n_out, n_in))


class ConvNorm(nn.Sequential):
    def __init__(self, planes, out, kernel=3):
        super(ConvNorm, self).__init__(
            nn.Conv2d(planes, out, kernel, bias=False), nn.BatchNorm2d(out), nn.ReLU6()
        )


class Bases(nn.Module):
    def __init__(self, width, hidden, classes):
        super().__init__()
        self.stem = ConvNorm(3, width)
        self.masked, self.head = Masked(width, hidden), Head(hidden, classes)


class Individual(nn.Module):
    def __init__(self, length, ahead, channels=7, individual=False):
        super().__init__()
        if individual:
            self.linear = nn.ModuleList()
            for _ in range(channels):
                self.linear.append(nn.Linear(length, ahead))
        else:
            self.linear = nn.Linear(length, ahead)


class Flow(nn.Module):
    def __init__(self, channels, filters):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(channels, filters, 3), nn.ReLU())


class Block(nn.Module):
    def __init__(self, channels, flows):
        super().__init__()
        self.flows = nn.ModuleList()
        for _ in range(flows):
            self.flows.append(Flow(channels, 5))


class Flows(nn.Module):
    def __init__(self, channels, flows, blocks):
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(blocks - 1):
            self.blocks.append(Block(channels, flows))
        self.blocks.append(Block(channels, flows))
"""
# a class of torch's name, called through its module
OTHER = """
from torch import nn
import layers


class Whole(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = layers.Transformer(width)
"""
LAYERS = """
from torch import nn


class Transformer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(width, 2 * width)
"""
CASES: dict[str, dict[str, Any]] = {
    "seen": {"Field": {"depth": 4, "width": 16, "inputs": 9, "views": 5, "seen": True}},
    "unseen": {"Field": {"depth": 3, "width": 16, "inputs": 9, "views": 5, "outputs": 2}},
    "regression": {"Crystal": {"raw": 9, "bond": 7, "atom": 8, "layers": 2, "hidden": 6}},
    "classes": {"Crystal": {"raw": 9, "bond": 7, "deep": 3, "hidden": 6, "classify": True}},
    "tagger": {
        "Tagger": {
            "batch_size": 4, "classes": 2, "hidden": 6, "words": 9, "dim": 5,
            "vectors": torch.zeros(9, 5),
        }
    },
    "one way": {
        "Tagger": {
            "batch_size": 1, "classes": 2, "hidden": 6, "words": 9, "dim": 5,
            "vectors": torch.zeros(9, 5), "both": False, "bias": False,
        }
    },
    "pretrained": {"Pretrained": {"vectors": torch.zeros(9, 5), "n": 3}},
    "widths": {"Widths": {"sizes": [3, 4, 5], "out": 2}},
    "counted": {"Counted": {"sizes": [3, 4, 5, 2]}},
    "deep": {"Deep": {"inputs": 3, "width": 7, "depth": 2, "out": 5}},
    "bases": {"Bases": {"width": 4, "hidden": 6, "classes": 3}},
    "individual": {"Individual": {"length": 8, "ahead": 3, "channels": 2, "individual": True}},
    "together": {"Individual": {"length": 8, "ahead": 3}},
    "flows": {"Flows": {"channels": 3, "flows": 2, "blocks": 3}},
}  # fmt: skip


@pytest.fixture
def classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module of the classes, imported from the test's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("sized.py").write_text(CLASSES)
    yield import_module("sized")
    for name in ("sized", "layers", "other"):
        sys.modules.pop(name, None)


def rebuilt(module: ModuleType, name: str, net: nn.Module, *others: Path) -> dict[str, Any]:
    """Return the found arguments, with which a new model takes the weights of `net`."""
    shapes = {k: tuple(v.shape) for k, v in net.state_dict().items()}
    best = find_models([Path(f"{module.__name__}.py"), *others], shapes)[0]
    assert best.name == name and not best.unknown
    tables: dict[str, Any] = {}
    for key, argument in best.arguments.items():
        table, _, entry = key.rpartition(".")
        (tables.setdefault(table, {}) if table else tables)[entry] = argument.value
    made = {key: _argument(value) for key, value in tables.items()}
    getattr(module, name)(**made).load_state_dict(net.state_dict())
    return tables


@pytest.mark.parametrize("case", CASES)
def test_the_arguments_of_a_class(classes: ModuleType, case: str) -> None:
    ((name, given),) = CASES[case].items()
    found = rebuilt(classes, name, getattr(classes, name)(**given))
    for key, value in given.items():
        if isinstance(value, torch.Tensor):
            assert found[key] == {"factory": "torch:zeros", "size": [*value.shape]}
        else:
            assert found[key] == (1 if key == "batch_size" else value)


def test_a_local_class_with_the_name_of_a_layer_of_torch(classes: ModuleType) -> None:
    Path("layers.py").write_text(LAYERS)
    Path("other.py").write_text(OTHER)
    module = import_module("other")
    assert rebuilt(module, "Whole", module.Whole(6), Path("layers.py")) == {"width": 6}


def test_a_default_that_the_tensors_contradict_must_be_filled_in(classes: ModuleType) -> None:
    Path("sized.py").write_text(
        "from torch import nn\nclass Net(nn.Module):\n    def __init__(self, a=2, b=3):\n"
        "        super().__init__()\n        self.first = nn.Linear(a * b + 1, 1)\n"
    )
    assert find_models([Path("sized.py")], {"first.weight": (1, 7)})[0].unknown == []
    assert find_models([Path("sized.py")], {"first.weight": (1, 9)})[0].unknown == ["a", "b"]


def test_a_tensor_of_values_has_no_sizes(tmp_path: Path) -> None:
    """gamma is a value, not the number of its values; the width is a size."""
    file = tmp_path / "valued.py"
    file.write_text(
        "import torch\nfrom torch import nn\nclass Valued(nn.Module):\n"
        "    def __init__(self, gamma, width, scale):\n        super().__init__()\n"
        "        self.gamma = nn.Parameter(torch.Tensor([gamma]))\n"
        "        self.scale = nn.Parameter(torch.tensor([scale, 1.0]))\n"
        "        self.rows = nn.Parameter(torch.Tensor(2, width))\n"
    )
    shapes = {"gamma": (1,), "scale": (2,), "rows": (2, 5)}
    (found,) = find_models([file], shapes, {"gamma": 24.0})
    assert {name: each.value for name, each in found.arguments.items()} == {
        "gamma": 24.0,
        "width": 5,
    }
    assert found.unknown == ["scale"]


HEADS = """
from torch import nn
class Attending(nn.Module):
    def __init__(self, width, heads=8, kind="full", drop=0, bias=True, deep=3):
        super().__init__()
        self.query = nn.Linear(width, width)
"""


@pytest.mark.parametrize(
    ("script", "left"),
    [
        ("net = {'a': Attending}[args.kind](8, heads=args.heads)", {"heads", "kind", "deep"}),
        ("net = Attending(8)", set()),  # the script uses the defaults
        ("net = Attending(8, heads=count())", set()),  # to be filled in
        ("net = Attending(**options)", {"heads", "kind", "deep"}),
    ],
)
def test_defaults_that_the_training_may_have_set(
    tmp_path: Path, script: str, left: set[str]
) -> None:
    (tmp_path / "attending.py").write_text(HEADS)
    (tmp_path / "train.py").write_text(f"from attending import Attending\n{script}\n")
    files = sorted(tmp_path.glob("*.py"))
    found = find_models(files, {"query.weight": (8, 8), "query.bias": (8,)})[0]
    assert {*defaults_left(found, files)} == left
    assert ("heads" in found.unknown) is ("count()" in script)
