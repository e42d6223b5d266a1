"""What a user asks for of a model: gradients, norms, expectations, a comparison."""

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
from tests.mutants.models import Course, course
from tests.oracle import per_sample_gradients

Rows = Mapping[str, Tensor]  # {name: (n, *shape)}


@cache
def _oracle(model: str, labels: str) -> list[Rows]:
    """Return the rows of each batch, one sample at a time, in float64."""
    given = course(model)
    if labels == "exact":
        return [_over_labels(given, inputs) for inputs, _ in given.batches]
    if given.coupling == "own-loss":
        return [_own(given, *batch) for batch in given.batches]
    return [per_sample_gradients(given.model, given.loss, *batch)[1] for batch in given.batches]


def _own(given: Course, inputs: Tensor, targets: Tensor) -> Rows:
    """Return the gradients of single losses of one joint forward pass."""
    losses = given.loss(given.model(inputs), targets)
    named = dict(given.model.named_parameters())
    rows = [torch.autograd.grad(v, list(named.values()), retain_graph=True) for v in losses]
    return dict(zip(named, map(torch.stack, zip(*rows, strict=True)), strict=True))


def _over_labels(given: Course, inputs: Tensor) -> Rows:
    """Return what has the second moment over all labels: √p g of each label, as more samples."""
    p = given.model(inputs).detach().softmax(1)  # (n, c)
    every = (torch.full((len(inputs),), c) for c in range(p.shape[1]))
    found = [per_sample_gradients(given.model, given.loss, inputs, one)[1] for one in every]
    weighted = [
        {k: torch.einsum("n,n...->n...", w, g) for k, g in rows.items()}
        for w, rows in zip((p.shape[1] * p).sqrt().unbind(1), found, strict=True)
    ]
    return {k: torch.cat([rows[k] for rows in weighted]) for k in weighted[0]}


def _each(change: Callable[[Tensor], Tensor]) -> Callable[[Rows], Rows]:
    """Return the answer that treats every parameter's rows by itself."""
    return lambda rows: {name: change(g) for name, g in rows.items()}


def _clipped(rows: Rows) -> Rows:
    norms = torch.stack([g.flatten(1).square().sum(1) for g in rows.values()]).sum(0).sqrt()
    factors = (0.5 / norms).clamp(max=1.0)
    return {name: torch.einsum("n,n...->...", factors, g) / len(g) for name, g in rows.items()}


def _cosines(rows: Rows) -> Rows:
    flat = torch.cat([g.flatten(1) for g in rows.values()], 1)
    found = torch.nn.functional.cosine_similarity(flat, flat.mean(0, keepdim=True), dim=1)
    return {"cosine": found.mean()}


EXPECTED: dict[str, Callable[[Rows], Rows]] = {  # what is asked, and what it is of right rows
    "rows": dict,
    "norms": _each(lambda g: g.flatten(1).norm(dim=1)),
    "mean": _each(lambda g: g.mean(0)),
    "mean:standard_error=true": _each(lambda g: g.mean(0)),
    "second_moment": _each(lambda g: g.square().mean(0)),
    "var": _each(lambda g: g.var(0)),
    "center | square | mean": _each(lambda g: g.var(0, correction=0)),
    "max": _each(lambda g: g.amax(0)),
    "quantile:q=0.5": _each(lambda g: g.quantile(0.5, 0)),
    "clip:max_norm=0.5 | mean": _clipped,
    "cosine:to=mean | mean": _cosines,
}


@dataclass(frozen=True)
class Asked:
    """Batch after batch of a model, of a `Scope`."""

    model: str
    what: str = "rows"  # a key of `EXPECTED`
    backend: str = "hooks"
    variant: str | None = None  # the kernel variant that blocks are to take where they have several
    streamed: int = 512  # samples of a batch that are worked through at a time
    labels: str = "data"
    compile: bool = False  # without the compiler's own part, which takes seconds

    def numbers(self) -> Numbers:
        with self._scope("never") as scope:
            return self._named(self._ask(scope, k) for k in range(len(course(self.model).batches)))

    def right(self) -> Numbers:
        return self._named(map(EXPECTED[self.what], _oracle(self.model, self.labels)))

    def caught_by(self) -> str | None:
        if self.backend == "loop":  # the reference of all others
            given, others = course(self.model), ("hooks", "vmap", "expand")
            held = gradscope.compare(given.model, given.loss, *given.batches[0], backends=others)
            return None if held.agrees else "compare"
        asked = 0
        try:
            with self._scope("audit") as scope:
                for k in range(len(course(self.model).batches)):
                    self._ask(scope, k)
                    asked += 1
        except RefusedError:
            return "audit" if asked else "certificate"
        return None

    def by_auto(self) -> Numbers:
        """Return the answer for the first batch by whichever backend proves to be right."""
        with self._scope("audit", backend="auto") as scope:
            return self._named([self._ask(scope, 0)])

    def _scope(self, verify: Any, **options: Any) -> Scope:
        given = course(self.model)
        own = {k: getattr(self, k) for k in ("backend", "labels", "compile")}
        options = {**own, "coupling": given.coupling, **options}
        return Scope(given.model, given.loss, verify=verify, **options)

    def _ask(self, scope: Scope, k: int) -> Rows:
        batch = course(self.model).batches[k]
        preferred = frozenset({self.variant}) if self.variant else frozenset[str]()
        with (
            Tuner(preferred=preferred).active(),
            patch("gradscope.scope._STREAMED", self.streamed),
            patch("torch.compile", partial(torch.compile, backend="eager")),
        ):
            if self.what == "rows":
                return scope.per_sample_gradients(*batch)
            if self.what == "norms":
                found: Rows = scope.norms(*batch, per="parameter")
                return found
            return scope.expectation(self.what, *batch)

    def _named(self, answers: Any) -> dict[str, np.ndarray]:
        return {f"{k}:{name}": v.numpy() for k, a in enumerate(answers) for name, v in a.items()}
