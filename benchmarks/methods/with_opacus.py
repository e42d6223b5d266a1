"""Opacus: hooks, functorch, expanded weights ("ew"), and ghost norms."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.methods import dense
from benchmarks.methods.base import Call, DeclinedError, Method, Setting
from benchmarks.reference import Result


def _prepared(mode: str, task: str, setting: Setting) -> Call:
    from opacus.grad_sample import wrap_model

    model = setting.model
    if mode != "ew":  # which takes torch's own layer apart
        _put_own_layers(model)
    wrapped = wrap_model(model, mode, loss_reduction="sum", **_options(mode, setting))
    parameters = dict(setting.workload.trainable)

    def fresh() -> None:
        for p in parameters.values():
            p.grad = p.grad_sample = None  # type: ignore[attr-defined]

    if mode == "ghost":
        return Call(_ghost(task, setting, wrapped, parameters), fresh)

    def gradients() -> dict[str, Tensor]:
        setting.workload.losses(wrapped).sum().backward()  # type: ignore[no-untyped-call]
        return {name: sample_gradient(name, p) for name, p in parameters.items()}

    if mode == "ew":  # whose backward pass leaves .grad alone
        return dense.call(task, setting, gradients, before=fresh)
    return dense.call(task, setting, gradients, before=fresh, total=lambda: _total(parameters))


def _ghost(
    task: str, setting: Setting, wrapped: Any, parameters: dict[str, nn.Parameter]
) -> Callable[[], Result]:
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    workload = setting.workload
    optimizer = torch.optim.SGD(parameters.values())

    def norms() -> Result:
        workload.losses(wrapped).sum().backward()  # type: ignore[no-untyped-call]
        return {"norms": wrapped.get_norm_sample()}

    def clipped() -> Result:
        losses = workload.losses(wrapped)
        DPTensorFastGradientClipping(wrapped, optimizer, losses, "sum").backward()
        return {name: total / workload.n for name, total in _total(parameters).items()}

    calls = {"norms": norms, "clipped": clipped}
    if task not in calls:
        raise DeclinedError("it gives norms and the sum of clipped gradients only")
    return calls[task]


def _options(mode: str, setting: Setting) -> dict[str, Any]:
    return {"max_grad_norm": setting.max_norm} if mode == "ghost" else {}


def sample_gradient(name: str, parameter: Any) -> Tensor:
    """Return the rows (n, *shape) that Opacus left at a parameter, or raise `DeclinedError`."""
    found = getattr(parameter, "grad_sample", None)
    if not isinstance(found, Tensor):
        raise DeclinedError(f"it has no gradient for {name}")
    return found


def _total(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}


def _put_own_layers(module: nn.Module) -> None:
    """Put Opacus' own LSTM, with the same weights, in the place of torch's, which it refuses."""
    from opacus.layers import DPLSTM

    for name, child in module.named_children():
        if isinstance(child, nn.LSTM):
            own = DPLSTM(
                child.input_size,
                child.hidden_size,
                child.num_layers,
                child.bias,
                child.batch_first,
            )
            own.load_state_dict(child.state_dict())
            setattr(module, name, own.to(next(child.parameters()).device))
        else:
            _put_own_layers(child)


METHODS = tuple(
    Method(f"Opacus {mode}", partial(_prepared, mode), needs="opacus")
    for mode in ("hooks", "functorch", "ew", "ghost")
)
