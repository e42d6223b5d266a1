"""The rule of the fused LSTM layer, in float32, against the loop in float64."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import gradscope
from gradscope.backends.hooks import block_of, hooks
from gradscope.backends.hooks.graph import internals
from gradscope.backends.hooks.rules import Site
from gradscope.backends.loop import one_sample
from gradscope.blocks import Block
from gradscope.core.batch import Batch
from gradscope.model.problem import Problem

N, T, IN, H = 4, 6, 3, 5


class Recurrent(nn.Module):
    """Returns whichever of the outputs, the last state and the last cell are asked for."""

    def __init__(self, read: str = "y", initial: bool = False, **options: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(IN, H, **options)
        self.read = read
        several = (1 + options.get("bidirectional", False)) * options.get("num_layers", 1)
        drawn = torch.randn(2, several, 1, H) if initial else None
        self.initial = None if drawn is None else nn.Parameter(drawn)

    def forward(self, x: Tensor) -> Tensor:
        first = self.lstm.batch_first
        start = None
        if self.initial is not None:
            start = tuple(self.initial.expand(-1, -1, len(x), -1).contiguous())
        y, (h, c) = self.lstm(x if first else x.transpose(0, 1), start)
        found = {
            "y": y if first else y.transpose(0, 1),
            "h": h.transpose(0, 1),
            "c": c.transpose(0, 1),
        }
        return torch.cat([found[key].flatten(1) for key in self.read], 1)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    weights = torch.linspace(1, 2, outputs.shape[1], dtype=outputs.dtype)
    return (outputs.sin() * weights).sum(1) * targets


CASES: dict[str, dict[str, Any]] = {
    "time first": {},
    "batch first": {"batch_first": True},
    "both directions": {"bidirectional": True},
    "two layers": {"num_layers": 2},
    "two layers, both directions": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "no bias": {"bias": False},
    "last state only": {"read": "h"},
    "last cell only": {"read": "c", "bidirectional": True},
    "all results": {"read": "yhc", "num_layers": 2},
    "learned initial state": {"initial": True, "bidirectional": True},
}


def evaluated(problem: Problem, batch: Batch) -> tuple[dict[str, Tensor], set[str]]:
    """The gradients, and the kinds of operations in which parameters met samples."""
    kinds: set[str] = set()

    def noted(kind: str, site: Site) -> Block:
        kinds.add(kind)
        return block_of(kind, site)

    with hooks(problem, contract=noted) as evaluate:
        return evaluate(batch).gradients.dense(), kinds


def compare(model: nn.Module, batch: Batch) -> None:
    problem = Problem.of(model, loss)
    exact, wide = problem.converted(torch.float64), batch.to(None, torch.float64)
    found, kinds = evaluated(problem, batch)
    assert internals.FUSED_RECURRENT & kinds
    for i in range(N):
        for name, right in one_sample(exact, wide.one(i))[1].items():
            size = float(right.abs().max())
            error = float((found[name][i].double() - right).abs().max())
            assert error <= 1e-5 * size, name


@pytest.fixture
def batch() -> Batch:
    torch.manual_seed(0)
    return Batch.of(torch.randn(N, T, IN), torch.rand(N) + 0.5)


@pytest.mark.parametrize("name", CASES)
def test_against_the_loop(name: str, batch: Batch) -> None:
    torch.manual_seed(1)
    compare(Recurrent(**CASES[name]), batch)


def test_a_weight_that_is_computed(batch: Batch) -> None:
    torch.manual_seed(2)
    model = Recurrent()
    weight_norm(model.lstm, "weight_hh_l0")
    compare(model, batch)


def test_something_trainable_below_the_layer(batch: Batch) -> None:
    torch.manual_seed(3)
    compare(nn.Sequential(nn.Linear(IN, IN), nn.Tanh(), Recurrent(read="yh")), batch)


def test_a_layer_whose_steps_are_unknown_is_recorded_step_by_step(batch: Batch) -> None:
    torch.manual_seed(4)
    model = Recurrent().bfloat16()
    halves = batch.to(None, torch.bfloat16)
    with torch.no_grad():
        fused = copy.deepcopy(model)(halves.inputs)
    assert fused.dtype == torch.bfloat16
    _, kinds = evaluated(Problem.of(model, loss), halves)
    assert kinds and internals.FUSED_RECURRENT.isdisjoint(kinds)


def test_steps_are_recorded_whichever_way_tf32_is_set() -> None:
    """torch's own context managers fail where it is set for convolutions alone."""
    model, cudnn = Recurrent().double(), torch.backends.cudnn
    flags, name, value = getattr(cudnn, "conv", cudnn), "fp32_precision", "ieee"
    if not hasattr(flags, name):  # as in torch 2.8
        name, value = "allow_tf32", not flags.allow_tf32
    x, y = torch.randn(N, T, IN, dtype=torch.float64), torch.ones(N, dtype=torch.float64)
    right = torch.autograd.grad(loss(model(x), y).sum(), [*model.parameters()])
    before = getattr(flags, name)
    try:
        setattr(flags, name, value)
        found = gradscope.expectation(model, loss, "sum", x, y, backend="hooks")
        gradscope.expectation(model, loss, "hvp | sum", x, y)
        assert (getattr(flags, name), cudnn.enabled) == (value, True)
    finally:
        setattr(flags, name, before)
    for one, other in zip(found.values(), right, strict=True):
        torch.testing.assert_close(one, other)
