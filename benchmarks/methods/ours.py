"""gradscope, by its public interface."""

import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import gradscope
from benchmarks.methods.base import (
    COMPILE_LIMIT,
    Call,
    DeclinedError,
    Method,
    Setting,
)
from benchmarks.reference import Reference, Result, kept_rows
from benchmarks.tasks import DIMENSIONS, prefixed
from benchmarks.workloads import LOSS
from gradscope import Scope
from gradscope.backends.loop import one_sample
from gradscope.blocks import DenseBlock, Gradients
from gradscope.config import resolve
from gradscope.core.batch import Batch
from gradscope.engine.chains import bind
from gradscope.process.libc import keep_pages
from gradscope.run import compute, prepare
from gradscope.stages.chain import Chain

_AFFORDABLE = 10.0  # seconds a call of the loop
_PROJECT = f"project:dim={DIMENSIONS},kind=rademacher"  # random signs, as the other tools'
_ROOT = Path(__file__).parents[2]


keep_pages()  # as the command line does


def _prepared(backend: str, task: str, setting: Setting) -> Call:
    scope = setting.stack.enter_context(
        Scope(setting.model, LOSS, backend=backend, verify="never")  # the reference proves it
    )
    if backend == "loop":
        _affordable(scope, setting)
    return _TASKS[task](scope, setting)


def _compiled(task: str, setting: Setting) -> Call:
    """Prepare `vmap` compiled; the first call runs it uncompiled and compiles."""
    from torch._inductor.utils import fresh_cache

    if task not in ("gradients", "norms", "moments", "clipped"):
        raise DeclinedError("what follows the gradients is outside of what can be compiled")
    setting.stack.callback(torch._dynamo.reset)
    setting.stack.enter_context(fresh_cache())  # or an earlier run's compilation would count
    scope = setting.stack.enter_context(
        Scope(setting.model, LOSS, backend="vmap", verify="never", compile=True)
    )

    def require_program() -> None:
        if scope.notes and not scope.session.compiles:
            raise DeclinedError(scope.notes[-1])

    return replace(_TASKS[task](scope, setting), before=require_program, first_limit=COMPILE_LIMIT)


def _affordable(scope: Scope, setting: Setting) -> None:
    batch = _batch(setting)
    one_sample(scope.problem, batch.one(0))
    start = time.perf_counter()
    one_sample(scope.problem, batch.one(0))
    seconds = setting.workload.n * (time.perf_counter() - start)
    if seconds > _AFFORDABLE:
        raise DeclinedError(f"not run: about {seconds:.0f} s a call")


def _gradients(scope: Scope, setting: Setting) -> Call:
    workload = setting.workload
    out = {
        name: torch.zeros(workload.n, *p.shape, device=p.device)  # touched, as buffers in use are
        for name, p in scope.problem.parameters.items()
    }
    return Call(lambda: scope.per_sample_gradients(workload.inputs, workload.targets, out=out))


def _norms(scope: Scope, setting: Setting) -> Call:
    workload = setting.workload
    return Call(lambda: {"norms": scope.norms(workload.inputs, workload.targets)})


def _moments(scope: Scope, setting: Setting) -> Call:
    workload = setting.workload

    def run() -> Result:
        texts = ["mean", "second_moment"]
        mean, second = scope.expectations(texts, workload.inputs, workload.targets)
        return prefixed(mean=mean, second=second)

    return Call(run)


def _clipped(scope: Scope, setting: Setting) -> Call:
    workload = setting.workload
    chain = f"clip:max_norm={setting.max_norm} | mean"
    return Call(lambda: scope.expectation(chain, workload.inputs, workload.targets))


def _projection(scope: Scope, setting: Setting, kind: str | None = None) -> Call:
    chain = bind(_projecting(setting, kind) if kind else _PROJECT)
    batch = _batch(setting)

    def run() -> Result:
        gradients = scope.evaluate(batch).gradients
        return chain.rows(gradients, scope.problem, batch).dense()

    return Call(run, expected=partial(_projected, chain))


def _projecting(setting: Setting, kind: str) -> str:
    return f"project:dim={setting.workload.family.dimensions},kind={kind}"


def _projected(chain: Chain, reference: Reference) -> Result:
    """Return the projection of the reference's rows, from their dense form."""
    exact = {name: DenseBlock(g) for name, g in reference.gradients.items()}
    rows = Gradients(exact, reference.rows)
    return chain.rows(rows, reference.problem, reference.batch).dense()


def _file(scope: Scope, setting: Setting) -> Call:
    """Prepare a run as the command does: factory, checkpoint and data from files."""
    path, workload = setting.scratch / "ours.h5", setting.workload
    settings = _run(scope, setting, workload.file_batches)
    settings["compute"] |= {"batch_size": workload.n, "verify": "never"}
    job = prepare(resolve(None, settings))

    def fresh() -> None:
        path.unlink(missing_ok=True)

    def run() -> Path:
        compute(job, path)
        return path

    return Call(run, fresh, _stored, batches=workload.file_batches)


