"""Hessian-vector products against torch's dense Hessians, closed forms and every backend."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradscope
from gradscope.backends.base import backends
from gradscope.core.batch import Batch
from gradscope.engine.fold import prepare_chains
from gradscope.errors import SpecError, UnsupportedError
from tests.stages.examples import bind_with

Loss = Callable[[Tensor, Tensor], Tensor]


def smooth(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.tanh() - targets).square().flatten(1).mul(1.3).sum(1)


class Small(nn.Module):
    """An embedding, a convolution, a norm and a linear layer; one parameter is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.conv = nn.Conv1d(3, 2, 2)
        self.norm = nn.LayerNorm(2)
        self.head = nn.Linear(2, 2)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.conv(self.table(ids).mT).tanh().mT
        return self.head(self.norm(h).mean(1).sigmoid())


def setting(n: int = 3) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(5)
    model = Small().double()
    return model, torch.randint(0, 5, (n, 6)), torch.randn(n, 2, dtype=torch.float64)


def function(
    model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, i: int
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The loss of sample i as a function of all parameters in one vector (p,), and that vector."""
    named = {k: p.detach() for k, p in model.named_parameters()}
    sizes = [p.numel() for p in named.values()]

    def value(theta: Tensor) -> Tensor:
        parts = zip(named.items(), theta.split(sizes), strict=True)
        given = {k: part.view(p.shape) for (k, p), part in parts}
        return loss(torch.func.functional_call(model, given, (inputs,)), targets)[i]

    return value, torch.cat([p.flatten() for p in named.values()])


def derivatives(
    model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, i: int
) -> tuple[np.ndarray, np.ndarray]:
    """The gradient (p,) and the dense Hessian (p, p) of sample i."""
    value, theta = function(model, loss, inputs, targets, i)
    hessian = torch.autograd.functional.hessian(value, theta)
    return torch.func.grad(value)(theta).numpy(), hessian.numpy()


@cache
def exact() -> list[tuple[np.ndarray, np.ndarray]]:
    model, inputs, targets = setting()
    return [derivatives(model, smooth, inputs, targets, i) for i in range(len(inputs))]


def joined(rows: dict[str, Tensor]) -> np.ndarray:
    return torch.cat([v.flatten(1) for v in rows.values()], 1).numpy()


def rows_of(
    scope: gradscope.Scope,
    text: str,
    inputs: object,
    targets: object,
    vector: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    batch = Batch.of(inputs, targets)
    bound = bind_with(text, vector or {})
    (chain,) = prepare_chains(scope.session, [bound], lambda: [batch])
    return chain.rows(scope.evaluate(batch).gradients, scope.problem, batch).dense()


@pytest.mark.parametrize("backend", backends.names())
def test_the_gradient_times_its_hessian(backend: str) -> None:
    model, inputs, targets = setting()
    with gradscope.Scope(model, smooth, backend=backend) as scope:
        found = joined(rows_of(scope, "hvp", inputs, targets))
        clipped = joined(rows_of(scope, "clip:max_norm=0.1 | hvp", inputs, targets))
        mean = scope.expectation("hvp | mean", inputs, targets)
    right = []
    for i, (g, h) in enumerate(exact()):
        right.append(h @ g)
        factor = min(1, 0.1 / np.linalg.norm(g))
        np.testing.assert_allclose(clipped[i], factor * right[i], rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(found, np.stack(right), rtol=1e-9, atol=1e-13)
    whole = torch.cat([v.flatten() for v in mean.values()]).numpy()
    np.testing.assert_allclose(whole, np.mean(right, 0), rtol=1e-9, atol=1e-13)
    assert np.abs(whole).max() > 1e-3
    assert not bool(mean["unused"].any())


def test_a_shared_vector() -> None:
    model, inputs, targets = setting()
    torch.manual_seed(9)
    vector = {k: torch.randn(p.shape).double() for k, p in model.named_parameters()}
    flat = torch.cat([v.flatten() for v in vector.values()]).numpy()
    with gradscope.Scope(model, smooth) as scope:
        found = joined(rows_of(scope, "hvp:with=stored", inputs, targets, vector))
        text = "clip:max_norm=0.1 | hvp:with=stored"
        ignored = joined(rows_of(scope, text, inputs, targets, vector))
    for i, (_, h) in enumerate(exact()):
        np.testing.assert_allclose(found[i], h @ flat, rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(found, ignored)


def test_complex_parameters() -> None:
    """L = |w|⁴/4 of a complex w: the gradient is |w|² w, and H g = 3 |w|⁴ w along w."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([0.3 + 0.4j], dtype=torch.complex128))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.w.abs().pow(4) / 4

    model = Net()
    x = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    with gradscope.Scope(model, lambda o, t: o[:, 0] + 0 * t, backend="loop") as scope:
        found = rows_of(scope, "hvp", x, torch.zeros(2, dtype=torch.float64))["w"]
    w = model.w.detach()
    torch.testing.assert_close(found, x.square() * 3 * w.abs().pow(4) * w)


LAYERS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "lstm": lambda: (nn.LSTM(3, 4, batch_first=True), torch.randn(3, 5, 3)),
    "gru": lambda: (nn.GRU(3, 4, batch_first=True), torch.randn(3, 5, 3)),
    "attention": lambda: (
        nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, activation="gelu"),
        torch.randn(3, 5, 4),
    ),
    "batch norm": lambda: (nn.BatchNorm1d(4), torch.randn(3, 4)),
    "sparse embedding": lambda: (nn.Embedding(5, 4, sparse=True), torch.randint(0, 5, (3, 2))),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_fused_kernels(name: str) -> None:
    torch.manual_seed(2)
    layer, inputs = LAYERS[name]()
    model = layer.double().eval()
    inputs = inputs.double() if inputs.is_floating_point() else inputs

    def loss(outputs: object, targets: Tensor) -> Tensor:
        values = outputs[0] if isinstance(outputs, tuple) else outputs
        assert isinstance(values, Tensor)
        return values.flatten(1).sin().square().cumsum(1).sum(1) * targets

    targets = torch.tensor([1.0, 0.7, 2.0], dtype=torch.float64)
    with gradscope.Scope(model, loss, backend="loop") as scope:
        found = joined(rows_of(scope, "hvp", inputs, targets))
    model.sparse = False  # of which torch has no Hessian
    for i in range(3):
        value, theta = function(model, loss, inputs, targets, i)
        with sdpa_kernel(SDPBackend.MATH):
            g = torch.func.grad(value)(theta)
            right = torch.autograd.functional.hvp(value, theta, g)[1].numpy()
        np.testing.assert_allclose(found[i], right, rtol=1e-8, atol=1e-9 * np.abs(right).max())


