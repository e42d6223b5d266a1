"""The float64 loop, whether one parameter's gradients are the loop's, and what it means if not.

Six detectors, from the surest to the vaguest, look for missing gradients, lost precision, a factor
or a sign, another order of the samples, and another layout of the parameter. Where none fits all
samples, the ones that differ are looked at alone.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradscope.backends.base import backends
from gradscope.blocks.base import as_rows
from gradscope.core.batch import Batch
from gradscope.errors import CoupledSamplesError, ModelError
from gradscope.model.independence import coupled_remedy
from gradscope.model.locate import alone_remedy
from gradscope.model.problem import Problem
from gradscope.model.rounding import same


class Mistake(NamedTuple):
    """What is wrong with one parameter's gradients: a word for programs, a text for people."""

    kind: str
    meaning: str


@dataclass(frozen=True)
class GradientPair:
    """One parameter's gradients as found and as the loop has them, both real and in float64."""

    found: Tensor  # (m, *shape), the rows looked at
    loop: Tensor  # (m, *shape), what they should be
    errors: Tensor  # (m,), relative to the scale of each sample; infinite where not finite
    samples: Tensor  # (m,) int64, positions in the batch
    n: int  # samples of the whole batch
    tolerance: float  # the largest error that agrees
    coupled: bool = False  # the batch's losses differ from those of batches of one
    noun: str = "sample"  # what has a row: sample or token

    @property
    def slack(self) -> float:
        """How far from exact a relation between found and right gradients may be."""
        return max(1e-6, 3 * self.tolerance)

    def near(self, x: float, y: float) -> bool:
        """Whether two factors are equal as far as the gradients are."""
        return abs(x - y) <= self.slack * abs(y)

    def multiple(self, x: Tensor, y: Tensor) -> float | None:
        """Return c where x = c·y, else None; neither may be zero.

        Two single numbers always have a factor, so there only one with a meaning counts.
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
        return replace(self, **parts)


def diagnose(pair: GradientPair) -> Mistake:
    """Say what is wrong with gradients that disagree."""
    for detect in DETECTORS:
        if mistake := detect(pair):
            return mistake
    wrong = pair.errors > pair.tolerance
    count = int(wrong.sum())
    if 0 < count < len(wrong):
        inner, verb = diagnose(pair.rows(wrong)), "differs" if count == 1 else "differ"
        which = f"only {_listed(pair.samples[wrong], pair.noun)} of {pair.n} {verb}"
        return Mistake("some_samples", f"{which}; there: {inner.meaning}")
    if pair.coupled:
        return Mistake(
            "coupled",
            f"the batch's losses differ from those of one {pair.noun} at a time: {pair.noun}s are "
            "coupled "
            "(BatchNorm in training mode, a contrastive loss) or the model draws random numbers "
            "(dropout); put it in eval mode, or use a layer without batch statistics",
        )
    c, angle = factor(pair.found, pair.loop), cosine(pair.found, pair.loop)
    fit = f"cosine {angle:.2f}" if c is None else f"c = {_number(c)}, cosine {angle:.2f}"
    if abs(angle) < min(0.4, max(0.1, 2 / sqrt(max(pair.found[0].numel(), 1)))):
        return Mistake(
            "unrelated",
            f"{fit}: unrelated to the loop's: other {pair.noun}s, other weights (checkpoint), "
            "another loss, or another mode (dropout, training instead of eval)",
        )
    return Mistake(
        "unknown",
        f"{fit}: no simple relation; a part of the gradient is missing or wrong (one of several "
        "uses of the parameter, padding, groups, a .grad that was not cleared, another axis taken "
        f"for the {pair.noun} axis)",
    )


def _missing(pair: GradientPair) -> Mistake | None:
    """Zeros where the loop has a gradient, or a gradient where the loop has zeros."""
    here, there = bool(pair.found.any()), bool(pair.loop.any())
    if not here and there:
        return Mistake(
            "zero",
            "all zero, though the loss depends on this parameter: its use was not seen (a hook "
            "that did not fire, a weight used outside its module, a detached graph) or not written",
        )
    if here and not there:
        return Mistake(
            "not_zero",
            "the loop has zeros here: the loss does not depend on this (unused, padding, masked); "
            "these numbers come from elsewhere: a stale .grad, a buffer that was not cleared, or "
            "a mask that was not applied",
        )
    return None


def _imprecise(pair: GradientPair) -> Mistake | None:
    """NaN or infinity on one side only; or the right numbers in a lower precision."""
    bad, right = (~as_rows(t).isfinite().all(1) for t in (pair.found, pair.loop))
    if bool((right & ~bad).any()):
        return Mistake(
            "hides_not_finite",
            f"{_listed(pair.samples[right & ~bad], pair.noun)} is not finite in the loop, but is "
            "finite here: something replaced NaN or infinity; the true gradient has none",
        )
    if bool((bad & ~right).any()):
        where = _listed(pair.samples[bad & ~right], pair.noun)
        return Mistake(
            "not_finite",
            f"NaN or infinity in {where} ({int((bad & ~right).sum())} of {pair.n}), where the "
            "loop is finite: overflow in lower precision, a division by a zero norm, or a buffer "
            "that was never written",
        )
    worst = float(pair.errors.max())
    if worst > (1e-4 if pair.tolerance < 1e-6 else min(100 * pair.tolerance, 0.05)):
        return None
    return Mistake(
        "rounded",
        f"right up to {worst:.0e}: lower precision (float32, TF32), an approximation, or a "
        "slightly different constant such as an eps; an activation at its kink does it too in "
        "float32: compute in float64 to tell them apart",
    )


def _scaled(pair: GradientPair) -> Mistake | None:
    """The loop's gradients times one factor that is not 1."""
    c = pair.multiple(pair.found, pair.loop)
    return None if c is None or pair.near(c, 1.0) else _explained(c, pair)


