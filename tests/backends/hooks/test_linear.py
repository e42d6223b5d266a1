"""Large linear layers by another kernel: every case again with all layers taken for large ones."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from gradscope.backends.hooks import hooks
from gradscope.backends.hooks.kernels import FasterKernels, linear
from gradscope.core.batch import Batch
from gradscope.core.problem import Problem
from gradscope.errors import RefusedError
from tests import oracle
from tests.backends.outcomes import fingerprint, mistakes, require_as_exact, run
from tests.cases import CASES, INDEPENDENT, Setup

TAKEN: list[str] = []


@pytest.fixture
def every_layer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Any linear layer is large, and float64 will do; count those that are taken over."""
    original = linear._run

    def counted(layer: linear.Layer) -> Tensor:
        TAKEN.append(str(tuple(layer[1].shape)))
        return original(layer)

    monkeypatch.setattr(linear, "_LARGE", 1)
    monkeypatch.setattr(linear, "_DTYPES", (torch.float32, torch.float64))
    monkeypatch.setattr(linear, "_run", counted)
    TAKEN.clear()
    yield


@pytest.mark.parametrize("name", [case.name for case in INDEPENDENT])
def test_every_case_is_as_exact_as_without(every_layer: None, name: str) -> None:
    setup = CASES[name].build()
    before = fingerprint(setup)
    if require_as_exact("hooks", name, setup):
        assert fingerprint(setup).keys() == before.keys()


def test_most_cases_have_such_layers(every_layer: None) -> None:
    taken = 0
    for case in INDEPENDENT:
        if taken == 30:
            return
        TAKEN.clear()
        try:
            run("hooks", case.build())
        except RefusedError:
            continue
        taken += bool(TAKEN)
    pytest.fail(f"only {taken} of {len(INDEPENDENT)}")


class Twisted(nn.Module):
    """A linear layer used in the ways of a table."""

    def __init__(self, use: Callable[[nn.Linear, Tensor], Tensor], bias: bool = True) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(6, 7), nn.Linear(7, 7, bias=bias)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.layer, self.first(x)).flatten(1).sum(1, keepdim=True)


def _penalized(layer: nn.Linear, x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(layer(x).tanh().sum(), x, create_graph=True)
    return slope.square() + layer(x)


def _stepped(layer: nn.Linear, x: Tensor) -> Tensor:
    """One step of descent on the weight itself, without and with its derivative."""
    weight = layer.weight
    for graph in (False, True):
        (slope,) = torch.autograd.grad(
            F.linear(x, weight, layer.bias).square().sum(), weight, create_graph=graph
        )
        assert slope.norm() > 0
    return F.linear(x, weight, layer.bias)


def _overwritten(layer: nn.Linear, x: Tensor) -> Tensor:
    y = layer(x)
    return F.relu_(y) * 2


USES: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "once": lambda layer, x: layer(x).tanh(),
    "twice": lambda layer, x: layer(layer(x).tanh()),
    "in place afterwards": _overwritten,
    "by keyword": lambda layer, x: F.linear(input=x, weight=layer.weight, bias=layer.bias).sin(),
    "without bias": lambda layer, x: F.linear(x, layer.weight).sin(),
    "transposed": lambda layer, x: F.linear(x, layer.weight.T).sin(),
    "scaled": lambda layer, x: F.linear(x, layer.weight * 3, layer.bias).sin(),
    "detached": lambda layer, x: F.linear(x, layer.weight.detach(), layer.bias).sin(),
    "expanded": lambda layer, x: layer(x.unsqueeze(1).expand(-1, 3, *x.shape[1:])).sin(),
    "samples second": lambda layer, x: layer(x.movedim(0, -2)).movedim(-2, 0).sin(),
    "as a product": lambda layer, x: (x @ layer.weight).sin(),
    "as a transposed product": lambda layer, x: x.matmul(layer.weight.T).sin(),
    "written out": lambda layer, x: (
        torch.addmm(layer.bias, x.flatten(0, -2), layer.weight).view(x.shape).sin()
    ),
    "from the left": lambda layer, x: (layer.weight @ x.unsqueeze(-1)).squeeze(-1).sin(),
    "differentiated twice": _penalized,
    "differentiated by the weight": _stepped,
    "checkpointed": lambda layer, x: checkpoint(layer, x, use_reentrant=False).sin(),
    "vectorised": lambda layer, x: torch.func.vmap(layer)(x).sin(),
    "forward mode": lambda layer, x: torch.func.jvp(layer, (x,), (x.cos(),))[1],
    "without gradient": lambda layer, x: layer(x) * torch.no_grad()(layer)(x),
}


@pytest.mark.parametrize("lead", [(), (4,), (2, 3)], ids=str)
@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_uses(every_layer: None, use: Callable[[nn.Linear, Tensor], Tensor], lead: Any) -> None:
    torch.manual_seed(0)
    model = Twisted(use).double()
    x, y = torch.randn(5, *lead, 6).double(), torch.randn(5, 1).double()
    evaluation = run("hooks", Setup(model, _square, x, y))
    assert TAKEN  # at least the first
    assert not mistakes(evaluation, *oracle.per_sample_gradients(model, _square, x, y))


