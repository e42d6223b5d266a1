"""Comparison of gradients with ordinary autograd, separately for each parameter.

Σ wᵢ gᵢ is compared with ∇ Σ wᵢ Lᵢ; a single sample has weight 1. If they differ by more than the
tolerance, two further tests decide whether rounding is the cause. For a parameter with a nearly
zero gradient, autograd's gradient of the same samples in other batches is computed. Otherwise the
gradient is computed in float64, and its change with the parameters' last digits is measured (for
example at the kink of an activation). If a float64 model casts to a narrower dtype, the tolerance
of that dtype is used. If float32 products may be rounded to TF32, the tolerance of TF32 is used.

A sharded model cannot be copied to float64, so rounding is measured in its own precision.

This proves sums over samples. Blocks compute norms, rows, sums of squares, inner products and
scaled sums with separate shortcuts. For a few samples, they are compared with sums of one sample.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields, replace
from math import prod

import torch
from torch import Tensor

from gradscope.blocks import Block, ConvolutionBlock, DenseBlock, Gradients, OuterBlock
from gradscope.blocks.base import PIECE_BYTES, as_rows, inner, precise, squared_sizes, squares
from gradscope.core.batch import Batch
from gradscope.core.groups import Groups
from gradscope.core.precision import doubled, dtype_name, on_host, products
from gradscope.engine.reference import compressed, gradients, tolerated
from gradscope.errors import CertificateError
from gradscope.model.problem import Problem, double_precision
from gradscope.model.rounding import computed_in, nearby, widened

TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_NOISE = 1e3  # a parameter's gradient up to this times eps of the whole gradient may be rounding
_LAST_DIGITS = 64.0  # the same in float64, where no wider dtype can be compared
_LUCK = 10.0  # allowed ratio of two differences that are both rounding
_TRIALS = 8  # number of random changes of the parameters' last digits
_MOST = 0.5  # the largest share of rounding in a gradient that counts as proved
_KINKS = 3.0  # tolerance in multiples of the largest change of the gradient in these trials

# Tolerances of shortcuts. They detect wrong formulas; precision is proved by the sums.
_SLIPS = {torch.float64: 1e-6, torch.float32: 1e-2}
_COARSE = 0.1  # the tolerance in half precision
_FEW = 2  # number of compared samples
_ROUNDINGS = 64.0  # allowed rounding errors of terms that cancel
# the fields of blocks whose code does not depend on values
_SHARED: Mapping[type[Block], tuple[str, ...]] = {
    kind: tuple(part.name for part in fields(kind))
    for kind in (DenseBlock, OuterBlock, ConvolutionBlock)
}


@dataclass(frozen=True)
class LargestError:
    """A comparison's largest error relative to its tolerance."""

    error: float  # relative error
    parameter: str
    tolerance: float  # the largest error that passes
    dtype: str = ""  # dtype of the comparison
    small: tuple[str, ...] = ()  # parameters whose gradient is only rounding, so it is not proved

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance; a NaN is not."""
        return self.error <= self.tolerance

    @property
    def rank(self) -> float:
        """The error relative to the tolerance; above 1, the comparison has failed."""
        return _rank(self.error, self.tolerance)


NOTHING = LargestError(0.0, "", 0.0)  # used if there is nothing to compare


@dataclass(frozen=True)
class Claim:
    """A backend's weighted sum of n samples' gradients."""

    gradients: Gradients  # the gradients of n samples
    weights: Tensor  # (n,), the weights of the samples' losses
    sizes: Mapping[str, float]  # {name: (Σ wᵢ² ‖gᵢ‖²)^½}; if empty, the norms of the sums are used

    @classmethod
    def of(cls, gradients: Gradients, weights: Tensor) -> "Claim":
        """Return the claim for the gradients of n samples."""
        squares = doubled(weights).square()
        sizes = {
            name: float((squares.to(value.device) * doubled(value)).sum().sqrt())
            for name, value in gradients.squared_norms.items()
        }
        return cls(gradients, weights, sizes)

    @classmethod
    def of_one(cls, gradients: Gradients, weight: Tensor) -> "Claim":
        """Return the claim for a single sample, weight (1,), without precomputed sizes."""
        return cls(gradients, weight, {})

    def value(self, name: str) -> Tensor:
        """Return Σ wᵢ gᵢ (*shape) of one parameter; one at a time, to save memory."""
        return self.gradients[name].weighted_sum(self.weights)


@dataclass(frozen=True)
class Objective:
    """Σ wᵢ Lᵢ of some samples, evaluated in one or several batches."""

    batches: tuple[Batch, ...]
    weights: tuple[Tensor, ...]  # (n,) for each batch

    @classmethod
    def in_one_batch(cls, batch: Batch, weights: Tensor) -> "Objective":
        """Return the objective of n samples in one batch."""
        return cls((batch,), (weights,))

    @classmethod
    def in_groups(cls, batch: Batch, weights: Tensor, rows: Sequence[Tensor]) -> "Objective":
        """Return the objective of n samples in several batches; `rows` has the indices of each."""
        own = (weights[k.to(weights.device)] for k in rows)
        return cls(tuple(batch.select(k) for k in rows), tuple(own))

    def evaluate(self, problem: Problem) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the losses (n,) and autograd's ∇ Σ wᵢ Lᵢ for every parameter."""
        found: list[Tensor] = []
        total: dict[str, Tensor] = {}
        for losses, own in self.parts(problem):
            found.append(losses)
            total = add_gradients(total, own)
            del own
        return torch.cat(found), total

    def parts(self, problem: Problem) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yield losses and gradients of each batch; only the caller holds the gradients."""
        for batch, weights in zip(self.batches, self.weights, strict=True):
            yield gradients(problem, batch, weights)


SecondReference = Callable[[], Mapping[str, Tensor]]


def add_gradients(total: dict[str, Tensor], own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `total` plus `own`, where `total` is {} at first; release each added gradient."""
    for name in total:  # not in place: a tensor may be shared, or be a constant of the model
        total[name] = total[name] + own.pop(name)
    return total or own


