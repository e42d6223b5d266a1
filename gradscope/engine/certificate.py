"""The certificate: the proof that the numbers of a batch are right.

- Completeness: Σᵢ wᵢ gᵢ equals the gradient of Σᵢ wᵢ Lᵢ for every parameter, computed with the
  samples in other batches. The weights are random, with both signs, so exchanged rows are detected.
- Agreement: a few samples, drawn at random, equal a batch of one. This detects coupling and a wrong
  scale.
- Independence: a sample's loss is the same alone and in other batches, and has no gradient with
  respect to the inputs of other samples.
- Finiteness: samples that are not finite are flagged.
- State: changes that the forward pass makes to the model are found and undone.

The same code proves a sharded model on all its processes together; see `engine.reference`.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from gradscope.backends.base import PROVED, Evaluate
from gradscope.backends.hooks.graph import internals
from gradscope.backends.hooks.graph.trace import trace
from gradscope.backends.loop import own_gradient
from gradscope.blocks import Evaluation, unmeasured
from gradscope.core.batch import Batch
from gradscope.core.precision import all_finite, products
from gradscope.core.texts import count, unequal
from gradscope.engine.judge import (
    NOTHING,
    Claim,
    LargestError,
    Objective,
    add_gradients,
    compare_claim,
    compared_in_float64,
    contradiction,
    require_consistent,
)
from gradscope.engine.reference import gradients, tolerated
from gradscope.errors import (
    CoupledSamplesError,
    GradscopeError,
    ModelError,
    RefusedError,
    UnsupportedError,
)
from gradscope.model.independence import (
    coupled_remedy,
    other_random_numbers,
    regrouped,
    require_deterministic,
    require_independent,
    require_own_gradients,
    require_same_losses,
    require_unaffected,
)
from gradscope.model.problem import Problem
from gradscope.model.quantised import require_fixed_columns
from gradscope.model.rounding import all_in_float64, computed_in, fits_in_float64, same

_PARTS = 8  # number of other batches in a first proof; an audit uses two
_SINGLES = 3  # samples that a first proof compares with a batch of one; an audit compares one
_COPIED = 2**26  # with `hooks`, models up to this size in bytes are copied to float64
_FLOOR = {torch.float64: 1e-5, torch.float32: 1e-2}  # lower limit of norms, relative to the largest


@dataclass(frozen=True)
class Certificate:
    """The result of a proof; positions are positions in the data set."""

    backend: str
    dtype: str  # the precision in which both checks passed
    samples: int
    positions: tuple[int, int]  # positions of the first and the last sample
    nonfinite: int  # samples without a finite gradient; these are flagged, not examined
    completeness: LargestError  # Σ wᵢ gᵢ compared with the gradient of Σ wᵢ Lᵢ
    agreement: LargestError  # single samples compared with batches of one
    compared: tuple[int, ...]  # positions of the single samples
    unused: tuple[str, ...]  # parameters whose rows are all zero in this batch
    unproved: tuple[str, ...]  # parameters whose gradient is only rounding, so it is not proved
    proves: bool  # whether a gradient is not zero; a batch of zeros is no proof for other batches
    seconds: float  # time of the proof
    phases: Mapping[str, float]  # seconds of the evaluation and of each part of the proof
    noun: str = "sample"  # the word for a row in the verdict: sample or token

    def to_json(self) -> dict[str, Any]:
        """Return the certificate as plain data, for the result file."""
        facts = {key: value for key, value in asdict(self).items() if key != "noun"}
        return {"verified": True, "verdict": self.verdict, **facts}

    @property
    def sum_differs(self) -> bool:
        """Whether every sample agrees alone, but their sum differs from the batch's gradient.

        The cause is a layer that scales its gradient by the batch (scale_grad_by_freq), or a hook.
        """
        everyone = len(self.compared) == self.samples - self.nonfinite
        return everyone and self.agreement.passed and not self.completeness.passed

    @property
    def verdict(self) -> str:
        """The proof in one line."""
        if self.sum_differs:
            return (
                f"passed: all {len(self.compared)} {self.noun}s alone to "
                f"{self.agreement.error:.0e} ({self.dtype}); their sum differs from the batch's "
                f"gradient of {self.completeness.parameter!r}, which a layer or a hook scales by "
                "the batch"
            )
        return (
            f"passed: sum of {count(self.samples - self.nonfinite, self.noun)} to "
            f"{self.completeness.error:.0e}, {len(self.compared)} of them alone to "
            f"{self.agreement.error:.0e} ({self.dtype})"
        )


@dataclass(frozen=True)
class Answer:
    """The evaluation of a batch by a backend, which is to be proved."""

    problem: Problem
    backend: str
    batch: Batch
    evaluation: Evaluation
    _: KW_ONLY
    own_loss: bool = False  # samples may be coupled; rows are gradients of losses in the batch
    seed: int = 0  # seed of the random choices
    singles: int = 1  # number of samples that are compared with a batch of one
    trains: bool = False  # whether an earlier batch had gradients; then all may be zero here
    phases: dict[str, float] = field(default_factory=dict)  # {phase: seconds} so far

    def uncached(self) -> "Answer":
        """Return a copy without cached results.

        The proof must not change the evaluation that it proves.
        """
        gradients = self.evaluation.gradients
        return replace(self, evaluation=replace(self.evaluation, gradients=gradients.of(gradients)))

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """Add the seconds that the body takes to a phase."""
        return _timed(self.phases, phase)

    def select(self, rows: Tensor) -> "Answer":
        """Return the answer for the samples at indices `rows` (m,)."""
        if torch.equal(rows, torch.arange(len(self.batch))):
            return self
        evaluation = self.evaluation
        losses = evaluation.losses[rows.to(evaluation.losses.device)]
        part = Evaluation(losses, evaluation.gradients.select(rows))
        return replace(self, batch=self.batch.select(rows), evaluation=part)


@contextmanager
def _timed(phases: dict[str, float], phase: str) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    phases[phase] = phases.get(phase, 0.0) + time.perf_counter() - begun


def certify(
    problem: Problem,
    backend: str,
    evaluate: Evaluate,
    batch: Batch,
    *,
    own_loss: bool = False,
    seed: int = 0,
    trains: bool = False,
) -> tuple[Evaluation, Certificate]:
    """Evaluate a batch and prove the result, or raise.

    If the proof finds that the model keeps state between calls, the batch is evaluated again. From
    then on, that state is restored after every call.

    Args:
        problem: The problem to which `evaluate` is bound.
        backend: The name of the backend.
        evaluate: The bound backend.
        batch: Any samples.
        own_loss: Samples may be coupled; a row is the gradient of the sample's loss in its batch.
        seed: The seed of the random choices.
        trains: Whether an earlier batch had gradients; then all gradients may be zero here.

    Raises:
        CertificateError: A check failed.
        CoupledSamplesError: A sample's loss depends on other samples.
        ModelError: The losses do not depend on any parameter.
        UnsupportedError: The forward pass is random, or changes state that cannot be restored.
    """
    attempt = partial(_attempt, problem, backend, evaluate, batch, own_loss, seed, trains)
    known = problem.state.change_count
    try:
        found = attempt()
    except GradscopeError:
        if problem.state.change_count == known:
            raise
    else:
        if problem.state.change_count == known:
            return found
    return attempt()


def _attempt(
    problem: Problem,
    backend: str,
    evaluate: Evaluate,
    batch: Batch,
    own_loss: bool,
    seed: int,
    trains: bool,
) -> tuple[Evaluation, Certificate]:
    """Evaluate a batch and prove the result; see `certify`."""
    if not own_loss:
        require_fixed_columns(problem.model, batch)
    with problem.state.watching(), _custom_functions_named(problem, batch):
        phases: dict[str, float] = {}
        found: Evaluation | ModelError | RefusedError
        try:
            with _timed(phases, "evaluation"):
                found = evaluate(batch, PROVED)
        except (ModelError, RefusedError) as error:
            found = error
        if isinstance(found, Exception):
            try:
                if not own_loss:
                    require_independent(problem, batch)  # its error is more precise
                raise found
            finally:
                del found  # it refers to this frame, which holds the batch
        answer = Answer(
            problem,
            backend,
            batch,
            found,
            own_loss=own_loss,
            seed=seed,
            singles=_SINGLES,
            trains=trains,
            phases=phases,
        )
        return found, prove(answer)


def prove(answer: Answer, after: Certificate | None = None) -> Certificate:
    """Prove a backend's answer, or raise; see `certify`.

    Args:
        answer: The answer.
        after: The proof of an earlier batch. The samples are then compared in only two other
            batches, unless these differ.
    """
    begun = time.perf_counter()
    answer = answer.uncached()
    problem, batch = answer.problem, answer.batch
    rows, finite = _examined_rows(answer)
    completeness, agreement, chosen = NOTHING, NOTHING, rows[:0]
    with unmeasured():  # kernels are not timed in a proof
        if problem.any(finite):
            found = _compare_with_autograd(answer.select(rows), after)
            if finite:
                completeness, agreement, chosen = found[0], found[1], rows[found[2]]
        _require_nonfinite_in_batch(answer)
        if after is None:  # the first proof also checks the shortcuts of blocks
            with answer.timed("shortcuts"):
                require_consistent(answer.backend, answer.evaluation.gradients, chosen)
        if answer.own_loss:
            _require_rows_alone(answer, chosen)
    if problem.any(problem.state.drew):
        require_deterministic(problem, batch)
    certificate = _certificate(answer, completeness, agreement, chosen, begun)
    _require_passed(agreement, "agreement", answer.backend, batch.select(chosen))
    if problem.model_parallel is not None or not certificate.sum_differs:
        _require_passed(completeness, "completeness", answer.backend, batch)
    elif not answer.own_loss:
        _require_scaled(answer.select(rows), completeness)
    return certificate


def _certificate(
    answer: Answer,
    completeness: LargestError,
    agreement: LargestError,
    chosen: Tensor,
    begun: float,
) -> Certificate:
    """Return the certificate; `chosen` are the samples that were compared with batches of one."""
    problem, batch, rows = answer.problem, answer.batch, answer.evaluation.gradients
    unused = tuple(name for name, value in rows.squared_norms.items() if not bool(value.any()))
    some = len(unused) < len(rows)  # whether a gradient is not zero
    if not problem.any(some or answer.trains):
        _require_graph(answer)
    finite = finite_samples(answer.evaluation)
    compared = batch.index[chosen].tolist()
    return Certificate(
        backend=answer.backend,
        dtype=max(completeness.dtype, agreement.dtype, key=_digits),
        samples=len(batch),
        positions=(int(batch.index.min()), int(batch.index.max())),
        nonfinite=int((~finite).sum()),
        completeness=completeness,
        agreement=agreement,
        compared=tuple(sorted(compared if problem.model_parallel is None else {*compared})),
        unused=unused,
        unproved=tuple(sorted({*completeness.small, *agreement.small})),
        proves=problem.any(some and bool(finite.any())),
        seconds=time.perf_counter() - begun,
        phases=answer.phases,
        noun=problem.rows,
    )


def prove_samples(answer: Answer) -> None:
    """Compare a few samples of an answer, drawn at random, with batches of one; raise if wrong."""
    answer = answer.uncached()
    rows, finite = _examined_rows(answer)
    draw = torch.Generator().manual_seed(answer.seed)
    chosen = rows[torch.randperm(len(rows), generator=draw)[: answer.singles]]
    check = _compare_singles(answer, chosen)
    if finite:
        _require_passed(check, "agreement", answer.backend, answer.batch.select(chosen))


def _examined_rows(answer: Answer) -> tuple[Tensor, bool]:
    """Return indices (m,) of the samples that a proof examines, and whether they are finite.

    These are the finite samples. With a sharded model, each process examines the same number of
    samples, so that all make the same passes. A process with fewer finite samples repeats them. A
    process without finite samples examines nonfinite samples and ignores the result.
    """
    rows, n = finite_samples(answer.evaluation).cpu().nonzero().flatten(), len(answer.batch)
    if answer.problem.model_parallel is None:
        return rows, len(rows) > 0
    examined = rows if len(rows) else torch.arange(n)
    return examined[torch.arange(n) % len(examined)], len(rows) > 0


def _require_graph(answer: Answer) -> None:
    """Raise if the losses do not depend on any parameter."""
    if not answer.problem.losses(answer.batch).requires_grad:
        raise ModelError(
            "the losses do not depend on any parameter: they are detached from the autograd graph",
            where="the model or its loss",
            remedy="Remove detach, .data, .item(), numpy, torch.no_grad or inference_mode from the "
            "forward pass and the loss.",
        )


def _compare_with_autograd(
    answer: Answer, after: Certificate | None
) -> tuple[LargestError, LargestError, Tensor]:
    """Return completeness, agreement of single samples, and the indices of these samples.

    The reference is the gradient of the same samples in other batches, some of them alone. The
    unchanged batch is also evaluated for its losses, and for the gradients with respect to its
    inputs. After an earlier proof, `hooks` does not need this, because it computes its losses in
    the unchanged batch. Other backends may evaluate the samples separately.
    """
    draw = torch.Generator().manual_seed(answer.seed)
    chosen = torch.randperm(len(answer.batch), generator=draw)[: answer.singles]
    problem, batch, weights = answer.problem, answer.batch, _weights(answer, draw)
    together, everyone = Objective.in_one_batch(batch, weights), [torch.arange(len(batch))]
    groups, alone = everyone, 0
    if not answer.own_loss and (after is None or len(batch) == 1):
        alone = len(chosen)
    if not answer.own_loss:  # audits have no singles here, as their number depends on the time
        groups = _groups(answer, chosen[:alone], draw)
    objective = Objective.in_groups(batch, weights, groups)
    with answer.timed("regrouped batches"):
        try:
            right, agreed = _in_groups(answer, objective, groups, alone)
        except ModelError:  # the model does not support every batch size
            if not tolerated(problem):
                raise
            groups, objective = everyone, together
            right, agreed = _in_groups(answer, together, everyone, 0)
    known = groups is not everyone
    proved = after is not None and answer.backend == "hooks"
    if known and (proved or problem.model_parallel is not None):  # no gradients of inputs needed
        require_unaffected(problem, batch, answer.evaluation.losses, seed=answer.seed)
    else:
        with answer.timed("independence"):
            _require_own_losses(answer, known=known)
    with answer.timed("sums"):
        claim = Claim.of(answer.evaluation.gradients, weights)
        small = frozenset(after.unproved if after is not None else agreed.small if agreed else ())
        other = (lambda: together.evaluate(problem)[1]) if known else None
        completeness = compare_claim(problem, claim, objective, right, other, small)
        del right
        if known and answer.backend != "hooks":  # hooks computes with the batch's own graph
            batched = _compare_batch_sum_in_float64(answer, weights, groups) or _compare_batch_sum(
                answer, claim, draw, small
            )
            completeness = _worst([completeness, batched])
    agreement = agreed or NOTHING
    if problem.any(agreed is None):
        agreement = _compare_singles(answer, chosen)
    scaled = problem.model_parallel is None and not completeness.passed and agreement.passed
    if scaled and len(chosen) < len(batch):  # a layer may scale its gradient by the batch
        chosen = torch.arange(len(batch))
        agreement = _compare_singles(answer, chosen)
        if agreement.passed and not answer.own_loss:
            _require_sum_of_singles(answer, claim)
    return completeness, agreement, chosen


def _groups(answer: Answer, alone: Tensor, draw: torch.Generator) -> list[Tensor]:
    """Return indices of an answer's samples in other batches, some `alone`; see `regrouped`.

    With a sharded model, the groups depend only on the number of samples and on `draw`, so that all
    processes have the same number of groups.
    """
    if answer.problem.model_parallel is not None:
        return regrouped(answer.batch, draw, alone.tolist(), outstanding=0)
    return regrouped(answer.batch, draw, alone.tolist(), _PARTS if len(alone) else 2)


def _compare_batch_sum_in_float64(
    answer: Answer, weights: Tensor, groups: Sequence[Tensor]
) -> LargestError | None:
    """Compare a batch's gradient with the sum of its groups' gradients, in float64.

    Returns None if the model is already in float64, or does not run in float64.
    """
    problem, batch = answer.problem, answer.batch
    if problem.precision == torch.float64 or not fits_in_float64(problem):
        return None
    try:
        with all_in_float64(problem, batch) as (wide, cast):
            together = Objective.in_one_batch(cast, weights).evaluate(wide)[1]
            return compared_in_float64(wide, Objective.in_groups(cast, weights, groups), together)
    except (ModelError, RefusedError):
        return None


def _compare_batch_sum(
    answer: Answer, claim: Claim, draw: torch.Generator, small: frozenset[str]
) -> LargestError:
    """Compare the sum of the rows with the gradient of their batch, in the model's dtype."""
    problem, batch, weights = answer.problem, answer.batch, claim.weights
    order = torch.randperm(len(batch), generator=draw)
    moved = Objective.in_one_batch(batch.select(order), weights[order.to(weights.device)])
    together = Objective.in_one_batch(batch, weights)
    right = together.evaluate(problem)[1]
    return compare_claim(problem, claim, together, right, lambda: moved.evaluate(problem)[1], small)


