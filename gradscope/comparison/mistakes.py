"""Mistakes in one parameter's gradients, found from the numbers alone.

Each detector tests one relation between the found and the right gradients: a factor, another order
or layout, a sum, an added term, lower precision. It reports the relation only if it holds within
rounding. If no relation fits all samples, the differing samples are tested separately.
`comparison.alternatives` tests relations that need the model.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import permutations
from math import prod, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from gradscope.blocks.base import as_rows


class Mistake(NamedTuple):
    """A mistake in one parameter's gradients."""

    kind: str  # a word for programs
    meaning: str  # a text for people


@dataclass(frozen=True)
class GradientPair:
    """One parameter's gradients as found and from the loop, both real and in float64."""

    found: Tensor  # (m, *shape), the rows to test
    loop: Tensor  # (m, *shape), the right rows
    errors: Tensor  # (m,), relative to the scale of each sample; infinite where not finite
    samples: Tensor  # (m,) int64, positions in the batch
    n: int  # the number of samples of the whole batch
    tolerance: float  # the largest error that agrees
    coupled: bool = False  # losses in the batch differ from losses in batches of one
    noun: str = "sample"  # the kind of row: sample or token
    value: Tensor | None = None  # (*shape), the parameter's value
    # {description: (m,)}: "norm" of the whole gradient, "class", and factors by which a loss may
    # have been multiplied
    facts: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def slack(self) -> float:
        """The largest error of a relation between found and right gradients."""
        return max(1e-6, 3 * self.tolerance)

    def near(self, x: float, y: float) -> bool:
        """Whether two factors are equal within `slack`."""
        return abs(x - y) <= self.slack * abs(y)

    def multiple(self, x: Tensor, y: Tensor) -> float | None:
        """Return c if x = c·y and both are not zero, else None.

        Two single numbers always have a factor, so only 1, n and 1/n count for them.
        """
        c = factor(x, y)
        if not c or not bool((x - c * y).norm() <= self.slack * x.norm()):
            return None
        if x.numel() == 1 and not any(self.near(abs(c), k) for k in (1.0, self.n, 1 / self.n)):
            return None
        return c

    def rows(self, mask: Tensor) -> "GradientPair":
        """Return the pair of the samples in a mask (m,)."""
        parts = {k: getattr(self, k)[mask] for k in ("found", "loop", "errors", "samples")}
        return replace(self, **parts, facts={k: f[mask] for k, f in self.facts.items()})


def diagnose(pair: GradientPair) -> Mistake:
    """Return the mistake in gradients that disagree."""
    for detect in DETECTORS:
        if mistake := detect(pair):
            return mistake
    wrong = pair.errors > pair.tolerance
    count = int(wrong.sum())
    if 0 < count < len(wrong):
        inner, verb = diagnose(pair.rows(wrong)), "differs" if count == 1 else "differ"
        which = f"only {listed_rows(pair.samples[wrong], pair.noun)} of {pair.n} {verb}"
        return Mistake("some_samples", f"{which}: {inner.meaning}")
    if mistake := _own_factors(pair):
        return mistake
    if pair.coupled:
        return Mistake(
            "coupled",
            f"the losses in the batch differ from the losses of one {pair.noun} at a time: "
            f"{pair.noun}s are coupled (BatchNorm in training mode, a contrastive loss) or the "
            "model draws random numbers (dropout). Put the model in eval mode, or use layers "
            "without batch statistics",
        )
    c, angle = factor(pair.found, pair.loop), cosine(pair.found, pair.loop)
    fit = f"cosine {angle:.2f}" if c is None else f"c = {number(c)}, cosine {angle:.2f}"
    if abs(angle) < min(0.4, max(0.1, 2 / sqrt(max(pair.found[0].numel(), 1)))):
        return Mistake(
            "unrelated",
            f"{fit}: unrelated to the loop's gradients. Possible causes: different {pair.noun}s, "
            "different weights (checkpoint), a different loss, or a different mode (dropout, "
            "training instead of eval)",
        )
    return Mistake(
        "unknown",
        f"{fit}: no simple relation. A part of the gradient is missing or wrong (one of several "
        "uses of the parameter, padding, groups, a .grad that was not cleared, a wrong "
        f"{pair.noun} axis)",
    )


