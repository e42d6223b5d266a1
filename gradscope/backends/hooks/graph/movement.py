"""How samples pass through operations: which operations leave them in place, and entries' owners.

The position of samples in an output is the same in every batch, if every later operation keeps it
or changes it in the same way. Sorting, masks, routing and unknown operations do not. There, each
batch must determine the owners of entries. So an operation that is missing from the tables below is
slower, but never wrong.

The gradient at an operation's input comes only from its outputs. So the owners of the outputs'
entries determine the owners of the inputs' entries. Most operations leave entries in place. An
index, a mask or a scatter saves the position of each entry. Other owners stay unknown.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from math import gcd, prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradscope.backends.hooks.graph import internals
from gradscope.backends.hooks.graph.axes import Growth, SampleAxis
from gradscope.backends.hooks.graph.trace import Output, Trace

_TO_THE_END = 2**62  # recorded for a slice without an end; larger than any size
# names under which operations save their axes
_AXES = ("dim", "dims", "dim1", "dim2", "dimension", "axis")
_SUFFIX = re.compile(r"Backward\d+$")  # without a number: an autograd.Function written in Python

# the same entries in the same order
VIEWS = frozenset(
    ["ReshapeAlias", "Reshape", "Squeeze", "Unflatten", "UnsafeView", "Unsqueeze", "View"]
)


@dataclass(frozen=True)
class AxisPassage:
    """The passage of a value with a sample axis through an operation."""

    name: str  # the operation's kind without "Backward0"
    saved: Callable[[str], Any]  # reads a saved value of the operation by name
    saved_otherwise: Callable[[str], Any]  # the same for the pass with another number of samples
    axes: tuple[Any, ...]  # axes that the operation saved: numbers, or several numbers
    slot: int  # the value's index among the operation's inputs
    rank: int  # the number of axes of the value
    axis: int  # the sample axis of the value
    out_rank: int
    out_axis: int
    ns: tuple[int, int]  # the two numbers of samples

    @property
    def in_place(self) -> bool:
        """Whether the samples lie along the same axis before and after."""
        return self.axis == self.out_axis

    def in_proportion(self, name: str) -> bool:
        """Whether saved numbers are proportional to the number of samples."""
        one, other = _listed(self.saved(name)), _listed(self.saved_otherwise(name))
        n, m = self.ns
        return len(one) == len(other) and all(
            a * m == b * n or a == b >= _TO_THE_END for a, b in zip(one, other, strict=True)
        )


AxisTest = Callable[[AxisPassage], bool]


class Movement(Enum):
    """How the samples' entries pass through an operation."""

    STAYS = "in place, or moved the same way in every batch"
    KEEPS = "in place, however many each sample has"
    MOVES = "as the batch says"


def ways(
    first: Trace, second: Trace, sizes: Mapping[Output, Growth | None]
) -> tuple[tuple[int, ...], dict[tuple[int, int], Movement]]:
    """Return the nodes on samples, losses first, and the movement through each of their inputs.

    Args:
        first: A forward pass.
        second: The same program on another number of samples.
        sizes: The growth of each output that grows with the batch, or None if several axes grow.
    """
    # for each node, the number of its consumers that are not yet visited
    waiting = [0] * len(first.nodes)
    for edges in first.edges:
        for origin, _ in edges:
            if origin >= 0:
                waiting[origin] += 1
    order = [node for node, count in enumerate(waiting) if not count]
    for node in order:  # the list grows during the loop
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


def operation_name(kind: str) -> str:
    """Return the name of an operation's kind in the tables."""
    return _SUFFIX.sub("", kind)