def _in_groups(
    answer: Answer, objective: Objective, groups: Sequence[Tensor], alone: int
) -> tuple[dict[str, Tensor], LargestError | None]:
    """Return ∇ Σ wᵢ Lᵢ of samples in groups, and the agreement of the first `alone` groups.

    These groups have a single sample. Without such groups, or if a group differs, the agreement is
    None. The samples are then compared again without weights: a user's hook may be nonlinear.
    """
    problem, losses = answer.problem, answer.evaluation.losses
    found: list[Tensor] = []
    total: dict[str, Tensor] = {}
    checks: list[LargestError] = []
    with other_random_numbers():
        for loss, own in objective.parts(problem):  # enumerate would keep a reference to `own`
            k = len(found)
            rows = groups[k].to(losses.device)
            if k < alone and not problem.any(
                not same(losses[rows], loss, losses, problem.precision)
            ):
                small = frozenset(name for check in checks for name in check.small)
                check = _compare_single(answer, int(rows), objective.weights[k], own, small)
                checks.append(check)
            found.append(loss)
            total = add_gradients(total, own)
            del own
    rows, right = torch.cat([*groups]), torch.cat(found)
    here = losses[rows.to(losses.device)]
    if problem.any(not same(here, right, precision=problem.precision)):
        _refuse_losses(answer, answer.batch.select(rows), here, right)
    agreement = _worst(checks)
    return total, agreement if 0 < len(checks) == alone and agreement.passed else None


