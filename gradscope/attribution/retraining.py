"""Retraining without some samples, and the loss of each query under the retrained models.

A folder holds one small file for each retraining. Any number of processes share the folder. Each
process locks the retraining that it works on, and moves the complete file to its final path. The
lock ends with the process: a killed process loses only the retraining it was working on.
"""

import hashlib
import io
import json
import os
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
from gradscope.config import function_of, split_reference
from gradscope.errors import (
    GradscopeError,
    ModelError,
    NonFiniteError,
    OutputError,
    ResultFileError,
)
from gradscope.model.problem import Problem
from gradscope.model.randomness import seeded
from gradscope.run import prepare
from gradscope.run.job import read
from gradscope.run.overlap import BatchSize
from gradscope.sources import code
from gradscope.storage import differences, locked, put_in_place, writing

PLAN = "plan.json"  # the file in the folder that describes the retrainings
_NAMES = (PLAN, "subset-", "whole-", "without-")  # the names of our files begin with these
_POLL = 0.1  # seconds between checks of the progress of other processes
_FORM = "It is called as FIT(indices, seed) and returns the trained torch.nn.Module."

Mask = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Retraining:
    """A training on some of the samples."""

    name: str  # the name of its file, without suffix
    kept: Mask  # which training samples it uses (N,)
    seed: int  # the seed given to FIT


def subset(seed: int, number: int, n: int, fraction: float) -> Retraining:
    """Return the training on random subset `number`, which depends on the arguments only."""
    size = min(n - 1, max(1, round(fraction * n)))
    kept = np.zeros(n, dtype=bool)
    kept[np.random.default_rng([seed, number]).permutation(n)[:size]] = True
    return Retraining(f"subset-{number:04}", kept, seed_of(seed, number))


def seed_of(seed: int, number: int) -> int:
    """Return the seed of training `number`."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def without(name: str, left_out: NDArray[np.int64], n: int, seed: int) -> Retraining:
    """Return the training on all samples except `left_out`; the file's name contains a hash."""
    kept = np.ones(n, dtype=bool)
    kept[left_out] = False
    which = hashlib.sha256(np.packbits(kept).tobytes()).hexdigest()[:12]
    return Retraining(f"{name}-{which}-{seed}", kept, seed)


