"""A model that fully_shard has divided over processes, evaluated by all of them in step.

Each process has its own samples, whose gradients it keeps as blocks: activations, and no gradient
of a whole model. What is handed out of a parameter is divided as the parameter is. Every process
makes the same passes, whatever its samples: where one has to look into something, all do; who has
fewer samples repeats some, and drops what comes of them.

The proof compares every parameter's gradient with ordinary autograd's as that passes by, in batches
that are put together in another way. A later batch is audited by all as soon as one of them is to.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from gradscope.backends.base import ROWS, Evaluate, Request, backends
from gradscope.blocks import Evaluation, Gradients, unmeasured
from gradscope.core.batch import Batch
from gradscope.core.precision import products
from gradscope.engine.audit import Auditor, Look, drawn
from gradscope.engine.certificate import Certificate, finite_samples
from gradscope.engine.judge import (
    TRIALS,
    Claim,
    Errors,
    LargestError,
    norm,
    require_consistent,
    sketch,
)
from gradscope.errors import CertificateError, CoupledSamplesError, SpecError, UnsupportedError
from gradscope.model.independence import other_random_numbers
from gradscope.model.problem import Problem, summed
from gradscope.model.ranks import Sharding
from gradscope.model.rounding import UNITS, computed_in, same
from gradscope.process.stops import within
from gradscope.sources.code import load_function
from gradscope.stages.chain import Chain, reducer_of
from gradscope.stages.reducers.accumulator import Accumulator
from gradscope.stages.reducers.base import State, carried_state, joined, parts
from gradscope.stages.transforms.base import TransformScope, transforms

_EACH = 512  # samples of a process at a time
_FIRST, _AUDIT, _GLIMPSE = "first", "audit", "glimpse"  # proofs
_REFUTED = (CertificateError, CoupledSamplesError, UnsupportedError)
_SAMPLES = (TransformScope.ELEMENTWISE, TransformScope.FACTOR)


@dataclass
class Lockstep:
    """The backend of a divided model, and its proof.

    Attributes:
        certificate: The proof of the first batch (the last proof, if every batch has one), or None.
        attended: Whoever is through with its samples attends to those of others (`attend`).
    """

    problem: Problem
    verify: str
    auditor: Auditor
    told: Callable[[Batch, Certificate | None], None]  # of each batch, and its proof if all has one
    certificate: Certificate | None = None
    attended: bool = False

    def __post_init__(self) -> None:
        sharding = self.problem.sharding
        assert sharding is not None
        self.sharding: Sharding = sharding
        self._stack = ExitStack()
        self._evaluate: Evaluate | None = None
        self._due = True  # a proof is
        self._wary = False  # this process has refused a batch: every other is proved
        self.narrow = self.problem.precision  # the least precise that the first batch computes in

    def needs_proof(self) -> bool:
        """Return whether the next batch is proved, on all processes."""
        return self.sharding.any(self._due or self._wary)

    def close(self) -> None:
        """Let go of what the backend holds; it can be used again afterwards."""
        self._stack.close()
        self._evaluate, self._due = None, True

    def evaluate(
        self,
        batch: Batch,
        request: Request = ROWS,
        *,
        ordinal: int | None = None,
        last: bool = False,
    ) -> Evaluation:
        """Return the losses (n,) and the gradients of this process's samples, as blocks.

        Every process calls this at the same time, each with at least one sample; see
        `Session.evaluate`.

        Raises:
            RefusedError: There is no exact, proved answer, on this process or on another.
        """
        if self.attended:
            self.sharding.any(True)
        number = self.auditor.audits.batches if ordinal is None else ordinal
        return self._together(batch, request, number, last=last)

    def attend(self, batch: Batch) -> None:
        """Take part, with any samples of one's own, in what others have still to evaluate."""
        while self.sharding.any(False):
            self._together(batch, ROWS, None)

    def _together(
        self, batch: Batch, request: Request, number: int | None, *, last: bool = False
    ) -> Evaluation:
        """Evaluate a batch, the process's own one of this number or one for others' sake (None)."""
        sharding, n = self.sharding, len(batch)
        counts, due = zip(*sharding.of_all((n, self._due or self._wary)), strict=True)
        self._due = any(due)
        whole = batch.resized(max(2, *counts))
        try:
            with sharding.together(), torch.inference_mode(False), self.problem.state.kept():
                found = self._answered(whole, request)
                with sharding.exchange():
                    proof = self._looked_into(whole, found, n, number, last=last)
        except Exception as error:  # all processes have one
            self._due = True
            self._wary |= isinstance(error, _REFUTED)
            raise
        finally:  # a layer that stays whole would be used as it is now, whatever is trained
            sharding.reshard()
        if number is not None:
            self.told(batch, proof)
        kept = found.gradients.select(slice(0, n))
        return replace(found, losses=found.losses[:n], gradients=Gradients(kept, batch.index))

    def _answered(self, batch: Batch, request: Request) -> Evaluation:
        if self._evaluate is None:
            self._evaluate = self._stack.enter_context(backends.get("hooks")(self.problem))
        try:
            return self._evaluate(batch, replace(request, proved=True))
        except UnsupportedError as error:
            error.remedy = "Of a divided model only hooks is to be had: use one process."
            raise

    def _looked_into(
        self, batch: Batch, found: Evaluation, n: int, number: int | None, *, last: bool
    ) -> Certificate | None:
        """Prove an answer if that is due, or audit it where any process is to.

        Of the batch, the first n samples are the process's own, the others are repeated.
        Returns the proof, if all of the batch was proved.
        """
        proof, look = None, Look()
        if self.verify != "never" and (self._due or self.verify == "always"):
            lost = n - int(finite_samples(found)[:n].sum())
            proof = replace(self._proved(batch, found, 0, _FIRST), samples=n, nonfinite=lost)
            self.certificate, self._due = proof, not proof.proves
        if number is not None:
            look = self.auditor.begin(len(batch), number, last=last, new=found.new, proof=proof)
        audits = self.verify == "audit" and proof is None
        new = self.verify == "first" and proof is None and found.new
        whole = self.sharding.any((audits and look.whole) or new)
        alone = not whole and self.sharding.any(audits and look.alone > 0)
        if whole or alone:
            audit = self._proved(batch, found, number or 0, _AUDIT if whole else _GLIMPSE)
            proof = audit if whole else None
        if number is not None:
            look = replace(look, whole=whole, alone=int(alone))
            self.auditor.end(look, proof, audited=whole or alone)
        return proof

    def evaluations(self, batch: Batch) -> Iterator[tuple[Batch, Evaluation, bool]]:
        """Yield a batch in parts, with their evaluations, and whether they are this process's turn.

        It is not where other processes have more samples than this one.
        """
        cut = [batch.select(slice(k, k + _EACH)) for k in range(0, len(batch), _EACH)]
        count = max(self.sharding.of_all(len(cut)))
        for k in range(count):
            part = cut[min(k, len(cut) - 1)]
            found = self.evaluate(part, Request(rows=False), last=k + 1 == count > 1)
            yield part, found, k < len(cut)

    def rows(self, batch: Batch) -> dict[str, Tensor]:
        """Return {name: (N, *shape)} of all processes' samples, divided as the parameters are."""
        counts = self.sharding.of_all(len(batch))
        gradients, found = self.evaluate(batch).gradients, {}
        with torch.no_grad():
            for name, block in gradients.items():
                own = self._as_optimised(name, block.dense())
                part = self.sharding.spread(name, own, counts)
                found[name] = self.sharding.wrapped(name, part, sum(counts))
        return found

    def _as_optimised(self, name: str, values: Tensor) -> Tensor:
        """Cast to the dtype of the parameter as the optimiser knows it."""
        p = self.sharding.sharded.get(name)
        return values if p is None else values.to(p.dtype)

    def expectations(
        self, chains: Sequence[Chain], whole: Batch, nonfinite: str
    ) -> tuple[list[dict[str, Tensor]], int]:
        """Return each chain's result over all processes' samples, divided as the parameters are.

        And how many samples of this process were left out, which have no finite gradient.
        """
        total = Accumulator({k: reducer_of(chain) for k, chain in enumerate(chains)})
        skipped = 0
        with torch.no_grad():
            for part, evaluation, own in self.evaluations(whole):
                chosen = torch.ones(len(part), dtype=torch.bool)
                if nonfinite != "keep":
                    chosen = finite_samples(evaluation).cpu()
                skipped += int((~chosen).sum()) if own else 0
                usable = chosen if bool(chosen.any()) else ~chosen
                gradients = evaluation.gradients.select(usable)
                count = int(chosen.sum()) if own else 0
                for k, chain in enumerate(chains):
                    for state in self._states(chain, gradients, count):
                        total.add({k: state})
            return [self._result(chain, total, k) for k, chain in enumerate(chains)], skipped

    def _states(self, chain: Chain, gradients: Gradients, count: int) -> list[State]:
        """Return the states of all processes' samples, each sharded as the parameters are.

        What a reducer makes of a parameter is exchanged before the next one's turn comes.

        Args:
            chain: With a reducer.
            gradients: Of this process, at least one sample's.
            count: How many of them are its own; if none, it takes part for the others' sake.
        """
        reducer = reducer_of(chain)
        counts = self.sharding.of_all(count)
        with self.sharding.together():
            rows = chain.rows(gradients)
        states: list[State] = [{} for _ in counts]
        for name, block in rows.items():
            with self.sharding.together():
                one = rows.of({name: block}).asked(reducer.powers)
                made = parts(carried_state(reducer.start(one)))[name]
            for kind, value in made.items():
                if value.shape != block.shape:
                    raise SpecError(
                        f"{chain.text!r} makes {tuple(value.shape)} of a parameter "
                        f"{tuple(block.shape)}, which cannot be divided as the parameter is",
                        where="chain",
                        remedy="Use mean, sum, second_moment, moment, var or std, or one process.",
                    )
                every = self.sharding.spread(name, value[None], [1] * len(counts))
                for own, of_rank in zip(states, every, strict=True):
                    own |= joined(own.get("n", of_rank.new_zeros(())), {name: {kind: of_rank}})
        for n, own in zip(counts, states, strict=True):
            own["n"] = torch.tensor(float(n), dtype=torch.float64, device=own["n"].device)
        return [own for own in states if int(own["n"])]

    def _result(self, chain: Chain, total: Accumulator[int], k: int) -> dict[str, Tensor]:
        if k not in total.states:
            raise SpecError("no sample has a finite gradient, so there is no expectation")
        found = {}
        for key, value in chain.finish(total.result(k)).items():
            name = key if key in self.problem.parameters else key.rpartition(".")[0]
            found[key] = self.sharding.wrapped(name, self._as_optimised(name, value))
        return found

    def _proved(self, batch: Batch, found: Evaluation, number: int, kind: str) -> Certificate:
        """Prove an answer, or raise; every process makes the same passes in any case.

        Args:
            batch: At least two samples, as many on every process.
            found: What was said of them.
            number: Of the batch; what is drawn at random depends on it.
            kind: `_FIRST`, of two samples alone, too, and their shortcuts; `_AUDIT`; or `_GLIMPSE`,
                of one sample alone.
        """
        begun = time.perf_counter()
        found = replace(found, gradients=found.gradients.of(found.gradients))
        n, draw = len(batch), torch.Generator().manual_seed(drawn(self.auditor.seed, number))
        order = torch.randperm(n, generator=draw)
        single = {_FIRST: 2, _AUDIT: 0, _GLIMPSE: 1}[kind]
        groups = [order[k : k + 1] for k in range(single)]
        groups += [] if kind == _GLIMPSE else [order[: n // 2], order[n // 2 :]]
        wrong: list[Exception] = []
        checks = []
        finite = finite_samples(found).cpu()
        with unmeasured(), other_random_numbers():
            if kind == _FIRST:
                with self.sharding.together():
                    self.narrow = computed_in(self.problem, batch)
            for rows in groups:
                weights = (torch.randint(0, 2, (len(rows),), generator=draw) * 2 - 1) * (
                    0.5 + torch.rand(len(rows), generator=draw, dtype=torch.float64)
                )
                usable = rows[finite[rows]]
                own = usable if len(usable) else rows
                losses, check = self._compared(
                    batch, found, own, weights[: len(own)], usable=bool(len(usable))
                )
                if not same(found.losses[own], losses, found.losses, self._digits):
                    wrong.append(_coupled(batch, own))
                checks += [check] if len(usable) else []
            if kind == _FIRST or self.sharding.any(bool(wrong)):
                again = self._losses(batch).detach()
                if not same(again, found.losses, precision=self._digits):
                    wrong.insert(0, _random(batch))
            if kind == _FIRST:
                few = order[:2][finite[order[:2]]]
                with within(math.inf, time.perf_counter):  # only together they are out of time
                    require_consistent("hooks", found.gradients, few)
        failed = [check for check in checks if not check.passed]
        if wrong or failed:
            raise wrong[0] if wrong else _failed(failed[0], batch)
        return self._certificate(batch, found, checks, order[:single], begun)

    @property
    def _digits(self) -> torch.dtype:
        """What numbers are right to: the least precise of the model's and the device's."""
        place = products(self.problem.device) if self.narrow == torch.float32 else self.narrow
        return max(self.narrow, place, key=lambda d: torch.finfo(d).eps)

    def _losses(self, batch: Batch) -> Tensor:
        """Return the losses (n,): a process whose forward pass fails lets no other go on."""
        with self.sharding.together():
            return self.problem.losses(batch)

    def _compared(
        self, batch: Batch, found: Evaluation, rows: Tensor, weights: Tensor, *, usable: bool
    ) -> tuple[Tensor, LargestError]:
        """Return the losses of some samples (m,), and how far Σ wᵢ gᵢ is from autograd's.

        Of samples that are not `usable`, nothing can be said.
        """
        some, samples = found.gradients.select(rows), batch.select(rows)
        w = weights.to(next(iter(some.squared_norms.values())))
        claim, gaps = Claim.of(some, w), dict[str, float]()
        sizes = {**claim.sizes}

        def seen(name: str, gradient: Tensor) -> None:
            size, gap = norm(gradient), norm(claim.value(name) - gradient)
            sizes[name], gaps[name] = max(sizes[name], size), gap

        losses = self._passed(samples, w, seen)
        errors = Errors(sizes, gaps, self._digits)
        check = errors.largest()
        if self._digits != torch.float64 and self.sharding.any(usable and not check.passed):
            for spread in self._spreads(samples, w, errors.doubtful if usable else ()):
                check = errors.largest(spread)
                if not self.sharding.any(usable and not check.passed):
                    break
        return losses, check

    def _passed(
        self, samples: Batch, weights: Tensor, seen: Callable[[str, Tensor], None]
    ) -> Tensor:
        """Return the losses (n,); autograd's gradients of Σ wᵢ Lᵢ are `seen` as they pass by."""

        def passes(name: str, gradient: Tensor) -> Tensor:
            seen(name, gradient)
            return gradient.new_zeros(()).expand_as(gradient)  # it is let go of

        named = self.problem.parameters
        losses = self._losses(samples)
        handles = [p.register_hook(partial(passes, k)) for k, p in named.items()]  # type: ignore[no-untyped-call]
        try:
            total = summed(losses, weights.to(losses))
            torch.autograd.grad(total, [*named.values()], allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        return losses.detach()

    def _spreads(
        self, samples: Batch, weights: Tensor, names: Sequence[str]
    ) -> Iterator[dict[str, float]]:
        """Yield how far gradients move at most with other last digits of parameters, by each trial.

        Near a kink, as that of ReLU, rounding decides on which side a number is: by more digits
        than these where sums are long, so that later trials change more of them. There is no room
        for two gradients of a whole model: of each, `sketch` is kept.
        """
        spread = dict.fromkeys(names, 0.0)

        def sketches() -> dict[str, Tensor]:
            kept: dict[str, Tensor] = {}

            def seen(name: str, gradient: Tensor) -> None:
                if name in spread:
                    kept[name] = sketch(gradient)

            self._passed(samples, weights, seen)
            return kept

        first, units = sketches(), UNITS * torch.finfo(self._digits).eps
        for trial in range(TRIALS):
            with self.sharding.perturbing(trial, 2 ** (trial // 2) * units):
                other = sketches()
            for name in first.keys() & other.keys():
                moved = norm(other[name] - first[name])
                spread[name] = max(spread[name], moved)
            yield spread

    def _certificate(
        self,
        batch: Batch,
        found: Evaluation,
        checks: Sequence[LargestError],
        alone: Tensor,
        begun: float,
    ) -> Certificate:
        squared = found.gradients.squared_norms
        unused = tuple(name for name, value in squared.items() if not bool(value.any()))
        worst = max(checks, key=lambda check: check.rank, default=LargestError(0.0, "", 0.0))
        proves = self.sharding.any(len(unused) < len(squared) and bool(checks))
        seconds = time.perf_counter() - begun
        return Certificate(
            backend="hooks",
            dtype=worst.dtype,
            samples=len(batch),
            positions=(int(batch.index.min()), int(batch.index.max())),
            nonfinite=len(batch) - int(finite_samples(found).sum()),
            completeness=worst,
            agreement=max(checks[: len(alone)], key=lambda check: check.rank, default=worst),
            compared=tuple(sorted({*batch.index[alone].tolist()})),
            unused=unused,
            unproved=tuple(sorted({name for check in checks for name in check.small})),
            proves=proves,
            seconds=seconds,
            phases={"proof": seconds},
        )


def require_divisible(chain: Chain) -> None:
    """Refuse a chain that needs whole gradients, which no process has."""
    reducer = chain.reducer
    assert reducer is not None
    at = len(chain.before)
    for k, stage in enumerate(chain.stages):
        if k == at:
            refused = reducer.raw or reducer.earlier is not None or ".py:" in stage.name
        else:
            made = transforms.get(stage.name) if stage.name in transforms else None
            scope = getattr(made or load_function(stage.name, "stage"), "scope", None)
            elementwise = scope is TransformScope.ELEMENTWISE
            refused = not (scope in _SAMPLES if k < at else elementwise)
        if refused:
            raise stage.error(
                f"{stage.name!r} needs whole gradients, and each process has a part of every one",
                "Before the reducer use transforms that are elementwise or one factor a sample, "
                "after it elementwise ones; or one process.",
            )


def _random(batch: Batch) -> Exception:
    return UnsupportedError(
        "the forward pass is random, or is another one the second time",
        where=batch.told,
        remedy="Use mode eval, or set the dropout probabilities to zero.",
    )


def _coupled(batch: Batch, rows: Tensor) -> Exception:
    return CoupledSamplesError(
        "the losses are others in other company: they depend on other samples",
        where=batch.select(rows).told,
        remedy="Mode eval puts normalisation layers on their running statistics; GroupNorm and "
        "LayerNorm never couple.",
    )


def _failed(check: LargestError, batch: Batch) -> Exception:
    return CertificateError(
        f"the hooks backend failed the proof: relative error {check.error:.2e} against autograd's "
        f"gradient ({check.dtype}, tolerance {check.tolerance:.0e})",
        where=f"parameter {check.parameter!r}, {batch.told}",
        remedy="Evaluate the model in float64, or on one process.",
    )