def test_own_loss_gradients_of_coupled_samples() -> None:
    """BatchNorm on batch statistics: the Hessian of a sample's loss within its batch."""
    torch.manual_seed(4)
    norm = nn.BatchNorm1d(2, track_running_stats=False)
    model = nn.Sequential(nn.Linear(3, 2), norm, nn.Linear(2, 2)).double().train()
    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    with gradscope.Scope(model, smooth, coupling="own-loss") as scope:
        found = joined(rows_of(scope, "hvp", x, y))
    for i in range(4):
        g, h = derivatives(model, smooth, x, y, i)
        np.testing.assert_allclose(found[i], h @ g, rtol=1e-8, atol=1e-12)


class Frozen(torch.autograd.Function):
    """A square that saves an intermediate, which a second backward pass takes for a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(2 * x)
        return x * x

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        return slope * upstream


class Square(Frozen):
    """A square as it should be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * upstream


class Once(Square):
    """A square whose backward pass cannot be differentiated."""

    backward = staticmethod(torch.autograd.function.once_differentiable(Square.backward))


class Squared(nn.Module):
    """A linear layer and a square."""

    def __init__(self, square: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.square = square

    def forward(self, x: Tensor) -> Tensor:
        return self.square(self.lin(x))


@pytest.mark.parametrize(("function", "words"), [(Once, "twice"), (Frozen, "constant")])
def test_a_model_without_second_derivative_is_refused(function: Any, words: str) -> None:
    """Autograd itself would give zeros for the first and wrong numbers for the second."""
    torch.manual_seed(3)
    model = Squared(function.apply)
    with (
        gradscope.Scope(model, smooth, backend="loop") as scope,
        pytest.raises(UnsupportedError, match=words),
    ):
        rows_of(scope, "hvp", torch.randn(2, 2), torch.randn(2, 2))


def test_a_right_custom_function_is_let_through() -> None:
    torch.manual_seed(3)
    own, plain = Squared(Square.apply), Squared(torch.square)
    plain.load_state_dict(own.state_dict())
    inputs, targets = torch.randn(3, 2), torch.randn(3, 2)
    found = []
    for model in (own, plain):
        with gradscope.Scope(model, smooth, backend="loop") as scope:
            found.append(rows_of(scope, "hvp", inputs, targets))
    for name, values in found[1].items():
        torch.testing.assert_close(found[0][name], values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("text", ["norm | hvp", "dot:with=stored | hvp"])
def test_it_needs_a_vector_of_parameters(text: str) -> None:
    model, inputs, targets = setting()
    vector = {k: p.detach() for k, p in model.named_parameters()}
    with gradscope.Scope(model, smooth) as scope, pytest.raises(SpecError, match="Put hvp before"):
        rows_of(scope, text, inputs, targets, vector)
