"""A job: everything a run needs, resolved and loaded.

Names come first (chains, backend, loss), then the user's code, then weights and data, so that a
misspelt word costs nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradscope.backends.base import Request, backends, candidates
from gradscope.blocks import Tuner
from gradscope.blocks.variants import known_of
from gradscope.config import (
    MAX_ERRORS,
    Compression,
    RunSpec,
    Shard,
    combine_errors,
    parse_compression,
    parse_shard,
)
from gradscope.core.batch import Batch, Tokens, require_positions
from gradscope.core.grammar import parse
from gradscope.core.precision import cast, dtype_name
from gradscope.engine.chains import bind
from gradscope.engine.fold import request_of
from gradscope.engine.session import Session, SessionSettings
from gradscope.errors import RefusedError, SpecError
from gradscope.model.locate import first_line
from gradscope.model.problem import Loss, Problem, is_model_loss
from gradscope.model.ranks import Ranks, apply_fully_shard
from gradscope.process.shortage import is_shortage
from gradscope.run.overlap import to_device
from gradscope.sources import code
from gradscope.sources.code import load_function
from gradscope.sources.data import Dataset, open_dataset
from gradscope.sources.formats import sha256
from gradscope.sources.models import LoadedModel, load_model, require_order
from gradscope.sources.opened import Previews
from gradscope.sources.weights import CheckpointReport
from gradscope.stages import labels
from gradscope.stages.chain import Chain
from gradscope.stages.losses import bound as bound_loss
from gradscope.stages.losses import losses, options
from gradscope.storage import ChainPlan, FilePlan, require_compression
from gradscope.version import VERSION

_SAME = {
    *("backend", "coupling", "labels", "nonfinite", "layout", "seed", "predictions"),
    *("previews", "randomness", "rows"),
}
_BATCH_SAMPLES = 256  # when the batch size is left to us
_BATCH_TOKENS = 2048  # at least, and whole samples
_AT_A_TIME = 256  # samples of which it is looked at together which tokens count
_DENSE_BYTES = 2**28  # of a batch's gradients, where they are all held in their dense form


@dataclass(frozen=True)
class TokenRows:
    """The positions that count of some samples, in order: the rows 0, 1, ... of a run."""

    samples: range  # of the data set
    positions: int  # t, of each sample
    # (m,) int64, row by row: the sample's place · t + position; None: all
    row_numbers: Tensor | None

    @classmethod
    def of(cls, session: Session, load: Callable[[range], Batch], samples: range) -> "TokenRows":
        """Find out which positions count: by the first sample, or where a loss says so, by each.

        Raises:
            SpecError: The loss does not return (n, t), t differs, or no position counts.
        """
        first, said = session.problem.position_mask(load(samples[:1]))
        t = first.shape[1]
        if not said:
            return cls(samples, t, None)
        found: list[Tensor] = []
        for start in range(0, len(samples), _AT_A_TIME):
            mask, _ = session.problem.position_mask(load(samples[start : start + _AT_A_TIME]))
            if mask.shape[1] != t:
                raise SpecError(
                    f"the loss has {mask.shape[1]} positions of some samples, {t} of others",
                    where="rows token",
                    remedy="Pad all samples to one length, and let the loss say what counts.",
                )
            found.append(mask.cpu().flatten().nonzero().flatten() + start * t)
        counted = torch.cat(found)
        require_positions(len(counted))
        return cls(samples, t, counted)

    def __len__(self) -> int:
        rows = self.row_numbers
        return len(self.samples) * self.positions if rows is None else len(rows)

    def batch(self, load: Callable[[range], Batch], rows: range) -> Tokens:
        """Return some rows, which are next to each other, with the samples that they are of."""
        places = torch.arange(rows.start, rows.stop)
        places = places if self.row_numbers is None else self.row_numbers[places]
        sample, position = places // self.positions, places % self.positions
        used, own = torch.unique(sample, return_inverse=True)
        first = int(used[0])
        loaded = load(self.samples[first : int(used[-1]) + 1]).select(used - first)
        index = torch.arange(rows.start, rows.stop)
        data = (loaded.inputs, loaded.targets, index, loaded.index, own, position)
        return Tokens(*data, self.positions)

    def some(self, rows: Tensor) -> tuple["TokenRows", Tensor]:
        """Return some rows (m,) as the only ones, and the samples (n,) that they are of."""
        places = rows if self.row_numbers is None else self.row_numbers[rows]
        used, own = torch.unique(places // self.positions, return_inverse=True)
        counted = own * self.positions + places % self.positions
        part = TokenRows(range(len(used)), self.positions, counted)
        return part, used + self.samples.start

    def record(self) -> dict[str, Any]:
        """Return what tells these rows from others, as plain data."""
        counted = (
            None if self.row_numbers is None else int(self.row_numbers.double().square().sum())
        )
        span = [self.samples.start, self.samples.stop]
        return {"samples": span, "positions": self.positions, "rows": len(self), "sum": counted}


@dataclass(frozen=True)
class Job:
    """What is to be computed."""

    spec: RunSpec  # resolved
    chains: tuple[Chain, ...]  # bound, in the order given
    session: Session  # model, loss and backend, with the proof of its answers
    checkpoint: CheckpointReport  # what was loaded into the model
    dataset: Dataset
    rows: range  # the positions of the selected samples in it; of tokens, rows of all of them
    run_rows: range  # those of the run that this is a shard of; `rows` if it is none
    batch_size: int  # samples a batch, if memory allows it
    shard: Shard | None  # which part of a run this is, if it is not the whole
    compression: Compression | None  # of rows in the result file
    digests: dict[str, str | dict[str, str]]  # SHA-256 of checkpoint, data, code, stored vectors
    notes: tuple[str, ...]  # what was noticed while loading
    previews: Previews | None = None  # what is kept of the samples themselves
    tokens: TokenRows | None = None  # what the rows are, if they are of tokens

    def place(self, output: Path) -> Path:
        """Return where the result goes: a shard's next to the file of the whole run."""
        return output if self.shard is None else self.shard.place(output)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each selected parameter."""
        return {name: tuple(p.shape) for name, p in self.session.problem.parameters.items()}

    def load(self, start: int, n: int) -> Batch:
        """Return the n samples from the selected sample `start` on, on the model's device."""
        rows = self.rows[start : start + n]
        load = partial(read, self.dataset, self.session.problem)
        return load(rows) if self.tokens is None else self.tokens.batch(load, rows)

    @property
    def samples(self) -> range:
        """The positions of the selected samples in the data set."""
        return self.rows if self.tokens is None else self.tokens.samples

    def request(self, batches_left: int | None = None) -> Request:
        """Return what is asked of every batch: the chains, and the mean gradient."""
        asked = map(self.session.labels.chain, (bind("mean"), *self.chains))
        return request_of(
            asked, batches_left=batches_left, stored=_keeps_gradients(self.spec, self.chains)
        )

    def tuner(self, choices: Mapping[str, str] | None = None) -> Tuner:
        """Return what chooses kernels: by measuring, or by the `choices` of an earlier part."""
        cached = self.spec.compute.cache and known_of(self.session.problem.device) is not None
        if choices is not None or not cached:
            # or the same run would not give the same bits
            return Tuner(measures=False, kept=choices)
        return Tuner.remembering()

    def record(self) -> dict[str, Any]:
        """Return the whole run as plain data, for the result file."""
        problem = self.session.problem
        record = {
            "spec": self.spec.model_dump(mode="json"),
            "chains": [chain.text for chain in self.chains],
            "loss": {"name": self.spec.loss.stage.name, **options(self.session.problem.loss)},
            "batch_size": self.batch_size,
            "samples": [self.rows.start, self.rows.stop],
            "digests": self.digests,
            "versions": {"gradscope": VERSION, "torch": torch.__version__},
            "device": str(problem.device),
            "dtype": dtype_name(problem.dtype),
            "threads": torch.get_num_threads(),
        }
        if self.tokens is not None:
            record["tokens"] = self.tokens.record()
        if self.previews is not None:
            record["previews"] = self.previews.record
        if self.shard is not None:
            record["shard"] = {
                **asdict(self.shard),
                "samples": [self.run_rows.start, self.run_rows.stop],
            }
        return record

    def fingerprint(self) -> dict[str, Any]:
        """Return what must be the same for a stopped run to go on."""
        compute = self.spec.compute.model_dump(mode="json", include=_SAME)
        model = self.spec.model.model_dump(mode="json", include={"kwargs", "argv", "mode"})
        data = self.spec.dataset.model_dump(
            mode="json", exclude={"path", "files", "tokenizer", "vocabulary"}, exclude_defaults=True
        )
        parts = ["chains", "loss", "samples", "digests", "versions", "dtype"]
        if self.session.settings.own_loss:
            parts.append("batch_size")  # else a row is the same in any
        if self.tokens is not None:
            parts.append("tokens")
        if self.shard is not None:
            parts.append("shard")
        record = self.record()
        return {
            **{key: record[key] for key in parts},
            "device": self.session.problem.device.type,  # workers have one each
            **compute,
            **model,
            "dataset": data,  # its files are told by their digest
            "parameters": list(self.shapes),
        }