def _explained(c: float, pair: GradientPair) -> Mistake:
    """Say where a factor c ≠ 1 comes from."""
    n = pair.n
    if pair.near(c, -1.0):
        text = "c = -1: the sign is flipped: the descent direction, or a maximised loss"
        return Mistake("sign", text)
    if c < 0:
        kind, meaning = _explained(-c, pair)
        return Mistake(kind, f"the sign is flipped, and besides, for {_number(c)}: {meaning}")
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
    ratio = max(c, 1 / c)
    k = round(ratio)
    if k >= 2 and pair.near(ratio, k):
        name = f"k = {k}" if c > 1 else f"1/k with k = {k}"
        return Mistake(
            "factor",
            f"c = {name}: a mean in place of a sum over {k} of something, or the reverse "
            "(positions, classes, heads, devices, uses of the parameter, steps of accumulation)",
        )
    return Mistake(
        "factor",
        f"c = {_number(c)}: every gradient is off by this one factor; look for a weight or a "
        "temperature of the loss, or a loss scale that was not taken out",
    )


def _besides(c: float, pair: GradientPair) -> str:
    return "" if pair.near(c, 1.0) else f" Besides, {_explained(c, pair).meaning}."


def _reordered(pair: GradientPair) -> Mistake | None:
    """Every row is some sample's gradient but not its own, or the sum over all samples."""
    found, loop = as_rows(pair.found), as_rows(pair.loop)
    if len(found) < 2:
        return None
    same = bool((found - found[:1]).norm(dim=1).max() <= pair.slack * found[0].norm())
    c = pair.multiple(found[0], loop.sum(0)) if same else None
    if c is not None:
        what = "mean" if pair.near(c, 1 / pair.n) else "sum"
        scale = "" if what == "mean" or pair.near(c, 1.0) else f"{_number(c)} times "
        return Mistake(
            "summed",
            f"every row is {scale}the {what} of all {pair.noun}s' gradients: they were reduced "
            "over the batch and then spread over it; take one loss at a time, or keep the "
            f"{pair.noun} axis",
        )
    ratio = float(found.norm() / loop.norm()) if bool(loop.any()) else 0.0
    for c in (1.0, ratio, -ratio):
        at = _matched(found / c, loop, pair.slack) if c else None
        if at is None:
            continue
        moved = (at != torch.arange(len(at), device=at.device)).nonzero()[:, 0]
        if not len(moved):
            continue
        row, sample = (int(pair.samples[k]) for k in (moved[0], at[moved[0]]))
        return Mistake(
            "permuted",
            f"the {pair.noun}s are in another order: row {row} holds {pair.noun} {sample}; a "
            "shuffling or sorting loader, results gathered out of order, an index that is off, or "
            f"one buffer that is returned for several {pair.noun}s.{_besides(c, pair)}",
        )
    return None