def _missing(pair: GradientPair) -> Mistake | None:
    """Test for zeros where the loop has a gradient, or a gradient where the loop has zeros."""
    here, there = bool(pair.found.any()), bool(pair.loop.any())
    if not here and there:
        return Mistake(
            "zero",
            "all zero, although the loss depends on this parameter: its use was missed (a hook "
            "that did not fire, a weight used outside its module, a detached graph, a frozen "
            "parameter) or its gradient was not written",
        )
    if here and not there:
        return Mistake(
            "not_zero",
            "the loop has zeros here, because the loss does not depend on this parameter (unused, "
            "padding, masked). Possible causes of your numbers: a stale .grad, a buffer that was "
            "not cleared, or a mask that was not applied",
        )
    return None


def _imprecise(pair: GradientPair) -> Mistake | None:
    """Test for NaN or infinity on one side only, and for right numbers in lower precision."""
    bad, right = (~as_rows(t).isfinite().all(1) for t in (pair.found, pair.loop))
    if bool((right & ~bad).any()):
        return Mistake(
            "hides_not_finite",
            f"{listed_rows(pair.samples[right & ~bad], pair.noun)} is not finite in the loop, but "
            "is finite here: NaN or infinity was replaced, although the true gradient has them",
        )
    if bool((bad & ~right).any()):
        where = listed_rows(pair.samples[bad & ~right], pair.noun)
        return Mistake(
            "not_finite",
            f"NaN or infinity in {where} ({int((bad & ~right).sum())} of {pair.n}), where the "
            "loop is finite: overflow in lower precision, a division by a zero norm, or a buffer "
            "that was never written",
        )
    for dtype in (torch.bfloat16, torch.float16):
        near = (pair.found - pair.loop).norm() <= 10 * torch.finfo(dtype).eps * pair.loop.norm()
        if bool(near) and torch.equal(pair.found, pair.found.to(dtype).to(pair.found.dtype)):
            name = str(dtype).removeprefix("torch.")
            text = (
                f"every number is a {name} number, right up to {float(pair.errors.max()):.0e}: the "
                f"gradients were computed or stored in {name}, a lower precision; compute and "
                "store them in float32 or float64"
            )
            return Mistake("rounded", text)
    worst = float(pair.errors.max())
    if worst > (1e-4 if pair.tolerance < 1e-6 else min(100 * pair.tolerance, 0.05)):
        return None
    return Mistake(
        "rounded",
        f"right up to {worst:.0e}. Possible causes: lower precision (float32, TF32), an "
        "approximation, a slightly different constant such as an eps, or in float32 an activation "
        "at its kink. Compute in float64 to distinguish them",
    )


def _scaled(pair: GradientPair) -> Mistake | None:
    """Test for the loop's gradients times a factor that is not 1."""
    c = pair.multiple(pair.found, pair.loop)
    return None if c is None or pair.near(c, 1.0) else explained_factor(c, pair)


def explained_factor(c: float, pair: GradientPair) -> Mistake:
    """Return the likely cause of a factor c ≠ 1."""
    n = pair.n
    if pair.near(c, -1.0):
        text = "c = -1: the sign is flipped (the descent direction, or a maximised loss)"
        return Mistake("sign", text)
    if c < 0:
        kind, meaning = explained_factor(-c, pair)
        return Mistake(kind, f"the sign is flipped; in addition, for {number(c)}: {meaning}")
    if n > 1 and pair.near(c, 1 / n):
        return Mistake(
            "mean_loss",
            f"c = 1/n with n = {n}: these are gradients of the mean loss; multiply by n, or use "
            "reduction='none' or 'sum' instead of 'mean'",
        )
    if n > 1 and pair.near(c, n):
        return Mistake(
            "times_n",
            f"c = n with n = {n}: multiplied by n, as for a mean loss, but the loss was summed; "
            "divide by n (loss_reduction='mean' of a library does this to a summed loss)",
        )
    ratio = max(c, 1 / c)
    k = round(ratio)
    if 2 <= k < 1_000_000 and pair.near(ratio, k):
        name = f"k = {k}" if c > 1 else f"1/k with k = {k}"
        return Mistake(
            "factor",
            f"c = {name}: a mean instead of a sum over {k} items, or a sum instead of a mean "
            "(positions, classes, heads, devices, uses of the parameter, steps of accumulation)",
        )
    return Mistake(
        "factor",
        f"c = {number(c)}: every gradient is multiplied by this factor; look for a weight or a "
        "temperature of the loss, or a loss scale that was not removed",
    )


