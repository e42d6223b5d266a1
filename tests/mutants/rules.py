"""Defects in the rules of the `hooks` backend: from a layer's output gradient to a block."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradscope.backends.hooks.graph.axes import SampleAxis
from gradscope.backends.hooks.rules import layers, recurrent
from gradscope.backends.hooks.rules.base import Site, node_rules
from gradscope.blocks import Block, ConvolutionBlock, DenseBlock, OuterBlock
from tests.mutants.base import Install, after, around, before, entry, mutant
from tests.mutants.scenarios import Asked, mean

_ROOM = "hooks, rules"


def _caught(name: str, defect: str, model: str, install: Install) -> None:
    mutant(name, _ROOM, defect, Asked(model), "certificate", install)


def _swapped(block: OuterBlock, *_: Any) -> OuterBlock:
    return OuterBlock(block.right, block.left, block.shape)


def _rolled(block: OuterBlock, *_: Any) -> OuterBlock:
    return replace(block, left=block.left.roll(1, 1))


_caught(
    "product with a sign",
    "the weight's gradient of a linear layer has the wrong sign",
    "mlp",
    around(layers, "_outer", after(lambda block, *_: replace(block, left=-block.left))),
)
_caught(
    "transposed weight",
    "the factors of a square weight's gradient change places",
    "square",
    around(layers, "_outer", after(_swapped)),
)
_caught(
    "factor alpha dropped",
    "the factor of a product in addmm is not applied to the weight's gradient",
    "scaled_product",
    around(layers, "_scaled", lambda original: lambda site, name: site),
)
_caught(
    "wrong expert",
    "stacked weights get the gradient of their neighbour in the stack",
    "experts",
    around(layers, "_outer", after(_rolled)),
)


def _bias_at_one_position(original: Any) -> Any:
    def rule(site: Site) -> Block:
        if site.slot == 0:
            return DenseBlock(site.first(site.gradient)[:, 0])
        found: Block = original(site)
        return found

    return rule


_caught(
    "bias at one position",
    "a bias is not summed over the positions of a sequence",
    "positions",
    entry(node_rules, "AddmmBackward0", _bias_at_one_position),
)


def _times_itself(site: Site) -> Block:
    return site.reduced(site.gradient * site.saved("self" if site.slot == 0 else "other"))


_caught(
    "product rule, wrong operand",
    "a scale's gradient is multiplied by the scale, not by what it scales",
    "elementwise",
    entry(node_rules, "MulBackward0", lambda original: _times_itself),
)
_caught(
    "quotient rule, sign",
    "the derivative by a denominator has lost its minus",
    "elementwise",
    entry(
        node_rules,
        "DivBackward0",
        after(
            lambda block, site: DenseBlock(-block.dense()) if site.slot == 1 else block,
        ),
    ),
)
_caught(
    "difference, factor",
    "alpha of a subtraction is not applied",
    "elementwise",
    entry(
        node_rules,
        "SubBackward0",
        lambda original: lambda site: site.reduced(site.gradient * (1 if site.slot == 0 else -1)),
    ),
)
mutant(
    "kernel axes swapped",
    _ROOM,
    "height and width of a convolution's kernel change places in sums over samples",
    Asked("cnn", what="mean", expected=mean),
    "certificate",
    around(ConvolutionBlock, "_kernel", after(lambda found, *_: found.mT.contiguous())),
)


def _next_group(original: Any) -> Any:
    def rule(site: Site) -> Block | None:
        block = original(site)
        if not isinstance(block, ConvolutionBlock):
            found: Block | None = block
            return found
        step = block.inputs.shape[2] // block.geometry.groups
        return replace(block, inputs=block.inputs.roll(step, 2))

    return rule


_caught(
    "group off by one",
    "a grouped convolution's kernel meets the channels of the next group",
    "cnn",
    entry(node_rules, "ConvolutionBackward0", _next_group),
)


def _bias_of_one_pixel(original: Any) -> Any:
    def rule(site: Site) -> Block | None:
        if site.slot == 2:
            return DenseBlock(site.first(site.gradient)[:, 0, :, 0, 0])
        found: Block | None = original(site)
        return found

    return rule


_caught(
    "bias of one pixel",
    "a convolution's bias is not summed over the pixels",
    "cnn",
    entry(node_rules, "ConvolutionBackward0", _bias_of_one_pixel),
)


def _once(index: Tensor, rows: Tensor, size: int, padding: int) -> tuple[Any, ...]:
    same = (index.unsqueeze(1) == index.unsqueeze(2)).tril(-1).any(2)  # (n, t): came before
    return index, rows.masked_fill(same.unsqueeze(-1), 0.0), size, padding


_caught(
    "repeated token dropped",
    "of a token that comes twice in a sample, only the first counts",
    "tokens",
    around(layers, "scatter", before(_once)),
)
_caught(
    "padding counted",
    "the padding row of an embedding gets a gradient",
    "tokens",
    around(layers, "scatter", before(lambda i, rows, size, _: (i, rows, size, -1))),
)


def _without_mean(original: Any) -> Any:
    def rule(site: Site) -> Block:
        if site.slot == 2:
            found: Block = original(site)
            return found
        return site.reduced(site.gradient * site.saved("input") * site.saved("result2"))

    return rule


_caught(
    "layer norm, mean forgotten",
    "the scale of a layer norm meets inputs that are not centred",
    "tokens",
    entry(node_rules, "NativeLayerNormBackward0", _without_mean),
)
_caught(
    "layer norm, scale and shift",
    "the scale of a layer norm gets the gradient of the shift",
    "tokens",
    entry(node_rules, "NativeLayerNormBackward0", before(lambda site: (replace(site, slot=2),))),
)


def _statistics_of_next_group(original: Any) -> Any:
    class Rolled(Site):
        def saved(self, name: str) -> Any:
            found = super().saved(name)
            return found.roll(1, -1) if name == "result1" else found

    return lambda site: original(Rolled(**vars(site)))


_caught(
    "group norm, next group's mean",
    "channels are centred by the mean of the next group",
    "cnn",
    entry(node_rules, "NativeGroupNormBackward0", _statistics_of_next_group),
)
_caught(
    "batch norm without eps",
    "the running variance is used without its eps",
    "running",
    entry(
        node_rules,
        "NativeBatchNormBackward0",
        lambda original: lambda site: original(_WithoutEps(**vars(site))),
    ),
)


class _WithoutEps(Site):
    def saved(self, name: str) -> Any:
        return 0.0 if name == "eps" else super().saved(name)


def _unshifted(found: tuple[Tensor, Tensor, Tensor], site: Site) -> tuple[Tensor, Tensor, Tensor]:
    gates, _, total = found
    return gates, site.saved("result0"), total


_caught(
    "recurrent step off by one",
    "recurrent weights meet the state after a step, not the one before it",
    "lstm",
    around(recurrent, "_gate_gradients", after(_unshifted)),
)


def _forgetful(site: Site, factors: Any, weight: Tensor, order: list[int]) -> tuple[Any, ...]:
    *others, kept = factors
    return site, (*others, torch.zeros_like(kept)), weight, order


_caught(
    "cell's carry lost",
    "the gradient of an LSTM's cell does not go on to the step before",
    "lstm",
    around(recurrent, "_backwards", before(_forgetful)),
)
_caught(
    "slope of the wrong function",
    "the candidate gate of an LSTM has the slope of a sigmoid",
    "lstm",
    around(recurrent, "_at_tanh", lambda original: recurrent._at_sigmoid),
)
_caught(
    "mask off by one",
    "an operation without a rule keeps the gradient of the next sample",
    "powers",
    around(SampleAxis, "only", before(lambda self, v, n, i: (self, v, n, (i + 1) % n))),
)