def _require_own_losses(answer: Answer, *, known: bool) -> None:
    """Evaluate the unchanged batch; raise if losses differ or depend on other samples.

    Args:
        answer: The answer with the losses.
        known: Whether the samples are known to have the same losses in other batches.
    """
    problem, batch, losses = answer.problem, answer.batch, answer.evaluation.losses
    if answer.own_loss:
        return require_deterministic(problem, batch)
    seed = answer.seed
    found = require_own_gradients(problem, batch, seed)
    if not same(losses, found, precision=problem.precision):
        _refuse_losses(answer, batch, losses, found)
    if not known:
        require_independent(problem, batch, found, seed=seed)
    size = sum(p.numel() * p.element_size() for p in problem.model.parameters())
    judge = problem.precision != torch.float64
    judge &= answer.backend != "hooks" or (known and size <= _COPIED)
    require_unaffected(problem, batch, found, seed=seed, judged=judge)
    return None


def _require_nonfinite_in_batch(answer: Answer) -> None:
    """Raise if a loss that the backend found nonfinite is finite in the unchanged batch.

    The remaining checks skip nonfinite samples, and only `hooks` evaluates the unchanged batch.
    """
    lost = ~answer.evaluation.losses.isfinite()
    if bool(lost.any()) and not answer.own_loss and answer.backend != "hooks":
        with other_random_numbers():
            found = answer.problem.losses(answer.batch).detach()
        if bool((found.isfinite() & lost).any()):
            _refuse_losses(answer, answer.batch, answer.evaluation.losses, found)


