"""`Scope`: a model and a loss, bound once, asked about many batches."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from gradscope import chains
from gradscope.backends import Evaluate, backends
from gradscope.backends.auto import candidates
from gradscope.backends.compiled import Wanted
from gradscope.backends.compiled_choice import Choice, Compiler
from gradscope.backends.joint import own_loss_backends
from gradscope.blocks import Evaluation, Gradients
from gradscope.certificate import Certificate, certify
from gradscope.core.batch import Batch, detached
from gradscope.core.pages import keep_pages
from gradscope.core.problem import Problem
from gradscope.core.registry import suggestion
from gradscope.errors import CoupledSamplesError, RefusedError, SpecError
from gradscope.finite import NonFinite, NonFiniteWarning, usable
from gradscope.labels import Labels, Mode, samples
from gradscope.losses import resolve
from gradscope.reducers import State

Verify = Literal["first", "always", "never"]
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
        verify: Prove the first batch, every batch, or none (the certificate).
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
        certificate: The last proof, or None.
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
        verify: Verify = "first",
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
        problem = Problem.of(model, resolve(loss), parameters)
        self.problem = replace(problem, running_statistics=coupling == "frozen")
        self.own_loss = coupling == "own-loss"
        self.labels = Labels(labels, self.problem, seed, own_loss=self.own_loss)
        self.backend = self._asked = backend
        self.verify = verify
        self.nonfinite = nonfinite
        self.certificate: Certificate | None = None
        self.notes: list[str] = []
        self._waiting = list(candidates(backend, own_loss=self.own_loss))
        self._bound: dict[str, chains.Chain] = {}
        self._evaluate: Evaluate | None = None
        self._stack = ExitStack()
        choice = Choice(compile, backend, verify, coupling)
        self.compiler = Compiler(self.problem, choice, self.notes)

    def evaluate(self, batch: Batch, wanted: Wanted | None = None) -> Evaluation:
        """Return the losses (n,) and the gradients of a batch as blocks, one a sample and label.

        Args:
            batch: The samples.
            wanted: What the gradients will be asked for; the gradients themselves if None. It
                tells what to compile.

        Raises:
            RefusedError: No candidate backend has an exact, proved answer.
        """
        batch = detached(self.labels.of(batch))
        return self.compiler.evaluation(batch, wanted or Wanted(), self._uncompiled)

    def _uncompiled(self, batch: Batch) -> Evaluation:
        while True:
            try:
                found = self._proved(batch)
                return replace(found, gradients=Gradients(found.gradients, batch.index))
            except CoupledSamplesError:
                raise  # true for every backend
            except RefusedError as error:
                if not self._waiting:
                    raise
                self.notes.append(f"{self.backend} refused: {error.what}")
                self._evaluate = None

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
        return self.evaluate(batch, Wanted(out=out)).gradients.dense(out)

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
        parts = self._parts(Batch.of(inputs, targets))
        found = [self.evaluate(part, Wanted(rows=False)).gradients for part in parts]
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
        bound = self.settled([*map(self._chain, texts)], lambda: self._parts(whole))
        wanted = chains.wanted(bound)
        states: Sequence[State | None] = [None] * len(bound)
        dtypes: list[dict[str, torch.dtype]] = []  # of a batch's own sums
        skipped = 0
        for part in self._parts(whole):
            evaluation = self.evaluate(part, wanted)
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
                stacklevel=3,
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
        self._evaluate = None
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
        self.close()

    def _chain(self, text: str) -> chains.Chain:
        """Return a bound chain, which most are for as long as the scope lives."""
        found = self._bound.get(text) or chains.bind(text, reduced=True)
        if found.lasting:
            self._bound[text] = found
        return found

    def _parts(self, batch: Batch) -> Iterator[Batch]:
        step = len(batch) if self.own_loss else max(1, _STREAMED // self.labels.each(batch))
        for start in range(0, len(batch), step):
            yield batch.select(slice(start, start + step))

    def _proved(self, batch: Batch) -> Evaluation:
        fresh = self._evaluate is None
        if self._evaluate is None:
            self.backend = self._waiting.pop(0)
            registry = own_loss_backends if self.own_loss else backends
            self._evaluate = self._stack.enter_context(registry.get(self.backend)(self.problem))
        if self.verify == "never" or (self.verify == "first" and not fresh):
            return self._evaluate(batch)
        evaluation, self.certificate = certify(
            self.problem, self.backend, self._evaluate, batch, own_loss=self.own_loss
        )
        return evaluation
