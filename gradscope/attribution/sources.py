"""Sources of the gradients of training samples and queries: read from a file, or computed.

A source can be iterated any number of times. Samples whose gradient is not finite are left out of
the iteration. They stay in the table, where `finite` is False.
"""

import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gradscope.attribution.products import GradientBatch
from gradscope.blocks import Gradients, wide
from gradscope.blocks.base import as_rows
from gradscope.config import RunSpec, Shard, resolve
from gradscope.core.batch import Batch, Tokens
from gradscope.core.grammar import parse
from gradscope.core.texts import noun_of
from gradscope.engine.chains import bind
from gradscope.engine.fold import fold, prepare_chains, usable
from gradscope.engine.session import Session
from gradscope.errors import ResultFileError, SpecError
from gradscope.process.memory import release_freed_memory
from gradscope.run import Job, plan, prepare
from gradscope.run.budget import samples_busy
from gradscope.run.execute import batches, samples_of, table_of
from gradscope.run.overlap import BatchSize
from gradscope.scope import Scope
from gradscope.stages.chain import Chain
from gradscope.stages.losses import options
from gradscope.stages.reducers.base import reducers
from gradscope.storage import GradientFile, StoredChain, find_chain, open_file, stored_gradients

_SAME = {
    "second_moment": ("square|mean",),
    "kfac:bias=column": ("kfac:positions=mean,bias=column",),
}
_READ = 2**26  # bytes of rows read at a time
_GRAPH = 2**25  # on a CPU, bytes of autograd graph per thread: the passes take most of the memory
COLUMNS = (  # the columns of a sample table that a score file keeps
    *("index", "loss", "norm", "finite", "sample", "position", "target", "prediction", "margin"),
    *("id", "size", "truncation"),
)

Table = dict[str, Tensor]  # columns (n,) by name; `id` may be UTF-8 (n, w) uint8


@dataclass(frozen=True)
class SourceFacts:
    """Facts about a source: they are recorded, and two sources must agree on most of them."""

    name: str  # file or run
    chain: str  # the chain applied to each gradient
    parameters: Mapping[str, tuple[int, ...]]
    digests: Mapping[str, Any]  # SHA-256: checkpoint, model, dataset
    loss: Mapping[str, Any]  # its name and options
    spec: Mapping[str, Any] | None = None  # the run, if any
    rows: str = "sample"  # the kind of row that has a gradient: sample, token or group

    @property
    def measured(self) -> str:
        """The chain for queries: without Adam's step, which applies to training samples only."""
        stages = parse(self.chain)
        stages = stages[1:] if stages[0].name == "adam" else stages
        return " | ".join(map(str, stages)) or "identity"


class Part(NamedTuple):
    """The samples of a shard."""

    shard: Shard
    start: int  # the first sample, as a row of all shards
    total: int  # the number of samples of all shards
    members: int  # the same; the number of members of all groups, if the rows are groups

    def alone(self, chain: str, where: str) -> SpecError:
        """Return the error if a shard needs the result of a chain over all samples."""
        return SpecError(
            f"the curvature needs {chain} over all samples, and shard {self.shard} computes some",
            where=where,
            remedy=f"Give a file with {chain!r} as `factors` (docs/attribution.md, Many workers: "
            "it can be computed in shards, too). Or start the workers with torchrun, which compute "
            'it together. Or use curvature="identity".',
        )


