"""A job: the inputs of a run, resolved and loaded.

Names (chains, backend, loss) are resolved first, then the user's code, then weights and data, so
that a misspelled name fails early.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradscope.backends.base import Request, backends, candidates
from gradscope.blocks import Tuner
from gradscope.blocks.variants import known_of
from gradscope.config import (
    MAX_ERRORS,
    Compression,
    RunSpec,
    Shard,
    combine_errors,
    function_of,
    parse_compression,
    parse_shard,
)
from gradscope.core.batch import Batch
from gradscope.core.grammar import parse
from gradscope.core.groups import fitting_groups
from gradscope.core.precision import cast, dtype_name
from gradscope.engine.chains import bind
from gradscope.engine.fold import request_of
from gradscope.engine.session import Session, SessionSettings
from gradscope.errors import CheckpointError, RefusedError, SpecError, located
from gradscope.model.locate import first_line
from gradscope.model.problem import Loss, Problem, is_model_loss
from gradscope.model.randomness import seeded
from gradscope.model.ranks import Ranks, apply_fully_shard
from gradscope.process.collection import collect_as_usual
from gradscope.process.shortage import is_shortage
from gradscope.run.overlap import to_device
from gradscope.run.rows import GroupRows, TokenRows
from gradscope.sources import code
from gradscope.sources.code import load_function
from gradscope.sources.data import Dataset, open_dataset
from gradscope.sources.formats import sha256
from gradscope.sources.models import (
    LoadedModel,
    load_model,
    positional,
    require_order,
    takes_mapping,
)
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
    *("previews", "randomness", "rows", "group_reduction"),
}
BATCH_SAMPLES = 256  # the default batch size
_ONE_BY_ONE = 8  # the same for a loss that is computed for one sample at a time
# small models get larger batches, up to these numbers of samples and of gradients' entries
_MOST_SAMPLES, _BATCH_NUMBERS = 2**15, 2**26
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt"}  # files of weights in a folder
_BATCH_TOKENS = 2048  # the default batch size with rows of tokens, rounded up to whole samples
_DENSE_BYTES = 2**28  # the size of a batch's gradients if all of them are dense


@dataclass(frozen=True)
class Job:
    """The resolved and loaded inputs of a run."""

    spec: RunSpec  # the resolved spec
    chains: tuple[Chain, ...]  # the bound chains, in the order given
    session: Session  # model, loss and backend, with the proof of its results
    checkpoint: CheckpointReport  # the checkpoint loaded into the model
    dataset: Dataset
    rows: range  # indices of the selected rows (samples, tokens or groups)
    run_rows: range  # the rows of the whole run, which differ from `rows` in a shard
    batch_size: int  # the batch size in samples or tokens, if memory allows it
    shard: Shard | None  # the part of the run, or None for the whole run
    compression: Compression | None  # the compression of rows in the result file
    digests: dict[str, str | dict[str, str]]  # SHA-256 of checkpoint, data, code, stored vectors
    notes: tuple[str, ...]  # notes from loading
    previews: Previews | None = None  # previews of samples to store
    tokens: TokenRows | None = None  # the token rows, with rows="token"
    groups: GroupRows | None = None  # the groups, if the data have a column of ids

    def place(self, output: Path) -> Path:
        """Return the path of the result; a shard's file is in the same folder as `output`."""
        return output if self.shard is None else self.shard.place(output)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each selected parameter."""
        return {name: tuple(p.shape) for name, p in self.session.problem.parameters.items()}

    def load(self, start: int, n: int) -> Batch:
        """Return n samples or tokens from the selected row `start` on, on the model's device.

        With groups, return the next groups with at most n members.
        """
        load = partial(read, self.dataset, self.session.problem)
        if self.groups is not None:
            return self.groups.batch(load, self.rows[start:], n)
        rows = self.rows[start : start + n]
        if self.tokens is None:
            return load(rows)
        return self.tokens.batch(load, torch.arange(rows.start, rows.stop))

    def work(self, start: int = 0, stop: int | None = None) -> int:
        """Return the number of samples or tokens in the selected rows from `start` on."""
        rows = self.rows[start:stop]
        if self.groups is None:
            return len(rows)
        return int(self.groups.starts[rows.stop] - self.groups.starts[rows.start])

    @property
    def least(self) -> int:
        """The smallest possible batch size: the size of the largest group, or 1."""
        if self.groups is None:
            return 1
        return int(self.groups.sizes[self.rows.start : self.rows.stop].max())

    @property
    def noun(self) -> str:
        """The kind of row: sample, token or group."""
        return self.spec.compute.rows if self.groups is None else "group"

    @property
    def samples(self) -> range:
        """The positions of the selected samples in the data set."""
        if self.tokens is not None:
            return self.tokens.samples
        return self.rows if self.groups is None else self.dataset.rows(self.spec.compute.samples)

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
        record |= {k: rows.record() for k, rows in self._other_rows.items()}
        if self.previews is not None:
            record["previews"] = self.previews.record
        if self.shard is not None:
            record["shard"] = {
                **asdict(self.shard),
                "samples": [self.run_rows.start, self.run_rows.stop],
            }
        return record

    @property
    def _other_rows(self) -> dict[str, TokenRows | GroupRows]:
        """The rows that are not samples, by their key in the record."""
        pairs = ("tokens", self.tokens), ("groups", self.groups)
        return {key: rows for key, rows in pairs if rows is not None}

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
        parts += [*self._other_rows]
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


def read(dataset: Dataset, problem: Problem, rows: Sequence[int]) -> Batch:
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
    collect_as_usual()  # the modules are loaded, and the user's code begins
    code.give_arguments(spec.model.argv)
    code.keep_unchanged(spec.checkpoint.path)
    before = _stamp(spec.checkpoint.path)
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
    if spec.dataset.group is not None and asked.layout != "dense":
        raise SpecError(
            f"layout {asked.layout} cannot be combined with group: factors of groups have "
            "different lengths",
            where="layout",
            remedy="Use layout dense, or store a projection (project:dim=4096).",
        )
    compression = None if asked.compression is None else parse_compression(asked.compression)
    require_compression(compression)
    torch.manual_seed(asked.seed)
    together = asked.sharded and dist.is_available() and dist.is_initialized()
    with seeded(asked.seed):
        loaded, model = _in_turn(spec) if together else _built(spec)
    own_order = is_model_loss(loss)  # a model loss calls the model with its own order of inputs
    taken = None if own_order else positional(loaded.model)
    grouped = spec.dataset.group is not None
    with seeded(asked.seed):
        dataset = open_dataset(spec.dataset, None if taken is None else len(taken), asked.samples)
    dataset = dataset.in_any_order if grouped else dataset
    if _stamp(spec.checkpoint.path) != before:
        raise CheckpointError(
            "the file was written while your code was imported: it may have trained again",
            where=str(spec.checkpoint.path),
            remedy='Put the training under if __name__ == "__main__", and train again.',
        )
    if dataset.alone:
        spec = spec.model_copy(update={"compute": asked.model_copy(update={"batch_size": 1})})
        asked = spec.compute
    if not own_order:
        require_order(loaded.model, spec.dataset.inputs)
        if (keywords := dataset.keywords) and takes_mapping(loaded.model, keywords):
            dataset = replace(dataset, as_mapping=True)
    run_rows = dataset.rows(asked.samples)
    settings = asked.model_dump(
        mode="json", include={field.name for field in fields(SessionSettings)}
    )
    if grouped or asked.rows == "token":
        settings["predictions"] = False  # predictions belong to samples
    settings["group"] = asked.group_reduction if grouped else None
    session = Session(model, loss, SessionSettings(**settings))
    tokens, groups = None, None
    if asked.rows == "token":
        tokens = TokenRows.of(session, partial(read, dataset, session.problem), run_rows)
        run_rows = range(len(tokens))
    ids = dataset.groups(asked.group_reduction)
    if ids is not None:
        with located(f"{spec.dataset.path}: {spec.dataset.group}"):
            groups = GroupRows.of(ids, run_rows, tokens)
    size = asked.previews if tokens is None and groups is None else 0  # previews belong to samples
    each = 1 if tokens is None else tokens.positions
    asked_size = (asked.batch_size or 0) * each
    batch_size = asked_size or _usual_batch(spec, chains, session, dataset, run_rows, each)
    if groups is not None:
        run_rows = range(len(groups))
        worst = int(groups.sizes.argmax())
        batch_size = asked_size or max(batch_size, groups.largest)
        fitting_groups(groups.sizes[worst:], groups.ids[worst:], batch_size)
    if shard is not None and groups is None and not asked.batch_size:  # no empty shard
        batch_size = min(batch_size, max(1, len(run_rows) // shard.count))
    return Job(
        spec=spec,
        chains=chains,
        session=session,
        checkpoint=loaded.checkpoint,
        dataset=dataset,
        rows=run_rows if shard is None else shard.rows(run_rows, 1 if grouped else batch_size),
        run_rows=run_rows,
        batch_size=batch_size,
        shard=shard,
        compression=compression,
        digests=_digests(spec, loaded, dataset, chains),
        notes=tuple(dict.fromkeys((*loaded.notes, *dataset.notes))),
        previews=Previews(dataset, size, run_rows[0]) if size else None,
        tokens=tokens,
        groups=groups,
    )


def _stamp(path: Path) -> list[tuple[str, int, int]]:
    """Return (name, time of the last change, size) of a checkpoint, or of the weights in a folder.

    Other entries of a folder may change: an import of code in it writes __pycache__.
    """
    with suppress(OSError):
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        weights = [file for file in files if file == path or file.suffix in _WEIGHTS]
        stats = [(file.name, file.stat()) for file in weights]
        return [(name, found.st_mtime_ns, found.st_size) for name, found in stats]
    return []


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
        "loss": code.code_digests(name, "loss") if function_of(name) else {},
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
        if function_of(stage.name) is None:
            loss = bound_loss(losses.get(stage.name), stage)
    if problems:
        raise combine_errors(problems)
    if function_of(stage.name) is not None:
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
    samples = BATCH_SAMPLES if each == 1 else -(-_BATCH_TOKENS // each) * each
    if each == 1 and not session.settings.own_loss:
        size = max(1, sum(p.numel() for p in session.problem.parameters.values()))
        samples = max(samples, min(_MOST_SAMPLES, 1 << (_BATCH_NUMBERS // size).bit_length() >> 1))
    if session.skipped:  # a larger batch is not faster, and its proof takes longer
        samples = _ONE_BY_ONE * each
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
