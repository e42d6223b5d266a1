"""Wrong formulas for the gradients of single layers, from the data that hooks see."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from gradscope.core.batch import map_tensors


@dataclass(eq=False)
class Call:
    """One forward call of a layer, and the gradients at its output."""

    inputs: Any
    keywords: dict[str, Any]
    output: Tensor
    gradients: list[Tensor] = field(default_factory=list)  # one for each backward pass
    inner: int = 0  # the number of gradients from backward passes within the loss, which come first


def copied(t: Tensor) -> Tensor:
    """Return a copy without graph."""
    return t.detach().clone()


def pulled(module: nn.Module, call: Call, gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return the gradient (*shape) of a layer's parameter from one call of the layer."""
    buffers = dict(module._buffers)  # running statistics are restored
    module._buffers.update({k: b if b is None else b.clone() for k, b in buffers.items()})
    try:
        with torch.enable_grad():
            inputs, keywords = map_tensors(copied, (call.inputs, call.keywords))
            output = module(*inputs, **keywords)
    finally:
        module._buffers.update(buffers)
    with torch.enable_grad():
        return torch.autograd.grad(
            output, parameter, gradient, allow_unused=True, materialize_grads=True
        )[0].detach()


def features(module: nn.Module, output: Tensor) -> int:
    """Return the number of features at each position of a layer's output."""
    channels = isinstance(module, (_ConvNd, _NormBase, nn.GroupNorm))
    return output.shape[1 if channels else -1] if output.dim() > 1 else 1


# (layer, call, gradient at the output, parameter) -> the gradient (*shape) of a wrong formula
Change = Callable[[nn.Module, Call, Tensor, Tensor], Tensor]


def variants(module: nn.Module, name: str) -> Iterator[tuple[str, Change]]:
    """Yield wrong formulas for the parameters of a kind of layer."""
    if isinstance(module, _ConvNd) and not isinstance(module, _ConvTransposeNd):
        yield from _convolutions(module)
    elif isinstance(module, nn.Embedding):
        yield from _embeddings(module)
    elif isinstance(module, (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)):
        yield (
            "the gradient was multiplied by the layer's input: multiply by the normalised input",
            lambda m, call, g, p: _onto(g * call.inputs[0], p, m),
        )
        yield (
            "the gradient was multiplied by the layer's output: multiply by the normalised input "
            "(before weight and bias)",
            lambda m, call, g, p: _onto(g * call.output, p, m),
        )
        yield (
            "the gradient was not multiplied by the normalised input: this is the bias's formula",
            lambda m, call, g, p: _onto(g, p, m),
        )
    elif isinstance(module, nn.Linear):
        yield (
            "inputs and gradients were summed over positions first and multiplied then: multiply "
            "at each position, and sum the products (einsum 'nto,nti->noi')",
            _linear(lambda t: t.flatten(0, -2).sum(0, keepdim=True)),
        )
        for k, which in ((-1, "last"), (0, "first")):
            yield (
                f"only the {which} position was counted: sum over all positions",
                _linear(lambda t, k=k: t.flatten(0, -2)[k:][:1]),  # type: ignore[misc]
            )


def _linear(of: Callable[[Tensor], Tensor]) -> Change:
    """Return outer products of inputs and gradients, after applying `of` to both."""

    def change(_: nn.Module, call: Call, g: Tensor, p: Tensor) -> Tensor:
        if g.dim() < 3:
            raise RuntimeError("there are no positions")
        return of(g).T @ of(call.inputs[0]) if p.dim() == 2 else of(g)[0]

    return change


def _onto(product: Tensor, p: Tensor, module: nn.Module) -> Tensor:
    """Sum (1, ...) over all axes that a normalisation layer's parameter does not have."""
    if isinstance(module, (_NormBase, nn.GroupNorm)):
        return product.transpose(0, 1).flatten(1).sum(1)
    return product.sum_to_size(p.shape)


