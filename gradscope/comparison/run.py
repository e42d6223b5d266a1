"""`compare`: all backends compared with the float64 loop, on the same samples."""

import json
import math
import statistics
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from gradscope import markup
from gradscope.backends.base import Backend, Evaluate, backend_of, backends
from gradscope.blocks import ChosenVariant, Evaluation, Tuner, in_groups
from gradscope.comparison.agreement import (
    VAGUE,
    Oracle,
    ParameterAgreement,
    agreements,
    precision_of,
)
from gradscope.comparison.alternatives import EXPLAINED, MODAL, explain
from gradscope.comparison.mistakes import Mistake
from gradscope.core.batch import Batch, Tokens, arguments
from gradscope.core.groups import GroupIds, Groups, Reduction, decoded
from gradscope.core.precision import dtype_name
from gradscope.core.texts import count, listed, visible
from gradscope.engine.certificate import Answer, prove_samples
from gradscope.engine.session import Randomness
from gradscope.errors import (
    CertificateError,
    GradscopeError,
    RefusedError,
    SpecError,
    UnsupportedError,
    located,
)
from gradscope.model.locate import first_line, layer_of
from gradscope.model.problem import Loss, Problem, RowKind, double_precision
from gradscope.model.randomness import FixedRandomness, forked, seed_all
from gradscope.model.sample_axis import locating_lost_axis
from gradscope.process.memory import peak_memory, timed
from gradscope.process.stops import is_stop
from gradscope.scope import Scope
from gradscope.stages.losses import of_tokens, resolve
from gradscope.stats import html
from gradscope.stats.sections import (
    NONE,
    Column,
    Styled,
    Table,
    duration,
    index_and_name,
    numbers,
    plain_lines,
    short,
    size,
)

REFERENCE = "loop"
COMPILED = "vmap compiled"  # the label of `compiled`
_REPEATS = 3
_LINES = 12  # after this line, a printed comparison shortens explanations
_SCHEMA = {"schema": "gradscope.compare", "version": 1}
STATUS = {  # the status in words
    "agrees": Styled("agrees", "green"),
    "disagrees": Styled("DISAGREES", "bold red"),
    "refused": Styled("refused", "yellow"),
    "failed": Styled("FAILED", "bold red"),
}

Implementation = Callable[[nn.Module, Loss, Any, Any], Mapping[str, Any]]


@dataclass(frozen=True)
class BackendRow:
    """One backend, implementation or stored result."""

    backend: str  # its name or label
    status: str  # "agrees", "disagrees", "refused" (the model is not supported) or "failed"
    reason: str | None = None  # why it did not agree
    remedy: str | None = None  # what to do
    seconds: float | None = None  # for all gradients in the model's dtype, if measured
    peak_bytes: int | None = None  # peak memory above the memory in use before, if measured
    # one entry for each parameter; empty for a row that refused or failed
    parameters: tuple[ParameterAgreement, ...] = ()

    @property
    def worst(self) -> ParameterAgreement | None:
        """The parameter with the largest error; a parameter without numbers counts as infinite."""
        if not self.parameters:
            return None
        return max(self.parameters, key=distance)


