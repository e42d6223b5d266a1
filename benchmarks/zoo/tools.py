"""gradscope and the other tools, each asked for the rows of a batch of the same model and loss."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from benchmarks.methods.base import DeclinedError
from benchmarks.methods.with_backpack import saved
from benchmarks.methods.with_opacus import sample_gradient
from benchmarks.zoo.libraries import PEERS
from benchmarks.zoo.loss import Uneven
from benchmarks.zoo.subject import Inputs, outputs_of
from gradscope import Scope
from gradscope.blocks import Tuner
from gradscope.core.batch import call
from gradscope.errors import RefusedError

Rows = dict[str, Tensor]


@dataclass(frozen=True)
class Bound:
    """A tool, bound to a model and a loss.

    Attributes:
        rows: Takes a batch to {name: (n, *shape)}.
        norms: Takes a batch to (n,), if the tool has a way that forms no rows.
        facts: Returns what else is worth knowing afterwards.
    """

    rows: Callable[[Inputs], Rows]
    norms: Callable[[Inputs], Tensor] | None = None
    facts: Callable[[], dict[str, Any]] = field(default=dict)


def _gradscope(model: nn.Module, loss: Uneven, backend: str = "auto") -> Bound:
    scope = Scope(model, loss, backend=backend)
    scope.session.tuner = Tuner(measures=False)  # `auto` takes `hooks` wherever it runs the model

    def facts() -> dict[str, Any]:
        return {"backend": scope.backend, "notes": list(scope.notes)}

    return Bound(scope.per_sample_gradients, scope.norms, facts)


def _vmapped(model: nn.Module, loss: Uneven) -> Bound:
    parameters = {k: p.detach() for k, p in model.named_parameters() if p.requires_grad}

    def rows(inputs: Inputs) -> Rows:
        leaves, form = pytree.tree_flatten(inputs)
        mapped = [k for k, v in enumerate(leaves) if isinstance(v, Tensor) and v.dim()]

        def one(weights: Rows, *samples: Tensor) -> Tensor:
            given = list(leaves)
            for k, sample in zip(mapped, samples, strict=True):
                given[k] = sample[None]
            tree = pytree.tree_unflatten(given, form)
            wanted = ((), tree) if isinstance(tree, dict) else (tree, None)
            return loss(functional_call(model, weights, *wanted))[0]

        samples = [leaves[k] for k in mapped]
        found: Rows = vmap(grad(one), (None, *(0 for _ in samples)))(parameters, *samples)
        return found

    return Bound(rows)


def _opacus(model: nn.Module, loss: Uneven) -> Bound:
    from opacus import GradSampleModule

    own = copy.deepcopy(model)
    parameters = {k: p for k, p in own.named_parameters() if p.requires_grad}
    for module in own.modules():  # in eval mode it keeps nothing
        module.training = not isinstance(module, _BatchNorm) and any(
            True for _ in module.parameters(recurse=False)
        )
    wrapped = GradSampleModule(own, loss_reduction="sum")

    def rows(inputs: Inputs) -> Rows:
        for p in parameters.values():
            p.grad = p.grad_sample = None  # type: ignore[attr-defined]
        losses = loss(outputs_of(wrapped, inputs))
        losses.sum().backward()  # type: ignore[no-untyped-call]
        return {
            k: p.new_zeros(len(losses), *p.shape) if p.grad is None else sample_gradient(k, p)
            for k, p in parameters.items()
        }

    return Bound(rows)


def _backpack(model: nn.Module, loss: Uneven) -> Bound:
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad

    own = extend(copy.deepcopy(model))
    parameters = {k: p for k, p in own.named_parameters() if p.requires_grad}

    def rows(inputs: Inputs) -> Rows:
        for p in parameters.values():
            p.grad = None
            if hasattr(p, "grad_batch"):
                del p.grad_batch
        losses = loss(outputs_of(own, inputs))
        with backpack(BatchGrad()):
            losses.sum().backward()  # type: ignore[no-untyped-call]
        used = {k: p for k, p in parameters.items() if p.grad is not None}
        found = saved(used, "grad_batch")
        return {
            k: found[k] if k in found else p.new_zeros(len(losses), *p.shape)
            for k, p in parameters.items()
        }

    return Bound(rows)


TOOLS: dict[str, Callable[[nn.Module, Uneven], Bound]] = {
    "gradscope": _gradscope,
    "vmap(grad)": _vmapped,
    "Opacus": _opacus,
    "BackPACK": _backpack,
}
assert PEERS.keys() <= TOOLS.keys()


def refusal(error: BaseException) -> bool:
    """Whether an error is a tool's own statement that it does not do this."""
    if isinstance(error, RefusedError | DeclinedError | NotImplementedError):
        return True
    return type(error).__module__.split(".")[0] in ("opacus", "backpack")


def plain(model: nn.Module, loss: Uneven, inputs: Inputs) -> Callable[[], object]:
    """Return the unit: a forward pass, and a backward pass from the summed losses."""
    parameters = [p for p in model.parameters() if p.requires_grad]

    def run() -> object:
        return torch.autograd.grad(loss(call(model, inputs)).sum(), parameters, allow_unused=True)

    return run