def _matched(a: Tensor, b: Tensor, slack: float) -> Tensor | None:
    """Return (k,) the row of b (k, p) that each row of a (k, p) equals; None if one equals none."""
    if not bool(b.any()):
        return None
    lengths = a.norm(dim=1), b.norm(dim=1)
    allowed = slack * lengths[1].max()
    gaps = (lengths[0][:, None] - lengths[1]).abs().min(1).values
    if not bool((gaps <= allowed).all()):  # cheap, and most often the answer
        return None
    distances = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
    own = torch.arange(len(a), device=a.device)
    best, at = distances.min(1)
    at = torch.where(distances.diagonal() <= allowed, own, at)  # equal rows of b: its own first
    return at if bool((best <= allowed).all()) else None


def _rearranged(pair: GradientPair) -> Mistake | None:
    """The right numbers with axes swapped, flipped, or the sample axis last."""
    for what, undone in _readings(pair.found, pair.noun):
        c = pair.multiple(undone, pair.loop)
        if c is not None:
            return Mistake("layout", f"{what}.{_besides(c, pair)}")
    return None


def _readings(found: Tensor, noun: str) -> Iterator[tuple[str, Tensor]]:
    """Yield what may have happened to (m, *shape), and the gradients with it undone."""
    m, *shape = found.shape
    for x, y in combinations(range(len(shape)), 2):
        how = "transposed" if shape[x] == shape[y] else "transposed and then reshaped"
        swapped = list(found.shape)
        swapped[x + 1], swapped[y + 1] = shape[y], shape[x]
        undone = found.reshape(swapped).transpose(x + 1, y + 1)
        yield f"axes {x} and {y} of the parameter are {how}", undone
    if len(shape) > 2:
        what = "the kernel is flipped: a convolution where torch has a correlation"
        yield what, found.flip([*range(3, found.dim())])
    if m > 1 and shape:
        what = f"the {noun} axis was last and reshaped to be first; move it (movedim) instead"
        yield what, found.reshape(*shape, m).movedim(-1, 0)


def wrong_shape(
    found: tuple[int, ...], n: int, shape: tuple[int, ...], noun: str = "sample"
) -> Mistake:
    """Say what a shape that is not (n, *shape) most likely is."""
    if found in (shape, (1, *shape)):
        cause = f"there is no {noun} axis, so it is already summed or averaged over the batch"
    elif found == (*shape, n):
        cause = f"the {noun} axis is last and must be first"
    elif found[1:] == shape:
        cause = f"{found[0]} rows for {n} {noun}s: other {noun}s, or several rows a {noun} to sum"
    elif found[:1] == (n,) and sorted(found[1:]) == sorted(shape):
        cause = "the parameter's axes are in another order (transposed)"
    elif prod(found) == n * prod(shape):
        cause = "the right number of entries in another shape: reshape it"
    elif found[:1] == (n,) and len(found) > len(shape) + 1:
        cause = "an axis (positions?) was not summed over"
    else:
        cause = f"it belongs to another parameter, or other {noun}s"
    return Mistake("shape", f"has shape {found} instead of {(n, *shape)}: {cause}")


