"""Copies of models that hold functions over their own parts compute with their own parameters."""

import functools
import types
import weakref
from collections import deque, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.core.batch import Batch
from gradscope.errors import RefusedError
from gradscope.model.problem import Problem, double_precision, model_loss
from tests.oracle import cross_entropy as loss

F = nn.functional
Pair = namedtuple("Pair", "first second")


class Net(nn.Module):
    """head(x + down(tanh(up(x)))), where `mlp` is the function that a case gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 3)
        self.mlp: Any = None

    def inner(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.mlp(x))


class Helper:
    """An object that is no module."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.again = [self]

    def __call__(self, x: Tensor) -> Tensor:
        return self.net.inner(x)


def closure(net: Net) -> Any:
    return lambda x: net.down(torch.tanh(net.up(x)))


def submodules(net: Net) -> Any:
    m = nn.ModuleDict({"up": net.up, "down": net.down})
    return lambda x: m.down(torch.tanh(m.up(x)))


def defaults(net: Net) -> Any:
    def mlp(x: Tensor, up: Any = net.up, *, down: Any = net.down) -> Tensor:
        return down(torch.tanh(up(x)))

    return mlp


def nested(net: Net) -> Any:
    def first(x: Tensor) -> Tensor:
        return torch.tanh(net.up(x))

    return lambda x: net.down(first(x))


def recursive(net: Net) -> Any:
    def mlp(x: Tensor, depth: int = 1) -> Tensor:
        return net.down(torch.tanh(net.up(x))) if depth == 0 else mlp(x, depth - 1)

    return mlp


def decorated(net: Net) -> Any:
    own = closure(net)

    @functools.wraps(own)
    def mlp(*given: Any) -> Any:
        return mlp.__wrapped__(*given)  # type: ignore[attr-defined]

    return mlp


def tensors(net: Net) -> Any:
    w, b, v, c = net.up.weight, net.up.bias, net.down.weight, net.down.bias
    return lambda x: F.linear(torch.tanh(F.linear(x, w, b)), v, c)


def weak(net: Net) -> Any:
    own = weakref.ref(net)
    return lambda x: own().inner(x)  # type: ignore[union-attr]


def weak_attribute(net: Net) -> Any:
    net.up.parent = weakref.ref(net)  # type: ignore[assignment]
    return types.MethodType(lambda up, x: up.parent().inner(x), net.up)


def cached(net: Net) -> Any:
    part = functools.lru_cache(maxsize=4)(lambda name: getattr(net, name))
    return lambda x: part("down")(torch.tanh(part("up")(x)))


def cached_attribute(net: Net) -> Any:
    net.part = functools.cache(lambda name: getattr(net, name))  # type: ignore[assignment]
    return types.MethodType(lambda own, x: own.part("down")(torch.tanh(own.part("up")(x))), net)


def patched(net: Net) -> Any:
    outer, inner = net, nn.Identity()
    inner.forward = types.MethodType(lambda self, x: outer.inner(x), inner)  # type: ignore[method-assign]
    return inner


def patched_lambda(net: Net) -> Any:
    inner = nn.Identity()
    inner.forward = closure(net)  # type: ignore[method-assign]
    return inner


def hooked(net: Net) -> Any:
    inner = nn.Identity()
    inner.register_forward_hook(lambda module, given, output: net.inner(output))
    return inner


def in_a_list(net: Net) -> Any:
    net.steps = [net.up, torch.tanh, lambda x: net.down(x)]  # type: ignore[assignment]
    return types.MethodType(lambda own, x: functools.reduce(lambda y, f: f(y), own.steps, x), net)


def in_a_tuple(net: Net) -> Any:
    steps = (Pair(lambda x: net.up(x), torch.tanh), (net.down,))
    net.steps = {"all": steps}  # type: ignore[assignment]

    def mlp(own: Any, x: Tensor) -> Tensor:
        (first, second), (last,) = own.steps["all"]
        return last(second(first(x)))

    return types.MethodType(mlp, net)


def in_a_deque(net: Net) -> Any:
    net.steps = deque([closure(net)])  # type: ignore[assignment]
    return types.MethodType(lambda own, x: own.steps[0](x), net)


