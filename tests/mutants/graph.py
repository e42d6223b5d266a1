"""Defects in what the `hooks` backend finds out about a program, and carries along."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradscope.backends import hooks as backend
from gradscope.backends.hooks import pullback
from gradscope.backends.hooks.graph import analysis, movement
from gradscope.backends.hooks.graph.axes import OwnedAxis, SampleAxis
from gradscope.backends.hooks.graph.trace import Trace
from gradscope.blocks import Block, Evaluation, Gradients
from gradscope.core.batch import Batch
from tests.mutants.base import Install, after, around, before, entry, mutant
from tests.mutants.scenarios import Asked

_ROOM = "hooks, graph"


def _caught(name: str, defect: str, model: str, guard: str, install: Install) -> None:
    mutant(name, _ROOM, defect, Asked(model), guard, install)


def _other_major(axis: SampleAxis, values: Tensor, n: int) -> tuple[Any, ...]:
    return SampleAxis(axis.axis, axis.after, axis.before), values, n


_caught(
    "time-major read as batch-major",
    "of an axis that holds samples and time the two change places",
    "time_major",
    "certificate",
    around(SampleAxis, "first", before(_other_major)),
)
_caught(
    "stale layout",
    "where samples lie in a sorted batch is taken from the first batch",
    "by_length",
    "audit",
    around(analysis, "stays", lambda original: lambda *args: True),
)
_caught(
    "unknown mover",
    "an operation that moves samples counts as one that leaves them in place",
    "by_length",
    "audit",
    around(movement, "_moves", lambda original: lambda *args: False),
)
_caught(
    "identity for marks",
    "marks are read as if every entry lay at its own sample's place",
    "flipped",
    "certificate",
    around(
        analysis,
        "owned",
        after(lambda axis, *_: OwnedAxis(axis.axis, torch.arange(len(axis.owner)))),
    ),
)


def _first_lost(axis: OwnedAxis, values: Tensor, n: int) -> tuple[Any, ...]:
    return OwnedAxis(axis.axis, axis.owner.masked_fill(axis.owner == 0, -1)), values, n


_caught(
    "sample 0 is nobody",
    "entries of sample 0 count as entries without an owner",
    "flipped",
    "certificate",
    around(OwnedAxis, "first", before(_first_lost)),
)
_caught(
    "mean instead of sum",
    "gradients are those of the mean loss, 1/n of what they should be",
    "mlp",
    "certificate",
    around(Trace, "gradients", before(lambda t, outputs, w: (t, outputs, w / len(w)))),
)


def _unturned(original: Any) -> Any:
    return lambda trace, node, block: block


_caught(
    "transpose forgotten",
    "the gradient of a square weight is not transposed back",
    "square",
    "certificate",
    entry(pullback._STEPS, "TBackward0", _unturned),
)


def _last_use(found: dict[str, list[Block]], *_: Any) -> dict[str, list[Block]]:
    return {name: blocks[-1:] for name, blocks in found.items()}


_caught(
    "one use of two",
    "of a weight that is used twice only one use counts",
    "tied",
    "certificate",
    around(backend, "pull_back", after(_last_use)),
)
_caught(
    "frontier with a gap",
    "one of the edges from parameters to samples is left out",
    "mlp",
    "certificate",
    around(backend, "analyse", after(lambda a, *_: replace(a, frontier=a.frontier[1:]))),
)


def _exchanged(found: Gradients, *_: Any) -> Gradients:
    order = torch.arange(found.n)
    order[:2] = order[:2].flip(0)
    return found.select(order)


_caught(
    "two rows swapped",
    "the first two samples have each other's gradient",
    "mlp",
    "certificate",
    around(backend._Program, "_gradients", after(_exchanged)),
)
_caught(
    "samples reversed in a product",
    "a batched product through a softmax comes back in the reverse order",
    "mixture",
    "certificate",
    around(
        pullback,
        "_vector_jacobian",
        after(lambda found, *_: [None if g is None else g.flip(0) for g in found]),
    ),
)


def _doubled(found: Evaluation, *_: Any) -> Evaluation:
    return replace(found, gradients=found.gradients.scale(torch.full((1,), 2.0)))


_caught(
    "single sample counted twice",
    "a batch of one, which is evaluated twice over, gives twice the gradient",
    "single_samples",
    "audit",
    around(backend._Program, "evaluate_one", after(_doubled)),
)


def _remembering(original: Any) -> Any:
    known: dict[int, Evaluation] = {}

    def evaluate(self: Any, batch: Batch) -> Evaluation:
        return known.setdefault(len(batch), original(self, batch))

    return evaluate


_caught(
    "stale answer",
    "a batch gets the answer of an earlier one of its size",
    "same_size",
    "audit",
    around(backend._Program, "evaluate", _remembering),
)


def _kept_inputs(original: Any) -> Any:
    known: dict[tuple[int, int, str], Any] = {}

    def parts(self: Any, recorded: Any, found: Any) -> Any:
        blocks = original(self, recorded, found)
        return known.setdefault((id(self), recorded.n, "parts"), blocks)

    return parts


_caught(
    "stale factors",
    "losses are the batch's own, but its gradients are contracted with what an earlier one saved",
    "same_size",
    "audit",
    around(backend._Program, "_parts", _kept_inputs),
)
