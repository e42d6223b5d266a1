"""Node rules: fast exact code from an operation's output gradients to a parameter's block.

A rule is registered for a node type and receives a `Site`. It returns the block of the value at
`site.slot`, or None if it does not apply. Then the masked fallback is used.

This module has the rules of products, convolutions, embeddings, normalisations and broadcasts. For
out = left @ right, the gradient of `right` is leftᴴ g and the gradient of `left` is g rightᴴ. Both
are sums of outer products over the axis with the samples. autograd records linear layers,
attention, recurrent layers and einsum as such products.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradscope.backends.hooks.graph import internals
from gradscope.backends.hooks.graph.axes import Axis, OwnedAxis, SampleAxis, SpreadError
from gradscope.blocks import (
    Block,
    ConvolutionBlock,
    DenseBlock,
    Geometry,
    OuterBlock,
    ScatterBlock,
    segmented,
)
from gradscope.core.registry import Registry


@dataclass(frozen=True, eq=False)
class Site:
    """One frontier edge of one batch."""

    node: Node  # the operation on samples
    slot: int  # its parameter-only input
    n: int  # the number of samples
    shape: tuple[int, ...]  # the shape of the value at `slot`
    # the gradient of each output of the operation, or None for zero
    gradients: tuple[Tensor | None, ...]
    axes: tuple[Axis | None, ...]  # the sample axis of each output, or None
    # {node: results that a rule computes once for all edges of the node}
    shared: dict[Node, Any] = field(default_factory=dict)
    identical: bool = False  # whether all samples are copies of one sample
    # further nodes of this kind, whose values are concatenated along the positions of a sample
    others: tuple[Node, ...] = ()

    @property
    def gradient(self) -> Tensor:
        """The gradient of the first output."""
        gradient = self.gradients[0]
        assert gradient is not None  # every operation with a rule has one differentiable output
        return gradient

    @property
    def axis(self) -> Axis:
        """The sample axis of the first output."""
        axis = self.axes[0]
        assert axis is not None
        return axis

    @property
    def lies_along_several(self) -> bool:
        """Whether owners of entries lie along several axes together."""
        owned = [axis for axis in self.axes if isinstance(axis, OwnedAxis)]
        return bool(owned) and any(axis.position_axes for axis in owned)

    @property
    def present(self) -> Collection[int]:
        """The samples with an entry; in a loop over samples an operation has only one."""
        owners = [axis.owner for axis in self.axes if isinstance(axis, OwnedAxis)]
        if not owners or any(isinstance(axis, SampleAxis) for axis in self.axes):
            return range(self.n)
        return set(torch.cat(owners).tolist())

    def saved(self, name: str) -> Any:
        """Return the value that the operation saved under `name`.

        Raises:
            DifferentNodesError: The site has several nodes, whose values cannot be concatenated.
        """
        found = internals.saved(self.node, name)
        if not self.others:
            return found
        every = [found, *(internals.saved(node, name) for node in self.others)]
        if isinstance(found, Tensor):
            return self._concatenated(every)
        if any(type(value) is not type(found) or value != found for value in every):
            raise DifferentNodesError
        return found

    def _concatenated(self, every: Sequence[Any]) -> Tensor:
        """Concatenate saved tensors that have the sample axis where the gradient has it."""
        size, axis, count = self.gradient.shape, self.axis, len(every)
        assert isinstance(axis, SampleAxis)  # as `merged` makes it
        k = axis.axis
        if every[0].dim() != len(size) or every[0].shape[k] * count != size[k]:
            raise DifferentNodesError
        return along_positions(every, replace(axis, after=axis.after // count))

    def first(self, values: Tensor) -> Tensor:
        """Return a tensor shaped like the first output with the samples in front: (n, ...).

        The old sample axis moves one further and contains the positions of one sample.
        """
        return self.axis.first(values, self.n)

    def reduced(self, values: Tensor, shape: tuple[int, ...] | None = None) -> Block:
        """Sum a tensor shaped like the output, sample by sample, to the shape before broadcasting.

        Args:
            values: The gradient after broadcasting.
            shape: The shape before broadcasting; the slot's shape if not given.
        """
        shape = self.shape if shape is None else shape
        if isinstance(self.axis, OwnedAxis):
            return DenseBlock(self.axis.summed(values, shape, self.n).reshape(self.n, *self.shape))
        if self.axis == _PLAIN and values.shape[1:] == shape:  # nothing to sum
            return DenseBlock(values.reshape(self.n, *self.shape).clone())
        moved = self.first(values)
        padded = (1,) * (moved.dim() - 1 - len(shape)) + shape
        axes = [k + 1 for k, size in enumerate(padded) if size == 1]
        summed = moved.sum(axes, keepdim=True) if axes else moved
        return DenseBlock(summed.reshape(self.n, *self.shape))


_PLAIN = SampleAxis(0)


class DifferentNodesError(Exception):
    """The values of several nodes cannot be concatenated."""


def along_positions(values: Sequence[Any], axis: SampleAxis) -> Tensor:
    """Concatenate values of one shape along the positions of each sample, (.., b·n·(k·a), ..)."""
    k = axis.axis
    if len({None if t is None else (t.shape, t.dtype) for t in values}) > 1:
        raise DifferentNodesError
    if axis.after == 1:
        return torch.stack([*values], k + 1).flatten(k, k + 1)
    shape = values[0].shape
    split = [t.reshape(*shape[:k], -1, axis.after, *shape[k + 1 :]) for t in values]
    return torch.cat(split, k + 1).flatten(k, k + 1)


def merged(
    first: Site,
    nodes: Sequence[Node],
    gradients: Sequence[Tensor | None],
    axes: Sequence[Axis | None],
) -> Site | None:
    """Return one site for several nodes that use one value in the same way, or None.

    A sample has the positions of all nodes. So a weight that each step of a model uses is
    contracted once, not once a step.

    Args:
        first: The site of the first node.
        nodes: All nodes, each with a single output.
        gradients: The gradient of each output.
        axes: The sample axis of each output.
    """
    axis, given = axes[0], [t for t in gradients if t is not None]
    if not isinstance(axis, SampleAxis) or len(given) < len(nodes):
        return None
    if any(other != axis for other in axes):
        return None
    try:
        whole = along_positions(given, axis)
    except DifferentNodesError:
        return None
    several = replace(axis, after=axis.after * len(nodes))
    return replace(first, gradients=(whole,), axes=(several,), others=tuple(nodes[1:]))


Rule = Callable[[Site], Block | None]

node_rules: Registry[Rule] = Registry("node rule")


def masked(site: Site) -> Block:
    """Evaluate any operation once per sample, with all other samples masked.

    The backward of an operation is linear in the output gradient, so this is exact for every
    operation. It takes one backward call of the operation per sample.

    Raises:
        SpreadError: A row is not finite. Another sample may be the cause, since 0 · NaN is NaN.
        DifferentNodesError: The site has several nodes.
    """
    if site.others:
        raise DifferentNodesError
    rows: list[Tensor | None] = []
    present = site.present
    for sample in range(site.n):
        if sample not in present:
            rows.append(None)
            continue
        only = tuple(
            g if g is None or axis is None else axis.only(g, site.n, sample)
            for g, axis in zip(site.gradients, site.axes, strict=True)
        )
        rows.append(internals.pull(site.node, only)[site.slot])
    some = next(g for g in (*rows, *site.gradients) if g is not None)
    values = torch.zeros(site.n, *site.shape, dtype=some.dtype, device=some.device)  # never sparse
    for sample, row in enumerate(rows):
        if row is not None:
            values[sample] = _own(site, row)
    if site.n == 1 or bool(values.isfinite().all()):
        return DenseBlock(values)
    if not site.identical:
        raise SpreadError
    every = internals.pull(site.node, site.gradients)[site.slot]
    assert every is not None  # true because a row is not finite
    return DenseBlock((_own(site, every) / site.n).expand_as(values))


def _own(site: Site, gradient: Tensor) -> Tensor:
    """Return the gradient for an operation's input in the input's shape, as autograd does."""
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.sum_to_size(site.shape)  # undo the operation's broadcast


@node_rules.register("MmBackward0")
@node_rules.register("BmmBackward0")
def product(site: Site) -> Block | None:
    """`self @ mat2`: matrices, or batches of matrices such as stacked expert weights."""
    return _product(site, 0, "self", "mat2")


@node_rules.register("AddmmBackward0")
def addmm(site: Site) -> Block | None:
    """β·bias + α·`mat1 @ mat2`: a linear layer with bias."""
    return _plus_product(site, "mat1", "mat2")


@node_rules.register("BaddbmmBackward0")
def baddbmm(site: Site) -> Block | None:
    """β·bias + α·`batch1 @ batch2`: a batch of matrix products with bias."""
    return _plus_product(site, "batch1", "batch2")


def _plus_product(site: Site, left: str, right: str) -> Block | None:
    scaled = _scaled(site, "beta" if site.slot == 0 else "alpha")
    return scaled.reduced(scaled.gradient) if site.slot == 0 else _product(scaled, 1, left, right)


def _scaled(site: Site, factor: str) -> Site:
    by = site.saved(factor)
    return site if by == 1 else replace(site, gradients=(site.gradient * by,))


def _product(site: Site, left_slot: int, left: str, right: str) -> Block | None:
    """Return the block of one factor, if the samples lie along the other factor's free axis."""
    rows = site.gradient.dim() - 2  # the axis of the rows of `out`; the columns are the last axis
    if site.slot == left_slot + 1 and site.axis.axis == rows:
        return _outer(site, site.saved(left).conj(), site.gradient, right_is_gradient=True)
    if site.slot == left_slot and site.axis.axis == rows + 1:
        return _outer(site, site.gradient.mT, site.saved(right).conj().mT)
    return None


