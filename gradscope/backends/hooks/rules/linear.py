"""Matrix products: what linear layers, attention, recurrent layers and einsum are recorded as.

For out = left @ right the gradient of `right` is leftᴴ g and that of `left` is g rightᴴ: sums of
outer products over whichever axis carries the samples.
"""

from dataclasses import replace

from torch import Tensor

from gradscope.backends.hooks.graph import internals
from gradscope.backends.hooks.rules.base import Site, node_rules
from gradscope.blocks import Block, OuterBlock


@node_rules.register("MmBackward0")
def mm(site: Site) -> Block | None:
    """`left @ right`, both matrices."""
    return _product(site, 0, "self", "mat2")


@node_rules.register("AddmmBackward0")
def addmm(site: Site) -> Block | None:
    """β·bias + α·`left @ right`: a linear layer with bias."""
    if site.slot == 0:
        block = site.reduced(site.gradient)
        beta = site.saved("beta")
        return block if beta == 1 else site.reduced(site.gradient * beta)
    return _product(_scaled(site, "alpha"), 1, "mat1", "mat2")


@node_rules.register("BmmBackward0")
def bmm(site: Site) -> Block | None:
    """A batch of matrix products, such as stacked expert weights."""
    return _product(site, 0, "self", "mat2")


@node_rules.register("BaddbmmBackward0")
def baddbmm(site: Site) -> Block | None:
    """β·bias + α·a batch of matrix products."""
    if site.slot == 0:
        return site.reduced(site.gradient * site.saved("beta"))
    return _product(_scaled(site, "alpha"), 1, "batch1", "batch2")


@node_rules.register("MvBackward0")
def mv(site: Site) -> Block | None:
    """Rows of samples times a parameter vector: gᵢ = Σₜ bᵢₜ aᵢₜ."""
    if site.slot != 1 or site.axis.axis != 0:
        return None
    return site.reduced(site.gradient.unsqueeze(-1) * site.saved("self").conj(), site.shape)


@node_rules.register("GradscopeWeightBackward")
def large(site: Site) -> Block | None:
    """A large linear layer, see `hooks.kernels`: weight and bias apart from the input."""
    if site.slot == 1:
        return site.reduced(site.gradient)
    if site.axis.axis == site.gradient.dim() - 1:
        return None
    (inputs,) = internals.saved_tensors(site.node)
    left, right = (site.first(t).flatten(1, -2) for t in (site.gradient, inputs))
    return OuterBlock.matrix(left, right)


def _scaled(site: Site, factor: str) -> Site:
    alpha = site.saved(factor)
    return site if alpha == 1 else replace(site, gradients=(site.gradient * alpha,))


def _product(site: Site, left_slot: int, left: str, right: str) -> Block | None:
    """Return the block of one factor; the samples must lie along the other factor's free axis."""
    rows = site.gradient.dim() - 2  # the axis of out's rows; its columns are the last axis
    if site.slot == left_slot + 1 and site.axis.axis == rows:
        return _outer(site, site.saved(left).conj(), site.gradient)
    if site.slot == left_slot and site.axis.axis == rows + 1:
        return _outer(site, site.gradient.mT, site.saved(right).conj().mT)
    return None


def _outer(site: Site, left: Tensor, right: Tensor) -> OuterBlock:
    """Return Σₜ left[.., t, r] right[.., t, c]; both have the samples on the last axis but one."""
    axis = replace(site.axis, axis=left.dim() - 2)
    a, b = (axis.first(t, site.n) for t in (left, right))  # (n, [k,] t, ·)
    if a.dim() == 3:
        a, b = a.unsqueeze(1), b.unsqueeze(1)
    return OuterBlock(a, b, site.shape)