def finite_samples(evaluation: Evaluation) -> Tensor:
    """Return which samples have a finite loss and a finite gradient, (n,) bool."""
    finite, gradients = evaluation.losses.isfinite(), evaluation.gradients
    if gradients.has_norms and all_finite(gradients.norms):
        return finite
    return finite if gradients.has_finite_bounds() else finite & gradients.norms.isfinite()


def _weights(answer: Answer, draw: torch.Generator) -> Tensor:
    """Draw weights (n,) of both signs; samples with small gradients get larger weights."""
    norms = answer.evaluation.gradients.norms.detach()
    size = 0.5 + torch.rand(len(norms), generator=draw, dtype=torch.float64)
    signs = torch.randint(0, 2, (len(norms),), generator=draw) * 2 - 1
    top = norms.amax()
    floor = _FLOOR.get(answer.problem.precision, 1.0) * top
    lift = (top / norms.clamp_min(floor)).nan_to_num(1.0).cpu().double()
    return (size * signs * lift).to(norms.device, norms.dtype)


def _refuse_losses(answer: Answer, batch: Batch, found: Tensor, right: Tensor) -> None:
    """Raise an error that explains why a backend's losses (m,) differ from `right`.

    Returns if the difference is only rounding.
    """
    require_deterministic(answer.problem, batch)
    if answer.problem.model_parallel is not None:
        return require_same_losses(answer.problem, batch, found, right)
    require_independent(answer.problem, batch)
    gap, size = (found - right).abs(), right.abs().max()
    narrow = computed_in(answer.problem, batch)
    dtypes = (found.dtype, narrow, products(answer.problem.device))
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    if bool((gap <= eps**0.5 * size).all()):
        return None
    worst = int(gap.nan_to_num().argmax())
    sample = batch.one(worst)
    place = answer.batch.index == sample.index
    alone, whole = (answer.problem.losses(b).detach() for b in (sample, answer.batch))
    here = whole[place.to(whole.device)][:1]
    if not same(alone, here, whole, answer.problem.precision):
        one, many = unequal(float(alone), float(here))
        raise UnsupportedError(
            f"rounding changes the loss of {sample.description} from {one} alone to {many} in a "
            "batch: a choice of the model (top-k, argmax, a threshold) depends on the last digits",
            where="the model or its loss",
            remedy="Compute in float64, which separates nearly equal values: model.double(), or "
            'dtype = "float64" in a run file.',
        )
    given, own = unequal(float(found[worst]), float(right[worst]))
    what = f"gives the loss {given}, but the model alone gives {own}"
    raise contradiction(answer.backend, what, sample.description)


