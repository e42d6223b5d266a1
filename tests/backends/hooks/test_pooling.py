"""Max pooling by another kernel: the same numbers and the same places, to the last bit."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from gradscope.backends.hooks.kernels import FasterKernels, pooling
from tests import oracle
from tests.backends.outcomes import mistakes, run
from tests.cases import Setup

TAKEN: list[tuple[int, ...]] = []


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    original = pooling._pays

    def pays(x: Tensor) -> bool:
        found = original(x)
        TAKEN.extend([tuple(x.shape)] * found)
        return found

    monkeypatch.setattr(pooling, "_pays", pays)
    TAKEN.clear()
    yield


WINDOWS: dict[str, dict[str, Any]] = {
    "2": {"kernel_size": 2},
    "2 by 1": {"kernel_size": 2, "stride": 1},
    "3 by 2, padded": {"kernel_size": 3, "stride": 2, "padding": 1},
    "oblong": {"kernel_size": (3, 2), "stride": (1, 2), "padding": (1, 0)},
    "dilated": {"kernel_size": 2, "dilation": 2, "stride": 1},
    "rounded up": {"kernel_size": 3, "stride": 2, "ceil_mode": True},
}


def _images(kind: str) -> Tensor:
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_same_bits(window: dict[str, Any], kind: str, dtype: torch.dtype) -> None:
    x = _images(kind).to(dtype)
    found = []
    for mode in (False, True):
        leaf = x.clone().requires_grad_()
        if mode:
            with FasterKernels():
                y = F.max_pool2d(leaf, **window)
        else:
            y = F.max_pool2d(leaf, **window)
        weights = torch.arange(y.numel(), dtype=dtype).view_as(y)
        (slope,) = torch.autograd.grad((y.nan_to_num() * weights).sum(), leaf)
        found.append((y.detach(), slope))
    assert len(TAKEN) == 1
    for ours, right in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, right, rtol=0, atol=0, equal_nan=True)


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "module": nn.MaxPool2d(2),
    "positional": lambda x: F.max_pool2d(x, 2, 2, 0, 1, False),
    "by torch": lambda x: torch.max_pool2d(x, [2, 2]),
    "written into": lambda x: F.max_pool2d(x, 2).mul_(2),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_calls(call: Callable[[Tensor], Tensor]) -> None:
    x = _images("normal")[:1, :8, :6, :6].contiguous().double().requires_grad_()
    with FasterKernels():
        y = call(x)
    assert len(TAKEN) == 1
    torch.testing.assert_close(y, call(x), rtol=0, atol=0)
    assert torch.autograd.gradcheck(lambda x: _inside(call, x), x)
    assert torch.autograd.gradgradcheck(lambda x: _inside(call, x.sin()), x)


def _inside(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with FasterKernels():
        return call(x)


OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "channels last": lambda x: F.max_pool2d(x.contiguous(memory_format=torch.channels_last), 2),
    "with places": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "one image": lambda x: F.max_pool2d(x[0], 2),
    "few channels": lambda x: F.max_pool2d(x[:, :3].contiguous(), 2),
    "no gradient": lambda x: F.max_pool2d(x.detach(), 2),
    "vectorised": lambda x: torch.func.vmap(lambda image: F.max_pool2d(image[None], 2))(x),
}


@pytest.mark.parametrize("call", OTHERS.values(), ids=OTHERS.keys())
def test_what_is_left_alone(call: Callable[[Tensor], Any]) -> None:
    x = _images("normal").requires_grad_()
    with FasterKernels():
        found = call(x)
    right = call(x)
    assert not TAKEN
    for a, b in zip(*((t if isinstance(t, tuple) else (t,)) for t in (found, right)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_gradients_of_a_model() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.MaxPool2d(2, 1), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 2),
        nn.MaxPool2d(3, 2, 1), nn.Flatten(), nn.LazyLinear(3),
    ).double()  # fmt: skip
    x, y = torch.randn(5, 2, 12, 11).double(), torch.randint(3, (5,))
    model(x)
    setup = Setup(model, nn.CrossEntropyLoss(reduction="none"), x, y)
    evaluation = run("hooks", setup)
    assert TAKEN
    assert not mistakes(evaluation, *oracle.per_sample_gradients(*setup))
