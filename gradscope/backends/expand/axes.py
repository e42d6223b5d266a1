"""Rules of operators that treat samples as a leading axis, as an index, or as more rows."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gradscope.backends.expand.facts import aten, each, facts_of, rules
from gradscope.backends.expand.tensor import (
    Expansion,
    PerSample,
    SharedResult,
    fold,
    is_shared,
    leaves,
    tensors_of,
    unfold,
)

_AXES = frozenset(("dim", "dims", "dim1", "dim2"))
_SIZES = frozenset(("input_size", "input_sizes"))  # shapes that start with the sample axis
_LEFT_OUT_MEANS_ALL = frozenset(
    ("sum", "mean", "amax", "amin", "var", "std", "var_mean", "std_mean", "linalg_vector_norm")
)
_PLAIN_INDEX = frozenset(("index_select", "index_add", "index_copy", "index_fill"))


@each(
    "sum.dim_IntList mean.dim amax amin prod.dim_int logsumexp any.dim "
    "any.dims all.dim all.dims argmax argmin max.dim min.dim median.dim "
    "mode kthvalue sort sort.stable topk cumsum "
    "cumprod cummax cummin logcumsumexp _softmax "
    "_safe_softmax _log_softmax _softmax_backward_data "
    "_log_softmax_backward_data var.correction std.correction var_mean.correction "
    "std_mean.correction linalg_vector_norm norm.ScalarOpt_dim gather scatter.src "
    "scatter.value scatter_add scatter_reduce.two index_select index_add "
    "index_copy flip roll glu glu_backward cat "
    "select_backward slice_backward diagonal_backward "
    "unfold_backward _fft_c2c _fft_r2c _fft_c2r"
)
def by_axes(func: Any, s: Expansion, *args: Any, **kwargs: Any) -> Any:
    """All tensors have the same number of logical axes; axes are shifted by the sample axis."""
    facts = facts_of(func)
    at = facts.axis_argument
    if 0 <= at < len(args) and not kwargs:
        found = [s.of(t) if isinstance(t, Tensor) else t for t in args]
        width = found[0].dim() - 1
        if width and all(t.dim() == width + 1 for t in found if isinstance(t, Tensor)):
            found[at] = _moved(args[at], width, facts.name)
            return NotImplemented if found[at] is None else func(*found)
    bound, index = facts.bind(args, kwargs), None
    if facts.name in _PLAIN_INDEX:
        index = bound.pop("index")
        if isinstance(index, PerSample):
            return NotImplemented
    ranks = {t.dim() for t in tensors_of(tuple(bound.values()), {})}
    width = next((len(bound[k]) for k in _SIZES & bound.keys()), max(ranks))
    if len(ranks) != 1 or width == 0:
        return NotImplemented
    for axes in _AXES & bound.keys():
        bound[axes] = _moved(bound[axes], width, facts.name)
        if bound[axes] is None:
            return NotImplemented
    for sizes in _SIZES & bound.keys():
        bound[sizes] = [s.n, *bound[sizes]]
    physical = leaves(s.of, bound)
    if index is not None:
        physical["index"] = index
    mine, others = facts.unbind(physical)
    return func(*mine, **others)


def _moved(axes: Any, width: int, name: str) -> Any:
    """Count axes from 0, shifted by the sample axis, or return None for special cases."""
    if isinstance(axes, int):
        return axes % width + 1 if -width <= axes < width else None
    if not axes:  # omitted, or []
        return list(range(1, width + 1)) if name in _LEFT_OUT_MEANS_ALL else None
    moved = [_moved(axis, width, name) for axis in axes]
    return None if None in moved else moved


@each("sum.default", aten.sum.dim_IntList)
@each("mean.default", aten.mean.dim)
@each("max.default", aten.amax.default)
@each("min.default", aten.amin.default)
@each("any.default", aten.any.dims)
@each("all.default", aten.all.dims)
def over_all(along: Any, func: Any, s: Expansion, t: Tensor, **kwargs: Any) -> Any:
    """A reduction over all axes, by the operator `along` with axes."""
    if t.dim() == 0:
        return NotImplemented
    return along(s.of(t), list(range(1, t.dim() + 1)), **kwargs)


@each(
    "constant_pad_nd tril triu linalg_inv_ex linalg_cholesky_ex linalg_solve_triangular "
    "linalg_matrix_exp linalg_qr _linalg_eigh _linalg_svd _linalg_det _linalg_slogdet "
    "linalg_lu_factor_ex _cdist_forward _cdist_backward cholesky_inverse mse_loss "
    "mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward"
)
def trailing(func: Any, s: Expansion, *args: Any, **kwargs: Any) -> Any:
    """Act on trailing axes, with any leading axes; or elementwise, without a reduction."""
    if len({t.dim() for t in tensors_of(args, kwargs)}) > 1:
        return NotImplemented
    if facts_of(func).bind(args, kwargs).get("reduction", 0) != 0:
        return NotImplemented
    mine, others = leaves(s.of, (args, kwargs))
    return func(*mine, **others)


@each("_linalg_solve_ex linalg_lu_solve")
def solve(func: Any, s: Expansion, *args: Any, **kwargs: Any) -> Any:
    """Solve systems whose matrices and right sides have equal leading axes, or one right side."""
    *matrices, right = args
    mine = [s.of(t) for t in args]
    square = mine[0].shape[:-1]
    if matrices[0].dim() != right.dim() and mine[-1].shape != square:
        return NotImplemented
    if len(mine) == 3 and (mine[1].shape != square or matrices[0].dim() != right.dim()):
        return NotImplemented
    return func(*mine, **kwargs)


@rules.register("_linalg_check_errors.default")
def check_errors(s: Expansion, info: Tensor, name: str, *, is_matrix: bool) -> None:
    """Raise if a matrix of a sample could not be decomposed."""
    aten._linalg_check_errors(s.of(info), name, is_matrix=False)


@rules.register("diag_embed.default")
def diag_embed(s: Expansion, t: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    """Write a trailing axis to the diagonal of two axes."""
    axes = _moved([dim1, dim2], t.dim() + 1, "diag_embed")
    return NotImplemented if axes is None else torch.diag_embed(s.of(t), offset, *axes)


@each(
    "reflection_pad1d reflection_pad1d_backward replication_pad1d replication_pad1d_backward "
    "col2im upsample_nearest1d upsample_linear1d",
    3,
)
@each(
    "avg_pool2d avg_pool2d_backward max_pool2d_with_indices max_pool2d_with_indices_backward "
    "_adaptive_avg_pool2d _adaptive_avg_pool2d_backward adaptive_max_pool2d "
    "adaptive_max_pool2d_backward reflection_pad2d reflection_pad2d_backward replication_pad2d "
    "replication_pad2d_backward im2col upsample_nearest2d upsample_bilinear2d upsample_bicubic2d "
    "grid_sampler_2d pixel_shuffle pixel_unshuffle",
    4,
)
@each(
    "avg_pool3d avg_pool3d_backward max_pool3d_with_indices max_pool3d_with_indices_backward",
    5,
)
def with_rows(width: int, func: Any, s: Expansion, *args: Any, **kwargs: Any) -> Any:
    """Tensors of `width` logical axes, of which the first has rows: samples are more rows."""
    found = tensors_of(args, kwargs)
    if any(t.dim() != width or t.shape[0] != found[0].shape[0] for t in found):
        return NotImplemented
    mine, others = leaves(lambda t: fold(s.of(t)), (args, kwargs))
    return leaves(lambda t: unfold(t, s.n), func(*mine, **others))


@each(
    "upsample_nearest1d_backward upsample_nearest2d_backward upsample_linear1d_backward "
    "upsample_bilinear2d_backward upsample_bicubic2d_backward"
)
def upsampled(
    func: Any, s: Expansion, grad: Tensor, size: list[int], shape: list[int], *rest: Any
) -> Any:
    """The backward pass of an upsampling; its argument `shape` is the input's, rows first."""
    return unfold(func(fold(s.of(grad)), size, [s.n * shape[0], *shape[1:]], *rest), s.n)