def _require_sum_of_singles(answer: Answer, claim: Claim) -> None:
    """Compare a claim with the sum of batches of one; for layers that scale by the batch."""
    problem, batch = answer.problem, answer.batch
    rows = [torch.tensor([k]) for k in range(len(batch))]
    right = {name: torch.zeros_like(claim.value(name)) for name in claim.gradients}
    for k, weight in enumerate(claim.weights):
        for name, gradient in gradients(problem, batch.one(k))[1].items():
            right[name] += weight.to(right[name]) * gradient
    check = compare_claim(problem, claim, Objective.in_groups(batch, claim.weights, rows), right)
    _require_passed(check, "completeness", answer.backend, batch)


def _require_scaled(answer: Answer, check: LargestError) -> None:
    """Raise if no layer or hook explains why right rows do not sum to the batch's gradient.

    A layer may scale its gradient by the batch (scale_grad_by_freq), or a user's hook may change a
    gradient. Otherwise a sample contributes to another sample's gradient.
    """
    problem, batch = answer.problem, answer.batch
    with _Hooks() as hooks:
        losses = problem.losses(batch)
    hooked = hooks.registered or any(p._backward_hooks for p in problem.parameters.values())
    if hooked or any(
        internals.saved_attribute(node, "scale_grad_by_freq") for node in _nodes(losses)
    ):
        return
    raise CoupledSamplesError(
        f"the batch's gradient of parameter {check.parameter!r} is not the sum of its samples' "
        f"gradients: the relative error is {check.error:.2e}",
        where="the model or its loss",
        remedy=coupled_remedy(None, batch, problem.model),
    )