def besides(c: float, pair: GradientPair) -> str:
    """Return a sentence on a factor in addition to another relation, "" if it is 1."""
    return "" if pair.near(c, 1.0) else f" In addition, {explained_factor(c, pair).meaning}."


def _reordered(pair: GradientPair) -> Mistake | None:
    """Test for rows that are other samples' gradients, or the sum over all samples."""
    found, loop = as_rows(pair.found), as_rows(pair.loop)
    if len(found) < 2:
        return None
    same = bool((found - found[:1]).norm(dim=1).max() <= pair.slack * found[0].norm())
    c = pair.multiple(found[0], loop.sum(0)) if same else None
    if c is not None:
        what = "mean" if pair.near(c * pair.n, 1.0) else "sum"
        scale = "" if what == "mean" or pair.near(c, 1.0) else f"{number(c)} times "
        return Mistake(
            "summed",
            f"every row is {scale}the {what} of all {pair.noun}s' gradients: the gradients were "
            "reduced over the batch and then expanded; differentiate one loss at a time, or keep "
            f"the {pair.noun} axis",
        )
    ratio = float(found.norm() / loop.norm()) if bool(loop.any()) else 0.0
    for c in (1.0, ratio, -ratio):
        at = _matched(found / c, loop, pair.slack) if c else None
        if at is None:
            continue
        moved = (at != torch.arange(len(at), device=at.device)).nonzero()[:, 0]
        if not len(moved):
            continue
        if len(set(at.tolist())) == 1:
            which = listed_rows(pair.samples[at[:1]], pair.noun)
            return Mistake(
                "one_row",
                f"every row is the gradient of {which}: all rows are the same tensor, which was "
                f"overwritten; store a copy of each row (p.grad.clone()).{besides(c, pair)}",
            )
        row, sample = (int(pair.samples[k]) for k in (moved[0], at[moved[0]]))
        return Mistake(
            "permuted",
            f"the {pair.noun}s are in another order: row {row} is the gradient of {pair.noun} "
            f"{sample}. Possible causes: a loader that shuffles or sorts, results gathered out of "
            f"order, a wrong index, or one buffer for several {pair.noun}s.{besides(c, pair)}",
        )
    return None


def _matched(a: Tensor, b: Tensor, slack: float) -> Tensor | None:
    """Return (k,) the row of b (k, p) that equals each row of a (k, p), or None if a row fails."""
    if not bool(b.any()):
        return None
    lengths = a.norm(dim=1), b.norm(dim=1)
    allowed = slack * lengths[1].max()
    gaps = (lengths[0][:, None] - lengths[1]).abs().min(1).values
    if not bool((gaps <= allowed).all()):  # cheap, and sufficient in most cases
        return None
    distances = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
    own = torch.arange(len(a), device=a.device)
    best, at = distances.min(1)
    at = torch.where(distances.diagonal() <= allowed, own, at)  # if rows of b are equal, its own
    return at if bool((best <= allowed).all()) else None


def _rearranged(pair: GradientPair) -> Mistake | None:
    """Test for the right numbers with axes swapped, flipped, or the sample axis last."""
    for what, undone in _readings(pair.found, pair.noun):
        c = pair.multiple(undone, pair.loop)
        if c is not None:
            return Mistake("layout", f"{what}.{besides(c, pair)}")
    return None