def _embeddings(module: nn.Embedding) -> Iterator[tuple[str, Change]]:
    def scattered(weigh: Callable[[Tensor, Tensor], Tensor]) -> Change:
        def change(_: nn.Module, call: Call, g: Tensor, p: Tensor) -> Tensor:
            tokens, rows = call.inputs[0].flatten(), g.flatten(0, -2)
            weights = weigh(tokens, torch.arange(len(tokens), device=tokens.device))
            return torch.zeros_like(p).index_add(0, tokens, rows * weights[:, None])

        return change

    def kept(tokens: Tensor) -> Tensor:
        return torch.ones(len(tokens)) if pad is None else (tokens != pad).double()

    pad = module.padding_idx
    if pad is not None:
        yield (
            f"the padding token {pad} has a gradient: row padding_idx = {pad} must be zero",
            scattered(lambda tokens, _: torch.ones(len(tokens), dtype=torch.float64)),
        )

    def same(tokens: Tensor) -> Tensor:
        return tokens[:, None] == tokens

    yield (
        "only the last occurrence of a repeated token was counted: add with index_add_ (or "
        "scatter_add_), which sums, instead of assigning by index",
        scattered(lambda tokens, at: kept(tokens) * ~(same(tokens) & (at > at[:, None])).any(1)),
    )
    yield (
        "only the first occurrence of a repeated token was counted: sum over all occurrences",
        scattered(lambda tokens, at: kept(tokens) * ~(same(tokens) & (at < at[:, None])).any(1)),
    )
    yield (
        "the mean over the occurrences of a repeated token was taken: sum them",
        scattered(lambda tokens, _: kept(tokens) / same(tokens).sum(1)),
    )


def _convolutions(module: _ConvNd) -> Iterator[tuple[str, Change]]:
    axes = len(module.kernel_size)
    convolve = (nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d)[axes - 1]
    own: dict[str, Any] = {
        "stride": module.stride,
        "padding": module.padding,
        "dilation": module.dilation,
    }

    def with_options(**options: Any) -> Change:
        def change(layer: nn.Module, call: Call, g: Tensor, p: Tensor) -> Tensor:
            if p.dim() == 1:
                raise RuntimeError("a bias has no stride")
            x = call.inputs[0]
            with torch.enable_grad():
                weight = p.detach().requires_grad_()
                y = convolve(x, weight, None, **(own | {"groups": module.groups} | options))
                sizes = [min(a, b) for a, b in zip(y.shape[2:], g.shape[2:], strict=True)]
                part: Any = (..., *(slice(size) for size in sizes))
                return torch.autograd.grad(y[part], weight, g[part])[0]

        return change

    for option, plain in (("stride", 1), ("dilation", 1), ("padding", 0)):
        if own[option] not in ((plain,) * axes, plain, "valid"):
            yield (
                f"the layer's {option} {own[option]} was ignored: pass {option}= to unfold (or to "
                "the convolution that computes the gradient)",
                with_options(**{option: plain}),
            )
    if module.padding_mode != "zeros":
        yield (
            f"the input was padded with zeros; the layer has padding_mode={module.padding_mode!r}",
            with_options(),
        )
    if module.groups > 1:
        groups = module.groups

        def interleaved(layer: nn.Module, call: Call, g: Tensor, p: Tensor) -> Tensor:
            x = call.inputs[0]
            x = x.unflatten(1, (x.shape[1] // groups, groups)).transpose(1, 2).flatten(1, 2)
            return pulled(layer, Call((x,), {}, call.output), g, p)

        yield (
            f"the input channels were assigned to the {groups} groups in turn; torch's groups have "
            "consecutive channels",
            interleaved,
        )

    def at(k: int) -> Change:
        def change(layer: nn.Module, call: Call, g: Tensor, p: Tensor) -> Tensor:
            one = torch.zeros_like(g)
            one.flatten(2)[..., k] = g.flatten(2)[..., k]
            return pulled(layer, call, one, p)

        return change

    yield "only the first position of the output was counted: sum over all positions", at(0)
    yield "only the last position of the output was counted: sum over all positions", at(-1)