@contextmanager
def _custom_functions_named(problem: Problem, batch: Batch) -> Iterator[None]:
    """Report a custom autograd function if gradients are coupled but losses are not."""
    try:
        yield
    except CoupledSamplesError as error:
        if (names := _custom_functions(problem, batch)) and _are_independent(problem, batch):
            raise _no_derivative(names) from error
        raise


def _require_rows_alone(answer: Answer, chosen: Tensor) -> None:
    """Raise if own-loss rows differ from batches of one although losses are independent.

    The cause is a custom autograd function whose backward pass mixes samples.
    """
    problem, batch = answer.problem, answer.batch
    names = _custom_functions(problem, batch)
    if not names or not _are_independent(problem, batch):
        return
    if not _compare_singles(replace(answer, own_loss=False), chosen).passed:
        raise _no_derivative(names)


def _custom_functions(problem: Problem, batch: Batch) -> str:
    """Return the names of the custom autograd functions in the graph of the losses."""
    nodes = filter(internals.is_custom, _nodes(problem.losses(batch)))
    return ", ".join(dict.fromkeys(internals.kind(node).removesuffix("Backward") for node in nodes))


def _are_independent(problem: Problem, batch: Batch) -> bool:
    """Whether a check shows that the losses of a batch do not depend on other samples."""
    losses = problem.losses(batch).detach()
    try:
        require_independent(problem, batch, losses)
        return require_unaffected(problem, batch, losses)
    except CoupledSamplesError:
        return False