def _readings(found: Tensor, noun: str) -> Iterator[tuple[str, Tensor]]:
    """Yield changes that may have been made to (m, *shape), with the gradients before them."""
    m, *shape = found.shape
    for order in permutations(range(len(shape))):
        moved = [k for k, axis in enumerate(order) if k != axis]
        if not moved:
            continue
        sizes = [shape[axis] for axis in order]
        how = "transposed" if sizes == shape else "transposed and then reshaped"
        what = f"axes {moved[0]} and {moved[-1]} of the parameter are {how}"
        if len(moved) > 2:
            what = f"the parameter's axes are in the order {order}" + " and then reshaped" * (
                sizes != shape
            )
        back = [0, *(1 + order.index(k) for k in range(len(shape)))]
        yield what, found.reshape(m, *sizes).permute(back)
    if len(shape) > 2:
        what = "the kernel is flipped: torch computes a correlation, not a convolution"
        yield what, found.flip([*range(3, found.dim())])
    for parts in (3, 4):
        if shape and shape[0] % parts == 0:
            for order in permutations(range(parts)):
                what = (
                    f"the {parts} blocks of axis 0 are in the order {order} (query, key and value "
                    "of attention, gates of a recurrent layer); torch's order is "
                    f"{tuple(range(parts))}"
                )
                chunks = found.chunk(parts, 1)
                if list(order) != sorted(order):
                    yield what, torch.cat([chunks[order.index(k)] for k in range(parts)], 1)
    if m > 1 and shape:
        what = f"the {noun} axis was last and was moved by reshape; move it with movedim instead"
        yield what, found.reshape(*shape, m).movedim(-1, 0)


def _accumulated(pair: GradientPair) -> Mistake | None:
    """Test whether row i is the sum of the gradients of several samples up to i."""
    found, loop, noun = as_rows(pair.found), as_rows(pair.loop), pair.noun
    if len(found) < 3 or len(found) < pair.n:
        return None
    c = factor(found[1] - found[0], loop[1]) or 1.0
    allowed = pair.slack * found.norm(dim=1).max()
    added = (found.diff(dim=0) - c * loop[1:]).norm(dim=1) <= allowed
    alone = (found - c * loop).norm(dim=1) <= allowed
    cleared = (~added).nonzero()[:, 0] + 1
    if not bool((added | alone[1:]).all()) or 2 * len(cleared) >= len(found):
        return None
    what = f"row i is the sum of the gradients of {noun}s 0 to i"
    if len(cleared):
        starts = listed_rows(torch.cat([cleared.new_zeros(1), cleared]), noun)
        what = f"row i is a sum of gradients up to {noun} i, restarted at {starts}"
    if not bool(alone[0]):
        what += ", plus an earlier tensor: a stale .grad"
    return Mistake(
        "accumulated",
        f"{what}: .grad was not cleared before each backward(); set p.grad = None (or call "
        f"zero_grad()) before each {noun}.{besides(c, pair)}",
    )


def _offset(pair: GradientPair) -> Mistake | None:
    """Test whether every row has the same tensor added, such as weight decay."""
    found, loop, n = as_rows(pair.found), as_rows(pair.loop), pair.n
    if (len(found) - 1) * found.shape[1] < 4:
        return None
    c = factor(found - found.mean(0), loop - loop.mean(0))
    c = 1.0 if c is None and not bool(loop.any()) else c
    if not c or (bool((c * loop).norm() < 10 * pair.slack * found.norm()) and bool(loop.any())):
        return None
    added = (found - c * loop).mean(0)
    size = added.norm()
    misfit = (found - c * loop - added).norm()
    if not bool(size > 10 * pair.slack * found.norm()) or bool(misfit > pair.slack * found.norm()):
        return None
    more = besides(c, pair)
    if pair.value is not None and found.shape[1] > 3:
        theta = pair.value.reshape(-1)
        for term, name, what in (
            (theta, "the parameter", "weight decay (an L2 penalty)"),
            (theta.sign(), "the parameter's sign", "an L1 penalty"),
        ):
            weight = factor(added, term)
            if weight and bool((added - weight * term).norm() <= 10 * pair.slack * size):
                return Mistake(
                    "weight_decay",
                    f"every row has {number(weight)} times {name} added: {what} is in these "
                    "gradients, but not in the loss; leave it out, or add it to the loss of "
                    f"both.{more}",
                )
    if not bool(loop.any()):
        return None
    weight = factor(added, loop.sum(0))
    text = f"every row has the same tensor added (norm {number(float(size))})"
    if weight and bool((added - weight * loop.sum(0)).norm() <= 10 * pair.slack * size):
        if pair.near(weight, -1 / n):
            text = "the mean gradient of the batch was subtracted from every row"
            return Mistake("offset", f"{text}: return each {pair.noun}'s own gradient.{more}")
        times = "" if pair.near(weight, 1.0) else f"{number(weight)} times "
        text = f"every row has {times}the gradient of the whole batch added"
    return Mistake(
        "offset",
        f"{text}: a .grad that was not cleared before each {pair.noun}, or a penalty that is not "
        f"in the loss; set p.grad = None first, or use torch.autograd.grad.{more}",
    )


