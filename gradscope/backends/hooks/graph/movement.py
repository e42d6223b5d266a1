"""Which operations may hand a sample's values on to another place of the sample axis.

Where samples lie in an output is a fact of the program as long as every operation between it and
the losses leaves them in place, or moves them the same way in every batch. Sorting, masks, routing
and whatever is not known by name do not: there each batch must tell whose entries are whose. So an
operation that is missing from the tables below is slower, never wrong.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from gradscope.backends.hooks.graph import internals
from gradscope.backends.hooks.graph.axes import Growth
from gradscope.backends.hooks.graph.trace import Output, Trace

_TO_THE_END = 2**62  # what a slice without an end is recorded with, and more than any size
_SUFFIX = re.compile(r"Backward\d+$")  # without a number: a Function written in Python


@dataclass(frozen=True)
class Passage:
    """A value with a sample axis, on its way through an operation."""

    name: str  # the operation's kind without "Backward0"
    # reads what the operation saved, by name; None where it saved no such thing
    saved: Callable[[str], Any]
    again: Callable[[str], Any]  # likewise, of the same operation on another number of samples
    slot: int  # which of the operation's inputs the value is
    rank: int  # how many axes the value has, and the operation's output
    axis: int  # the ones that hold the samples
    out_rank: int
    out_axis: int
    ns: tuple[int, int]  # the two numbers of samples

    @property
    def in_place(self) -> bool:
        """Whether the samples lie along the same axis before and after."""
        return self.axis == self.out_axis

    def in_proportion(self, name: str) -> bool:
        """Whether numbers that the operation saved are so many times the number of samples."""
        one, other = _listed(self.saved(name)), _listed(self.again(name))
        n, m = self.ns
        return len(one) == len(other) and all(
            a * m == b * n or a == b >= _TO_THE_END for a, b in zip(one, other, strict=True)
        )


def movers(
    first: Trace, second: Trace, sizes: Mapping[Output, Growth | None]
) -> dict[int, tuple[int, ...]]:
    """Return, for each node on samples, the operations after it that may move samples.

    Args:
        first: A forward pass.
        second: The same program on another number of samples.
        sizes: For each output that grows with the batch: its growth, or None if several axes do.
    """
    waiting = [0] * len(first.nodes)  # for each node, its consumers that are still to come
    for edges in first.edges:
        for origin, _ in edges:
            if origin >= 0:
                waiting[origin] += 1
    after: dict[int, int] = {}  # a node's movers as bits
    ready = [node for node, count in enumerate(waiting) if not count]
    while ready:
        node = ready.pop()
        own = after.get(node, 0)
        for slot, source in enumerate(first.edges[node]):
            if source in sizes:
                moves = _moves(first, second, sizes, node, slot)
                after[source[0]] = after.get(source[0], 0) | own | moves << node
            if source[0] >= 0:
                waiting[source[0]] -= 1
                if not waiting[source[0]]:
                    ready.append(source[0])
    bits = {node: after.get(node, 0) for node, _ in sizes}
    return {
        node: tuple(k for k in range(mask.bit_length()) if mask >> k & 1)
        for node, mask in bits.items()
    }


def stays(trace: Trace, node: int, growth: Growth | None) -> bool:
    """Whether an operation that moves samples in other batches leaves them in place in this one.

    That is an index 0, 1, ..., n - 1 at the sample axis, which has the `growth` of its input.
    """
    if trace.kinds[node] != "IndexBackward0" or growth is None or growth[1] is None:
        return False
    axis, positions = growth
    at = 0
    for index in internals.saved(trace.nodes[node], "indices"):
        mask = index is not None and index.dtype == torch.bool
        covered = index.dim() if mask else 1
        if at <= axis < at + covered and index is not None:
            n, line = trace.n, prod(index.shape) == max(index.shape, default=1)
            if mask or positions != 1 or index.numel() != n or not line:
                return False
            return torch.equal(
                index.flatten(), torch.arange(n, device=index.device, dtype=index.dtype)
            )
        at += covered
    return True


def _moves(
    first: Trace, second: Trace, sizes: Mapping[Output, Growth | None], node: int, slot: int
) -> bool:
    """Whether a node may move the samples of the value in `slot`."""
    source, output = first.edges[node][slot]
    grown = [k for k in range(len(first.shapes[node])) if (node, k) in sizes]
    growths = [sizes[source, output], *(sizes[node, k] for k in grown)]
    if not grown or any(growth is None or growth[1] is None for growth in growths):
        return True
    axes = [growth[0] for growth in growths if growth is not None]
    name = _SUFFIX.sub("", first.kinds[node])
    test = _TESTS.get(name)
    return test is None or not test(
        Passage(
            name=name,
            saved=partial(internals.found, first.nodes[node]),
            again=partial(internals.found, second.nodes[node]),
            slot=slot,
            rank=len(first.shapes[source][output]),
            axis=axes[0],
            out_rank=len(first.shapes[node][grown[0]]),
            out_axis=axes[1],
            ns=(first.n, second.n),
        )
    )


def _aligned(p: Passage) -> bool:
    """Entry by entry, with broadcasting: axes are counted from the last."""
    return p.rank - p.axis == p.out_rank - p.out_axis


def _other_axes(p: Passage) -> bool:
    """Operations along given axes, which are not that of the samples."""
    axes = [p.saved(name) for name in ("dim", "dims", "dim1", "dim2", "dimension", "axis")]
    given = [a for axis in axes for a in _listed(axis)]
    return bool(given) and all(a % p.rank != p.axis for a in given)


def _sliced(p: Passage) -> bool:
    """A part of each sample; or a part of the batch, always at the same share of it."""
    if _other_axes(p):
        return True
    if p.name == "Slice":
        return p.saved("step") == 1 and p.in_proportion("start") and p.in_proportion("end")
    return p.in_proportion("split_sizes" if p.name == "SplitWithSizes" else "split_size")


def _padded(p: Passage) -> bool:
    """Filled up; the numbers come in pairs, from the last axis on."""
    at = 2 * (p.rank - 1 - p.axis)
    return p.in_place and not any(p.saved("pad")[at : at + 2])


def _product(first: int) -> Callable[[Passage], bool]:
    """Matrix products whose factors are the slots `first` and the next: free axes stay."""

    def test(p: Passage) -> bool:
        if p.slot not in (first, first + 1):
            return _aligned(p)
        free = p.rank - 2 if p.slot == first else p.rank - 1
        batch = p.axis < p.rank - 2
        return p.in_place and (batch or p.axis == free)

    return test


def _grouped(p: Passage) -> bool:
    """Rows (or columns) in groups one after the other, each times a matrix of its own."""
    if p.saved("offs") is None:
        return _product(0)(p)
    return p.rank == p.out_rank == 2 and p.axis == p.out_axis == p.slot


def _time_major(p: Passage) -> bool:
    """Recurrent layers, values (t, n, ·) and states (n, ·) or (layers, n, ·)."""
    return p.out_axis == 1 and p.axis == (0 if p.rank == 2 else 1)


def _listed(axis: Any) -> Sequence[int]:
    if axis is None:
        return ()
    return tuple(axis) if isinstance(axis, tuple | list) else (axis,)


def _named(test: Callable[[Passage], bool], names: str) -> dict[str, Callable[[Passage], bool]]:
    return dict.fromkeys(names.split(), test)


_TESTS: Mapping[str, Callable[[Passage], bool]] = {
    **_named(
        _aligned,
        "Abs Acos Acosh Add Addcdiv Addcmul Angle Asin Asinh Atan Atan2 Atanh BinaryCrossEntropy "
        "BinaryCrossEntropyWithLogits Ceil Celu Clamp ClampMax ClampMin Complex Conj ConjPhysical "
        "Copysign Cos Cosh Digamma Div Elu Erf Erfc Erfinv Exp Exp2 Expm1 Floor Fmax Fmin Fmod "
        "Frac Gelu GradscopeTanhBackward Hardshrink Hardsigmoid Hardswish Hardtanh Huber "
        "HuberLoss Hypot I0 Imag L1Loss LeakyRelu Lerp Lgamma Log Log10 Log1P Log2 LogSigmoid "
        "Logaddexp Logaddexp2 Logit MaskedFill Maximum Minimum Mish MseLoss Mul Mvlgamma NanToNum "
        "NativeDropout Neg Normal Polar Polygamma Pow PreluKernel Real Reciprocal Relu Remainder "
        "Round Rsqrt Rsub Selu Sgn Sigmoid SigmoidBackward Sign Silu SiluBackward Sin Sinc Sinh "
        "SmoothL1Loss SoftMarginLoss Softplus Softshrink SpecialEntr SpecialErfcx SpecialI0E "
        "SpecialI1 SpecialI1E SpecialLogNdtr SpecialNdtri SpecialXlog1Py Sqrt Square Sub Tan Tanh "
        "TanhBackward Threshold ThresholdBackward Trunc Where Xlogy",
    ),
    **_named(  # views, copies and concatenations: where entries go follows from the shapes alone
        lambda p: True,
        "Alias Cat Clone Contiguous CopyBackwards Expand Lift LiftFresh Movedim Permute "
        "PixelShuffle PixelUnshuffle Repeat Reshape ReshapeAlias Resolve Squeeze Stack T ToCopy "
        "Transpose Unflatten UnsafeView Unsqueeze View ViewAsComplex ViewAsReal",
    ),
    **_named(
        _other_axes,
        "Amax Amin Cummax Cummin Cumprod Cumsum Diagonal FftC2C FftC2R FftR2C Flip Gather Glu "
        "IndexAdd IndexCopy IndexFill IndexReduce IndexSelect Kthvalue LinalgVectorNorm "
        "LogSoftmax Logcumsumexp Logsumexp Max Mean Median Min Mode Nanmedian Nansum Norm Prod "
        "Roll SafeSoftmax Scatter ScatterAdd ScatterReduce Select Softmax Sort Std StdMean "
        "Sum Topk Unbind Unfold Var VarMean",
    ),
    **_named(_sliced, "Slice Split SplitWithSizes UnsafeSplit"),
    **_named(_padded, "ConstantPadNd"),
    # statistics are taken over the samples, or are not: in either case all stay where they are
    **_named(lambda p: p.in_place, "CudnnBatchNorm NativeBatchNorm"),
    **_named(  # on the last two axes
        lambda p: p.in_place and p.axis < p.rank - 2,
        "Cdist LinalgCholeskyEx LinalgDet LinalgEigh LinalgInvEx LinalgMatrixExp LinalgQr "
        "LinalgSlogdet LinalgSvd Tril Triu",
    ),
    **_named(  # over the last axes
        lambda p: p.in_place and p.axis < p.rank - len(p.saved("normalized_shape")),
        "FusedRmsNorm NativeLayerNorm",
    ),
    **_named(  # on a batch of images, sequences or rows, which lie along axis 0
        lambda p: p.axis == p.out_axis == 0,
        "AdaptiveAvgPool2D AdaptiveAvgPool3D AdaptiveMaxPool2D AdaptiveMaxPool3D AvgPool2D "
        "AvgPool3D ChannelShuffle Col2Im Convolution CudnnConvolution Embedding "
        "FractionalMaxPool2D FractionalMaxPool3D GradscopePoolBackward GridSampler2D "
        "GridSampler3D Im2Col MaxPool2DWithIndices MaxPool3DWithIndices MiopenConvolution "
        "MkldnnConvolution MultiMarginLoss MultilabelMarginLoss NativeGroupNorm "
        "NllLoss NllLoss2D ReflectionPad1D ReflectionPad2D ReflectionPad3D ReplicationPad1D "
        "ReplicationPad2D ReplicationPad3D ScaledDotProductCudnnAttention "
        "ScaledDotProductEfficientAttention ScaledDotProductFlashAttention "
        "ScaledDotProductFlashAttentionForCpu UpsampleBicubic2D UpsampleBilinear2D "
        "UpsampleLinear1D UpsampleNearest1D UpsampleNearest2D UpsampleNearest3D "
        "UpsampleTrilinear3D",
    ),
    **_named(_product(0), "Bmm Mm"),
    **_named(_product(1), "Addmm Baddbmm"),
    **_named(_grouped, "GroupedMm"),
    **_named(lambda p: p.slot == 0 and p.axis == p.out_axis == 0, "Mv"),
    **_named(  # linear layers, input and output (..., i) and (..., o)
        lambda p: p.in_place and p.axis < p.rank - 1,
        "GradscopeLinearBackward GradscopeWeightBackward Linear MkldnnLinear",
    ),
    **_named(_time_major, "MkldnnRnnLayer CudnnRnn MiopenRnn"),
    **_named(lambda p: p.axis == 1 and p.out_axis == 0, "CtcLoss"),
}
