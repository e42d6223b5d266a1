"""Elementwise operations and expansions: a parameter that was broadcast over the samples."""

from gradscope.backends.hooks.rules.base import Site, node_rules
from gradscope.blocks import Block


@node_rules.register("AddBackward0")
def add(site: Site) -> Block:
    """Self + α·other."""
    if site.slot == 0:
        return site.reduced(site.gradient)
    alpha = site.saved("alpha")
    return site.reduced(site.gradient if alpha == 1 else site.gradient * alpha)


@node_rules.register("SubBackward0")
def sub(site: Site) -> Block:
    """Self − α·other."""
    factor = 1 if site.slot == 0 else -site.saved("alpha")
    return site.reduced(site.gradient * factor)


@node_rules.register("MulBackward0")
def mul(site: Site) -> Block:
    """Self · other."""
    factor = site.saved("other" if site.slot == 0 else "self")
    return site.reduced(site.gradient * factor.conj())


@node_rules.register("DivBackward0")
def div(site: Site) -> Block:
    """Self / other; the derivative by other is −self / other²."""
    other = site.saved("other")
    if site.slot == 0:
        return site.reduced(site.gradient / other.conj())
    ratio = -site.saved("self") / (other * other)
    return site.reduced(site.gradient * ratio.conj())


@node_rules.register("ExpandBackward0")
def expand(site: Site) -> Block:
    """A parameter expanded over the samples, such as a class token."""
    return site.reduced(site.gradient)