def _row_factors(pair: GradientPair) -> Tensor | None:
    """Return (m,) cᵢ if row i is cᵢ times the right row (NaN if both are zero), else None."""
    found, loop = as_rows(pair.found), as_rows(pair.loop)
    square = (loop * loop).sum(1)
    live = square > (pair.slack**2) * square.max()
    if found.shape[1] < 2 or int(live.sum()) < 3:
        return None
    c = torch.where(live, (found * loop).sum(1) / square.clamp_min(1e-300), 0.0)
    lengths = found.norm(dim=1)
    allowed = pair.slack * torch.where(live, lengths, lengths.max())
    fits = (found - c[:, None] * loop).norm(dim=1) <= allowed
    return torch.where(live, c, torch.nan) if bool(fits.all()) else None


def _weighted(pair: GradientPair) -> Mistake | None:
    """Test for a factor for each row that the norm, the class or the loss explains."""
    every = _row_factors(pair)
    if every is None:
        return None
    live = every.isfinite()
    c, noun = every[live], pair.noun

    def equal(values: Tensor) -> bool:
        return bool((values - values[0]).abs().max() <= 3 * pair.slack * values[0].abs())

    if equal(c):  # a single factor is found by `_scaled`
        return None
    own = as_rows(pair.loop).norm(dim=1)
    norms = {"the whole gradient": pair.facts.get("norm", own), "this parameter's gradient": own}
    for of, norm in norms.items():
        for eps in (0.0, 1e-6):  # torch and Opacus add eps to the norm when clipping
            size = norm[live] + eps
            less = (c - 1).abs() > 3 * pair.slack
            limit = (c * size)[less]
            if int(less.sum()) < 2 or not equal(limit) or float(limit[0]) <= 0.0:
                continue
            if bool(less.all()):
                text = f"every row is scaled to norm {number(float(limit[0]))} of {of}"
                return Mistake("normalised", f"{text}: return the gradients before normalisation")
            if bool((c[less] < 1).all()) and bool((size[~less] <= limit[0] * (1 + 1e-6)).all()):
                text = f"rows are clipped: the norm of {of} is at most {number(float(limit[0]))}"
                return Mistake("clipped", f"{text}; return the gradients before clipping")
    for text, scale in pair.facts.items():
        s = scale[live]
        if text in ("norm", "class") or equal(s) or not bool((s != 0).all()):
            continue
        if equal(c / s):
            k = float((c / s)[0])
            times = "" if pair.near(k, 1.0) else f"{number(k)} times "
            return Mistake("row_factors", f"each row is multiplied by {times}{text}")
    if "class" in pair.facts:
        classes = pair.facts["class"][live]
        kinds = sorted(set(classes.tolist()))
        if 1 < len(kinds) < len(classes) and all(equal(c[classes == k]) for k in kinds):
            weights = ", ".join(
                f"{int(k)}: {number(float(c[classes == k][0]))}" for k in kinds[:10]
            )
            return Mistake(
                "row_factors",
                f"each row is multiplied by a factor of its {noun}'s class ({weights}): only one "
                "of the two losses has class weights",
            )
    return None


def _own_factors(pair: GradientPair) -> Mistake | None:
    """Test for an unexplained factor for each row."""
    every = _row_factors(pair)
    if every is None:
        return None
    c = every[every.isfinite()]
    least, most = float(c.min()), float(c.max())
    return Mistake(
        "row_factors",
        f"each row is the right gradient times a different factor, from {number(least)} to "
        f"{number(most)}: a weight for each {pair.noun}, clipping, or a mean over a number of "
        f"positions that differs between {pair.noun}s",
    )


def _elementwise(pair: GradientPair) -> Mistake | None:
    """Test for a function of each number of the right gradient."""
    for what, other in (
        ("square (a second moment)", pair.loop.square()),
        ("absolute value", pair.loop.abs()),
        ("sign", pair.loop.sign()),
    ):
        c = pair.multiple(pair.found, other)
        if c is not None:
            return Mistake(
                "elementwise",
                f"every number is the {what} of the gradient's number: return the gradient."
                f"{besides(c, pair)}",
            )
    return None