@each("nll_loss_forward nll_loss_backward", 2)
@each("nll_loss2d_forward nll_loss2d_backward", 4)
def likelihood(width: int, func: Any, s: Expansion, *args: Any, **kwargs: Any) -> Any:
    """Unreduced negative log-likelihoods of rows or images, with weights common to all samples."""
    facts = facts_of(func)
    bound = facts.bind(args, kwargs)
    weight = bound["weight"]
    common = weight is None or s.n == 1 or is_shared(s.of(weight))
    if bound["reduction"] != 0 or bound["self"].dim() != width or not common:
        return NotImplemented
    for name, value in bound.items():
        if isinstance(value, Tensor):
            one = name in ("weight", "total_weight")
            bound[name] = s.of(value)[0] if one else fold(s.of(value))
    mine, others = facts.unbind(bound)
    found = func(*mine, **others)
    if not isinstance(found, tuple):
        return unfold(found, s.n)
    return unfold(found[0], s.n), found[0].new_zeros(s.n)


@each("new_zeros new_ones new_empty new_full")
def new(func: Any, s: Expansion, t: Tensor, size: list[int], *args: Any, **kwargs: Any) -> Any:
    """New memory for each sample."""
    return func(s.of(t), [s.n, *size], *args, **kwargs)


@rules.register("stack.default")
def stack(s: Expansion, tensors: list[Tensor], dim: int = 0) -> Tensor:
    """Stack along a new axis, shifted by the sample axis."""
    width = tensors[0].dim() + 1
    return torch.stack([s.of(t) for t in tensors], dim % width + 1)


@rules.register("repeat.default")
def repeat(s: Expansion, t: Tensor, repeats: list[int]) -> Tensor:
    """Repeat along logical axes; new axes come right after the sample axis."""
    missing = (slice(None), *[None] * (len(repeats) - t.dim()))
    return s.of(t)[missing].repeat(1, *repeats)