def compare_claim(
    problem: Problem,
    claim: Claim,
    objective: Objective,
    right: Mapping[str, Tensor],
    other: SecondReference | None = None,
    small: frozenset[str] = frozenset(),
) -> LargestError:
    """Compare a claim with the reference gradient, within rounding error.

    Args:
        problem: The model and its loss.
        claim: The backend's gradient of the objective.
        objective: The objective.
        right: The reference gradient of the objective.
        other: Returns the reference gradient of the same samples in other batches, if possible.
        small: Parameters whose gradient is known to be only rounding.
    """
    dtype, tolerance = problem.precision, TOLERANCES[problem.precision]
    gaps, sizes = _gaps(problem, claim, right)
    errors = {k: _relative(gap, sizes[k] or norm(right[k])) for k, gap in gaps.items()}
    allowed = dict.fromkeys(right, tolerance)
    doubtful = [k for k in right if not errors[k] <= tolerance]
    noise = _noise(problem, sizes, right, {k: gaps[k] for k in doubtful}, other, small)
    left = {k: max(gaps[k], norm(right[k])) for k in doubtful if k not in noise}
    noise += _below_rounding(problem, objective, left)
    doubtful = [k for k in doubtful if k not in noise]
    narrow = dtype
    if problem.any(bool(doubtful)):
        with suppress(*tolerated(problem)):  # a model may not run with a batch of one
            narrow = computed_in(problem, objective.batches[0])
        rounded = max(tolerance, TOLERANCES.get(narrow, tolerance))
        if dtype == torch.float32:
            rounded = max(rounded, TOLERANCES[products(problem.device)])
        if dtype == torch.float64:  # part of the model is less precise than its parameters
            allowed |= dict.fromkeys(doubtful, rounded)
            doubtful = [k for k in doubtful if not errors[k] <= rounded]
    if problem.any(bool(doubtful)):
        with suppress(*tolerated(problem)):
            truth: Mapping[str, Tensor] = right
            if problem.model_parallel is None:  # a sharded model cannot be copied
                with suppress(*tolerated(problem)):
                    truth, dtype = _in_float64(problem, objective, doubtful), torch.float64
            size = {k: max(sizes[k], norm(truth[k])) for k in doubtful}
            for k in doubtful:
                found = compressed(problem, claim.value(k)).to(truth[k])
                errors[k], allowed[k] = _relative(norm(found - truth[k]), size[k]), rounded
            truth = {k: truth[k] for k in doubtful}
            for spread in _rounding_spreads(problem, objective, truth, narrow):
                if not problem.any(any(not errors[k] <= allowed[k] for k in doubtful)):
                    break
                for k in doubtful:
                    allowed[k] = max(rounded, _KINKS * _relative(spread[k], size[k]))
            noise += [k for k in doubtful if errors[k] <= allowed[k] and allowed[k] > _MOST]
    return largest_error(errors, allowed, noise, dtype, tolerance)