DETECTORS: tuple[Callable[[GradientPair], Mistake | None], ...] = (
    _imprecise,
    _missing,
    _scaled,  # a factor or a sign
    _reordered,
    _rearranged,
)


def factor(a: Tensor, b: Tensor) -> float | None:
    """Return ⟨a, b⟩ / ⟨b, b⟩, None where b is zero."""
    square = float((b * b).sum())
    return float((a * b).sum()) / square if square > 0.0 else None


def cosine(a: Tensor, b: Tensor) -> float:
    """Return ⟨a, b⟩ / (‖a‖ ‖b‖): 1 when both are zero, 0 when one is."""
    norms = float(a.norm()), float(b.norm())
    if 0.0 in norms:
        return float(norms[0] == norms[1])
    return max(-1.0, min(1.0, float((a / norms[0] * (b / norms[1])).sum())))


def _listed(positions: Tensor, noun: str) -> str:
    """Return "sample 3" or "samples 3, 4, 9, ...", or the same of tokens."""
    values = [int(v) for v in positions]
    shown = ", ".join(map(str, values[:5])) + (", ..." if len(values) > 5 else "")
    return f"{noun} {shown}" if len(values) == 1 else f"{noun}s {shown}"


def _number(x: float) -> str:
    return f"{x:.4g}"


class Precision(NamedTuple):
    """How exact gradients of one dtype must be."""

    tolerance: float  # the largest relative error of a sample that agrees
    # the share of the sample's whole gradient below which a parameter's norm is rounding noise (a
    # gradient that is zero but for rounding: a key's bias in attention)
    floor: float


DOUBLE = Precision(1e-8, 1e-6)
_SINGLE, _HALF = Precision(1e-4, 1e-2), Precision(1e-2, 1e-2)
_PRECISIONS = {
    torch.float32: _SINGLE,
    torch.complex64: _SINGLE,
    torch.float16: _HALF,
    torch.bfloat16: _HALF,
}
_SMALLEST = 1e-6  # of the largest sample's norm: a sample that almost vanishes is noise


@dataclass(frozen=True, kw_only=True)
class ParameterAgreement:
    """How close one parameter's per-sample gradients a are to the loop's b.

    Numbers are None where the shapes do not allow them.
    """

    name: str  # the parameter
    absolute: float | None = None  # the largest |a − b| of an entry
    # the largest ‖aᵢ − bᵢ‖ / ‖bᵢ‖ of a sample, with a floor below which a norm is noise
    relative: float | None = None
    cosine: float | None = None  # ⟨a, b⟩ / (‖a‖ ‖b‖) over all samples
    worst_sample: int | None = None  # the position in the batch where `relative` is reached
    factor: float | None = None  # c = ⟨a, b⟩ / ⟨b, b⟩, the factor that fits a ≈ c·b best
    kind: str  # one word for the mistake, or "agrees"
    meaning: str  # what it means and what to do
    agrees: bool  # whether `relative` is within the tolerance of a's dtype


@dataclass(frozen=True)
class Oracle:
    """The loop's gradients."""

    gradients: Mapping[str, Tensor]  # {name: (n, *shape)}
    norms: Tensor  # (n,), ‖gᵢ‖ over all parameters; zero where not finite
    coupled: bool = False  # the batch's losses differ from those of batches of one
    noun: str = "sample"  # what has a row: sample or token

    @classmethod
    def of(cls, problem: Problem, batch: Batch) -> "Oracle":
        """Run the loop on a problem and a batch in float64.

        Raises:
            CoupledSamplesError: The model runs on the batch, but not on one sample alone.
        """
        together = problem.losses(batch).detach()
        try:
            with backends.get("loop")(problem) as evaluate:
                evaluation = evaluate(batch)
        except ModelError as error:  # it ran on the batch
            raise CoupledSamplesError(
                f"on one sample alone {error.what}",
                where=error.where,
                remedy=alone_remedy(error, problem.model, batch, batch.one(0))
                or coupled_remedy(None, batch, problem.model),
            ) from error
        gradients, alone = evaluation.gradients.dense(), evaluation.losses
        norms = torch.stack([as_rows(g.abs().square()).sum(1) for g in gradients.values()])
        norms = torch.nan_to_num(norms.double().sum(0).sqrt(), nan=0.0, posinf=0.0)
        return cls(gradients, norms, coupled=not same(alone, together), noun=problem.rows)


