"""Fused LSTM layers (oneDNN): gradients of the steps that autograd does not record.

With gates z = W x + U h' + b (h' the previous state; i, f, g, o in torch's order),

    c = σ(f) c' + σ(i) tanh(g),   h = σ(o) tanh(c),

the gradient δ of z determines every parameter's gradient: Σₜ δₜ xₜᵀ, Σₜ δₜ h'ₜᵀ and Σₜ δₜ. The
kernel saves inputs and outputs. So z of all steps takes two matrix products, and δ takes one pass
backwards through time (Hochreiter and Schmidhuber 1997; Gers et al. 2000 for the forget gate).
"""

from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.graph import Node

from gradscope.backends.hooks.graph import internals
from gradscope.backends.hooks.graph.axes import SampleAxis
from gradscope.backends.hooks.rules import Site, node_rules
from gradscope.blocks import Block, DenseBlock, OuterBlock

KIND = "MkldnnRnnLayerBackward0"
CELLS = ("ThnnFusedLstmCellBackward0", "ThnnFusedGruCellBackward0")  # one step on a GPU

_LSTM = 2  # the kernel's number for LSTM cells
_INPUT_WEIGHT, _STATE_WEIGHT, _BIASES = 1, 2, (3, 4)


def shows_its_steps(node: Node) -> bool:
    """Whether the rule below supports this fused recurrent layer."""
    return (
        internals.kind(node) == KIND
        and internals.saved(node, "mode") == _LSTM
        and not internals.saved(node, "batch_sizes")
        and internals.saved(node, "input").dtype == torch.float32
    )


@node_rules.register(KIND)
def lstm(site: Site) -> Block | None:
    """Weights and biases of one layer in one direction; the layer's tensors are (t, n, ·)."""
    known = (SampleAxis(1), SampleAxis(0), SampleAxis(0))
    if any(a is not None and a != b for a, b in zip(site.axes, known, strict=False)):
        return None
    if site.node not in site.shared:
        site.shared[site.node] = _gate_gradients(site)
    gates, before, total = site.shared[site.node]
    if site.slot == _INPUT_WEIGHT:
        return OuterBlock.matrix(gates.transpose(0, 1), site.saved("input").transpose(0, 1))
    if site.slot == _STATE_WEIGHT:
        return OuterBlock.matrix(gates.transpose(0, 1), before.transpose(0, 1))
    return DenseBlock(total) if site.slot in _BIASES else None


@node_rules.register(CELLS[0])
@node_rules.register(CELLS[1])
def cell(site: Site) -> Block | None:
    """The biases of one step in one kernel: their gradient is the gates' gradient (n, k·h)."""
    axis = next(axis for axis in site.axes if axis is not None)  # axes of h and c
    if site.slot not in _BIASES or axis.axis != 0:
        return None
    if site.node not in site.shared:
        site.shared[site.node] = internals.pull(site.node, site.gradients)
    gates = site.shared[site.node][site.slot - _BIASES[0]]  # the input's or the state's
    assert gates is not None
    return replace(site, gradients=(gates,), axes=(axis,)).reduced(gates)


def _gate_gradients(site: Site) -> tuple[Tensor, Tensor, Tensor]:
    """Return δ (t, n, 4h), the states before each step (t, n, h), and Σₜ δₜ (n, 4h)."""
    state, cell, output = (site.saved(k) for k in ("hx_", "cx_", "result0"))
    back = site.saved("reverse")
    before = torch.cat((output[1:], state[None]) if back else (state[None], output[:-1]))
    recurrent = site.saved("weight1")
    kept, g, o = _gates(site, before)
    i, f = kept.chunk(2, 2)
    order = list(range(len(output)))[:: -1 if back else 1]
    cells, earlier = _cells(i * g, f, cell, order)
    cells = cells.tanh()
    slopes = torch.stack((_at_sigmoid(g, i), _at_sigmoid(earlier, f), _at_tanh(i, g)), 2)
    through = (_at_tanh(o, cells), _at_sigmoid(cells, o))
    found = _backwards(site, (slopes, *through, f), recurrent, order)
    return found, before, found.sum(0)


def _gates(site: Site, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (σ(i), σ(f)) concatenated, tanh(g) and σ(o), each (t, n, ·), for all steps."""
    weight, recurrent = site.saved("weight0"), site.saved("weight1")
    both = torch.cat((site.saved("input"), before), 2)
    weights = torch.cat((weight, recurrent), 1)
    h = recurrent.shape[1]
    bias = site.saved("weight2") + site.saved("weight3") if site.saved("has_biases") else None
    kept, g, o = F.linear(both, weights, bias).tensor_split((2 * h, 3 * h), 2)
    return kept.sigmoid(), g.tanh(), o.sigmoid()


def _at_sigmoid(gradient: Tensor, value: Tensor) -> Tensor:
    """Return the gradient at the input of `value` = σ(·): gradient · value · (1 - value)."""
    return torch.ops.aten.sigmoid_backward(gradient, value)  # type: ignore[no-any-return]


def _at_tanh(gradient: Tensor, value: Tensor) -> Tensor:
    """Return the gradient at the input of `value` = tanh(·): gradient · (1 - value²)."""
    return torch.ops.aten.tanh_backward(gradient, value)  # type: ignore[no-any-return]


def _cells(new: Tensor, kept: Tensor, cell: Tensor, order: list[int]) -> tuple[Tensor, Tensor]:
    """Return the cell after each step and before each step, both (t, n, h)."""
    after = torch.empty_like(new)
    steps = list(zip(new.unbind(), kept.unbind(), after.unbind(), strict=True))
    first = cell
    for t in order:
        cell = torch.addcmul(steps[t][0], steps[t][1], cell, out=steps[t][2])
    forwards = order[0] <= order[-1]
    before = (first[None], after[:-1]) if forwards else (after[1:], first[None])
    return after, torch.cat(before)


def _backwards(
    site: Site, factors: tuple[Tensor, ...], recurrent: Tensor, order: list[int]
) -> Tensor:
    """Return the gradient of the gates' inputs, computed from the last step to the first."""
    slopes, to_cell, to_gate, kept = (factor.unbind() for factor in factors)
    n, hidden = to_cell[0].shape
    arriving, at_state, at_cell = site.gradients
    found = to_cell[0].new_empty(len(slopes), n, 4, hidden)
    first, last, rows = (f.unbind() for f in (found[:, :, :3], found[:, :, 3], found.flatten(2)))
    state = slopes[0].new_zeros(n, hidden) if at_state is None else at_state
    cell = slopes[0].new_zeros(n, hidden) if at_cell is None else at_cell
    outer = None if arriving is None else arriving.unbind()
    for t in reversed(order):
        if outer is not None:
            state = state + outer[t]
        cell = torch.addcmul(cell, state, to_cell[t])
        torch.mul(slopes[t], cell.unsqueeze(1), out=first[t])
        torch.mul(state, to_gate[t], out=last[t])
        state = rows[t] @ recurrent
        cell = cell * kept[t]
    return found.flatten(2)
