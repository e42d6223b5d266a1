"""What a disagreement means: a table of detectors, each a pure function of found and loop.

The first that fits names the mistake. When none fits the whole, the samples or the entries that
differ are looked at alone, since a mistake often touches only some of them.
"""

import math
from dataclasses import replace

from gradscope.comparison.mistakes.layout import (
    rearranged,
    shuffled_entries,
    some_entries,
    wrong_shape,
)
from gradscope.comparison.mistakes.pair import Detector, Mistake, Pair, cosine, factor, number
from gradscope.comparison.mistakes.samples import (
    accumulated,
    coupled,
    mixed,
    offset,
    reordered,
    repeated,
    some_samples,
)
from gradscope.comparison.mistakes.scale import scaled, scaled_by_sample
from gradscope.comparison.mistakes.values import (
    all_zero,
    not_finite,
    rounded,
    should_be_zero,
    transformed,
)

__all__ = ["DETECTORS", "Mistake", "Pair", "cosine", "diagnose", "factor", "wrong_shape"]

# from the surest to the vaguest: a later one may also hold where an earlier one explains more
DETECTORS: tuple[Detector, ...] = (
    not_finite,
    all_zero,
    should_be_zero,
    rounded,
    scaled,
    repeated,
    accumulated,
    offset,
    reordered,
    rearranged,
    transformed,
    shuffled_entries,
    scaled_by_sample,
)
_VAGUE: tuple[Detector, ...] = (coupled, mixed)


def diagnose(pair: Pair) -> Mistake:
    """Say what is wrong with gradients that disagree."""
    return _first(DETECTORS, pair) or _parts(pair) or _first(_VAGUE, pair) or _unknown(pair)


def _first(detectors: tuple[Detector, ...], pair: Pair) -> Mistake | None:
    return next((m for m in (detect(pair) for detect in detectors) if m is not None), None)


def _parts(pair: Pair) -> Mistake | None:
    """Look at the samples, or at the entries, that differ."""
    samples = some_samples(pair)
    if samples is not None:
        inner = diagnose(pair.rows(pair.errors > pair.tolerance))
        return Mistake("some_samples", f"{samples}; there: {inner.meaning}")
    entries = some_entries(pair)
    if entries is None:
        return None
    what, axis, at = entries
    found, loop = (t.index_select(axis + 1, at) for t in (pair.found, pair.loop))
    inner = diagnose(replace(pair, found=found, loop=loop, parameter=None))
    return Mistake("some_entries", f"{what}; there: {inner.meaning}")


def _unknown(pair: Pair) -> Mistake:
    c, cosine = pair.factor, pair.cosine
    fit = f"cosine {cosine:.2f}" if c is None else f"c = {number(c)}, cosine {cosine:.2f}"
    if c is not None and abs(c - 1) < 0.2 and cosine < 0.95:
        return Mistake(
            "sample_axis",
            f"{fit}: right in size, wrong for each sample: perhaps another axis was taken for "
            "the sample axis, or the samples are coupled",
        )
    chance = min(0.4, max(0.1, 2 / math.sqrt(max(pair.found[0].numel(), 1))))
    if abs(cosine) < chance:
        return Mistake(
            "unrelated",
            f"{fit}: unrelated to the loop's: other samples, other weights (checkpoint), another "
            "loss, or another mode (dropout, training instead of eval)",
        )
    return Mistake(
        "unknown",
        f"{fit}: no simple relation; a part of the gradient is missing or wrong (one of several "
        "uses of the parameter, padding, groups, a square taken before a sum)",
    )
