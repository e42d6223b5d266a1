"""Per-sample gradients of other libraries, for comparison with the loop (`--against NAME`)."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradscope.comparison.run import Implementation
from gradscope.core.batch import call
from gradscope.errors import SpecError, UnsupportedError
from gradscope.model.locate import layer_of
from gradscope.model.problem import Loss, is_model_loss


class Peer(NamedTuple):
    """A library that computes per-sample gradients."""

    package: str  # its name for pip
    module: str  # its name for import
    make: Callable[[], Implementation]  # an implementation that prepares each model once


def peer(name: str, rows: str = "sample") -> Implementation:
    """Return a new implementation of the library `name`, one of `PEERS`.

    Raises:
        SpecError: The library is not installed, or does not support such rows.
    """
    found = PEERS[name]
    if rows != "sample":
        raise SpecError(
            f"{found.package} does not support rows of {rows}s",
            where=f"against {name}",
            remedy="Compare rows of samples.",
        )
    if find_spec(found.module) is None:
        raise SpecError(
            f"{found.package} is not installed",
            where=f"against {name}",
            remedy=f"Install it: pip install {found.package}.",
        )
    return found.make()


def peer_version(name: str) -> str:
    """Return the version of the library called `name`."""
    return version(PEERS[name].package)


def _opacus() -> Implementation:
    """Opacus' GradSampleModule, which stores the rows of layers in train mode."""
    from opacus.grad_sample import GradSampleModule
    from opacus.validators import ModuleValidator

    known: dict[int, Any] = {}  # by the model's id; the entry keeps the model alive

    def rows(model: nn.Module, loss: Loss, inputs: Any, targets: Any) -> dict[str, Tensor]:
        try:
            if id(model) not in known:
                _train_layers(model, loss, inputs, targets)
                known[id(model)] = GradSampleModule(model, loss_reduction="sum")
            _backward(model, loss, inputs, targets, "grad_sample")
        except Exception as error:
            reasons: dict[str, list[str]] = {}  # {first sentence of a reason: layers}
            for name, layer in model.train().named_modules():
                if _trains(layer):
                    for reason in ModuleValidator.validate(layer, strict=False):
                        reasons.setdefault(str(reason).partition(". ")[0], []).append(name)
            if not reasons:
                raise
            what = "; ".join(f"{_innermost(names)}: {text}" for text, names in reasons.items())
            remedy = "Replace these layers, for example with opacus.validators.ModuleValidator.fix."
            raise UnsupportedError(what, remedy=remedy) from error
        # a list if a layer ran again after its rows were complete; DP-SGD also joins the list
        found = _saved(model, "grad_sample")
        return {k: torch.cat(g) if isinstance(g, list) else g for k, g in found.items()}

    return rows


def _innermost(names: Sequence[str]) -> str:
    """Return the layers that do not contain another layer of the list."""
    within = {name: f"{name}." if name else "" for name in names}
    inner = [n for n in names if not any(o != n and o.startswith(within[n]) for o in names)]
    return ", ".join(name or "the model" for name in inner)


def _train_layers(model: nn.Module, loss: Loss, inputs: Any, targets: Any) -> None:
    """Put layers with trainable parameters in train mode; raise if this changes the losses."""
    with torch.no_grad():
        before = _losses(model, loss, inputs, targets)
        for layer in model.modules():
            layer.training |= _trains(layer)
        after = _losses(model, loss, inputs, targets)
    if not torch.allclose(before, after, equal_nan=True):
        raise UnsupportedError(
            "Opacus works in train mode only, and this model's losses differ in train mode",
            remedy="Compare a model without dropout and batch statistics, or one in mode train.",
        )


def _trains(layer: nn.Module) -> bool:
    return any(p.requires_grad for p in layer.parameters(recurse=False))


def _backpack() -> Implementation:
    """BackPACK's BatchGrad, which has rules for modules."""
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad

    def rows(model: nn.Module, loss: Loss, inputs: Any, targets: Any) -> dict[str, Tensor]:
        with backpack(BatchGrad()):
            try:
                _backward(extend(model), loss, inputs, targets, "grad_batch")
            except NotImplementedError as error:
                where = layer_of(error, model)
                raise UnsupportedError(" ".join(str(error).split()), where=where) from error
        return _saved(model, "grad_batch")

    return rows


def _losses(model: nn.Module, loss: Loss, inputs: Any, targets: Any) -> Tensor:
    own = (model, inputs, targets) if is_model_loss(loss) else (call(model, inputs), targets)
    return loss(*own)


def _backward(model: nn.Module, loss: Loss, inputs: Any, targets: Any, field: str) -> None:
    """Run the backward pass of the summed losses, after clearing the results of earlier passes."""
    for p in model.parameters():
        p.grad = None
        if hasattr(p, field):
            setattr(p, field, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about hooks of layers whose inputs are data
        _losses(model, loss, inputs, targets).sum().backward()  # type: ignore[no-untyped-call]


def _saved(model: nn.Module, field: str) -> dict[str, Any]:
    """Return the gradients that the library stored on parameters."""
    found = {k: getattr(p, field, None) for k, p in model.named_parameters()}
    return {k: g for k, g in found.items() if g is not None}


PEERS: Mapping[str, Peer] = {
    "opacus": Peer("opacus", "opacus", _opacus),
    "backpack": Peer("backpack-for-pytorch", "backpack", _backpack),
}
