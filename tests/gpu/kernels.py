"""What runs on GPUs only: the kernels that torch chooses there, and what they refuse.

The graph of a model on a GPU is another one than on a CPU: cuDNN's recurrent layers and batch
normalisation, fused RMSNorm, attention and dropout, cells of LSTM and GRU in one kernel; on Apple's
MPS a linear layer is one operation. Here each is written out by operations of the CPU, and is
recorded under its own name, with what it saves.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

T = TypeVar("T")

_NAME = "standin-kernel"
failed: list[Exception] = []

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
NO_WHOLE = ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "vdot", "convolution")
ADDED_IN_ANY_ORDER = {  # by atomic additions: other last digits every time
    *("index_add", "index_add_", "scatter_add", "scatter_add_", "embedding_dense_backward"),
    *("index_put", "index_put_", "_index_put_impl_", "scatter_reduce", "put_", "bincount"),
    *("convolution_backward", "_embedding_bag_dense_backward", "index_reduce", "cumsum"),
    *("grid_sampler_2d_backward", "upsample_bilinear2d_backward", "_ctc_loss_backward"),
    *("reflection_pad2d_backward", "max_pool2d_with_indices_backward", "index_select_backward"),
}


def in_engine() -> bool:
    """Whether this is a thread of autograd's."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def in_kernel() -> bool:
    """Whether this is a thread of a kernel's; see `_apart`."""
    return threading.current_thread().name.startswith(_NAME)


def fail(error: Exception) -> None:
    """Raise; in a thread of autograd's, where that would end the process, when it has returned."""
    if not in_engine():
        raise error
    failed.append(error)


def _apart(run: Callable[[], T]) -> T:
    """Return what `run` does with autograd, below which kernels run: in a thread of its own."""
    with ThreadPoolExecutor(1, _NAME) as thread:
        return thread.submit(run).result()


def _pulled(outputs: Any, grads: Any, leaves: list[Tensor | None]) -> list[Tensor | None]:
    """Return the gradient by each leaf, None where that is None."""
    pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
    given = [t for t in leaves if t is not None]
    found = iter(
        torch.autograd.grad(
            [o for o, _ in pairs], given, [g for _, g in pairs], materialize_grads=True
        )
    )
    return [None if t is None else next(found) for t in leaves]


