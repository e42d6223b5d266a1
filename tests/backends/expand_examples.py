"""An example of a call for every operator that the expand backend has a rule for.

The letters: `p` a tensor of each sample's own, `w` a parameter that samples share, `c` a constant,
`z` complex, `i(high, ...)` integers below `high`, `b` truth values, `spd` positive definite.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradscope.backends.expand.tensor import PerSample

N = 3
Example = Callable[["Maker"], tuple[Any, ...]]


@dataclass(frozen=True)
class Maker:
    """Makes the tensors of an example; `own` makes parameters each sample's own.

    Attributes:
        own: Whether `w` is like `p`.
    """

    own: bool

    def p(self, *shape: int) -> Tensor:
        return PerSample(torch.randn(N, *shape, dtype=torch.float64))

    def w(self, *shape: int) -> Tensor:
        if self.own:
            return self.p(*shape)
        return PerSample(torch.randn(*shape, dtype=torch.float64).expand(N, *shape))

    def c(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    def i(self, high: int, *shape: int) -> Tensor:
        return PerSample(torch.randint(0, high, (N, *shape)))

    def b(self, *shape: int) -> Tensor:
        return PerSample(torch.rand(N, *shape) > 0.5)

    def z(self, *shape: int) -> Tensor:
        return PerSample(torch.randn(N, *shape, dtype=torch.complex128))

    def spd(self) -> Tensor:
        a = torch.randn(N, 2, 4, 4, dtype=torch.float64)
        return PerSample(a @ a.mT + 4 * torch.eye(4, dtype=torch.float64))


CONV = ([2, 1], [1, 0], [1, 2], False, [0, 0], 2)
CONV_T = ([2, 1], [1, 0], [1, 2], True, [1, 0], 2)
POOL2 = ([2, 3], [2, 2], [1, 0], [1, 1], True)
POOL3 = ([2, 2, 2], [2, 2, 1], [1, 0, 0], [1, 1, 1], False)
AVG2 = ([2, 3], [2, 2], [1, 0], True, False, None)
AVG3 = ([2, 2, 2], [2, 2, 1], [1, 0, 0], False, True, None)

ALONG_AN_AXIS = (
    "argmax argmin max.dim min.dim median.dim mode prod.dim_int cumsum cumprod cummax cummin "
    "logcumsumexp sort _safe_softmax"
)

EXAMPLES: dict[str, list[Example]] = {
    "mm": [
        lambda m: (m.p(6, 4), m.w(4, 7)),
        lambda m: (m.w(6, 4), m.p(4, 7)),
        lambda m: (m.p(0, 4), m.w(4, 7)),
        lambda m: (m.p(6, 4), m.c(4, 7)),
    ],
    "bmm": [
        lambda m: (m.p(2, 6, 4), m.w(2, 4, 7)),
        lambda m: (m.w(2, 6, 4), m.p(2, 4, 7)),
        lambda m: (m.p(1, 6, 4), m.w(1, 4, 7)),
    ],
    "addmm": [
        lambda m: (m.w(7), m.p(6, 4), m.w(4, 7)),
        lambda m: (m.p(6, 7), m.p(6, 4), m.w(4, 7), {"beta": 0.5, "alpha": 1.5}),
        lambda m: (m.w(1, 7), m.p(6, 4), m.p(4, 7), {"beta": 0}),
    ],
    "baddbmm": [lambda m: (m.w(6, 7), m.p(2, 6, 4), m.w(2, 4, 7), {"alpha": 2})],
    "mv": [lambda m: (m.w(6, 4), m.p(4)), lambda m: (m.p(6, 4), m.w(4))],
    "addmv": [lambda m: (m.w(6), m.w(6, 4), m.p(4), {"beta": 2})],
    "dot": [lambda m: (m.p(4), m.w(4))],
    "vdot": [lambda m: (m.p(4), m.w(4))],
    "convolution": [
        lambda m: (m.p(2, 4, 6, 7), m.w(6, 2, 3, 2), m.w(6), *CONV),
        lambda m: (m.p(2, 4, 6, 7), m.w(4, 3, 3, 2), None, *CONV_T),
        lambda m: (m.c(2, 4, 6, 7), m.p(6, 2, 3, 2), None, *CONV),
    ],
    "native_layer_norm": [
        lambda m: (m.p(2, 6, 4), [6, 4], m.w(6, 4), m.w(6, 4), 1e-5),
        lambda m: (m.p(2, 6, 4), [4], None, None, 1e-5),
        lambda m: (m.p(2, 6, 4), [2, 6, 4], m.w(2, 6, 4), m.w(2, 6, 4), 1e-5),
    ],
    "native_group_norm": [
        lambda m: (m.p(2, 6, 5), m.w(6), m.w(6), 2, 6, 5, 3, 1e-5),
    ],
    "native_batch_norm": [
        lambda m: (m.p(2, 6, 5), m.w(6), m.w(6), None, None, True, 0.1, 1e-5),
        lambda m: (m.p(2, 6, 5), m.w(6), None, m.c(6), m.c(6).square(), False, 0.1, 1e-5),
    ],
    "embedding": [
        lambda m: (m.w(7, 4), m.i(7, 2, 6), 3),
        lambda m: (m.w(7, 4), m.i(7, 2, 6), -1, True),
    ],
    "index.Tensor": [
        lambda m: (m.p(7, 6, 4), [m.i(7, 5)]),
        lambda m: (m.p(7, 6, 4), [m.i(7, 5, 2), m.i(6, 2)]),
        lambda m: (m.c(7, 6), [m.i(7, 5)]),
    ],
    "index_put": [
        lambda m: (m.p(7, 6, 4), [m.i(7, 5)], m.p(5, 6, 4), True),
        lambda m: (m.p(7, 6, 4), [m.i(7, 5), torch.arange(5)], m.p(4)),
    ],
    "index_put_": [lambda m: (m.p(7, 6), [torch.arange(5)], m.p(6))],
    "_index_put_impl_": [lambda m: (m.p(7, 6), [m.i(7, 5)], m.p(5, 6), True, True)],
    "_scaled_dot_product_flash_attention_for_cpu": [
        lambda m: (m.p(2, 2, 6, 4), m.p(2, 2, 5, 4), m.p(2, 2, 5, 4)),
        lambda m: (*(m.p(2, 2, 5, 4) for _ in "qkv"), 0.0, True, {"scale": 0.3}),
        lambda m: (*(m.p(2, 2, 5, 4) for _ in "qkv"), {"attn_mask": m.w(5, 5)}),
        lambda m: (*(m.p(2, 2, 5, 4) for _ in "qkv"), {"attn_mask": m.p(2, 1, 5, 5)}),
    ],
    "_pack_padded_sequence": [lambda m: (m.p(6, 2, 4), torch.tensor([6, 3]), False)],
    "nll_loss_forward": [
        lambda m: (m.p(2, 4), m.i(4, 2), m.c(4).square(), 0, -100),
        lambda m: (m.p(2, 4), m.i(4, 2), None, 0, 1),
    ],
    "nll_loss2d_forward": [lambda m: (m.p(2, 4, 6, 1), m.i(4, 2, 6, 1), None, 0, 1)],
    "mse_loss": [lambda m: (m.p(2, 4), m.w(2, 4), 0)],
    "smooth_l1_loss": [lambda m: (m.p(2, 4), m.w(2, 4), 0, 0.5)],
    "huber_loss": [lambda m: (m.p(2, 4), m.w(2, 4), 0, 0.5)],
    "avg_pool2d": [lambda m: (m.p(2, 4, 6, 7), *AVG2)],
    "avg_pool3d": [lambda m: (m.p(2, 4, 6, 7, 5), *AVG3)],
    "max_pool2d_with_indices": [lambda m: (m.p(2, 4, 6, 7), *POOL2)],
    "max_pool3d_with_indices": [lambda m: (m.p(2, 4, 6, 7, 5), *POOL3)],
    "_adaptive_avg_pool2d": [lambda m: (m.p(2, 4, 6, 7), [3, 2])],
    "adaptive_max_pool2d": [lambda m: (m.p(2, 4, 6, 7), [3, 2])],
    "reflection_pad1d": [lambda m: (m.p(2, 4, 6), [1, 2])],
    "reflection_pad2d": [lambda m: (m.p(2, 4, 6, 7), [1, 2, 0, 1])],
    "replication_pad1d": [lambda m: (m.p(2, 4, 6), [1, 2])],
    "replication_pad2d": [lambda m: (m.p(2, 4, 6, 7), [1, 2, 0, 1])],
    "im2col": [lambda m: (m.p(2, 4, 6, 7), [2, 3], [1, 1], [1, 0], [2, 1])],
    "col2im": [lambda m: (m.p(2, 24, 25), [6, 7], [2, 3], [1, 1], [0, 0], [1, 1])],
    "upsample_nearest1d": [lambda m: (m.p(2, 4, 6), [9])],
    "upsample_nearest2d": [lambda m: (m.p(2, 4, 6, 5), [9, 7])],
    "upsample_linear1d": [lambda m: (m.p(2, 4, 6), [9], False)],
    "upsample_bilinear2d": [lambda m: (m.p(2, 4, 6, 5), [9, 7], True)],
    "upsample_bicubic2d": [lambda m: (m.p(2, 4, 6, 5), [9, 7], False)],
    "grid_sampler_2d": [lambda m: (m.p(2, 4, 6, 5), m.p(2, 3, 7, 2), 0, 0, False)],
    "pixel_shuffle": [lambda m: (m.p(2, 4, 3, 5), 2)],
    "pixel_unshuffle": [lambda m: (m.p(2, 3, 4, 6), 2)],
    "_cdist_forward": [
        lambda m: (m.p(2, 6, 4), m.p(2, 5, 4), 2.0, None),
        lambda m: (m.p(6, 4), m.w(5, 4), 1.0, None),
    ],
    # views, for their backward passes
    "select.int": [lambda m: (m.p(4, 6), -1, 2), lambda m: (m.p(4), 0, 1)],
    "slice.Tensor": [lambda m: (m.p(4, 6), -1, 1, 5, 2)],
    "diagonal": [lambda m: (m.p(4, 6, 4), 0, 0, -1)],
    "unfold": [lambda m: (m.p(4, 6), 1, 3, 3)],
    "stack": [
        lambda m: ([m.p(4, 6), m.c(4, 6)], 1),
        lambda m: ([m.p(4), m.w(4)], -1),
        lambda m: ([m.p(), m.p()],),
    ],
    "cat": [lambda m: ([m.p(4, 6), m.c(4, 2)], -1), lambda m: ([m.p(4), m.w(2)],)],
    "repeat": [lambda m: (m.p(4, 6), [2, 1, 3])],
    "flip": [lambda m: (m.p(4, 6), [0, -1])],
    "roll": [lambda m: (m.p(4, 6), [1, 2], [-1, 0])],
    "constant_pad_nd": [lambda m: (m.p(4, 6), [1, 2, 0, 1], 0.5)],
    "tril": [lambda m: (m.p(2, 4, 4), 1)],
    "triu": [lambda m: (m.p(4, 4), -1)],
    **{
        name: [lambda m: (m.p(4, 6),), lambda m: (m.p(4),)]
        for name in ("sum", "mean", "max", "min")
    },
    "any": [lambda m: (m.b(4, 1),)],
    "all": [lambda m: (m.b(4),)],
    "sum.dim_IntList": [lambda m: (m.p(4, 6, 2), [0, -1], True), lambda m: (m.p(4, 6), None)],
    "mean.dim": [lambda m: (m.p(4, 6, 2), [1]), lambda m: (m.p(4, 6), [])],
    "amax": [lambda m: (m.p(4, 6), [-1]), lambda m: (m.p(4, 6),)],
    "amin": [lambda m: (m.p(4, 6), [0], True)],
    "any.dim": [lambda m: (m.b(4, 6), -1)],
    "any.dims": [lambda m: (m.b(4, 6, 2), [0, 1])],
    "all.dim": [lambda m: (m.b(4, 6), 0)],
    "all.dims": [lambda m: (m.b(4, 6, 2), [0, -1])],
    "logsumexp": [lambda m: (m.p(4, 6), [0, 1])],
    "var.correction": [lambda m: (m.p(4, 6), [0], {"correction": 0}), lambda m: (m.p(4, 6),)],
    "std.correction": [lambda m: (m.p(4, 6), None, {"keepdim": True})],
    "var_mean.correction": [lambda m: (m.p(4, 6), [-1])],
    "std_mean.correction": [lambda m: (m.p(4, 6), [1], {"correction": 2})],
    "linalg_vector_norm": [
        lambda m: (m.p(4, 6), 3, [1]),
        lambda m: (m.p(4, 6), 2, None, True),
    ],
    "norm.ScalarOpt_dim": [lambda m: (m.p(4, 6), 2, [0], True)],
    **{
        name: [lambda m: (m.p(4, 6), 0), lambda m: (m.p(4, 6), -1)]
        for name in ALONG_AN_AXIS.split()
    },
    "sort.stable": [lambda m: (m.p(4, 6), {"stable": True, "dim": 0, "descending": True})],
    "topk": [lambda m: (m.p(4, 6), 2), lambda m: (m.p(4, 6), 2, 0, False)],
    "kthvalue": [lambda m: (m.p(4, 6), 3), lambda m: (m.p(4, 6), 3, 0, True)],
    "glu": [lambda m: (m.p(4, 6),), lambda m: (m.p(4, 6), 0)],
    "_softmax": [lambda m: (m.p(4, 6), 0, False), lambda m: (m.p(4), -1, False)],
    "_log_softmax": [lambda m: (m.p(4, 6), 1, False)],
    "gather": [lambda m: (m.p(4, 6), 1, m.i(6, 3, 2)), lambda m: (m.c(4), 0, m.i(4, 7))],
    "scatter.src": [lambda m: (m.p(4, 6), 0, m.i(1, 1, 6), m.p(1, 6))],
    "scatter.value": [lambda m: (m.p(4, 6), -1, m.i(6, 4, 2), 0.5)],
    "scatter_add": [lambda m: (m.c(4, 6), 0, m.i(4, 7, 6), m.p(7, 6))],
    "scatter_reduce.two": [lambda m: (m.p(4, 6), 1, m.i(6, 4, 6), m.p(4, 6), "amax")],
    "index_select": [lambda m: (m.p(4, 6), -1, torch.tensor([5, 0, 5]))],
    "index_add": [lambda m: (m.p(4, 6), 0, torch.tensor([3, 0, 3]), m.p(3, 6))],
    "index_copy": [lambda m: (m.p(4, 6), 1, torch.tensor([3, 0]), m.p(4, 2))],
    "_fft_c2c": [lambda m: (m.z(4, 6), [0, 1], 0, True)],
    "_fft_r2c": [lambda m: (m.p(4, 6), [0, 1], 0, True)],
    "_fft_c2r": [lambda m: (m.z(4, 4), [1], 2, 6)],
    "linalg_inv_ex": [lambda m: (m.spd(),)],
    "linalg_cholesky_ex": [lambda m: (m.spd(), {"upper": True})],
    "linalg_matrix_exp": [lambda m: (m.p(4, 4),)],
    "linalg_solve_triangular": [lambda m: (m.spd(), m.p(2, 4, 3), {"upper": True})],
    "linalg_qr": [lambda m: (m.p(2, 6, 4),)],
    "_linalg_eigh": [lambda m: (m.spd(),)],
    "_linalg_svd": [lambda m: (m.p(2, 6, 4),)],
    "_linalg_det": [lambda m: (m.p(2, 4, 4),)],
    "_linalg_slogdet": [lambda m: (m.p(4, 4),)],
    "cholesky_inverse": [lambda m: (m.spd(),)],
    "linalg_lu_factor_ex": [lambda m: (m.p(2, 4, 4),)],
    "_linalg_solve_ex": [
        lambda m: (m.spd(), m.p(2, 4, 3)),
        lambda m: (m.spd(), m.p(2, 4)),
        lambda m: (m.w(4, 4), m.p(4)),
        lambda m: (m.p(4, 4), m.p(5, 4), {"left": False}),
    ],
    "linalg_lu_solve": [
        lambda m: (m.p(4, 4), pivots(4), m.p(4, 3)),
        lambda m: (m.p(2, 4, 4), pivots(2, 4), m.p(1, 4, 3), {"adjoint": True}),
    ],
    "_linalg_check_errors": [
        lambda m: (PerSample(torch.zeros(N, dtype=torch.int32)), "inv", {"is_matrix": True}),
    ],
    "diag_embed": [lambda m: (m.p(2, 4), 1), lambda m: (m.p(2, 4), 0, 0, -2)],
}


def pivots(*shape: int) -> Tensor:
    """Rows that are exchanged with themselves or with later ones, counted from 1."""
    return PerSample(
        (torch.arange(4) + torch.arange(N)[:, None] // 2 + 1)
        .clamp(max=4)
        .reshape(N, *[1] * (len(shape) - 1), 4)
        .expand(N, *shape)
        .int()
        .contiguous()
    )


# views that are made from the memory of all samples in one call
VIEWS: dict[str, list[Example]] = {
    "detach.default": [lambda m: (m.p(4, 6),)],
    "alias.default": [lambda m: (m.w(4, 6),)],
    "t.default": [lambda m: (m.w(4, 6),), lambda m: (m.p(4),)],
    "transpose.int": [lambda m: (m.p(4, 6, 2), 0, -1), lambda m: (m.w(4, 6), 1, 1)],
    "permute.default": [lambda m: (m.w(4, 6, 2), [2, 0, -2])],
    "view.default": [
        lambda m: (m.p(4, 6), [-1, 2, 3]),
        lambda m: (m.w(4, 6), [24]),
        lambda m: (m.p(0, 6), [2, 0]),
        lambda m: (m.p(1, 6), [6, 1]),
    ],
    "_unsafe_view.default": [lambda m: (m.p(4, 6), [2, 12])],
    "expand.default": [
        lambda m: (m.p(4, 1), [4, 6]),
        lambda m: (m.w(1, 6), [3, 2, -1, -1]),
        lambda m: (m.p(6), [4, 6]),
    ],
    "unsqueeze.default": [
        *(lambda m, axis=axis: (m.p(4, 6), axis) for axis in range(-3, 3)),
        lambda m: (m.w(4), 1),
    ],
    "squeeze.dim": [
        lambda m: (m.p(1, 6, 1), -1),
        lambda m: (m.w(1, 6), 0),
        lambda m: (m.p(4, 6), 0),
    ],
    "select.int": [lambda m: (m.p(4, 6), -2, -1), lambda m: (m.w(4, 6), 1, 2)],
    "slice.Tensor": [
        lambda m: (m.p(4, 6), -1, 1, 6, 2),
        lambda m: (m.p(4, 6), 0, -3),
        lambda m: (m.w(4, 6),),
    ],
    "unbind.int": [lambda m: (m.p(4, 6), -1), lambda m: (m.w(4, 6),)],
    "split.Tensor": [lambda m: (m.p(4, 6), 4, 1), lambda m: (m.w(4, 6), 3)],
    "unsafe_split.Tensor": [lambda m: (m.p(4, 6), 4, -1)],
}