@dataclass(frozen=True, repr=False)
class Comparison:
    """The result of `compare`."""

    agrees: bool  # whether no row disagrees or failed; rows that refused do not count
    samples: int  # n
    dtype: str  # the model's dtype, in which time and memory were measured
    baseline_seconds: float  # one plain forward and backward pass of the batch
    baseline_bytes: int | None  # its peak memory, if it can be measured
    # whether losses in the batch differ from losses in batches of one: the samples depend on each
    # other, or the model draws random numbers
    coupled: bool
    rows: tuple[BackendRow, ...]  # backends first, then implementations and stored results
    ways: tuple[ChosenVariant, ...] = ()  # the chosen kernel variants
    tokens: tuple[str, ...] | None = None  # SAMPLE:POSITION of each row, for rows of tokens
    groups: tuple[str, ...] | None = None  # the id of each row, for rows of groups

    def to_json(self) -> dict[str, Any]:
        """Return a document of plain JSON values. Numbers that are not finite become null."""
        plain = json.loads(TypeAdapter(Comparison).dump_json(self))
        return {**_SCHEMA, **plain, "ways": [one.to_json() for one in self.ways]}

    @property
    def noun(self) -> str:
        """The kind of row: sample, token or group."""
        return "group" if self.groups else "sample" if self.tokens is None else "token"

    def __repr__(self) -> str:
        """Return a row for each backend and the largest errors, in about twenty lines."""
        verdict = "agrees" if self.agrees else "DISAGREES"
        lines = [f"Comparison of {count(self.samples, self.noun)} in {self.dtype}: {verdict}"]
        table = plain_lines(self.table())
        lines += table[:_LINES]
        wrong = [row for row in self.rows if row.status != "agrees"]
        for k, row in enumerate(wrong):
            text = visible(f"{row.backend}: {row.reason or ''} {row.remedy or ''}".strip())
            if len(lines) > 2 * _LINES - 3 and k < len(wrong) - 1:
                lines.append(f"... and {len(wrong) - k} more rows that do not agree")
                break
            if len(lines) > _LINES:
                lines.append(textwrap.shorten(text, 100))
                continue
            told = textwrap.wrap(text, 100)
            lines += [*told[:4], *["..."] * (len(told) > 4)]
            if row.worst is not None and not row.worst.agrees:
                far = sorted(row.parameters, key=distance, reverse=True)
                far = [p for p in far if not p.agrees]
                lines += ["  " + line for line in plain_lines(parameter_errors(far[:3], self))]
                if len(far) > 3:
                    lines.append(f"  ... and {count(len(far) - 3, 'parameter')} more")
        if wrong:
            lines.append("All numbers are in .rows[k].parameters and .to_json().")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return a row for each backend, for a notebook."""
        title = f"{self.samples:,} {self.noun}s: {'agrees' if self.agrees else 'DISAGREES'}"
        reasons = [(row.backend, row.reason) for row in self.rows if row.reason is not None]
        return markup.document(title, html.table(self.table()), markup.facts(reasons))

    def table(self) -> Table:
        """Return a row for each backend."""
        rows, plain = self.rows, self.baseline_seconds
        times = [r.seconds / plain if r.seconds is not None and plain > 0 else None for r in rows]
        columns = [
            Column("status", [STATUS[r.status] for r in rows]),
            Column("time", [duration(r.seconds) for r in rows], rank=2),
            numbers("x plain backward", times, rank=1),
            Column("peak memory", [size(r.peak_bytes) for r in rows], rank=3),
            numbers("worst relative error", [r.worst.relative if r.worst else None for r in rows]),
        ]
        return Table(columns, "backend", [r.backend for r in rows])


def distance(parameter: ParameterAgreement) -> float:
    """Return the relative error of a parameter; infinite if it has no numbers."""
    return math.inf if parameter.relative is None else parameter.relative


def parameter_errors(wrong: Sequence[ParameterAgreement], comparison: Comparison) -> Table:
    """Return a row for each parameter that disagrees."""
    noun, names = comparison.noun, comparison.groups or comparison.tokens
    worst = [p.worst_sample for p in wrong]
    places = [NONE if k is None else index_and_name(k, names[k] if names else None) for k in worst]
    columns = [
        Column("relative error", [short(p.relative) for p in wrong]),
        Column("absolute error", [short(p.absolute) for p in wrong], rank=3),
        Column("cosine", [_precise(p.cosine) for p in wrong], rank=2),
        Column(f"worst {noun}", places, rank=1),
        Column("factor", [_precise(p.factor) for p in wrong]),
    ]
    return Table(columns, "parameter", [p.name for p in wrong])


def _precise(value: float | None) -> str:
    """Return a number with five digits."""
    return NONE if value is None else f"{value:.5g}"


@dataclass(frozen=True)
class _Case:
    """The input of every backend: the user's problem, and a float64 copy with its oracle."""

    problem: Problem
    batch: Batch
    exact: Problem
    wide: Batch
    oracle: Oracle

    @classmethod
    def of(cls, problem: Problem, batch: Batch) -> "_Case":
        exact, wide = problem.converted(torch.float64), batch.in_double_precision()
        with double_precision(), exact.state.restoring():
            return cls(problem, batch, exact, wide, Oracle.of(exact, wide))


