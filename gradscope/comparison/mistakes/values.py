"""Mistakes in the numbers themselves: not finite, zero, rounded, put through a function."""

import torch

from gradscope.blocks.base import as_rows
from gradscope.comparison.mistakes.pair import Mistake, Pair, listed, number


def not_finite(pair: Pair) -> Mistake | None:
    """NaN or infinity in a sample that is finite in the loop, or the other way round."""
    bad = ~as_rows(pair.found).isfinite().all(1)
    right = ~as_rows(pair.loop).isfinite().all(1)
    if bool((right & ~bad).any()):
        where = listed(pair.samples[right & ~bad], "sample")
        return Mistake(
            "hides_not_finite",
            f"{where} is not finite in the loop, but is finite here: something replaced NaN or "
            "infinity; the true gradient has none",
        )
    if not bool((bad & ~right).any()):
        return None
    where = listed(pair.samples[bad & ~right], "sample")
    return Mistake(
        "not_finite",
        f"NaN or infinity in {where} ({int((bad & ~right).sum())} of {pair.n}), where the loop is "
        "finite: overflow in lower precision, a division by a zero norm, or a buffer that was "
        "never written",
    )


def all_zero(pair: Pair) -> Mistake | None:
    """Zeros where the loop has a gradient."""
    if bool(pair.found.any()) or not bool(pair.loop.any()):
        return None
    return Mistake(
        "zero",
        "all zero, though the loss depends on this parameter: its use was not seen (a hook that "
        "did not fire, a weight used outside its module, a detached graph) or not written",
    )


def should_be_zero(pair: Pair) -> Mistake | None:
    """A gradient where the loop has zeros."""
    if bool(pair.loop.any()) or not bool(pair.found.any()):
        return None
    return Mistake(
        "not_zero",
        "the loop has zeros here: the loss does not depend on this (unused, padding, masked); "
        "these numbers come from elsewhere: a stale .grad, a buffer that was not cleared, or a "
        "mask that was not applied",
    )


def rounded(pair: Pair) -> Mistake | None:
    """The right numbers in a lower precision, or of a slightly different formula."""
    limit = 1e-4 if pair.tolerance < 1e-6 else min(100 * pair.tolerance, 0.05)
    worst = float(pair.errors.max())
    if worst > limit:
        return None
    return Mistake(
        "rounded",
        f"right up to {worst:.0e}: lower precision (float32, TF32), an approximation, or a "
        "slightly different constant such as an eps; an activation at its kink does it too in "
        "float32: compute in float64 to tell them apart",
    )


_FUNCTIONS = {
    "absolute values of the gradients": torch.abs,
    "squares of the gradients": torch.square,
    "signs of the gradients": torch.sign,
}


def transformed(pair: Pair) -> Mistake | None:
    """A function of each entry: its absolute value, square or sign."""
    for what, fn in _FUNCTIONS.items():
        c = pair.multiple(pair.found, fn(pair.loop))
        if c is not None:
            times = "" if pair.near(c, 1.0) else f", times {number(c)}"
            return Mistake("transformed", f"these are the {what}{times}, not the gradients")
    return None
