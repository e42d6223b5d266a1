"""Gradients that rounding blurs: sums that cancel, numbers below the smallest normal one, zeros."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradscope.backends.hooks import hooks
from gradscope.backends.hooks.graph.trace import Trace
from gradscope.core.batch import Batch
from gradscope.errors import RefusedError
from gradscope.model.problem import Problem
from gradscope.scope import Scope
from tests.oracle import per_sample_gradients
from tests.zoo.base import Net, param, seeded, smooth

N, T, D = 6, 3, 4


def moved(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of all samples in an order that each batch tells anew, and the way back."""
    h = net.a(x).flatten(0, 1)
    order = h[:, 0].detach().argsort()
    return h[order], order.argsort()


def cancelling(net: Any, x: Tensor, factor: float) -> Tensor:
    """The gradient of the scale is a difference of two numbers that are a factor larger."""
    rows, back = moved(net, x)
    rows = rows * net.scale
    rows = rows * (factor + 1) - rows * factor
    return rows[back].view_as(x).tanh()


def tiny(net: Any, x: Tensor, factor: float) -> Tensor:
    rows, back = moved(net, x)
    rows = rows * net.scale
    return (net.b(x) + factor * rows[back].view_as(x)).tanh()


def model_of(forward: Callable[..., Tensor], *options: float) -> Net:
    members = {"a": nn.Linear(D, D), "b": nn.Linear(D, D), "scale": param(D)}
    return Net(lambda net, x: forward(net, x, *options), **members)


def rows_by_hooks(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    with hooks(Problem.of(model, smooth)) as evaluate:
        return evaluate(Batch.of(x, y)).gradients.dense()


@pytest.mark.parametrize(
    ("forward", "option", "tolerance"),
    [(cancelling, 3e3, 1e-2), (cancelling, 3e5, 1.0), (tiny, 1e-38, 1e-4), (tiny, 1e-41, 1e-2)],
)
@pytest.mark.parametrize("n", [3, N, 13])
def test_rounding_is_not_taken_for_mixing(
    forward: Callable[..., Tensor], option: float, tolerance: float, n: int
) -> None:
    with seeded(forward.__name__, torch.float32):
        model, x = model_of(forward, option), torch.randn(n, T, D)
        y = torch.randn(n, T, D)
        found = rows_by_hooks(model, x, y)["scale"].double()
        right = per_sample_gradients(model, smooth, x, y)[1]["scale"]
    assert bool(((found - right).norm(dim=1) <= tolerance * right.norm(dim=1)).all())


def with_a_neighbour(net: Any, x: Tensor, factor: float, share: float) -> Tensor:
    """The rows of `tiny`, next to a small part of other samples' rows."""
    rows, back = moved(net, x)
    rows = rows * net.scale
    rows = factor * (rows + share * rows.roll(T, 0))
    return (net.b(x) + rows[back].view_as(x)).tanh()


@pytest.mark.parametrize("share", [1.0, 1e-3, 1e-5])
@pytest.mark.parametrize("factor", [1.0, 1e-10, 1e-25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mixing_is_refused_however_small_the_gradients_are(
    dtype: torch.dtype, factor: float, share: float
) -> None:
    with seeded("mixing", dtype):
        model, x = model_of(with_a_neighbour, factor, share), torch.randn(N, T, D)
        with pytest.raises(RefusedError):
            rows_by_hooks(model, x, torch.randn(N, T, D))


def norm(c: int, **options: bool) -> nn.Module:
    return nn.InstanceNorm2d(c, affine=True, **options)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "one": lambda: nn.Sequential(nn.Conv2d(2, 4, 3), norm(4), nn.Tanh()),
    "two": lambda: nn.Sequential(norm(2), nn.Conv2d(2, 3, 1), norm(3), nn.Tanh()),
    "one after the other": lambda: nn.Sequential(norm(2), norm(2), nn.Tanh()),
    "a mean afterwards": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), norm(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    ),
    "tracked": lambda: nn.Sequential(norm(2, track_running_stats=True), nn.Conv2d(2, 3, 1)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", NORMS)
def test_affine_parameters_of_instance_norms(
    name: str, dtype: torch.dtype, train: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of some vanish but for rounding; no batch needs more than one backward pass."""
    passes: list[int] = []
    whole = Trace.gradients
    monkeypatch.setattr(Trace, "gradients", lambda *args: (passes.append(1), whole(*args))[1])
    with seeded(name, dtype):
        model = NORMS[name]().train(train)
        for p in model.parameters():
            nn.init.normal_(p)
        scope = Scope(model, smooth, backend="hooks")
        tolerance = 1e-10 if dtype == torch.float64 else 2e-5
        for n in (4, 5, 3):
            x = torch.randn(n, 2, 6, 6)
            y = torch.randn(model(x).shape)
            right = per_sample_gradients(model, smooth, x, y)[1]
            passes.clear()
            found = scope.per_sample_gradients(x, y)
            assert passes == [1]
            size = max(float(rows.norm()) for rows in right.values())
            for parameter, rows in right.items():
                gap = float((found[parameter].double() - rows).norm())
                assert gap <= tolerance * size, parameter