def compared_in_float64(
    problem: Problem, objective: Objective, found: Mapping[str, Tensor]
) -> LargestError:
    """Compare gradients of all parameters with the objective's gradients, all in float64.

    Allowed are differences in the last digits, and differences as large as the effect of rounding
    the parameters. A gradient may be only rounding.
    """
    right = objective.evaluate(problem)[1]
    sizes = {name: norm(value) for name, value in found.items()}
    gaps = {name: norm(value - right[name]) for name, value in found.items()}
    whole = math.sqrt(sum(size**2 for size in sizes.values()))
    digits = _LAST_DIGITS * torch.finfo(torch.float64).eps * whole
    tolerance = TOLERANCES[torch.float64]
    errors = {name: _relative(gap, sizes[name]) for name, gap in gaps.items()}
    doubtful = {k: right[k] for k, error in errors.items() if not error <= tolerance}
    noise = [k for k in doubtful if gaps[k] <= digits]
    left = {k: max(gaps[k], norm(doubtful[k])) for k in doubtful if k not in noise}
    noise += _below_rounding(problem, objective, left)
    if len(noise) < len(doubtful):
        known = noise
        for spread in _rounding_spreads(problem, objective, doubtful, torch.float64):
            noise = [k for k in doubtful if k in known or gaps[k] <= _KINKS * spread[k]]
            if not problem.any(len(noise) < len(doubtful)):
                break
    allowed = dict.fromkeys(errors, tolerance)
    return largest_error(errors, allowed, noise, torch.float64, tolerance)


def largest_error(
    errors: Mapping[str, float],
    allowed: Mapping[str, float],
    noise: Sequence[str],
    dtype: torch.dtype,
    tolerance: float,
) -> LargestError:
    """Return the error that is largest relative to its tolerance, without parameters in `noise`.

    Args:
        errors: {parameter: relative error}.
        allowed: {parameter: largest error that passes}.
        noise: Parameters whose gradient is only rounding.
        dtype: The dtype of the comparison.
        tolerance: The tolerance to report if no parameter is left.
    """
    proved = [k for k in errors if k not in noise]
    worst = max(proved, key=lambda k: _rank(errors[k], allowed[k]), default="")
    return LargestError(
        error=errors.get(worst, 0.0),
        parameter=worst,
        tolerance=allowed.get(worst, tolerance),
        dtype=dtype_name(dtype),
        small=tuple(noise),
    )


