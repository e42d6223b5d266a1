"""The one module that touches what torch documents but does not promise."""

import pytest
import torch
from torch import nn

from gradscope.backends.hooks.graph import internals


@pytest.fixture
def layer() -> nn.Linear:
    return nn.Linear(3, 2)


def test_a_linear_layer_is_recorded_as_expected(layer: nn.Linear) -> None:
    out = layer(torch.randn(4, 3, requires_grad=True))
    node = internals.root(out)
    assert internals.kind(node) == "AddmmBackward0"
    assert internals.outputs(node) == [((4, 2), torch.float32)]
    assert internals.output_dtypes(node) == (torch.float32,)
    sources = [source for source, _ in internals.edges(node)]
    assert [s is not None for s in sources] == [True, True, True]
    assert sources[0] is not None
    assert internals.leaf(sources[0]) is layer.bias
    assert internals.leaf(node) is None


def test_saved_tensors_come_without_a_graph(layer: nn.Linear) -> None:
    x = torch.randn(4, 3, requires_grad=True)
    saved = internals.saved(internals.root(layer(x)), "mat1")
    assert torch.equal(saved, x)
    assert not saved.requires_grad


def test_minus_one_is_minus_one() -> None:
    out = nn.Embedding(5, 2)(torch.tensor([1, 2]))
    assert internals.saved(internals.root(out), "padding_idx") == -1


def test_a_node_can_be_called(layer: nn.Linear) -> None:
    x = torch.randn(4, 3, requires_grad=True)
    gradient = torch.randn(4, 2)
    bias, inputs, weight = internals.pull(internals.root(layer(x)), (gradient,))
    assert bias is not None and inputs is not None and weight is not None
    torch.testing.assert_close(inputs, gradient @ layer.weight)
    torch.testing.assert_close(weight, x.T @ gradient)  # of the transposed weight
    assert not weight.requires_grad


def test_a_function_written_in_python_can_be_called() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
            return 2 * gradients[0]

    out = Twice.apply(torch.ones(3, requires_grad=True))
    (pulled,) = internals.pull(internals.root(out), (torch.ones(3),))
    assert pulled is not None
    assert pulled.tolist() == [2, 2, 2]


def test_an_edge_can_be_asked_for_its_gradient(layer: nn.Linear) -> None:
    hidden = layer(torch.randn(4, 3))
    total = hidden.square().sum()
    edge = internals.edge(internals.root(hidden), 0)
    (gradient,) = torch.autograd.grad(total, [edge])
    torch.testing.assert_close(gradient, 2 * hidden.detach())


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_fused_recurrence_is_known_by_name_or_recorded_stepwise(kind: str) -> None:
    out, _ = getattr(nn, kind)(3, 4)(torch.randn(2, 5, 3))
    from gradscope.backends.hooks.graph.trace import trace

    kinds = set(trace(out.sum((0, 2))).kinds)
    assert kinds & internals.FUSED_RECURRENT or "TanhBackward0" in kinds
