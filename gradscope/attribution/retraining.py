"""Training again without some samples: what the models that come of it lose on the queries.

One small file a retraining, in a folder that any number of processes work on at once. Each claims
what it trains by a lock that ends with it, and puts the file in its place when it is whole: killed,
it loses the retraining that it was at, and no other.
"""

import hashlib
import io
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gradscope.attribution.scores import Scores, open_scores
from gradscope.attribution.sources import recorded_run
from gradscope.config import split_reference
from gradscope.errors import (
    GradscopeError,
    ModelError,
    NonFiniteError,
    OutputError,
    ResultFileError,
)
from gradscope.model.problem import Problem
from gradscope.run import prepare
from gradscope.run.job import read
from gradscope.run.overlap import BatchSize
from gradscope.sources import code
from gradscope.storage import differences, locked, put_in_place, writing

PLAN = "plan.json"  # in the folder: what the retrainings are of
_NAMES = (PLAN, "subset-", "whole-", "without-")  # what names of files of ours begin with
_POLL = 0.1  # seconds between looks at what other processes have done
_FORM = "It is called as FIT(indices, seed) and returns the trained torch.nn.Module."

Mask = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Retraining:
    """One training that is to be done."""

    name: str  # that of its file
    kept: Mask  # which training samples it is on (N,)
    seed: int  # what it is started from


def subset(seed: int, number: int, n: int, fraction: float) -> Retraining:
    """Return the training on the random subset of some number: the same one whoever asks."""
    size = min(n - 1, max(1, round(fraction * n)))
    kept = np.zeros(n, dtype=bool)
    kept[np.random.default_rng([seed, number]).permutation(n)[:size]] = True
    return Retraining(f"subset-{number:04}", kept, seed_of(seed, number))


def seed_of(seed: int, number: int) -> int:
    """Return the seed of the training of some number."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def without(name: str, left_out: NDArray[np.int64], n: int, seed: int) -> Retraining:
    """Return the training on all samples but some; its file's name tells which."""
    kept = np.ones(n, dtype=bool)
    kept[left_out] = False
    which = hashlib.sha256(np.packbits(kept).tobytes()).hexdigest()[:12]
    return Retraining(f"{name}-{which}-{seed}", kept, seed)


class Queries:
    """The queries of a score file, with their own data and loss, for models of the same form.

    Raises:
        ResultFileError: The file does not say where they come from.
        InputError: They cannot be read, or the data have changed.
    """

    def __init__(self, scores: Scores) -> None:
        where = None if scores.file is None else str(scores.file.path)
        side: Any = scores.record["query"]
        if side.get("spec") is None:
            raise ResultFileError(
                "the scores are of models in memory, so that the queries cannot be opened again",
                where=where,
                remedy="Compute them by gradscope attribute, from result files or run files.",
            )
        spec = recorded_run(side["spec"], where).computing(transform=("identity",), shard=None)
        self._job = job = prepare(spec)
        index = scores.queries["index"]
        changed = job.digests["dataset"] != side["digests"].get("dataset")
        if changed or not np.array_equal(index, np.arange(job.rows.start, job.rows.stop)):
            raise ResultFileError(
                "the queries are other samples than when they were scored",
                where=str(spec.dataset.path),
                remedy="Put the data back as they were, or compute the scores anew.",
            )

    def losses(self, model: nn.Module) -> Floats:
        """Return the loss of each query (M,) by a model, in the mode it is in.

        Raises:
            ModelError: The model has other parameters than the model of the run.
            NonFiniteError: A loss is not finite.
        """
        own, job = self._job.session.problem, self._job
        _require_alike(own.model, model)
        parameters = dict(model.named_parameters())
        problem = Problem(model, own.loss, parameters, own.running_statistics)
        problem = problem.with_fixed_randomness(own.state.randomness)
        size = BatchSize(job.batch_size, fixed=job.session.settings.own_loss)
        losses = np.empty(0)
        while (done := len(losses)) < len(job.rows):
            some = size.fitting(partial(self._some, problem, done), len(job.rows) - done)
            losses = np.concatenate([losses, some])
        bad = np.flatnonzero(~np.isfinite(losses))
        if len(bad):
            raise NonFiniteError(
                f"the losses of {len(bad):,} of {len(losses):,} queries are not finite, the first "
                f"at query {bad[0]}",
                remedy="The training has diverged: correct FIT, or train with a lower rate.",
            )
        return losses

    def _some(self, problem: Problem, start: int, n: int) -> Floats:
        batch = read(self._job.dataset, problem, self._job.rows[start : start + n])
        found: Floats = problem.losses(batch).detach().double().cpu().numpy()
        return found


