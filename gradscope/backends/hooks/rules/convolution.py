"""Convolutions and transposed convolutions, for any number of spatial axes, groups and dilation."""

from typing import Any

from gradscope.backends.hooks.rules.base import Site, node_rules
from gradscope.blocks import Block, ConvolutionBlock, Geometry


@node_rules.register("ConvolutionBackward0")
def convolution(site: Site) -> Block | None:
    """Kernel and bias of a (transposed) convolution; the samples lie along axis 0."""
    gradient = site.gradient
    if site.axis.axis != 0 or gradient.dim() == 2:
        return None
    if site.slot == 2:
        return site.reduced(gradient, (*site.shape, *[1] * (gradient.dim() - 2)))
    if site.slot != 1:
        return None
    values = site.saved("input").conj()
    geometry = Geometry(
        stride=_each_axis(site, "stride"),
        padding=_each_axis(site, "padding"),
        dilation=_each_axis(site, "dilation"),
        output_padding=_each_axis(site, "output_padding"),
        groups=site.saved("groups"),
        transposed=site.saved("transposed"),
    )
    return ConvolutionBlock(site.first(values), site.first(gradient), site.shape, geometry)


def _each_axis(site: Site, name: str) -> tuple[int, ...]:
    value: Any = site.saved(name)
    spatial = len(site.shape) - 2
    values = tuple(int(v) for v in value)
    return values * spatial if len(values) == 1 else values
