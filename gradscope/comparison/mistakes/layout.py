"""Mistakes of layout: shapes, transposed or flipped axes, entries in another order."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations
from math import prod

import torch
from torch import Tensor

from gradscope.blocks.base import as_rows
from gradscope.comparison.mistakes.pair import Mistake, Pair, matched
from gradscope.comparison.mistakes.scale import explained

_LARGEST_ORDER = 2048  # entries of an axis whose order is searched for


def wrong_shape(found: tuple[int, ...], n: int, shape: tuple[int, ...]) -> Mistake:
    """Say what a shape that is not (n, *shape) most likely is."""
    return Mistake(
        "shape", f"has shape {found} instead of {(n, *shape)}: {_cause(found, n, shape)}"
    )


def _cause(found: tuple[int, ...], n: int, shape: tuple[int, ...]) -> str:
    if found == shape:
        return "there is no sample axis, so it is already summed or averaged over the batch"
    if found == (*shape, n):
        return "the sample axis is last and must be first"
    if found[1:] == shape:
        if found[0] == 1:
            return "one row for all samples, so it is already summed or averaged over the batch"
        if found[0] and found[0] % n == 0:
            return f"{found[0]} rows are {found[0] // n} a sample: sum them for each sample"
        return f"{found[0]} rows for {n} samples: other samples, or an incomplete last batch"
    if found == (n,):
        return "one number a sample: a norm or a loss rather than a gradient"
    if found[:1] == (n,) and sorted(found[1:]) == sorted(shape):
        return "the parameter's axes are in another order (transposed)"
    if prod(found) == n * prod(shape):
        return "the right number of entries in another shape: reshape it"
    k = prod(found[1:]) // max(prod(shape), 1)
    if found[:1] == (n,) and k > 1 and prod(found[1:]) == k * prod(shape):
        return f"{k} times too many entries: an axis of size {k} (positions?) was not summed over"
    return "it belongs to another parameter, or other samples"


def rearranged(pair: Pair) -> Mistake | None:
    """The right numbers with axes swapped, flipped, or the sample axis last."""
    for what, read in _readings(pair):
        c = pair.multiple(read(), pair.loop)
        if c is not None:
            times = "" if pair.near(c, 1.0) else f" Besides, {explained(c, pair).meaning}."
            return Mistake("layout", f"{what}.{times}")
    return None


def _readings(pair: Pair) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield what may have happened and a function that undoes it."""
    found, shape, m = pair.found, pair.shape, len(pair.found)
    for x, y in combinations(range(len(shape)), 2):
        swapped = list(shape)
        swapped[x], swapped[y] = shape[y], shape[x]
        how = "transposed" if shape[x] == shape[y] else "transposed and then reshaped"
        undo = partial(_transposed, found, (m, *swapped), x + 1, y + 1)
        yield f"axes {x} and {y} of the parameter are {how}", undo
    if len(shape) > 2:
        axes = list(range(3, len(shape) + 1))
        what = "the kernel is flipped: a convolution where torch has a correlation"
        yield what, partial(found.flip, axes)
    if m > 1 and shape:
        what = "the sample axis was last and reshaped to be first; move it (movedim) instead"
        yield what, lambda: found.reshape(*shape, m).movedim(-1, 0)


def _transposed(t: Tensor, shape: tuple[int, ...], axis0: int, axis1: int) -> Tensor:
    return t.reshape(shape).transpose(axis0, axis1)


def shuffled_entries(pair: Pair) -> Mistake | None:
    """The slices along one axis of the parameter in another order."""
    for axis, size in enumerate(pair.shape):
        if not 1 < size <= _LARGEST_ORDER:
            continue
        found, loop = (t.movedim(axis + 1, 0).reshape(size, -1) for t in (pair.found, pair.loop))
        at = matched(found, loop, pair.slack)
        if at is None or len(set(at.tolist())) < size:
            continue
        k = int((at != torch.arange(size, device=at.device)).nonzero()[:1].sum())
        return Mistake(
            "layout",
            f"the entries along axis {axis} are in another order: {k} holds what belongs to "
            f"{int(at[k])}; gates, heads, or query, key and value in another layout",
        )
    return None


def some_entries(pair: Pair) -> tuple[str, int, Tensor] | None:
    """Return (what, axis, indices) when only a few indices along one axis differ."""
    scale = as_rows(pair.loop).norm(dim=1).clamp_min(pair.loop.norm() * 1e-6)
    gaps = (pair.found - pair.loop).abs()
    wrong = (gaps > pair.tolerance * scale.reshape(-1, *[1] * len(pair.shape))).any(0)
    for axis, size in enumerate(pair.shape):
        at = wrong.movedim(axis, 0).reshape(size, -1).any(1).nonzero()[:, 0]
        if 0 < len(at) <= size // 2:
            return f"only {_span(at)} of axis {axis} (size {size}) differs", axis, at
    return None


def _span(at: Tensor) -> str:
    first, last = int(at[0]), int(at[-1])
    if len(at) == 1:
        return f"index {first}"
    if len(at) == last - first + 1:
        return f"the part {first} to {last}"
    return f"a part ({', '.join(str(int(i)) for i in at[:5])}{', ...' if len(at) > 5 else ''})"
