"""BackPACK: BatchGrad, BatchL2Grad and SumGradSquared."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.methods import dense
from benchmarks.methods.base import Call, DeclinedError, Method, Setting
from benchmarks.reference import Result
from benchmarks.tasks import prefixed

_SAVED = ("grad_batch", "batch_l2", "sum_grad_squared")


def _prepared(task: str, setting: Setting) -> Call:
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad, BatchL2Grad, SumGradSquared

    workload = setting.workload
    model = extend(setting.model)
    parameters = setting.workload.trainable
    n = workload.n

    def fresh() -> None:
        for p in parameters.values():
            p.grad = None
            for field in _SAVED:
                if hasattr(p, field):
                    delattr(p, field)

    def backward(extension: Any, **options: bool) -> Tensor:
        losses = workload.losses(model)
        with backpack(extension):
            losses.sum().backward(**options)  # type: ignore[no-untyped-call]
        return losses

    def gradients() -> dict[str, Tensor]:
        backward(BatchGrad())
        return saved(parameters, "grad_batch")

    def norms() -> Result:
        backward(BatchL2Grad())
        return {"norms": _norms(parameters)}

    def moments() -> Result:
        backward(SumGradSquared())
        mean = {name: _total(p) / n for name, p in parameters.items()}
        squares = saved(parameters, "sum_grad_squared")
        return prefixed(mean=mean, second={k: v / n for k, v in squares.items()})

    def clipped() -> Result:
        losses = backward(BatchL2Grad(), retain_graph=True)
        factors = (setting.max_norm / _norms(parameters)).clamp(max=1.0) / n
        found = torch.autograd.grad(losses, list(parameters.values()), factors)
        return dict(zip(parameters, found, strict=True))

    own: Mapping[str, Callable[[], Result]] = {
        "norms": norms,
        "moments": moments,
        "clipped": clipped,
    }
    if task in own:
        return Call(own[task], fresh)
    return dense.call(task, setting, gradients, before=fresh)


def _norms(parameters: Mapping[str, nn.Parameter]) -> Tensor:
    return torch.stack(list(saved(parameters, "batch_l2").values())).sum(0).sqrt()


def saved(parameters: Mapping[str, nn.Parameter], field: str) -> dict[str, Tensor]:
    """Return {name: what BackPACK saved in `field`}, or raise `DeclinedError` for lack of it."""
    missing = [name for name, p in parameters.items() if not hasattr(p, field)]
    if missing:
        more = ", ..." if len(missing) > 2 else ""
        raise DeclinedError(f"it has no rule for {', '.join(missing[:2])}{more}")
    return {name: getattr(p, field) for name, p in parameters.items()}


def _total(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise DeclinedError("a parameter has no gradient")
    return parameter.grad


METHODS = (Method("BackPACK", _prepared, needs="backpack"),)
