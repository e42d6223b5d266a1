"""Scale and shift of normalisation layers: gᵢ = Σₜ bᵢₜ · x̂ᵢₜ and Σₜ bᵢₜ."""

import torch
from torch import Tensor

from gradscope.backends.hooks.rules.base import Site, node_rules
from gradscope.blocks import Block


@node_rules.register("NativeLayerNormBackward0")
def layer_norm(site: Site) -> Block:
    """Layer normalisation over the last axes."""
    if site.slot == 2:
        return site.reduced(site.gradient)
    standard = (site.saved("input") - site.saved("result1")) * site.saved("result2")
    return site.reduced(site.gradient * standard)


@node_rules.register("NativeGroupNormBackward0")
def group_norm(site: Site) -> Block:
    """Group normalisation: channels on axis 1, statistics for each sample and group.

    Σₜ b (x − mean) rstd = rstd (Σₜ b x − mean Σₜ b), as torch's own kernel takes it.
    """
    if site.slot == 2:
        return _channels(site, site.gradient)
    values, groups = site.saved("input"), site.saved("group")
    shift, product = (
        t.reshape(*t.shape[:2], -1).sum(2).unflatten(1, (groups, -1))
        for t in (site.gradient, site.gradient * values)
    )
    mean, rstd = (site.saved(k).reshape(-1, groups, 1) for k in ("result1", "result2"))
    return _channels(site, ((product - mean * shift) * rstd).flatten(1))


@node_rules.register("NativeBatchNormBackward0")
def batch_norm(site: Site) -> Block | None:
    """Batch normalisation on running statistics, which are constants."""
    if site.saved("training") or site.axis.axis == 1:
        return None
    if site.slot == 2:
        return _channels(site, site.gradient)
    values = site.saved("input")
    mean, variance = (
        _like_channels(site.saved(k), values) for k in ("running_mean", "running_var")
    )
    standard = (values - mean) * torch.rsqrt(variance + site.saved("eps"))
    return _channels(site, site.gradient * standard)


def _like_channels(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (like.dim() - 2))


def _channels(site: Site, values: Tensor) -> Block:
    """Sum (N, c, ...) to (c,) for each sample."""
    return site.reduced(values, (*site.shape, *[1] * (values.dim() - 2)))