def _run(scope: Scope, setting: Setting, batches: int) -> dict[str, Any]:
    """Return a run of so many batches, whose weights and data are written to files."""
    workload = setting.workload
    files = [setting.scratch / name for name in ("weights.pt", "data.npz", "ours.h5")]
    for file in files:
        setting.stack.callback(file.unlink, missing_ok=True)
    weights, data, _ = files
    torch.save(setting.model.state_dict(), weights)
    batch = {"inputs": workload.inputs, "targets": workload.targets}
    np.savez(data, **{k: np.concatenate([v.cpu().numpy()] * batches) for k, v in batch.items()})
    return {
        "version": 1,
        "model": {
            "factory": "benchmarks.workloads:build",
            "kwargs": {"name": workload.name, "sizes": dict(workload.sizes)},
            "mode": "train",
        },
        "checkpoint": {"path": str(weights)},
        "dataset": {"path": str(data)},
        "loss": {"name": LOSS},
        "compute": {"backend": scope.backend, "device": str(workload.device)},
    }


def _of_children() -> float:
    """Return the processor's seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _most_resident(process: int) -> int:
    """Return the bytes that a process has had resident at most, 0 if it is not told."""
    try:
        text = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    found = re.search(r"^VmHWM:\s+(\d+) kB", text, re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


class _Ended(NamedTuple):
    """A process that has ended."""

    path: Path
    seconds: float  # on the processor
    peak: int  # resident bytes


def _command(scope: Scope, setting: Setting) -> Call:
    """Prepare `gradscope compute`, a process of its own, batches as it makes them."""
    folder, batches = setting.scratch.resolve(), 2
    clip, project = f"clip:max_norm={setting.max_norm} | mean", _projecting(setting, "kronecker")
    settings = _run(scope, replace(setting, scratch=folder), batches)
    settings["compute"]["transform"] = ["norm", clip, project]
    path, config = folder / "ours.h5", folder / "run.toml"
    lines = [f"{name} = {_toml(value)}\n" for name, value in settings.items()]
    config.write_text("".join(lines), encoding="utf-8")
    setting.stack.callback(config.unlink)
    words = [sys.executable, "-m", "gradscope", "compute", "--config", str(config)]
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}

    def run() -> _Ended:
        before, peak = _of_children(), 0
        process = subprocess.Popen(
            [*words, "--quiet", "--overwrite", "-o", str(path)], cwd=_ROOT, env=os.environ | threads
        )
        while process.poll() is None:  # what the system tells at the end is at least our own peak
            peak = max(peak, _most_resident(process.pid))
            time.sleep(0.02)
        if process.returncode:
            raise RuntimeError(f"gradscope compute ended with exit code {process.returncode}")
        return _Ended(path, _of_children() - before, peak)

    def result(ended: _Ended) -> Result:
        with gradscope.open(ended.path) as file:
            norms, clipped, projected = (_tensors(chain) for chain in file.chains)
        rows = projected["project"][kept_rows(setting.workload)]
        return _as_one(norms["norm"][: setting.workload.n], clipped, rows)

    def expected(reference: Reference) -> Result:
        projected = _projected(bind(project), reference)["project"]
        return _as_one(reference.norms, reference.clipped, projected)

    return Call(
        run, result=result, expected=expected, batches=batches, spent=lambda ended: ended[1:]
    )


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


def _as_one(norms: Tensor, clipped: Result, projected: Tensor) -> Result:
    """Return results of three chains; the mean as one vector, its parts by their names."""
    mean = torch.cat([clipped[name].flatten() for name in sorted(clipped)])
    return {"norms": norms, "clipped": mean, "projected": projected}


def _stored(path: Path) -> dict[str, Tensor]:
    with gradscope.open(path) as file:
        return _tensors(file.chains[0])


def _tensors(chain: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.asarray(a[...])) for name, a in chain.items()}


def _batch(setting: Setting) -> Batch:
    return Batch.of(setting.workload.inputs, setting.workload.targets)


_TASKS: Mapping[str, Callable[[Scope, Setting], Call]] = {
    "gradients": _gradients,
    "norms": _norms,
    "moments": _moments,
    "clipped": _clipped,
    "projection": _projection,
    "kronecker": partial(_projection, kind="kronecker"),
    "sjlt": partial(_projection, kind="sjlt"),
    "file": _file,
    "command": _command,
}

METHODS = (
    *(
        Method(f"gradscope {backend}", partial(_prepared, backend), ours=True)
        for backend in ("auto", "hooks", "vmap", "expand", "loop")
    ),
    Method("gradscope compiled", _compiled, ours=True, compiled=True),
)