def agreements(found: Mapping[str, Any], oracle: Oracle) -> tuple[ParameterAgreement, ...]:
    """Compare {name: array (n, *shape)} with the oracle's gradients, parameter by parameter."""
    return tuple(_agreement(name, found.get(name), oracle) for name in oracle.gradients)


def _agreement(name: str, value: Any, oracle: Oracle) -> ParameterAgreement:
    loop, n = oracle.gradients[name], len(oracle.norms)
    if value is None:
        missing = "there is no gradient for this parameter"
        return ParameterAgreement(name=name, kind="missing", meaning=missing, agrees=False)
    found: Tensor = torch.as_tensor(value).detach()
    found = (found if found.layout == torch.strided else found.to_dense()).to(loop.device)
    if found.shape != loop.shape:
        mistake = wrong_shape(tuple(found.shape), n, tuple(loop.shape[1:]), oracle.noun)
        return ParameterAgreement(name=name, agrees=False, **mistake._asdict())
    precision = _PRECISIONS.get(found.dtype, DOUBLE)
    wide = torch.complex128 if found.is_complex() or loop.is_complex() else torch.float64
    a, b = _real(found.to(wide)), _real(loop.to(wide))
    errors = relative_errors(a, b, precision, oracle.norms)
    finite = as_rows(a.isfinite() & b.isfinite()).all(1)
    gaps = (a - b)[finite].abs()
    agrees = bool((errors <= precision.tolerance).all())
    mistake = Mistake("agrees", "equal within the tolerance")
    if not agrees:
        seen = (errors > 0.0) | finite  # not the rows that are not finite on both sides
        mistake = diagnose(
            GradientPair(
                found=a[seen],
                loop=b[seen],
                errors=errors[seen],
                samples=torch.arange(n, device=a.device)[seen],
                n=n,
                tolerance=precision.tolerance,
                coupled=oracle.coupled,
                noun=oracle.noun,
            )
        )
    return ParameterAgreement(
        name=name,
        absolute=float(gaps.max()) if gaps.numel() else 0.0,
        relative=float(errors.max()),
        cosine=cosine(a[finite], b[finite]),
        worst_sample=int(errors.argmax()),
        factor=factor(a[finite], b[finite]),
        agrees=agrees,
        **mistake._asdict(),
    )


def relative_errors(a: Tensor, b: Tensor, precision: Precision, norms: Tensor) -> Tensor:
    """Return ‖aᵢ − bᵢ‖ over the scale of sample i, (n,), for real a and b (n, *shape).

    The scale is ‖bᵢ‖, but never less than a share of the largest sample's norm and of `norms` (n,),
    those of the samples' whole gradients. An error is infinite where one side is not finite, and
    zero where neither is.
    """
    a, b = as_rows(a), as_rows(b)
    broken = ~a.isfinite().all(1), ~b.isfinite().all(1)
    own = b.norm(dim=1).masked_fill(broken[1], 0.0)
    scale = torch.stack(
        [own, (_SMALLEST * own.max()).expand_as(own), precision.floor * norms.to(own)]
    ).amax(0)
    errors: Tensor = (a - b).norm(dim=1) / scale.clamp_min(torch.finfo(own.dtype).tiny)
    errors[broken[0] ^ broken[1]] = torch.inf
    errors[broken[0] & broken[1]] = 0.0
    return errors


def _real(t: Tensor) -> Tensor:
    """Return `t`, or (..., 2) for complex numbers."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