CASES: dict[str, Callable[[Net], Any]] = {
    "closure": closure,
    "submodules": submodules,
    "defaults": defaults,
    "nested": nested,
    "recursive": recursive,
    "decorated": decorated,
    "tensors": tensors,
    "weak": weak,
    "weak attribute": weak_attribute,
    "cached": cached,
    "cached attribute": cached_attribute,
    "patched": patched,
    "patched with a lambda": patched_lambda,
    "hooked": hooked,
    "in a list": in_a_list,
    "in a tuple": in_a_tuple,
    "in a deque": in_a_deque,
    "bound method": lambda net: net.inner,
    "partial": lambda net: functools.partial(Net.inner, net),
    "partial of a method": lambda net: functools.partial(net.inner),
    "partial of a function": lambda net: functools.partial(closure(net)),
    "keyword of a partial": lambda net: functools.partial(
        lambda x, f: f(x), f=functools.partial(closure(net))
    ),
    "object": Helper,
    "object in a closure": lambda net: functools.partial(lambda h, x: h(x), Helper(net)),
    "object behind a closure": lambda net: (lambda h: lambda x: h.again[0](x))(Helper(net)),
    "plain list": lambda net: Sequence([net.up, torch.tanh, net.down]),
}


class Sequence:
    def __init__(self, steps: list[Any]) -> None:
        self.steps = steps

    def __call__(self, x: Tensor) -> Tensor:
        return functools.reduce(lambda y, step: step(y), self.steps, x)


def built(name: str, dtype: torch.dtype) -> Net:
    torch.manual_seed(3)
    net = Net().to(dtype)
    net.mlp = CASES[name](net)
    return net


def plain(net: Net) -> Net:
    """The same model in float64, written with methods alone."""
    found = Net().double()
    found.load_state_dict({k: v.double() for k, v in net.state_dict().items() if "mlp" not in k})
    found.mlp = lambda x: found.inner(x)
    return found


