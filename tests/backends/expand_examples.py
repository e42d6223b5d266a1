"""An example of a call for every rule of the expand backend.

The letters: `p` a tensor of each sample's own, `w` a parameter that samples share, `c` a constant,
`i(high, ...)` integers below `high`, `b` truth values.
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


def spd(m: Maker) -> Tensor:
    """A symmetric positive definite (2, 4, 4)."""
    a = torch.randn(N, 2, 4, 4, dtype=torch.float64)
    return PerSample(a @ a.mT + 4 * torch.eye(4, dtype=torch.float64))


def layer_norm(m: Maker) -> tuple[Any, ...]:
    x = m.p(2, 6, 4)
    _, mean, rstd = torch.native_layer_norm(x.physical, [6, 4], None, None, 1e-5)
    stats = PerSample(mean), PerSample(rstd)
    return m.p(2, 6, 4), x, [6, 4], *stats, m.w(6, 4), m.w(6, 4), [True] * 3


def group_norm(m: Maker) -> tuple[Any, ...]:
    x = m.p(2, 6, 5)
    folded = x.physical.reshape(2 * N, 6, 5)
    _, mean, rstd = torch.native_group_norm(folded, None, None, 2 * N, 6, 5, 3, 1e-5)
    stats = PerSample(mean.reshape(N, 2, 3)), PerSample(rstd.reshape(N, 2, 3))
    return m.p(2, 6, 5), x, *stats, m.w(6), 2, 6, 5, 3, [True] * 3


def flash(m: Maker) -> tuple[Any, ...]:
    q, k, v = (torch.randn(N, 2, 2, t, 4, dtype=torch.float64) for t in (6, 5, 5))
    out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(t.flatten(0, 1) for t in (q, k, v))
    )
    saved = [PerSample(t.unflatten(0, (N, 2))) for t in (out, logsumexp)]
    return m.p(2, 2, 6, 4), *(PerSample(t) for t in (q, k, v)), *saved, 0.0, False


def pooled(m: Maker, x: Tensor, pool: str, *geometry: Any) -> tuple[Any, ...]:
    """The output gradient, the input, the geometry and the saved positions."""
    found = [getattr(torch.ops.aten, pool)(row, *geometry) for row in x.physical]
    positions = PerSample(torch.stack([at for _, at in found]))
    return m.p(*found[0][0].shape), x, *geometry, positions


CONV = ([2, 1], [1, 0], [1, 2], False, [0, 0], 2)
CONV_T = ([2, 1], [1, 0], [1, 2], True, [1, 0], 2)
POOL2 = ([2, 3], [2, 2], [1, 0], [1, 1], True)
POOL3 = ([2, 2, 2], [2, 2, 1], [1, 0, 0], [1, 1, 1], False)
AVG2 = ([2, 3], [2, 2], [1, 0], True, False, None)
AVG3 = ([2, 2, 2], [2, 2, 1], [1, 0, 0], False, True, None)

EXAMPLES: dict[str, list[Example]] = {
    # matrix products
    "mm.default": [
        lambda m: (m.p(6, 4), m.w(4, 7)),
        lambda m: (m.w(6, 4), m.p(4, 7)),
        lambda m: (m.p(0, 4), m.w(4, 7)),
        lambda m: (m.p(6, 4), m.c(4, 7)),
    ],
    "bmm.default": [
        lambda m: (m.p(2, 6, 4), m.w(2, 4, 7)),
        lambda m: (m.w(2, 6, 4), m.p(2, 4, 7)),
        lambda m: (m.p(1, 6, 4), m.w(1, 4, 7)),
    ],
    "addmm.default": [
        lambda m: (m.w(7), m.p(6, 4), m.w(4, 7)),
        lambda m: (m.p(6, 7), m.p(6, 4), m.w(4, 7), {"beta": 0.5, "alpha": 1.5}),
        lambda m: (m.w(1, 7), m.p(6, 4), m.p(4, 7), {"beta": 0}),
    ],
    "baddbmm.default": [lambda m: (m.w(6, 7), m.p(2, 6, 4), m.w(2, 4, 7), {"alpha": 2})],
    "mv.default": [lambda m: (m.w(6, 4), m.p(4)), lambda m: (m.p(6, 4), m.w(4))],
    "addmv.default": [lambda m: (m.w(6), m.w(6, 4), m.p(4), {"beta": 2})],
    "dot.default": [lambda m: (m.p(4), m.w(4))],
    "vdot.default": [lambda m: (m.p(4), m.w(4))],
    # convolutions
    "convolution.default": [
        lambda m: (m.p(2, 4, 6, 7), m.w(6, 2, 3, 2), m.w(6), *CONV),
        lambda m: (m.p(2, 4, 6, 7), m.w(4, 3, 3, 2), None, *CONV_T),
    ],
    "convolution_backward.default": [
        lambda m: (m.p(2, 6, 3, 5), m.p(2, 4, 6, 7), m.w(6, 2, 3, 2), [6], *CONV, [True] * 3),
        lambda m: (
            m.p(2, 6, 3, 5),
            m.p(2, 4, 6, 7),
            m.w(6, 2, 3, 2),
            None,
            *CONV,
            [False, True, False],
        ),
        lambda m: (m.p(2, 6, 12, 9), m.p(2, 4, 6, 7), m.w(4, 3, 3, 2), [6], *CONV_T, [True] * 3),
    ],
    # normalisation
    "native_layer_norm.default": [
        lambda m: (m.p(2, 6, 4), [6, 4], m.w(6, 4), m.w(6, 4), 1e-5),
        lambda m: (m.p(2, 6, 4), [4], None, None, 1e-5),
    ],
    "native_layer_norm_backward.default": [layer_norm],
    "native_group_norm.default": [
        lambda m: (m.p(2, 6, 5), m.w(6), m.w(6), 2, 6, 5, 3, 1e-5),
    ],
    "native_group_norm_backward.default": [group_norm],
    "native_batch_norm.default": [
        lambda m: (m.p(2, 6, 5), m.w(6), m.w(6), None, None, True, 0.1, 1e-5),
        lambda m: (m.p(2, 6, 5), m.w(6), None, m.c(6), m.c(6).square(), False, 0.1, 1e-5),
    ],
    "native_batch_norm_backward.default": [
        lambda m: (
            m.p(2, 6, 5),
            m.p(2, 6, 5),
            m.w(6),
            m.c(6),
            m.c(6).square(),
            m.p(0),
            m.p(0),
            False,
            1e-5,
            [True] * 3,
        ),
        lambda m: (
            m.p(2, 6, 5),
            m.p(2, 6, 5),
            m.w(6),
            None,
            None,
            m.p(6),
            m.p(6),
            True,
            1e-5,
            [True] * 3,
        ),
    ],
    # embeddings and indices
    "embedding.default": [lambda m: (m.w(7, 4), m.i(7, 2, 6), 3)],
    "embedding_dense_backward.default": [
        lambda m: (m.p(2, 6, 4), m.i(7, 2, 6), 7, 3, False),
        lambda m: (m.p(2, 6, 4), m.i(7, 2, 6), 7, -1, True),
    ],
    "index.Tensor": [
        lambda m: (m.p(7, 6, 4), [m.i(7, 5)]),
        lambda m: (m.p(7, 6, 4), [m.i(7, 5, 2), m.i(6, 2)]),
        lambda m: (m.c(7, 6), [m.i(7, 5)]),
    ],
    "index_put.default": [
        lambda m: (m.p(7, 6, 4), [m.i(7, 5)], m.p(5, 6, 4), True),
        lambda m: (m.p(7, 6, 4), [m.i(7, 5), torch.arange(5)], m.p(4)),
    ],
    "index_put_.default": [lambda m: (m.p(7, 6), [torch.arange(5)], m.p(6))],
    "_index_put_impl_.default": [lambda m: (m.p(7, 6), [m.i(7, 5)], m.p(5, 6), True, True)],
    # attention and packed sequences
    "_scaled_dot_product_flash_attention_for_cpu.default": [
        lambda m: (m.p(2, 2, 6, 4), m.p(2, 2, 5, 4), m.p(2, 2, 5, 4)),
        lambda m: (*(m.p(2, 2, 5, 4) for _ in "qkv"), 0.0, True, {"scale": 0.3}),
        lambda m: (*(m.p(2, 2, 5, 4) for _ in "qkv"), {"attn_mask": m.w(5, 5)}),
        lambda m: (*(m.p(2, 2, 5, 4) for _ in "qkv"), {"attn_mask": m.p(2, 1, 5, 5)}),
    ],
    "_scaled_dot_product_flash_attention_for_cpu_backward.default": [flash],
    "_pack_padded_sequence.default": [lambda m: (m.p(6, 2, 4), torch.tensor([6, 3]), False)],
    # losses
    "nll_loss_forward.default": [
        lambda m: (m.p(2, 4), m.i(4, 2), m.c(4).square(), 0, -100),
        lambda m: (m.p(2, 4), m.i(4, 2), None, 0, 1),
    ],
    "nll_loss_backward.default": [
        lambda m: (m.p(2), m.p(2, 4), m.i(4, 2), m.c(4).square(), 0, 1, m.p()),
    ],
    "nll_loss2d_forward.default": [lambda m: (m.p(2, 4, 6, 1), m.i(4, 2, 6, 1), None, 0, 1)],
    "nll_loss2d_backward.default": [
        lambda m: (m.p(2, 6, 1), m.p(2, 4, 6, 1), m.i(4, 2, 6, 1), None, 0, 1, m.p()),
    ],
    "mse_loss.default": [lambda m: (m.p(2, 4), m.w(2, 4), 0)],
    "mse_loss_backward.default": [lambda m: (m.p(2, 4), m.p(2, 4), m.w(2, 4), 0)],
    "smooth_l1_loss.default": [lambda m: (m.p(2, 4), m.w(2, 4), 0, 0.5)],
    "smooth_l1_loss_backward.default": [lambda m: (m.p(2, 4), m.p(2, 4), m.w(2, 4), 0, 0.5)],
    "huber_loss.default": [lambda m: (m.p(2, 4), m.w(2, 4), 0, 0.5)],
    "huber_loss_backward.default": [lambda m: (m.p(2, 4), m.p(2, 4), m.w(2, 4), 0, 0.5)],
    # pooling, padding, resampling
    "avg_pool2d.default": [lambda m: (m.p(2, 4, 6, 7), *AVG2)],
    "avg_pool2d_backward.default": [lambda m: (m.p(2, 4, 4, 3), m.p(2, 4, 6, 7), *AVG2)],
    "avg_pool3d.default": [lambda m: (m.p(2, 4, 6, 7, 5), *AVG3)],
    "avg_pool3d_backward.default": [
        lambda m: (m.p(2, 4, 4, 3, 4), m.p(2, 4, 6, 7, 5), *AVG3),
    ],
    "max_pool2d_with_indices.default": [lambda m: (m.p(2, 4, 6, 7), *POOL2)],
    "max_pool2d_with_indices_backward.default": [
        lambda m: pooled(m, m.p(2, 4, 6, 7), "max_pool2d_with_indices", *POOL2),
    ],
    "max_pool3d_with_indices.default": [lambda m: (m.p(2, 4, 6, 7, 5), *POOL3)],
    "max_pool3d_with_indices_backward.default": [
        lambda m: pooled(m, m.p(2, 4, 6, 7, 5), "max_pool3d_with_indices", *POOL3),
    ],
    "_adaptive_avg_pool2d.default": [lambda m: (m.p(2, 4, 6, 7), [3, 2])],
    "_adaptive_avg_pool2d_backward.default": [lambda m: (m.p(2, 4, 3, 2), m.p(2, 4, 6, 7))],
    "adaptive_max_pool2d.default": [lambda m: (m.p(2, 4, 6, 7), [3, 2])],
    "adaptive_max_pool2d_backward.default": [
        lambda m: _without_size(pooled(m, m.p(2, 4, 6, 7), "adaptive_max_pool2d", [3, 2])),
    ],
    "reflection_pad1d.default": [lambda m: (m.p(2, 4, 6), [1, 2])],
    "reflection_pad1d_backward.default": [lambda m: (m.p(2, 4, 9), m.p(2, 4, 6), [1, 2])],
    "reflection_pad2d.default": [lambda m: (m.p(2, 4, 6, 7), [1, 2, 0, 1])],
    "reflection_pad2d_backward.default": [
        lambda m: (m.p(2, 4, 7, 10), m.p(2, 4, 6, 7), [1, 2, 0, 1]),
    ],
    "replication_pad1d.default": [lambda m: (m.p(2, 4, 6), [1, 2])],
    "replication_pad1d_backward.default": [lambda m: (m.p(2, 4, 9), m.p(2, 4, 6), [1, 2])],
    "replication_pad2d.default": [lambda m: (m.p(2, 4, 6, 7), [1, 2, 0, 1])],
    "replication_pad2d_backward.default": [
        lambda m: (m.p(2, 4, 7, 10), m.p(2, 4, 6, 7), [1, 2, 0, 1]),
    ],
    "im2col.default": [lambda m: (m.p(2, 4, 6, 7), [2, 3], [1, 1], [1, 0], [2, 1])],
    "col2im.default": [lambda m: (m.p(2, 24, 25), [6, 7], [2, 3], [1, 1], [0, 0], [1, 1])],
    "upsample_nearest1d.default": [lambda m: (m.p(2, 4, 6), [9])],
    "upsample_nearest1d_backward.default": [lambda m: (m.p(2, 4, 9), [9], [2, 4, 6])],
    "upsample_nearest2d.default": [lambda m: (m.p(2, 4, 6, 5), [9, 7])],
    "upsample_nearest2d_backward.default": [
        lambda m: (m.p(2, 4, 9, 7), [9, 7], [2, 4, 6, 5]),
    ],
    "upsample_linear1d.default": [lambda m: (m.p(2, 4, 6), [9], False)],
    "upsample_linear1d_backward.default": [lambda m: (m.p(2, 4, 9), [9], [2, 4, 6], False)],
    "upsample_bilinear2d.default": [lambda m: (m.p(2, 4, 6, 5), [9, 7], True)],
    "upsample_bilinear2d_backward.default": [
        lambda m: (m.p(2, 4, 9, 7), [9, 7], [2, 4, 6, 5], True),
    ],
    "upsample_bicubic2d.default": [lambda m: (m.p(2, 4, 6, 5), [9, 7], False)],
    "upsample_bicubic2d_backward.default": [
        lambda m: (m.p(2, 4, 9, 7), [9, 7], [2, 4, 6, 5], False),
    ],
    "grid_sampler_2d.default": [lambda m: (m.p(2, 4, 6, 5), m.p(2, 3, 7, 2), 0, 0, False)],
    "pixel_shuffle.default": [lambda m: (m.p(2, 4, 3, 5), 2)],
    "pixel_unshuffle.default": [lambda m: (m.p(2, 3, 4, 6), 2)],
    "_cdist_forward.default": [lambda m: (m.p(2, 6, 4), m.p(2, 5, 4), 2.0, None)],
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

# Their results hold whatever was in memory, or torch has no like of them for one sample.
OTHERWISE = {
    "new_empty.default",
    "new_empty_strided.default",
    "new_zeros.default",
    "new_ones.default",
    "new_full.default",
    "_sparse_coo_tensor_with_dims_and_tensors.default",
}


def _complex(m: Maker, *shape: int) -> Tensor:
    return PerSample(torch.randn(N, *shape, dtype=torch.complex128))


def _without_size(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    grad, x, _, positions = arguments
    return grad, x, positions
