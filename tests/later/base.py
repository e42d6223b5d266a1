"""How a case is written: a seeded builder of a model, a loss and several batches, in float64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.zoo.base import Net, seeded, smooth

__all__ = ["CASES", "Case", "Net", "Stage", "case", "program", "rows", "smooth"]

Batch = tuple[Any, Any]


class Stage(NamedTuple):
    """What a case consists of.

    Attributes:
        model: A model.
        loss: A loss.
        batches: The first is harmless.
        between: Called with the model and the number of a batch before that.
    """

    model: nn.Module
    loss: Callable[..., Tensor]
    batches: list[Batch]
    between: Callable[[nn.Module, int], None] = lambda model, k: None


@dataclass(frozen=True)
class Case:
    """A named course of events.

    Attributes:
        name: Its name.
        kind: "moves" (samples are independent, and to be answered right), "coupled" (those of the
            last batch are not), "carries" (the answer depends on earlier calls, unless the state
            is put back), "backward" (something is done to gradients) or "user" (the caller changes
            the model between two calls).
        build: Returns it, anew and identical at every call.
    """

    name: str
    kind: str
    build: Callable[[], Stage]


CASES: dict[str, Case] = {}


def case(kind: str) -> Callable[[Callable[[], Stage]], Callable[[], Stage]]:
    """File a builder under its own name."""

    def add(builder: Callable[[], Stage]) -> Callable[[], Stage]:
        name = builder.__name__

        def build() -> Stage:
            with seeded(name):
                stage = builder()
            stage.model.eval()
            return stage

        assert name not in CASES, name
        CASES[name] = Case(name, kind, build)
        return builder

    return add


Make = Callable[[], tuple[dict[str, Any], list[Batch]]]


def program(kind: str, make: Make) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """File a forward pass under its own name; `make` returns what the model has, and batches."""

    def add(forward: Callable[..., Any]) -> Callable[..., Any]:
        def build() -> Stage:
            members, batches = make()
            return Stage(Net(forward, **members), smooth, batches)

        build.__name__ = forward.__name__
        case(kind)(build)
        return forward

    return add


def rows(*sizes: int, width: int = 4, out: int = 3) -> list[Batch]:
    """Random inputs (n, width) and targets (n, out), a batch of each size."""
    return [(torch.randn(n, width), torch.randn(n, out)) for n in sizes]
