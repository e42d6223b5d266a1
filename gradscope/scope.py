"""`Scope` binds a model and a loss for use with many batches; functions do the same in one call."""

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from gradscope.backends.base import ROWS, Request
from gradscope.blocks import Evaluation, Gradients
from gradscope.core.batch import Batch, Tokens, is_empty
from gradscope.core.groups import GroupIds, Groups, Reduction, decoded
from gradscope.engine.audit import SCOPE_WINDOW, Auditor
from gradscope.engine.certificate import Certificate
from gradscope.engine.chains import bind
from gradscope.engine.fold import fold, merge_ranks, prepare_chains, state_of_none
from gradscope.engine.judge import require_norms
from gradscope.engine.model_parallel import require_for_model_parallel
from gradscope.engine.session import (
    Coupling,
    NonFinite,
    Randomness,
    Session,
    SessionSettings,
    Verify,
)
from gradscope.errors import CertificateError, SpecError, located
from gradscope.model.problem import Problem, RowKind
from gradscope.model.ranks import Ranks
from gradscope.stages.chain import Chain, Chained
from gradscope.stages.labels import Mode

_PACKAGE = str(Path(__file__).parent)
_STREAMED = 512  # samples per part, if only a summary is asked for
_TOKEN_BYTES = 2**30  # size of dense token gradients per part; factored ones are not limited


class NonFiniteWarning(UserWarning):
    """Samples without a finite gradient were left out of an expectation."""


class LossInputWarning(UserWarning):
    """A loss gets the wrong kind of numbers, such as probabilities instead of logits."""


