"""What a transform is: a function of per-sample gradients, with a declared scope."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from gradscope.blocks import Block, Gradients
from gradscope.core.batch import Batch
from gradscope.core.grammar import StageFactory
from gradscope.core.registry import Registry
from gradscope.errors import SpecError
from gradscope.model.problem import Problem

Transform = Callable[[Gradients], Gradients]


class TransformScope(StrEnum):
    """How much of a sample's gradient one entry of the result depends on."""

    ELEMENTWISE = "elementwise"
    FACTOR = "one factor a sample"
    LINEAR = "linear"
    VECTOR = "whole vector"


@dataclass(frozen=True)
class Vector:
    """A stored vector in parameter space: the aggregate of a chain in a result file."""

    values: Mapping[str, Tensor]  # {name: (*shape)}, float64
    source: str = ""  # where it comes from, for messages

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
    """A transform that waits for the mean {name: (*shape)} over all samples of what reaches it."""

    given: Callable[[Mapping[str, Tensor]], Transform]


@dataclass(frozen=True)
class NeedsProblem:
    """A transform that evaluates the model again, on the batch that the gradients are from."""

    given: Callable[[Problem, Batch], Transform]


@dataclass(frozen=True)
class ReadsNorms:
    """A transform that asks the gradients it is given for their L2 norms."""

    apply: Transform

    def __call__(self, gradients: Gradients) -> Gradients:
        """Apply the transform."""
        return self.apply(gradients)


@dataclass(frozen=True)
class KnowsModel:
    """A transform that is given all parameters {name: shape} of the model before the first batch.

    An aggregate that is stored may be transformed without its model.
    """

    apply: Transform
    know: Callable[[Mapping[str, tuple[int, ...]]], None]

    def __call__(self, gradients: Gradients) -> Gradients:
        """Apply the transform."""
        return self.apply(gradients)


TransformStep = Transform | NeedsMean | NeedsProblem


class TransformFactory(StageFactory[TransformStep]):
    """A transform as it is registered or declared."""

    def __init__(
        self,
        make: Callable[..., TransformStep],
        scope: TransformScope,
        function: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(make)
        self.scope = scope  # what it promises; how the blocks are used must keep to it
        self.function = function or make  # what its author wrote


transforms: Registry[TransformFactory] = Registry("transform")


def transform(
    name: str, scope: TransformScope
) -> Callable[[Callable[..., TransformStep]], TransformFactory]:
    """Register a factory: it takes the stage's arguments and returns the transform.

    Args:
        name: The stage's name in a chain.
        scope: The declared scope; how the blocks are used must keep to it.
    """
    return lambda make: transforms.register(name)(TransformFactory(make, scope))


def widened(gradients: Gradients) -> Gradients:
    """Cast half precision to float32, in which transforms compute; leave the rest as it is."""
    halves = (torch.float16, torch.bfloat16)
    if not any(block.dtype in halves for block in gradients.values()):
        return gradients  # the very same object: its norms may be known already
    return gradients.map(lambda b: b.to(torch.float32) if b.dtype in halves else b)


def blockwise(fn: Callable[[Block], Block]) -> Transform:
    """Return the transform that applies `fn` to each parameter's block, in at least float32."""
    return lambda gradients: widened(gradients).map(fn)


def by_parts(fn: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Apply `fn` to real numbers, or to the real and imaginary parts (..., 2) of complex ones."""
    if not values.is_complex():
        return fn(values)
    return torch.view_as_complex(fn(torch.view_as_real(values)))