@rules.register("new_empty_strided.default")
def new_empty_strided(
    s: Expansion, t: Tensor, size: list[int], stride: list[int], **kwargs: Any
) -> Tensor:
    """New memory of the given layout for each sample, one after another."""
    extent = 1 + sum((a - 1) * b for a, b in zip(size, stride, strict=True) if a)
    return s.of(t).new_empty_strided((s.n, *size), (max(extent, 1), *stride), **kwargs)


@rules.register("_pack_padded_sequence.default")
def pack(s: Expansion, x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Return the packed entries, and the batch sizes that all samples share.

    The lengths control Python code, so samples of different lengths are evaluated separately.
    """
    common = lengths.common() if isinstance(lengths, PerSample) else lengths
    packed = [aten._pack_padded_sequence(row, common, batch_first) for row in s.of(x)]
    return torch.stack([entries for entries, _ in packed]), packed[0][1].as_subclass(SharedResult)


Indices = list[Tensor | None]


def _located(s: Expansion, t: Tensor, indices: Indices) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """Return `t` (n, indexed axes, others) and its indices, or None for masks and gaps.

    Indexed axes must be adjacent and in front. Otherwise torch moves the axes of the result.
    """
    given = [i for i in indices if i is not None]
    if any(i.dtype in (torch.bool, torch.uint8) for i in given) or None in indices[: len(given)]:
        return None
    width = max(i.dim() for i in given)
    own = [_widened(s, i, width) for i in given]
    first = torch.arange(s.n, device=t.device).reshape(-1, *[1] * width)
    return s.of(t), (first, *own)


def _widened(s: Expansion, index: Tensor, width: int) -> Tensor:
    """Return the index (n, ...) with `width` axes after the sample axis."""
    return s.of(index)[(slice(None), *[None] * (width - index.dim()))]


@rules.register("index.Tensor")
def index(s: Expansion, t: Tensor, indices: Indices) -> Any:
    """Select entries by positions in the leading axes."""
    found = _located(s, t, indices)
    return NotImplemented if found is None else found[0][found[1]]


@rules.register("index_put.default")
def index_put(s: Expansion, t: Tensor, *rest: Any) -> Any:
    """Return a copy with entries replaced or added."""
    if not isinstance(t, PerSample):
        return NotImplemented
    return index_put_(s, PerSample(s.of(t).clone()), *rest)


@rules.register("index_put_.default")
@rules.register("_index_put_impl_.default")
def index_put_(
    s: Expansion,
    t: Tensor,
    indices: Indices,
    values: Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Any:
    """Replace or add entries in place."""
    found = _located(s, t, indices)
    if found is None:
        return NotImplemented
    target, own = found
    width = (own[1].dim() - 1) + t.dim() - (len(own) - 1)  # logical axes of the replaced part
    if values.dim() > width:
        return NotImplemented
    return target.index_put_(own, _widened(s, values, width), accumulate)


def _own_rows(s: Expansion, indices: Tensor, size: int) -> Tensor:
    """Shift indices (n, ...) into concatenated tables of `size` rows."""
    offsets = torch.arange(s.n, device=indices.device) * size
    return indices + offsets.reshape(-1, *[1] * (indices.dim() - 1))


@rules.register("embedding.default")
def embedding(
    s: Expansion,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Look up rows; the options only affect the backward pass."""
    table, rows = s.of(weight), s.of(indices)
    if is_shared(table):
        return F.embedding(rows, table[0])
    if rows.numel() and (rows.min() < 0 or rows.max() >= table.shape[1]):
        return NotImplemented  # torch reports the error
    return F.embedding(_own_rows(s, rows, table.shape[1]), fold(table))


@rules.register("embedding_dense_backward.default")
def embedding_backward(
    s: Expansion,
    grad: Tensor,
    indices: Tensor,
    size: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Tensor:
    """Add gradients to their rows, except at `padding_idx`."""
    values, rows = s.of(grad), s.of(indices)
    if padding_idx >= 0:
        values = values.masked_fill((rows == padding_idx).unsqueeze(-1), 0)
    flat = _own_rows(s, rows, size)
    out: Tensor = aten.embedding_dense_backward(values, flat, s.n * size, -1, scale_grad_by_freq)
    return unfold(out, s.n)


@rules.register("_sparse_coo_tensor_with_dims_and_tensors.default")
def sparse_gradient_as_dense(
    s: Expansion,
    sparse_dim: int,
    dense_dim: int,
    size: list[int],
    indices: Tensor,
    values: Tensor,
    **kwargs: Any,
) -> Tensor:
    """Return an embedding's sparse gradients in dense form."""
    rows, added = s.of(indices), s.of(values)  # (n, axes, entries), (n, entries, ...)
    own = torch.arange(s.n, device=rows.device).unsqueeze(1)
    return added.new_zeros(s.n, *size).index_put_((own, *rows.unbind(1)), added, True)