@torch.enable_grad()  # the caller may use no_grad
def compare(
    model: nn.Module,
    loss: str | Loss,
    inputs: Any,
    targets: Any = None,
    backends: Sequence[str] = ("loop", "hooks", "vmap", "expand"),
    parameters: str | list[str] | None = None,
    against: Mapping[str, Implementation | Mapping[str, Any]] | None = None,
    randomness: Randomness = "refuse",
    seed: int = 0,
    index: Tensor | None = None,
    rows: RowKind = "sample",
    group: Any = None,
    group_reduction: Reduction = "sum",
) -> Comparison:
    """Compare backends, and implementations of yours, with the float64 loop.

    Exactness is checked for every sample, in two orders, on a float64 copy of the model, because
    rounding can hide or mimic a mistake in lower precision. In the model's dtype, every sample is
    compared with a batch of one, and time and memory are measured. All gradients of the batch are
    in memory in float64, so choose few samples.

    Args:
        model: The model, used in its current mode. It is not changed.
        loss: A name or a callable.
        inputs: A tensor, tuple or dict of tensors (n, ...).
        targets: Targets in the same forms, or None.
        backends: Names of backends.
        parameters: Globs that select parameters by name.
        against: {label: implementation}. An implementation is a function
            `(model, loss, inputs, targets) -> {name: (n, *shape)}`, called with a float64 copy,
            or a stored result {name: (n, *shape)}.
        randomness: "fixed" for a model that draws random numbers; see `Scope`.
        seed: The seed of the random numbers.
        index: (n,) int64, the samples' positions in their data set, which select random numbers.
        rows: The kind of row, "sample" or "token"; see `Scope`.
        group: The id of each sample or position, for a row for each id; see `Scope`. A stored
            result has the rows in ascending order of the ids.
        group_reduction: "sum" or "mean"; see `Scope`.

    Raises:
        SpecError: A name is unknown or used twice, or there is nothing to compare.
        RefusedError: The loop fails, because the model does not run on one sample alone.
    """
    if not isinstance(against, Mapping | None):
        what = f"it must be a dict {{label: implementation}}, not a {type(against).__name__}"
        raise SpecError(what, where="against", remedy='Write against={"mine": ...}.')
    others = dict(against or {})
    chosen = _chosen([backends] if isinstance(backends, str) else backends, others, rows)
    fixed = FixedRandomness(seed) if randomness == "fixed" else None
    problem = _problem(model, loss, parameters, rows, fixed)
    batch = inputs if isinstance(inputs, Groups) else Batch.of(inputs, targets, index)
    batch = batch.detached().to(problem.device, None)
    if rows == "token" and not isinstance(batch, Groups):
        batch = Tokens.among(batch, problem.position_mask(batch)[0])
    if group is not None:
        with located("group"):
            batch = GroupIds.of(group, group_reduction).batch(batch)
    if isinstance(batch, Groups):
        _require_stored(others)
    with locating_lost_axis(problem, batch):
        case = _Case.of(problem, batch)
        seconds, peak = measure(lambda: _backward(problem, batch), problem.device)
    with Tuner.remembering().active() as tuner:
        found = [_backend_row(name, backend, case) for name, backend in chosen.items()]
    found += [_other_row(label, other, case) for label, other in others.items()]
    return Comparison(
        agrees=all(row.status in ("agrees", "refused") for row in found),
        samples=len(batch),
        dtype=dtype_name(problem.dtype),
        baseline_seconds=seconds,
        baseline_bytes=peak,
        coupled=case.oracle.coupled,
        rows=tuple(found),
        ways=tuple(tuner.chosen.values()),
        tokens=tuple(batch.row_names) if isinstance(batch, Tokens) else None,
        groups=tuple(map(str, decoded(batch.ids))) if isinstance(batch, Groups) else None,
    )


def _require_stored(others: Mapping[str, Any]) -> None:
    """Raise if groups are compared with an implementation, which returns rows of samples."""
    functions = [label for label, other in others.items() if not isinstance(other, Mapping)]
    if functions:
        raise SpecError(
            f"{functions[0]!r} computes rows of samples, and the rows are groups",
            where="against",
            remedy="Compare it without group. Or give its rows of groups as a stored result.",
        )


def _problem(
    model: nn.Module,
    loss: str | Loss,
    parameters: str | list[str] | None,
    rows: RowKind,
    fixed: FixedRandomness | None,
) -> Problem:
    """Return the problem to differentiate; `fixed` draws its random numbers."""
    own = resolve(loss) if rows == "sample" else of_tokens(resolve(loss))
    problem = replace(Problem.of(model, own, parameters), rows=rows)
    return problem if fixed is None else problem.with_fixed_randomness(fixed)