@pytest.mark.parametrize("frozen", ["weight", "bias", "layer", "none", "first"])
def test_what_is_frozen(every_layer: None, frozen: str) -> None:
    model = Twisted(lambda layer, x: layer(x).sin()).double()
    for name, p in model.named_parameters():
        if frozen in name:
            p.requires_grad_(False)
    x, y = torch.randn(5, 6).double(), torch.randn(5, 1).double()
    evaluation = run("hooks", Setup(model, _square, x, y))
    assert not mistakes(evaluation, *oracle.per_sample_gradients(model, _square, x, y))


def test_weights_that_are_computed(every_layer: None) -> None:
    model = Twisted(lambda layer, x: layer(x).sin()).double()
    parametrizations.weight_norm(model.layer)
    x, y = torch.randn(5, 3, 6).double(), torch.randn(5, 1).double()
    evaluation = run("hooks", Setup(model, _square, x, y))
    assert TAKEN
    assert not mistakes(evaluation, *oracle.per_sample_gradients(model, _square, x, y))


def test_what_is_overwritten_is_noticed(every_layer: None) -> None:
    def use(layer: nn.Linear, x: Tensor) -> Tensor:
        hidden = x * 1
        out = layer(hidden)
        hidden.mul_(2)
        return out

    x, y = torch.randn(5, 6).double(), torch.randn(5, 1).double()
    with pytest.raises(RefusedError, match="inplace"):
        run("hooks", Setup(Twisted(use).double(), _square, x, y))


@pytest.mark.parametrize("there", [True, False], ids=["oneDNN", "gemm"])
def test_in_float32(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers that it is for, with oneDNN and without."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: there)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 400), nn.Tanh(), nn.Linear(400, 300), nn.Linear(300, 5))
    x, y = torch.randn(9, 3, 200), torch.randn(9, 3, 5)
    losses, gradients = oracle.per_sample_gradients(model, _sum_of_squares, x, y)
    problem = Problem.of(model, _sum_of_squares)
    with hooks(problem) as evaluate:
        found = evaluate(Batch.of(x, y))
        for name, right in gradients.items():
            ours = found.gradients[name].dense().double()
            assert float((ours - right).norm() / right.norm()) < 1e-5
    torch.testing.assert_close(found.losses.double(), losses, rtol=1e-5, atol=0)


def test_autocast_is_left_alone(every_layer: None) -> None:
    layer, x = nn.Linear(7, 7), torch.randn(3, 7)
    with torch.autocast("cpu", torch.bfloat16), FasterKernels():
        assert layer(x).dtype == torch.bfloat16
    assert not TAKEN


def test_other_forms_of_a_product_are_left_to_torch(every_layer: None) -> None:
    x, w, b = torch.randn(3, 4), nn.Parameter(torch.randn(4, 5)), torch.zeros(5)
    into = torch.empty(3, 5)
    with FasterKernels(), torch.no_grad():
        torch.mm(x, w, out=into)
    with FasterKernels():
        found = [
            torch.mm(x, mat2=w),
            torch.matmul(x, other=w),
            torch.addmm(b, x, w, beta=2, alpha=1),
            x.detach().numpy() @ w.detach().numpy(),
        ]
    with FasterKernels(), pytest.raises(RuntimeError, match="matrix"):
        torch.mm(x[None], w)
    for values in (into, *found):
        torch.testing.assert_close(torch.as_tensor(values), x @ w, rtol=1e-6, atol=1e-6)


def test_parts_that_the_user_has_compiled(every_layer: None) -> None:
    """The compiler sees through a mode, and is not to see this one."""
    part = torch.compile(lambda x, w: torch.relu(x @ w), backend="eager", fullgraph=True)
    x, w = torch.randn(3, 4), nn.Parameter(torch.randn(4, 5))
    with FasterKernels():
        found = part(x, w)
    torch.testing.assert_close(found, (x @ w).relu())


def _square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(1)


def _sum_of_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum((1, 2))


def test_nothing_is_computed_for_the_data(
    every_layer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data's own gradient is not asked for, though they require one to show their paths."""
    sizes: list[tuple[int, ...]] = []
    original = linear.multiplied

    def counted(left: Tensor, right: Tensor, *rest: Any) -> Tensor:
        sizes.append(tuple(right.shape))
        return original(left, right, *rest)

    monkeypatch.setattr(linear, "multiplied", counted)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    loss = nn.CrossEntropyLoss(reduction="none")
    batch = Batch.of(torch.randn(4, 5), torch.randint(3, (4,)))
    with hooks(Problem.of(model, loss)) as evaluate:
        evaluate(batch)  # which analyses
        sizes.clear()
        evaluate(batch)
    assert sizes == [(7, 5), (3, 7), (7, 3)]
