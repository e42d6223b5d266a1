"""Where operations take a sample's values: which leave them in place, and whose entries are whose.

Where samples lie in an output is a fact of the program as long as every operation between it and
the losses leaves them in place, or moves them the same way in every batch. Sorting, masks, routing
and whatever is not known by name do not: there each batch must tell whose entries are whose. So an
operation that is missing from the tables below is slower, never wrong.

The gradient at an operation's input comes from its outputs alone. So where it is known which
sample owns each entry of the outputs, it follows for the inputs: most operations leave entries in
place; an index, a mask or a scatter says itself where each one goes. The rest is left unknown.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor

from gradscope.backends.hooks.graph import internals
from gradscope.backends.hooks.graph.axes import Growth, SampleAxis
from gradscope.backends.hooks.graph.trace import Output, Trace

_TO_THE_END = 2**62  # what a slice without an end is recorded with, and more than any size
_AXES = ("dim", "dims", "dim1", "dim2", "dimension", "axis")  # as operations save them
_SUFFIX = re.compile(r"Backward\d+$")  # without a number: a Function written in Python

# the same entries in the same order
VIEWS = frozenset(
    ["ReshapeAlias", "Reshape", "Squeeze", "Unflatten", "UnsafeView", "Unsqueeze", "View"]
)


@dataclass(frozen=True)
class AxisPassage:
    """A value with a sample axis, on its way through an operation."""

    name: str  # the operation's kind without "Backward0"
    saved: Callable[[str], Any]  # reads what the operation saved, by name
    saved_otherwise: Callable[
        [str], Any
    ]  # likewise, of the same operation on another number of samples
    axes: tuple[Any, ...]  # along which the operation goes, if it says so: numbers, or several
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
        one, other = _listed(self.saved(name)), _listed(self.saved_otherwise(name))
        n, m = self.ns
        return len(one) == len(other) and all(
            a * m == b * n or a == b >= _TO_THE_END for a, b in zip(one, other, strict=True)
        )


AxisTest = Callable[[AxisPassage], bool]


class Movement(Enum):
    """How the samples' entries go through an operation."""

    STAYS = "in place, or moved the same way in every batch"
    KEEPS = "in place, however many each sample has"
    MOVES = "as the batch says"


def ways(
    first: Trace, second: Trace, sizes: Mapping[Output, Growth | None]
) -> tuple[tuple[int, ...], dict[tuple[int, int], Movement]]:
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


def operation_name(kind: str) -> str:
    """Return the name by which the tables know an operation's kind."""
    return _SUFFIX.sub("", kind)


def _way(
    first: Trace, second: Trace, sizes: Mapping[Output, Growth | None], node: int, slot: int
) -> Movement:
    """Return the way of the value in `slot` through a node."""
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
    """Entry by entry, with broadcasting: axes are counted from the last."""
    return p.rank - p.axis == p.out_rank - p.out_axis


def _other_axes(p: AxisPassage) -> bool:
    """Operations along given axes, which are not that of the samples."""
    given = [a for axes in p.axes for a in _listed(axes)]
    return bool(given) and all(a % p.rank != p.axis for a in given)


def _sliced(p: AxisPassage) -> bool:
    """A part of each sample; or a part of the batch, always at the same share of it."""
    if _other_axes(p):
        return True
    if p.name == "Slice":
        return p.saved("step") == 1 and p.in_proportion("start") and p.in_proportion("end")
    return p.in_proportion("split_sizes" if p.name == "SplitWithSizes" else "split_size")


def _padded(p: AxisPassage) -> bool:
    """Filled up; the numbers come in pairs, from the last axis on."""
    at = 2 * (p.rank - 1 - p.axis)
    return p.in_place and not any(p.saved("pad")[at : at + 2])


def _product(first: int) -> Callable[[AxisPassage], bool]:
    """Matrix products whose factors are the slots `first` and the next: free axes stay."""

    def test(p: AxisPassage) -> bool:
        if p.slot not in (first, first + 1):
            return _aligned(p)
        free = p.rank - 2 if p.slot == first else p.rank - 1
        batch = p.axis < p.rank - 2
        return p.in_place and (batch or p.axis == free)

    return test


def _grouped(p: AxisPassage) -> bool:
    """Rows (or columns) in groups one after the other, each times a matrix of its own."""
    if p.saved("offs") is None:
        return _product(0)(p)
    return p.rank == p.out_rank == 2 and p.axis == p.out_axis == p.slot


def _along_channels(p: AxisPassage) -> bool:
    """Weights and biases (n · c,) for values (1, n · c, ...), as in instance normalisation."""
    return p.slot in (1, 2) and p.rank == 1 and p.out_axis == 1


def _time_major(p: AxisPassage) -> bool:
    """Recurrent layers, values (t, n, ·) and states (n, ·) or (layers, n, ·)."""
    return p.out_axis == 1 and p.axis == (0 if p.rank == 2 else 1)


def _listed(axis: Any) -> Sequence[int]:
    if axis is None:
        return ()
    return tuple(axis) if isinstance(axis, tuple | list) else (axis,)


def _named(test: AxisTest, names: str) -> dict[str, AxisTest]:
    return dict.fromkeys(names.split(), test)


