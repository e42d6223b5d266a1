"""Operations of the model by other kernels: as exact as by torch's own, in every use."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from gradscope.backends.hooks import hooks, kernels
from gradscope.backends.hooks.kernels import FasterKernels, Sizes
from gradscope.core.batch import Batch
from gradscope.core.problem import Problem
from gradscope.errors import RefusedError
from tests import oracle
from tests.backends.outcomes import mistakes, run
from tests.backends.test_exactness import ANY
from tests.cases import Setup

TAKEN: list[str] = []


class Counted(FasterKernels):
    """Notes which of our functions recorded something."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs)
        if isinstance(found, Tensor) and all(found is not a for a in args):
            kind = type(found.grad_fn).__name__
            TAKEN.extend([kind] * kind.startswith("Gradscope"))
        return found


@pytest.fixture(autouse=True)
def nothing_taken() -> None:
    TAKEN.clear()


def inside(call: Callable[..., Any], *arguments: Any, sizes: Sizes = ANY) -> Any:
    with Counted(sizes):
        return call(*arguments)


class Twisted(nn.Module):
    """A linear layer used in the ways of a table."""

    def __init__(self, use: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(6, 7), nn.Linear(7, 7)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.layer, self.first(x)).flatten(1).sum(1, keepdim=True)


def _square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().flatten(1).sum(1)


def exact(model: nn.Module, x: Tensor) -> None:
    """`hooks` takes something over, and is right."""
    model, x, y = model.double(), x.double(), torch.randn(len(x), 1).double()
    backend = partial(hooks, kernels=lambda: Counted(ANY))
    evaluation = run(backend, Setup(model, _square, x, y))
    assert TAKEN
    assert not mistakes(evaluation, *oracle.per_sample_gradients(model, _square, x, y))


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


USES: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "once": lambda layer, x: layer(x).tanh(),
    "twice": lambda layer, x: layer(layer(x).tanh()),
    "in place afterwards": lambda layer, x: F.relu_(layer(x)) * 2,
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
def test_uses_of_a_linear_layer(use: Callable[[nn.Linear, Tensor], Tensor], lead: Any) -> None:
    torch.manual_seed(0)
    exact(Twisted(use), torch.randn(5, *lead, 6))


@pytest.mark.parametrize("frozen", ["weight", "bias", "layer", "first"])
def test_what_is_frozen(frozen: str) -> None:
    model = Twisted(USES["once"])
    for name, p in model.named_parameters():
        p.requires_grad_(frozen not in name)
    exact(model, torch.randn(5, 6))


def test_weights_that_are_computed() -> None:
    model = Twisted(USES["once"])
    parametrizations.weight_norm(model.layer)
    exact(model, torch.randn(5, 3, 6))


def test_what_is_overwritten_is_noticed() -> None:
    def use(layer: nn.Linear, x: Tensor) -> Tensor:
        hidden = x * 1
        out = layer(hidden)
        hidden.mul_(2)
        return out

    with pytest.raises(RefusedError, match="inplace"):
        exact(Twisted(use), torch.randn(5, 6))


class Tangents(nn.Module):
    """Tangents of samples and of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(200, 300), nn.Linear(300, 1)
        self.raw = nn.Parameter(torch.randn(300, 300) / 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(torch.tanh(self.first(x)) @ torch.tanh(self.raw)))


@pytest.mark.parametrize("there", [True, False], ids=["oneDNN", "gemm"])
def test_in_float32(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes that it is for, with oneDNN and without."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: there)
    torch.manual_seed(0)
    model, x, y = Tangents(), torch.randn(12, 200), torch.randn(12, 1)
    found = run("hooks", Setup(model, _square, x, y))
    losses, gradients = oracle.per_sample_gradients(model.double(), _square, x.double(), y.double())
    for name, right in gradients.items():
        ours = found.gradients[name].dense().double()
        assert float((ours - right).norm() / right.norm()) < 1e-5
    torch.testing.assert_close(found.losses.double(), losses, rtol=1e-5, atol=1e-6)


def test_nothing_is_computed_for_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data's own gradient is not asked for, though they require one to show their paths."""
    sizes: list[tuple[int, ...]] = []
    original = kernels.multiplied

    def counted(left: Tensor, right: Tensor, *rest: Any) -> Tensor:
        sizes.append(tuple(right.shape))
        return original(left, right, *rest)

    monkeypatch.setattr(kernels, "multiplied", counted)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    loss = nn.CrossEntropyLoss(reduction="none")
    batch = Batch.of(torch.randn(4, 5), torch.randint(3, (4,)))
    with hooks(Problem.of(model, loss), lambda: FasterKernels(ANY)) as evaluate:
        evaluate(batch)  # which analyses
        sizes.clear()
        evaluate(batch)
    assert sizes == [(7, 5), (3, 7), (7, 3)]