class GradientSource(ABC):
    """Samples with their gradients."""

    facts: SourceFacts
    n: int  # the number of samples, finite or not
    cheap: ClassVar[bool]  # whether a second iteration costs little
    part: "Part | None" = None  # the place of the samples among all, if they are a shard's

    @property
    def total(self) -> int:
        """The number of samples of all shards, finite or not."""
        return self.n if self.part is None else self.part.total

    @property
    def width(self) -> int:
        """The number of entries of a row."""
        return sum(map(prod, self.shapes().values()))

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each entry of a row."""

    @abstractmethod
    def table(self, stop: int | None = None) -> Table:
        """Return the columns (stop,): index, loss, norm, finite; target, id, ... if known."""

    def count(self) -> int:
        """Return the number of finite samples, or of the members of finite groups; at least 1.

        For a shard, it is the number of all shards' samples, finite or not. `merge_scores` corrects
        the scores.
        """
        if self.part is not None:
            return self.part.members
        table = self.table()
        finite = table["finite"]
        return max(1, int(table["size"][finite].sum() if "size" in table else finite.sum()))

    @abstractmethod
    def batches(self) -> Iterator[GradientBatch]:
        """Yield the finite samples, in order."""

    def all_batches(self) -> Iterator[GradientBatch]:
        """Yield the finite samples of all shards, in order.

        Raises:
            SpecError: The gradients are computed, and this process computes a shard.
        """
        return self.batches()

    def stores(self, chain: str) -> bool:
        """Whether the result of a chain with a reducer is stored."""
        return False

    @abstractmethod
    def aggregates(self, chains: Sequence[str]) -> list[dict[str, Tensor]]:
        """Return the results of chains with reducers over the samples of all shards.

        Raises:
            SpecError: The gradients are computed, and this process computes a shard.
        """


class FileSource(GradientSource):
    """The rows of a chain in a result file."""

    cheap = True

    def __init__(self, file: GradientFile, chain: str | None, shard: Shard | None = None) -> None:
        rows = range(file.n) if shard is None else shard.rows(range(file.n), 1)
        self._file, self.n, self._own = file, len(rows), slice(rows.start, rows.stop)
        self._rows = _chosen(file, chain)
        self._checked = torch.zeros(file.n, dtype=torch.bool)  # rows known to be finite or not
        digests = file.run.get("digests", {})
        self.facts = SourceFacts(
            name=str(file.path),
            chain=self._rows.text,
            parameters=file.parameters,
            digests={k: digests.get(k) for k in ("checkpoint", "model", "dataset", "stages")},
            loss=file.run.get("loss", {}),
            spec=file.run.get("spec"),
            rows=noun_of(file.run),
        )
        if shard is not None:
            sizes = self._table.get("size")
            members = file.n if sizes is None else int(sizes.sum())
            self.part = Part(shard, rows.start, file.n, members)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: array.shape[1:] for name, array in self._rows.items()}

    def table(self, stop: int | None = None) -> Table:
        return {name: column[self._own][:stop] for name, column in self._table.items()}

    @cached_property
    def _table(self) -> Table:
        columns = {k: v for k, v in self._file.samples.items() if k in COLUMNS}
        found = {k: sample_column(v) for k, v in columns.items()}
        found["finite"] = found["finite"].bool()
        return found

    def batches(self) -> Iterator[GradientBatch]:
        return self._batches(self._own)

    def all_batches(self) -> Iterator[GradientBatch]:
        return self._batches(slice(0, self._file.n))

    def _batches(self, own: slice) -> Iterator[GradientBatch]:
        finite = self._table["finite"]
        rows = own.start + np.flatnonzero(finite[own])
        for places, gradients in stored_gradients(self._rows, rows, _READ):
            kept = finite[places]
            if not self._checked[places].all():  # a stage may have overflowed
                kept = finite[places] = _finite_rows(gradients)
                self._checked[places] = True
            if bool(kept.all()):
                yield GradientBatch(places - own.start, gradients)
            elif bool(kept.any()):
                yield GradientBatch(places[kept] - own.start, gradients.select(kept))

    def stores(self, chain: str) -> bool:
        return stored_result(self._file, chain) is not None

    def aggregates(self, chains: Sequence[str]) -> list[dict[str, Tensor]]:
        found = {chain: stored_result(self._file, chain) for chain in chains}
        if "mean" in found and found["mean"] is None:
            found["mean"] = self._mean()
        missing = [chain for chain, result in found.items() if result is None]
        if missing and self.part is not None:
            raise self.part.alone(missing[0], self.facts.name)
        if missing:
            own = {"transform": ("identity",), "shard": None, "backend": "auto"}  # knows factors
            job = prepare(training_run(self._file).computing(**own))
            source = job_source(job, f"the run of {self._file.path}")
            require_same(self.facts, source.facts)
            found |= dict(zip(missing, source.aggregates(missing), strict=True))
        return [result for result in found.values() if result is not None]

    def _mean(self) -> dict[str, Tensor]:
        """Return the mean of the rows in the file."""
        count, found = 0, dict[str, Tensor]()
        for batch in self.batches():
            count += len(batch.places)
            for name, block in batch.gradients.items():
                total = wide(block).weighted_sum()
                found[name] = found[name].add_(total) if name in found else total
        return {name: total / count for name, total in found.items()}


def _finite_rows(gradients: Gradients) -> Tensor:
    """Return whether all numbers of a row are finite (n,)."""
    if gradients.has_finite_bounds():
        return torch.ones(gradients.n, dtype=torch.bool)
    every = [as_rows(block.dense()).isfinite().all(1) for block in gradients.values()]
    return torch.stack(every).all(0)


class SessionSource(GradientSource):
    """Samples whose gradients are computed in each iteration, and not stored."""

    cheap = False

    def __init__(
        self,
        session: Session,  # computes the gradients
        chain: Chain,  # applied to each gradient
        walk: Callable[[], Iterable[Batch]],  # starts an iteration over all batches
        table: Callable[..., Table],  # makes the table from a batch and its evaluation
        n: int,
        facts: SourceFacts,
        part: Part | None = None,
    ) -> None:
        self.facts, self.n, self.part = facts, n, part
        self._session, self._walk, self._table_of = session, walk, table
        self._chain = chain
        self._ready: Chain | None = None
        self._seen: list[Table] = []

    def shapes(self) -> dict[str, tuple[int, ...]]:
        found = dict(self.facts.parameters)
        for stage in parse(self._chain.text):
            if stage.name == "project":
                dim = int(stage.arguments["dim"])
                if stage.arguments.get("per") != "parameter":
                    return {"project": (dim,)}
                found = {name: (min(dim, prod(shape)),) for name, shape in found.items()}
        return found

    @property
    def _rows_seen(self) -> int:
        return sum(len(one["index"]) for one in self._seen)

    def table(self, stop: int | None = None) -> Table:
        wanted = self.n if stop is None else stop
        if self._rows_seen < wanted:
            for _ in self.batches():
                pass
        names = self._seen[0]
        return {name: joined_columns([one[name] for one in self._seen])[:wanted] for name in names}

    def batches(self) -> Iterator[GradientBatch]:
        session = self._session
        if self._ready is None:
            self._ready = prepare_chains(session, [self._chain], self._walk)[0]
        # norms cost much: the table is made once
        known = self.table()["finite"] if self._rows_seen == self.n else None
        chain, start = self._ready, 0
        self._seen = self._seen if known is not None else []
        for batch in self._walk():
            stop = start + len(batch)
            evaluation = session.evaluate(batch, last=stop == self.n)
            if known is None:
                self._seen.append(self._table_of(batch, evaluation))
            finite = self._seen[-1]["finite"].cpu() if known is None else known[start:stop]
            kept = usable(session, batch, evaluation)
            if kept is not None:
                yield GradientBatch(torch.arange(start, stop)[finite], chain.rows(*kept))
            start = stop

    def all_batches(self) -> Iterator[GradientBatch]:
        if self.part is not None:
            raise self.part.alone("the gradients", self.facts.name)
        return self.batches()

    def aggregates(self, chains: Sequence[str]) -> list[dict[str, Tensor]]:
        if self.part is not None:
            raise self.part.alone(chains[0], self.facts.name)
        session, seen = self._session, list[Table]()
        add = None if self._rows_seen == self.n else lambda *row: seen.append(self._table_of(*row))
        with session.tuner.active():
            bound = prepare_chains(session, [bind(chain) for chain in chains], self._walk)
            total, _ = fold(session, self._walk(), dict(enumerate(bound)), add)
        self._seen = seen or self._seen
        release_freed_memory()  # products of scores need blocks of other sizes
        found = [bound[k].finish(total.result(k)) for k in sorted(total.states)]
        if len(found) < len(chains):
            raise SpecError("no sample has a finite gradient", where=self.facts.name)
        return found


def job_source(job: Job, name: str) -> SessionSource:
    """Return the samples of a run, with the best of its chains that keep rows (`best_rows`)."""
    every = {chain.text: chain for chain in job.chains if chain.reducer is None}
    chain = every[best_rows(every)] if every else bind("identity")
    size = BatchSize(samples_at_a_time(job), fixed=job.session.settings.own_loss)
    return _job_source(job, name, chain, len(job.rows), lambda: batches(job, size))


def samples_at_a_time(job: Job) -> int:
    """Return the number of samples whose gradients are computed together."""
    asked = replace(job, chains=(bind("norm"),))  # dense rows are formed in pieces
    return plan(asked, busy=_busy(job.session)).batch_size


def _busy(session: Session) -> int:
    """Return the bytes of autograd graph per thread: little, or half of the model."""
    return max(_GRAPH, sum(p.nbytes for p in session.problem.parameters.values()) // 2)


def selected_source(job: Job, name: str, places: Tensor) -> SessionSource:
    """Return the full gradients of the samples or tokens in the rows `places` (n,) of a run.

    Raises:
        SpecError: A sample's gradient depends on its batch (own-loss coupling).
    """
    if job.session.settings.own_loss:
        raise SpecError(
            "`refine` cannot be combined with own-loss coupling: a sample's gradient then depends "
            "on its whole batch",
            where=name,
            remedy="Leave `refine` out.",
        )
    chosen, data = torch.arange(job.rows.start, job.rows.stop)[places], job.dataset
    selected = replace(job, rows=range(len(chosen)))
    used = chosen
    if job.groups is not None:
        selected = replace(selected, groups=job.groups.some(chosen))
    else:
        tokens, used = (None, chosen) if job.tokens is None else job.tokens.some(chosen)
        inner = replace(data, chosen=used if data.chosen is None else data.chosen[used])
        selected = replace(selected, dataset=inner, tokens=tokens)

    def walk() -> Iterator[Batch]:
        for batch in batches(selected, BatchSize(job.batch_size)):
            own = {"sample_index": used[batch.sample_index]} if isinstance(batch, Tokens) else {}
            yield replace(batch, index=chosen[batch.index.cpu()].to(batch.index.device), **own)

    return _job_source(job, name, bind("identity"), len(chosen), walk)


def _job_source(
    job: Job, name: str, chain: Chain, n: int, walk: Callable[[], Iterable[Batch]]
) -> SessionSource:
    record = job.record()
    run = (job.digests, record["loss"], record["spec"], job.noun)
    facts = SourceFacts(name, chain.text, job.shapes, *run)
    part = None
    if job.shard is not None:
        members = len(job.run_rows) if job.groups is None else len(job.groups.members)
        part = Part(job.shard, job.rows.start - job.run_rows.start, len(job.run_rows), members)
    return SessionSource(job.session, chain, walk, partial(samples_of, job), n, facts, part)


def scope_source(name: str, scope: Scope, inputs: Any, targets: Any = None) -> SessionSource:
    """Return samples or tokens in memory; the scope computes their gradients."""
    if not isinstance(scope, Scope):
        what = f"the first of three is a {type(scope).__name__}, not a Scope"
        remedy = "Give (gradscope.Scope(model, loss), inputs, targets)."
        raise SpecError(what, where=name, remedy=remedy)
    session, whole = scope.session, Batch.of(inputs, targets)
    loss = scope.problem.loss
    described = {"name": getattr(loss, "__name__", type(loss).__name__), **options(loss)}
    settings = session.settings
    noun = settings.rows if settings.group is None else "group"
    shapes = {name: tuple(p.shape) for name, p in scope.problem.parameters.items()}
    most = samples_busy(session, whole, _busy(session))
    return SessionSource(
        session,
        bind("identity"),
        lambda: scope.parts(whole, most),
        partial(table_of, session),
        len(whole) if noun == "sample" else sum(map(len, scope.parts(whole))),
        SourceFacts(name, "identity", shapes, {}, described, rows=noun),
    )


def training_run(file: GradientFile) -> RunSpec:
    """Return the run that is recorded in a result file."""
    return recorded_run(file.run.get("spec"), str(file.path))


def recorded_run(spec: Mapping[str, Any] | None, where: str | None) -> RunSpec:
    """Return a run from its record in the file `where`."""
    try:
        return RunSpec.model_validate(spec)
    except ValueError as error:
        raise ResultFileError(
            "the file does not record its run, so gradients of queries cannot be computed",
            where=where,
            remedy="Give a run file, or a result file with the queries' gradients.",
        ) from error


def query_run(path: Path, like: RunSpec, chain: str, loss: str | None = None) -> RunSpec:
    """Return the run for the queries in a run file, a dataset spec or a data file.

    A run file is used with the chain and parameters of the training side. A dataset replaces the
    dataset of the training run. `loss` replaces the loss of the run.
    """
    own_loss = {} if loss is None else {"loss": {"name": loss, "kwargs": {}}}
    asked = {
        "transform": (chain,),
        "parameters": like.compute.parameters,
        "shard": None,
        "labels": "data",
        "batch_size": None,
    }
    if path.suffix == ".toml" and "model" in _sections(path):
        return resolve(path, own_loss).computing(**asked)
    plain = like.model_dump(mode="json")
    given = {k: plain[k] for k in ("model", "checkpoint", "loss", "compute")}
    given["dataset"] = {"path": path}
    if path.suffix != ".toml":
        own = like.dataset.model_dump(mode="json", exclude_defaults=True)
        given["dataset"] |= {
            k: v for k, v in own.items() if k not in ("path", "select", "id", "group")
        }
    given["compute"] |= {"samples": None}
    given |= own_loss
    given = {k: {n: v for n, v in table.items() if v is not None} for k, table in given.items()}
    return resolve(None, given).computing(samples=None, **asked)


def _sections(path: Path) -> set[str]:
    try:
        return set(tomllib.loads(path.read_text(encoding="utf-8-sig")))
    except (OSError, ValueError):
        return set()  # `resolve` reports the error


def _chosen(file: GradientFile, asked: str | None) -> StoredChain:
    """Return the chain with rows of that number or text, or the best one (`best_rows`)."""
    rows = {
        k: chain
        for k, chain in enumerate(file.chains)
        if not chain.reduced  # a norm has one number a sample; so has a parameter without axes
        and all(len(a.shape) > 1 or file.parameters.get(name) == () for name, a in chain.items())
    }
    if asked is None and rows:
        asked = best_rows([chain.text for chain in rows.values()])
    found = None if asked is None else find_chain(file, asked, reduced=False)
    if found is not None and any(found.text == chain.text for chain in rows.values()):
        return found
    known = ", ".join(f"{k} ({chain.text})" for k, chain in rows.items())
    wanted = "no chain with rows" if asked is None else f"no chain {asked!r} with rows"
    others = ", ".join(chain.text for chain in file.chains)
    raise SpecError(
        f"the file has {wanted}, only {known or others}",
        where=str(file.path),
        remedy="Run gradscope compute -t identity, or -t project:dim=4096 if the gradients are "
        "large.",
    )


def with_rows(chains: Iterable[str]) -> list[str]:
    """Return the chains without a reducer that gradscope or a plugin names."""
    return [text for text in chains if not any(one.name in reducers for one in parse(text))]


def best_rows(chains: Collection[str]) -> str:
    """Return the best of some chains with rows: gradients, else projections, else the first."""
    known = [text for text in chains if parse(text)[0].name in ("adam", "project")]
    return "identity" if "identity" in chains else [*known, *chains][0]


def sample_column(values: np.ndarray) -> Tensor:
    """Return a column of the sample table; texts as UTF-8 (n, w), padded with zeros."""
    if values.dtype.kind != "U":
        return torch.from_numpy(np.ascontiguousarray(values))
    encoded = np.char.encode(values, "utf-8")
    width = max(1, encoded.dtype.itemsize)
    return torch.from_numpy(encoded.view(np.uint8).reshape(len(values), width).copy())


def joined_columns(columns: list[Tensor]) -> Tensor:
    """Return the parts of a column as one."""
    if columns[0].dim() == 1:
        return torch.cat([c.cpu() for c in columns])
    width = max(c.shape[1] for c in columns)  # the longest text
    padded = [F.pad(c.cpu(), (0, width - c.shape[1])) for c in columns]
    return torch.cat(padded)


def require_same(train: SourceFacts, query: SourceFacts) -> None:
    """Check that model, checkpoint, chain and parameters agree.

    Raises:
        SpecError: They differ.
    """
    stepped = train.chain != train.measured  # training samples make Adam's step, queries do not
    differing = [
        f"the {what} differs"
        for what in ("checkpoint", "model", *(() if stepped else ("stages",)))
        if {what} <= train.digests.keys() & query.digests.keys()
        and train.digests[what] != query.digests[what]
    ]
    if query.chain not in (train.chain, train.measured):
        differing.append(f"the chains are {query.chain!r} and {train.chain!r}")
    names = train.parameters.keys() ^ query.parameters.keys()
    if names or dict(train.parameters) != dict(query.parameters):
        shown = ", ".join(sorted(names)[:3]) or "shapes"
        differing.append(f"the parameters differ ({shown})")
    if differing:
        raise SpecError(
            f"the queries and the samples of {train.name} do not match: {'; '.join(differing)}",
            where=query.name,
            remedy="Compute both with the same checkpoint, model and chain.",
        )


def stored_factors(
    path: str, train: SourceFacts, chain: str
) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
    """Return the result of a chain from a result file of the training side's model.

    The second result is the mean gradient of the training data, or None if the file lacks it.

    Raises:
        SpecError: Its model or checkpoint differs, or it has no such chain.
    """
    with open_file(path) as file:
        digests = file.run.get("digests", {})
        for what in ("checkpoint", "model"):
            if what in train.digests and train.digests[what] != digests.get(what):
                raise SpecError(
                    f"the {what} of the factors differs from the {what} of {train.name}",
                    where=path,
                    remedy="Compute the factors with the same checkpoint and model.",
                )
        found = stored_result(file, chain)
        if found is None:
            remedy = f"Run gradscope compute -t {chain!r}."
            raise SpecError(f"the file has no chain {chain!r}", where=path, remedy=remedy)
        return found, _stored_mean(file, train)


def _stored_mean(file: GradientFile, train: SourceFacts) -> dict[str, Tensor] | None:
    """Return the mean gradient in a file, or None if other data or labels were used."""
    labels = file.run.get("spec", {}).get("compute", {}).get("labels", "data")
    same = file.run.get("digests", {}).get("dataset") == train.digests.get("dataset")
    return stored_result(file, "mean") if same and labels == "data" else None


def stored_result(file: GradientFile, chain: str) -> dict[str, Tensor] | None:
    """Return the stored result of a chain, or None if the file lacks the chain."""
    given = (c.text for c in file.chains if c.text.startswith("ekfac:with=") and chain == "ekfac")
    for name in (chain, *_SAME.get(chain, ()), *given):
        if (stored := find_chain(file, name, reduced=True)) is not None:
            return {k: torch.from_numpy(np.asarray(a[...])) for k, a in stored.items()}
    return None


def projection_error(source: GradientSource) -> float | None:
    """Return the RMS error of a product of two projected gradients, in units of ‖g‖ ‖h‖.

    It is estimated from the norms of the first samples. For a random projection,
    (‖Pg‖² / ‖g‖² − 1) / √2 is as large as the error of ⟨Pg, Ph⟩ / (‖g‖ ‖h‖). It is 1 / √dim if the
    entries of P are independent. Returns None if the rows are not projections.
    """
    if [stage.name for stage in parse(source.facts.chain)] != ["project"]:
        return None
    batch = next(iter(source.batches()), None)
    if batch is None:
        return None
    norms = source.table(int(batch.places[-1]) + 1)["norm"][batch.places].double()
    found = sum_squares(batch.gradients)
    share = (found / norms.square())[norms > 0] - 1.0
    return float((share.square().mean() / 2).sqrt()) if len(share) else None


def sum_squares(gradients: Gradients) -> Tensor:
    """Return ‖gᵢ‖² (n,) over all entries of a row, in float64."""
    return torch.stack([v.double() for v in gradients.squared_norms.values()]).sum(0)
