"""A session binds model, loss and settings once, and returns proved evaluations of batches."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import Any, Literal, Self, TypeVar, get_args

import torch
from torch import Tensor, nn

from gradscope.backends.base import (
    AUTO,
    ROWS,
    Evaluate,
    Request,
    SlowProgramError,
    backend_of,
    candidates,
    no_samples,
    refusing,
)
from gradscope.backends.compiled import Compiled, not_compiled
from gradscope.blocks import Evaluation, Gradients, Tuner, active_tuner, in_groups
from gradscope.core.batch import Batch, Tokens, is_empty, require_positions, tensors
from gradscope.core.groups import Groups, Reduction
from gradscope.core.precision import double
from gradscope.core.registry import suggestion
from gradscope.engine.audit import Auditor, AuditPlan, derive_seed
from gradscope.engine.certificate import Answer, Certificate, certify, prove, prove_samples
from gradscope.engine.fallbacks import measure
from gradscope.engine.judge import require_sums
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
from gradscope.model.locate import device_lost_error
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
_MASKED = 512  # samples in a forward pass that finds the positions that count

Verify = Literal["audit", "first", "always", "never"]
Coupling = Literal["refuse", "own-loss", "frozen"]
NonFinite = Literal["skip", "fail", "keep"]
Randomness = Literal["refuse", "fixed"]


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    """The settings of a session; each field is described at `gradscope.Scope`.

    Raises:
        SpecError: A value is unknown, or values cannot be combined.
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
    group: Reduction | None = None  # how the rows of samples or tokens make a group's row

    def __post_init__(self) -> None:
        kinds = {"verify": Verify, "coupling": Coupling, "randomness": Randomness}
        kinds |= {"nonfinite": NonFinite, "labels": Mode, "rows": RowKind}
        kinds |= {} if self.group is None else {"group": Reduction}
        for name, kind in kinds.items():
            word, known = getattr(self, name), list(get_args(kind))
            if word not in known:
                remedy, name = (
                    suggestion(str(word), known),
                    name.replace("group", "group_reduction"),
                )
                raise SpecError(f"unknown value {word!r}", where=name, remedy=remedy)
        whole = isinstance(self.seed, Integral) and not isinstance(self.seed, bool)
        if not (whole and 0 <= self.seed < 2**63):
            message = f"the seed must be an integer from 0 to 2^63 - 1, not {self.seed!r}"
            raise SpecError(message, where="seed", remedy="Give a seed such as 0.")
        if not isinstance(self.compile, bool):
            message = f"compile must be True or False, not {self.compile!r}"
            raise SpecError(message, where="compile", remedy="Use compile=True or compile=False.")
        where = "rows token" if self.rows == "token" else "group" if self.group else None
        if where and (self.labels != "data" or self.coupling == "own-loss"):
            other = "coupling own-loss" if self.labels == "data" else f"labels {self.labels}"
            raise SpecError(
                f"{where} cannot be combined with {other}, which needs rows of samples",
                where=where,
                remedy="Use labels data and coupling refuse or frozen; or use rows of samples.",
            )

    def require_for_model_parallel(self) -> None:
        """Raise if a setting does not support a sharded model."""
        only = {
            "backend": (self.backend, (AUTO, "hooks")),
            "coupling": (self.coupling, ("refuse", "frozen")),
            "labels": (self.labels, ("data",)),
            "compile": (self.compile, (False,)),
            "randomness": (self.randomness, ("refuse",)),
            "rows": (self.rows, ("sample",)),
            "group": (self.group, (None,)),
        }
        for name, (word, accepted) in only.items():
            if word not in accepted:
                raise SpecError(
                    f"{name} {word!r} does not support models sharded by fully_shard",
                    remedy=f"Use {' or '.join(map(str, accepted))}; or use one process.",
                )

    @property
    def own_loss(self) -> bool:
        """Whether a coupled sample's row is the gradient of the sample's own loss."""
        return self.coupling == "own-loss"


