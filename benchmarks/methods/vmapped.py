"""`torch.func.vmap(grad)`, as it is and under `torch.compile`."""

import shutil
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from benchmarks.methods import dense
from benchmarks.methods.base import COMPILE_LIMIT, Call, DeclinedError, Method, Setting
from benchmarks.workloads import LOSS
from gradscope.stages.losses import resolve

_HELD = 2**30  # bytes of gradients at a time

_Function = Callable[[dict[str, Tensor], Tensor, Tensor], Mapping[str, Tensor]]


def _per_sample(setting: Setting) -> _Function:
    """Return (parameters, inputs, targets) -> {name: (n, *shape)}."""
    model, loss = setting.model, resolve(LOSS)

    def one(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss(functional_call(model, parameters, (x[None],)), y[None])[0]

    batched: _Function = vmap(grad(one), (None, 0, 0))
    return batched


def _as_it_is(task: str, setting: Setting) -> Call:
    function, arguments = _per_sample(setting), _arguments(setting)
    most = max(1, _HELD // (4 * setting.workload.parameters))
    if most < setting.workload.n:
        return _in_parts(task, setting, function, most)
    return dense.call(task, setting, lambda: function(*arguments))


def _in_parts(task: str, setting: Setting, function: _Function, most: int) -> Call:
    """Prepare a call on `most` samples at a time, whose gradients are let go before the next."""
    parameters, *samples = _arguments(setting)
    parts = list(zip(*(t.split(most) for t in samples), strict=True))

    def norms() -> dense.Dense:
        found = [dense.norms(function(parameters, *part))["norms"] for part in parts]
        return {"norms": torch.cat(found)}

    def clipped() -> dense.Dense:
        total = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for x, y in parts:
            mean = dense.clipped(function(parameters, x, y), setting.max_norm)
            for name, value in mean.items():
                total[name].add_(value, alpha=len(x) / setting.workload.n)
        return total

    calls = {"norms": norms, "clipped": clipped}
    if task not in calls:
        raise DeclinedError("its gradients do not fit into a GiB")
    return Call(calls[task])


def _compiled(task: str, setting: Setting) -> Call:
    """Compile gradients and reduction as one."""
    from torch._inductor.utils import fresh_cache

    if shutil.which("g++") is None and shutil.which("clang++") is None:
        raise DeclinedError("no C++ compiler (g++)")
    function = _per_sample(setting)
    reductions: Mapping[str, Callable[[dense.Dense], dense.Dense]] = {
        "gradients": lambda gradients: gradients,
        "norms": dense.norms,
        "moments": dense.moments,
        "clipped": lambda gradients: dense.clipped(gradients, setting.max_norm),
    }
    if task not in reductions:
        raise DeclinedError("what follows the gradients is outside of what can be compiled")
    reduce = reductions[task]
    setting.stack.callback(torch._dynamo.reset)
    setting.stack.enter_context(fresh_cache())  # or an earlier run's compilation would count
    whole = torch.compile(lambda *arguments: reduce(function(*arguments)))
    arguments = _arguments(setting)
    return Call(lambda: whole(*arguments), first_limit=COMPILE_LIMIT)


def _arguments(setting: Setting) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    parameters = {name: p.detach() for name, p in setting.workload.trainable.items()}
    return parameters, setting.workload.inputs, setting.workload.targets


METHODS = (
    Method("vmap(grad)", _as_it_is),
    Method("vmap(grad) compiled", _compiled, compiled=True),
)