def _require_alike(known: nn.Module, model: nn.Module) -> None:
    ours, theirs = (
        {name: tuple(p.shape) for name, p in m.named_parameters()} for m in (known, model)
    )
    if ours != theirs:
        names = [k for k in {**ours, **theirs} if ours.get(k) != theirs.get(k)]
        shown = "; ".join(
            f"{k}: {theirs.get(k, 'absent')}, and {ours.get(k, 'absent')} in the run"
            for k in names[:3]
        )
        raise ModelError(
            f"FIT returned a model with other parameters than the model of the run ({shown})",
            remedy="Return the model that the run's factory builds.",
        )


@dataclass
class Retrainings:
    """A folder of retrainings for the queries of a score file."""

    folder: Path
    scores: Path
    fit: str  # FIT, as FILE.py:NAME or package.module:NAME
    identity: Mapping[str, Any]  # what they are of; those of anything else are refused

    @cached_property
    def _queries(self) -> Queries:
        with open_scores(self.scores) as scores:
            return Queries(scores)

    @cached_property
    def _fit(self) -> Callable[..., Any]:
        return code.load_function(self.fit, "FIT")

    @cached_property
    def _index(self) -> NDArray[np.int64]:
        with open_scores(self.scores) as scores:
            return np.asarray(scores.samples["index"], dtype=np.int64)

    def begin(self, *, overwrite: bool = False) -> None:
        """Make the folder, or find that it is the same one's.

        Raises:
            OutputError: It holds retrainings of something else, or cannot be written.
        """
        _ = self._queries  # what is wrong with them is told before anything is written
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            there = list(self.folder.iterdir())
            ours = overwrite and self._found() is not None
            for path in there if ours else ():
                if path.name.startswith(_NAMES):
                    path.unlink(missing_ok=True)
            # a draft is of a process that has begun at the same time
            if ours or all(path.name.startswith(f"{PLAN}.") for path in there):
                draft = self.folder / f"{PLAN}.{os.getpid()}.part"
                draft.write_text(json.dumps(self.identity, indent=2))
                draft.replace(self.folder / PLAN)
        found = self._found()
        if found is None:
            raise OutputError(
                f"the folder holds something else than retrainings: its {PLAN} is none of ours",
                where=str(self.folder),
                remedy="Give an empty --folder.",
            )
        wrong = list(differences(found, self.identity))
        if wrong:
            raise OutputError(
                f"the folder holds other retrainings: {'; '.join(wrong)}",
                where=str(self.folder),
                remedy="Name another --folder, or start anew with overwrite=True.",
            )

    def _found(self) -> dict[str, Any] | None:
        """Return what the retrainings in the folder are of; None where that is not told."""
        try:
            found = json.loads((self.folder / PLAN).read_bytes())
        except (OSError, ValueError):
            return None
        known = isinstance(found, dict) and found.get("schema") == self.identity["schema"]
        return found if known else None

    def remaining(self, asked: Sequence[Retraining], workers: int = 1) -> Iterator[Retraining]:
        """Do what is not done yet, here or in processes of their own; yield each that is done.

        Raises:
            GradscopeError: FIT raised, returned no such model, or one that has diverged.
        """
        waiting = list(asked)
        if workers > 1 and not all(map(self.is_done, waiting)):
            for one in self._by_workers(waiting, workers):
                waiting.remove(one)
                yield one
        while waiting:
            left = []
            for one in waiting:
                if self.is_done(one) or self.do(one):
                    yield one
                else:
                    left.append(one)
            if len(left) == len(waiting):
                time.sleep(_POLL)
            waiting = left

    def is_done(self, one: Retraining) -> bool:
        """Whether a retraining is done."""
        return self._path(one).exists()

    def losses(self, one: Retraining) -> Floats:
        """Return what a retraining that is done has found: the loss of each query (M,)."""
        path = self._path(one)
        try:
            found = np.load(path, allow_pickle=False)
            if found.shape != (self.identity["queries"]["count"],) or found.dtype != np.float64:
                raise ValueError(f"{found.dtype} {found.shape}")
        except (OSError, ValueError, EOFError) as error:
            remedy = "Delete it: the next call does this retraining anew."
            raise ResultFileError("the file is damaged", where=str(path), remedy=remedy) from error
        return np.asarray(found)

    def do(self, one: Retraining) -> bool:
        """Do a retraining unless another process is at it; return whether it is done."""
        path = self._path(one)
        part = path.with_suffix(".part")
        with ExitStack() as stack:
            with writing(part):
                try:
                    descriptor = stack.enter_context(locked(part))
                except OutputError:  # somebody else has it
                    return False
            try:
                if not path.exists():
                    found = io.BytesIO()
                    np.save(found, self._trained(one))
                    put_in_place(path, found.getvalue(), part, descriptor)
            finally:
                part.unlink(missing_ok=True)
        return True

    def _path(self, one: Retraining) -> Path:
        return self.folder / f"{one.name}.npy"

    def _trained(self, one: Retraining) -> Floats:
        where = f"FIT {self.fit}, retraining {one.name}"
        random.seed(one.seed)  # whatever FIT leaves to these does not depend on what came before
        np.random.seed(one.seed)
        torch.manual_seed(one.seed)
        with code.user_file(where):
            model = self._fit(self._index[one.kept], one.seed)
        if not isinstance(model, nn.Module):
            what = f"FIT returned {type(model).__name__}, not a torch.nn.Module"
            raise ModelError(what, where=where, remedy=_FORM)
        try:
            return self._queries.losses(model)
        except GradscopeError as error:
            raise error.at(where) from error.__cause__

    def _by_workers(self, asked: Sequence[Retraining], workers: int) -> Iterator[Retraining]:
        """Let processes do all that they can get; yield each that is done."""
        waiting = list(asked)
        left = sum(not self.is_done(one) for one in waiting)
        with _started(self, waiting, min(workers, left)) as processes:
            running = True
            while waiting and running:
                running = any(p.is_alive() for p, _ in processes)
                for one in [one for one in waiting if self.is_done(one)]:
                    waiting.remove(one)
                    yield one
                for process, told in processes:
                    _require_well(process, told)
                connection.wait([p.sentinel for p, _ in processes if p.is_alive()], _POLL)