class Session:
    """Owns the backend in use, the proof of its results, compiled programs, and notes on choices.

    Args:
        model: Any module; its mode is not changed.
        loss: A name, `(outputs, targets) -> (n,)`, or a `model_loss`.
        settings: The settings.

    Attributes:
        settings: The settings.
        problem: The model as last bound.
        labels: The labels of the losses: from the data, or by the model's predictions.
        backend: The name of the backend in use; `auto` before the first batch.
        certificate: The proof of the first batch (the last proof, if every batch has one), or None.
        auditor: Chooses the audits; `auditor.audits` records them.
        notes: Notes on choices and their reasons.
        warnings: Notes about a loss that gets the wrong kind of numbers.
        warn: Called with each warning.
        zeros: The notes about gradients that are all zero.
        checked_chains: Texts of the chains whose reducers were checked.
        tuner: Chooses kernel variants, and stores the choices.
        model_parallel: Evaluates a sharded model, or None if the model is not sharded.
        predictions: The model's predictions for the last batch, if requested.

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
        self.rehearses = False  # whether the session only measures time and memory
        self.tuner = Tuner.remembering()
        self.predictions = Predictions() if settings.predictions else None
        self._model, self._loss = model, resolve(loss)
        self._randomness = None
        if settings.randomness == "fixed":
            require("randomness fixed", probe)
            self._randomness = FixedRandomness(settings.seed)
        if settings.rows == "token":
            self._loss = of_tokens(self._loss)
        self.factored_tokens = False  # whether no token row of the last batch was dense
        self._positions: dict[Any, int] = {}  # {shapes: t} if all positions count
        self._stack = ExitStack()
        self._compiled: Compiled | None = None
        self._evaluate: Evaluate | None = None
        self._fallbacks: list[str] = []
        self._quick = True  # whether other backends are tried before slow analyses
        self._proof_due = True  # whether the next batch must be proved
        self._had_gradients = False  # whether a gradient was not zero
        self._proves_every_batch = False  # whether all batches are proved, after a refusal
        self._batches_since_proof = 0  # batches since the last proved batch
        self._unaudited_batch: Batch | None = None  # the last batch, unless it was proved
        self._facts: list[Any] | None = None
        self._bind()

    def _bind(self) -> None:
        """Bind the model in its current state; the next batch is proved."""
        asked = self.settings
        self.model_parallel: ModelParallelEvaluator | None = None
        self._stack.close()
        problem = Problem.of(self._model, self._loss, asked.parameters).with_fixed_randomness(
            self._randomness
        )
        if double(problem.device) != torch.float64:
            self.notes.append(
                f"the device {problem.device} has no float64: sums are computed in float32, and "
                "proofs compute in float64 on the CPU"
            )
        self.problem = replace(
            problem,
            running_statistics=asked.coupling == "frozen",
            observer=None if self.predictions is None else self.predictions.watch,
            rows=asked.rows,
        )
        if asked.group and problem.ranks is not None:
            raise SpecError(
                "group does not support a model that several processes train: members of a group "
                "could be in different processes",
                where="group",
                remedy="Use one process, or shards of a run.",
            )
        self.labels = Labels(asked.labels, self.problem, asked.seed, own_loss=asked.own_loss)
        if asked.labels == "exact":
            self.problem = replace(self.problem, loss=by_position(self.problem.loss))
        self._compiled = None
        settled = (asked.backend, asked.verify, asked.coupling, asked.randomness, asked.rows)
        against = "groups have no compiled form" if asked.group else not_compiled(*settled)
        if asked.compile and against is not None:
            self.notes.append(f"not compiled: {against}")
        elif asked.compile:
            faster, check = asked.backend == AUTO, asked.verify != "never"
            own = (self.problem, self._evaluate_uncompiled, self.notes)
            self._compiled = Compiled(*own, faster=faster, check=check)
        part = compiled_part(self._model)
        if part is not None:
            self.notes.append(
                f"{part} runs uncompiled, which may take longer: autograd records a compiled part "
                "as a single operation, in which samples cannot be separated"
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

    def with_loss(self, loss: str | Callable[..., Tensor]) -> "Session":
        """Return a new session with the same model and settings, and another loss."""
        return Session(self._model, loss, self.settings)

    def rehearsal(self, verify: Verify | None) -> "Session":
        """Return a new session with the same settings, which compiles nothing."""
        verify = verify or self.settings.verify
        settings = replace(self.settings, compile=False, verify=verify)
        made = Session(self._model, self._loss, settings)
        made.rehearses = True
        return made

    @property
    def last_is_proved(self) -> bool:
        """Whether the last batch was proved whole."""
        return self._batches_since_proof == 0

    def needs_proof(self) -> bool:
        """Return whether the next batch will be proved, as the first, or after a change."""
        self.rebind_if_changed()
        due = self._proof_due if self.model_parallel is None else self.model_parallel.needs_proof()
        return due and self.settings.verify != "never"

    @property
    def has_fallback(self) -> bool:
        """Whether a further backend can be tried after the last backend failed."""
        return 0 < len(self._fallbacks) < len(self._candidates())

    @property
    def compiles(self) -> bool:
        """Whether a compiled program is in use."""
        return self._compiled is not None and self._compiled.in_use

    def rows_of(self, batch: Batch) -> Batch:
        """Return the rows of samples: the samples, or with rows="token" the tokens that count.

        Tokens need a forward pass, unless all positions count or the batch is empty.
        """
        if self.settings.rows == "sample" or isinstance(batch, Tokens | Groups) or is_empty(batch):
            return batch
        shapes = tuple((t.shape[1:], t.dtype) for t in tensors((batch.inputs, batch.targets)))
        t = self._positions.get(shapes)
        if t is not None:
            return Tokens.among(batch, torch.ones(len(batch), t, dtype=torch.bool))
        with torch.inference_mode(False):
            spans = (slice(k, k + _MASKED) for k in range(0, len(batch), _MASKED))
            masks = [self.problem.position_mask(batch.select(k).detached()) for k in spans]
        counted, said = torch.cat([mask for mask, _ in masks]), masks[0][1]
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
        """Return the losses (n,) of a batch and the gradients as blocks, for each sample and label.

        Args:
            batch: The samples.
            request: The results that will be computed from the gradients.
            ordinal: The number of the batch in its run, from 0; counted if not given.
            last: Whether the batch is known to be the last; it is then audited.

        Raises:
            RefusedError: No candidate backend gives an exact, proved result.
        """
        if isinstance(batch, Groups):
            return self._evaluate_groups(batch, request, ordinal=ordinal, last=last)
        if self.settings.rows == "token":
            with locating_lost_axis(self.problem, batch):
                batch = self.rows_of(batch)
        now = self.rebind_if_changed()
        if is_empty(batch) and self.model_parallel is None:
            return no_samples(self.problem)
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
            self._proof_due = True  # the next batch must pass a proof
            gone = device_lost_error(error, batch.description)
            if gone is None:
                raise
            raise gone from error
        self._facts = now
        self._note(evaluation.note)
        if self.problem.state.untrained:
            self._note(
                "the inputs of a part checkpointed with use_reentrant=True require no gradient: in "
                "training its parameters get no gradient. These gradients are those of "
                "use_reentrant=False"
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

    def _evaluate_groups(
        self, batch: Groups, request: Request, *, ordinal: int | None, last: bool
    ) -> Evaluation:
        """Return the losses (g,) and gradients of groups: sums or means over their members."""
        own = Request(batches_left=request.batches_left)  # reductions take the rows of groups
        of_members = self.evaluate(batch.members, own, ordinal=ordinal, last=last)
        found = in_groups(of_members, batch.sizes, batch.index, batch.shares)
        if self.last_is_proved and self.settings.verify != "never" and len(batch):
            try:
                require_sums(self.backend, of_members.gradients, found.gradients, batch)
            except CertificateError as error:
                self.drop_backend(error)
                raise
        if request.stored:
            return replace(found, gradients=found.gradients.densify(always=True))
        return found

    def _evaluate_batch(
        self, batch: Batch, request: Request, number: int, *, last: bool
    ) -> tuple[Evaluation, Certificate | None]:
        """Return an evaluation, audited if chosen, and its proof if the whole batch was proved."""
        self.auditor.start()
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
        """Bind the model again if it was changed; return the facts that a proof relies on."""
        if self.problem.model_parallel is not None:
            self.problem.model_parallel.reshard()
        now = facts(self.problem.model)
        changed = self._facts is not None and self._facts != now
        if (
            self.model_parallel is None or not self.model_parallel.uneven_inputs
        ):  # with uneven inputs, some processes may not call this
            changed = self.problem.any(changed)
        if changed:
            if self.auditor.audits.batches:
                self.notes.append(
                    "the model was changed between two calls: it is bound and proved again"
                )
            self._bind()
        self._facts = now if self.model_parallel is not None else self._facts
        return now

    def _record(self, batch: Batch, proof: Certificate | None) -> None:
        """Record an evaluated batch, and its proof if the whole batch was proved."""
        if self.model_parallel is not None:
            self.certificate = self.model_parallel.certificate
            self._note_precision(self.problem.precision, self.problem.dtype.to_real())
        waits = self.settings.verify == "audit" and proof is None
        self._unaudited_batch = batch if waits else None  # no data are kept without need
        self._batches_since_proof = 0 if proof is not None else self._batches_since_proof + 1

    def predictions_of(self, batch: Batch, evaluation: Evaluation) -> Columns:
        """Return the model's predictions for the last evaluated batch, if they are requested."""
        if self.predictions is None:
            return {}
        with torch.inference_mode(False):
            return self.predictions.of(self.problem, self.labels, batch, evaluation)

    def _evaluate_uncompiled(self, batch: Batch, request: Request = ROWS, /) -> Evaluation:
        """Evaluate with the first candidate that does not refuse; prove the result if due."""
        while True:
            try:
                found = self._evaluate_and_certify(batch, request)
                return replace(found, gradients=Gradients(found.gradients, batch.index))
            except CoupledSamplesError:
                raise  # no backend can help
            except RefusedError as error:
                if not self.drop_backend(error):
                    raise

    def _evaluate_and_certify(self, batch: Batch, request: Request) -> Evaluation:
        asked = self.settings
        if self._evaluate is None:
            refused = not self._quick or len(self._fallbacks) < len(self._candidates())
            if (refused or self.skipped) and len(self._fallbacks) > 1:
                self._fallbacks = self._fastest_first(batch)
            self.backend = self._fallbacks.pop(0)
            backend = backend_of(self.backend, asked.rows, own_loss=asked.own_loss)
            self._evaluate = self._stack.enter_context(backend(self.problem))
        due = self._proof_due or self._proves_every_batch or asked.verify == "always"
        quick = self._quick and bool(self._fallbacks) and not request.factors
        if asked.verify == "never" or not due:
            return self._evaluate(batch, replace(request, quick=quick))
        bound, seed = self._evaluate, derive_seed(asked.seed, 0)

        def evaluate(batch: Batch, own: Request = ROWS, /) -> Evaluation:
            return bound(batch, replace(own, factors=request.factors, quick=quick))

        # after an error in the backend or its blocks, the next backend is tried
        with refusing(self.backend, self.problem.model, "Use another backend (auto does)."):
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
        # earlier notes were of batches with zero gradients
        if first or (proof.proves and not self._had_gradients):
            before, self.zeros = self.zeros, zero_notes(self.problem, batch, proof)
            self.notes[:] = [*(note for note in self.notes if note not in before), *self.zeros]
        self._proof_due, self._had_gradients = not proof.proves, self._had_gradients or proof.proves
        with suppress(ModelError):  # a model may not run with a batch of one
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
        """Add a note if the model computes in a lower precision than its parameters' `own`."""
        eps = torch.finfo(narrow).eps
        if eps > torch.finfo(own).eps:
            self._note(
                f"part of the model computes in {str(narrow).removeprefix('torch.')}: gradients "
                f"differ between backends and batches by its rounding, about {eps:.0e}"
            )

    def _note(self, note: str) -> None:
        if note and note not in self.notes:
            self.notes.append(note)

    def drop_backend(self, error: RefusedError) -> bool:
        """Release a backend that failed; return whether there is a further candidate."""
        self._proof_due = True
        if isinstance(error, SlowProgramError):
            self._quick = False
            self._fallbacks.insert(0, self.backend)
        else:
            self._note(f"{self.backend} refused: {error.what}")
        self._stack.close()
        self._evaluate = None
        if self._fallbacks:
            return True
        self._fallbacks, self._quick = self._candidates(), True
        return False

    def _fastest_first(self, batch: Batch) -> list[str]:
        """Return the remaining backends with the fastest first, and note the reason.

        The first run of a model measures the backends; see `fallbacks.measure`.
        """
        asked, problem = self.settings, self.problem
        own = problem, self._fallbacks, asked.rows, batch, self._note
        measured = partial(measure, *own, own_loss=asked.own_loss)
        size = sum(p.numel() for p in problem.parameters.values())
        request = f"backend for {type(problem.model).__name__} with {size} parameters"
        sizes = len(batch), problem.device
        try:
            with problem.state.watching():
                order, chosen = active_tuner().rank(request, *sizes, self._fallbacks, measured)
        except RefusedError:
            return self._fallbacks
        spent = chosen.seconds
        faster = [
            f"{spent[name] / spent[order[0]]:.1f} times faster than {name}"
            for name in order[1:]
            if name in spent and 0 < spent.get(order[0], 0.0) < spent[name]
        ]
        if faster:
            self._note(f"{order[0]}: on the first batch at least {' and '.join(faster)}")
        return order

    def _candidates(self) -> list[str]:
        found = [*candidates(self.settings.backend, own_loss=self.settings.own_loss)]
        return [name for name in found if name not in self.skipped] or found

    @property
    def skipped(self) -> tuple[str, ...]:
        """The backends that are slow or refuse for a loss of one sample at a time."""
        own: tuple[str, ...] = getattr(self.problem.function, "skips", ())
        return own if self.settings.backend == AUTO else ()

    def _audit(
        self, batch: Batch, request: Request, number: int, plan: AuditPlan, evaluation: Evaluation
    ) -> tuple[Evaluation, Certificate | None]:
        """Audit an evaluation; return it, and its proof if the whole batch was proved."""
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
            # a new change of state by the forward pass was found: does it affect the losses?
            again = self._evaluate_uncompiled(batch)
            if same(again.losses, evaluation.losses, precision=self.problem.precision):
                return self._audit(batch, request, number, plan, again)
            raise CertificateError(
                f"the forward pass changes {state.latest}, which changes the losses of later calls",
                where=batch.description,
                remedy="Start again with the first batch: the change is now undone after every "
                "call.",
            )
        except CertificateError as error:
            self.drop_backend(error)
            raise

    def retry(self, run: Callable[[], T], *, again: bool = True) -> T:
        """Return `run()`; if an audit fails, try the next backend.

        Another backend is tried only if all earlier results were proved.

        Args:
            run: The computation.
            again: Whether it can be repeated, which is impossible if other processes take part.
        """
        doubtful = self._batches_since_proof
        while True:
            try:
                with self.tuner.active():
                    return run()
            except CertificateError as error:
                if doubtful:
                    error.remedy = (
                        f"The results of the {doubtful} batches since the last proof may also be "
                        f"wrong.\n{error.remedy}"
                    )
                if doubtful or self._evaluate is not None or not (again and self.has_fallback):
                    raise

    def close(self) -> None:
        """Release the backend; the session can be used again afterwards."""
        self._stack.close()
        self._evaluate, self._proof_due, self._unaudited_batch = None, True, None
        self._fallbacks, self._quick = self._candidates(), True
        if self._compiled is not None:
            self._compiled.forget()
        if self.model_parallel is not None:
            self.model_parallel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Audit the last batch if it was not proved and there is no exception; then close."""
        try:
            if kind is None and self._unaudited_batch is not None:
                self.evaluate(self._unaudited_batch, last=True)
        finally:
            self.close()