class Queries:
    """The queries of a score file, to evaluate their losses with retrained models.

    Raises:
        ResultFileError: The file does not record the queries' run, or their data have changed.
        InputError: The queries cannot be read.
    """

    def __init__(self, scores: Scores) -> None:
        where = None if scores.file is None else str(scores.file.path)
        side: Any = scores.record["query"]
        if side.get("spec") is None:
            raise ResultFileError(
                "the scores come from a model in memory, so the queries cannot be read again",
                where=where,
                remedy="Compute the scores with gradscope attribute, from result or run files.",
            )
        spec = recorded_run(side["spec"], where).computing(transform=("identity",), shard=None)
        self._job = job = prepare(spec)
        index = scores.queries["index"]
        changed = job.digests["dataset"] != side["digests"].get("dataset")
        if changed or not np.array_equal(index, np.arange(job.rows.start, job.rows.stop)):
            raise ResultFileError(
                "the queries' data have changed since they were scored",
                where=str(spec.dataset.path),
                remedy="Restore the data, or compute the scores again.",
            )

    def losses(self, model: nn.Module) -> Floats:
        """Return the loss of each query (M,) under a model, in its current mode.

        Raises:
            ModelError: The model's parameters differ from those in the run.
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
                remedy="The training has diverged: correct FIT, or lower the learning rate.",
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
            f"{k}: {theirs.get(k, 'absent')}, but {ours.get(k, 'absent')} in the run"
            for k in names[:3]
        )
        raise ModelError(
            f"FIT returned a model whose parameters differ from the run's model ({shown})",
            remedy="Return the model that the run's factory builds.",
        )


@dataclass
class Retrainings:
    """A folder of retrainings for the queries of a score file."""

    folder: Path
    scores: Path
    fit: str  # FIT, as FILE.py:NAME or package.module:NAME
    identity: Mapping[str, Any]  # of `identity_of`; retrainings with another identity are refused

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
        """Create the folder, or check that its retrainings have the same identity.

        Raises:
            OutputError: The folder holds other retrainings or other files, or is not writable.
        """
        _ = self._queries  # raises before a file is written
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            there = list(self.folder.iterdir())
            ours = overwrite and self._found() is not None
            for path in there if ours else ():
                if path.name.startswith(_NAMES):
                    path.unlink(missing_ok=True)
            # a draft belongs to a process that started at the same time
            if ours or all(path.name.startswith(f"{PLAN}.") for path in there):
                draft = self.folder / f"{PLAN}.{os.getpid()}.part"
                draft.write_text(json.dumps(self.identity, indent=2))
                draft.replace(self.folder / PLAN)
        found = self._found()
        if found is None:
            raise OutputError(
                f"the folder is not empty and has no {PLAN} written by gradscope validate",
                where=str(self.folder),
                remedy="Give an empty --folder.",
            )
        wrong = list(differences(found, self.identity))
        if wrong:
            raise OutputError(
                f"the folder holds other retrainings: {'; '.join(wrong)}",
                where=str(self.folder),
                remedy="Give another --folder, or replace them with overwrite=True.",
            )

    def _found(self) -> dict[str, Any] | None:
        """Return the identity of the retrainings in the folder, or None if there is no plan."""
        try:
            found = json.loads((self.folder / PLAN).read_bytes())
        except (OSError, ValueError):
            return None
        known = isinstance(found, dict) and found.get("schema") == self.identity["schema"]
        return found if known else None

    def remaining(self, asked: Sequence[Retraining], workers: int = 1) -> Iterator[Retraining]:
        """Do all retrainings, here or in worker processes; yield each once it is done.

        Raises:
            GradscopeError: FIT raised, returned an unsuitable model, or its training diverged.
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
        """Return the loss of each query (M,) from a retraining that is done."""
        path = self._path(one)
        try:
            found = np.load(path, allow_pickle=False)
            if found.shape != (self.identity["queries"]["count"],) or found.dtype != np.float64:
                raise ValueError(f"{found.dtype} {found.shape}")
        except (OSError, ValueError, EOFError) as error:
            remedy = "Delete it: the next call repeats this retraining."
            raise ResultFileError("the file is damaged", where=str(path), remedy=remedy) from error
        return np.asarray(found)

    def do(self, one: Retraining) -> bool:
        """Do a retraining unless another process works on it; return whether it is done."""
        path = self._path(one)
        part = path.with_suffix(".part")
        with ExitStack() as stack:
            with writing(part):
                try:
                    descriptor = stack.enter_context(locked(part))
                except OutputError:  # another process has the lock
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
        # so that results do not depend on earlier retrainings
        with seeded(one.seed), code.user_file(f"{where}, called as FIT(indices, seed)"):
            model = self._fit(self._index[one.kept], one.seed)
        if not isinstance(model, nn.Module):
            what = f"FIT returned {type(model).__name__}, not a torch.nn.Module"
            raise ModelError(what, where=where, remedy=_FORM)
        try:
            return self._queries.losses(model)
        except GradscopeError as error:
            raise error.at(where) from error.__cause__

    def _by_workers(self, asked: Sequence[Retraining], workers: int) -> Iterator[Retraining]:
        """Do retrainings in worker processes; yield each once it is done."""
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
    """Start worker processes, each with a pipe for its error; end them on leaving."""
    context = get_context("spawn")
    threads = max(1, torch.get_num_threads() // workers)
    processes: list[tuple[Any, Any]] = []
    block = getattr(signal, "pthread_sigmask", lambda *_: ())
    try:
        for _ in range(workers):
            told, tells = context.Pipe(duplex=False)
            arguments = (replace(here), asked, threads, str(Path.cwd()), tells)
            process = context.Process(target=_work, args=arguments)
            before = block(signal.SIG_BLOCK, [signal.SIGINT])  # workers ignore Ctrl-C
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
    """Do retrainings that no other process works on, while the parent process lives."""
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
    """Raise the error of a worker process that has ended."""
    if process.is_alive():
        return
    if told.poll():
        try:
            raise told.recv()
        except EOFError:  # it sent no error
            pass
    if process.exitcode:
        how = f"signal {-process.exitcode}" if process.exitcode < 0 else f"code {process.exitcode}"
        raise ModelError(
            f"a worker process has ended with {how}",
            remedy="Run the command again, with fewer --workers if memory ran out. Finished "
            "retrainings are kept.",
        )


def identity_of(scores: Scores, fit: str, seed: int, fraction: float) -> dict[str, Any]:
    """Return what identifies retrainings: samples, queries, seed, fraction and training code."""
    sides = {"train": scores.samples, "queries": scores.queries}
    query = scores.record["query"]
    loss = str(((query.get("spec") or {}).get("loss") or {}).get("name"))
    digests = {
        "the training data": scores.record["train"]["digests"].get("dataset"),
        "the queries' data": query["digests"].get("dataset"),
        **(code.code_digests(loss, "loss") if function_of(loss) else {}),
        **code.code_digests(fit, "FIT"),
    }
    return {
        "schema": "gradscope.retrainings",
        "version": 1,
        "fit": split_reference(fit)[1],
        "seed": seed,
        "fraction": fraction,
        **{key: _of_samples(table) for key, table in sides.items()},
        "loss": str(query["loss"]),
        "digests": digests,
    }


def _of_samples(table: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    index = np.asarray(table["index"], dtype=np.int64)
    return {"count": len(index), "sha256": hashlib.sha256(index.tobytes()).hexdigest()}