@node_rules.register("GroupedMmBackward0")
def grouped_product(site: Site) -> Block | None:
    """Rows in consecutive groups, each multiplied by its group's matrix: a mixture of experts.

    The groups end at the offsets. Rows after the last offset belong to no group.
    """
    ends, gradient = site.saved("offs"), site.gradient
    if ends is None:
        return _product(site, 0, "self", "mat2")
    if (gradient.dim(), len(site.shape), site.axis.axis) != (2, 3, 1 - site.slot):
        return None
    if site.slot == 1:
        left, right = site.saved("self"), gradient
    else:
        left, right = gradient.mT, site.saved("mat2").mT
    place = torch.arange(len(left), device=ends.device, dtype=ends.dtype)
    group = torch.searchsorted(ends, place, right=True)
    return _segments(site, left, right, group, len(ends), right_is_gradient=site.slot == 1)


def _segments(
    site: Site, left: Tensor, right: Tensor, group: Tensor, groups: int, *, right_is_gradient: bool
) -> Block:
    """Return Σₘ left[m, r] right[m, c] over the rows m of each sample and group."""
    owner = site.axis.owners(site.n, left.device)
    kept = (owner >= 0) & (group < groups)
    rows: tuple[Tensor, ...] = (left, right, owner, group)
    if not bool(kept.all()):
        rows = tuple(t[kept] for t in rows)
    return segmented(rows, (site.n, groups), site.shape, right_is_gradient)


