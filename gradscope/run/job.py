"""A job: the inputs of a run, resolved and loaded.

Names (chains, backend, loss) are resolved first, then the user's code, then weights and data, so
that a misspelled name fails early.
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
_BATCH_SAMPLES = 256  # the default batch size
# small models get larger batches, up to these numbers of samples and of gradients' entries
_MOST_SAMPLES, _BATCH_NUMBERS = 8192, 2**21
_BATCH_TOKENS = 2048  # the default batch size with rows of tokens, rounded up to whole samples
_AT_A_TIME = 256  # samples per batch when the positions that count are collected
_DENSE_BYTES = 2**28  # the size of a batch's gradients if all of them are dense


@dataclass(frozen=True)
class TokenRows:
    """The token rows of a run: the positions of some samples that count towards the loss."""

    samples: range  # positions of the samples in the data set
    positions: int  # t, the number of positions of each sample
    # (m,) int64, for each row: sample's index in `samples` · t + position, or None if all count
    row_numbers: Tensor | None

    @classmethod
    def of(cls, session: Session, load: Callable[[range], Batch], samples: range) -> "TokenRows":
        """Find the positions that count; a loss with a position mask is called for each sample.

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
                    f"the loss has {t} positions for the first sample, but {mask.shape[1]} for "
                    "later samples",
                    where="rows token",
                    remedy="Pad all samples to the same length, and mark padding as ignored in "
                    "the loss.",
                )
            found.append(mask.cpu().flatten().nonzero().flatten() + start * t)
        counted = torch.cat(found)
        require_positions(len(counted))
        return cls(samples, t, counted)

    def __len__(self) -> int:
        rows = self.row_numbers
        return len(self.samples) * self.positions if rows is None else len(rows)

    def batch(self, load: Callable[[range], Batch], rows: range) -> Tokens:
        """Return a range of rows, with their samples."""
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
        """Return a `TokenRows` of only these rows (m,), and their samples (n,)."""
        places = rows if self.row_numbers is None else self.row_numbers[rows]
        used, own = torch.unique(places // self.positions, return_inverse=True)
        counted = own * self.positions + places % self.positions
        part = TokenRows(range(len(used)), self.positions, counted)
        return part, used + self.samples.start

    def record(self) -> dict[str, Any]:
        """Return plain data that identify these rows."""
        counted = (
            None if self.row_numbers is None else int(self.row_numbers.double().square().sum())
        )
        span = [self.samples.start, self.samples.stop]
        return {"samples": span, "positions": self.positions, "rows": len(self), "sum": counted}


@dataclass(frozen=True)
class Job:
    """The resolved and loaded inputs of a run."""

    spec: RunSpec  # the resolved spec
    chains: tuple[Chain, ...]  # the bound chains, in the order given
    session: Session  # model, loss and backend, with the proof of its results
    checkpoint: CheckpointReport  # the checkpoint loaded into the model
    dataset: Dataset
    rows: range  # indices of the selected rows (samples, or tokens with rows="token")
    run_rows: range  # the rows of the whole run, which differ from `rows` in a shard
    batch_size: int  # the batch size, if memory allows it
    shard: Shard | None  # the part of the run, or None for the whole run
    compression: Compression | None  # the compression of rows in the result file
    digests: dict[str, str | dict[str, str]]  # SHA-256 of checkpoint, data, code, stored vectors
    notes: tuple[str, ...]  # notes from loading
    previews: Previews | None = None  # previews of samples to store
    tokens: TokenRows | None = None  # the token rows, with rows="token"

    def place(self, output: Path) -> Path:
        """Return the path of the result; a shard's file is in the same folder as `output`."""
        return output if self.shard is None else self.shard.place(output)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each selected parameter."""
        return {name: tuple(p.shape) for name, p in self.session.problem.parameters.items()}

    def load(self, start: int, n: int) -> Batch:
        """Return n rows from the selected row `start` on, on the model's device."""
        rows = self.rows[start : start + n]
        load = partial(read, self.dataset, self.session.problem)
        return load(rows) if self.tokens is None else self.tokens.batch(load, rows)

    @property
    def samples(self) -> range:
        """The positions of the selected samples in the data set."""
        return self.rows if self.tokens is None else self.tokens.samples

    def request(self, batches_left: int | None = None) -> Request:
        """Return the request for every batch: the chains and the mean gradient."""
        asked = map(self.session.labels.chain, (bind("mean"), *self.chains))
        return request_of(
            asked, batches_left=batches_left, stored=_keeps_gradients(self.spec, self.chains)
        )

    def tuner(self, choices: Mapping[str, str] | None = None) -> Tuner:
        """Return a tuner that measures kernels, or uses the `choices` of the stopped run."""
        cached = self.spec.compute.cache and known_of(self.session.problem.device) is not None
        if choices is not None or not cached:
            # measuring could change the bits of the result
            return Tuner(measures=False, kept=choices)
        return Tuner.remembering()

    def record(self) -> dict[str, Any]:
        """Return a description of the run as plain data, for the result file."""
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
        """Return the values that must be equal to resume a stopped run."""
        compute = self.spec.compute.model_dump(mode="json", include=_SAME)
        model = self.spec.model.model_dump(mode="json", include={"kwargs", "argv", "mode"})
        data = self.spec.dataset.model_dump(
            mode="json", exclude={"path", "files", "tokenizer", "vocabulary"}, exclude_defaults=True
        )
        parts = ["chains", "loss", "samples", "digests", "versions", "dtype"]
        if self.session.settings.own_loss:
            parts.append("batch_size")  # otherwise rows do not depend on it
        if self.tokens is not None:
            parts.append("tokens")
        if self.shard is not None:
            parts.append("shard")
        record = self.record()
        return {
            **{key: record[key] for key in parts},
            "device": self.session.problem.device.type,  # the index differs between workers
            **compute,
            **model,
            "dataset": data,  # without files, which the digest identifies
            "parameters": list(self.shapes),
        }


def read(dataset: Dataset, problem: Problem, rows: range) -> Batch:
    """Return samples of a data set on the model's device and in its dtype.

    For a complex model, real data get the dtype of the model's real part.
    """
    return to_device(dataset.batch(rows).to(None, problem.dtype.to_real()), problem.device)


def prepare(spec: RunSpec) -> Job:
    """Resolve all names in `spec`, then load model, weights and data.

    Raises:
        SpecError: A name or an argument is invalid.
        InputError: An input cannot be read, or inputs do not match each other.
    """
    code.give_arguments(spec.model.factory, spec.model.argv)
    asked, (chains, loss) = spec.compute, resolve_names(spec)
    labels.require(asked.labels, loss, chains)
    shard = _shard(asked.shard, chains)
    if asked.memory is not None and asked.coupling == "own-loss":
        raise SpecError(
            '`memory` cannot be combined with coupling="own-loss": gradients then depend on which '
            "samples share a batch, so the batch size must be fixed",
            where="memory",
            remedy="Give `batch_size` instead of `memory`.",
        )
    compression = None if asked.compression is None else parse_compression(asked.compression)
    require_compression(compression)
    torch.manual_seed(asked.seed)
    together = asked.sharded and dist.is_available() and dist.is_initialized()
    loaded, model = _in_turn(spec) if together else _built(spec)
    dataset = open_dataset(spec.dataset)
    if not is_model_loss(loss):  # a model loss calls the model with its own order of inputs
        require_order(loaded.model, spec.dataset.inputs)
    run_rows = dataset.rows(asked.samples)
    settings = asked.model_dump(
        mode="json", include={field.name for field in fields(SessionSettings)}
    )
    if asked.rows == "token":
        settings["predictions"] = False  # predictions belong to samples, not tokens
    session = Session(model, loss, SessionSettings(**settings))
    tokens = None
    if asked.rows == "token":
        tokens = TokenRows.of(session, partial(read, dataset, session.problem), run_rows)
        run_rows = range(len(tokens))
    size = asked.previews if tokens is None else 0  # previews belong to samples, not tokens
    each = 1 if tokens is None else tokens.positions
    asked_size = (asked.batch_size or 0) * each
    batch_size = asked_size or _usual_batch(spec, chains, session, dataset, run_rows, each)
    if asked.sharded and shard is not None and not asked.batch_size:
        batch_size = min(batch_size, max(1, len(run_rows) // shard.count))  # no empty shard
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
    """Return the requested shard, or None for the whole run (no shard, or shard 0/1)."""
    shard = None if text is None else parse_shard(text)
    if shard is None or shard.count == 1:
        return None
    require_one_pass(chains)
    return shard


def _digests(
    spec: RunSpec, loaded: LoadedModel, dataset: Dataset, chains: tuple[Chain, ...]
) -> dict[str, Any]:
    """Return the SHA-256 of the run's inputs: files and the user's code."""
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
    """Return the model with its weights, on the run's device."""
    loaded = load_model(spec.model, spec.checkpoint, dtype=_dtype(spec))
    return loaded, _placed(loaded.model, spec.compute.device, _dtype(spec))


def _dtype(spec: RunSpec) -> torch.dtype | None:
    """Return the dtype given by the spec, or None to keep the model's dtype."""
    found = spec.compute.dtype
    return None if found is None else getattr(torch, found)


def _in_turn(spec: RunSpec) -> tuple[LoadedModel, nn.Module]:
    """Load the model in one process after the other; each keeps its part of the parameters."""
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
    """Return the bound chains and the bound loss; raise one error for all invalid names."""
    problems: list[SpecError] = []
    chains: list[Chain] = []

    @contextmanager
    def collected(section: str, key: str, index: str = "") -> Iterator[None]:
        """Collect a `SpecError`, with the run file and key that set the value, if any."""
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
    """Raise if a chain first needs a result over all samples, which a shard cannot compute."""
    for chain in chains:
        first = chain.first_pass
        if first is not None:
            raise RefusedError(
                f"the chain {chain.text!r} first needs the result of {first.text!r} over all "
                "samples, but a shard has only some samples",
                where="shard",
                remedy=f"Compute it without `shard`. Or compute {first.text!r} in shards, merge "
                "them, and use the stored result: cosine:with=FILE.h5:0 for cosine:to=mean, "
                "ekfac:with=FILE.h5:0 for ekfac.",
            )


def file_plan(job: Job) -> FilePlan:
    """Return the plan of the result file."""
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
    """Return the SHA-256 of the files that stages use: the user's code and stored vectors."""
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
            while found.get(place, digest) != digest:  # a file with the same name in another folder
                place, k = f"{name} ({k})", k + 1
            found[place] = digest
    return found


def _placed(model: nn.Module, device: str | None, dtype: torch.dtype | None) -> nn.Module:
    """Move the model to the device and cast it."""
    require_usable(torch.device(device or "cpu"))
    model = model.to(device=device)
    return model if dtype is None else cast(model, dtype)


def require_usable(device: torch.device) -> None:
    """Raise if a CUDA device does not exist or cannot compute because of its driver."""
    if device.type != "cuda":
        return
    if (device.index or 0) >= torch.cuda.device_count():
        raise SpecError(
            f"there is no device '{device}'; the number of CUDA devices is "
            f"{torch.cuda.device_count()}",
            where="device",
            remedy='Use device="cpu", or remove `device`.',
        )
    try:
        torch.ones(2, device=device).sum().item()
    except (RuntimeError, AssertionError) as error:
        if is_shortage(error):
            raise
        raise SpecError(
            f"a test computation on {device} failed: {first_line(error)}",
            where="device",
            remedy='Use device="cpu", or install a torch version for this GPU and driver.',
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
    """Return a batch size that does not depend on the machine, because shards are cut by it.

    `each` is the number of rows per sample: 1, or t with rows of tokens.
    """
    samples = _BATCH_SAMPLES if each == 1 else -(-_BATCH_TOKENS // each) * each
    if each == 1 and not session.settings.own_loss:
        size = max(1, sum(p.numel() for p in session.problem.parameters.values()))
        samples = max(samples, min(_MOST_SAMPLES, 1 << (_BATCH_NUMBERS // size).bit_length() >> 1))
    samples = min(samples, len(rows))
    if _keeps_gradients(spec, chains) or spec.compute.backend not in ("auto", "hooks"):
        samples = min(samples, max_dense_samples(session))
    if session.labels.mode == "exact":
        samples //= session.labels.each(read(dataset, session.problem, rows[:1]))
    return max(1, samples)


def max_dense_samples(session: Session) -> int:
    """Return the largest number of samples whose dense gradients are held in memory."""
    row = sum(p.nbytes for p in session.problem.parameters.values())
    return max(1, _DENSE_BYTES // max(1, row))