def _no_derivative(functions: str) -> UnsupportedError:
    return UnsupportedError(
        "the backward pass of a custom autograd function is not the derivative of its forward "
        "pass when samples have unequal weights: no loss depends on other samples, but gradients "
        "do",
        where=f"torch.autograd.Function {functions}",
        remedy="In backward, use every entry of the incoming gradient, with any strides (start "
        "with grad.contiguous()). torch.autograd.gradcheck shows the error.",
    )


class _Hooks(TorchFunctionMode):
    """Detects hooks that a forward pass registers on tensors."""

    registered = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.registered |= func is Tensor.register_hook
        return func(*args, **(kwargs or {}))


def _nodes(losses: Tensor) -> tuple[Node, ...]:
    """Return the nodes of the autograd graph of losses (n,)."""
    return tuple(trace(losses).nodes) if losses.requires_grad else ()


def _worst(checks: Sequence[LargestError]) -> LargestError:
    """Return the check nearest to failing, with the widest dtype and all `small` parameters."""
    if not checks:
        return NOTHING
    worst = max(checks, key=lambda check: check.rank)
    dtype = max((check.dtype for check in checks), key=_digits)
    small = sorted({name for check in checks for name in check.small})
    return replace(worst, dtype=dtype, small=tuple(small))


def _compare_singles(answer: Answer, chosen: Tensor) -> LargestError:
    """Compare samples with batches of one, or with own-loss gradients in their batch."""
    problem, batch, losses = answer.problem, answer.batch, answer.evaluation.losses
    require_once = cache(lambda: require_independent(answer.problem, batch))

    def compare(sample: int) -> LargestError:
        weight = losses.new_ones(1)
        if answer.own_loss:
            right = own_gradient(answer.problem, batch, sample)
            return _compare_single(answer, sample, weight, right)
        one = batch.one(sample)
        loss, right = gradients(problem, one)
        here = losses[sample : sample + 1]
        if problem.any(not same(here, loss, losses, problem.precision)):
            if problem.model_parallel is None:
                require_once()
            _refuse_losses(answer, one, here, loss)
        return _compare_single(answer, sample, weight, right)

    return _worst([compare(k) for k in chosen.tolist()])


def _compare_single(
    answer: Answer,
    sample: int,
    weight: Tensor,
    right: Mapping[str, Tensor],
    small: frozenset[str] = frozenset(),
) -> LargestError:
    """Compare a sample's gradient times its weight (1,) with the reference `right`.

    `small` are parameters whose gradient is known to be only rounding.
    """
    problem, batch = answer.problem, answer.batch
    claim = Claim.of_one(answer.evaluation.gradients.select(slice(sample, sample + 1)), weight)
    if answer.own_loss:
        weights = torch.zeros_like(answer.evaluation.losses)
        weights[sample] = 1
        return compare_claim(problem, claim, Objective.in_one_batch(batch, weights), right)
    one = batch.one(sample)
    twice = Objective.in_one_batch(one.resized(2), weight.expand(2) / 2)
    objective = Objective.in_one_batch(one, weight)
    other = lambda: twice.evaluate(problem)[1]  # noqa: E731
    return compare_claim(problem, claim, objective, right, other, small)


_AGAINST = {"completeness": "the gradient of the total loss", "agreement": "a batch of one"}


def _require_passed(check: LargestError, what: str, backend: str, batch: Batch) -> None:
    if not check.passed:
        raise contradiction(
            backend,
            f"failed the proof of {what}: relative error {check.error:.2e} against "
            f"{_AGAINST[what]} ({check.dtype}, tolerance {check.tolerance:.0e})",
            f"parameter {check.parameter!r}, {batch.description}",
        )


def _digits(dtype: str) -> int:
    """Return the number of bits in a dtype's name."""
    return int("".join(filter(str.isdigit, dtype)) or 0)
