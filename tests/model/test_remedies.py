"""What is said of models that cannot be asked, and of batches that are none: the cause is named."""

import re

import pytest
import torch
from torch import nn

import gradscope
from gradscope.errors import CoupledSamplesError, GradscopeError, ModelError, SpecError

X, Y = torch.randn(3, 4), torch.randn(3, 2)
BACKENDS = ("auto", "hooks", "vmap", "expand", "loop")


def perceptron():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).eval()


def whole():
    layer = nn.Linear(4, 2)
    layer.weight = nn.Parameter(torch.ones(2, 4, dtype=torch.int8), requires_grad=False)
    layer.bias = None
    return layer


def quantized():
    return torch.ao.quantization.quantize_dynamic(perceptron(), {nn.Linear}, dtype=torch.qint8)


@pytest.mark.filterwarnings("ignore")  # what is deprecated is still met
@pytest.mark.parametrize(
    ("make", "what", "remedy"),
    [
        (whole, "'weight': .*its weights are int8", "floating-point weights"),
        (quantized, r"layer '0' \(Linear\): .*weights are quantized", "floating-point weights"),
        (
            lambda: torch.jit.freeze(torch.jit.script(perceptron())),
            "freeze has turned",
            "without freeze",
        ),
        (lambda: perceptron().requires_grad_(False), "none of 0.weight, 0.bias,", "Call requires"),
        (nn.ReLU, "no parameter", r"as nn\.Parameter"),
        (lambda: torch.export.export(perceptron(), (X,)), "not ExportedProgram", r"\.module\(\)"),
        (lambda: perceptron().forward, "not method", r"Wrap it in an nn\.Module"),
    ],
)
def test_models_that_no_gradient_can_be_taken_of(make, what, remedy):
    with pytest.raises(SpecError, match=what) as caught:
        gradscope.norms(make(), "mse", X, Y)
    assert re.search(remedy, caught.value.remedy)


def test_what_the_remedies_say_can_be_done():
    model = perceptron()
    right = gradscope.norms(model, "mse", X, Y)
    scripted = gradscope.norms(torch.jit.script(model), "mse", X, Y)
    sizes = [{0: torch.export.Dim("n")}]
    exported = torch.export.export(model, (X,), dynamic_shapes=sizes).module()
    for found in (scripted, gradscope.norms(exported, "mse", X, Y)):
        torch.testing.assert_close(found, right)


class Padded(nn.Module):
    """Makes its mask as long as the longest sample of the batch."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.MultiheadAttention(4, 1, batch_first=True), nn.Linear(4, 2)

    def forward(self, x, lengths):
        mask = torch.arange(int(lengths.max())) >= lengths[:, None]
        return self.b(self.a(x, x, x, key_padding_mask=mask)[0].mean(1))


class Packed(nn.Module):
    """Takes the positions of all samples on one axis, and where each begins."""

    def __init__(self):
        super().__init__()
        self.a = nn.EmbeddingBag(9, 2)

    def forward(self, ids, offsets):
        return self.a(ids, offsets)


class Nodes(nn.Module):
    """Takes nodes, and the graph that each is of; returns a row a graph."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 2)

    def forward(self, x, graph):
        return x.new_zeros(int(graph.max()) + 1, 2).index_add(0, graph, self.a(x))


