"""`Scope`: a model and a loss, bound once, asked about many batches."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, get_args

import torch
from torch import Tensor, nn

from gradscope.backends import Evaluate, backends
from gradscope.backends.auto import candidates
from gradscope.backends.compiled import Computed, Wanted
from gradscope.backends.compiled_choice import Choice, Compiler
from gradscope.backends.joint import own_loss_backends
from gradscope.blocks import Evaluation, Gradients
from gradscope.core.batch import Batch, detached
from gradscope.core.independence import same
from gradscope.core.libc import keep_pages
from gradscope.core.problem import Problem
from gradscope.core.registry import suggestion
from gradscope.core.state import facts
from gradscope.engine import (
    Auditor,
    Certificate,
    Look,
    certify,
    drawn,
    examined,
    glimpsed,
    require_norms,
    span,
)
from gradscope.errors import CertificateError, CoupledSamplesError, RefusedError, SpecError
from gradscope.finite import NonFinite, NonFiniteWarning, usable
from gradscope.stages import chains
from gradscope.stages.labels import Labels, Mode, samples
from gradscope.stages.losses import resolve
from gradscope.stages.reducers import State, depends_on_split

T = TypeVar("T")
Verify = Literal["audit", "first", "always", "never"]
Coupling = Literal["refuse", "own-loss", "frozen"]

_STREAMED = 512  # samples held at a time where only a summary is asked for


class Scope:
    """Per-sample gradients of a model, in the mode the model is in.

    Nothing is attached to the model or its parameters, and both are left as they were found.

    Args:
        model: Any module; its trainable parameters are differentiated by.
        loss: A name (`gradscope list losses`), `(outputs, targets) -> (n,)`, or a `model_loss`.
        parameters: Globs of parameter names; all trainable ones when None.
        backend: `auto`, or one of `gradscope list backends`.
        verify: Prove the first batch and audit those that follow ("audit"), prove the first, every
            batch ("always"), or none ("never"). An audit takes a twentieth of the time at most; of
            a scope that is left as a context manager, the last batch always has one.
        coupling: What to do when a sample's loss depends on its batch: "refuse"; "own-loss" for
            ∂Lᵢ/∂θ through everybody's statistics (backends loop and vmap; the rows depend on which
            samples share a batch, so none is split); "frozen" puts normalisation layers on their
            running statistics.
        nonfinite: What reducers do with samples whose gradient is not finite: "skip" leaves them
            out and tells, "fail" raises, "keep" lets them through.
        labels: "data", "sampled" from the model's predictions with `seed`, or "exact": the
            expectation over all classes.
        compile: Compile gradient and reduction as one program where that can be done; under `auto`
            where it is also measured to be faster. What was done is in `notes`.

    Attributes:
        backend: The backend in use; `auto` until the first batch has been seen.
        certificate: The proof of the first batch (the last proof, if every batch has one), or None.
        auditor: Says what was audited, `auditor.audits`.
        notes: What was chosen and why.
        compiler: What compiles; told how many batches are `left`, it counts its own time.

    Raises:
        SpecError: A name is unknown, or no parameter is selected.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: str | Callable[..., Tensor],
        parameters: str | list[str] | None = None,
        backend: str = "auto",
        verify: Verify = "audit",
        coupling: Coupling = "refuse",
        nonfinite: NonFinite = "skip",
        labels: Mode = "data",
        seed: int = 0,
        compile: bool = False,
    ) -> None:
        kinds = (Verify, Coupling, NonFinite, Mode)
        for word, kind in zip((verify, coupling, nonfinite, labels), kinds, strict=True):
            if word not in get_args(kind):
                known = list(get_args(kind))
                raise SpecError(f"unknown word {word!r}", remedy=suggestion(str(word), known))
        keep_pages()
        self._model, self._loss, self._globs = model, resolve(loss), parameters
        self.own_loss, self._frozen = coupling == "own-loss", coupling == "frozen"
        self.backend = self._asked = backend
        self.verify, self.nonfinite, self.seed = verify, nonfinite, seed
        self.certificate: Certificate | None = None
        self.notes: list[str] = []
        self.auditor = Auditor(seed, always=verify == "always")
        self._labels = labels
        self._choice = Choice(compile, backend, verify, coupling)
        self._bound: dict[str, chains.Chain] = {}
        self._tried: set[str] = set()  # chains whose reducers keep to the law of parts
        self._stack = ExitStack()
        self._bind()

    def _bind(self) -> None:
        """Bind the model as it is now; the next batch is proved."""
        self._stack.close()
        problem = Problem.of(self._model, self._loss, self._globs)
        self.problem = replace(problem, running_statistics=self._frozen)
        self.labels = Labels(self._labels, self.problem, self.seed, own_loss=self.own_loss)
        self.compiler = Compiler(self.problem, self._choice, self.notes)
        self._waiting = list(candidates(self._asked, own_loss=self.own_loss))
        self._evaluate: Evaluate | None = None
        self._due = True  # a proof is
        self._wary = False  # one batch was refused: every other is proved
        self._facts: list[Any] | None = None
        self._unaudited: Batch | None = None  # the last one, unless it was proved
        self._doubtful = 0  # batches since the last one that was proved

    def evaluate(
        self,
        batch: Batch,
        wanted: Wanted | None = None,
        *,
        ordinal: int | None = None,
        last: bool = False,
    ) -> Evaluation:
        """Return the losses (n,) and the gradients of a batch as blocks, one a sample and label.

        Args:
            batch: The samples.
            wanted: What the gradients will be asked for; the gradients themselves if None. It
                tells what to compile.
            ordinal: The number of the batch in its run, from 0; counted when not given.
            last: Whether it is known to be the last: it is then audited.

        Raises:
            RefusedError: No candidate backend has an exact, proved answer.
        """
        now = self._follow()
        batch, wanted = detached(self.labels.of(batch)), wanted or Wanted()
        number = self.auditor.audits.batches if ordinal is None else ordinal
        before = self.certificate
        try:
            with torch.inference_mode(False), self.problem.state.kept():
                evaluation = self.compiler.evaluation(batch, wanted, self._uncompiled)
                proof = None if self.certificate is before else self.certificate
                look = self.auditor.begin(
                    len(batch), number, last=last, new=evaluation.new, proof=proof
                )
                audited = self.verify == "audit" and proof is None and not look.none
                if audited:
                    evaluation, proof = self._audited(batch, wanted, number, look, evaluation)
                self.auditor.end(look, proof, audited=audited)
        except RefusedError:
            self._due = self._wary = True
            raise
        except BaseException:
            self._due = True  # until a proof has passed, nothing more is answered
            raise
        self._facts = now
        self._unaudited = batch if proof is None else None
        self._doubtful = 0 if proof is not None else self._doubtful + 1
        return evaluation

    def _uncompiled(self, batch: Batch) -> Evaluation:
        while True:
            try:
                found = self._proved(batch)
                return replace(found, gradients=Gradients(found.gradients, batch.index))
            except CoupledSamplesError:
                raise  # true for every backend
            except RefusedError as error:
                if not self._goes_on(error):
                    raise

    def _goes_on(self, error: RefusedError) -> bool:
        """Let go of a backend that has no right answer; return whether there is another."""
        self._due = True
        self.notes.append(f"{self.backend} refused: {error.what}")
        self._stack.close()
        self._evaluate = None
        if self._waiting:
            return True
        self._waiting = list(candidates(self._asked, own_loss=self.own_loss))
        return False

    def _audited(
        self,
        batch: Batch,
        wanted: Wanted,
        number: int,
        look: Look,
        evaluation: Evaluation,
    ) -> tuple[Evaluation, Certificate | None]:
        """Look at an answer once more; return it, and its proof if all of it was proved.

        Raises:
            CertificateError: It is wrong.
            CoupledSamplesError: A sample's loss depends on other samples of this batch.
        """
        state, uncompiled = self.problem.state, evaluation
        known = state.found
        try:
            with state.watched(again=True) if look.recorded else nullcontext():
                if isinstance(evaluation.gradients, Computed):
                    uncompiled = self._uncompiled(batch)
                    self.compiler.require_equal(evaluation, uncompiled, wanted)
                given = (self.problem, self.backend, uncompiled, batch)
                more: dict[str, Any] = {
                    "own_loss": self.own_loss,
                    "seed": drawn(self.seed, number),
                    "alone": look.alone,
                }
                proof = None
                if look.whole:
                    proof = examined(*given, **more, after=self.certificate)
                else:
                    glimpsed(*given, **more)
            if state.found == known:
                return evaluation, proof
            # what the forward pass changes here is put back from now on: does it matter?
            again = self._uncompiled(batch)
            if same(again.losses, evaluation.losses, precision=self.problem.precision):
                return self._audited(batch, wanted, number, look, again)
            raise CertificateError(
                f"the forward pass changes {state.latest}, and with it the losses",
                where=span(batch),
                remedy="It is put back from now on: begin again with the first batch.",
            )
        except CertificateError as error:
            self._goes_on(error)
            raise

    def _follow(self) -> list[Any]:
        """Return what a proof takes for granted; if that has changed, bind the model anew."""
        now = facts(self.problem.model)
        if self._facts is not None and self._facts != now:
            self.notes.append(
                "the model was changed between two calls: it is bound and proved anew"
            )
            self._bind()
        return now

    def per_sample_gradients(
        self, inputs: Any, targets: Any = None, out: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return {name: (n, *shape)}, each row the gradient of one sample's own loss.

        Args:
            inputs: A tensor, tuple or dict, sample axis first.
            targets: Likewise, or None.
            out: Buffers to write into, as returned by an earlier call.
        """
        self.labels.require_one()
        batch = Batch.of(inputs, targets)
        return self._repeated(lambda: self._rows(batch, out))

    def _rows(self, batch: Batch, out: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Return {name: (n, *shape)}; those of a batch that is proved have the norms of its proof.

        Raises:
            CertificateError: They have others.
        """
        gradients = self.evaluate(batch, Wanted(out=out)).gradients
        rows = gradients.dense(out)
        if self.verify != "never" and self.proved:
            try:
                require_norms(self.backend, rows, gradients)
            except CertificateError as error:
                self._goes_on(error)
                raise
        return rows

    def norms(
        self, inputs: Any, targets: Any = None, per: Literal["sample", "parameter"] = "sample"
    ) -> Any:
        """Return the L2 norms of the per-sample gradients; no gradient need be formed.

        Returns:
            (n,) over all parameters together, or {name: (n,)} with `per="parameter"`.
        """
        if per not in ("sample", "parameter"):
            raise SpecError(f"per is sample or parameter, not {per!r}")
        self.labels.require_one()
        batch = Batch.of(inputs, targets)
        wanted = Wanted(rows=False)
        found = self._repeated(
            lambda: [found.gradients for _, found in self._evaluations(batch, wanted)]
        )
        if per == "sample":
            return torch.cat([gradients.norms for gradients in found])
        return {
            name: torch.cat([g.squared_norms[name].sqrt() for g in found])
            for name in self.problem.parameters
        }

    def expectation(self, chain: str, inputs: Any, targets: Any = None) -> dict[str, Tensor]:
        """Return E[T(g)] over the samples: {name: (*shape)}, sums in the gradients' precision.

        Samples without a finite gradient are left out, with a `NonFiniteWarning`.

        Args:
            chain: For example "clip:max_norm=1.0 | mean"; a chain without a reducer means `mean`.
            inputs: A tensor, tuple or dict, sample axis first; worked through in parts.
            targets: Likewise, or None.
        """
        return self.expectations([chain], inputs, targets)[0]

    def expectations(
        self, texts: Sequence[str], inputs: Any, targets: Any = None
    ) -> list[dict[str, Tensor]]:
        """Return what `expectation` does for several chains, in one pass over the samples."""
        whole = Batch.of(inputs, targets)
        return self._repeated(lambda: self._expectations(texts, whole))

    def _expectations(self, texts: Sequence[str], whole: Batch) -> list[dict[str, Tensor]]:
        bound = self.settled([*map(self._chain, texts)], lambda: self._parts(whole))
        wanted = chains.wanted(bound)
        states: Sequence[State | None] = [None] * len(bound)
        dtypes: list[dict[str, torch.dtype]] = []  # of a batch's own sums
        skipped = 0
        for part, evaluation in self._evaluations(whole, wanted):
            found: Sequence[State | None] | None = None
            if self.labels.mode != "exact":
                found = chains.updated_if_finite(bound, states, evaluation)
            if found is None:
                kept = self.usable(part, evaluation)
                skipped += len(part) - (0 if kept is None else samples(kept[2]))
                found = states if kept is None else chains.updated(bound, states, *kept)
            states = found
            dtypes = dtypes or [{k: v.dtype for k, v in s.items()} for s in states if s]
        if skipped:
            warnings.warn(
                f"{skipped} samples have no finite gradient and were left out",
                NonFiniteWarning,
                stacklevel=5,
            )
        if skipped == len(whole):
            raise SpecError("no sample has a finite gradient, so there is no expectation")
        return [
            chain.result({key: value.to(own[key]) for key, value in state.items()})
            for chain, state, own in zip(bound, states, dtypes, strict=True)
            if state is not None
        ]

    def settled(
        self, waiting: Sequence[chains.Chain], batches: Callable[[], Iterable[Batch]]
    ) -> tuple[chains.Chain, ...]:
        """Run the earlier passes that chains need (`center`), all of one round in one pass.

        Args:
            waiting: Any chains.
            batches: Starts a pass over the data.
        """
        self._require_splittable(waiting)
        ready = tuple(map(self.labels.chain, waiting))
        while first := chains.waiting(ready):
            self.notes += [f"an earlier pass over the data for: {text}" for text in first]
            states: dict[str, State] = {}
            for batch in batches():
                kept = self.usable(batch, self.evaluate(batch))
                if kept is not None:
                    for text, chain in first.items():
                        update = self.labels.chain(chain).update
                        states[text] = update(states.get(text), *kept)
            if not states:
                raise SpecError(
                    "no sample has a finite gradient, so there is no mean to start from"
                )
            means = {text: chain.result(states[text]) for text, chain in first.items()}
            ready = tuple(
                chain if chain.first_pass is None else chain.given(means[chain.first_pass.text])
                for chain in ready
            )
        return ready

    def _require_splittable(self, waiting: Sequence[chains.Chain]) -> None:
        """Try each reducer in parts; a user's own one that depends on them is only named.

        Raises:
            CertificateError: Another one does.
        """
        for chain in waiting:
            if chain.reducer is None or chain.text in self._tried or self.verify == "never":
                continue
            self._tried.add(chain.text)
            found = depends_on_split(chain.reducer)
            told = f"samples in several batches have another result ({found}) than in one"
            if found is not None and ".py:" in chain.text:
                self.notes.append(f"{chain.text}: {told}: see its `merge`")
            elif found is not None:
                raise CertificateError(told, where=f"chain {chain.text!r}")

    def usable(
        self, batch: Batch, evaluation: Evaluation
    ) -> tuple[Gradients, Problem, Batch] | None:
        """Return what chains reduce of a batch: the samples with a finite gradient, or None.

        Raises:
            NonFiniteError: One is not finite, and `nonfinite` is "fail".
        """
        return usable(evaluation, self.problem, self.labels.of(batch), self.nonfinite)

    def close(self) -> None:
        """Let go of what the backend holds; the scope can be used again afterwards."""
        self._stack.close()
        self._evaluate, self._due, self._unaudited = None, True, None
        self.compiler.forget()
        self._waiting = list(candidates(self._asked, own_loss=self.own_loss))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Audit the last batch, unless that was done or an error is under way, and close."""
        try:
            if kind is None and self._unaudited is not None and self.verify == "audit":
                self.evaluate(self._unaudited, last=True)
        finally:
            self.close()

    def _chain(self, text: str) -> chains.Chain:
        """Return a bound chain, which most are for as long as the scope lives."""
        found = self._bound.get(text) or chains.bind(text, reduced=True)
        if found.lasting:
            self._bound[text] = found
        return found

    def _parts(self, batch: Batch) -> list[Batch]:
        step = len(batch) if self.own_loss else max(1, _STREAMED // self.labels.each(batch))
        return [batch.select(slice(k, k + step)) for k in range(0, len(batch), step)]

    def _evaluations(self, batch: Batch, wanted: Wanted) -> Iterator[tuple[Batch, Evaluation]]:
        """Yield the parts of a batch and their evaluations; of several, the last is audited."""
        parts = self._parts(batch)
        for k, part in enumerate(parts, start=1):
            yield part, self.evaluate(part, wanted, last=k == len(parts) > 1)

    def _repeated(self, run: Callable[[], T]) -> T:
        """Return what `run` returns, with another backend where an audit found the first wrong.

        That is, where all answers that were given before have been proved.
        """
        doubtful = self._doubtful
        while True:
            try:
                return run()
            except CertificateError as error:
                if doubtful:
                    error.remedy = (
                        f"The answers to {doubtful} batches since the last that was proved may be "
                        f"wrong as well.\n{error.remedy}"
                    )
                if doubtful or self._evaluate is not None or not self.has_others:
                    raise

    @property
    def proved(self) -> bool:
        """Whether the last answer was proved whole."""
        return self._doubtful == 0

    @property
    def has_others(self) -> bool:
        """Whether another backend waits for its turn, now that the last one was found wrong."""
        return 0 < len(self._waiting) < len(candidates(self._asked, own_loss=self.own_loss))

    def _proved(self, batch: Batch) -> Evaluation:
        if self._evaluate is None:
            self.backend = self._waiting.pop(0)
            registry = own_loss_backends if self.own_loss else backends
            self._evaluate = self._stack.enter_context(registry.get(self.backend)(self.problem))
        if self.verify == "never" or not (self._due or self._wary or self.verify == "always"):
            return self._evaluate(batch)
        seed = drawn(self.seed, 0)
        evaluation, proof = certify(
            self.problem, self.backend, self._evaluate, batch, own_loss=self.own_loss, seed=seed
        )
        self.certificate = proof
        self._due = not proof.proves
        return evaluation
