"""Operators with a leading axis of images or rows: the samples are more of them."""

from typing import Any

from torch import Tensor

from gradscope.backends.expand.facts import aten
from gradscope.backends.expand.rules import rules
from gradscope.backends.expand.tensor import Samples, fold, leaves, tensors_of, unfold

# Operator: the number of logical axes that its tensors have with the leading axis.
_WITH_ROWS = {
    "avg_pool2d.default": 4,
    "avg_pool2d_backward.default": 4,
    "avg_pool3d.default": 5,
    "avg_pool3d_backward.default": 5,
    "max_pool2d_with_indices.default": 4,
    "max_pool2d_with_indices_backward.default": 4,
    "max_pool3d_with_indices.default": 5,
    "max_pool3d_with_indices_backward.default": 5,
    "_adaptive_avg_pool2d.default": 4,
    "_adaptive_avg_pool2d_backward.default": 4,
    "adaptive_max_pool2d.default": 4,
    "adaptive_max_pool2d_backward.default": 4,
    "reflection_pad1d.default": 3,
    "reflection_pad1d_backward.default": 3,
    "reflection_pad2d.default": 4,
    "reflection_pad2d_backward.default": 4,
    "replication_pad1d.default": 3,
    "replication_pad1d_backward.default": 3,
    "replication_pad2d.default": 4,
    "replication_pad2d_backward.default": 4,
    "im2col.default": 4,
    "col2im.default": 3,
    "upsample_nearest1d.default": 3,
    "upsample_nearest2d.default": 4,
    "upsample_linear1d.default": 3,
    "upsample_bilinear2d.default": 4,
    "upsample_bicubic2d.default": 4,
    "grid_sampler_2d.default": 4,
    "pixel_shuffle.default": 4,
    "pixel_unshuffle.default": 4,
    "_cdist_forward.default": 3,
}


def _folded(key: str, width: int) -> None:
    name, _, overload = key.partition(".")
    func = getattr(getattr(aten, name), overload)

    @rules.register(key)
    def rule(s: Samples, *args: Any, **kwargs: Any) -> Any:
        found = tensors_of(args, kwargs)
        if any(t.dim() != width or t.shape[0] != found[0].shape[0] for t in found):
            return NotImplemented
        mine, named = leaves(lambda t: fold(s.of(t)), (args, kwargs))
        return leaves(lambda t: unfold(t, s.n), func(*mine, **named))


for _key, _width in _WITH_ROWS.items():
    _folded(_key, _width)


def _upsampled(key: str) -> None:
    """The backward pass of an upsampling takes the shape of the input, rows first."""
    name, _, overload = key.partition(".")
    func = getattr(getattr(aten, name), overload)

    @rules.register(key)
    def rule(s: Samples, grad: Tensor, size: list[int], shape: list[int], *rest: Any) -> Any:
        rows = fold(s.of(grad))
        return unfold(func(rows, size, [s.n * shape[0], *shape[1:]], *rest), s.n)


for _key in (
    "upsample_nearest1d_backward.default",
    "upsample_nearest2d_backward.default",
    "upsample_linear1d_backward.default",
    "upsample_bilinear2d_backward.default",
    "upsample_bicubic2d_backward.default",
):
    _upsampled(_key)


def _likelihood(name: str, width: int) -> None:
    """Unreduced negative log-likelihoods of rows, the last one also of images."""

    @rules.register(f"{name}_forward.default")
    def forward(
        s: Samples, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: int
    ) -> Any:
        if reduction != 0 or x.dim() != width or not _plain(s, weight):
            return NotImplemented
        rows = (fold(s.of(x)), fold(s.of(target)))
        out, _ = getattr(aten, f"{name}_forward")(*rows, _one(s, weight), reduction, ignore)
        return unfold(out, s.n), out.new_zeros(s.n)

    @rules.register(f"{name}_backward.default")
    def backward(
        s: Samples,
        grad: Tensor,
        x: Tensor,
        target: Tensor,
        weight: Tensor | None,
        reduction: int,
        ignore: int,
        total: Tensor,
    ) -> Any:
        if reduction != 0 or x.dim() != width or not _plain(s, weight):
            return NotImplemented
        rows = [fold(s.of(t)) for t in (grad, x, target)]
        rest = (_one(s, weight), reduction, ignore, s.of(total)[0])
        return unfold(getattr(aten, f"{name}_backward")(*rows, *rest), s.n)


def _plain(s: Samples, weight: Tensor | None) -> bool:
    return weight is None or s.n == 1 or s.of(weight).stride(0) == 0


def _one(s: Samples, weight: Tensor | None) -> Tensor | None:
    return None if weight is None else s.of(weight)[0]


_likelihood("nll_loss", 2)
_likelihood("nll_loss2d", 4)


def _loss(name: str) -> None:
    """Pointwise losses, unreduced."""
    forward_func = getattr(aten, name)
    backward_func = getattr(aten, f"{name}_backward")

    @rules.register(f"{name}.default")
    def forward(s: Samples, x: Tensor, target: Tensor, reduction: int = 1, *rest: Any) -> Any:
        if reduction != 0 or x.dim() != target.dim():
            return NotImplemented
        return forward_func(s.of(x), s.of(target), reduction, *rest)

    @rules.register(f"{name}_backward.default")
    def backward(
        s: Samples, grad: Tensor, x: Tensor, target: Tensor, reduction: int, *rest: Any
    ) -> Any:
        if reduction != 0 or not grad.dim() == x.dim() == target.dim():
            return NotImplemented
        return backward_func(s.of(grad), s.of(x), s.of(target), reduction, *rest)


for _name in ("mse_loss", "smooth_l1_loss", "huber_loss"):
    _loss(_name)
