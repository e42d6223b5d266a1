"""A session: model, loss and settings, bound once; batches in, proved evaluations out."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeVar, get_args

import torch
from torch import Tensor, nn

from gradscope.backends.base import (
    AUTO,
    ROWS,
    Evaluate,
    Request,
    backend_of,
    candidates,
    no_samples,
    refusing,
)
from gradscope.backends.compiled import Compiled, not_compiled
from gradscope.blocks import Evaluation, Gradients, Tuner
from gradscope.core.batch import Batch, Tokens, is_empty, require_positions, tensors
from gradscope.core.precision import double
from gradscope.core.registry import suggestion
from gradscope.engine.audit import Auditor, AuditPlan, derive_seed
from gradscope.engine.certificate import Answer, Certificate, certify, prove, prove_samples
from gradscope.engine.loss_inputs import WATCHED, watching_loss_inputs
from gradscope.engine.model_parallel import ModelParallelEvaluator
from gradscope.engine.zeros import zero_notes
from gradscope.errors import (
    CertificateError,
    CoupledSamplesError,
    ModelError,
    RefusedError,
    SpecError,
)
from gradscope.model.kernels import MISTAKEN
from gradscope.model.locate import device_error
from gradscope.model.problem import Problem, RowKind, require_module
from gradscope.model.randomness import FixedRandomness, probe
from gradscope.model.releases import require, untested
from gradscope.model.rounding import computed_in, same
from gradscope.model.sample_axis import locating_lost_axis
from gradscope.model.state import compiled_part, facts
from gradscope.stages.labels import Labels, Mode
from gradscope.stages.losses import of_tokens, resolve
from gradscope.stages.positions import by_position
from gradscope.stages.predictions import Columns, Predictions

T = TypeVar("T")

Verify = Literal["audit", "first", "always", "never"]
Coupling = Literal["refuse", "own-loss", "frozen"]
NonFinite = Literal["skip", "fail", "keep"]
Randomness = Literal["refuse", "fixed"]


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    """What a session is asked to do; each field is described at `gradscope.Scope`.

    Raises:
        SpecError: A word is unknown.
    """

    parameters: str | list[str] | None = None
    backend: str = AUTO
    verify: Verify = "audit"
    coupling: Coupling = "refuse"
    nonfinite: NonFinite = "skip"
    labels: Mode = "data"
    seed: int = 0
    compile: bool = False
    predictions: bool = False
    randomness: Randomness = "refuse"
    rows: RowKind = "sample"

    def __post_init__(self) -> None:
        words = (self.verify, Verify), (self.coupling, Coupling), (self.randomness, Randomness)
        more = (self.nonfinite, NonFinite), (self.labels, Mode), (self.rows, RowKind)
        for word, kind in (*words, *more):
            known = list(get_args(kind))
            if word not in known:
                raise SpecError(f"unknown word {word!r}", remedy=suggestion(str(word), known))
        if self.rows == "token" and (self.labels != "data" or self.coupling == "own-loss"):
            other = "coupling own-loss" if self.labels == "data" else f"labels {self.labels}"
            raise SpecError(
                f"rows of tokens do not go with {other}: that is of whole samples",
                where="rows token",
                remedy="Use labels data and coupling refuse or frozen; or rows sample.",
            )

    def require_for_model_parallel(self) -> None:
        """Refuse settings that do not support a sharded model."""
        only = {
            "backend": (self.backend, (AUTO, "hooks")),
            "coupling": (self.coupling, ("refuse", "frozen")),
            "labels": (self.labels, ("data",)),
            "compile": (self.compile, (False,)),
            "randomness": (self.randomness, ("refuse",)),
            "rows": (self.rows, ("sample",)),
        }
        for name, (word, accepted) in only.items():
            if word not in accepted:
                raise SpecError(
                    f"{name} {word!r} does not support models sharded by fully_shard",
                    remedy=f"Accepted: {', '.join(map(str, accepted))}; or use one process.",
                )

    @property
    def own_loss(self) -> bool:
        """Whether coupled samples get the gradients of their own losses."""
        return self.coupling == "own-loss"


class Session:
    """Owns the backend in use, the proof of its answers, compiled programs, and what was chosen.

    Args:
        model: Any module, in the mode it is in.
        loss: A name, `(outputs, targets) -> (n,)`, or a `model_loss`.
        settings: What is asked.

    Attributes:
        settings: What was asked.
        problem: The model as it was when it was bound last.
        labels: What the losses are held against.
        backend: The name of the backend in use; `auto` until the first batch has been seen.
        certificate: The proof of the first batch (the last proof, if every batch has one), or None.
        auditor: Says what was audited, `auditor.audits`.
        notes: What was chosen and why.
        warnings: The notes about a loss that gets the wrong kind of numbers.
        warn: Is called with each of them.
        zeros: Those of the notes about gradients that are all zero.
        tried: Chains whose reducers were tried before they are used.
        tuner: Chooses kernel variants, and remembers them.
        model_parallel: Evaluates a sharded model; None if the model is whole in this process.
        predictions: What the model predicts of the samples of the last batch, if it is asked for.

    Raises:
        SpecError: A name is unknown, or no parameter is selected.
    """

    def __init__(
        self, model: nn.Module, loss: str | Callable[..., Tensor], settings: SessionSettings
    ) -> None:
        require_module(model)
        self.settings, self.backend = settings, settings.backend
        self.certificate: Certificate | None = None
        self.notes: list[str] = [*filter(None, [untested()])]
        self.auditor = Auditor(settings.seed, settings.verify)
        self.warnings: list[str] = []
        self.warn: Callable[[str], None] = lambda text: None
        self.zeros: list[str] = []
        self.checked_chains: set[str] = set()
        self.rehearses = False  # its answers tell time and memory, and are forgotten
        self.tuner = Tuner.remembering()
        self.predictions = Predictions() if settings.predictions else None
        self._model, self._loss = model, resolve(loss)
        self._randomness = None
        if settings.randomness == "fixed":
            require("randomness fixed", probe)
            self._randomness = FixedRandomness(settings.seed)
        if settings.rows == "token":
            self._loss = of_tokens(self._loss)
        self.factored_tokens = False  # the last answer about tokens had none in its dense form
        self._positions: dict[Any, int] = {}  # t by shapes, where all positions count
        self._stack = ExitStack()
        self._compiled: Compiled | None = None
        self._evaluate: Evaluate | None = None
        self._fallbacks: list[str] = []
        self._proof_due = True  # a proof is
        self._had_gradients = False  # some gradient was not zero
        self._proves_every_batch = False  # one batch was refused: every other is proved
        self._batches_since_proof = 0  # batches since the last one that was proved
        self._unaudited_batch: Batch | None = None  # the last one, unless it was proved
        self._facts: list[Any] | None = None
        self._bind()

    def _bind(self) -> None:
        """Bind the model as it is now; the next batch is proved."""
        asked = self.settings
        self.model_parallel: ModelParallelEvaluator | None = None
        self._stack.close()
        problem = Problem.of(self._model, self._loss, asked.parameters).with_fixed_randomness(
            self._randomness
        )
        if double(problem.device) != torch.float64:
            self.notes.append(
                f"the device {problem.device} has no float64: sums are taken in float32, and what "
                "a proof needs float64 for on the CPU"
            )
        self.problem = replace(
            problem,
            running_statistics=asked.coupling == "frozen",
            observer=None if self.predictions is None else self.predictions.watch,
            rows=asked.rows,
        )
        self.labels = Labels(asked.labels, self.problem, asked.seed, own_loss=asked.own_loss)
        if asked.labels == "exact":
            self.problem = replace(self.problem, loss=by_position(self.problem.loss))
        self._compiled = None
        settled = (asked.backend, asked.verify, asked.coupling, asked.randomness, asked.rows)
        against = not_compiled(*settled)
        if asked.compile and against is not None:
            self.notes.append(f"not compiled: {against}")
        elif asked.compile:
            faster, check = asked.backend == AUTO, asked.verify != "never"
            own = (self.problem, self._evaluate_uncompiled, self.notes)
            self._compiled = Compiled(*own, faster=faster, check=check)
        part = compiled_part(self._model)
        if part is not None:
            self.notes.append(
                f"{part} runs as it is written, which may take longer: compiled, it records one "
                "operation, in which samples cannot be told apart"
            )
        self._had_gradients, self._proves_every_batch, self._batches_since_proof = False, False, 0
        self._facts = None if self.problem.model_parallel else facts(self._model)
        self.close()
        if self.problem.model_parallel is not None:
            asked.require_for_model_parallel()
            self.backend = "hooks"
            self.model_parallel = ModelParallelEvaluator(
                self.problem, asked.verify, self.auditor, self._record
            )

    def rehearsal(self, verify: Verify | None) -> "Session":
        """Return a session of the same kind that leaves this one as it is; it compiles nothing."""
        verify = verify or self.settings.verify
        settings = replace(self.settings, compile=False, verify=verify)
        made = Session(self._model, self._loss, settings)
        made.rehearses = True
        return made

    @property
    def last_is_proved(self) -> bool:
        """Whether the last answer was proved whole."""
        return self._batches_since_proof == 0

    def needs_proof(self) -> bool:
        """Return whether the next batch is proved, as the first is, and what follows a change."""
        self.rebind_if_changed()
        due = self._proof_due if self.model_parallel is None else self.model_parallel.needs_proof()
        return due and self.settings.verify != "never"

    @property
    def has_fallback(self) -> bool:
        """Whether another backend waits for its turn, now that the last one was found wrong."""
        return 0 < len(self._fallbacks) < len(self._candidates())

    @property
    def compiles(self) -> bool:
        """Whether some batches are answered by a compiled program."""
        return self._compiled is not None and self._compiled.in_use

    def rows_of(self, batch: Batch) -> Batch:
        """Return samples as the rows that are asked for: themselves, or their tokens that count.

        That takes a forward pass, unless the loss lets every position count, or there is no sample.
        """
        if self.settings.rows == "sample" or isinstance(batch, Tokens) or is_empty(batch):
            return batch
        shapes = tuple((t.shape[1:], t.dtype) for t in tensors((batch.inputs, batch.targets)))
        t = self._positions.get(shapes)
        if t is not None:
            return Tokens.among(batch, torch.ones(len(batch), t, dtype=torch.bool))
        with torch.inference_mode(False):
            counted, said = self.problem.position_mask(batch.detached())
        if not said:
            self._positions[shapes] = counted.shape[1]
        return Tokens.among(batch, counted)

    def evaluate(
        self,
        batch: Batch,
        request: Request = ROWS,
        *,
        ordinal: int | None = None,
        last: bool = False,
    ) -> Evaluation:
        """Return the losses (n,) and the gradients of a batch as blocks, one a sample and label.

        Args:
            batch: The samples.
            request: What the gradients will be asked for.
            ordinal: The number of the batch in its run, from 0; counted when not given.
            last: Whether it is known to be the last: it is then audited.

        Raises:
            RefusedError: No candidate backend has an exact, proved answer.
        """
        with locating_lost_axis(self.problem, batch):
            batch = self.rows_of(batch)
        now = self.rebind_if_changed()
        if is_empty(batch) and self.model_parallel is None:
            return no_samples(self.problem)  # which proves nothing
        require_positions(len(batch))
        if self.model_parallel is not None:
            return self.model_parallel.evaluate(
                batch.detached(), request, ordinal=ordinal, last=last
            )
        batch = self.labels.of(batch).detached()
        self._note(self.labels.note)
        if self.predictions is not None:
            self.predictions.forget()
        number = self.auditor.audits.batches if ordinal is None else ordinal
        try:
            located = locating_lost_axis(self.problem, batch)
            with torch.inference_mode(False), located, self.problem.state.restoring():
                evaluation, proof = self._evaluate_batch(batch, request, number, last=last)
        except RefusedError:
            self._proof_due = self._proves_every_batch = True
            raise
        except BaseException as error:
            self._proof_due = True  # until a proof has passed, nothing more is answered
            gone = device_error(error, batch.description)
            if gone is None:
                raise
            raise gone from error
        self._facts = now
        self._note(evaluation.note)
        if self.problem.state.untrained:
            self._note(
                "a part is checkpointed (use_reentrant=True) whose inputs require no gradient: "
                "training gives its parameters none, these are what use_reentrant=False gives"
            )
        if self.problem.state.mistaken:
            self._note(MISTAKEN)
        blocks = evaluation.gradients.values()
        self.factored_tokens = isinstance(batch, Tokens) and any(
            b.dense_if_formed is None for b in blocks
        )
        self._record(batch, proof)
        if request.stored and not request.factors:
            evaluation = replace(evaluation, gradients=evaluation.gradients.densify(always=True))
        return evaluation

    def _evaluate_batch(
        self, batch: Batch, request: Request, number: int, *, last: bool
    ) -> tuple[Evaluation, Certificate | None]:
        """Return an answer, audited if it is to be, and its proof if all of it was proved."""
        before, drew = self.certificate, self.problem.state.drew
        answer: Evaluate = self._evaluate_uncompiled if self._compiled is None else self._compiled
        if self._randomness is not None:
            self._randomness.new = False
        evaluation = answer(batch, request)
        proof = None if self.certificate is before else self.certificate
        new = evaluation.new or self.problem.state.drew > drew
        new = new or (self._randomness is not None and self._randomness.new)
        plan = self.auditor.begin(len(batch), number, last=last, new=new, proof=proof)
        if plan.whole_batch or plan.singles:
            evaluation, proof = self._audit(batch, request, number, plan, evaluation)
        self.auditor.end(plan, proof)
        return evaluation, proof

    def rebind_if_changed(self) -> list[Any]:
        """Bind the model again if it was changed; return what a proof takes for granted of it."""
        if self.problem.model_parallel is not None:
            self.problem.model_parallel.reshard()
        now = facts(self.problem.model)
        changed = self._facts is not None and self._facts != now
        if (
            self.model_parallel is None or not self.model_parallel.uneven_inputs
        ):  # else others may attend to it
            changed = self.problem.any(changed)
        if changed:
            if self.auditor.audits.batches:
                self.notes.append(
                    "the model was changed between two calls: it is bound and proved anew"
                )
            self._bind()
        self._facts = now if self.model_parallel is not None else self._facts
        return now

    def _record(self, batch: Batch, proof: Certificate | None) -> None:
        """Take note of a batch that was answered, and of its proof if all of it was proved."""
        if self.model_parallel is not None:
            self.certificate = self.model_parallel.certificate
            self._note_precision(self.problem.precision, self.problem.dtype.to_real())
        waits = self.settings.verify == "audit" and proof is None
        self._unaudited_batch = batch if waits else None  # else nobody's data are held
        self._batches_since_proof = 0 if proof is not None else self._batches_since_proof + 1

    def predictions_of(self, batch: Batch, evaluation: Evaluation) -> Columns:
        """Return what the model predicts of the batch that was evaluated last, if that is kept."""
        if self.predictions is None:
            return {}
        with torch.inference_mode(False):
            return self.predictions.of(self.problem, self.labels, batch, evaluation)

    def _evaluate_uncompiled(self, batch: Batch, request: Request = ROWS, /) -> Evaluation:
        """Answer by the first candidate that does not refuse, proved where a proof is due."""
        while True:
            try:
                found = self._evaluate_and_certify(batch, request)
                return replace(found, gradients=Gradients(found.gradients, batch.index))
            except CoupledSamplesError:
                raise  # true for every backend
            except RefusedError as error:
                if not self.drop_backend(error):
                    raise

    def _evaluate_and_certify(self, batch: Batch, request: Request) -> Evaluation:
        asked = self.settings
        if self._evaluate is None:
            self.backend = self._fallbacks.pop(0)
            backend = backend_of(self.backend, asked.rows, own_loss=asked.own_loss)
            self._evaluate = self._stack.enter_context(backend(self.problem))
        due = self._proof_due or self._proves_every_batch or asked.verify == "always"
        if asked.verify == "never" or not due:
            return self._evaluate(batch, request)
        bound, seed = self._evaluate, derive_seed(asked.seed, 0)

        def evaluate(batch: Batch, own: Request = ROWS, /) -> Evaluation:
            return bound(batch, replace(own, factors=request.factors))

        # what its blocks raise, too, is for the next backend
        with refusing(self.backend, self.problem.model, "Use another backend, as auto does."):
            evaluation, proof = certify(
                self.problem,
                self.backend,
                evaluate,
                batch,
                own_loss=asked.own_loss,
                seed=seed,
                trains=self._had_gradients,
            )
        first, self.certificate = self.certificate is None, proof
        # what was said before held no proof
        if first or (proof.proves and not self._had_gradients):
            before, self.zeros = self.zeros, zero_notes(self.problem, batch, proof)
            self.notes[:] = [*(note for note in self.notes if note not in before), *self.zeros]
        self._proof_due, self._had_gradients = not proof.proves, self._had_gradients or proof.proves
        with suppress(ModelError):  # not every model takes one sample of them
            if first and not self.rehearses:
                with watching_loss_inputs(self.problem, self.warnings) as watched:
                    narrow = computed_in(watched, batch, WATCHED)
            else:
                narrow = computed_in(self.problem, batch)
            self._note_precision(narrow, self.problem.precision)
        if first:
            self.notes += self.warnings
            for text in self.warnings:
                self.warn(text)
        return evaluation

    def _note_precision(self, narrow: torch.dtype, own: torch.dtype) -> None:
        """Say that a model computes in less than its parameters' `own` precision, if it does."""
        eps = torch.finfo(narrow).eps
        if eps > torch.finfo(own).eps:
            self._note(
                f"part of the model computes in {str(narrow).removeprefix('torch.')}: between "
                f"backends and batches gradients differ by its rounding, some {eps:.0e}"
            )

    def _note(self, note: str) -> None:
        if note and note not in self.notes:
            self.notes.append(note)

    def drop_backend(self, error: RefusedError) -> bool:
        """Let go of a backend that has no right answer; return whether there is another."""
        self._proof_due = True
        self.notes.append(f"{self.backend} refused: {error.what}")
        self._stack.close()
        self._evaluate = None
        if self._fallbacks:
            return True
        self._fallbacks = self._candidates()
        return False

    def _candidates(self) -> list[str]:
        return [*candidates(self.settings.backend, own_loss=self.settings.own_loss)]

    def _audit(
        self, batch: Batch, request: Request, number: int, plan: AuditPlan, evaluation: Evaluation
    ) -> tuple[Evaluation, Certificate | None]:
        """Look at an answer once more; return it, and its proof if all of it was proved."""
        state, uncompiled = self.problem.state, evaluation
        known = state.change_count
        try:
            with state.watching(again=True) if plan.recorded else nullcontext():
                if evaluation.compiled and self._compiled is not None:
                    uncompiled = self._evaluate_uncompiled(batch)
                    self._compiled.require_equal(evaluation, uncompiled, request)
                answer = Answer(
                    self.problem,
                    self.backend,
                    batch,
                    uncompiled,
                    own_loss=self.settings.own_loss,
                    seed=derive_seed(self.settings.seed, number),
                    singles=plan.singles,
                    trains=self._had_gradients,
                )
                proof = None
                if plan.whole_batch:
                    proof = prove(answer, after=self.certificate)
                else:
                    prove_samples(answer)
            if state.change_count == known:
                return evaluation, proof
            # what the forward pass changes here is put back from now on: does it matter?
            again = self._evaluate_uncompiled(batch)
            if same(again.losses, evaluation.losses, precision=self.problem.precision):
                return self._audit(batch, request, number, plan, again)
            raise CertificateError(
                f"the forward pass changes {state.latest}, and with it the losses",
                where=batch.description,
                remedy="It is put back from now on: begin again with the first batch.",
            )
        except CertificateError as error:
            self.drop_backend(error)
            raise

    def retry(self, run: Callable[[], T], *, again: bool = True) -> T:
        """Return what `run` returns, with another backend where an audit found the first wrong.

        That is, where all answers that were given before have been proved.

        Args:
            run: What there is to do.
            again: Whether it can be begun again: not where other processes are in the middle of it.
        """
        doubtful = self._batches_since_proof
        while True:
            try:
                with self.tuner.active():
                    return run()
            except CertificateError as error:
                if doubtful:
                    error.remedy = (
                        f"The answers to {doubtful} batches since the last that was proved may be "
                        f"wrong as well.\n{error.remedy}"
                    )
                if doubtful or self._evaluate is not None or not (again and self.has_fallback):
                    raise

    def close(self) -> None:
        """Let go of what the backend holds; the session can be used again afterwards."""
        self._stack.close()
        self._evaluate, self._proof_due, self._unaudited_batch = None, True, None
        self._fallbacks = self._candidates()
        if self._compiled is not None:
            self._compiled.forget()
        if self.model_parallel is not None:
            self.model_parallel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Audit the last batch, unless that was done or an error is under way, and close."""
        try:
            if kind is None and self._unaudited_batch is not None:
                self.evaluate(self._unaudited_batch, last=True)
        finally:
            self.close()