def _gaps(
    problem: Problem, claim: Claim, right: Mapping[str, Tensor]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return {name: distance of the claimed sum from the reference} and {name: size}."""
    gaps, sizes = {}, dict(claim.sizes)
    for name, value in right.items():
        found = compressed(problem, claim.value(name))
        gaps[name] = norm(found - value)
        if name not in sizes:
            sizes[name] = norm(found)
    return gaps, sizes


def _noise(
    problem: Problem,
    sizes: Mapping[str, float],
    right: Mapping[str, Tensor],
    gaps: Mapping[str, float],
    other: SecondReference | None,
    small: frozenset[str],
) -> list[str]:
    """Return the parameters in `gaps` whose whole gradient is only rounding.

    For them, autograd's gradients in other batches differ from each other as much as from the
    claim.
    """
    whole = math.sqrt(sum(size**2 for size in sizes.values()))
    eps = torch.finfo(problem.precision).eps
    most = min(_NOISE * eps, 0.05) * whole
    tiny = [k for k, gap in gaps.items() if max(gap, sizes[k]) <= most]
    digits = _LAST_DIGITS * eps * whole if problem.precision == torch.float64 else -1.0
    noise = [k for k in tiny if k in small or gaps[k] <= digits]
    if other is not None and problem.any(len(tiny) > len(noise)):
        again = other()
        noise = [k for k in tiny if k in noise or gaps[k] <= _LUCK * norm(right[k] - again[k])]
    return noise


def _below_rounding(
    problem: Problem, objective: Objective, sizes: Mapping[str, float]
) -> list[str]:
    """Return the parameters of a float64 model whose effect on the losses is below rounding.

    The condition is that |∂L/∂θ| max(|θ|, 1) is below the last digits of Σ |wᵢ Lᵢ|, for gradients
    of the given `sizes`. The 1 is for parameters that are zero but may couple samples, as a gate.
    """
    if not sizes or problem.precision != torch.float64 or problem.model_parallel is not None:
        return []
    with torch.no_grad():
        losses = sum(
            float((w * problem.losses(batch, graph=False).detach()).abs().sum())
            for batch, w in zip(objective.batches, objective.weights, strict=True)
        )
    digits = _LAST_DIGITS * torch.finfo(torch.float64).eps * losses
    named = problem.parameters
    return [k for k, size in sizes.items() if size * max(norm(named[k].detach()), 1.0) <= digits]


def _in_float64(problem: Problem, objective: Objective, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the gradients of some parameters, computed in float64 throughout."""
    casts = problem.precision == torch.float64
    with double_precision(), widened(problem.model) if casts else nullcontext():
        wide = problem.converted(None if casts else torch.float64)
        batches = tuple(batch.in_double_precision() for batch in objective.batches)
        every = replace(objective, batches=batches).evaluate(wide)[1]
    return {name: every[name] for name in names}


def _rounding_spreads(
    problem: Problem, objective: Objective, truth: Mapping[str, Tensor], narrow: torch.dtype
) -> Iterator[Mapping[str, float]]:
    """Yield {name: largest change of the gradient} as the parameters' last digits change.

    At first no digit has changed. In a float64 model that casts to a narrower dtype, these are the
    last digits of that dtype.
    """
    spread = dict.fromkeys(truth, 0.0)
    yield spread
    digits = narrow if problem.precision == torch.float64 else None
    for near in nearby(problem, _TRIALS, digits):
        found = objective.evaluate(near)[1]
        for name, value in truth.items():
            spread[name] = max(spread[name], norm(found[name].to(value) - value))
        yield spread


def _rank(error: float, allowed: float) -> float:
    if error != error:
        return float("inf")
    return error / allowed if allowed else error


def _relative(gap: float, size: float) -> float:
    return gap / size if size else (0.0 if gap == 0 else float("inf"))


def norm(t: Tensor) -> float:
    """Return (Σ tₖ²)^½, computed in a wider dtype if squares overflow or underflow."""
    found = float(torch.linalg.vector_norm(precise(t)))
    if 0 < found < math.inf:  # otherwise squares may have overflowed or underflowed
        return found
    return float(torch.linalg.vector_norm(doubled(on_host(t))))


def require_consistent(backend: str, gradients: Gradients, chosen: Tensor) -> None:
    """Compare the shortcuts of blocks with sums of single samples, for the samples `chosen`.

    Equal layers have blocks of one structure, for which the same code runs. Sums over two samples
    are compared for the first layer, norms and rows of one sample for the remaining layers.

    Raises:
        CertificateError: A shortcut differs.
    """
    seen: set[object] = set()
    for name, block in gradients.items():
        row = max(1, prod(block.shape) * block.dtype.itemsize)
        structure = _structure(block)
        known = structure in seen
        few = chosen[: max(1, min(1 if known else _FEW, PIECE_BYTES // row))].to(block.device)
        if not len(few):
            return
        seen |= set() if structure is None else {structure}
        norms = gradients.squared_norms[name][few]
        for what in _contradictions(block.select(few), norms, known=known):
            said = f"is inconsistent: the {what} of its gradients do not match the gradients"
            raise contradiction(backend, said, f"parameter {name!r}")


def require_norms(backend: str, rows: Mapping[str, Tensor], gradients: Gradients) -> None:
    """Compare the norms of rows (n, *shape) with the norms of the gradients.

    Raises:
        CertificateError: A norm differs.
    """
    for name, values in rows.items():
        found = torch.linalg.vector_norm(as_rows(precise(values)), dim=1).square()
        claimed = gradients.squared_norms[name].to(found)
        most, gap = 2 * _slip(values) * torch.maximum(found, claimed), (found - claimed).abs()
        if not bool((gap > most).any()):
            continue
        bound = _norm_bound(gradients[name], torch.zeros_like(found[0]))
        lost = _rounding_loss(values, bound**2, values.dtype)
        if bool((gap > most + lost).any()):
            what = "is inconsistent: the norms of its rows differ from its reported norms"
            raise contradiction(backend, what, f"parameter {name!r}")


def require_sums(backend: str, members: Gradients, groups: Gradients, batch: Groups) -> None:
    """Compare the rows (g, *shape) of groups with the rows (n, *shape) of their members.

    Σⱼ wⱼ Gⱼ over the groups must equal Σᵢ wⱼ sⱼ gᵢ over the members i of groups j, where sⱼ is the
    share of the group (1 for sums). The weights have both signs, so a member in a wrong group is
    detected. Shortcuts are compared for a few groups, as for a few samples.

    Raises:
        CertificateError: A sum or a shortcut differs.
    """
    draw = torch.Generator().manual_seed(groups.n)
    signs = torch.randint(0, 2, (groups.n,), generator=draw, dtype=torch.float64) * 2 - 1
    shares = batch.shares
    weights = signs * (0.5 + torch.rand(groups.n, generator=draw, dtype=torch.float64))
    for name, block in groups.items():
        wide = weights.to(block.device, precise(torch.empty(0, dtype=block.dtype)).real.dtype)
        found = block.weighted_sum(wide).flatten()
        each = (wide if shares is None else wide * shares.to(wide)).repeat_interleave(
            batch.sizes.to(wide.device)
        )
        right = members[name].weighted_sum(each).flatten()
        size = (members.squared_norms[name].to(wide) @ each.square()).sqrt()
        bound = _norm_bound(members[name], size)
        most = _slip(block) * size + _ROUNDINGS * torch.finfo(block.dtype).eps * bound
        gap = torch.linalg.vector_norm(found - right)
        if bool(size.isfinite()) and not bool(gap <= most):
            said = "is inconsistent: the gradients of groups are not the sums of their members'"
            raise contradiction(backend, said, f"parameter {name!r}")
    finite = groups.norms.isfinite().cpu().nonzero().flatten()
    require_consistent(backend, groups, finite[torch.randperm(len(finite), generator=draw)])


def _structure(block: Block) -> object:
    """Return type, sizes and options of a block whose code does not depend on values, or None."""
    if type(block) not in _SHARED:
        return None
    own = (getattr(block, name) for name in _SHARED[type(block)])
    sizes = ((v.shape, v.stride(), v.dtype, v.device) if isinstance(v, Tensor) else v for v in own)
    return (type(block), *sizes)


def _contradictions(few: Block, squared_norms: Tensor, *, known: bool) -> Iterator[str]:
    """Yield the names of shortcuts that differ from the sums of single samples.

    If the structure is `known` to be right, sums over two samples are skipped.
    """
    alone = [few.select(slice(k, k + 1)).weighted_sum() for k in range(few.n)]
    right = as_rows(torch.stack(alone))  # (k, p)
    squared = squared_sizes(right)
    size = squared.sum().sqrt()

    def differs(found: Tensor, wanted: Tensor, *, linear: bool = False) -> bool:
        gap = torch.linalg.vector_norm(wanted.sub_(found.to(wanted)))  # `wanted` is not used again
        most = _slip(few) * size if linear else 2 * _slip(few) * size**2
        if bool(gap <= few.n * most):
            return False
        bound = _norm_bound(few, size)  # terms may cancel
        eps = _ROUNDINGS * torch.finfo(few.dtype).eps
        lost = eps * bound if linear else _rounding_loss(right, bound**2, few.dtype)
        return not bool(gap <= few.n * (most + lost))

    if differs(squared_norms, squared.clone()):
        yield "norms"
    if not known:
        first, two = right[0], right[:2]
        both = few.select(slice(0, 2))  # two samples test sums over samples
        weights = torch.arange(1, len(two) + 1, device=right.device).to(right.real.dtype) - 0.5
        if differs(few.dot(alone[0]), inner(right, first.conj().resolve_conj())):
            yield "inner products"
        if differs(both.squared_sum().flatten(), squares(two).sum(0)):
            yield "squares"
        scaled = both.scale(weights).weighted_sum().flatten()
        if differs(scaled, weights.to(right) @ two, linear=True):
            yield "scaled sums"
    if differs(as_rows(precise(few.dense())), right, linear=True):
        yield "rows"


def contradiction(backend: str, what: str, where: str) -> CertificateError:
    """Return the error for a backend whose result is wrong."""
    remedy = "Use another backend (auto tries all backends; loop is the reference)."
    return CertificateError(f"the {backend} backend {what}", where=where, remedy=remedy)


def _norm_bound(block: Block, otherwise: Tensor) -> Tensor:
    """Return the bound on a block's norms (0-d), or `otherwise` if the block has no bound."""
    found = block.norm_bound().to(otherwise)
    return torch.where(found.isfinite(), found, otherwise)


def _slip(of: Tensor | Block) -> float:
    return _SLIPS.get(of.dtype.to_real(), _COARSE)


def _rounding_loss(rows: Tensor, squared: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rounding error of sums of squares of rows (n, ...) with terms up to `squared`."""
    few = _ROUNDINGS * torch.finfo(dtype).eps * squared
    return few + torch.finfo(rows.dtype).tiny * rows[0].numel()
