"""Scores of training samples for queries, from exact gradients."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradscope.attribution.factors import shared_factors
from gradscope.attribution.merging import merge_scores
from gradscope.attribution.methods import AttributionSettings, Damping, Form, Method
from gradscope.attribution.scores import (
    Scores,
    in_memory,
    is_finished,
    is_scores,
    open_scores,
    writing_scores,
)
from gradscope.attribution.scoring import CheckpointSources, Scoring
from gradscope.attribution.sources import (
    FileSource,
    GradientSource,
    job_source,
    query_run,
    scope_source,
    training_run,
    with_rows,
)
from gradscope.attribution.summary import ScoreSummary, summarize_scores, with_samples
from gradscope.attribution.validation import Validation, ValidationRun, ValidationSettings, validate
from gradscope.config import RunSpec, Worker, load
from gradscope.errors import SpecError
from gradscope.run import prepare, refuse_inputs
from gradscope.storage import GradientFile, open_file, require_distinct, writing

__all__ = [
    "AttributionSettings",
    "ScoreSummary",
    "Scores",
    "Scoring",
    "Validation",
    "ValidationRun",
    "ValidationSettings",
    "attribute",
    "in_memory",
    "is_finished",
    "is_scores",
    "merge_scores",
    "open_scores",
    "open_sources",
    "shared_factors",
    "summarize_scores",
    "validate",
    "with_samples",
    "writing_scores",
]

Source = str | Path | GradientFile | tuple[Any, ...]
QueryLoss = str | Callable[..., Any] | None


def attribute(
    train: Source,
    query: Source,
    curvature: Method = "auto",
    damping: Damping = "auto",
    *,
    chain: str | None = None,
    checkpoints: Sequence[Source] = (),
    weights: Sequence[float] | None = None,
    factors: str | Path | None = None,
    refine: int = 0,
    query_rank: int = 0,
    score: Form = "influence",
    query_loss: QueryLoss = None,
    output: str | Path | None = None,
    overwrite: bool = False,
) -> Scores:
    """Score each training sample for each query; see `gradscope.attribution.scoring`.

    Args:
        train: The training samples: a result file with rows (or its path), the path of a run file
            (its gradients are then computed), or (scope, inputs, targets).
        query: The queries, in the same three forms and of the same model; or the path of data,
            whose gradients are then computed with the run of `train`.
        curvature: See `AttributionSettings`.
        damping: Relative to the mean eigenvalue of the curvature, or "auto".
        chain: The chain of the training file, by number or text; by default the best with rows.
        checkpoints: The training samples at further checkpoints; scores are summed over all.
        weights: The weight of each checkpoint. With None all are equal and sum to 1.
        factors: See `AttributionSettings`.
        refine: The k most helpful and the k most harmful samples of each query, found with rows of
            a projection, are scored again with full gradients.
        query_rank: See `AttributionSettings`.
        score: "influence", the change of the query's loss; "relative", divided by the root of the
            training sample's self-influence; "cosine", also divided by the root of the query's.
        query_loss: The loss of the queries, if it is not the training loss: a name or
            "FILE.py:FUNCTION"; for (scope, inputs, targets) also a function. A positive score means
            that the training sample lowers it. If more is better (a margin, a reward, a
            log-probability), return minus the measurement: positive then helps.
        output: The score file to write. Without it the scores stay in memory.
        overwrite: Replace an output that exists.

    Raises:
        SpecError: The two sides cannot be compared, or an option does not fit.
        InputError: A file cannot be read.
    """
    stored, place = (
        None if factors is None else str(factors),
        None if output is None else Path(output),
    )
    how: Any = {"chain": chain, "checkpoints": checkpoints, "weights": weights, "output": place}
    asked = AttributionSettings(
        curvature, damping, factors=stored, refine=refine, score=score, query_rank=query_rank
    )
    with open_sources(train, query, query_loss=query_loss, **how) as pairs:
        scoring = Scoring(pairs, asked)
        if place is None:
            return in_memory(scoring)
        with writing_scores(scoring, place, overwrite=overwrite) as writer:
            list(writer.remaining())
            writer.finish()
    return open_scores(place)


@contextmanager
def open_sources(
    train: Source,
    query: Source,
    *,
    chain: str | None = None,
    checkpoints: Sequence[Source] = (),
    weights: Sequence[float] | None = None,
    samples: str | None = None,
    query_loss: QueryLoss = None,
    stream: bool = False,
    output: Path | None = None,
    worker: Worker | None = None,
) -> Iterator[list[CheckpointSources]]:
    """Open training samples and queries at each checkpoint; see `attribute`.

    `samples`, "A:B", selects the queries whose gradients are computed. With `stream`, training
    gradients are computed even if a file has them. `output` must not be an input file. A `worker`
    has the training samples of its shard, and its GPU.
    """
    sources = [train, *checkpoints]
    if output is not None:
        files = (one for one in (*sources, query) if not isinstance(one, tuple))
        paths = (one.path if isinstance(one, GradientFile) else one for one in files)
        with writing(output):
            require_distinct(output, map(Path, paths))
    if weights is not None and len(weights) != len(sources):
        what = f"{len(weights)} weights were given for {len(sources)} files of training samples"
        raise SpecError(what, remedy="Give one weight for TRAIN and one for each checkpoint.")
    if len(sources) > 1 and _is_result(query):
        raise SpecError(
            "a result file has the queries' gradients at one checkpoint only",
            where=str(query),
            remedy="Give a run file or the data: gradients are then computed at each checkpoint.",
        )
    with ExitStack() as stack:
        pairs = []
        for k, source in enumerate(sources):
            side, run = _training(source, chain, stack, output, worker, stream=stream)
            other = _query(query, side, run, samples, query_loss, stack, output, worker)
            weight = 1 / len(sources) if weights is None else weights[k]
            pairs.append(CheckpointSources(side, other, weight))
        yield pairs


def _is_result(source: Source) -> bool:
    return isinstance(source, GradientFile) or (
        isinstance(source, str | Path) and Path(source).suffix in (".h5", ".hdf5")
    )


def _training(
    source: Source,
    chain: str | None,
    stack: ExitStack,
    output: Path | None,
    worker: Worker | None,
    *,
    stream: bool,
) -> tuple[GradientSource, Any]:
    """Return the training samples, and a function that returns their run (None in memory)."""
    shard = None if worker is None else worker.shard
    if isinstance(source, tuple):
        return scope_source("training samples", *source), None
    if _is_result(source) or Path(str(source)).suffix != ".toml":  # and no run file
        file = _file(source, stack)
        if is_scores(file):
            what = "the file holds scores, not gradients"
            remedy = "Give the file that gradscope compute -o wrote, or a run file."
            raise SpecError(what, where=str(file.path), remedy=remedy)
        if not stream:
            return FileSource(file, chain, shard), lambda: training_run(file)
        spec = training_run(file).computing(shard=None)
    else:
        spec = load(Path(str(source)))
    # reducers are left out: some first need a result over all samples, which a shard lacks
    chains = with_rows(spec.compute.transform) if chain is None else [chain]
    spec = spec.computing(transform=tuple(chains or ["identity"]))
    if spec.compute.sharded:
        raise SpecError(
            "attribute needs the whole model in each process, and the run shards the model",
            where=str(source),
            remedy="Compute the gradients of training samples and queries with gradscope compute "
            "--sharded, and give both files. Or remove `sharded` from the run.",
        )
    if shard is not None:
        spec = spec.computing(shard=str(shard))
    return _computed(spec, str(source), output, worker), lambda: spec


def _query(
    source: Source,
    train: GradientSource,
    run: Any,
    samples: str | None,
    loss: QueryLoss,
    stack: ExitStack,
    output: Path | None,
    worker: Worker | None,
) -> GradientSource:
    if isinstance(source, tuple):
        scope, *data = source
        return scope_source("queries", scope if loss is None else scope.with_loss(loss), *data)
    if _is_result(source):
        for name, given in (("samples", samples), ("query_loss", loss)):
            if given is not None:
                raise SpecError(
                    f"`{name}` does not apply to a result file, whose gradients are computed",
                    where=str(source),
                    remedy=f"Leave `{name}` out, or give the data or a run file of the queries.",
                )
        return FileSource(_file(source, stack), train.facts.measured)
    if run is None:
        raise SpecError(
            "the training samples are in memory, the queries are in a file",
            where=str(source),
            remedy="Give the queries as (scope, inputs, targets).",
        )
    if loss is not None and not isinstance(loss, str):
        raise SpecError(
            "`query_loss` is a function, and the queries are in a file",
            where=str(source),
            remedy="Name the function as FILE.py:FUNCTION, or give (scope, inputs, targets).",
        )
    spec = query_run(Path(str(source)), run(), train.facts.measured, loss)
    if samples is not None:
        spec = spec.computing(samples=samples)
    return _computed(spec, str(source), output, worker)


def _computed(
    spec: RunSpec,
    name: str,
    output: Path | None,
    worker: Worker | None,
) -> GradientSource:
    device = spec.compute.device if worker is None else worker.device(spec.compute.device)
    job = prepare(spec.computing(device=device))
    if output is not None:
        refuse_inputs(job, output)
    found = job_source(job, name)
    of_all = spec.computing(shard=None).model_dump(mode="json")  # the same for all workers
    found.facts = replace(found.facts, spec=of_all)
    return found


def _file(source: Source, stack: ExitStack) -> GradientFile:
    if isinstance(source, GradientFile):
        return source
    return stack.enter_context(open_file(Path(str(source))))