def data(dtype: torch.dtype) -> Batch:
    draw = torch.Generator().manual_seed(1)
    return Batch.of(torch.randn(6, 4, generator=draw).to(dtype), torch.arange(6) % 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_a_copy_computes_with_its_own_parameters(name: str, dtype: torch.dtype) -> None:
    net, batch = built(name, dtype), data(dtype)
    before = {k: v for k, v in vars(net).items() if k != "training"}
    outputs = net(batch.inputs)
    problem = Problem.of(net, loss)
    copy, right = problem.converted(torch.float64), plain(net)
    exact = batch.in_double_precision()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(3)  # a copy does not follow
    with double_precision():
        losses = copy.losses(exact)
    wanted = loss(right(exact.inputs), exact.targets)
    torch.testing.assert_close(losses, wanted, rtol=1e-12, atol=0)
    found = torch.autograd.grad(losses.sum(), list(copy.parameters.values()))
    truth = dict(right.named_parameters())
    for key, gradient, other in zip(
        copy.parameters, found, torch.autograd.grad(wanted.sum(), list(truth.values())), strict=True
    ):
        torch.testing.assert_close(gradient, other, rtol=1e-10, atol=1e-13, msg=key)
    with torch.no_grad():
        for p in net.parameters():
            p.div_(3)
        for p in copy.parameters.values():
            p.zero_()
    assert vars(net).keys() - {"training"} == before.keys()
    assert all(vars(net)[k] is v for k, v in before.items())
    torch.testing.assert_close(net(batch.inputs), outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["closure", "patched", "weak", "hooked", "tensors"])
def test_compare_sees_a_peer_that_leaves_layers_out(name: str, dtype: torch.dtype) -> None:
    def head_alone(model: nn.Module, loss: Any, inputs: Tensor, targets: Tensor) -> Any:
        named = dict(model.named_parameters())
        rows: dict[str, list[Tensor]] = {k: [] for k in named}
        for i in range(len(inputs)):
            value = loss(model(inputs[i : i + 1]), targets[i : i + 1]).sum()
            for k, g in zip(named, torch.autograd.grad(value, list(named.values())), strict=True):
                rows[k].append(g * k.startswith("head"))
        return {k: torch.stack(v) for k, v in rows.items()}

    net, batch = built(name, dtype), data(dtype)
    backends = ["loop", "hooks"] if name == "tensors" else ["loop", "hooks", "vmap", "expand"]
    found = gradscope.compare(
        net, loss, batch.inputs, batch.targets, backends=backends, against={"peer": head_alone}
    )
    assert {row.backend: row.status for row in found.rows} == {
        **dict.fromkeys(backends, "agrees"),
        "peer": "disagrees",
    }


@pytest.mark.parametrize("of_model", [False, True])
def test_a_loss_that_holds_the_model(of_model: bool) -> None:
    net, batch = plain(built("closure", torch.float64)), data(torch.float64)

    def decayed(outputs: Tensor, targets: Tensor) -> Tensor:
        return loss(outputs, targets) + net.up.weight.square().sum()

    own = decayed
    if of_model:
        own = model_loss(lambda model, inputs, targets: decayed(model(inputs), targets))
    problem = Problem.of(net, own)
    copy = problem.converted(torch.float64)
    one, other = (
        torch.autograd.grad(each.losses(batch).sum(), list(each.parameters.values()))
        for each in (problem, copy)
    )
    torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
    assert copy.of_model == of_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_peer_is_given_a_loss_over_its_own_copy(dtype: torch.dtype) -> None:
    def alone(model: nn.Module, loss: Any, inputs: Tensor, targets: Tensor) -> Any:
        named, rows = dict(model.named_parameters()), []
        for i in range(len(inputs)):
            value = loss(model(inputs[i : i + 1]), targets[i : i + 1]).sum()
            rows.append(torch.autograd.grad(value, list(named.values())))
        return {k: torch.stack(g) for k, g in zip(named, zip(*rows, strict=True), strict=True)}

    net, batch = built("closure", dtype), data(dtype)

    def decayed(outputs: Tensor, targets: Tensor) -> Tensor:
        return loss(outputs, targets) + net.up.weight.square().sum()

    found = gradscope.compare(
        net, decayed, batch.inputs, batch.targets, backends=["hooks"], against={"peer": alone}
    )
    assert {row.backend: row.status for row in found.rows} == {"hooks": "agrees", "peer": "agrees"}


HELD: list[Net] = []


def through_a_global(net: Net) -> Any:
    HELD[:] = [net]
    return lambda x: HELD[0].inner(x)


def through_a_class(net: Net) -> Any:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return net.inner(x)

    return Inner()


@pytest.mark.parametrize("hold", [through_a_global, through_a_class])
def test_what_cannot_be_copied_with_the_model_is_refused(hold: Callable[[Net], Any]) -> None:
    torch.manual_seed(3)
    net, batch = Net().double(), data(torch.float64)
    net.mlp = hold(net)
    copy = Problem.of(net, loss).converted(torch.float64)
    with pytest.raises(RefusedError, match="a global variable or a class attribute") as caught:
        copy.losses(batch)
    assert "down.bias" in str(caught.value) and "through self" in str(caught.value)
    with pytest.raises(RefusedError, match=r"down\.bias"):
        gradscope.compare(net, loss, batch.inputs, batch.targets)
    HELD.clear()


def test_a_copy_that_shares_a_parameter_is_refused_and_changes_nothing() -> None:
    class Shared(nn.Linear):
        def __deepcopy__(self, memo: object) -> "Shared":
            return self

    net = nn.Sequential(nn.Linear(4, 4), Shared(4, 3))
    net[1].weight.grad = torch.ones(3, 4)
    with pytest.raises(RefusedError, match=r"shares '1\.weight' with the model"):
        Problem.of(net, loss).converted(torch.float64)
    assert net[1].weight.dtype == torch.float32 and net[1].weight.grad is not None


def test_functions_that_do_not_lead_to_the_model_are_shared() -> None:
    count = {"calls": 0}

    def act(x: Tensor) -> Tensor:
        count["calls"] += 1
        return torch.tanh(x)

    net = Net()
    net.act, net.mlp = act, lambda x: net.down(net.act(net.up(x)))
    copy = Problem.of(net, loss).converted(None).model
    assert copy.act is act and copy.mlp is not net.mlp
    copy(data(torch.float32).inputs)
    assert count["calls"] == 1


def test_functions_that_share_a_variable_go_on_sharing_it() -> None:
    net = Net()

    def pair() -> tuple[Any, Any]:
        own, factor = net, 1.0

        def grow() -> None:
            nonlocal factor
            factor *= 2 + 0 * own.up.in_features

        return grow, lambda x: factor * own.inner(x)

    net.grow, net.mlp = pair()
    copy = Problem.of(net, loss).converted(None).model
    x = torch.ones(1, 4)
    before = copy.mlp(x)
    copy.grow()
    assert copy.grow is not net.grow
    torch.testing.assert_close(copy.mlp(x), 2 * before)
