"""How a case is written: a seeded builder of a model, a loss and a batch, in float64."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn

N = 5  # samples; no other size in a case is 5 unless the case is about that


class Setup(NamedTuple):
    """What a case consists of."""

    model: nn.Module
    loss: Callable[..., Tensor]
    inputs: Any
    targets: Any


@dataclass(frozen=True)
class Case:
    """A named problem, built anew and identical at every call of `build`.

    Attributes:
        name: Its name in the table.
        build: Returns the setup, in float64.
        coupled: Whether samples of a batch depend on each other.
    """

    name: str
    build: Callable[[], Setup]
    coupled: bool = False


CASES: dict[str, Case] = {}


@contextmanager
def seeded(name: str, dtype: torch.dtype = torch.float64) -> Iterator[None]:
    """Let tensors be of that dtype and random numbers the same whenever the name is."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(crc32(name.encode()))
            yield
    finally:
        torch.set_default_dtype(before)


def case(
    *, coupled: bool = False, train: bool = False
) -> Callable[[Callable[[], Setup]], Callable[[], Setup]]:
    """File a builder under its own name; the model is put in eval mode unless `train`."""

    def add(builder: Callable[[], Setup]) -> Callable[[], Setup]:
        name = builder.__name__

        def build() -> Setup:
            with seeded(name):
                setup = builder()
            setup.model.train(train)
            return setup

        assert name not in CASES, name
        CASES[name] = Case(name, build, coupled)
        return builder

    return add


class Net(nn.Module):
    """A module given by its members and `forward(net, *args)`; plain tensors become buffers."""

    def __init__(self, forward: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        for name, member in members.items():
            if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)
        self._program = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._program(self, *args, **kwargs)


def smooth(outputs: Tensor, targets: Tensor) -> Tensor:
    """A smooth loss (n,) in which no two entries of the outputs (n, ...) count alike."""
    gap = (outputs - targets).reshape(len(outputs), -1)
    weight = torch.arange(1, gap.shape[1] + 1, dtype=gap.dtype, device=gap.device) / gap.shape[1]
    return (weight * (gap.sin() + 0.3 * gap.square())).sum(1)


def regression(model: nn.Module, inputs: Any) -> Setup:
    """Fit random targets of the outputs' shape with the smooth loss."""
    with torch.no_grad():
        if isinstance(inputs, dict):
            outputs = model(**inputs)
        else:
            outputs = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    return Setup(model, smooth, inputs, torch.randn(outputs.shape))


Make = Callable[[], tuple[dict[str, Any], Any]]


def program(make: Make, **options: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """File a forward pass under its own name; `make` returns what the model has, and the inputs."""

    def add(forward: Callable[..., Any]) -> Callable[..., Any]:
        def build() -> Setup:
            members, inputs = make()
            return regression(Net(forward, **members), inputs)

        build.__name__ = forward.__name__
        case(**options)(build)
        return forward

    return add


def param(*shape: int, scale: float = 0.7) -> nn.Parameter:
    """A random parameter."""
    return nn.Parameter(scale * torch.randn(*shape))
