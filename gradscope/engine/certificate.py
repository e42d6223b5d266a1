"""The certificate: the proof that the numbers of a batch are right.

Completeness: Σᵢ wᵢ gᵢ equals the gradient of Σᵢ wᵢ Lᵢ for every parameter, with random weights of
both signs: so rows cannot have changed places. Agreement: a few samples, drawn at random, equal a
batch of one, which catches coupling and a wrong scale. Independence: a sample's loss is the same
in other company and alone, and has no gradient by the inputs of others. Finiteness: who is not
finite is known. State: what the forward pass changes in the model is found, and put back.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gradscope.backends import Evaluate
from gradscope.backends.loop import one_sample, own_gradient
from gradscope.blocks import Evaluation, unmeasured
from gradscope.core.batch import Batch
from gradscope.core.independence import (
    regrouped,
    require_deterministic,
    require_independent,
    require_own_gradients,
    same,
)
from gradscope.core.problem import Problem
from gradscope.engine.judge import (
    NOTHING,
    Claim,
    LargestError,
    Objective,
    judged,
    require_consistent,
)
from gradscope.errors import CertificateError, GradscopeError, ModelError, RefusedError

_ALONE = 3  # samples that a first proof compares with a batch of one; an audit takes one
_FLOOR = {torch.float64: 1e-5, torch.float32: 1e-2}  # of the largest norm: smaller count as this


@dataclass(frozen=True)
class Certificate:
    """What was proved, on which samples; its positions are those in the data set."""

    backend: str
    dtype: str  # the precision in which both checks passed
    samples: int
    positions: tuple[int, int]  # of the first and the last sample
    nonfinite: int  # samples without a finite gradient; these are flagged, not examined
    completeness: LargestError  # Σ wᵢ gᵢ against the gradient of Σ wᵢ Lᵢ
    agreement: LargestError  # single samples against batches of one
    compared: tuple[int, ...]  # positions of these
    unused: tuple[str, ...]  # parameters that no sample's loss here reaches: their rows are zero
    unproved: tuple[str, ...]  # whose gradient is no more than rounding, so that nothing is proved
    proves: bool  # some gradient is not zero: a batch of zeros proves nothing of others
    seconds: float  # that the proof took

    def to_json(self) -> dict[str, Any]:
        """Return the certificate as plain data, for the result file."""
        return {"verified": True, "verdict": self.verdict, **asdict(self)}

    @property
    def sum_differs(self) -> bool:
        """Whether all samples are right alone, and yet do not sum to the batch's gradient.

        That is so where a layer scales its gradient by its batch (scale_grad_by_freq).
        """
        everyone = len(self.compared) == self.samples - self.nonfinite
        return everyone and self.agreement.passed and not self.completeness.passed

    @property
    def verdict(self) -> str:
        """The proof in one line."""
        if self.sum_differs:
            return (
                f"passed: all {len(self.compared)} samples alone to {self.agreement.error:.0e} "
                f"({self.dtype}); they do not sum to the batch's gradient of "
                f"{self.completeness.parameter!r}, which a layer scales by the batch"
            )
        return (
            f"passed: sum of {self.samples - self.nonfinite} samples to "
            f"{self.completeness.error:.0e}, {len(self.compared)} of them alone to "
            f"{self.agreement.error:.0e} ({self.dtype})"
        )


@dataclass(frozen=True)
class Answer:
    """What a backend has said of a batch, to be proved."""

    problem: Problem
    backend: str
    batch: Batch
    evaluation: Evaluation
    _: KW_ONLY
    own_loss: bool = False  # samples may be coupled; a row is of the sample's loss in its batch
    seed: int = 0  # of what is drawn at random
    alone: int = 1  # samples that are compared with a batch of one

    def of(self, rows: Tensor) -> "Answer":
        """Return what was said of the samples at positions `rows` (m,)."""
        if len(rows) == len(self.batch):
            return self
        evaluation = self.evaluation
        losses = evaluation.losses[rows.to(evaluation.losses.device)]
        part = Evaluation(losses, evaluation.gradients.select(rows))
        return replace(self, batch=self.batch.select(rows), evaluation=part)


def certify(
    problem: Problem,
    backend: str,
    evaluate: Evaluate,
    batch: Batch,
    *,
    own_loss: bool = False,
    seed: int = 0,
) -> tuple[Evaluation, Certificate]:
    """Evaluate a batch and prove the answer, or raise.

    A model that turns out to carry something from call to call is asked again from the beginning,
    now that it is put back every time.

    Args:
        problem: What `evaluate` is bound to.
        backend: The name of the backend it comes from.
        evaluate: The bound backend.
        batch: Any samples.
        own_loss: Samples may be coupled; a row is the gradient of the sample's loss in its batch.
        seed: Of what is drawn at random.

    Raises:
        CertificateError: A check failed.
        CoupledSamplesError: A sample's loss depends on other samples.
        ModelError: The losses are cut off from every parameter.
        UnsupportedError: The forward pass is random, or changes what cannot be put back.
    """

    def attempt() -> tuple[Evaluation, Certificate]:
        with problem.state.watched():
            try:
                found = evaluate(batch)
            except (ModelError, RefusedError):
                if not own_loss:
                    require_independent(problem, batch)  # where they are coupled, say so
                raise
            answer = Answer(
                problem, backend, batch, found, own_loss=own_loss, seed=seed, alone=_ALONE
            )
            return found, examined(answer)

    known = problem.state.found
    try:
        found = attempt()
    except GradscopeError:
        if problem.state.found == known:
            raise
    else:
        if problem.state.found == known:
            return found
    return attempt()


def examined(answer: Answer, after: Certificate | None = None) -> Certificate:
    """Prove an answer that a backend has given; see `certify`.

    Args:
        answer: The answer.
        after: The proof of an earlier batch. Then the same samples in two other batches suffice,
            unless they give rise to doubt.
    """
    begun = time.perf_counter()
    batch, evaluation = answer.batch, answer.evaluation
    rows = finite_samples(evaluation).cpu().nonzero().flatten()
    finite = answer.of(rows)
    draw = torch.Generator().manual_seed(answer.seed)
    with unmeasured():  # nothing is measured for the proof's sake
        completeness, claim = NOTHING, None
        if len(rows):
            weights = _weights(finite, draw)
            claim = Claim.of(finite.evaluation.gradients, weights)
            completeness = _worst([*_sums(finite, claim, after, draw)])
        chosen = rows[torch.randperm(len(rows), generator=draw)[: answer.alone]]
        agreement = _agreement(answer, chosen)
        if not completeness.passed and agreement.passed and len(rows) > len(chosen):
            chosen = rows  # a layer may scale gradients by the batch, and every sample be right
            agreement = _agreement(answer, chosen)
            if agreement.passed and not answer.own_loss and claim is not None:
                _require_sum_of_singles(finite, claim)
        if after is None:  # shortcuts do not depend on the numbers
            require_consistent(answer.backend, evaluation.gradients, chosen)
    squared = evaluation.gradients.squared_norms
    unused = tuple(name for name, value in squared.items() if not bool(value.any()))
    if len(unused) == len(squared) and not answer.problem.losses(batch).requires_grad:
        raise ModelError(  # all rows are zero, as a slip leaves them
            "the losses do not depend on any parameter: they are cut off from the graph",
            where="the model or its loss",
            remedy="Look for detach, .data, .item(), numpy, torch.no_grad or inference_mode in the "
            "forward pass and in the loss.",
        )
    certificate = Certificate(
        backend=answer.backend,
        dtype=max(completeness.dtype, agreement.dtype, key=_digits),
        samples=len(batch),
        positions=(int(batch.index.min()), int(batch.index.max())),
        nonfinite=len(batch) - len(rows),
        completeness=completeness,
        agreement=agreement,
        compared=tuple(sorted(batch.index[chosen].tolist())),
        unused=unused,
        unproved=tuple(sorted({*completeness.small, *agreement.small})),
        proves=len(unused) < len(squared) and len(rows) > 0,
        seconds=time.perf_counter() - begun,
    )
    _require_passed(agreement, "agreement", answer.backend, batch.select(chosen))
    if not certificate.sum_differs:
        _require_passed(completeness, "completeness", answer.backend, batch)
    return certificate


def glimpsed(answer: Answer) -> None:
    """Prove some samples of an answer, drawn at random: alone, loss and gradient are the same."""
    finite = finite_samples(answer.evaluation).cpu().nonzero().flatten()
    draw = torch.Generator().manual_seed(answer.seed)
    chosen = finite[torch.randperm(len(finite), generator=draw)[: answer.alone]]
    check = _agreement(answer, chosen)
    _require_passed(check, "agreement", answer.backend, answer.batch.select(chosen))


def _sums(
    answer: Answer, claim: Claim, after: Certificate | None, draw: torch.Generator
) -> Iterator[LargestError]:
    """Compare losses and the claim with the samples in two other batches, and as they are.

    After an earlier proof the two other batches suffice.
    """
    problem, batch, losses = answer.problem, answer.batch, answer.evaluation.losses
    small = frozenset(after.unproved if after is not None else ())
    together = Objective.together(batch, claim.weights)
    apart = None
    if not answer.own_loss and len(batch) > 1:
        rows = regrouped(batch, draw)
        apart = Objective.apart(batch, claim.weights, rows)
        try:
            found, right = apart.evaluated(problem)
        except ModelError:  # it does not take any number of samples
            apart = None
        else:
            here = losses[torch.cat(rows).to(losses.device)]
            if not same(here, found, precision=problem.precision):
                _explain(answer, batch.select(torch.cat(rows)), here, found)
            yield judged(problem, claim, apart, right, together, small)
    if apart is not None and after is not None:
        return
    found, right = together.evaluated(problem)
    if not same(losses, found, precision=problem.precision):
        _explain(answer, batch, losses, found)
    if answer.own_loss:
        require_deterministic(problem, batch)
    else:
        require_independent(problem, batch, found, seed=draw.initial_seed())
        require_own_gradients(problem, batch, seed=draw.initial_seed())
    yield judged(problem, claim, together, right, apart, small)


def finite_samples(evaluation: Evaluation) -> Tensor:
    """Return (n,) bool: whose loss and whole gradient are finite."""
    finite, gradients = evaluation.losses.isfinite(), evaluation.gradients
    if gradients.norms_known and bool(gradients.norms.isfinite().all()):
        return finite
    return finite if gradients.bounded() else finite & gradients.norms.isfinite()


def _weights(answer: Answer, draw: torch.Generator) -> Tensor:
    """Draw weights (n,) of both signs that let every sample count, however small its gradient."""
    norms = answer.evaluation.gradients.norms.detach()
    size = 0.5 + torch.rand(len(norms), generator=draw, dtype=torch.float64)
    signs = torch.randint(0, 2, (len(norms),), generator=draw) * 2 - 1
    top = norms.amax()
    floor = _FLOOR.get(answer.problem.precision, 1.0) * top
    lift = (top / norms.clamp_min(floor)).nan_to_num(1.0).double().cpu()
    return (size * signs * lift).to(norms.device, norms.dtype)


def _explain(answer: Answer, batch: Batch, found: Tensor, right: Tensor) -> None:
    """Refuse losses (m,) of a backend that are not those of an ordinary evaluation: say why."""
    require_deterministic(answer.problem, batch)
    require_independent(answer.problem, batch)
    gap, size = (found - right).abs(), right.abs().max()
    eps = max(torch.finfo(dtype).eps for dtype in (found.dtype, answer.problem.precision))
    if bool((gap <= eps**0.5 * size).all()):
        return
    worst = int(gap.nan_to_num().argmax())
    raise CertificateError(
        f"the {answer.backend} backend gives the loss {float(found[worst]):.6g}, the model by "
        f"itself {float(right[worst]):.6g}",
        where=f"sample {int(batch.index[worst])}",
        remedy="Use another backend (auto tries all); loop is the reference.",
    )


def _require_sum_of_singles(answer: Answer, claim: Claim) -> None:
    """Compare a claim with batches of one, where the batch as a whole has another gradient."""
    problem, batch = answer.problem, answer.batch
    rows = [torch.tensor([k]) for k in range(len(batch))]
    right = {name: torch.zeros_like(value) for name, value in claim.values.items()}
    for k, weight in enumerate(claim.weights):
        for name, gradient in one_sample(problem, batch.one(k))[1].items():
            right[name] += weight.to(right[name]) * gradient
    check = judged(problem, claim, Objective.apart(batch, claim.weights, rows), right)
    _require_passed(check, "completeness", answer.backend, batch)


def _worst(checks: Sequence[LargestError]) -> LargestError:
    """Return the check that is nearest to failing, with what all of them say of rounding."""
    if not checks:
        return NOTHING
    worst = max(checks, key=lambda check: check.rank)
    dtype = max((check.dtype for check in checks), key=_digits)
    small = sorted({name for check in checks for name in check.small})
    return replace(worst, dtype=dtype, small=tuple(small))


def _agreement(answer: Answer, chosen: Tensor) -> LargestError:
    """Compare samples with batches of one, or with their own losses in their batch."""
    problem, batch, losses = answer.problem, answer.batch, answer.evaluation.losses
    require_once = cache(lambda: require_independent(problem, batch))

    def alone(sample: int) -> LargestError:
        gradients = answer.evaluation.gradients.select(slice(sample, sample + 1))
        claim = Claim.of(gradients, losses.new_ones(1))
        if answer.own_loss:
            weights = torch.zeros_like(losses)
            weights[sample] = 1
            right = own_gradient(problem, batch, sample)
            return judged(problem, claim, Objective.together(batch, weights), right)
        one = batch.one(sample)
        loss, right = one_sample(problem, one)
        here = losses[sample : sample + 1]
        if not same(here, loss[None], losses, problem.precision):
            require_once()
            _explain(answer, one, here, loss[None])
        objective = Objective.together(one, claim.weights)
        return judged(problem, claim, objective, right, Objective.twice(one))

    return _worst([alone(k) for k in chosen.tolist()])


_AGAINST = {"completeness": "the gradient of the total loss", "agreement": "a batch of one"}


def _require_passed(check: LargestError, what: str, backend: str, batch: Batch) -> None:
    if not check.passed:
        raise CertificateError(
            f"the {backend} backend failed the proof of {what}: relative error {check.error:.2e} "
            f"against {_AGAINST[what]} ({check.dtype}, tolerance {check.tolerance:.0e})",
            where=f"parameter {check.parameter!r}, {span(batch)}",
            remedy="Use another backend (auto tries all); loop is the reference.",
        )


def span(batch: Batch) -> str:
    """Return which samples a batch has, in words."""
    first, last = int(batch.index.min()), int(batch.index.max())
    return f"sample {first}" if first == last else f"samples {first} to {last}"


def _digits(dtype: str) -> int:
    """Return how many bits a number of a named format has."""
    return int("".join(filter(str.isdigit, dtype)) or 0)