def _outer(site: Site, left: Tensor, right: Tensor, *, right_is_gradient: bool = False) -> Block:
    """Return Σₜ left[.., t, r] right[.., t, c]; the samples lie on the second last axis of both.

    The output gradient is `right` if `right_is_gradient`, else `left`.
    """
    if isinstance(site.axis, OwnedAxis) and left.dim() == 2 and not site.axis.is_even(site.n):
        alike = torch.zeros(len(left), dtype=torch.int64, device=left.device)
        return _segments(site, left, right, alike, 1, right_is_gradient=right_is_gradient)
    axis, rows = site.axis, left.dim() - 2
    axis = axis if axis.axis == rows else replace(axis, axis=rows)
    a, b = axis.first(left, site.n), axis.first(right, site.n)  # (n, [k,] t, ·)
    if a.dim() == 3:
        a, b = a.unsqueeze(1), b.unsqueeze(1)
    return OuterBlock(a, b, site.shape, right_is_gradient)


@node_rules.register("LinearBackward0")
def linear(site: Site) -> Block | None:
    """A linear layer as one operation (on Apple's MPS): input (..., i), output (..., o)."""
    gradient = site.gradient
    if site.axis.axis == gradient.dim() - 1:
        return None
    if site.slot == 2:
        return site.reduced(gradient)
    inputs = site.saved("input").conj()
    if site.slot == 0 or gradient.dim() == 2:
        return _outer(site, gradient, inputs) if site.slot == 1 else None
    rows, columns = (site.first(t).flatten(1, -2) for t in (gradient, inputs))
    return OuterBlock.matrix(rows, columns)


