"""Fused attention: the samples are rows.

Shapes: n sample, b row, h head, t query position, s key position, d feature.
"""

from typing import Any

from torch import Tensor

from gradscope.backends.expand.facts import aten
from gradscope.backends.expand.rules import rules
from gradscope.backends.expand.tensor import Samples, fold, unfold


def _mask(s: Samples, mask: Tensor | None, b: int) -> Tensor | None:
    """Return a mask of shape (t, s) or (b or 1, h or 1, t, s) for the rows n·b."""
    if mask is None:
        return None
    physical = s.of(mask)
    if mask.dim() == 2:
        physical = physical[:, None, None]
    n, _, h, *last = physical.shape
    return fold(physical.expand(n, b, h, *last))


@rules.register("_scaled_dot_product_flash_attention_for_cpu.default")
def flash_for_cpu(
    s: Samples,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """Attend: q (b, h, t, d), k and v (b, h, s, d)."""
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        *(fold(s.of(t)) for t in (q, k, v)),
        dropout_p,
        is_causal,
        attn_mask=_mask(s, attn_mask, q.shape[0]),
        scale=scale,
    )
    return unfold(out, s.n), unfold(logsumexp, s.n)


@rules.register("_scaled_dot_product_flash_attention_for_cpu_backward.default")
def flash_for_cpu_backward(
    s: Samples,
    *tensors_and_options: Any,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """Return the gradients of q, k and v."""
    *tensors, dropout_p, is_causal = tensors_and_options
    found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(fold(s.of(t)) for t in tensors),
        dropout_p,
        is_causal,
        attn_mask=_mask(s, attn_mask, tensors[1].shape[0]),
        scale=scale,
    )
    return tuple(unfold(t, s.n) for t in found)