def test_other_forms_of_a_product_are_left_to_torch() -> None:
    x, w, b = torch.randn(3, 4), nn.Parameter(torch.randn(4, 5)), torch.zeros(5)
    into = torch.empty(3, 5)
    inside(torch.no_grad()(lambda: torch.mm(x, w, out=into)))
    part = torch.compile(lambda x, w: torch.relu(x @ w), backend="eager", fullgraph=True)
    for found in (
        into,
        inside(lambda: torch.mm(x, mat2=w)),
        inside(lambda: torch.matmul(x, other=w)),
        inside(lambda: torch.addmm(b, x, w, beta=2, alpha=1)),
        inside(lambda: x.detach().numpy() @ w.detach().numpy()),
    ):
        torch.testing.assert_close(torch.as_tensor(found), x @ w, rtol=1e-6, atol=1e-6)
    with pytest.raises(RuntimeError, match="matrix"):
        inside(torch.mm, x[None], w)
    # the compiler sees through a mode, and is not to see this one
    with FasterKernels(ANY):
        torch.testing.assert_close(part(x, w), (x @ w).relu())
    with torch.autocast("cpu", torch.bfloat16):
        assert inside(nn.Linear(4, 4), x).dtype == torch.bfloat16


TANGENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch": torch.tanh,
    "method": lambda x: x.tanh(),
    "functional": F.tanh,
    "module": nn.Tanh(),
}


@pytest.mark.parametrize("call", TANGENTS.values(), ids=TANGENTS.keys())
def test_calls_of_tanh(call: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(1)
    x = torch.randn(4, 2**13, requires_grad=True)
    y = inside(call, x, sizes=Sizes())
    assert TAKEN
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), x)
    wide = x.detach().double().tanh()
    torch.testing.assert_close(y.double(), wide, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(slope.double(), 1 - wide**2, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(second.double(), -2 * wide * (1 - wide**2), rtol=1e-4, atol=1e-6)


WINDOWS: dict[str, dict[str, Any]] = {
    "2": {"kernel_size": 2},
    "2 by 1": {"kernel_size": 2, "stride": 1},
    "3 by 2, padded": {"kernel_size": 3, "stride": 2, "padding": 1},
    "oblong": {"kernel_size": (3, 2), "stride": (1, 2), "padding": (1, 0)},
    "dilated": {"kernel_size": 2, "dilation": 2, "stride": 1},
    "rounded up": {"kernel_size": 3, "stride": 2, "ceil_mode": True},
}


def images(kind: str) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(3, 9, 7, 8)
    if kind == "ties":
        return x.round()
    if kind == "nan":
        x[1, 2, 3, 4] = x[1, 2, 3, 5] = x[0, 0, 0, 0] = torch.nan
    if kind == "infinite":
        x[x < 0] = -torch.inf
    return x


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS.keys())
@pytest.mark.parametrize("kind", ["normal", "ties", "nan", "infinite"])
def test_pooling_gives_the_same_bits(window: dict[str, Any], kind: str) -> None:
    x = images(kind)
    found = []
    for ours in (False, True):
        leaf = x.clone().requires_grad_()
        pool = nn.MaxPool2d(**window)
        y = inside(pool, leaf, sizes=Sizes()) if ours else pool(leaf)
        weights = torch.arange(y.numel(), dtype=y.dtype).view_as(y)
        (slope,) = torch.autograd.grad((y.nan_to_num() * weights).sum(), leaf)
        found.append((y.detach(), slope))
    assert TAKEN == ["GradscopePoolBackward"]
    for got, right in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, right, rtol=0, atol=0, equal_nan=True)


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "module": nn.MaxPool2d(2),
    "positional": lambda x: F.max_pool2d(x, 2, 2, 0, 1, False),
    "by torch": lambda x: torch.max_pool2d(x, [2, 2]),
    "written into": lambda x: F.max_pool2d(x, 2).mul_(2),
}


@pytest.mark.parametrize("call", POOLS.values(), ids=POOLS.keys())
def test_calls_of_pooling(call: Callable[[Tensor], Tensor]) -> None:
    x = images("normal")[:1, :2, :4, :4].contiguous().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: inside(call, x), x)
    assert torch.autograd.gradgradcheck(lambda x: inside(call, x.sin()), x)
    assert {*TAKEN} == {"GradscopePoolBackward"}


LEFT: dict[str, Callable[[Tensor], Any]] = {
    "channels last": lambda x: F.max_pool2d(x.contiguous(memory_format=torch.channels_last), 2),
    "with places": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "one image": lambda x: F.max_pool2d(x[0], 2),
    "few channels": lambda x: F.max_pool2d(x[:, :3].contiguous(), 2),
    "pool without gradient": lambda x: F.max_pool2d(x.detach(), 2),
    "vectorised": lambda x: torch.func.vmap(lambda image: F.max_pool2d(image[None], 2))(x),
    "few numbers": lambda x: torch.tanh(x[:, 0, 0, :4]),
    "one axis": lambda x: torch.tanh(x[0, 0, 0]),
    "float64": lambda x: torch.tanh(x.double()),
    "given a place": lambda x: torch.tanh(x.detach(), out=torch.empty_like(x)),
    "tanh without gradient": lambda x: torch.tanh(x.detach()),
}


@pytest.mark.parametrize("call", LEFT.values(), ids=LEFT.keys())
def test_what_is_left_to_torch(call: Callable[[Tensor], Any]) -> None:
    x = images("normal").requires_grad_()
    found = inside(call, x, sizes=Sizes())
    assert not TAKEN
    torch.testing.assert_close(found, call(x), rtol=0, atol=0)


def test_pooling_in_a_model() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.MaxPool2d(2, 1), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 2),
        nn.MaxPool2d(3, 2, 1), nn.Flatten(), nn.LazyLinear(3),
    )  # fmt: skip
    x = torch.randn(5, 2, 12, 11)
    model(x)
    exact(model, x)
    assert "GradscopePoolBackward" in TAKEN