class Fixed(nn.Module):
    """Has the number of samples in its code."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 2)

    def forward(self, x):
        return self.a(x).view(3, -1)


def export():
    return torch.export.export(perceptron(), (X,)).module()


COUNTS = (torch.arange(3), torch.arange(3))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("model", "inputs", "words"),
    [
        (Padded().eval(), (torch.randn(3, 5, 4), torch.tensor([5, 3, 4])), ["1 sample", "longest"]),
        (export(), X, ["fixed number of samples", "dynamic_shapes"]),
        (Packed(), COUNTS, ["1 sample: inputs (1,) int64, (1,) int64", "Pad them to (n, t, ...)"]),
        (Nodes(), (X, COUNTS[0]), ["rows for", "Pad them to (n, t, ...)"]),
        (Fixed(), X, ["fixed number of samples"]),
    ],
)
def test_what_runs_on_the_batch_alone_is_not_told_of_normalisation(model, inputs, words, backend):
    with pytest.raises(GradscopeError) as caught:
        gradscope.norms(model, "mse", inputs, Y, backend=backend)
    assert "normalisation" not in str(caught.value)
    for word in words:
        assert word in caught.value.remedy


def test_a_comparison_says_the_same():
    given = torch.randn(3, 5, 4), torch.tensor([5, 3, 4])
    with pytest.raises(CoupledSamplesError, match="on one sample alone") as caught:
        gradscope.compare(Padded().eval(), "mse", given, Y)
    assert "longest sample" in caught.value.remedy
    assert "normalisation" not in caught.value.remedy


def test_batch_statistics_are_still_told_of_normalisation():
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    with pytest.raises(CoupledSamplesError) as caught:
        gradscope.norms(model, "mse", X, Y)
    assert "normalisation" in caught.value.remedy


def test_a_batch_that_does_not_fit_is_told_with_its_shapes():
    with pytest.raises(ModelError) as caught:
        gradscope.norms(perceptron(), "mse", torch.randn(3, 5), Y)
    said = "called with 3 samples: inputs (3, 5) float32; targets (3, 2) float32"
    assert said in caught.value.remedy
    with pytest.raises(ModelError, match="Guard failed") as caught:
        gradscope.norms(export(), "mse", torch.randn(5, 4), torch.randn(5, 2))
    assert "dynamic_shapes" in caught.value.remedy


def test_a_loss_of_another_number_of_samples_is_told_with_both():
    def by_graph(outputs, targets):
        return (outputs - targets[: len(outputs)]).square().sum(1)

    with pytest.raises(SpecError, match=r"shape \(3,\); it returned shape \(2,\)") as caught:
        gradscope.norms(Nodes(), by_graph, (X, torch.tensor([0, 0, 1])), Y)
    assert "called with 3 samples: inputs (3, 4) float32, (3,) int64" in caught.value.remedy
    assert "Pad them" in caught.value.remedy


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, x, y: (model(x) - y).pow(2).sum(1),
        lambda model, batch: (model(batch[0]) - batch[1]).pow(2).sum(1),
        lambda outputs: outputs.sum(1),
    ],
)
def test_a_loss_that_calls_the_model_is_declared_and_its_error_is_shown_once(loss):
    with pytest.raises(ModelError) as caught:
        gradscope.norms(perceptron(), loss, X, Y)
    assert "the loss with (outputs, targets)" in caught.value.remedy
    assert "Decorate a loss (model, inputs, targets) with @gradscope.model_loss." in (
        caught.value.remedy
    )
    own = caught.value.__cause__
    assert isinstance(own, TypeError)
    assert caught.value.__context__ is own
    assert own.__context__ is None


def test_losses_of_one_column_are_losses_and_broadcasting_is_named():
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 1), torch.randn(5, 4), torch.randn(5)
    found = gradscope.norms(model, lambda o, t: (o - t[:, None]).square(), x, y)
    errors = (model(x)[:, 0] - y).detach()  # the gradient is 2 e (x, 1)
    expected = 2 * errors.abs() * (x.square().sum(1) + 1).sqrt()
    torch.testing.assert_close(found, expected)
    with pytest.raises(SpecError) as caught:
        gradscope.norms(model, lambda o, t: (o - t).square(), x, y)
    assert str(caught.value) == (
        "loss: the loss '<lambda>' must return one number per sample, shape (5,); it returned "
        "shape (5, 5)\n"
        "If the outputs are (5, 1) and the targets (5,), they broadcast to (5, 5): use "
        "outputs.squeeze(1)."
    )
    with pytest.raises(gradscope.GradscopeError) as caught:
        gradscope.norms(model, lambda o, t: (o - t).square().mean(1), x, y)
    remedy = caught.value.remedy
    assert caught.value.exit_code == 4 and "mode eval" not in remedy
    assert remedy.splitlines() == [
        "If the loss divides by a number of the whole batch (a mean over all tokens, a sum of "
        "weights), return each sample's sum, and divide by a constant.",
        "If the outputs are (5, 1), they broadcast with the targets (5,) to (5, 5), and each loss "
        "mixes the samples: use outputs.squeeze(1).",
        "If the loss compares the samples of a batch (contrastive, ranking), a sample has no loss "
        'without its batch. coupling="own-loss" gives ∂Lᵢ/∂θ of its loss in this batch. Then the '
        "batch size is part of the answer.",
    ]