def _backward(problem: Problem, batch: Batch) -> None:
    """Run a plain forward and backward pass."""
    total = problem.losses(batch.computed).sum()
    if total.requires_grad:
        torch.autograd.grad(total, list(problem.parameters.values()), allow_unused=True)


def _chosen(names: Sequence[str], others: Mapping[str, Any], rows: RowKind) -> dict[str, Backend]:
    """Return {name: backend}; raise if a name or label is wrong."""
    chosen = {name: backend_of(name, rows) for name in names}
    taken = [label for label in others if label in chosen]
    if taken:
        raise SpecError(
            f"{taken[0]!r} is the name of a backend", where="against", remedy="Use another label."
        )
    for label, other in others.items():
        if not (isinstance(other, Mapping) or callable(other)):
            raise SpecError(
                f"{label!r} is neither a function nor a stored result {{name: (n, *shape)}}, but "
                f"a {type(other).__name__}",
                where="against",
            )
    if not others and set(chosen) <= {REFERENCE}:
        raise SpecError(
            "there is nothing to compare with the loop",
            where="backends",
            remedy=f"Add a backend: {', '.join(backends.names())}.",
        )
    return chosen


def _in_every_order(name: str, evaluate: Evaluate, case: _Case) -> BackendRow:
    """Compare a backend in two orders of the samples, because stored state may be wrong."""
    n = len(case.wide)
    shuffled = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    row = _judged(name, agreements(_evaluated(evaluate, case.wide).gradients.dense(), case.oracle))
    if n == 1 or row.status == "disagrees":
        return row
    found = _evaluated(evaluate, case.wide.select(shuffled)).gradients.dense()
    back = shuffled.argsort()
    again = _judged(name, agreements({k: g[back] for k, g in found.items()}, case.oracle))
    if again.status == "agrees":
        return row
    return replace(again, reason=f"with the samples in another order: {again.reason}")


def _evaluated(evaluate: Evaluate, batch: Batch) -> Evaluation:
    """Return the evaluation of the rows of a batch: samples, tokens or groups."""
    found = evaluate(batch.computed)
    if not isinstance(batch, Groups):
        return found
    return in_groups(found, batch.sizes, batch.index, batch.shares)


def _backend_row(name: str, backend: Backend, case: _Case) -> BackendRow:
    """Check a backend in float64; then measure it, and compare each sample with a batch of one."""
    problem, batch = case.problem, case.batch
    try:
        with double_precision(), case.exact.state.restoring(), backend(case.exact) as evaluate:
            row = _in_every_order(name, evaluate, case)
    except Exception as error:
        return _stopped(name, error, case.exact.model)
    if row.status == "disagrees":
        return row
    try:
        with problem.state.restoring(), backend(problem) as evaluate:
            samples = batch.computed
            evaluation = evaluate(samples)
            if name != REFERENCE:
                every = Answer(problem, name, samples, evaluation, singles=len(samples))
                prove_samples(every)
            del evaluation
            seconds, peak = measure(
                lambda: _evaluated(evaluate, batch).gradients.dense(), problem.device
            )
    except CertificateError as error:
        reason = f"only in {problem.precision}: {error.what}".replace("torch.", "")
        return replace(row, status="disagrees", reason=reason)
    except RefusedError as error:
        return _stopped(name, error, problem.model)
    except Exception:  # it may not support the dtype
        return row
    return replace(row, seconds=seconds, peak_bytes=peak)


def _other_row(label: str, other: Implementation | Mapping[str, Any], case: _Case) -> BackendRow:
    if isinstance(other, Mapping):
        return _compared(label, other, case)
    device = case.problem.device
    copy = case.exact.converted(None)  # it may change its copy

    def called(problem: Problem, batch: Batch) -> Any:
        with torch.enable_grad(), forked(device):
            own = batch.map(torch.clone)  # it may write to the inputs
            return other(problem.model, problem.loss, arguments(own.inputs), own.targets)

    before = ModelSnapshot.of(copy.model)
    try:
        with double_precision():
            found = called(copy, case.wide)
    except BaseException as error:  # including sys.exit
        if is_stop(error):
            raise
        return _stopped(label, error, copy.model)
    if not isinstance(found, Mapping):
        reason = f"it returned {type(found).__name__}, not a dict {{name: (n, *shape)}}"
        return BackendRow(label, "failed", reason)
    row = _compared(label, found, case)
    if row.status == "failed":
        return row
    if row.status == "disagrees":
        changes = before.changes(copy.model)
        try:
            if _is_random(called, case, found):
                changes.append("two calls gave different gradients: it uses random numbers")
        except BaseException as error:
            if is_stop(error):
                raise
        if changes:
            remedy = f"Your function changed the copy of the model: {'; '.join(changes)}."
            row = replace(row, remedy=remedy)
    spare = case.problem.converted(None)
    try:
        seconds, peak = measure(lambda: called(spare, case.batch), device)
    except BaseException as error:
        if is_stop(error):
            raise
        return row  # it may not support the dtype
    return replace(row, seconds=seconds, peak_bytes=peak)