def composed(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation by others, as torch does; `OpOverload.decompose` takes Python's ways."""
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def _leaves(*given: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.detach().requires_grad_() for t in given]


# recurrent layers


def lstm_cell(gates: Tensor, more: Tensor, cell: Tensor, *biases: Tensor | None) -> Any:
    """What one kernel does on a GPU, and steps on a CPU: h, c and the gates (n, 4d)."""
    whole = gates + more + sum(b for b in biases if b is not None)
    i, f, g, o = whole.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new = f * cell + i * g
    return o * new.tanh(), new, torch.cat((i, f, g, o), 1)


def lstm_cell_backward(
    by_h: Tensor | None,
    by_c: Tensor | None,
    before: Tensor,
    after: Tensor,
    gates: Tensor,
    bias: Any,
) -> Any:
    """Its derivative: by the gates (n, 4d), by the cell before, and by each bias."""
    i, f, g, o = gates.chunk(4, 1)
    out = after.tanh()
    h = torch.zeros_like(after) if by_h is None else by_h
    c = h * o * (1 - out * out) + (0 if by_c is None else by_c)
    di, df = c * g * i * (1 - i), c * before * f * (1 - f)
    whole = torch.cat((di, df, c * i * (1 - g * g), h * out * o * (1 - o)), 1)
    return whole, c * f, whole.sum(0) if bias else None


def gru_cell(gates: Tensor, more: Tensor, state: Tensor, *biases: Tensor | None) -> Any:
    """The same of a GRU: h and what its derivative needs (n, 5d)."""
    a, b = (
        x if y is None else x + y
        for x, y in zip((gates, more), biases or (None, None), strict=True)
    )
    (r, z, n), (hr, hz, hn) = a.chunk(3, 1), b.chunk(3, 1)
    r, z = (r + hr).sigmoid(), (z + hz).sigmoid()
    n = (n + r * hn).tanh()
    return n + z * (state - n), torch.cat((r, z, n, state, hn), 1)


def gru_cell_backward(by_h: Tensor, kept: Tensor, bias: bool) -> Any:
    """Its derivative: by both sides' gates (n, 3d), by the state, and by each bias."""
    r, z, n, state, hn = kept.chunk(5, 1)
    new = by_h * (1 - z) * (1 - n * n)
    dr, dz = new * hn * r * (1 - r), by_h * (state - n) * z * (1 - z)
    first, second = torch.cat((dr, dz, new), 1), torch.cat((dr, dz, new * r), 1)
    return first, second, by_h * z, *((first.sum(0), second.sum(0)) if bias else (None, None))


_MODES = {0: "rnn_relu", 1: "rnn_tanh", 2: "lstm", 3: "gru"}


def _layers(
    x: Tensor,
    weights: list[Tensor],
    hx: Tensor,
    cx: Tensor | None,
    *,
    mode: int,
    biases: bool,
    layers: int,
    batch_first: bool,
    train: bool,
    both_ways: bool,
    sizes: list[int],
) -> Any:
    op = getattr(_aten, _MODES[mode])
    state = hx if cx is None else [hx, cx]
    with torch.backends.mkldnn.flags(enabled=False):
        if sizes:
            lengths = torch.tensor(sizes)
            return op.data(x, lengths, state, weights, biases, layers, 0.0, train, both_ways)
        return op.input(x, state, weights, biases, layers, 0.0, train, both_ways, batch_first)


def cudnn_rnn(
    x: Tensor,
    weights: list[Tensor],
    stride: int,
    buffer: Tensor | None,
    hx: Tensor,
    cx: Tensor | None,
    mode: int,
    hidden: int,
    proj: int,
    layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    both_ways: bool,
    sizes: list[int],
    drawn: Tensor | None,
) -> Any:
    """All steps of a recurrent layer at once: the output, h, c, and what nobody may look at."""
    how = {"mode": mode, "biases": stride == 4, "layers": layers, "batch_first": batch_first}
    more = {"train": train, "both_ways": both_ways, "sizes": sizes}
    out, *states = _layers(x, weights, hx, cx, **how, **more)  # type: ignore[arg-type]
    states += [x.new_empty(0)] * (2 - len(states))
    return out, *states, x.new_empty(0), x.new_empty(0)


def cudnn_rnn_backward(x: Tensor, weights: list[Tensor], stride: int, *rest: Any) -> Any:
    """Its derivative, which cuDNN has in train mode alone, and which has none itself."""
    _, hx, cx, _, *grads = rest[:7]
    mode, _, _, layers, batch_first, _, train, both_ways, sizes, _, _, mask = rest[7:]
    if not train:
        fail(RuntimeError("cudnn RNN backward can only be called in training mode"))
    how = {"mode": mode, "biases": stride == 4, "layers": layers, "batch_first": batch_first}
    more = {"train": train, "both_ways": both_ways, "sizes": sizes}

    def pulled() -> list[Any]:
        leaves: list[Any] = _leaves(x, hx, cx, *weights)
        found = _layers(leaves[0], leaves[3:], *leaves[1:3], **how, **more)
        return _pulled(found, grads[: len(found)], leaves)

    by_x, by_h, by_c, *by = _apart(pulled)
    return by_x, by_h, by_c, by if mask[3] else [None] * len(by)


def _recurrent(op: Any, mode: int, *, packed: bool) -> Callable[..., Any]:
    """What torch makes of a recurrent layer where there is cuDNN, and it is not switched off."""

    def run(x: Tensor, *given: Any) -> Any:
        if not torch.backends.cudnn.enabled:
            return composed(op, x, *given)
        sizes, given = (given[0].tolist(), given[1:]) if packed else ([], given)
        state, weights, biases, layers, dropout, train, both_ways, *first = given
        hx, cx = state if mode == 2 else (state, None)
        hidden, proj = weights[1].shape[0] // 4 if mode == 2 else hx.shape[2], 0
        if mode == 2 and hx.shape[2] != hidden:
            proj = hx.shape[2]
        found = _aten._cudnn_rnn(
            x,
            weights,
            4 if biases else 2,
            None,
            hx,
            cx,
            mode,
            hidden,
            proj,
            layers,
            bool(first and first[0]),
            dropout,
            train,
            both_ways,
            sizes,
            None,
        )
        return found[:3] if mode == 2 else found[:2]

    return run


# normalisation, dropout, attention, linear layers


def cudnn_batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Any, var: Any, *how: Any
) -> Any:
    """Batch normalisation (n, c, ...), with room for what cuDNN keeps."""
    training = how[0]
    found = _aten.native_batch_norm(x, weight, bias, mean, var, *how)
    return (*(found if training else (found[0], x.new_empty(0), x.new_empty(0))), x.new_empty(0))


def cudnn_batch_norm_backward(
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    mean: Any,
    var: Any,
    own: Any,
    std: Any,
    eps: float,
    _: Any,
) -> Any:
    """Its derivative in train mode; in eval mode torch takes its own."""
    return _aten.native_batch_norm_backward(
        g, x, weight, mean, var, own, std, True, eps, [True] * 3
    )


