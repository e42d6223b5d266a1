"""gradscope, by its public interface."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

import gradscope
from benchmarks.methods.base import (
    COMPILE_LIMIT,
    Call,
    DeclinedError,
    Method,
    Setting,
)
from benchmarks.reference import Reference, Result
from benchmarks.tasks import DIMENSIONS, prefixed
from benchmarks.workloads import LOSS
from gradscope import Scope
from gradscope.backends.loop import one_sample
from gradscope.blocks import DenseBlock, Gradients
from gradscope.config import resolve
from gradscope.core.batch import Batch
from gradscope.core.libc import keep_pages
from gradscope.run import compute, prepare
from gradscope.stages.chain import bind

_AFFORDABLE = 10.0  # seconds a call of the loop
_PROJECT = f"project:dim={DIMENSIONS},kind=rademacher"  # random signs, as the other tools'


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


def _projection(scope: Scope, setting: Setting) -> Call:
    chain = bind(_PROJECT)
    batch = _batch(setting)

    def run() -> Result:
        gradients = scope.evaluate(batch).gradients
        return chain.rows(gradients, scope.problem, batch).dense()

    def expected(reference: Reference) -> Result:
        exact = {name: DenseBlock(g) for name, g in reference.gradients.items()}
        rows = Gradients(exact, reference.rows)
        return chain.rows(rows, reference.problem, reference.batch).dense()

    return Call(run, expected=expected)


def _file(scope: Scope, setting: Setting) -> Call:
    """Prepare a run as the command does: factory, checkpoint and data from files."""
    folder, workload = setting.scratch, setting.workload
    weights, data, path = (folder / f for f in ("weights.safetensors", "data.npz", "ours.h5"))
    save_file({k: v.contiguous() for k, v in setting.model.state_dict().items()}, weights)
    batch = {"inputs": workload.inputs, "targets": workload.targets}
    np.savez(
        data,
        **{k: np.concatenate([v.cpu().numpy()] * workload.file_batches) for k, v in batch.items()},
    )
    for file in (weights, data, path):
        setting.stack.callback(file.unlink, missing_ok=True)
    settings = {
        "model": {
            "factory": "benchmarks.workloads:build",
            "kwargs": {"name": workload.name, "sizes": dict(workload.sizes)},
            "mode": "train",
        },
        "checkpoint": {"path": str(weights)},
        "dataset": {"path": str(data)},
        "loss": {"name": LOSS},
        "compute": {
            "backend": scope.backend,
            "batch_size": workload.n,
            "verify": "never",
            "device": str(workload.device),
        },
    }
    job = prepare(resolve(None, settings))

    def fresh() -> None:
        path.unlink(missing_ok=True)

    def run() -> Path:
        compute(job, path)
        return path

    return Call(run, fresh, _stored, batches=workload.file_batches)


def _stored(path: Path) -> dict[str, Tensor]:
    with gradscope.open(path) as file:
        return {name: torch.from_numpy(np.asarray(a[:])) for name, a in file.chains[0].items()}


def _batch(setting: Setting) -> Batch:
    return Batch.of(setting.workload.inputs, setting.workload.targets)


_TASKS: Mapping[str, Callable[[Scope, Setting], Call]] = {
    "gradients": _gradients,
    "norms": _norms,
    "moments": _moments,
    "clipped": _clipped,
    "projection": _projection,
    "file": _file,
}

METHODS = (
    *(
        Method(f"gradscope {backend}", partial(_prepared, backend), ours=True)
        for backend in ("auto", "hooks", "vmap", "expand", "loop")
    ),
    Method("gradscope compiled", _compiled, ours=True, compiled=True),
)