class UncopiedHandle:
    """A value that a model may hold: a copied model shares it, and a pickle stores None."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


class Scope(UncopiedHandle):
    """Per-sample gradients of a model, in its current mode.

    Nothing is attached to the model or its parameters. Both are left unchanged.

    Args:
        model: Any module. Gradients are taken with respect to its trainable parameters.
        loss: A name (`gradscope list losses`), `(outputs, targets) -> (n,)`, or a `model_loss`.
        parameters: Globs of parameter names; all trainable ones when None.
        backend: `auto`, or a name from `gradscope list backends`.
        verify: Which batches to prove: "audit" proves the first batch and audits some later ones,
            "first" only the first, "always" every batch, "never" no batch. Audits take about 5 % of
            the time of these calls. With "audit", a scope used as a context manager audits the
            last batch.
        coupling: What to do if a sample's loss depends on its batch. "refuse" raises. "own-loss"
            returns ∂Lᵢ/∂θ through the shared statistics, with backends loop and vmap; the batch is
            then never split, because the rows depend on it. "frozen" puts normalisation layers on
            their running statistics.
        nonfinite: How reducers handle samples whose gradient is not finite. "skip" leaves them out
            and warns, "fail" raises, "keep" includes them.
        labels: "data"; "sampled": drawn from the model's predictions with `seed`; or "exact": the
            expectation over all classes.
        seed: Seed of random choices: samples to compare, batches, labels.
        randomness: What to do if the model draws random numbers (dropout in train mode). "refuse"
            raises. "fixed" derives them from `seed`, call and sample: a sample has the same numbers
            in any batch and with any backend.
        compile: Compile gradient and reduction as one program if the model allows it; with backend
            `auto` only if it is also measured to be faster. `notes` says what was done.
        rows: "sample", or "token": one row for each position of a loss (n, t). The loss may also
            return a pair (losses, counted), both (n, t), where the booleans select positions.
            `positions` returns sample and position of each row. Every other n here is then the
            number of rows.
        group: An id for each sample of the data set, (N,) integers or texts. A row is then the sum
            of the gradients of all samples with one id. Rows are in ascending order of the ids.
            With rows="token", ids (N, t) for all positions are possible, such as the document of
            each token. Every other n here is then the number of groups, and `groups` returns their
            ids. A call with a part of the samples gives `index`.
        group_reduction: "sum", or "mean": the mean over the samples or tokens of a group.

    Attributes:
        session: The `Session` that evaluates and proves batches.

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
        randomness: Randomness = "refuse",
        rows: RowKind = "sample",
        group: Any = None,
        group_reduction: Reduction = "sum",
    ) -> None:
        settings = SessionSettings(
            parameters=parameters,
            backend=backend,
            verify=verify,
            coupling=coupling,
            nonfinite=nonfinite,
            labels=labels,
            seed=seed,
            compile=compile,
            randomness=randomness,
            rows=rows,
            group=None if group is None else group_reduction,
        )
        with located("group"):
            self._groups = None if group is None else GroupIds.of(group, group_reduction)
        self.session = Session(model, loss, settings)
        self._bound: dict[str, Chain] = {}
        self._prepare()

    @property
    def backend(self) -> str:
        """The backend in use; `auto` before the first batch."""
        return self.session.backend

    @property
    def certificate(self) -> Certificate | None:
        """The proof of the first batch (of the last batch with verify="always"), or None."""
        return self.session.certificate

    @property
    def auditor(self) -> Auditor:
        """The auditor; `auditor.audits` lists the audits."""
        return self.session.auditor

    @property
    def notes(self) -> list[str]:
        """Decisions that gradscope made, with reasons."""
        return self.session.notes

    @property
    def problem(self) -> Problem:
        """The model, its loss, and the parameters that gradients are taken for."""
        return self.session.problem

    def with_loss(self, loss: str | Callable[..., Tensor]) -> Self:
        """Return a scope with the same model and settings, and another loss."""
        made = object.__new__(type(self))
        made.session, made._bound, made._groups = self.session.with_loss(loss), {}, self._groups
        made._prepare()
        return made

    def _prepare(self) -> None:
        self.session.warn, self.session.auditor.window = _warn, SCOPE_WINDOW

    def evaluate(
        self,
        batch: Batch,
        request: Request = ROWS,
        *,
        ordinal: int | None = None,
        last: bool = False,
    ) -> Evaluation:
        """Return losses (n,) and gradients as blocks of a batch; see `engine.Session.evaluate`."""
        return self.session.evaluate(batch, request, ordinal=ordinal, last=last)

    def per_sample_gradients(
        self,
        inputs: Any,
        targets: Any = None,
        out: Mapping[str, Tensor] | None = None,
        *,
        index: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return {name: (n, *shape)}: each row is the gradient of one sample's own loss.

        For an empty batch (n = 0) the result is (0, *shape), and the model does not run.

        Args:
            inputs: A tensor, tuple or dict, sample axis first.
            targets: As `inputs`, or None.
            out: Buffers to write into, as an earlier call returned them.
            index: (n,) int64, the samples' positions in the data set; 0 to n-1 when None.
                Sampled labels and fixed random numbers depend on them.
        """
        self.session.labels.require_one()
        batch = self._rows_of(self._batch(inputs, targets, index, "per_sample_gradients"))
        for name, buffer in (out or {}).items():
            want = (len(batch), *self.problem.parameters[name].shape)
            if tuple(buffer.shape) != want:
                raise SpecError(
                    f"the buffer of {name} has shape {tuple(buffer.shape)}, but its rows {want}",
                    where="out",
                    remedy="Pass what an earlier call returned for as many samples, or no `out`.",
                )
        sharded = self.session.model_parallel
        if sharded is not None:
            if out is not None:
                raise SpecError("`out` does not support a sharded model", remedy="Leave `out` out.")
            return self.session.retry(lambda: sharded.rows(batch))
        return self.session.retry(lambda: self._rows(batch, out))

    def positions(self, inputs: Any, targets: Any = None) -> tuple[Tensor, Tensor]:
        """Return the sample (n,) and the position (n,) of each row, with rows="token".

        Args:
            inputs: A tensor, tuple or dict, sample axis first.
            targets: As `inputs`, or None.
        """
        if self._groups is not None:
            raise SpecError(
                "the rows are groups, which have no position", remedy="Use groups instead."
            )
        batch = Batch.of(inputs, targets, empty=True)
        rows = [self.session.rows_of(part) for part in self.parts(batch)]
        found = [row for row in rows if isinstance(row, Tokens)]
        if not found and self.session.settings.rows == "token":
            return batch.index, batch.index.clone()
        if not found:
            raise SpecError(
                "positions are defined for token rows only", remedy='Use Scope(rows="token").'
            )
        return torch.cat([row.samples for row in found]), torch.cat([row.position for row in found])

    def groups(
        self, inputs: Any, targets: Any = None, *, index: Tensor | None = None
    ) -> tuple[list[int | str], Tensor]:
        """Return the id of each row, and its number of samples or tokens (n,), with `group`.

        Args:
            inputs: A tensor, tuple or dict, sample axis first.
            targets: As `inputs`, or None.
            index: (n,), the samples' positions in the data set; see `per_sample_gradients`.
        """
        rows = self._rows_of(self._batch(inputs, targets, index, "groups"))
        if not isinstance(rows, Groups):
            raise SpecError("the scope has no groups", remedy="Use Scope(group=ids).")
        return decoded(rows.ids), rows.sizes

    def _rows(self, batch: Batch, out: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Return {name: (n, *shape)}; for a proved batch, also check the norms of the proof."""
        session = self.session
        gradients = session.evaluate(batch, Request(out=out)).gradients
        rows = gradients.dense(out)
        if not is_empty(batch) and session.settings.verify != "never" and session.last_is_proved:
            try:
                require_norms(session.backend, rows, gradients)
            except CertificateError as error:
                session.drop_backend(error)
                raise
        return rows

    def norms(
        self,
        inputs: Any,
        targets: Any = None,
        per: Literal["sample", "parameter"] = "sample",
        *,
        index: Tensor | None = None,
    ) -> Any:
        """Return the L2 norms of the per-sample gradients, in general without forming gradients.

        Args:
            inputs: A tensor, tuple or dict, sample axis first; evaluated in parts.
            targets: As `inputs`, or None.
            per: "sample" or "parameter".
            index: (n,), the samples' positions in the data set; see `per_sample_gradients`.

        Returns:
            (n,) over all parameters together, or {name: (n,)} with `per="parameter"`. (0,) for an
            empty batch.
        """
        if per not in ("sample", "parameter"):
            raise SpecError(f"per must be 'sample' or 'parameter', not {per!r}")
        self.session.labels.require_one()
        batch = self._batch(inputs, targets, index, "norms")
        sharded = self.session.model_parallel
        parts, request = self.parts(batch), Request(rows=False)

        def evaluated() -> list[Gradients]:
            if sharded is not None:
                every = sharded.evaluations(batch)
                return [evaluation.gradients for _, evaluation, own in every if own]
            return [
                self.evaluate(part, request, last=k == len(parts) > 1).gradients
                for k, part in enumerate(parts, start=1)  # with several parts, audit the last
            ]

        found = self.session.retry(evaluated)
        if per == "sample":
            return torch.cat([gradients.norms for gradients in found])
        return {
            name: torch.cat([g.squared_norms[name].sqrt() for g in found])
            for name in self.problem.parameters
        }

    def expectation(
        self, chain: Chained, inputs: Any, targets: Any = None, *, index: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return E[T(g)] over the samples: {name: (*shape)}, summed in the gradients' precision.

        Samples without a finite gradient are left out, with a `NonFiniteWarning`. For an empty
        batch, sums are zero (`clip:max_norm=1 | sum | noise:std=1` returns only noise), and means
        raise.

        Args:
            chain: For example "clip:max_norm=1.0 | mean"; a chain without a reducer ends with
                `mean`. Or a function that maps per-sample gradients {name: (n, *shape)} to a dict
                of that form, row by row. Or a list of strings and functions, such as [function,
                "mean | abs"].
            inputs: A tensor, tuple or dict, sample axis first; evaluated in parts.
            targets: As `inputs`, or None.
            index: (n,), the samples' positions in the data set; see `per_sample_gradients`.
        """
        return self.expectations([chain], inputs, targets, index=index)[0]

    def expectations(
        self,
        texts: Sequence[Chained],
        inputs: Any,
        targets: Any = None,
        *,
        index: Tensor | None = None,
    ) -> list[dict[str, Tensor]]:
        """Return the results of `expectation` for several chains, in one pass over the samples."""
        ranks, chains = self.problem.ranks, [*map(self._chain, texts)]
        asked = [chain.text for chain in chains]
        whole = self._batch(inputs, targets, index, f"expectations {asked}", ranks)
        sharded, ranks = self.session.model_parallel, self.problem.ranks

        def summed() -> tuple[list[dict[str, Tensor]], int]:
            if sharded is not None:
                for chain in chains:
                    require_for_model_parallel(chain)
                return sharded.expectations(chains, whole, self.session.settings.nonfinite)
            return self._expectations(chains, whole)

        with nullcontext() if ranks is None else ranks.raise_on_all():
            one_pass = ranks is None or all(chain.first_pass is None for chain in chains)
            found, skipped = self.session.retry(summed, again=one_pass)
        if skipped:
            warnings.warn(
                f"{skipped} samples have no finite gradient and are left out of the expectation",
                NonFiniteWarning,
                stacklevel=3,
            )
        return found

    def _expectations(
        self, chains: Sequence[Chain], whole: Batch
    ) -> tuple[list[dict[str, Tensor]], int]:
        """Return the result of each chain, and how many samples of this process were left out."""
        if not len(whole) and self.problem.ranks is None:
            states = [state_of_none(self.problem, chain) for chain in chains]
            return [c.result(state) for c, state in zip(chains, states, strict=True)], 0
        parts = self.parts(whole)
        chains = prepare_chains(self.session, chains, lambda: self.parts(whole))
        count = len(parts) if len(parts) > 1 else None  # with several parts, audit the last
        total, skipped = fold(self.session, parts, dict(enumerate(chains)), count=count)
        ranks = self.problem.ranks
        found: list[dict[str, Tensor]] = []
        for k, chain in enumerate(chains):
            merge_ranks(self.problem, total, k)
            lost = k not in total.states
            if lost and ranks is not None and not sum(ranks.all_gather(len(whole))):
                total.add({k: state_of_none(self.problem, chain)}, carry=False)
            elif lost:
                raise SpecError(
                    "no sample has a finite gradient, so there is no expectation",
                    remedy="Remove samples with NaN or infinity in inputs or losses.",
                )
            found.append(chain.finish(total.result(k, narrow=True)))
        return found, skipped

    def _batch(
        self,
        inputs: Any,
        targets: Any,
        index: Tensor | None,
        what: str,
        ranks: Ranks | None = None,
    ) -> Batch:
        """Return the samples of a call, numbered over all processes that share its result.

        Args:
            inputs: The inputs of the call.
            targets: The targets of the call.
            index: The index of the call, or None.
            what: A description of the call; it must be the same on every process.
            ranks: The processes; if None, the processes of a sharded model.
        """
        if self._groups is not None and index is None:
            with located("group"):
                self._groups.require_length(len(Batch.of(inputs, targets, empty=True)))
        ranks, empty = ranks or self.problem.model_parallel, self.problem.model_parallel is None
        if ranks is None:
            return Batch.of(inputs, targets, index, empty=empty)
        self.session.rebind_if_changed()
        make = partial(Batch.of, inputs, targets, index, empty=empty)
        return ranks.number_samples(make, what, given=index is not None)

    def close(self) -> None:
        """Release what the backend holds. The scope can be used again afterwards."""
        self.session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Close; audit the last batch first, unless it has an audit or an error is being raised."""
        self.session.__exit__(kind, *rest)

    def _chain(self, text: Chained) -> Chain:
        """Return a bound chain; keep it for later calls if it can be reused."""
        known = self._bound.get(text) if isinstance(text, str) else None
        if not (callable(text) or isinstance(text, Sequence)):
            what = f"a chain must be a text or a list of stages, not {type(text).__name__}"
            raise SpecError(what, where="chain", remedy='Write "clip:max_norm=1.0 | mean".')
        found = known or bind(text, reduced=True)
        if found.lasting:
            self._bound[found.text] = found
        return found

    def _rows_of(self, batch: Batch) -> Batch:
        """Return the rows of samples: samples, tokens or groups."""
        rows = self.session.rows_of(batch)
        with located("group"):
            return rows if self._groups is None or is_empty(rows) else self._groups.batch(rows)

    def parts(self, batch: Batch, most: int = _STREAMED) -> list[Batch]:
        """Split a batch into the parts in which it is evaluated, of at most `most` samples."""
        session = self.session
        if is_empty(batch):
            return [batch]
        if self._groups is not None:
            rows = self._rows_of(batch)
            assert isinstance(rows, Groups)
            return [*rows.split(_STREAMED)]
        each = max(1, min(most, _STREAMED) // session.labels.each(batch))
        step = len(batch) if session.settings.own_loss else each
        spans = range(0, len(batch), step)
        parts = [batch.select(slice(k, k + step)) for k in spans] if len(spans) > 1 else [batch]
        if session.settings.rows == "sample":
            return parts
        size = sum(p.nbytes for p in session.problem.parameters.values())
        found: list[Batch] = []
        for rows in map(session.rows_of, parts):
            most = len(rows) if session.factored_tokens else max(1, _TOKEN_BYTES // max(1, size))
            found += map(rows.select, torch.split(torch.arange(len(rows)), max(1, most)))
        return [part for part in found if len(part)] or found


def _warn(text: str) -> None:
    """Warn of a loss's inputs at the line outside of this package that is running."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, LossInputWarning, stacklevel=level)


def per_sample_gradients(
    model: nn.Module,
    loss: str | Callable[..., Tensor],
    inputs: Any,
    targets: Any = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Return {name: (n, *shape)} in one call; `options` are the arguments of `Scope`."""
    with Scope(model, loss, **options) as scope:
        return scope.per_sample_gradients(inputs, targets)


def norms(
    model: nn.Module,
    loss: str | Callable[..., Tensor],
    inputs: Any,
    targets: Any = None,
    per: Literal["sample", "parameter"] = "sample",
    **options: Any,
) -> Any:
    """Return the L2 norms of the per-sample gradients in one call; see `Scope.norms`."""
    with Scope(model, loss, **options) as scope:
        return scope.norms(inputs, targets, per)


def expectation(
    model: nn.Module,
    loss: str | Callable[..., Tensor],
    chain: Chained,
    inputs: Any,
    targets: Any = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Return E[T(g)] in one call; see `Scope.expectation`."""
    with Scope(model, loss, **options) as scope:
        return scope.expectation(chain, inputs, targets)