def rms_norm(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Any:
    """RMSNorm, and 1 / √(mean x² + eps) in float32 or more."""
    axes = list(range(-len(shape), 0))
    wide = x.float() if x.dtype in _HALF else x
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    rstd = torch.rsqrt(wide.square().mean(axes, keepdim=True) + eps)
    out = wide * rstd if weight is None else wide * rstd * weight
    return out.to(x.dtype), rstd


def rms_norm_backward(
    g: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, mask: list[bool]
) -> Any:
    """Its derivatives by the input and by the weight."""
    axes = list(range(-len(shape), 0))
    g, wide = g.to(rstd.dtype), x.to(rstd.dtype)
    along = g if weight is None else g * weight
    shift = (along * wide).mean(axes, keepdim=True) * rstd**3
    to_weight = (g * wide * rstd).sum(list(range(x.dim() - len(shape)))) if mask[1] else None
    to_x = (along * rstd - wide * shift).to(x.dtype)
    return to_x, None if weight is None or to_weight is None else to_weight.to(weight.dtype)


def layer_norm(x: Tensor, *given: Any) -> Any:
    """Layer normalisation, whose statistics are float32 where the numbers have half of it."""
    out, mean, rstd = _aten.native_layer_norm(x, *given)
    return (out, mean.float(), rstd.float()) if x.dtype in _HALF else (out, mean, rstd)


def layer_norm_backward(
    g: Tensor, x: Tensor, shape: Any, mean: Tensor, rstd: Tensor, *r: Any
) -> Any:
    """Its derivatives."""
    return _aten.native_layer_norm_backward(g, x, shape, mean.to(x.dtype), rstd.to(x.dtype), *r)


def _attended(q: Tensor, k: Tensor, v: Tensor, bias: Any, causal: bool, scale: Any) -> Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, bias, 0.0, causal, scale=scale)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    log: bool,
    dropout: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
) -> Any:
    """Memory-efficient attention (n, heads, t, d): what is kept of the scores is their size."""
    kept = q.new_empty((*q.shape[:3],) if log else (0,), dtype=torch.float32)
    none = torch.zeros((), dtype=torch.int64)
    return _attended(q, k, v, bias, causal, scale), kept, none, none


def attention_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    *rest: Any,
    scale: float | None = None,
) -> Any:
    """Its derivatives."""
    *_, mask, causal = rest if isinstance(rest[-1], bool) else (*rest, False)
    bias = bias if bias is not None and bias.numel() else None

    def pulled() -> list[Any]:
        leaves: list[Any] = _leaves(q, k, v, bias)
        return _pulled([_attended(*leaves, causal, scale)], [g], leaves)

    return tuple(t if wanted else None for t, wanted in zip(_apart(pulled), mask, strict=True))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer in one operation, as MPS has it."""
    return F.linear(x, weight, bias)


def linear_backward(x: Tensor, g: Tensor, weight: Tensor, mask: list[bool]) -> Any:
    """Its derivatives by input, weight and bias."""
    rows, out = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
    return g @ weight.conj(), out.mT @ rows.conj(), out.sum(0)


ONLY_THERE: dict[str, Callable[..., Any]] = {  # by name, instead of the CPU's
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "_thnn_fused_gru_cell": gru_cell,
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
    "_cudnn_rnn": cudnn_rnn,
    "_cudnn_rnn_backward": cudnn_rnn_backward,
    "cudnn_batch_norm": cudnn_batch_norm,
    "cudnn_batch_norm_backward": cudnn_batch_norm_backward,
    "_fused_rms_norm": rms_norm,
    "_fused_rms_norm_backward": rms_norm_backward,
    "native_layer_norm": layer_norm,
    "native_layer_norm_backward": layer_norm_backward,
    "_scaled_dot_product_efficient_attention": attention,
    "_scaled_dot_product_efficient_attention_backward": attention_backward,
    "linear": linear,
    "linear_backward": linear_backward,
}


def _batch_norm(x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, *how: Any) -> Any:
    training, momentum, eps, enabled = how
    usable = enabled and torch.backends.cudnn.enabled and x.dtype == torch.float32 and x.dim() >= 3
    if not usable or weight is None or bias is None or (mean is None and not training):
        return composed(_aten._batch_norm_impl_index.default, x, weight, bias, mean, var, *how)
    return *_aten.cudnn_batch_norm(x, weight, bias, mean, var, training, momentum, eps), 1


def _rms_norm(x: Tensor, shape: Any, weight: Any = None, eps: Any = None) -> Tensor:
    found: Tensor = _aten._fused_rms_norm(x, shape, weight, eps)[0]
    return found


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if not train or not 0 < p < 1 or not x.numel():
        made: Tensor = composed(_aten.dropout.default, x, p, train)
        return made
    found: Tensor = _aten.native_dropout(x, p, train)[0]
    return found


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    fused = torch.backends.cuda.mem_efficient_sdp_enabled()
    plain = not enable_gqa and not dropout and q.dim() == k.dim() == v.dim() == 4
    if not (fused and plain and q.dtype == k.dtype == v.dtype and q.shape[:2] == k.shape[:2]):
        made: Tensor = composed(
            _aten.scaled_dot_product_attention.default,
            *(q, k, v, mask, dropout, causal),
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return made
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, float("-inf"))
    if mask is not None:
        mask = mask.expand(*q.shape[:3], k.shape[2])
    found: Tensor = _aten._scaled_dot_product_efficient_attention(
        q, k, v, mask, True, dropout, causal, scale=scale
    )[0]
    return found


CHOSEN: dict[str, Callable[..., Any]] = {  # what torch chooses for a tensor on a GPU
    **{
        f"{name}.{end}": _recurrent(getattr(getattr(_aten, name), end), mode, packed=end == "data")
        for mode, name in _MODES.items()
        for end in ("input", "data")
    },
    "_batch_norm_impl_index": _batch_norm,
    "rms_norm": _rms_norm,
    "dropout": _dropout,
    "scaled_dot_product_attention": _attention,
}
