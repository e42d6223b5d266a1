"""The certificate: the proof, made on the first batch of a run, that the numbers are right.

Completeness: Σᵢ gᵢ equals the gradient of Σᵢ Lᵢ for every parameter. Agreement: a few samples equal
a batch of one, which catches coupling, a wrong sample axis, permuted rows and a wrong scale.
Independence: a sample's loss is the same alone and in the batch. Finiteness: who is not finite is
known. What fails in low precision is judged again in float64, since an activation at its kink may
fall on either side in another kernel.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradscope.backends import Backend, Evaluate, backends
from gradscope.backends.joint import own_gradient, own_loss_backends
from gradscope.backends.loop import dense, one_sample
from gradscope.blocks import Evaluation
from gradscope.blocks.ways import predicted
from gradscope.core.batch import Batch
from gradscope.core.independence import require_deterministic, require_independent
from gradscope.core.problem import Problem
from gradscope.core.scalar import summed
from gradscope.errors import CertificateError, ModelError

_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_NEGLIGIBLE = 1e-2  # a parameter is measured against at least this share of the whole gradient
Alone = Callable[[Problem, Batch, int], dict[str, Tensor]]


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        error: The largest relative error over parameters (and samples).
        parameter: Where it was.
        tolerance: The largest error that passes.
    """

    error: float
    parameter: str
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance; a NaN is not."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Certificate:
    """What was proved, on which samples.

    Attributes:
        backend: The backend that was examined.
        dtype: The precision in which both checks passed.
        samples: How many samples the batch had.
        nonfinite: How many of them have no finite gradient; these are flagged, not examined.
        completeness: Σ gᵢ against the gradient of Σ Lᵢ.
        agreement: Single samples against batches of one.
        compared: The data-set positions of these samples.
        unused: Parameters that no sample's loss in this batch reaches: their rows are zero.
        seconds: What the proof cost.
    """

    backend: str
    dtype: str
    samples: int
    nonfinite: int
    completeness: Check
    agreement: Check
    compared: tuple[int, ...]
    unused: tuple[str, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the certificate as plain data, for the result file."""
        return {"verified": True, "verdict": self.verdict, **asdict(self)}

    @property
    def sum_differs(self) -> bool:
        """Whether all samples are right alone, and yet do not sum to the batch's gradient.

        That is so where a layer scales its gradient by its batch (scale_grad_by_freq).
        """
        everyone = len(self.compared) == self.samples
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


def certify(
    problem: Problem, backend: str, evaluate: Evaluate, batch: Batch, *, own_loss: bool = False
) -> tuple[Evaluation, Certificate]:
    """Evaluate a batch and prove the answer, or raise.

    Args:
        problem: What `evaluate` is bound to.
        backend: The name of the backend it comes from.
        evaluate: The bound backend.
        batch: Any samples.
        own_loss: Samples may be coupled; a row is the gradient of the sample's loss in its batch.

    Raises:
        CertificateError: A check failed.
        CoupledSamplesError: A sample's loss depends on other samples.
        ModelError: The losses are cut off from every parameter.
        UnsupportedError: The forward pass is random.
    """
    start = time.perf_counter()
    if own_loss:
        require_deterministic(problem, batch)
    elif len(batch) > 1:
        require_independent(problem, batch)
    independent = time.perf_counter()
    evaluation = evaluate(batch)
    evaluated = time.perf_counter()
    finite = finite_samples(evaluation).cpu()
    rows = torch.arange(len(batch))[finite]
    alone = own_gradient if own_loss else _alone
    with predicted():  # nothing is measured for the proof's sake
        certificate = _examined(problem, backend, batch, evaluation, rows, alone)
    if len(certificate.unused) == len(problem.parameters):
        _require_graph(problem, batch)
    if not (certificate.completeness.passed and certificate.agreement.passed):
        registry = own_loss_backends if own_loss else backends
        certificate = _in_float64(
            problem, registry.get(backend), backend, batch.select(rows), alone
        )
        _require_passed(certificate)
    return evaluation, replace(
        certificate,
        samples=len(batch),
        nonfinite=int((~finite).sum()),
        seconds=time.perf_counter() - evaluated + independent - start,
    )


def finite_samples(evaluation: Evaluation) -> Tensor:
    """Return (n,) bool: whose loss and whole gradient are finite."""
    finite, gradients = evaluation.losses.isfinite(), evaluation.gradients
    if gradients.norms_known and bool(gradients.norms.isfinite().all()):
        return finite
    return finite if gradients.bounded() else finite & gradients.norms.isfinite()


def _require_graph(problem: Problem, batch: Batch) -> None:
    """Refuse losses that no parameter can reach, as a slip leaves them: all rows would be zero."""
    if not problem.losses(batch).requires_grad:
        raise ModelError(
            "the losses do not depend on any parameter: they are cut off from the graph",
            where="the model or its loss",
            remedy="Look for detach, .data, .item(), numpy or torch.no_grad in the forward pass "
            "and in the loss.",
        )


def _alone(problem: Problem, batch: Batch, sample: int) -> dict[str, Tensor]:
    return one_sample(problem, batch.one(sample))[1]


def _in_float64(
    problem: Problem, backend: Backend, name: str, batch: Batch, alone: Alone
) -> Certificate:
    """Judge again without rounding; where only the sum is off, compare every sample."""
    wide = problem.converted(torch.float64)
    cast = batch.to(problem.device, torch.float64)
    every = torch.arange(len(cast))
    with backend(wide) as evaluate:
        evaluation = evaluate(cast)
    certificate = _examined(wide, name, cast, evaluation, every, alone)
    if certificate.completeness.passed or not certificate.agreement.passed:
        return certificate
    agreement = _agreement(wide, cast, evaluation, every.tolist(), alone)
    return replace(
        certificate,
        agreement=_worst(agreement, certificate.agreement.tolerance),
        compared=tuple(cast.index.tolist()),
    )


def _examined(
    problem: Problem,
    backend: str,
    batch: Batch,
    evaluation: Evaluation,
    rows: Tensor,
    alone: Alone,
) -> Certificate:
    tolerance = _TOLERANCES.get(problem.dtype, 1e-8)
    compared = (
        sorted({int(rows[k]) for k in (0, len(rows) // 2, len(rows) - 1)}) if len(rows) else []
    )
    completeness = _worst(_completeness(problem, batch, evaluation, rows), tolerance)
    agreement = _worst(_agreement(problem, batch, evaluation, compared, alone), tolerance)
    squared = evaluation.gradients.squared_norms
    return Certificate(
        backend=backend,
        dtype=str(problem.dtype).removeprefix("torch."),
        samples=len(batch),
        nonfinite=0,
        completeness=completeness,
        agreement=agreement,
        compared=tuple(int(batch.index[k]) for k in compared),
        unused=tuple(name for name, value in squared.items() if not bool(value.any())),
        seconds=0.0,
    )


def _completeness(
    problem: Problem, batch: Batch, evaluation: Evaluation, rows: Tensor
) -> Iterator[tuple[str, float]]:
    """Yield (parameter, ‖Σ gᵢ − ∇ΣLᵢ‖ relative to Σ‖gᵢ‖)."""
    if not len(rows):
        return
    whole = len(rows) == len(batch)
    losses = problem.losses(batch if whole else batch.select(rows))
    found = evaluation.gradients if whole else evaluation.gradients.select(rows)
    total = _total_gradient(losses, problem)
    size = float(found.norms.sum()) * _NEGLIGIBLE
    for name, block in found.items():
        summed = block.weighted_sum()
        own = float(found.squared_norms[name].sqrt().sum())
        scale = max(own, float(total[name].norm()), size)
        yield name, _relative(_distance(summed, total[name]), scale)


def _agreement(
    problem: Problem, batch: Batch, evaluation: Evaluation, compared: list[int], alone: Alone
) -> Iterator[tuple[str, float]]:
    """Yield (parameter, relative distance of a sample's gradient from a batch of one)."""
    for k in compared:
        wanted = alone(problem, batch, k)
        size = float(torch.stack([g.abs().square().sum().double() for g in wanted.values()]).sum())
        for name, block in evaluation.gradients.select(slice(k, k + 1)).items():
            gap = float((block.dense()[0] - wanted[name]).norm())
            yield name, _relative(gap, max(float(wanted[name].norm()), _NEGLIGIBLE * size**0.5))


def _total_gradient(losses: Tensor, problem: Problem) -> Mapping[str, Tensor]:
    parameters = list(problem.parameters.values())
    if not losses.requires_grad:
        return {name: torch.zeros_like(p) for name, p in problem.parameters.items()}
    gradients = torch.autograd.grad(
        summed(losses),
        parameters,
        allow_unused=True,
        materialize_grads=True,
    )
    return {k: dense(g) for k, g in zip(problem.parameters, gradients, strict=True)}


def _worst(errors: Iterator[tuple[str, float]], tolerance: float) -> Check:
    name, error = max(
        errors, key=lambda e: float("inf") if e[1] != e[1] else e[1], default=("", 0.0)
    )
    return Check(error, name, tolerance)


def _relative(gap: float, scale: float) -> float:
    return gap / scale if scale else (0.0 if gap == 0 else float("inf"))


def _distance(a: Tensor, b: Tensor) -> float:
    wide = torch.complex128 if a.is_complex() else torch.float64
    return float((a.to(wide) - b.to(wide)).norm())


def _require_passed(certificate: Certificate) -> None:
    for name, check, against in (
        ("completeness", certificate.completeness, "the gradient of the total loss"),
        ("agreement", certificate.agreement, "a batch of one"),
    ):
        if not check.passed and not certificate.sum_differs:
            raise CertificateError(
                f"the {certificate.backend} backend failed the proof of {name}: relative error "
                f"{check.error:.2e} against {against} ({certificate.dtype}, tolerance "
                f"{check.tolerance:.0e})",
                where=f"parameter {check.parameter!r}",
                remedy="Use another backend (auto tries all); loop is the reference.",
            )
