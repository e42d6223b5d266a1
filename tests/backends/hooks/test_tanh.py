"""The hyperbolic tangent by another kernel, against float64 and torch's own."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from gradscope.backends.hooks.kernels import FasterKernels
from gradscope.backends.hooks.kernels import pointwise as kernel
from gradscope.blocks import pointwise
from gradscope.errors import RefusedError
from tests import oracle
from tests.backends.outcomes import require_as_exact, run
from tests.cases import CASES, INDEPENDENT, Setup


def _inside(call: Callable[..., Tensor], *arguments: Any) -> Tensor:
    with FasterKernels():
        return call(*arguments)


def _kind(y: Tensor) -> str:
    return type(y.grad_fn).__name__


@pytest.mark.parametrize("entries", [7, 2**15, 2**15 + 3, 2**20 + 5])
@pytest.mark.parametrize("size", [1e-6, 1.0, 30.0])
def test_values(entries: int, size: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(entries) * size
    found = pointwise.tanh(x)
    torch.testing.assert_close(found.double(), torch.tanh(x.double()), rtol=3e-7, atol=0)
    assert found.is_contiguous()


def test_special_values() -> None:
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, 3e38])
    x = special.repeat(2**13)
    right = torch.tanh(special.double()).repeat(2**13)
    torch.testing.assert_close(
        pointwise.tanh(x).double(), right, rtol=1e-6, atol=1e-38, equal_nan=True
    )


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2**8, 2**8).T,
        torch.randn(2**16).double(),
        torch.randn(2**16, dtype=torch.complex64),
        torch.randn(2**16).bfloat16(),
    ],
    ids=["strided", "float64", "complex", "bfloat16"],
)
def test_what_is_left_to_torch(x: Tensor) -> None:
    torch.testing.assert_close(pointwise.tanh(x), torch.tanh(x), rtol=0, atol=0)


def test_where_a_derivative_is_asked_for() -> None:
    x = torch.randn(2**16, requires_grad=True)
    (slope,) = torch.autograd.grad(pointwise.tanh(x).sum(), x)
    torch.testing.assert_close(slope, 1 - x.detach().tanh() ** 2)
    batched = torch.func.vmap(pointwise.tanh)(x.detach().view(2, -1))
    torch.testing.assert_close(batched.flatten(), x.detach().tanh())


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch": torch.tanh,
    "method": lambda x: x.tanh(),
    "functional": F.tanh,
    "module": nn.Tanh(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_calls(call: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(1)
    x = torch.randn(4, 2**13, requires_grad=True)
    recorded = _inside(lambda x: call(x) + 0, x)
    found = torch.autograd.grad(recorded.square().sum(), x)[0]
    right = torch.autograd.grad(call(x).square().sum(), x)[0]
    torch.testing.assert_close(recorded, call(x))
    torch.testing.assert_close(found, right)


def test_it_is_recorded_alike_for_any_number_of_samples() -> None:
    large, small = torch.randn(512, 64), torch.randn(2, 64)
    kinds = {_kind(_inside(torch.tanh, x.requires_grad_())) for x in (large, small)}
    assert kinds == {"GradscopeTanhBackward"}


def test_its_derivatives_can_be_differentiated() -> None:
    torch.manual_seed(2)
    x = torch.randn(2, 64, requires_grad=True)
    y = _inside(torch.tanh, x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    wide = x.detach().double().tanh()
    torch.testing.assert_close(second.double(), -2 * wide * (1 - wide**2), rtol=1e-4, atol=1e-6)


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "few numbers": lambda x: torch.tanh(x[:, :4]),
    "one axis": lambda x: torch.tanh(x[0]),
    "float64": lambda x: torch.tanh(x.double()),
    "given a place": lambda x: torch.tanh(x.detach(), out=torch.empty_like(x)),
    "no gradient": lambda x: torch.tanh(x.detach()),
}


@pytest.mark.parametrize("call", OTHERS.values(), ids=OTHERS.keys())
def test_what_is_left_alone(call: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, 100, requires_grad=True)
    found = _inside(call, x)
    assert _kind(found) != "GradscopeTanhBackward"
    torch.testing.assert_close(found, call(x), rtol=0, atol=0)


@pytest.fixture
def every_tangent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Any numbers are many, and float64 will do; note the shapes of what is taken over."""
    taken: list[tuple[int, ...]] = []
    original = kernel._pays

    def pays(x: Tensor) -> bool:
        taken.append(tuple(x.shape))
        return original(x) or x.dim() > 0

    monkeypatch.setattr(kernel, "_pays", pays)
    monkeypatch.setattr(kernel, "_DTYPES", (torch.float32, torch.float64))
    monkeypatch.setattr("gradscope.backends.hooks.pays_for", lambda model: True)
    return taken


@pytest.mark.parametrize("name", [case.name for case in INDEPENDENT])
def test_every_case_is_as_exact_as_without(every_tangent: list[tuple[int, ...]], name: str) -> None:
    require_as_exact("hooks", name, CASES[name].build())


def test_many_cases_have_such_functions(every_tangent: list[tuple[int, ...]]) -> None:
    found = 0
    for case in INDEPENDENT:
        every_tangent.clear()
        with suppress(RefusedError):
            run("hooks", case.build())
        found += bool(every_tangent)
    assert found >= 20


class Parametrised(nn.Module):
    """A weight that is the tangent of a parameter, between tangents of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 300)
        self.raw = nn.Parameter(torch.randn(300, 300) / 10)
        self.last = nn.Linear(300, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(torch.tanh(self.first(x)) @ torch.tanh(self.raw)))


def test_gradients_of_a_model() -> None:
    torch.manual_seed(3)
    model = Parametrised()
    setup = Setup(
        model, nn.CrossEntropyLoss(reduction="none"), torch.randn(120, 16), torch.randint(3, (120,))
    )
    found = run("hooks", setup).gradients.dense()
    wide = Setup(model.double(), setup.loss, setup.inputs.double(), setup.targets)
    for name, right in oracle.per_sample_gradients(*wide)[1].items():
        assert float((found[name] - right).norm() / right.norm()) < 1e-5, name