def read(dataset: Dataset, problem: Problem, rows: range) -> Batch:
    """Return some samples of a data set as a model takes them: on its device, in its dtype.

    Those of a complex model have the dtype of its real parts, but where they are complex.
    """
    return to_device(dataset.batch(rows).to(None, problem.dtype.to_real()), problem.device)


def prepare(spec: RunSpec) -> Job:
    """Resolve every name of `spec`, then load what it names.

    Raises:
        SpecError: A name or an argument does not fit.
        InputError: Something cannot be read, or does not fit together.
    """
    code.give_arguments(spec.model.factory, spec.model.argv)
    asked, (chains, loss) = spec.compute, resolve_names(spec)
    labels.require(asked.labels, loss, chains)
    shard = _shard(asked.shard, chains)
    if asked.memory is not None and asked.coupling == "own-loss":
        raise SpecError(
            "with own-loss coupling the answer depends on which samples share a batch, so memory "
            "is not to choose the batch size",
            where="memory",
            remedy="Give `batch_size` instead.",
        )
    compression = None if asked.compression is None else parse_compression(asked.compression)
    require_compression(compression)
    torch.manual_seed(asked.seed)
    together = asked.sharded and dist.is_available() and dist.is_initialized()
    loaded, model = _in_turn(spec) if together else _built(spec)
    dataset = open_dataset(spec.dataset)
    if not is_model_loss(loss):  # which calls the model itself
        require_order(loaded.model, spec.dataset.inputs)
    run_rows = dataset.rows(asked.samples)
    settings = asked.model_dump(
        mode="json", include={field.name for field in fields(SessionSettings)}
    )
    if asked.rows == "token":
        settings["predictions"] = False  # there is one of each sample
    session = Session(model, loss, SessionSettings(**settings))
    tokens = None
    if asked.rows == "token":
        tokens = TokenRows.of(session, partial(read, dataset, session.problem), run_rows)
        run_rows = range(len(tokens))
    size = asked.previews if tokens is None else 0  # a sample's would stand in each of its rows
    each = 1 if tokens is None else tokens.positions
    asked_size = (asked.batch_size or 0) * each
    batch_size = asked_size or _usual_batch(spec, chains, session, dataset, run_rows, each)
    if asked.sharded and shard is not None and not asked.batch_size:
        batch_size = min(batch_size, max(1, len(run_rows) // shard.count))  # none is left out
    return Job(
        spec=spec,
        chains=chains,
        session=session,
        checkpoint=loaded.checkpoint,
        dataset=dataset,
        rows=run_rows if shard is None else shard.rows(run_rows, batch_size),
        run_rows=run_rows,
        batch_size=batch_size,
        shard=shard,
        compression=compression,
        digests=_digests(spec, loaded, dataset, chains),
        notes=(*loaded.notes, *dataset.notes),
        previews=Previews(dataset, size, run_rows[0]) if size else None,
        tokens=tokens,
    )


def _shard(text: str | None, chains: tuple[Chain, ...]) -> Shard | None:
    """Return the part of the run that is asked for, None for the whole, which 0/1 is, too."""
    shard = None if text is None else parse_shard(text)
    if shard is None or shard.count == 1:
        return None
    require_one_pass(chains)
    return shard


def _digests(
    spec: RunSpec, loaded: LoadedModel, dataset: Dataset, chains: tuple[Chain, ...]
) -> dict[str, Any]:
    """Return the SHA-256 of all that a run computes with: files, and code of the user's."""
    name = spec.loss.stage.name
    return {
        "checkpoint": loaded.checkpoint.sha256,
        "dataset": dataset.sha256,
        "dataset_code": dataset.code,
        "model": loaded.digests,
        "loss": code.code_digests(name, "loss") if ":" in name else {},
        "stages": stages_digests(chains),
    }


def _built(spec: RunSpec) -> tuple[LoadedModel, nn.Module]:
    """Return a model with its weights, where the run is to be."""
    loaded = load_model(spec.model, spec.checkpoint, dtype=_dtype(spec))
    return loaded, _placed(loaded.model, spec.compute.device, _dtype(spec))


def _dtype(spec: RunSpec) -> torch.dtype | None:
    """Return what the model is to compute in, None for what it is built in."""
    found = spec.compute.dtype
    return None if found is None else getattr(torch, found)


def _in_turn(spec: RunSpec) -> tuple[LoadedModel, nn.Module]:
    """Let one process after the other load the model and keep its part: one is whole at a time."""
    device = torch.device(spec.compute.device or "cpu")
    ranks = Ranks(dist.group.WORLD, device)
    mine: list[tuple[LoadedModel, nn.Module]] = []
    for turn in range(ranks.size):
        with ranks.raise_on_all():
            if turn == ranks.rank:
                loaded = load_model(spec.model, spec.checkpoint, lean=True, dtype=_dtype(spec))
                model = apply_fully_shard(loaded.model, device.type)
                mine.append((loaded, _placed(model, None, _dtype(spec))))
    return mine[0]


def resolve_names(spec: RunSpec) -> tuple[tuple[Chain, ...], Loss]:
    """Return the chains and the loss, bound."""
    problems: list[SpecError] = []
    chains: list[Chain] = []

    @contextmanager
    def collected(section: str, key: str, index: str = "") -> Iterator[None]:
        """Keep a `SpecError`, with the file and key that it is about if a file says so."""
        try:
            yield
        except SpecError as error:
            place = spec.place(section, key)
            error.where = error.where if place is None else f"{place}{index}"
            problems.append(error)

    for k, text in enumerate(spec.compute.transform):
        if len(problems) > MAX_ERRORS:
            raise combine_errors(problems)
        with collected("compute", "transform", f"[{k}]"):
            chains.append(bind(text))
    with collected("compute", "backend"):
        candidates(spec.compute.backend, own_loss=spec.compute.coupling == "own-loss")
    for name in spec.compare.backends[: MAX_ERRORS + 1]:
        with collected("compare", "backends"):
            backends.get(name)
    with collected("loss", "name"):
        stage = spec.loss.stage
        if ":" not in stage.name:
            loss = bound_loss(losses.get(stage.name), stage)
    if problems:
        raise combine_errors(problems)
    if ":" in stage.name:
        function = load_function(stage.name, "loss")
        if isinstance(function, type):
            what = f"this is the class {function.__name__}, not a loss function"
            remedy = "Name an object, such as criterion = nn.CrossEntropyLoss(reduction='none')."
            raise SpecError(what, where=f"loss {stage.name}", remedy=remedy)
        loss = bound_loss(function, stage)
    return tuple(chains), loss


def require_one_pass(chains: Iterable[Chain]) -> None:
    """Refuse chains that need a result over all samples first: a part of a run has only its own."""
    for chain in chains:
        first = chain.first_pass
        if first is not None:
            raise RefusedError(
                f"{chain.text!r} needs the result of {first.text!r} over all samples first, and a "
                "part of them has only its own",
                where="shard",
                remedy=f"Compute it without `shard`. Or compute {first.text!r} in shards, merge "
                "them, and give what is stored: cosine:with=FILE.h5:0 for cosine:to=mean, "
                "ekfac:with=FILE.h5:0 for ekfac.",
            )


def file_plan(job: Job) -> FilePlan:
    """Return what the result file will hold."""
    return FilePlan(
        run=job.record(),
        fingerprint=job.fingerprint(),
        attributes={f"{key}_sha256": str(job.digests[key]) for key in ("checkpoint", "dataset")},
        n=len(job.rows),
        parameters=job.shapes,
        chains=tuple(ChainPlan(chain.text, chain.reducer is not None) for chain in job.chains),
        dtype=job.session.problem.dtype,
        layout=job.spec.compute.layout,
        compression=job.compression,
    )


def stages_digests(chains: Iterable[Chain]) -> dict[str, str]:
    """Return the SHA-256 of the files that stages stand for: the user's code, stored vectors."""
    stages = [stage for chain in chains for stage in parse(chain.text)]
    own = dict.fromkeys(s.name for s in stages if ".py:" in s.name)
    stored = dict.fromkeys(path for stage in stages for path in stage.files.values())
    found: dict[str, str] = {}
    for digests in (
        *(code.code_digests(name, "stage") for name in own),
        *({path.name: sha256(path)} for path in stored),
    ):
        for name, digest in digests.items():
            place, k = name, 2
            while found.get(place, digest) != digest:  # a file of another folder
                place, k = f"{name} ({k})", k + 1
            found[place] = digest
    return found


def _placed(model: nn.Module, device: str | None, dtype: torch.dtype | None) -> nn.Module:
    """Move and cast the model."""
    require_usable(torch.device(device or "cpu"))
    model = model.to(device=device)
    return model if dtype is None else cast(model, dtype)


def require_usable(device: torch.device) -> None:
    """Refuse a GPU that is not there, or on which nothing runs: with another driver, or lost."""
    if device.type != "cuda":
        return
    if (device.index or 0) >= torch.cuda.device_count():
        raise SpecError(
            f"there is no device '{device}'; {torch.cuda.device_count()} CUDA devices are here",
            where="device",
            remedy='Use device="cpu", or leave it out.',
        )
    try:
        torch.ones(2, device=device).sum().item()
    except (RuntimeError, AssertionError) as error:
        if is_shortage(error):
            raise
        raise SpecError(
            f"{device} does not compute: {first_line(error)}",
            where="device",
            remedy='Use device="cpu", or leave it out; or install a torch for this GPU and driver.',
        ) from error


def _keeps_gradients(spec: RunSpec, chains: Iterable[Chain]) -> bool:
    return spec.compute.layout == "dense" and any(chain.text == "identity" for chain in chains)


def _usual_batch(
    spec: RunSpec,
    chains: Iterable[Chain],
    session: Session,
    dataset: Dataset,
    rows: range,
    each: int,
) -> int:
    """Return a batch size by what is asked for alone: shards are cut by it, on any machine.

    A sample has `each` rows, if these are of tokens.
    """
    samples = min(_BATCH_SAMPLES if each == 1 else -(-_BATCH_TOKENS // each) * each, len(rows))
    if _keeps_gradients(spec, chains) or spec.compute.backend not in ("auto", "hooks"):
        samples = min(samples, max_dense_samples(session))
    if session.labels.mode == "exact":
        samples //= session.labels.each(read(dataset, session.problem, rows[:1]))
    return max(1, samples)


def max_dense_samples(session: Session) -> int:
    """Return how many samples' gradients may be held in their dense form at a time."""
    row = sum(p.nbytes for p in session.problem.parameters.values())
    return max(1, _DENSE_BYTES // max(1, row))
