"""Defects in the backends beside `hooks`, in own losses and in compiled programs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradscope.backends import expand, loop, vmap
from gradscope.backends.compiled import Program
from gradscope.backends.expand import evaluation, indexing, matmul, rules
from gradscope.backends.expand.tensor import PerSample, Samples
from gradscope.core.batch import Batch
from tests.mutants.base import Install, after, around, before, entry, mutant
from tests.mutants.scenarios import Asked, Compared, EagerlyCompiled


def _caught(name: str, room: str, defect: str, model: str, install: Install) -> None:
    mutant(name, room, defect, Asked(model, backend=room), "certificate", install)


# vmap


def _other_targets(problem: Any, values: Any, batch: Batch) -> tuple[Any, ...]:
    return problem, values, replace(batch, targets=batch.targets.roll(1, 0))


_caught(
    "targets of the neighbour",
    "vmap",
    "inputs and targets are vectorised one sample apart",
    "mlp",
    around(vmap, "per_sample", before(_other_targets)),
)


def _axes_exchanged(found: tuple[dict[str, Tensor], Tensor], *_: Any) -> Any:
    gradients, losses = found
    return {k: g.transpose(0, 1).contiguous() for k, g in gradients.items()}, losses


_caught(
    "sample axis second",
    "vmap",
    "the sample axis comes back behind a parameter's first axis, of the same size",
    "four",
    around(vmap, "per_sample", after(_axes_exchanged)),
)


def _gru_without_reset(
    x: Tensor, h: Tensor, w_hh: Tensor, b_hh: Tensor, w_hr: None
) -> tuple[Tensor]:
    (r, z, n), (hr, hz, hn) = x.chunk(3, -1), torch.nn.functional.linear(h, w_hh).chunk(3, -1)
    br, bz, bn = b_hh.chunk(3)
    new = (n + bn + (r + hr + br).sigmoid() * hn).tanh()  # the reset gate is to act on bn, too
    return (new + (z + hz + bz).sigmoid() * (h - new),)


_caught(
    "bias outside the reset gate",
    "vmap",
    "the steps of a GRU add a bias after the reset gate, as other definitions of it do",
    "gru",
    lambda patch: patch.setitem(vmap.STEPS, torch.gru, _gru_without_reset),
)

# expand

_caught(
    "one table for all samples",
    "expand",
    "tokens are added into the first sample's table, for want of an offset",
    "tokens",
    around(indexing, "_own_rows", lambda original: lambda s, indices, size: indices),
)


def _kernels_reversed(found: tuple[Any, Tensor | None, Any], *_: Any) -> Any:
    to_x, to_weight, to_bias = found
    return to_x, None if to_weight is None else to_weight.flip(0), to_bias


_caught(
    "groups read backwards",
    "expand",
    "the samples that a convolution took as groups are put back in the reverse order",
    "cnn",
    entry(rules, "convolution_backward.default", after(_kernels_reversed)),
)


def _unscaled(
    s: Samples, grad: Tensor, x: Tensor, shape: Any, mean: Tensor, rstd: Tensor, *more: Any
) -> tuple[Any, ...]:
    ones = PerSample(torch.ones_like(s.of(rstd)))
    return s, grad, x, shape, mean, ones, *more


_caught(
    "layer norm, deviation forgotten",
    "expand",
    "a layer norm's backward pass takes every standard deviation to be 1",
    "tokens",
    entry(rules, "native_layer_norm_backward.default", before(_unscaled)),
)
_caught(
    "stack off by one",
    "expand",
    "in a stack of products each result is that of the next matrix",
    "experts",
    around(matmul, "batched", after(lambda found, *_: found.roll(1, 1))),
)
_caught(
    "one sample's bias",
    "expand",
    "a convolution's bias is that of the first sample's pixels for all",
    "cnn",
    entry(
        rules,
        "convolution_backward.default",
        after(lambda f, *_: (f[0], f[1], None if f[2] is None else f[2][:1].expand_as(f[2]))),
    ),
)


def _shifted(found: tuple[Tensor, dict[str, Tensor]], *_: Any) -> Any:
    return found[0], {name: g.roll(1, 0) for name, g in found[1].items()}


_caught(
    "rows shifted",
    "expand",
    "every sample has the gradient of the one before it",
    "mlp",
    around(evaluation, "evaluated", after(_shifted), expand),
)


# loop: the oracle of the others


def _accumulating(original: Callable[..., Any]) -> Callable[..., Any]:
    held: dict[str, Tensor] = {}

    def one_sample(problem: Any, sample: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        loss, gradients = original(problem, sample)
        for name, g in gradients.items():
            first = int(sample.index[0]) == 0
            held[name] = g if first else held[name] + g
        return loss, dict(held)

    return one_sample


def _compared(name: str, defect: str, install: Install) -> None:
    mutant(name, "loop", defect, Compared("mlp"), "compare", install)


_compared(
    "gradients accumulate",
    "gradients are not set to zero between two samples",
    around(loop, "one_sample", _accumulating),
)
_compared(
    "first of two losses",
    "every sample is evaluated with the targets of the first",
    around(
        loop,
        "one_sample",
        lambda original: (
            lambda problem, sample: original(
                problem, replace(sample, targets=sample.targets * 0 + 1)
            )
        ),
    ),
)

# own losses

mutant(
    "neighbour's own loss",
    "own losses",
    "of a joint forward pass each sample gets the gradient of its neighbour's loss",
    Asked("coupled", backend="vmap"),
    "certificate",
    around(
        loop,
        "_pulled",
        lambda original: (
            lambda problem, losses, picks, batched=False: original(
                problem, losses, picks.roll(1, 0) if batched else picks, batched=batched
            )
        ),
    ),
)


def _cut(original: Callable[..., Any]) -> Callable[..., Any]:
    def pulled(problem: Any, losses: Tensor, picks: Tensor, batched: bool = False) -> list[Tensor]:
        found: list[Tensor] = original(problem, losses, picks, batched=batched)
        return [g - g.mean(0, keepdim=True) for g in found] if batched else found

    return pulled


mutant(
    "centred rows",
    "own losses",
    "what all samples have in common is taken off their gradients",
    Asked("coupled", backend="vmap"),
    "certificate",
    around(loop, "_pulled", _cut),
)

# compiled programs


def _with_first_targets(patch: Any) -> None:
    made, called = Program.__init__, Program.__call__
    targets: dict[int, Any] = {}

    def init(self: Program, problem: Any, batch: Batch, *more: Any) -> None:
        targets[id(self)] = batch.targets
        made(self, problem, batch, *more)

    def call(self: Program, batch: Batch) -> Any:
        return called(self, replace(batch, targets=targets[id(self)]))

    patch.setattr(Program, "__init__", init)
    patch.setattr(Program, "__call__", call)


mutant(
    "stale constant",
    "compiled",
    "a program holds the targets of the batch that it was compiled on",
    EagerlyCompiled("same_size"),
    "audit",
    _with_first_targets,
)