def _is_random(
    called: Callable[[Problem, Batch], Any], case: _Case, found: Mapping[str, Any]
) -> bool:
    """Whether a second call with different random numbers gives different gradients."""
    copy = case.exact.converted(None)
    with double_precision(), forked(case.problem.device):
        seed_all(int(torch.randint(2**31, ())))
        again = called(copy, case.wide)
    return any(
        k in again and not torch.allclose(torch.as_tensor(again[k]), torch.as_tensor(v), atol=0.0)
        for k, v in found.items()
    )


@dataclass(frozen=True)
class ModelSnapshot:
    """The parts of a model that a function may change."""

    training: Mapping[str, bool]  # by layer
    required: Mapping[str, bool]  # whether a parameter requires a gradient
    values: Mapping[str, Tensor]  # parameters and buffers, by name

    @classmethod
    def of(cls, model: nn.Module) -> "ModelSnapshot":
        """Return the present state of a model."""
        named = dict(model.named_parameters())
        return cls(
            {k: m.training for k, m in model.named_modules()},
            {k: p.requires_grad for k, p in named.items()},
            {k: t.detach().clone() for k, t in (named | dict(model.named_buffers())).items()},
        )

    def changes(self, model: nn.Module) -> list[str]:
        """Return the differences between then and now, in words."""
        now = ModelSnapshot.of(model)
        found = []
        for flag, mode in ((True, "training"), (False, "eval")):
            layers = [k for k, on in now.training.items() if on == flag != self.training.get(k, on)]
            kinds = {k: type(model.get_submodule(k)).__name__ for k in layers if k}
            modal = [k for k in kinds if isinstance(model.get_submodule(k), MODAL)]
            names = listed([f"{k!r} ({kinds[k]})" for k in modal or kinds], 3)
            if "" in layers:
                found.append(f"it left the model in {mode} mode" + f": layer {names}" * bool(modal))
            elif layers:
                found.append(f"it left layer {names} in {mode} mode")
        changed = [
            k
            for k, t in now.values.items()
            if k in self.values and not torch.equal(t.nan_to_num(), self.values[k].nan_to_num())
        ]
        if changed:
            found.append(f"it changed the values of {listed(changed, 3)}")
        frozen = [k for k, on in self.required.items() if on and not now.required.get(k, on)]
        if frozen:
            verb = "requires" if len(frozen) == 1 else "require"
            found.append(f"{listed(frozen, 3)} no longer {verb} a gradient")
        return found


def _compared(label: str, found: Mapping[str, Any], case: _Case) -> BackendRow:
    """Compare gradients from a user or a library; their names and values may be wrong."""
    model = case.exact.model
    aliases = {id(p): k for k, p in case.exact.parameters.items()}
    every = dict(model.named_parameters(remove_duplicate=False))
    names = {k: aliases.get(id(p), k) for k, p in every.items()}
    extra = [str(k) for k in found if k not in names]
    # a tied parameter has several names; its first name comes last, so that it wins
    known = sorted((k for k in found if k in names), key=lambda k: names[k] == k)
    try:
        rows = agreements({names[k]: found[k] for k in known}, case.oracle)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = f"a value is not an array of numbers: {first_line(error)}"
        return BackendRow(label, "failed", reason)
    row = _judged(label, _explained(found, names, rows, case))
    if not extra:
        return row
    unknown = f"unknown parameters: {', '.join(extra[:5])}{', ...' if len(extra) > 5 else ''}"
    reason = unknown if row.reason is None else f"{row.reason}; {unknown}"
    return replace(row, status="disagrees", reason=reason)


