"""The user's factory: called, checked, and its model put in the mode asked for."""

from pathlib import Path

import pytest
from torch import nn

from gradscope.errors import ModelError
from gradscope.sources.models import build, notes_on

FILE = """
import torch
from torch import nn
def good(width: int = 2): return nn.Sequential(nn.Linear(3, width), nn.Dropout())
def nothing(): nn.Linear(2, 2)
def weights(): return nn.Linear(2, 2).state_dict()
def bare(): return nn.ReLU()
def frozen(): return nn.Linear(2, 2).requires_grad_(False)
def lazy(): return nn.LazyLinear(2)
def meta(): return nn.Linear(2, 2, device="meta")
def broken(): return nn.Linear("a", 2)
def leaving():
    import sys
    sys.exit("bye")
class Net(nn.Linear):
    def __init__(self, width=2): super().__init__(width, width)
class Stubborn(Net):
    def train(self, mode=True): raise RuntimeError("never")
instance = nn.Linear(2, 2)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_model_is_built_in_the_mode_asked_for(file: Path, mode: str) -> None:
    model = build(f"{file}:good", {"width": 5}, mode)
    assert isinstance(model, nn.Sequential)
    assert model[0].out_features == 5
    assert {m.training for m in model.modules()} == {mode == "train"}
    assert build(f"{file}:Net", {"width": 4}).in_features == 4  # a class is a factory


@pytest.mark.parametrize(
    ("name", "kwargs", "expected"),
    [
        ("nothing", {}, "returned NoneType, not a torch.nn.Module"),
        ("weights", {}, "returned OrderedDict"),
        ("bare", {}, "no parameter at all"),
        ("frozen", {}, "no trainable parameter"),
        ("lazy", {}, "have no shape yet"),
        ("meta", {}, "meta device"),
        ("broken", {}, "your code raised TypeError"),
        ("leaving", {}, "your code called sys.exit('bye')"),
        ("instance", {}, "this is a model, not a function"),
        ("Stubborn", {}, "your code raised RuntimeError: never"),
        ("good", {"widht": 3}, "got an unexpected keyword argument 'widht'"),
        ("good", {"wide": 3}, "It takes: width: int = 2"),
        ("good", {"width": "x"}, "your code raised TypeError"),
    ],
)
def test_a_factory_that_gives_no_model(file: Path, name: str, kwargs: dict, expected: str) -> None:
    with pytest.raises(ModelError) as caught:
        build(f"{file}:{name}", kwargs)
    assert expected in str(caught.value)
    assert str(file) in str(caught.value)
    assert caught.value.remedy
    assert caught.value.exit_code == 3


def test_tied_and_frozen_parameters_are_told() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False), nn.Linear(4, 2))
    assert notes_on(model) == ()
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    tied, frozen = notes_on(model)
    assert tied == "Tied, so one parameter under its first name: 0.weight = 1.weight."
    assert frozen == "Frozen, so without gradients: 2 of 3 parameters (2.weight, 2.bias)."