@node_rules.register("MvBackward0")
def mv(site: Site) -> Block | None:
    """Rows of samples times a parameter vector: gᵢ = Σₜ bᵢₜ aᵢₜ."""
    if site.slot != 1 or site.axis.axis != 0:
        return None
    return site.reduced(site.gradient.unsqueeze(-1) * site.saved("self").conj(), site.shape)


@node_rules.register("ConvolutionBackward0")
def convolution(site: Site) -> Block | None:
    """Kernel and bias of a (transposed) convolution; the samples lie along axis 0."""
    gradient = site.gradient
    if site.axis.axis != 0 or gradient.dim() == 2 or site.slot == 0:
        return None
    if site.slot == 2:
        return _channels(site, gradient)
    walk = {}
    for name in ("stride", "padding", "dilation", "output_padding"):
        values = tuple(int(v) for v in site.saved(name))
        walk[name] = values * (gradient.dim() - 2) if len(values) == 1 else values
    groups, transposed = site.saved("groups"), site.saved("transposed")
    geometry = Geometry(**walk, groups=groups, transposed=transposed)
    if isinstance(site.axis, OwnedAxis) and site.axis.position_axes:
        return _pixels(site, site.axis, geometry)
    inputs = site.first(site.saved("input").conj())
    return ConvolutionBlock(inputs, site.first(gradient), site.shape, geometry)


def _pixels(site: Site, axis: OwnedAxis, geometry: Geometry) -> Block | None:
    """Return a kernel's gradients for token rows, each of which owns some output pixels."""
    if geometry.transposed or 1 in axis.position_axes:
        return None
    given = site.saved("input").conj().unsqueeze(1), site.gradient.unsqueeze(1)
    whole = ConvolutionBlock(*given, site.shape, geometry).outer  # (entries, k, pixels, ·)
    space = site.gradient.shape[2:]
    left, right = (
        axis.first(t.reshape(*t.shape[:2], *space, -1), site.n).transpose(1, 2).flatten(2, -2)
        for t in (whole.left, whole.right)
    )
    return OuterBlock(left, right, site.shape)


@node_rules.register("EmbeddingBackward0")
def embedding(site: Site) -> Block | None:
    """`weight[indices]`; the gradient of the padding row is zero.

    With scale_grad_by_freq, a row's gradient is divided by its number of lookups in the sample, as
    in a batch of one.
    """
    index = site.first(site.saved("indices")).flatten(1)
    rows = site.first(site.gradient).flatten(1, -2)
    if site.saved("scale_grad_by_freq"):
        again = index.unsqueeze(1) == index.unsqueeze(2)  # (n, t, t)
        rows = rows / again.sum(2).unsqueeze(-1).to(rows.dtype)
    return scatter(index, rows, site.shape[0], site.saved("padding_idx"))


def scatter(index: Tensor, rows: Tensor, size: int, padding: int) -> ScatterBlock:
    """Return the block of a table with `size` rows, without the padding row."""
    if padding >= 0:
        rows = rows.masked_fill((index == padding).unsqueeze(-1), 0)
    return ScatterBlock(index, rows, size)


@node_rules.register("IndexBackward0")
def index(site: Site) -> Block | None:
    """`table[i, j, ...]` with index tensors for the first axes: a lookup of rows."""
    indices, shape = site.saved("indices"), site.shape
    if any(t is None or t.dtype in (torch.bool, torch.uint8) for t in indices):
        return None
    sizes = shape[: len(indices)]
    place: Any = 0
    for t, size in zip(indices, sizes, strict=True):
        place = place * size + t.to(site.gradient.device) % size
    if site.axis.axis >= place.dim() or not prod(sizes):
        return None
    rows = site.gradient.reshape(*place.shape, prod(shape[len(indices) :]))
    own, values = site.first(place).flatten(1), site.first(rows).flatten(1, -2)
    found = ScatterBlock(own, values, prod(sizes))
    return found if found.shape == shape else found.reshape(shape)


@node_rules.register("IndexSelectBackward0")
def index_select(site: Site) -> Block | None:
    """`table.index_select(0, index)`."""
    rows, axis = site.gradient, site.axis
    if site.saved("dim") % max(1, rows.dim()) or axis.axis or not rows.dim() or not site.shape[0]:
        return None
    own = site.first(site.saved("index").reshape(-1)).flatten(1)
    values = site.first(rows.reshape(len(rows), -1)).flatten(1, -2)
    found = ScatterBlock(own, values, site.shape[0])
    return found if found.shape == site.shape else found.reshape(site.shape)


