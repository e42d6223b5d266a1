"""What a transform is: a function of per-sample gradients, with a declared scope."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradscope.blocks import Block, Gradients
from gradscope.core.batch import Batch
from gradscope.core.problem import Problem
from gradscope.core.registry import Registry
from gradscope.errors import SpecError

Transform = Callable[[Gradients], Gradients]
Factory = TypeVar("Factory", bound=Callable[..., Any])


class Scope(StrEnum):
    """How much of a sample's gradient one entry of the result depends on."""

    ELEMENTWISE = "elementwise"
    FACTOR = "one factor a sample"
    LINEAR = "linear"
    VECTOR = "whole vector"


@dataclass(frozen=True)
class Vector:
    """A stored vector in parameter space: the aggregate of a chain in a result file.

    Attributes:
        values: {name: (*shape)}, float64.
        source: Where it comes from, for messages.
    """

    values: Mapping[str, Tensor]
    source: str = ""

    def of(self, gradients: Gradients) -> dict[str, Tensor]:
        """Return the vector's part for each parameter of `gradients`.

        Raises:
            SpecError: A parameter is missing, or has another shape.
        """
        for name, block in gradients.items():
            found = self.values.get(name)
            if found is None or tuple(found.shape) != block.shape:
                shape = "absent" if found is None else f"of shape {tuple(found.shape)}"
                raise SpecError(
                    f"{name!r} is {shape} in the stored vector, and {block.shape} here",
                    where=self.source or None,
                )
        return {name: self.values[name].to(block.device) for name, block in gradients.items()}


@dataclass(frozen=True)
class NeedsMean:
    """A transform that waits for the mean, over all samples, of what reaches it.

    Attributes:
        given: Takes {name: (*shape)} and returns the transform.
    """

    given: Callable[[Mapping[str, Tensor]], Transform]


@dataclass(frozen=True)
class NeedsProblem:
    """A transform that evaluates the model again, such as a Hessian-vector product.

    Attributes:
        given: Takes the batch's problem and its samples and returns the transform.
    """

    given: Callable[[Problem, Batch], Transform]


def widened(gradients: Gradients) -> Gradients:
    """Cast half precision to float32, in which transforms compute; leave the rest as it is."""
    halves = (torch.float16, torch.bfloat16)
    if not any(block.dtype in halves for block in gradients.values()):
        return gradients  # the very same object: its norms may be known already
    return gradients.map(lambda b: b.to(torch.float32) if b.dtype in halves else b)


def wide(block: Block) -> Block:
    """Cast a block to float64, or to complex128 if it is complex."""
    return block.to(torch.promote_types(block.dtype, torch.float64))


def blockwise(fn: Callable[[Block], Block]) -> Transform:
    """Return the transform that applies `fn` to each parameter's block, in at least float32."""
    return lambda gradients: widened(gradients).map(fn)


def reading_norms(step: Transform) -> Transform:
    """Mark a transform that asks the gradients it is given for their norms."""
    step.reads_norms = True  # type: ignore[attr-defined]
    return step


def one_of(name: str, word: str, known: tuple[str, ...]) -> None:
    """Check an argument that is one of a few words.

    Raises:
        ValueError: It is not; the message suggests the nearest.
    """
    if word not in known:
        raise ValueError(f"{name} must be {' or '.join(known)}, not {word!r}")


Step = Transform | NeedsMean | NeedsProblem

transforms: Registry[Callable[..., Step]] = Registry("transform")


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