def _way(
    first: Trace, second: Trace, sizes: Mapping[Output, Growth | None], node: int, slot: int
) -> Movement:
    """Return the movement of the value in `slot` through a node."""
    source, output = first.edges[node][slot]
    grown = [k for k in range(len(first.shapes[node])) if (node, k) in sizes]
    growths = [sizes[source, output], *(sizes[node, k] for k in grown)]
    known = [growth for growth in growths if growth is not None]
    test = _TESTS.get(operation_name(first.kinds[node]))
    if not grown or len(known) < len(growths) or test is None:
        return Movement.MOVES
    fixed = test(
        AxisPassage(
            name=operation_name(first.kinds[node]),
            saved=partial(internals.saved, first.nodes[node]),
            saved_otherwise=partial(internals.saved, second.nodes[node]),
            axes=tuple(internals.saved_attribute(first.nodes[node], name) for name in _AXES),
            slot=slot,
            rank=len(first.shapes[source][output]),
            axis=known[0][0],
            out_rank=len(first.shapes[node][grown[0]]),
            out_axis=known[1][0],
            ns=(first.n, second.n),
        )
    )
    if not fixed:
        return Movement.MOVES
    return (
        Movement.STAYS if all(positions is not None for _, positions in known) else Movement.KEEPS
    )


def _aligned(p: AxisPassage) -> bool:
    """Elementwise, with broadcasting: axes are counted from the last."""
    return p.rank - p.axis == p.out_rank - p.out_axis


def _other_axes(p: AxisPassage) -> bool:
    """Along given axes, which are not the sample axis."""
    given = [a for axes in p.axes for a in _listed(axes)]
    return bool(given) and all(a % p.rank != p.axis for a in given)


def _sliced(p: AxisPassage) -> bool:
    """A part of each sample; or a part of the batch, always the same share of it."""
    if _other_axes(p):
        return True
    if p.name == "Slice":
        return p.saved("step") == 1 and p.in_proportion("start") and p.in_proportion("end")
    return p.in_proportion("split_sizes" if p.name == "SplitWithSizes" else "split_size")


def _padded(p: AxisPassage) -> bool:
    """Padding; the numbers come in pairs, from the last axis on."""
    at = 2 * (p.rank - 1 - p.axis)
    return p.in_place and not any(p.saved("pad")[at : at + 2])


def _product(first: int) -> Callable[[AxisPassage], bool]:
    """Matrix products of the slots `first` and `first + 1`: free axes stay in place."""

    def test(p: AxisPassage) -> bool:
        if p.slot not in (first, first + 1):
            return _aligned(p)
        free = p.rank - 2 if p.slot == first else p.rank - 1
        batch = p.axis < p.rank - 2
        return p.in_place and (batch or p.axis == free)

    return test


def _grouped(p: AxisPassage) -> bool:
    """Rows (or columns) in consecutive groups, each multiplied by its group's matrix."""
    if p.saved("offs") is None:
        return _product(0)(p)
    return p.rank == p.out_rank == 2 and p.axis == p.out_axis == p.slot


def _along_channels(p: AxisPassage) -> bool:
    """Weights and biases (n · c,) for values (1, n · c, ...), as in instance normalisation."""
    return p.slot in (1, 2) and p.rank == 1 and p.out_axis == 1


def _time_major(p: AxisPassage) -> bool:
    """Recurrent layers: values (t, n, ·) and states (n, ·) or (layers, n, ·)."""
    return p.out_axis == 1 and p.axis == (0 if p.rank == 2 else 1)


def _listed(axis: Any) -> Sequence[int]:
    if axis is None:
        return ()
    return tuple(axis) if isinstance(axis, tuple | list) else (axis,)


def _named(test: AxisTest, names: str) -> dict[str, AxisTest]:
    return dict.fromkeys(names.split(), test)