def elementwise(site: Site) -> Block | None:
    """Evaluate an elementwise operation once for all samples.

    A node called directly does not undo the broadcast of its inputs: each entry of the result
    belongs to the same entry of the output.
    """
    if len(site.gradients) > 1 or site.others:
        return None
    found = internals.pull(site.node, site.gradients)[site.slot]
    if found is None or found.is_sparse or found.shape != site.gradient.shape:
        return None
    return site.reduced(found)


@node_rules.register("NativeLayerNormBackward0")
def layer_norm(site: Site) -> Block:
    """Layer normalisation over the last axes: gᵢ = Σₜ bᵢₜ · x̂ᵢₜ and Σₜ bᵢₜ."""
    if site.slot == 2:
        return site.reduced(site.gradient)
    standard = (site.saved("input") - site.saved("result1")).mul_(site.saved("result2"))
    return site.reduced(standard.mul_(site.gradient))


@node_rules.register("FusedRmsNormBackward0")
def rms_norm(site: Site) -> Block:
    """RMSNorm over the last axes as one GPU kernel: gᵢ = Σₜ bᵢₜ · xᵢₜ / rms(xᵢₜ)."""
    return site.reduced(site.gradient * (site.saved("input") * site.saved("result1")))


@node_rules.register("NativeGroupNormBackward0")
def group_norm(site: Site) -> Block:
    """Group normalisation: channels on axis 1, statistics for each sample and group.

    Σₜ b (x − mean) rstd = rstd (Σₜ b x − mean Σₜ b), the form that torch's kernel uses.
    """
    if site.slot == 2:
        return _channels(site, site.gradient)
    values, groups = site.saved("input"), site.saved("group")
    rows, values = (t.reshape(*t.shape[:2], -1) for t in (site.gradient, values))
    product = torch.linalg.vecdot(values, rows).unflatten(1, (groups, -1))
    shift = rows.sum(2).unflatten(1, (groups, -1))
    mean, rstd = (site.saved(k).reshape(-1, groups, 1) for k in ("result1", "result2"))
    return _channels(site, ((product - mean * shift) * rstd).flatten(1))


@node_rules.register("NativeBatchNormBackward0")
@node_rules.register("CudnnBatchNormBackward0")
@node_rules.register("MiopenBatchNormBackward0")
def batch_norm(site: Site) -> Block | None:
    """Batch normalisation with running statistics, which are constants."""
    if site.saved("training") or site.axis.axis == 1:
        return None
    if site.slot == 2:
        return _channels(site, site.gradient)
    values = site.saved("input")
    mean, variance = (
        site.saved(k).reshape(-1, *[1] * (values.dim() - 2))
        for k in ("running_mean", "running_var")
    )
    own = internals.kind(site.node) == "NativeBatchNormBackward0"
    standard = (values - mean) * torch.rsqrt(variance + site.saved("eps" if own else "epsilon"))
    return _channels(site, site.gradient * standard)


def _channels(site: Site, values: Tensor) -> Block:
    """Sum (N, c, ...) to (c,) for each sample."""
    return site.reduced(values, (*site.shape, *[1] * (values.dim() - 2)))


@node_rules.register("AddBackward0")
@node_rules.register("SubBackward0")
def add(site: Site) -> Block:
    """`self` ± α·`other`."""
    factor = 1 if site.slot == 0 else site.saved("alpha")
    if site.slot == 1 and internals.kind(site.node) == "SubBackward0":
        factor = -factor
    return site.reduced(site.gradient if factor == 1 else site.gradient * factor)


@node_rules.register("MulBackward0")
def mul(site: Site) -> Block:
    """`self` · `other`."""
    factor = site.saved("other" if site.slot == 0 else "self")
    return site.reduced(site.gradient * factor.conj())


@node_rules.register("DivBackward0")
def div(site: Site) -> Block:
    """`self` / `other`; the derivative by `other` is −self / other²."""
    other = site.saved("other")
    if site.slot == 0:
        return site.reduced(site.gradient / other.conj())
    ratio = -site.saved("self") / (other * other)
    return site.reduced(site.gradient * ratio.conj())


@node_rules.register("ExpandBackward0")
def expand(site: Site) -> Block:
    """A parameter expanded over the samples, such as a class token."""
    return site.reduced(site.gradient)
