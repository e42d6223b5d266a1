"""Mistakes about samples: in another order, summed, accumulated, mixed."""

import torch
from torch import Tensor

from gradscope.blocks.base import as_rows
from gradscope.comparison.mistakes.pair import Mistake, Pair, factor, listed, matched, number
from gradscope.comparison.mistakes.scale import explained


def repeated(pair: Pair) -> Mistake | None:
    """The same row for every sample: the sum, the mean, or one sample's."""
    found, loop = as_rows(pair.found), as_rows(pair.loop)
    spread = (found - found[:1]).norm(dim=1).max()
    if len(found) < 2 or not bool(spread <= pair.slack * found[0].norm()):
        return None
    own = (loop - found[:1]).norm(dim=1)
    if bool(own.min() <= pair.slack * loop.norm(dim=1).max()):
        j = int(pair.samples[int(own.argmin())])
        return Mistake(
            "one_sample",
            f"every row is the gradient of sample {j}: an index that does not advance, or one "
            "buffer that is returned for all samples",
        )
    c = pair.multiple(found[0], loop.sum(0))
    if c is None:
        return Mistake("constant", "every row is the same, and it is no sample's gradient")
    what = "sum" if pair.near(c, 1.0) else "mean" if pair.near(c, 1 / pair.n) else None
    text = f"the {what}" if what else f"{number(c)} times the sum"
    return Mistake(
        "summed",
        f"every row is {text} of all samples' gradients: they were reduced over the batch and "
        "then spread over it; take one loss at a time, or keep the sample axis",
    )


def accumulated(pair: Pair) -> Mistake | None:
    """Row i is the sum of the samples up to i: `.grad` was not cleared."""
    if len(pair.found) < 2 or len(pair.found) < pair.n:
        return None
    c = pair.multiple(pair.found.diff(dim=0), pair.loop[1:])
    if c is None:
        return None
    times = "" if pair.near(c, 1.0) else f" Besides, {explained(c, pair).meaning}."
    return Mistake(
        "accumulated",
        "row i is the sum of samples 0 to i: .grad adds up from one backward pass to the next; "
        f"clear it before each, or use torch.autograd.grad.{times}",
    )


def offset(pair: Pair) -> Mistake | None:
    """The same tensor added to every row."""
    extra = pair.found - pair.loop
    size = extra[0].norm()
    if len(extra) < 2 or not bool(as_rows(extra - extra[:1]).norm(dim=1).max() <= _loose(pair)):
        return None
    if not bool(size > 10 * _loose(pair)):
        return None
    added, total = extra.mean(0), pair.loop.sum(0)
    c = pair.multiple(added, total)
    if c is not None and pair.near(c, -1 / pair.n):
        return Mistake("centred", "the mean over the samples was subtracted from every row")
    if c is not None:
        return Mistake(
            "offset",
            f"{number(c)} times the batch's whole gradient was added to every row: a .grad that "
            "was not cleared",
        )
    decay = None if pair.parameter is None else pair.multiple(added, pair.parameter)
    if decay is not None:
        return Mistake(
            "weight_decay",
            f"every row has {number(decay)} times the parameter added: weight decay, or a penalty "
            "on the weights, that the loss here does not have",
        )
    return Mistake(
        "offset",
        "every row has the same tensor added: a .grad that was not cleared before, or a term of "
        "the loss that does not depend on the sample",
    )


def reordered(pair: Pair) -> Mistake | None:
    """Every row is some sample's gradient, but not its own."""
    found, loop = as_rows(pair.found), as_rows(pair.loop)
    if len(found) < 2:
        return None
    whole = len(found) == pair.n
    ratio = float(found.norm() / loop.norm()) if bool(loop.any()) else 0.0
    for c in (1.0, ratio, -ratio):
        at = matched(found / c, loop, pair.slack) if c else None
        if at is None or bool((at == torch.arange(len(at), device=at.device)).all()):
            continue
        times = "" if pair.near(c, 1.0) else f" Besides, {explained(c, pair).meaning}."
        return _order(at, pair.samples, times, whole)
    return None


def _order(at: Tensor, samples: Tensor, times: str, whole: bool) -> Mistake:
    m = len(at)
    own = torch.arange(m, device=at.device)
    example = int((at != own).nonzero()[0])
    shown = f"row {int(samples[example])} holds sample {int(samples[at[example]])}"
    if len(set(at.tolist())) < m:
        return Mistake(
            "other_samples",
            f"every row is a sample's gradient, but some are another sample's: {shown}; an index "
            f"is off, or some samples were computed more than once.{times}",
        )
    shift = int(own[0] - at[0]) % m
    if whole and bool((at == own.flip(0)).all()):
        order = "in reverse order"
    elif whole and bool((at == (own - shift) % m).all()):
        order = f"shifted by {shift if shift <= m // 2 else shift - m}"
    else:
        order = "in another order"
    return Mistake(
        "permuted",
        f"the samples are {order}: {shown}; a shuffling or sorting loader, or results gathered "
        f"out of order.{times}",
    )


def mixed(pair: Pair) -> Mistake | None:
    """The sum over the samples is right, its division among them is not."""
    if len(pair.found) < 2:
        return None
    found, loop = pair.found.sum(0), pair.loop.sum(0)
    rounding = pair.slack * as_rows(pair.loop).norm(dim=1).sum()
    c = factor(found, loop)
    if c is None or bool(loop.norm() <= rounding):
        return None
    if not bool((found - c * loop).norm() <= pair.slack * loop.norm()):
        return None
    if not pair.near(c, 1.0) and not (pair.n > 1 and pair.near(c, 1 / pair.n)):
        return None
    scale = "" if pair.near(c, 1.0) else " (up to 1/n: a mean-reduced loss)"
    return Mistake(
        "sample_axis",
        f"the sum over the samples is right{scale}, its division among them is not (cosine "
        f"{pair.cosine:.2f}): another axis was taken for the sample axis, as with (T, n) and "
        "(n, T) or a reshape to n·T, or the samples are coupled",
    )


def coupled(pair: Pair) -> Mistake | None:
    """The loss itself depends on who else is in the batch."""
    if not pair.coupled:
        return None
    return Mistake(
        "coupled",
        "the batch's losses differ from those of one sample at a time: samples are coupled "
        "(BatchNorm in training mode, a contrastive loss) or the model draws random numbers "
        "(dropout); put it in eval mode, or use a layer without batch statistics",
    )


def some_samples(pair: Pair) -> str | None:
    """Which samples differ, when most of the structure is to be looked for in these alone."""
    wrong = pair.errors > pair.tolerance
    k = int(wrong.sum())
    if not 0 < k < len(wrong):
        return None
    return f"only {listed(pair.samples[wrong], 'sample')} of {pair.n} differ{'s' if k == 1 else ''}"


def _loose(pair: Pair) -> float:
    return pair.slack * float(as_rows(pair.loop).norm(dim=1).max())