# elementwise, with broadcasting
ELEMENTWISE = frozenset(
    _named(
        _aligned,
        "Abs Acos Acosh Add Addcdiv Addcmul Angle Asin Asinh Atan Atan2 Atanh BinaryCrossEntropy "
        "BinaryCrossEntropyWithLogits Ceil Celu Clamp ClampMax ClampMin Complex Conj ConjPhysical "
        "Copysign Cos Cosh Digamma Div Elu Erf Erfc Erfinv Exp Exp2 Expm1 Floor Fmax Fmin Fmod "
        "Frac Gelu GradscopeTanhBackward Hardshrink Hardsigmoid Hardswish Hardtanh Huber "
        "HuberLoss Hypot I0 Imag L1Loss LeakyRelu Lerp Lgamma Log Log10 Log1P Log2 LogSigmoid "
        "Logaddexp Logaddexp2 Logit MaskedFill Maximum Minimum Mish MseLoss Mul Mvlgamma NanToNum "
        "NativeDropout Neg Normal Polar Polygamma Pow PreluKernel Real Reciprocal Relu Remainder "
        # of fully_shard
        "RegisterPostBackwardFunctionBackward RegisterPreBackwardFunctionBackward "
        "Round Rsqrt Rsub Selu Sgn Sigmoid SigmoidBackward Sign Silu SiluBackward Sin Sinc Sinh "
        "SmoothL1Loss SoftMarginLoss Softplus Softshrink SpecialEntr SpecialErfcx SpecialI0E "
        "SpecialI1 SpecialI1E SpecialLogNdtr SpecialNdtri SpecialXlog1Py Sqrt Square Sub Tan Tanh "
        "TanhBackward Threshold ThresholdBackward Trunc Where Xlogy",
    )
)

