"""A model that is to be divided is built without values, and is the same as one built with them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gradscope.config import CheckpointSpec, ModelSpec
from gradscope.sources.models import LoadedModel, load_model

FACTORY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, draws=False, reads=False, moves=False):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight
        self.norm, self.frozen = nn.BatchNorm1d(4), nn.LSTM(4, 4).requires_grad_(False)
        self.one = self.two = nn.Parameter(torch.ones(3))
        self.register_buffer("places", torch.arange(3.0), persistent=False)
        if draws:
            self.order = torch.randperm(50).tolist()
        if reads:
            self.register_buffer("twice", self.one * 2, persistent=False)
        if moves:
            self.cpu()

build = Net
"""


@pytest.mark.parametrize("kwargs", [{}, {"draws": True}, {"reads": True}, {"moves": True}])
def test_a_lean_model_is_the_same(kwargs: dict[str, Any], tmp_path: Path) -> None:
    file, weights = tmp_path / "model.py", tmp_path / "weights.safetensors"
    file.write_text(FACTORY)
    space: dict[str, Any] = {}
    exec(FACTORY, space)
    torch.manual_seed(3)
    state = space["build"]().state_dict()
    save_file({k: v.clone() for k, v in state.items() if k not in ("head.weight", "two")}, weights)

    def loaded(*, lean: bool) -> LoadedModel:
        torch.manual_seed(0)
        spec = ModelSpec(factory=f"{file}:build", kwargs=kwargs)
        return load_model(spec, CheckpointSpec(path=weights), lean=lean)

    whole, found = loaded(lean=False).model, loaded(lean=True)
    model: Any = found.model
    assert any("built the whole model" in note for note in found.notes) == bool(kwargs)
    assert model.head.weight is model.table.weight
    assert model.one is model.two
    assert getattr(model, "order", None) == getattr(whole, "order", None)
    named = dict(whole.named_parameters())
    assert named.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, named[name])
        assert torch.equal(parameter, state[name])
        assert parameter.requires_grad == named[name].requires_grad
    for buffer, right in zip(model.buffers(), whole.buffers(), strict=True):
        assert torch.equal(buffer, right)
