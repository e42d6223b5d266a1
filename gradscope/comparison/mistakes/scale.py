"""Mistakes of scale: one factor for all samples, or one a sample."""

import torch

from gradscope.blocks.base import as_rows
from gradscope.comparison.mistakes.pair import Mistake, Pair, number


def scaled(pair: Pair) -> Mistake | None:
    """The loop's gradients times one factor that is not 1."""
    c = pair.multiple(pair.found, pair.loop)
    return None if c is None or pair.near(c, 1.0) else explained(c, pair)


def explained(c: float, pair: Pair) -> Mistake:
    """Say where a factor c ≠ 1 comes from."""
    if c < 0:
        if pair.near(c, -1.0):
            return Mistake(
                "sign", "c = -1: the sign is flipped: the descent direction, or a maximised loss"
            )
        kind, meaning = explained(-c, pair)
        return Mistake(kind, f"the sign is flipped, and besides, for {number(c)}: {meaning}")
    n = pair.n
    if n > 1 and pair.near(c, 1 / n):
        return Mistake(
            "mean_loss",
            f"c = 1/n with n = {n}: these are gradients of the mean loss; multiply by n, or use "
            "reduction='none' or 'sum' instead of 'mean'",
        )
    if n > 1 and pair.near(c, n):
        return Mistake(
            "times_n",
            f"c = n with n = {n}: multiplied by n for a mean loss that was not averaged; divide "
            "by n (a library's loss_reduction='mean' does this to a summed loss)",
        )
    if n > 1 and (pair.near(c, n * n) or pair.near(c, 1 / n**2)):
        power = "n²" if c > 1 else "1/n²"
        return Mistake("n_squared", f"c = {power} with n = {n}: scaled by the batch size twice")
    return _integer(c, pair) or Mistake(
        "factor",
        f"c = {number(c)}: every gradient is off by this one factor; look for a weight or a "
        "temperature of the loss, or a loss scale that was not taken out",
    )


def _integer(c: float, pair: Pair) -> Mistake | None:
    k = round(c if c > 1 else 1 / c)
    if k < 2 or not pair.near(c if c > 1 else 1 / c, k):
        return None
    name = f"k = {k}" if c > 1 else f"1/k with k = {k}"
    if k in pair.sizes:
        way = "sum here, mean in the loss" if c > 1 else "mean here, sum in the loss"
        return Mistake(
            "positions",
            f"c = {name}, {pair.sizes[k]}: the loss within a sample is normalised differently: "
            f"{way}",
        )
    if k % pair.n == 0 and k // pair.n in pair.sizes:
        return Mistake(
            "positions",
            f"c = {name} = {pair.n} samples times {k // pair.n}, {pair.sizes[k // pair.n]}: a "
            "mean over the whole batch's entries on one side, not on the other",
        )
    if k == 2:
        cause = (
            "counted twice (a hook that fired twice, a gradient accumulated over two passes)"
            if c > 1
            else "half of it is missing (one of two uses), or a loss with a ½ in front"
        )
        return Mistake("double" if c > 1 else "half", f"c = {number(c)}: {cause}")
    return Mistake(
        "factor",
        f"c = {name}: a mean in place of a sum over {k} of something, or the reverse (positions, "
        "classes, heads, devices, steps of accumulation)",
    )


def scaled_by_sample(pair: Pair) -> Mistake | None:
    """Every sample right in direction, more than half with a factor of their own."""
    if 2 * int((pair.errors > pair.tolerance).sum()) <= len(pair.errors):
        return None  # rather look at the few alone
    found, loop = as_rows(pair.found), as_rows(pair.loop)
    squares = (loop * loop).sum(1)
    if found.shape[1] < 2 or len(found) < 2 or not bool((squares > 0).all()):
        return None
    factors = (found * loop).sum(1) / squares
    norms = found.norm(dim=1)
    rest = (found - factors[:, None] * loop).norm(dim=1)
    if not bool(((rest <= pair.slack * norms) & (norms > 0)).all()):
        return None
    span = f"between {number(float(factors.min()))} and {number(float(factors.max()))}"
    return Mistake("factor_per_sample", _cause(factors, norms, pair, span))


def _cause(factors: torch.Tensor, norms: torch.Tensor, pair: Pair, span: str) -> str:
    if bool(((factors.abs() - 1).abs() <= pair.slack).all()):
        return "right up to the sign, which is flipped for some samples"
    largest = norms.max()
    if bool(((norms - largest).abs() <= pair.slack * largest).all()):
        return f"every row has the norm {number(float(largest))}: normalised or clipped gradients"
    return (
        f"each sample is right in direction, but has a factor of its own, {span}: a weight a "
        "sample (class weights, the number of its tokens under a mean, ignore_index) or clipping"
    )