@contextmanager
def _started(
    here: Retrainings, asked: Sequence[Retraining], workers: int
) -> Iterator[list[tuple[Any, Any]]]:
    """Start processes, each with a pipe by which it says what is wrong; end them on leaving."""
    context = get_context("spawn")
    threads = max(1, torch.get_num_threads() // workers)
    processes: list[tuple[Any, Any]] = []
    block = getattr(signal, "pthread_sigmask", lambda *_: ())
    try:
        for _ in range(workers):
            told, tells = context.Pipe(duplex=False)
            arguments = (replace(here), asked, threads, str(Path.cwd()), tells)
            process = context.Process(target=_work, args=arguments)
            before = block(signal.SIG_BLOCK, [signal.SIGINT])  # Ctrl-C is for this process
            try:
                process.start()
            finally:
                block(signal.SIG_SETMASK, before)
            tells.close()
            processes.append((process, told))
        yield processes
    finally:
        for process, _ in processes:
            process.terminate()
        for process, _ in processes:
            process.join()


def _work(
    here: Retrainings, asked: Sequence[Retraining], threads: int, place: str, tells: Any
) -> None:
    """Do what no other process does, as long as the one that has started this one lives."""
    os.chdir(place)
    torch.set_num_threads(threads)
    parent = parent_process()
    try:
        for one in asked:
            if parent is not None and not parent.is_alive():
                return
            if not here.is_done(one):
                here.do(one)
    except GradscopeError as error:
        tells.send(error)


def _require_well(process: Any, told: Any) -> None:
    """Raise what a process that has ended says."""
    if process.is_alive():
        return
    if told.poll():
        try:
            raise told.recv()
        except EOFError:  # it had nothing to say
            pass
    if process.exitcode:
        how = f"signal {-process.exitcode}" if process.exitcode < 0 else f"code {process.exitcode}"
        raise ModelError(
            f"a worker process has ended with {how}",
            remedy="What is finished is kept: run the command again, with fewer --workers if "
            "memory ran out.",
        )


def identity_of(scores: Scores, fit: str, seed: int, fraction: float) -> dict[str, Any]:
    """Return what retrainings are of: the samples, the queries, and the code that trains."""
    sides = {"train": scores.samples, "queries": scores.queries}
    query = scores.record["query"]
    loss = str(((query.get("spec") or {}).get("loss") or {}).get("name"))
    digests = {
        "the training data": scores.record["train"]["digests"].get("dataset"),
        "the queries' data": query["digests"].get("dataset"),
        **(code.code_digests(loss, "loss") if ":" in loss else {}),
        **code.code_digests(fit, "FIT"),
    }
    return {
        "schema": "gradscope.retrainings",
        "version": 1,
        "fit": split_reference(fit)[1],
        "seed": seed,
        "fraction": fraction,
        **{key: _of_samples(table) for key, table in sides.items()},
        "loss": query["loss"],
        "digests": digests,
    }


def _of_samples(table: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    index = np.asarray(table["index"], dtype=np.int64)
    return {"count": len(index), "sha256": hashlib.sha256(index.tobytes()).hexdigest()}
