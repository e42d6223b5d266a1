"""The state of a stopped Adam or AdamW: the moments of each parameter, as torch.optim saved them.

A state dict numbers the parameters in the order in which the optimiser was given them, and has
their names only where it was given `model.named_parameters()`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradscope.core.texts import listed
from gradscope.errors import CheckpointError
from gradscope.sources.formats import located, reading
from gradscope.sources.weights import read

Shapes = Mapping[str, tuple[int, ...]]

_SAVE = "Save optimizer.state_dict() of torch.optim.Adam or AdamW with torch.save."
_NAMES = "An optimiser made with model.named_parameters() saves the names with its state."
_DEPTH = 2  # such as checkpoint["optimizer_states"][0]


@dataclass(frozen=True)
class Moments:
    """What Adam holds of one parameter after `step` steps."""

    first: Tensor  # m (*shape), float64
    second: Tensor  # v (*shape), float64
    largest: Tensor | None  # of all v so far (*shape), float64, with `amsgrad`
    step: float
    betas: tuple[float, float]
    eps: float

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        return tuple(self.second.shape)

    @property
    def root(self) -> Tensor:
        """√v̂ (*shape), v̂ = v / (1 - β₂ᵗ); of the largest v with `amsgrad`."""
        second = self.second if self.largest is None else self.largest
        found: Tensor = second / (1 - self.betas[1] ** self.step)
        return found.sqrt()

    def to(self, device: torch.device) -> "Moments":
        """Move the moments to a device."""
        first, second = self.first.to(device), self.second.to(device)
        largest = None if self.largest is None else self.largest.to(device)
        return replace(self, first=first, second=second, largest=largest)


Group = Sequence[tuple[str | None, Moments | None]]  # names if known; None: never updated


@dataclass(frozen=True)
class OptimizerState:
    """The moments of every parameter that an optimiser has, in its order."""

    groups: Sequence[Group]
    source: str

    def of(self, shapes: Shapes) -> dict[str, Moments]:
        """Return the moments of parameters {name: shape}, by name or by order.

        By order, all parameters of the optimiser or all that were ever updated are these, one
        group after the other; or the groups are told apart by the shapes that come next.

        Raises:
            CheckpointError: They do not fit.
        """
        with located(self.source):
            every = [entry for group in self.groups for entry in group]
            if all(name is not None for name, _ in every):
                return self._by_name({str(name): own for name, own in every}, shapes)
            return self._by_order(shapes)

    def _by_name(self, known: Mapping[str, Moments | None], shapes: Shapes) -> dict[str, Moments]:
        found = {}
        for name, shape in shapes.items():
            own = known.get(name, known.get(f"module.{name}"))  # DataParallel's
            if own is None:
                was = "was never updated" if name in known else "is not in it"
                raise CheckpointError(
                    f"{name!r} {was}, so the optimiser has no moments of it",
                    remedy=f"Select other parameters. In it: {listed(list(map(repr, known)))}.",
                )
            found[name] = own
            _require_shape(name, shape, own)
        return found

    def _by_order(self, shapes: Shapes) -> dict[str, Moments]:
        updated = [[own for _, own in group if own is not None] for group in self.groups]
        flat = [own for group in updated for own in group]
        if len(flat) != len(shapes):
            count = sum(map(len, self.groups))
            raise CheckpointError(
                f"the optimiser has moments of {len(flat)} parameters ({count} are its own), and "
                f"here are {len(shapes)}",
                remedy=f"Select the parameters that it was made with, all of them. {_NAMES}",
            )
        if [own.shape for own in flat] != list(shapes.values()):
            flat = _interleaved(updated, shapes) or flat
        for (name, shape), own in zip(shapes.items(), flat, strict=True):
            _require_shape(name, shape, own)
        return dict(zip(shapes, flat, strict=True))


def read_optimizer(path: Path) -> OptimizerState:
    """Read the state of an Adam or AdamW, alone in its file or in a checkpoint.

    Nothing in it is executed.

    Raises:
        CheckpointError: The file cannot be read, or holds no such state.
    """
    try:
        content, _ = read(path)
    except CheckpointError as error:
        error.remedy = _SAVE if "--unsafe-pickle" in (error.remedy or "") else error.remedy
        raise
    with reading(CheckpointError, path):
        states = list(_states(content, _DEPTH))
        if len(states) != 1:
            raise CheckpointError(
                f"it holds {len(states) or 'no'} states of an optimiser", remedy=_SAVE
            )
        state = states[0]["state"]
        groups = []
        for group in states[0]["param_groups"]:
            numbers = group["params"]
            names = group.get("param_names", [None] * len(numbers))
            own = [_moments(state.get(number), group) for number in numbers]
            groups.append(list(zip(names, own, strict=True)))
        return OptimizerState(groups, str(path))


def _states(content: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    if isinstance(content, Mapping) and {"state", "param_groups"} <= content.keys():
        yield content
    elif depth and isinstance(content, Mapping | list | tuple):
        for inner in content.values() if isinstance(content, Mapping) else content:
            yield from _states(inner, depth - 1)


def _moments(state: Any, group: Mapping[str, Any]) -> Moments | None:
    """Return what the state of one parameter says, None if there is none."""
    if not state:
        return None
    known = {"step", "exp_avg", "exp_avg_sq"} <= state.keys() and "mu_product" not in state
    if not known or not {"betas", "eps", "amsgrad"} <= group.keys():
        raise CheckpointError("this is the state of another optimiser", remedy=_SAVE)
    if group.get("maximize"):
        raise CheckpointError(
            "the optimiser maximises, and gradients here are those of losses",
            remedy="Give the state of one that minimises.",
        )
    first, second = state["exp_avg"], state["exp_avg_sq"]
    if second.is_complex():
        raise CheckpointError("moments of complex parameters are not supported", remedy=_SAVE)
    largest = state["max_exp_avg_sq"].double() if group["amsgrad"] else None
    if not bool((second >= 0).all()) or not float(state["step"]) >= 1:
        raise CheckpointError("its second moments are negative or NaN", remedy=_SAVE)
    betas = (float(group["betas"][0]), float(group["betas"][1]))
    step, eps = float(state["step"]), float(group["eps"])
    return Moments(first.double(), second.double(), largest, step, betas, eps)


def _interleaved(groups: Sequence[Sequence[Moments]], shapes: Shapes) -> list[Moments] | None:
    """Return the moments in the parameters' order, if the shapes alone say which group is next.

    So it is where weights decay and biases do not: each group is in the parameters' order.
    """
    left, found = [list(group) for group in groups], []
    for shape in shapes.values():
        fitting = [group for group in left if group and group[0].shape == shape]
        if len(fitting) != 1:
            return None
        found.append(fitting[0].pop(0))
    return found


def _require_shape(name: str, shape: tuple[int, ...], own: Moments) -> None:
    if own.shape != shape:
        raise CheckpointError(
            f"the optimiser's moments in the place of {name!r} are of shape {own.shape}, and the "
            f"parameter is of {shape}",
            remedy=f"Give the state of an optimiser of model.parameters(). {_NAMES}",
        )
