"""What a transform is: a function of per-sample gradients, with a declared scope."""

from collections.abc import Callable
from enum import StrEnum
from typing import TypeVar

from gradscope.blocks import Gradients
from gradscope.core.registry import Registry

Transform = Callable[[Gradients], Gradients]
Factory = TypeVar("Factory", bound=Callable[..., Transform])


class Scope(StrEnum):
    """How much of a sample's gradient one entry of the result depends on."""

    ELEMENTWISE = "elementwise"
    FACTOR = "one factor a sample"
    LINEAR = "linear"
    VECTOR = "whole vector"


transforms: Registry[Callable[..., Transform]] = Registry("transform")


def transform(name: str, scope: Scope) -> Callable[[Factory], Factory]:
    """Register a factory: it takes the stage's arguments and returns the transform.

    Args:
        name: The stage's name in a chain.
        scope: The declared scope; how the blocks are used must keep to it.
    """

    def add(factory: Factory) -> Factory:
        factory.scope = scope  # type: ignore[attr-defined]
        transforms.register(name)(factory)
        return factory

    return add
