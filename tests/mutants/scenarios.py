"""What a user asks for: gradients, norms, expectations, a comparison."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

import gradscope
from gradscope import Scope
from gradscope.blocks import Tuner
from gradscope.errors import RefusedError
from tests.mutants.base import Numbers
from tests.mutants.models import MODELS, Course
from tests.oracle import per_sample_gradients

Rows = Mapping[str, Tensor]
Expected = Callable[[Rows], dict[str, Tensor]]


@cache
def oracle(model: str) -> list[dict[str, Tensor]]:
    """Return {name: (n, *shape)} of each batch, one sample at a time, in float64."""
    course = MODELS[model]()
    if course.coupling == "own-loss":
        return [_own(course, *batch) for batch in course.batches]
    return [per_sample_gradients(course.model, course.loss, *batch)[1] for batch in course.batches]


def _own(course: Course, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return the gradients (n, *shape) of single losses of one joint forward pass."""
    losses = course.loss(course.model(inputs), targets)
    named = dict(course.model.named_parameters())
    rows = [torch.autograd.grad(v, list(named.values()), retain_graph=True) for v in losses]
    return dict(zip(named, map(torch.stack, zip(*rows, strict=True)), strict=True))


@dataclass(frozen=True)
class Asked:
    """Batch after batch of a model, of a bound `Scope`."""

    model: str  # of which
    backend: str = "hooks"  # by which
    what: str = "rows"  # "rows", "norms", or a chain, of which the expectation is asked
    expected: Expected | None = None  # from right rows to the right expectation
    options: tuple[tuple[str, Any], ...] = ()  # further options of the scope
    variant: str | None = None  # the kernel variant that blocks are to take where they have several

    @property
    def name(self) -> str:
        return f"{self.what} of {self.model} by {self.backend}"

    def numbers(self) -> Numbers:
        found: dict[str, np.ndarray] = {}
        with self._scope("never") as scope:
            for k in range(len(MODELS[self.model]().batches)):
                found |= {f"{k}:{name}": v for name, v in self._ask(scope, k).items()}
        return found

    def right(self) -> Numbers:
        return {
            f"{k}:{name}": value.numpy()
            for k, rows in enumerate(oracle(self.model))
            for name, value in self._right(rows).items()
        }

    def caught_by(self) -> str | None:
        asked = 0
        try:
            with self._scope("audit") as scope:
                for k in range(len(MODELS[self.model]().batches)):
                    self._ask(scope, k)
                    asked += 1
        except RefusedError:
            return "audit" if asked else "certificate"
        return None

    def by_auto(self) -> Numbers:
        """Return the answer for the first batch by whichever backend proves to be right."""
        with self._scope("audit", "auto") as scope:
            return {f"0:{name}": value for name, value in self._ask(scope, 0).items()}

    def _scope(self, verify: Any, backend: str | None = None) -> Scope:
        course = MODELS[self.model]()
        return Scope(
            course.model,
            course.loss,
            backend=backend or self.backend,
            verify=verify,
            coupling=course.coupling,  # type: ignore[arg-type]
            **dict(self.options),
        )

    def _ask(self, scope: Scope, k: int) -> Numbers:
        inputs, targets = MODELS[self.model]().batches[k]
        preferred = frozenset({self.variant}) if self.variant else frozenset[str]()
        with Tuner(preferred=preferred).active():
            if self.what == "rows":
                found = scope.per_sample_gradients(inputs, targets)
            elif self.what == "norms":
                found = scope.norms(inputs, targets, per="parameter")
            else:
                found = scope.expectation(self.what, inputs, targets)
        return {name: value.numpy() for name, value in found.items()}

    def _right(self, rows: Rows) -> dict[str, Tensor]:
        if self.what == "rows":
            return dict(rows)
        if self.what == "norms":
            return {name: g.flatten(1).norm(dim=1) for name, g in rows.items()}
        assert self.expected is not None
        return self.expected(rows)