def _explained(
    found: Mapping[str, Any],
    names: Mapping[str, str],
    rows: tuple[ParameterAgreement, ...],
    case: _Case,
) -> tuple[ParameterAgreement, ...]:
    """Replace vague diagnoses by explanations from alternatives computed with the model."""
    values = {names[k]: torch.as_tensor(found[k]).detach() for k in found if k in names}
    values = {k: v if v.layout == torch.strided else v.to_dense() for k, v in values.items()}
    kinds = {
        row.name: row.kind
        for row in rows
        if row.kind in EXPLAINED
        and not isinstance(case.batch, Groups)
        and not values[row.name].is_complex()
        and bool(values[row.name].isfinite().all())
    }
    if not kinds:
        return rows
    wide = {k: values[k].to(case.exact.device, torch.float64) for k in kinds}
    tolerances = {k: precision_of(values[k].dtype).tolerance for k in kinds}
    mistakes: dict[str, Mistake] = {}
    with suppress(GradscopeError), double_precision():  # the model may not run in other modes
        mistakes = explain(case.exact, case.wide, case.oracle, wide, kinds, tolerances)
    explained = [
        replace(row, **mistakes[row.name]._asdict()) if row.name in mistakes else row
        for row in rows
    ]
    if any(row.kind in VAGUE for row in explained):  # a few numbers may fit by chance
        more = "; other parameters do not have this relation"
        explained = [
            replace(row, kind="unknown", meaning=row.meaning + more)
            if row.kind == "row_factors"
            else row
            for row in explained
        ]
    return tuple(explained)


def _judged(label: str, parameters: tuple[ParameterAgreement, ...]) -> BackendRow:
    """Return the row of an implementation, with the most common reason for disagreement."""
    wrong = [p for p in parameters if not p.agrees]
    if not wrong:
        return BackendRow(label, "agrees", parameters=parameters)
    meaning, count = Counter(p.meaning for p in wrong).most_common(1)[0]
    names = [p.name for p in wrong if p.meaning == meaning]
    shown = ", ".join(names[:3]) + (", ..." if count > 3 else "")
    which = "all parameters" if count == len(parameters) > 1 else shown
    rest = f"; {len(wrong) - count} more for other reasons" if count < len(wrong) else ""
    meaning = meaning.rstrip(".")
    return BackendRow(label, "disagrees", f"{which}: {meaning}{rest}", parameters=parameters)


def _stopped(label: str, error: BaseException, model: nn.Module) -> BackendRow:
    """Return the row of a backend or implementation that raised."""
    if isinstance(error, GradscopeError):
        status = "refused" if isinstance(error, RefusedError) else "failed"
        return BackendRow(label, status, error.head, error.remedy)
    where = layer_of(error, model)
    reason = first_line(error) if where is None else f"{where}: {first_line(error)}"
    return BackendRow(label, "failed", reason)


def measure(
    call: Callable[[], object], device: torch.device, slow: float = 2.0, very_slow: float = 10.0
) -> tuple[float, int | None]:
    """Return (seconds, peak bytes above the start) of `call`.

    The first call warms up. A second call measures memory. The time is the median of three more
    calls. If the first call takes more than `slow` seconds, the second call also gives the time. If
    it takes more than `very_slow` seconds, it is the only call.
    """

    def watched() -> tuple[float, int | None]:
        with peak_memory(device) as peak:
            seconds = timed(call, device)[0]
        return seconds, peak[0] if peak else None

    warm, peak = watched()
    if warm > very_slow:
        return warm, peak
    seconds, peak = watched()
    if warm > slow:
        return seconds, peak
    return statistics.median(timed(call, device)[0] for _ in range(_REPEATS)), peak


def compiled(parameters: Sequence[str] | None = None) -> Implementation:
    """Return the compiled backend as an implementation: compiled once for each model.

    Args:
        parameters: Globs that select parameters by name; by default all trainable parameters.
    """
    scopes: dict[int, Scope] = {}  # by the model's id; a scope keeps its model alive
    globs = None if parameters is None else list(parameters)

    def rows(model: nn.Module, loss: Loss, inputs: Any, targets: Any) -> dict[str, Tensor]:
        scope = scopes.get(id(model))
        if scope is None:
            scope = scopes[id(model)] = Scope(model, loss, globs, "vmap", compile=True)
            scope.per_sample_gradients(inputs, targets)  # proved, then compiled
        if not scope.session.compiles:
            remedy = "Compare without `compile`."
            raise UnsupportedError(scope.notes[-1], remedy=remedy)
        return scope.per_sample_gradients(inputs, targets)

    return rows