_TESTS: Mapping[str, AxisTest] = {
    **_named(
        _aligned,
        "Abs Acos Acosh Add Addcdiv Addcmul Angle Asin Asinh Atan Atan2 Atanh BinaryCrossEntropy "
        "BinaryCrossEntropyWithLogits Ceil Celu Clamp ClampMax ClampMin Complex Conj ConjPhysical "
        "Copysign Cos Cosh Digamma Div Elu Erf Erfc Erfinv Exp Exp2 Expm1 Floor Fmax Fmin Fmod "
        "Frac Gelu GradscopeTanhBackward Hardshrink Hardsigmoid Hardswish Hardtanh Huber "
        "HuberLoss Hypot I0 Imag L1Loss LeakyRelu Lerp Lgamma Log Log10 Log1P Log2 LogSigmoid "
        "Logaddexp Logaddexp2 Logit MaskedFill Maximum Minimum Mish MseLoss Mul Mvlgamma NanToNum "
        "NativeDropout Neg Normal Polar Polygamma Pow PreluKernel Real Reciprocal Relu Remainder "
        "RegisterPostBackwardFunctionBackward RegisterPreBackwardFunctionBackward "  # fully_shard's
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
    **_named(lambda p: p.axis == p.out_axis == 0, "ThnnFusedLstmCell ThnnFusedGruCell"),
    **_named(lambda p: p.axis == 1 and p.out_axis == 0, "CtcLoss"),
}


class OwnersKnown(Enum):
    """What is known of an output's owners when it is not a list of them."""

    IN_ORDER = "as in the batch that was analysed"
    NOTHING = "not which"


Owners = Tensor | OwnersKnown  # (entries of the axis,) int64, -1 for those that belong to nobody


@dataclass(frozen=True, eq=False)
class OperationInput:
    """One operation in one batch, seen from one of its inputs."""

    saved: Callable[[str], Any]  # reads what the operation saved, by name
    slot: int  # which of its inputs
    shape: tuple[int, ...]  # the input's
    axis: int  # the one that holds the samples
    out_shape: tuple[int, ...]  # the output's
    out_axis: int

    @property
    def length(self) -> int:
        """The entries of the input's axis."""
        return self.shape[self.axis]


@dataclass(frozen=True, eq=False)
class OwnerTracker:
    """Follows one batch of an analysed program."""

    batch: Trace
    order: tuple[int, ...]  # of the nodes on samples, the losses' first
    ways: Mapping[tuple[int, int], Movement]  # by node and slot, of the inputs on samples
    sizes: Mapping[Output, Growth | None]
    axes: Mapping[Output, SampleAxis]  # of the batch that was analysed

    def owners(self) -> dict[Output, Owners]:
        """Return what is known of each output on samples that has a gradient."""
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
        """Return the owners of an operation's input, by those of one of its outputs."""
        if owners is OwnersKnown.IN_ORDER and way is Movement.STAYS:
            return owners
        listed, sizes = self._listed(output, owners), (self.sizes[source], self.sizes[output])
        if sizes[0] is None or sizes[1] is None:
            return OwnersKnown.NOTHING
        node = output[0]
        given, made = self.batch.shapes[source[0]][source[1]], self.batch.shapes[node][output[1]]
        if not prod(given) or not prod(made):  # no entry has a gradient from here
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
            found = None if test is None else test(step, listed)
        elif name in VIEWS:
            found = _viewed(step, listed)
        else:
            found = listed if step.length == len(listed) else None
        return OwnersKnown.NOTHING if found is None else found

    def _listed(self, output: Output, owners: Owners) -> Tensor | None:
        """Return the list of an output's owners, or None where it is not known."""
        if isinstance(owners, Tensor):
            return owners
        axis = self.axes.get(output) if owners is OwnersKnown.IN_ORDER else None
        if axis is None:
            return None
        return axis.owners(self.batch.n, self.batch.losses.device)

    def _agreed(self, output: Output, known: list[Owners]) -> Owners:
        """Return what is known of an output by way of all operations that use it."""
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
        """Return that the owners are in order where they are."""
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
    """`input[..., index, ...]`: each output entry came from the place that the index says."""
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
    """`input[..., index, ...] = values`, or added to what is there."""
    if step.slot == 0:
        return owners
    found = _places(step.saved("indices"), step.out_axis)
    if found is None or found[0].dim() != 1 or len(found[0]) != step.length:
        return None
    return owners[found[0]]


def _places(indices: tuple[Tensor | None, ...], axis: int) -> tuple[Tensor, int] | None:
    """Return the index of an axis, broadcast with those of others, and where its own axes begin."""
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
    shape = torch.broadcast_shapes(*(t.shape for t in every.values()))  # type: ignore[no-untyped-call]
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
    rest = owners.new_full((step.length - len(given),), -1)  # is not scattered at all
    return torch.cat([given, rest]) if len(rest) else given


def _column(step: OperationInput) -> Tensor | None:
    """Return the index (m,) along the samples' axis where it is the same along all others."""
    index: Tensor = step.saved("index")
    for axis in reversed(range(index.dim())):
        if index.dim() > 1 and axis != step.out_axis:
            if index.shape[axis] > 1 and index.stride(axis) != 0:
                return None
            index = index.select(axis, 0) if index.shape[axis] else index.sum(axis)
    return index.flatten()


def _returned(places: Tensor, owners: Tensor, length: int) -> Tensor | None:
    """Return whose the entries are that were taken from `places`, if each is one sample's."""
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
