"""An example of a call for every rule of the expand backend that is about a kind of layer."""

from typing import Any

import torch
from torch import Tensor

from gradscope.backends.expand.tensor import PerSample
from tests.backends.expand_maker import Example, Maker, N


def layer_norm(m: Maker, *shape: int) -> tuple[Any, ...]:
    x = m.p(2, 6, 4)
    _, mean, rstd = torch.native_layer_norm(x.physical, list(shape), None, None, 1e-5)
    stats = PerSample(mean), PerSample(rstd)
    return m.p(2, 6, 4), x, list(shape), *stats, m.w(*shape), m.w(*shape), [True] * 3


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

LAYERS: dict[str, list[Example]] = {
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
    "native_layer_norm_backward.default": [
        lambda m: layer_norm(m, 4),
        lambda m: layer_norm(m, 6, 4),
        lambda m: layer_norm(m, 2, 6, 4),
    ],
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
}


def _without_size(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    grad, x, _, positions = arguments
    return grad, x, positions
