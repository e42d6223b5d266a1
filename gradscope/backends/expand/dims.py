"""Operators that take axes: the same operator, its axes counted past the sample axis."""

from typing import Any

from torch import Tensor

from gradscope.backends.expand.facts import aten, facts_of
from gradscope.backends.expand.rules import rules
from gradscope.backends.expand.tensor import PerSample, Samples, leaves, tensors_of

_AXES = frozenset(("dim", "dims", "dim1", "dim2"))
_SIZES = frozenset(("input_size", "input_sizes"))  # shapes that start with the sample axis
_LEFT_OUT_MEANS_ALL = frozenset(
    ("sum", "mean", "amax", "amin", "var", "std", "var_mean", "std_mean", "linalg_vector_norm")
)
_PLAIN_INDEX = frozenset(("index_select", "index_add", "index_copy", "index_fill"))

# All tensors of a call have the same number of logical axes.
_BY_AXES = (
    "sum.dim_IntList",
    "mean.dim",
    "amax.default",
    "amin.default",
    "prod.dim_int",
    "logsumexp.default",
    "any.dim",
    "any.dims",
    "all.dim",
    "all.dims",
    "argmax.default",
    "argmin.default",
    "max.dim",
    "min.dim",
    "median.dim",
    "mode.default",
    "kthvalue.default",
    "sort.default",
    "sort.stable",
    "topk.default",
    "cumsum.default",
    "cumprod.default",
    "cummax.default",
    "cummin.default",
    "logcumsumexp.default",
    "_softmax.default",
    "_safe_softmax.default",
    "_log_softmax.default",
    "_softmax_backward_data.default",
    "_log_softmax_backward_data.default",
    "var.correction",
    "std.correction",
    "var_mean.correction",
    "std_mean.correction",
    "linalg_vector_norm.default",
    "norm.ScalarOpt_dim",
    "gather.default",
    "scatter.src",
    "scatter.value",
    "scatter_add.default",
    "scatter_reduce.two",
    "index_select.default",
    "index_add.default",
    "index_copy.default",
    "flip.default",
    "roll.default",
    "glu.default",
    "glu_backward.default",
    "cat.default",
    "select_backward.default",
    "slice_backward.default",
    "diagonal_backward.default",
    "unfold_backward.default",
    "_fft_c2c.default",
    "_fft_r2c.default",
    "_fft_c2r.default",
)

# They act on trailing axes, whatever stands before.
_TRAILING = (
    "constant_pad_nd.default",
    "tril.default",
    "triu.default",
    "linalg_inv_ex.default",
    "linalg_cholesky_ex.default",
    "linalg_solve_triangular.default",
    "linalg_matrix_exp.default",
    "linalg_qr.default",
    "_linalg_eigh.default",
    "_linalg_svd.default",
    "_linalg_det.default",
    "_linalg_slogdet.default",
    "cholesky_inverse.default",
)

# Reductions over everything, and the same over given axes.
_OVER_ALL = {
    "sum.default": aten.sum.dim_IntList,
    "mean.default": aten.mean.dim,
    "max.default": aten.amax.default,
    "min.default": aten.amin.default,
    "any.default": aten.any.dims,
    "all.default": aten.all.dims,
}


def _by_axes(key: str) -> None:
    name, _, overload = key.partition(".")
    func = getattr(getattr(aten, name), overload)
    facts = facts_of(func)

    @rules.register(key)
    def rule(s: Samples, *args: Any, **kwargs: Any) -> Any:
        bound = facts.bind(args, kwargs)
        if name in _PLAIN_INDEX:
            index = bound.pop("index")
            if isinstance(index, PerSample):
                return NotImplemented
        ranks = {t.dim() for t in tensors_of(tuple(bound.values()), {})}
        width = next((len(bound[k]) for k in _SIZES & bound.keys()), max(ranks))
        if len(ranks) != 1 or width == 0:
            return NotImplemented
        for axes in _AXES & bound.keys():
            bound[axes] = _moved(bound[axes], width, name)
            if bound[axes] is None:
                return NotImplemented
        for sizes in _SIZES & bound.keys():
            bound[sizes] = [s.n, *bound[sizes]]
        physical = leaves(s.of, bound)
        if name in _PLAIN_INDEX:
            physical["index"] = index
        mine, named = facts.unbind(physical)
        return func(*mine, **named)


def _moved(axes: Any, width: int, name: str) -> Any:
    """Count axes from 0 with the sample axis before them, or return None for what is special."""
    if isinstance(axes, int):
        return axes % width + 1 if -width <= axes < width else None
    if not axes:  # left out, or []
        return list(range(1, width + 1)) if name in _LEFT_OUT_MEANS_ALL else None
    moved = [_moved(axis, width, name) for axis in axes]
    return None if None in moved else moved


def _over_all(key: str, func: Any) -> None:
    @rules.register(key)
    def rule(s: Samples, t: Tensor, **kwargs: Any) -> Any:
        if t.dim() == 0:
            return NotImplemented
        return func(s.of(t), list(range(1, t.dim() + 1)), **kwargs)


def _trailing(key: str) -> None:
    name, _, overload = key.partition(".")
    func = getattr(getattr(aten, name), overload)

    @rules.register(key)
    def rule(s: Samples, *args: Any, **kwargs: Any) -> Any:
        if len({t.dim() for t in tensors_of(args, kwargs)}) > 1:
            return NotImplemented
        mine, named = leaves(s.of, (args, kwargs))
        return func(*mine, **named)


for _key in _BY_AXES:
    _by_axes(_key)
for _key in _TRAILING:
    _trailing(_key)
for _key, _func in _OVER_ALL.items():
    _over_all(_key, _func)