@dataclass(frozen=True)
class Compared:
    """The gradients of a model's first batch by one backend, and what `compare` says of it."""

    model: str  # of which
    backend: str = "loop"  # by which; all others are held against the loop

    @property
    def name(self) -> str:
        return f"{self.backend} of {self.model} in a comparison"

    def numbers(self) -> Numbers:
        course = MODELS[self.model]()
        with Scope(course.model, course.loss, backend=self.backend, verify="never") as scope:
            found = scope.per_sample_gradients(*course.batches[0])
        return {name: value.numpy() for name, value in found.items()}

    def right(self) -> Numbers:
        return {name: value.numpy() for name, value in oracle(self.model)[0].items()}

    def caught_by(self) -> str | None:
        course = MODELS[self.model]()
        others = ("hooks", "vmap", "expand") if self.backend == "loop" else (self.backend,)
        held = gradscope.compare(course.model, course.loss, *course.batches[0], backends=others)
        return None if held.agrees else "compare"


def each(change: Callable[[Tensor], Tensor]) -> Expected:
    """Return the expectation that treats every parameter's rows (n, *shape) by itself."""
    return lambda rows: {name: change(g) for name, g in rows.items()}


mean = each(lambda g: g.mean(0))
second_moment = each(lambda g: g.square().mean(0))
variance = each(lambda g: g.var(0))
largest = each(lambda g: g.amax(0))
median = each(lambda g: g.quantile(0.5, 0))


def clipped(rows: Rows) -> dict[str, Tensor]:
    """The mean of gradients clipped to norm 0.5."""
    norms = torch.stack([g.flatten(1).square().sum(1) for g in rows.values()]).sum(0).sqrt()
    factors = (0.5 / norms).clamp(max=1.0)
    return {name: torch.einsum("n,n...->...", factors, g) / len(g) for name, g in rows.items()}


@dataclass(frozen=True)
class EagerlyCompiled(Asked):
    """The same by a compiled program, without the compiler's own part, which takes seconds."""

    backend: str = "vmap"
    options: tuple[tuple[str, Any], ...] = (("compile", True),)

    def _ask(self, scope: Scope, k: int) -> Numbers:
        with patch("torch.compile", partial(torch.compile, backend="eager")):
            return super()._ask(scope, k)


def cosines(rows: Rows) -> dict[str, Tensor]:
    """The mean cosine between a sample's gradient and the mean gradient."""
    flat = torch.cat([g.flatten(1) for g in rows.values()], 1)
    found = torch.nn.functional.cosine_similarity(flat, flat.mean(0, keepdim=True), dim=1)
    return {"cosine": found.mean()}


@dataclass(frozen=True)
class Streamed(Asked):
    """An expectation over a batch that is worked through two samples at a time."""

    def _ask(self, scope: Scope, k: int) -> Numbers:
        with patch("gradscope.scope._STREAMED", 2):
            return super()._ask(scope, k)


@dataclass(frozen=True)
class ExactLabels(Asked):
    """The second moment over all labels of a classifier, each with its probability."""

    options: tuple[tuple[str, Any], ...] = (("labels", "exact"),)

    def right(self) -> Numbers:
        course, found = MODELS[self.model](), {}
        for k, (inputs, _) in enumerate(course.batches):
            p = course.model(inputs).detach().softmax(1)  # (n, c)
            total: dict[str, Tensor] = {}
            for c, weights in enumerate(p.unbind(1)):
                given = torch.full((len(inputs),), c)
                rows = per_sample_gradients(course.model, course.loss, inputs, given)[1]
                for name, g in rows.items():
                    part = torch.einsum("n,n...->...", weights, g.square()) / len(g)
                    total[name] = total.get(name, torch.zeros_like(part)) + part
            found |= {f"{k}:{name}": value.numpy() for name, value in total.items()}
        return found
