"""Transforms: functions of per-sample gradients, each with a declared scope."""

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
    """The part of a sample's gradient that an entry of the result depends on."""

    ELEMENTWISE = "elementwise"
    FACTOR = "one factor a sample"
    LINEAR = "linear"
    VECTOR = "whole vector"


@dataclass(frozen=True)
class Vector:
    """A stored vector in parameter space: the aggregate of a chain in a result file."""

    values: Mapping[str, Tensor]  # {name: (*shape)}, float64
    source: str = ""  # file and chain, for messages

    def of(self, gradients: Gradients) -> dict[str, Tensor]:
        """Return the vector's part for each parameter of `gradients`.

        Raises:
            SpecError: A parameter is missing, or its shape differs.
        """
        for name, block in gradients.items():
            found = self.values.get(name)
            if found is None or tuple(found.shape) != block.shape:
                stored = "no" if found is None else f"shape {tuple(found.shape)} for"
                raise SpecError(
                    f"the stored vector has {stored} {name!r}, but the gradient has shape "
                    f"{block.shape}",
                    where=self.source or None,
                )
        return {name: self.values[name].to(block.device) for name, block in gradients.items()}


@dataclass(frozen=True)
class NeedsMean:
    """A transform that first needs the mean {name: (*shape)} of its input over all samples."""

    given: Callable[[Mapping[str, Tensor]], Transform]


@dataclass(frozen=True)
class NeedsProblem:
    """A transform that evaluates the model again on the batch of the gradients."""

    given: Callable[[Problem, Batch], Transform]


@dataclass(frozen=True)
class ReadsNorms:
    """A transform that reads the L2 norms of its input gradients."""

    apply: Transform

    def __call__(self, gradients: Gradients) -> Gradients:
        """Apply the transform."""
        return self.apply(gradients)


@dataclass(frozen=True)
class KnowsModel:
    """A transform that receives all parameters {name: shape} of the model before the first batch.

    A stored aggregate can be transformed without the model.
    """

    apply: Transform
    know: Callable[[Mapping[str, tuple[int, ...]]], None]

    def __call__(self, gradients: Gradients) -> Gradients:
        """Apply the transform."""
        return self.apply(gradients)


TransformStep = Transform | NeedsMean | NeedsProblem


class TransformFactory(StageFactory[TransformStep]):
    """A factory of transforms with a scope, registered under a name or declared by a user."""

    def __init__(
        self,
        make: Callable[..., TransformStep],
        scope: TransformScope,
        function: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(make)
        self.scope = scope  # the transform must keep to it
        self.function = function or make  # the function written by the author


transforms: Registry[TransformFactory] = Registry("transform")


def transform(
    name: str, scope: TransformScope
) -> Callable[[Callable[..., TransformStep]], TransformFactory]:
    """Register a factory, which takes the stage's arguments and returns the transform.

    Args:
        name: The stage's name in a chain.
        scope: The declared scope. The transform must keep to it.
    """
    return lambda make: transforms.register(name)(TransformFactory(make, scope))


def widened(gradients: Gradients) -> Gradients:
    """Cast half precision to float32, the dtype of transforms; keep the remaining dtypes."""
    halves = (torch.float16, torch.bfloat16)
    if not any(block.dtype in halves for block in gradients.values()):
        return gradients  # the same object: its norms may already be computed
    return gradients.map(lambda b: b.to(torch.float32) if b.dtype in halves else b)


def blockwise(fn: Callable[[Block], Block]) -> Transform:
    """Return the transform that applies `fn` to each parameter's block, in at least float32."""
    return lambda gradients: widened(gradients).map(fn)


def by_parts(fn: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Apply `fn` to real numbers, or to real and imaginary parts (..., 2) of complex numbers."""
    if not values.is_complex():
        return fn(values)
    return torch.view_as_complex(fn(torch.view_as_real(values)))
