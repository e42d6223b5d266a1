"""Adapters on quantised layers: rows against a loop over samples on the same quantised model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing

import gradscope
from gradscope.errors import CoupledSamplesError, UnsupportedError

WIDTH, BACKENDS = 6, ("auto", "hooks", "vmap", "expand", "loop")


class Integers(torch.autograd.Function):
    """x Wᵀ with integers W and a scale for each row; rows of x are rounded to 8 bits as well.

    Columns of x above the threshold in any row are not rounded, as in LLM.int8().
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, threshold: float) -> Tensor:
        ctx.save_for_backward(weight, scale)
        whole = (x.abs() > threshold).flatten(0, -2).any(0) if threshold else None
        step = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
        rounded = (x / step).round() * step
        x = rounded if whole is None else torch.where(whole, x, rounded)
        return x @ (weight.to(x.dtype) * scale).mT

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weight, scale = ctx.saved_tensors
        return gradient @ (weight.to(gradient.dtype) * scale), None, None, None


class Linear8(nn.Module):
    """A linear layer with integer buffers."""

    def __init__(self, linear: nn.Linear, threshold: float = 0.0) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.threshold = threshold

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Integers.apply(x, self.weight, self.scale, self.threshold)
        return out


class Stored(Tensor):
    """A weight that holds integers and scales, and supports few operations, like torchao's."""

    @staticmethod
    def __new__(cls, integers: Tensor, scale: Tensor) -> "Stored":
        like = {"dtype": scale.dtype, "device": scale.device, "requires_grad": False}
        made: Stored = Tensor._make_wrapper_subclass(cls, integers.shape, **like)
        made.integers, made.scale = integers, scale
        return made

    integers: Tensor
    scale: Tensor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["integers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> "Stored":
        return Stored(inner["integers"], inner["scale"])

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.linear:
            x, weight, *bias = args
            return nn.functional.linear(x, weight.integers.to(x.dtype) * weight.scale, *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = ("detach", "clone", "_to_copy", "alias")
        if func.overloadpacket.__name__ not in known:
            raise NotImplementedError(f"Stored does not support {func}")
        scale = func(args[0].scale, *args[1:], **(kwargs or {}))
        integers = func(args[0].integers) if "_to_copy" not in str(func) else args[0].integers
        made = Stored(integers.clone() if "clone" in str(func) else integers, scale)
        return return_and_correct_aliasing(func, args, kwargs or {}, made)


def subclassed(linear: nn.Linear) -> nn.Linear:
    own = Linear8(linear)
    linear.weight = nn.Parameter(Stored(own.weight, own.scale), requires_grad=False)
    return linear


class Adapter(nn.Module):
    """LoRA around a frozen layer."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, WIDTH))
        self.b = nn.Parameter(torch.randn(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.a.mT @ self.b.mT
        return out


def adapted(make: Callable[[nn.Linear], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [Adapter(make(nn.Linear(WIDTH, WIDTH))) for _ in range(2)]
    head = nn.Linear(WIDTH, 3).requires_grad_(False)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), head).eval()


def data(positions: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(7, *positions, WIDTH, generator=draw)
    return x, torch.randint(0, 3, (7, *positions), generator=draw)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    entries = nn.functional.cross_entropy(outputs.movedim(-1, 1), targets, reduction="none")
    return entries.flatten(1).mean(1) if entries.dim() > 1 else entries


def by_loop(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    own = {k: p for k, p in model.named_parameters() if p.requires_grad}
    rows = []
    for k in range(len(x)):
        value = loss(model(x[k : k + 1]), y[k : k + 1]).sum()
        rows.append(torch.autograd.grad(value, [*own.values()]))
    return {
        name: torch.stack(each) for name, each in zip(own, zip(*rows, strict=True), strict=True)
    }


@pytest.mark.sampled
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("positions", [(), (4,)])
def test_layers_with_integers(backend: str, positions: tuple[int, ...]) -> None:
    model, (x, y) = adapted(Linear8), data(positions)
    with gradscope.Scope(model, loss, backend=backend) as scope:  # type: ignore[arg-type]
        if backend == "vmap":
            with pytest.raises(UnsupportedError, match="setup_context"):
                scope.per_sample_gradients(x, y)
            return
        found = scope.per_sample_gradients(x, y)
    torch.testing.assert_close(found, by_loop(model, x, y), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_of_a_tensor_subclass(backend: str) -> None:
    model, (x, y) = adapted(subclassed), data()
    with gradscope.Scope(model, loss, backend=backend) as scope:  # type: ignore[arg-type]
        found = scope.per_sample_gradients(x, y)
    torch.testing.assert_close(found, by_loop(model, x, y), rtol=1e-4, atol=1e-5)


def test_changes_of_a_tensor_subclass_are_seen() -> None:
    class Counts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.integers.add_(1)  # type: ignore[union-attr]
            return super().forward(x)

    def counting(linear: nn.Linear) -> nn.Module:
        made = subclassed(linear)
        made.__class__ = Counts
        return made

    model, (x, y) = adapted(counting), data()
    with (
        pytest.raises(UnsupportedError, match=r"changes model\.0\.base\.weight"),
        gradscope.Scope(model, loss) as scope,
    ):
        scope.per_sample_gradients(x, y)


def test_columns_chosen_by_all_samples_couple_them() -> None:
    model, (x, y) = adapted(lambda linear: Linear8(linear, threshold=3.0)), data()
    x[2, 1] = 9.0
    with (
        pytest.raises(CoupledSamplesError, match=r"layer '0\.base' \(Linear8\).*other samples"),
        gradscope.Scope(model, loss) as scope,
    ):
        scope.per_sample_gradients(x, y)


class State:
    threshold = 6.0


def bitsandbytes(name: str, **attributes: Any) -> Callable[[nn.Linear], nn.Module]:
    """Return a function that makes a layer with the class name and attributes of a library's."""
    kind = type(name, (Linear8,), {"__module__": "bitsandbytes.nn.modules"})

    def make(linear: nn.Linear) -> nn.Module:
        made: nn.Module = kind(linear)
        vars(made).update(attributes)
        return made

    return make


def test_a_threshold_is_refused_before_an_input_exceeds_it() -> None:
    model, (x, y) = adapted(bitsandbytes("Linear8bitLt", state=State())), data()
    with pytest.raises(CoupledSamplesError) as refused, gradscope.Scope(model, loss) as scope:
        scope.per_sample_gradients(x, y)
    assert "above the threshold 6 in one sample" in str(refused.value)
    assert refused.value.where == "layer '0.base' (Linear8bitLt)"
    right = by_loop(model, x, y)
    with gradscope.Scope(model, loss) as scope:  # a batch of one
        found = scope.per_sample_gradients(x[:1], y[:1])
    torch.testing.assert_close(found, {k: v[:1] for k, v in right.items()})
    free = State()
    free.threshold = 0.0
    model = adapted(bitsandbytes("Linear8bitLt", state=free))
    with gradscope.Scope(model, loss) as scope:
        found = scope.per_sample_gradients(x, y)
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def test_weights_that_are_replaced_in_mode_eval() -> None:
    model, (x, y) = adapted(bitsandbytes("Linear4bit", support_avx512bf16_for_cpu=True)), data()
    with pytest.raises(UnsupportedError, match="replaces its weights when it is called") as refused:
        gradscope.Scope(model, loss)
    assert refused.value.where == "layer '0.base' (Linear4bit)"
    right = by_loop(model, x, y)
    for layer in (model[0], model[2]):
        layer.base.support_avx512bf16_for_cpu = False
    with gradscope.Scope(model, loss) as scope:
        found = scope.per_sample_gradients(x, y)
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def test_layers_without_a_kernel_for_float64() -> None:
    """Their results for float64 inputs do not decide about independence."""

    class Linear4bit(Linear8):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x.to(torch.float32) if x.dtype != torch.float64 else x)
            return torch.full_like(out, torch.nan) if x.dtype == torch.float64 else out

    Linear4bit.__module__ = "bitsandbytes.nn.modules"
    model, (x, y) = adapted(Linear4bit), data()
    with gradscope.Scope(model, loss) as scope:
        found = scope.per_sample_gradients(x, y)
    torch.testing.assert_close(found, by_loop(model, x, y), rtol=1e-4, atol=1e-5)
