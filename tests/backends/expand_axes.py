"""An example of a call for every rule of the expand backend that is about axes."""

import torch
from torch import Tensor

from gradscope.backends.expand.tensor import PerSample
from tests.backends.expand_maker import Example, Maker, N


def spd(m: Maker) -> Tensor:
    """A symmetric positive definite (2, 4, 4)."""
    a = torch.randn(N, 2, 4, 4, dtype=torch.float64)
    return PerSample(a @ a.mT + 4 * torch.eye(4, dtype=torch.float64))


def _complex(m: Maker, *shape: int) -> Tensor:
    return PerSample(torch.randn(N, *shape, dtype=torch.complex128))


AXES: dict[str, list[Example]] = {
    # shapes
    "stack.default": [
        lambda m: ([m.p(4, 6), m.c(4, 6)], 1),
        lambda m: ([m.p(4), m.w(4)], -1),
        lambda m: ([m.p(), m.p()],),
    ],
    "cat.default": [lambda m: ([m.p(4, 6), m.c(4, 2)], -1), lambda m: ([m.p(4), m.w(2)],)],
    "repeat.default": [lambda m: (m.p(4, 6), [2, 1, 3])],
    "flip.default": [lambda m: (m.p(4, 6), [0, -1])],
    "roll.default": [lambda m: (m.p(4, 6), [1, 2], [-1, 0])],
    "constant_pad_nd.default": [lambda m: (m.p(4, 6), [1, 2, 0, 1], 0.5)],
    "tril.default": [lambda m: (m.p(2, 4, 4), 1)],
    "triu.default": [lambda m: (m.p(4, 4), -1)],
    # the gradients of views
    "select_backward.default": [
        lambda m: (m.p(4), [4, 6], -1, 2),
        lambda m: (m.p(), [4], 0, 1),
    ],
    "slice_backward.default": [lambda m: (m.p(4, 2), [4, 6], -1, 1, 5, 2)],
    "diagonal_backward.default": [lambda m: (m.p(6, 4), [4, 6, 4], 0, 0, -1)],
    "unfold_backward.default": [lambda m: (m.p(4, 2, 3), [4, 6], 1, 3, 3)],
    # reductions
    **{
        f"{name}.default": [lambda m: (m.p(4, 6),), lambda m: (m.p(4),)]
        for name in ("sum", "mean", "max", "min")
    },
    "any.default": [lambda m: (m.b(4, 1),)],
    "all.default": [lambda m: (m.b(4),)],
    "sum.dim_IntList": [lambda m: (m.p(4, 6, 2), [0, -1], True), lambda m: (m.p(4, 6), None)],
    "mean.dim": [lambda m: (m.p(4, 6, 2), [1]), lambda m: (m.p(4, 6), [])],
    "amax.default": [lambda m: (m.p(4, 6), [-1]), lambda m: (m.p(4, 6),)],
    "amin.default": [lambda m: (m.p(4, 6), [0], True)],
    "any.dim": [lambda m: (m.b(4, 6), -1)],
    "any.dims": [lambda m: (m.b(4, 6, 2), [0, 1])],
    "all.dim": [lambda m: (m.b(4, 6), 0)],
    "all.dims": [lambda m: (m.b(4, 6, 2), [0, -1])],
    "logsumexp.default": [lambda m: (m.p(4, 6), [0, 1])],
    "var.correction": [lambda m: (m.p(4, 6), [0], {"correction": 0}), lambda m: (m.p(4, 6),)],
    "std.correction": [lambda m: (m.p(4, 6), None, {"keepdim": True})],
    "var_mean.correction": [lambda m: (m.p(4, 6), [-1])],
    "std_mean.correction": [lambda m: (m.p(4, 6), [1], {"correction": 2})],
    "linalg_vector_norm.default": [
        lambda m: (m.p(4, 6), 3, [1]),
        lambda m: (m.p(4, 6), 2, None, True),
    ],
    "norm.ScalarOpt_dim": [lambda m: (m.p(4, 6), 2, [0], True)],
    # along one axis
    **{
        f"{name}.{overload}": [lambda m: (m.p(4, 6), 0), lambda m: (m.p(4, 6), -1)]
        for name, overload in (
            ("argmax", "default"),
            ("argmin", "default"),
            ("max", "dim"),
            ("min", "dim"),
            ("median", "dim"),
            ("mode", "default"),
            ("prod", "dim_int"),
            ("cumsum", "default"),
            ("cumprod", "default"),
            ("cummax", "default"),
            ("cummin", "default"),
            ("logcumsumexp", "default"),
            ("sort", "default"),
            ("_safe_softmax", "default"),
        )
    },
    "sort.stable": [lambda m: (m.p(4, 6), {"stable": True, "dim": 0, "descending": True})],
    "topk.default": [lambda m: (m.p(4, 6), 2), lambda m: (m.p(4, 6), 2, 0, False)],
    "kthvalue.default": [lambda m: (m.p(4, 6), 3), lambda m: (m.p(4, 6), 3, 0, True)],
    "glu.default": [lambda m: (m.p(4, 6),), lambda m: (m.p(4, 6), 0)],
    "glu_backward.default": [lambda m: (m.p(2, 6), m.p(4, 6), 0)],
    "_softmax.default": [lambda m: (m.p(4, 6), 0, False), lambda m: (m.p(4), -1, False)],
    "_log_softmax.default": [lambda m: (m.p(4, 6), 1, False)],
    "_softmax_backward_data.default": [
        lambda m: (m.p(4, 6), m.p(4, 6), 0, torch.float64),
    ],
    "_log_softmax_backward_data.default": [
        lambda m: (m.p(4, 6), m.p(4, 6), -1, torch.float64),
    ],
    "gather.default": [lambda m: (m.p(4, 6), 1, m.i(6, 3, 2)), lambda m: (m.c(4), 0, m.i(4, 7))],
    "scatter.src": [lambda m: (m.p(4, 6), 0, m.i(1, 1, 6), m.p(1, 6))],
    "scatter.value": [lambda m: (m.p(4, 6), -1, m.i(6, 4, 2), 0.5)],
    "scatter_add.default": [lambda m: (m.c(4, 6), 0, m.i(4, 7, 6), m.p(7, 6))],
    "scatter_reduce.two": [lambda m: (m.p(4, 6), 1, m.i(6, 4, 6), m.p(4, 6), "amax")],
    "index_select.default": [lambda m: (m.p(4, 6), -1, torch.tensor([5, 0, 5]))],
    "index_add.default": [lambda m: (m.p(4, 6), 0, torch.tensor([3, 0, 3]), m.p(3, 6))],
    "index_copy.default": [lambda m: (m.p(4, 6), 1, torch.tensor([3, 0]), m.p(4, 2))],
    # Fourier transforms and linear algebra
    "_fft_c2c.default": [lambda m: (_complex(m, 4, 6), [0, 1], 0, True)],
    "_fft_r2c.default": [lambda m: (m.p(4, 6), [0, 1], 0, True)],
    "_fft_c2r.default": [lambda m: (_complex(m, 4, 4), [1], 2, 6)],
    "linalg_inv_ex.default": [lambda m: (spd(m),)],
    "linalg_cholesky_ex.default": [lambda m: (spd(m), {"upper": True})],
    "linalg_matrix_exp.default": [lambda m: (m.p(4, 4),)],
    "linalg_solve_triangular.default": [lambda m: (spd(m), m.p(2, 4, 3), {"upper": True})],
    "linalg_qr.default": [lambda m: (m.p(2, 6, 4),)],
    "_linalg_eigh.default": [lambda m: (spd(m),)],
    "_linalg_svd.default": [lambda m: (m.p(2, 6, 4),)],
    "_linalg_det.default": [lambda m: (m.p(2, 4, 4),)],
    "_linalg_slogdet.default": [lambda m: (m.p(4, 4),)],
    "cholesky_inverse.default": [lambda m: (spd(m),)],
}
