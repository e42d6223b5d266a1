"""Evaluation of a model sharded over processes by fully_shard; all processes take part.

Each process has different samples and keeps their gradients as blocks. Blocks hold activations, and
no gradient of the whole model. Results are sharded as the parameters are. Every process makes the
same passes. If one process needs a check, all processes make it. A process with fewer samples
repeats some samples and drops their results. If one process audits a batch, all processes audit
their batches.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradscope.backends.base import ROWS, Evaluate, Request, backends
from gradscope.blocks import Evaluation, Gradients, unmeasured
from gradscope.core.batch import Batch
from gradscope.core.precision import products
from gradscope.engine.audit import Auditor, AuditPlan, derive_seed
from gradscope.engine.certificate import (
    Answer,
    Certificate,
    finite_samples,
    prove,
    prove_samples,
)
from gradscope.errors import CertificateError, CoupledSamplesError, SpecError, UnsupportedError
from gradscope.model.independence import other_random_numbers
from gradscope.model.problem import Problem
from gradscope.model.ranks import ModelParallel
from gradscope.model.rounding import computed_in
from gradscope.sources.code import load_function
from gradscope.stages.chain import Chain, reducer_of
from gradscope.stages.reducers.accumulator import Accumulator
from gradscope.stages.reducers.base import State, carried_state, joined, parts
from gradscope.stages.transforms.base import TransformScope, transforms

_EACH = 512  # samples of a process per evaluation
_SINGLES = 2  # samples that a first proof compares with a batch of one
_REFUTED = (CertificateError, CoupledSamplesError, UnsupportedError)
_SAMPLES = (TransformScope.ELEMENTWISE, TransformScope.FACTOR)


@dataclass
class ModelParallelEvaluator:
    """Evaluates and proves a sharded model, on all its processes together.

    Attributes:
        certificate: The proof of the first batch (the last proof, if every batch has one), or None.
        uneven_inputs: A process without further samples calls `join`.
    """

    problem: Problem
    verify: str
    auditor: Auditor
    record: Callable[[Batch, Certificate | None], None]  # each batch, and its proof if all has one
    certificate: Certificate | None = None
    uneven_inputs: bool = False

    def __post_init__(self) -> None:
        processes = self.problem.model_parallel
        assert processes is not None
        self.processes: ModelParallel = processes
        self._stack = ExitStack()
        self._evaluate: Evaluate | None = None
        self._proof_due = True  # whether the next batch must be proved
        self._proves_every_batch = False  # whether all batches are proved, after a refusal

    def needs_proof(self) -> bool:
        """Return whether the next batch is proved, on all processes."""
        return self.processes.any(self._proof_due or self._proves_every_batch)

    def close(self) -> None:
        """Release what the backend holds; it can be used again afterwards."""
        self._stack.close()
        self._evaluate, self._proof_due = None, True

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
            RefusedError: There is no exact, proved result on this or another process.
        """
        if self.uneven_inputs:
            self.processes.any(True)
        number = self.auditor.audits.batches if ordinal is None else ordinal
        return self._evaluate_on_all(batch, request, number, last=last)

    def join(self, batch: Batch) -> None:
        """Take part in the remaining evaluations of other processes, with any batch."""
        while self.processes.any(False):
            self._evaluate_on_all(batch, ROWS, None)

    def _evaluate_on_all(
        self, batch: Batch, request: Request, number: int | None, *, last: bool = False
    ) -> Evaluation:
        """Evaluate a batch of this process; without a `number`, only to take part."""
        self.auditor.start()
        processes, n = self.processes, len(batch)
        counts, due = zip(
            *processes.all_gather((n, self._proof_due or self._proves_every_batch)), strict=True
        )
        self._proof_due = any(due)
        whole = batch.resized(max(2, *counts))
        try:
            with (
                processes.raise_on_all(),
                torch.inference_mode(False),
                self.problem.state.restoring(),
            ):
                found = self._run_backend(whole, request)
                with processes.exchange():
                    proof = self._proof(whole, found, n, number, last=last)
        except Exception as error:  # all processes have an error
            if isinstance(error, CertificateError):
                error.remedy = "Evaluate the model in float64, or on one process."
            self._proof_due = True
            self._proves_every_batch |= isinstance(error, _REFUTED)
            raise
        finally:  # an unsharded layer would keep its current values during training
            processes.reshard()
        if number is not None:
            self.record(batch, proof)
        kept = found.gradients.select(slice(0, n))
        return replace(found, losses=found.losses[:n], gradients=Gradients(kept, batch.index))

    def _run_backend(self, batch: Batch, request: Request) -> Evaluation:
        if self._evaluate is None:
            self._evaluate = self._stack.enter_context(backends.get("hooks")(self.problem))
        try:
            return self._evaluate(batch, replace(request, proved=True))
        except UnsupportedError as error:
            error.remedy = "Use one process: only hooks supports sharded models."
            raise

    def _proof(
        self, batch: Batch, found: Evaluation, n: int, number: int | None, *, last: bool
    ) -> Certificate | None:
        """Prove an evaluation if a proof is due, or audit it if any process audits.

        The first n samples of the batch are the process's own, and further samples repeat them.
        Returns the proof if the whole batch was proved.
        """
        proof, plan = None, AuditPlan()
        answer = Answer(self.problem, "hooks", batch, found, singles=1)
        with unmeasured(), other_random_numbers():
            if self.verify != "never" and (self._proof_due or self.verify == "always"):
                self._find_precision(batch)
                seed = derive_seed(self.auditor.seed, 0)
                proof = prove(replace(answer, seed=seed, singles=_SINGLES))
                lost = n - int(finite_samples(found)[:n].sum())
                proof = replace(proof, samples=n, nonfinite=lost)
                self.certificate, self._proof_due = proof, not proof.proves
            if number is not None:
                new = found.new
                plan = self.auditor.begin(len(batch), number, last=last, new=new, proof=proof)
            new = self.verify == "first" and proof is None and found.new
            whole = self.processes.any(plan.whole_batch or new)
            alone = not whole and self.processes.any(plan.singles > 0)
            answer = replace(answer, seed=derive_seed(self.auditor.seed, number or 0))
            if whole:
                proof = prove(answer, after=self.certificate)
            elif alone:
                prove_samples(answer)
            if number is not None:
                plan = replace(plan, whole_batch=whole, singles=int(alone))
                self.auditor.end(plan, proof)
        return proof

    def _find_precision(self, batch: Batch) -> None:
        """Find the narrowest dtype that the model or the device rounds to, on any process."""
        with self.processes.raise_on_all():
            own = computed_in(self.problem, batch)
        own = products(self.problem.device) if own == torch.float32 else own
        every = self.processes.all_gather(own)
        self.processes.rounds_to = max(every, key=lambda dtype: torch.finfo(dtype).eps)

    def evaluations(self, batch: Batch) -> Iterator[tuple[Batch, Evaluation, bool]]:
        """Yield (part of the batch, its evaluation, whether the part counts).

        Parts that do not count are repeated, because other processes have more samples.
        """
        cut = [batch.select(slice(k, k + _EACH)) for k in range(0, len(batch), _EACH)]
        count = max(self.processes.all_gather(len(cut)))
        for k in range(count):
            part = cut[min(k, len(cut) - 1)]
            found = self.evaluate(part, Request(rows=False), last=k + 1 == count > 1)
            yield part, found, k < len(cut)

    def rows(self, batch: Batch) -> dict[str, Tensor]:
        """Return {name: (N, *shape)} of all processes' samples, sharded as the parameters are."""
        counts = self.processes.all_gather(len(batch))
        gradients, found = self.evaluate(batch).gradients, {}
        with torch.no_grad():
            for name, block in gradients.items():
                own = self._cast_as_sharded(name, block.dense())
                part = self.processes.shard_rows(name, own, counts)
                found[name] = self.processes.to_dtensor(name, part, sum(counts))
        return found

    def _cast_as_sharded(self, name: str, values: Tensor) -> Tensor:
        """Cast to the dtype of the sharded parameter, which the optimiser updates."""
        p = self.processes.sharded.get(name)
        return values if p is None else values.to(p.dtype)

    def expectations(
        self, chains: Sequence[Chain], whole: Batch, nonfinite: str
    ) -> tuple[list[dict[str, Tensor]], int]:
        """Return each chain's result over all processes' samples, sharded as the parameters are.

        Also returns the number of this process's samples without a finite gradient.
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

        The state of one parameter is exchanged before the next parameter is reduced.

        Args:
            chain: A chain with a reducer.
            gradients: This process's gradients, of at least one sample.
            count: The number of samples that count; 0 if only other processes have samples.
        """
        reducer = reducer_of(chain)
        counts = self.processes.all_gather(count)
        with self.processes.raise_on_all():
            rows = chain.rows(gradients)
        states: list[State] = [{} for _ in counts]
        for name, block in rows.items():
            with self.processes.raise_on_all():
                one = rows.of({name: block}).with_powers(reducer.powers)
                made = parts(carried_state(reducer.start(one)))[name]
            for kind, value in made.items():
                if value.shape != block.shape:
                    raise SpecError(
                        f"the result of {chain.text!r} has the shape {tuple(value.shape)} for a "
                        f"parameter of shape {tuple(block.shape)}, so it cannot be sharded as the "
                        "parameter is",
                        where="chain",
                        remedy="Use mean, sum, second_moment, moment, var or std, or one process.",
                    )
                every = self.processes.shard_rows(name, value[None], [1] * len(counts))
                for own, of_rank in zip(states, every, strict=True):
                    own |= joined(own.get("n", of_rank.new_zeros(())), {name: {kind: of_rank}})
        for n, own in zip(counts, states, strict=True):
            own["n"] = torch.tensor(float(n), dtype=torch.float64, device=own["n"].device)
        return [own for own in states if int(own["n"])]

    def _result(self, chain: Chain, total: Accumulator[int], k: int) -> dict[str, Tensor]:
        if k not in total.states:
            raise SpecError("no sample has a finite gradient, so the expectation is not defined")
        found = {}
        for key, value in chain.finish(total.result(k)).items():
            name = key if key in self.problem.parameters else key.rpartition(".")[0]
            found[key] = self.processes.to_dtensor(name, self._cast_as_sharded(name, value))
        return found


def require_for_model_parallel(chain: Chain) -> None:
    """Raise if a chain needs whole gradients, which no process has."""
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
                f"{stage.name!r} needs whole gradients, but each process has only parts of them",
                "Before the reducer, use transforms that are elementwise or multiply by one factor "
                "per sample; after it, use elementwise transforms. Or use one process.",
            )