def undone(found: Tensor, loop: Tensor) -> Tensor | None:
    """Return gradients of a wrong shape in the shape of `loop` (n, *shape), if possible."""
    n, *shape = loop.shape
    size, extra = tuple(found.shape), found.dim() - loop.dim()
    if size == (*shape, n):
        return found.movedim(-1, 0)
    if size[1:] == tuple(shape) and n and size[0] % n == 0 and size[0]:
        return found.reshape(n, -1, *shape).sum(1)
    if size[:1] == (n,) and sorted(size[1:]) == sorted(shape):
        for order in permutations(range(len(shape))):
            if [size[1 + k] for k in order] == shape:
                return found.permute(0, *(1 + k for k in order))
    if size[:1] == (n,) and extra > 0 and size[1 + extra :] == tuple(shape):
        return found.sum([*range(1, 1 + extra)])
    if size[:2] == (n, *shape[:1]) and size[3:] == tuple(shape[2:]) and extra == 0:
        groups = size[2] // shape[1]
        if len(shape) > 2 and size[2] == groups * shape[1] and shape[0] % groups == 0:
            parts = found.chunk(groups, 1)
            own = [part.chunk(groups, 2)[k] for k, part in enumerate(parts)]
            return torch.cat(own, 1)
    return found.reshape(loop.shape) if found.numel() == loop.numel() else None


def wrong_shape(
    found: tuple[int, ...], n: int, shape: tuple[int, ...], noun: str = "sample"
) -> Mistake:
    """Return the likely cause of a shape that is not (n, *shape)."""
    if found in (shape, (1, *shape)):
        cause = f"there is no {noun} axis: it is summed or averaged over the batch"
    elif found == (*shape, n):
        cause = f"the {noun} axis is last and must be first"
    elif found[1:] == shape:
        cause = f"{found[0]} rows for {n} {noun}s: other {noun}s, or several rows for each {noun}"
    elif found[:1] == (n,) and sorted(found[1:]) == sorted(shape):
        cause = "the parameter's axes are in another order (transposed)"
    elif found[:2] == (n, *shape[:1]) and found[3:] == shape[2:] and len(shape) > 2:
        cause = "it has the channels of all groups: the convolution's groups were not applied"
    elif prod(found) == n * prod(shape):
        cause = "the number of entries is right: reshape it"
    elif found[:1] == (n,) and len(found) > len(shape) + 1:
        cause = "an axis (positions?) was not summed over"
    else:
        cause = f"it belongs to another parameter, or to other {noun}s"
    return Mistake("shape", f"has shape {found} instead of {(n, *shape)}: {cause}")


DETECTORS: tuple[Callable[[GradientPair], Mistake | None], ...] = (
    _imprecise,
    _offset,
    _missing,
    _scaled,  # a factor or a sign
    _reordered,
    _rearranged,
    _accumulated,
    _weighted,
    _elementwise,
)


def factor(a: Tensor, b: Tensor) -> float | None:
    """Return ⟨a, b⟩ / ⟨b, b⟩, or None if b is zero."""
    square = float((b * b).sum())
    return float((a * b).sum()) / square if square > 0.0 else None


def cosine(a: Tensor, b: Tensor) -> float:
    """Return ⟨a, b⟩ / (‖a‖ ‖b‖), 1 if both are zero, 0 if one of them is zero."""
    norms = float(a.norm()), float(b.norm())
    if 0.0 in norms:
        return float(norms[0] == norms[1])
    return max(-1.0, min(1.0, float((a / norms[0] * (b / norms[1])).sum())))


def listed_rows(positions: Tensor, noun: str) -> str:
    """Return "sample 3" or "samples 3, 4, 9, ...", or the same for tokens."""
    values = [int(v) for v in positions]
    shown = ", ".join(map(str, values[:5])) + (", ..." if len(values) > 5 else "")
    return f"{noun} {shown}" if len(values) == 1 else f"{noun}s {shown}"


def number(x: float) -> str:
    """Return a number with four digits."""
    return f"{x:.4g}"
