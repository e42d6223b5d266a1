"""The state of a stopped Adam or AdamW: the moments of each parameter, as torch.optim saved them.

A state dict numbers the parameters in the order in which the optimiser was given them. It has
their names only where the optimiser was given `model.named_parameters()`. Without names the order
is the training script's own: groups may come in any order, and so may parameters in a group. So
moments without names are assigned only where their shapes leave one assignment.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradscope.core.texts import listed
from gradscope.errors import CheckpointError, located

Shapes = Mapping[str, tuple[int, ...]]

_NAMES = "An optimiser made with model.named_parameters() saves the names with its state."
_SAVE_NAMES = (
    "To save names, give the optimiser model.named_parameters(), or groups of such pairs: "
    'AdamW([{"params": [(name, parameter), ...]}, ...]).'
)
_GIVE_NAMES = (
    "For this file, add names=FILE.json, a list of the parameters' names in the optimiser's order, "
    "group after group"
)
_WRAPPERS = ("", "module.", "_orig_mod.")  # names in DataParallel and in compiled modules


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
class ParameterNames:
    """The names of an optimiser's parameters, for a state that has none of its own."""

    names: Sequence[str] | None  # in the optimiser's order; None: each group is in the model's


@dataclass(frozen=True)
class OptimizerState:
    """The moments of every parameter that an optimiser has, in its order."""

    groups: Sequence[Group]
    source: str
    in_order: bool = False  # the user says that each group is in the model's order

    def of(self, shapes: Shapes, model: Shapes | None = None) -> dict[str, Moments]:
        """Return the moments of parameters {name: shape}.

        Moments with names are found by name. Moments without names are found by shape, if one
        assignment alone fits the shapes.

        Args:
            shapes: The parameters that moments are wanted of, in the model's order.
            model: All parameters of the model: a moment without a name could be of any of them.

        Raises:
            CheckpointError: The moments do not fit, or fit in more than one way.
        """
        if self.in_order and model and [len(group) for group in self.groups] == [len(model)]:
            whole = ParameterNames(tuple(model))  # also of parameters that were never updated
            return replace(self, in_order=False).with_names(whole).of(shapes)
        with located(self.source):
            every = [entry for group in self.groups for entry in group]
            names = [name for name, _ in every if name is not None]
            if len(names) == len(every):
                require_distinct(names, "the optimiser's parameters", _SAVE_NAMES)
                return self._by_name({str(name): own for name, own in every}, shapes)
            return self._by_shape(shapes, model or {})

    def with_names(self, given: "ParameterNames") -> "OptimizerState":
        """Return the same state with names, one for each parameter, group after group.

        Raises:
            CheckpointError: The state has names, or it has another number of parameters.
        """
        count = sum(map(len, self.groups))
        with located(self.source):
            if any(name is not None for group in self.groups for name, _ in group):
                raise CheckpointError(
                    "the optimiser's state has names already",
                    remedy="Leave the argument names= out.",
                )
            if given.names is None:
                return replace(self, in_order=True)
            if len(given.names) != count:
                raise CheckpointError(
                    f"there are {len(given.names)} names, and the optimiser has {count} parameters",
                    remedy="Give one name for each parameter of the optimiser, group after group.",
                )
        left = iter(given.names)
        groups = [[(next(left), own) for _, own in group] for group in self.groups]
        return replace(self, groups=groups)

    def _by_name(self, known: Mapping[str, Moments | None], shapes: Shapes) -> dict[str, Moments]:
        found = {}
        for name, shape in shapes.items():
            own = next((known[p + name] for p in _WRAPPERS if known.get(p + name)), None)
            if own is None:
                was = "was never updated" if name in known else "is not in it"
                raise CheckpointError(
                    f"{name!r} {was}, so the optimiser has no moments of it",
                    remedy=f"Select other parameters. In it: {listed(list(map(repr, known)))}.",
                )
            found[name] = own
            _require_shape(name, shape, own)
        return found

    def _by_shape(self, shapes: Shapes, model: Shapes) -> dict[str, Moments]:
        updated = [[own for _, own in group if own is not None] for group in self.groups]
        flat = [own for group in updated for own in group]
        if len(flat) != len(shapes):
            count = sum(map(len, self.groups))
            raise CheckpointError(
                f"the optimiser has moments of {len(flat)} parameters ({count} are its own), and "
                f"here are {len(shapes)}",
                remedy=f"Select the parameters that it was made with, all of them. {_NAMES}",
            )
        if sorted(own.shape for own in flat) != sorted(shapes.values()):
            for (name, shape), own in zip(shapes.items(), flat, strict=True):
                _require_shape(name, shape, own)
        if self.in_order:
            return dict(zip(shapes, _interleaved(updated, shapes), strict=True))
        _require_one_assignment(shapes, model)
        by_shape = {own.shape: own for own in flat}
        return {name: by_shape[shape] for name, shape in shapes.items()}


def _require_one_assignment(shapes: Shapes, model: Shapes) -> None:
    """Refuse parameters that share a shape with a parameter of the model, selected or not."""
    every = {**model, **shapes}
    for shape in shapes.values():
        alike = [other for other, its in every.items() if its == shape]
        if len(alike) > 1:
            raise CheckpointError(
                f"the optimiser's state has no names, and its moments fit the model in more than "
                f"one way: {listed(map(repr, alike), 4)} are of one shape, {shape}",
                remedy=f"{_SAVE_NAMES} {_GIVE_NAMES}; or names=model, if the optimiser was given "
                "the parameters in the order of model.parameters(), in each of its groups.",
            )


def _interleaved(groups: Sequence[Sequence[Moments]], shapes: Shapes) -> list[Moments]:
    """Return the moments in the parameters' order, where each group is in that order.

    The shapes must say which group is next, as where weights decay and biases do not.
    """
    left, found = [list(group) for group in groups], []
    for name, shape in shapes.items():
        fitting = [group for group in left if group and group[0].shape == shape]
        if len(fitting) != 1:
            many = f"the next moments of {len(fitting)} groups are of its shape, {shape}"
            none = f"no group goes on with moments of its shape, {shape}"
            raise CheckpointError(
                f"names=model does not say which moments {name!r} has: {many if fitting else none}",
                remedy=f"{_GIVE_NAMES}. {_SAVE_NAMES}",
            )
        found.append(fitting[0].pop(0))
    return found


def require_distinct(names: Sequence[str], what: str, remedy: str) -> None:
    """Raise a CheckpointError if a name occurs twice."""
    double = [name for name, times in Counter(names).items() if times > 1]
    if double:
        raise CheckpointError(f"{listed(map(repr, double))} names several of {what}", remedy=remedy)


def _require_shape(name: str, shape: tuple[int, ...], own: Moments) -> None:
    if own.shape != shape:
        raise CheckpointError(
            f"the optimiser's moments in the place of {name!r} are of shape {own.shape}, and the "
            f"parameter is of {shape}",
            remedy=f"Give the state of an optimiser of model.parameters(). {_NAMES}",
        )
