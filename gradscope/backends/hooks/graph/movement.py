"""Which operations may hand a sample's values on to another place of the sample axis.

Where samples lie in an output is a fact of the program as long as every operation between it and
the losses leaves them in place, or moves them the same way in every batch. Sorting, masks, routing
and whatever is not known by name do not: there each batch must tell whose entries are whose. So an
operation that is missing from the tables below is slower, never wrong.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from gradscope.backends.hooks.graph import internals
from gradscope.backends.hooks.graph.axes import Growth
from gradscope.backends.hooks.graph.trace import Output, Trace

_TO_THE_END = 2**62  # what a slice without an end is recorded with, and more than any size
_SUFFIX = re.compile(r"Backward\d+$")  # without a number: a Function written in Python

# the same entries in the same order
VIEWS = frozenset(
    ["ReshapeAlias", "Reshape", "Squeeze", "Unflatten", "UnsafeView", "Unsqueeze", "View"]
)


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


class Way(Enum):
    """How the samples' entries go through an operation."""

    STAYS = "in place, or moved the same way in every batch"
    KEEPS = "in place, however many each sample has"
    MOVES = "as the batch says"


def ways(
    first: Trace, second: Trace, sizes: Mapping[Output, Growth | None]
) -> tuple[tuple[int, ...], dict[tuple[int, int], Way]]:
    """Return the nodes on samples, the losses first, and the way through each of their inputs.

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
    order = [node for node, count in enumerate(waiting) if not count]
    for node in order:  # grows while it is walked
        for origin, _ in first.edges[node]:
            if origin >= 0:
                waiting[origin] -= 1
                if not waiting[origin]:
                    order.append(origin)
    found = {
        (node, slot): _way(first, second, sizes, node, slot)
        for node in order
        for slot, source in enumerate(first.edges[node])
        if source in sizes
    }
    on_samples = {node for node, _ in sizes}
    return tuple(node for node in order if node in on_samples), found


def named(kind: str) -> str:
    """Return the name by which the tables know an operation's kind."""
    return _SUFFIX.sub("", kind)


def _way(
    first: Trace, second: Trace, sizes: Mapping[Output, Growth | None], node: int, slot: int
) -> Way:
    """Return the way of the value in `slot` through a node."""
    source, output = first.edges[node][slot]
    grown = [k for k in range(len(first.shapes[node])) if (node, k) in sizes]
    growths = [sizes[source, output], *(sizes[node, k] for k in grown)]
    known = [growth for growth in growths if growth is not None]
    test = _TESTS.get(named(first.kinds[node]))
    if not grown or len(known) < len(growths) or test is None:
        return Way.MOVES
    fixed = test(
        Passage(
            name=named(first.kinds[node]),
            saved=partial(internals.found, first.nodes[node]),
            again=partial(internals.found, second.nodes[node]),
            slot=slot,
            rank=len(first.shapes[source][output]),
            axis=known[0][0],
            out_rank=len(first.shapes[node][grown[0]]),
            out_axis=known[1][0],
            ns=(first.n, second.n),
        )
    )
    if not fixed:
        return Way.MOVES
    return Way.STAYS if all(positions is not None for _, positions in known) else Way.KEEPS


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