_TESTS: Mapping[str, AxisTest] = {
    **dict.fromkeys(ELEMENTWISE, _aligned),
    **_named(  # views, copies, concatenations: shapes determine where entries go
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
    # with or without statistics over samples, all samples stay in place
    **_named(
        lambda p: p.in_place or _along_channels(p),
        "CudnnBatchNorm MiopenBatchNorm NativeBatchNorm",
    ),
    **_named(  # on the last two axes
        lambda p: p.in_place and p.axis < p.rank - 2,
        "Cdist LinalgCholeskyEx LinalgDet LinalgEigh LinalgInvEx LinalgMatrixExp LinalgQr "
        "LinalgSlogdet LinalgSolveEx LinalgSolveTriangular LinalgSvd TriangularSolve Tril Triu",
    ),
    **_named(  # over the last axes
        lambda p: p.in_place and p.axis < p.rank - len(p.saved("normalized_shape")),
        "FusedRmsNorm NativeLayerNorm",
    ),
    **_named(  # on a batch of images, sequences or rows along axis 0
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
    **_named(lambda p: p.axis == p.out_axis == 0, "ThnnFusedLstmCell ThnnFusedGruCell"),
    **_named(lambda p: p.axis == 1 and p.out_axis == 0, "CtcLoss"),
}


class OwnersKnown(Enum):
    """Knowledge about the owners of an output's entries, if there is no list."""

    IN_ORDER = "as in the batch that was analysed"
    NOTHING = "unknown"


Owners = Tensor | OwnersKnown  # (entries of the axis,) int64, -1 for entries without an owner


@dataclass(frozen=True, eq=False)
class OperationInput:
    """One operation in one batch, seen from one of its inputs."""

    saved: Callable[[str], Any]  # reads a saved value of the operation by name
    slot: int  # the index of the input
    shape: tuple[int, ...]  # the shape of the input
    axis: int  # the sample axis of the input
    out_shape: tuple[int, ...]  # the shape of the output
    out_axis: int

    @property
    def length(self) -> int:
        """The number of entries of the input's axis."""
        return self.shape[self.axis]


@dataclass(frozen=True, eq=False)
class OwnerTracker:
    """Tracks the owners of entries in one batch of an analysed program."""

    batch: Trace
    order: tuple[int, ...]  # the nodes on samples, losses first
    ways: Mapping[tuple[int, int], Movement]  # by node and slot, of inputs on samples
    sizes: Mapping[Output, Growth | None]
    axes: Mapping[Output, SampleAxis]  # in the analysed batch
    _read: list[int] = field(default_factory=list)  # the nodes whose indices were read

    @property
    def used_indices(self) -> bool:
        """Whether the owners depend on indices of this batch."""
        return bool(self._read)

    def owners(self) -> dict[Output, Owners]:
        """Return the known owners of each output on samples that has a gradient."""
        found: dict[Output, Owners] = dict.fromkeys(self._outputs(0), OwnersKnown.IN_ORDER)
        for node in self.order:
            arrived = {k: found[k] for k in self._outputs(node) if k in found}
            if not arrived:
                continue
            for slot, source in enumerate(self.batch.edges[node]):
                way = self.ways.get((node, slot))
                if way is None:
                    continue
                both = [self._before(k, owners, slot, source, way) for k, owners in arrived.items()]
                known = [found[source], *both] if source in found else both
                found[source] = self._simplest(source, self._agreed(source, known))
        return found

    def _outputs(self, node: int) -> Iterable[Output]:
        outputs = ((node, k) for k in range(len(self.batch.shapes[node])))
        return [output for output in outputs if output in self.sizes]

    def _before(
        self, output: Output, owners: Owners, slot: int, source: Output, way: Movement
    ) -> Owners:
        """Return the owners of an operation's input, given the owners of one of its outputs."""
        if owners is OwnersKnown.IN_ORDER and way is Movement.STAYS:
            return owners
        listed, sizes = self._listed(output, owners), (self.sizes[source], self.sizes[output])
        if sizes[0] is None or sizes[1] is None:
            return OwnersKnown.NOTHING
        node = output[0]
        given, made = self.batch.shapes[source[0]][source[1]], self.batch.shapes[node][output[1]]
        if not prod(given) or not prod(made):  # no entry gets a gradient from here
            return torch.full((given[sizes[0][0]],), -1, device=self.batch.losses.device)
        if listed is None:
            return OwnersKnown.NOTHING
        name = operation_name(self.batch.kinds[node])
        step = OperationInput(
            saved=partial(internals.saved, self.batch.nodes[node]),
            slot=slot,
            shape=given,
            axis=sizes[0][0],
            out_shape=made,
            out_axis=sizes[1][0],
        )
        if way is Movement.MOVES:
            test = _MOVES.get(name)
            found = None
            if test is not None:
                self._read.append(node)
                found = test(step, listed)
        elif name in VIEWS:
            found = _viewed(step, listed)
        else:
            found = listed if step.length == len(listed) else None
        return OwnersKnown.NOTHING if found is None else found

    def _listed(self, output: Output, owners: Owners) -> Tensor | None:
        """Return the list of an output's owners, or None if unknown."""
        if isinstance(owners, Tensor):
            return owners
        axis = self.axes.get(output) if owners is OwnersKnown.IN_ORDER else None
        if axis is None:
            return None
        return axis.owners(self.batch.n, self.batch.losses.device)

    def _agreed(self, output: Output, known: list[Owners]) -> Owners:
        """Return the owners of an output on which all operations that use it agree."""
        first, *others = known
        for other in others:
            if first is other:
                continue
            a, b = self._listed(output, first), self._listed(output, other)
            if a is None or b is None or not _compatible(a, b):
                return OwnersKnown.NOTHING
            first = torch.where(a < 0, b, a)
        return first

    def _simplest(self, output: Output, owners: Owners) -> Owners:
        """Return `IN_ORDER` if the owners are in order, else the owners."""
        if isinstance(owners, OwnersKnown):
            return owners
        usual = self._listed(output, OwnersKnown.IN_ORDER)
        in_order = usual is not None and _compatible(usual, owners)
        return OwnersKnown.IN_ORDER if in_order else owners


def _compatible(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and bool(((a == b) | (a < 0) | (b < 0)).all()))


def _viewed(step: OperationInput, owners: Tensor) -> Tensor | None:
    """The same entries in the same order, in another shape."""
    (before, length, after), (o_before, o_length, o_after) = (
        (prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :]))
        for shape, axis in ((step.shape, step.axis), (step.out_shape, step.out_axis))
    )
    front, back = gcd(before, o_before), gcd(after, o_after)  # nothing changes within these
    every = owners.view(1, -1, 1).expand(o_before // front, o_length, o_after // back)
    found = every.reshape(before // front, length, after // back).transpose(0, 1).flatten(1)
    one = found.amax(1)
    return one if _compatible(found, one.unsqueeze(1).expand_as(found)) else None


def _indexed(step: OperationInput, owners: Tensor) -> Tensor | None:
    """`input[..., index, ...]`: the index gives the source of each output entry."""
    found = _places(step.saved("indices"), step.axis)
    if found is None:  # other axes are indexed
        return owners if len(owners) == step.length else None
    places, first = found
    behind = places.dim() - 1 - (step.out_axis - first)
    if step.out_axis < first or behind < 0:
        return None
    along = owners.view(-1, *[1] * behind).expand_as(places)
    return _returned(places.flatten(), along.flatten(), step.length)


def _put(step: OperationInput, owners: Tensor) -> Tensor | None:
    """`input[..., index, ...] = values`, or the same with addition."""
    if step.slot == 0:
        return owners
    found = _places(step.saved("indices"), step.out_axis)
    if found is None or found[0].dim() != 1 or len(found[0]) != step.length:
        return None
    return owners[found[0]]


def _places(indices: tuple[Tensor | None, ...], axis: int) -> tuple[Tensor, int] | None:
    """Return the broadcast index of an axis, and the position of its axes in the result."""
    every: dict[int, Tensor] = {}
    at = 0
    for index in indices:
        if index is None:
            at += 1
            continue
        mask = index.dtype in (torch.bool, torch.uint8)
        for column in index.nonzero().unbind(1) if mask else (index,):
            every[at] = column
            at += 1
    if axis not in every:
        return None
    shape = np.broadcast_shapes(*(t.shape for t in every.values()))
    side_by_side = max(every) - min(every) == len(every) - 1
    return every[axis].expand(shape), min(every) if side_by_side else 0


def _selected(step: OperationInput, owners: Tensor) -> Tensor | None:
    """`index_select` along the samples' axis."""
    return _returned(step.saved("index").flatten(), owners, step.length)


def _gathered(step: OperationInput, owners: Tensor) -> Tensor | None:
    index = _column(step)
    return None if index is None else _returned(index, owners, step.length)


def _added(step: OperationInput, owners: Tensor) -> Tensor | None:
    """`index_add`, `index_copy` and `scatter` of the slot 1 into the slot 0."""
    index = _column(step)
    if step.slot == 0 or index is None:
        return owners if step.slot == 0 else None
    given = owners[index]
    rest = owners.new_full((step.length - len(given),), -1)  # not scattered
    return torch.cat([given, rest]) if len(rest) else given


def _column(step: OperationInput) -> Tensor | None:
    """Return the index (m,) along the sample axis, if it is the same along all other axes."""
    index: Tensor = step.saved("index")
    for axis in reversed(range(index.dim())):
        if index.dim() > 1 and axis != step.out_axis:
            if index.shape[axis] > 1 and index.stride(axis) != 0:
                return None
            index = index.select(axis, 0) if index.shape[axis] else index.sum(axis)
    return index.flatten()


def _returned(places: Tensor, owners: Tensor, length: int) -> Tensor | None:
    """Return the owners of the entries taken from `places`, if each has a single owner."""
    some = owners >= 0
    places, owners = places[some] % max(1, length), owners[some]
    found = owners.new_full((length,), -1)
    found[places] = owners
    return found if torch.equal(found[places], owners) else None


_MOVES: Mapping[str, Callable[[OperationInput, Tensor], Tensor | None]] = {
    "Index": _indexed,
    "IndexSelect": _selected,
    "Gather": _gathered,
    "IndexPut": _put,
    **dict.fromkeys(("IndexAdd", "IndexCopy", "Scatter", "ScatterAdd"), _added),
}
