"""The state of an Adam or AdamW optimiser: the moments of each parameter, saved by torch.optim.

A state dict numbers the parameters in the optimiser's order. It has names only if the optimiser was
created with `model.named_parameters()`. Otherwise the training script determines the order of
groups, and of parameters in groups. So moments without names are assigned only if their shapes
allow a single assignment.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradscope.core.texts import listed
from gradscope.errors import CheckpointError, located

Shapes = Mapping[str, tuple[int, ...]]

_NAMES = "An optimiser created with model.named_parameters() saves the names with its state."
_SAVE_NAMES = (
    "To save names, create the optimiser with model.named_parameters(), or with groups of such "
    'pairs: AdamW([{"params": [(name, parameter), ...]}, ...]).'
)
_GIVE_NAMES = (
    "For this file, add names=FILE.json, a list of the parameters' names in the optimiser's order, "
    "group after group"
)
_WRAPPERS = ("", "module.", "_orig_mod.")  # names in DataParallel and in compiled modules


@dataclass(frozen=True)
class AdamMoments:
    """Adam's moments of one parameter after `step` steps."""

    first: Tensor  # m (*shape), float64
    second: Tensor  # v (*shape), float64
    largest: Tensor | None  # the maximum of all v so far (*shape), float64, with `amsgrad`
    step: float
    betas: tuple[float, float]
    eps: float

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        return tuple(self.second.shape)

    @property
    def root(self) -> Tensor:
        """√v̂ (*shape), v̂ = v / (1 - β₂ᵗ); from the largest v with `amsgrad`."""
        second = self.second if self.largest is None else self.largest
        found: Tensor = second / (1 - self.betas[1] ** self.step)
        return found.sqrt()

    def to(self, device: torch.device) -> "AdamMoments":
        """Move the moments to a device."""
        first, second = self.first.to(device), self.second.to(device)
        largest = None if self.largest is None else self.largest.to(device)
        return replace(self, first=first, second=second, largest=largest)


# names if known; moments, or None if never updated
Group = Sequence[tuple[str | None, AdamMoments | None]]


@dataclass(frozen=True)
class ParameterNames:
    """The names of an optimiser's parameters, for a state without names."""

    names: Sequence[str] | None  # in the optimiser's order; None: each group has the model's order


@dataclass(frozen=True)
class OptimizerState:
    """The moments of all parameters of an optimiser, in its order."""

    groups: Sequence[Group]
    source: str
    in_order: bool = False  # whether the user says that each group has the model's order

    def of(self, shapes: Shapes, model: Shapes | None = None) -> dict[str, AdamMoments]:
        """Return the moments of parameters {name: shape}.

        Moments with names are found by name. Moments without names are found by shape, if the
        shapes allow a single assignment.

        Args:
            shapes: The parameters whose moments are requested, in the model's order.
            model: All parameters of the model; a moment without a name could belong to any of them.

        Raises:
            CheckpointError: The moments do not fit, or fit in several ways.
        """
        if self.in_order and model and [len(group) for group in self.groups] == [len(model)]:
            whole = ParameterNames(tuple(model))  # includes parameters that were never updated
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
            CheckpointError: The state already has names, or the number of parameters differs.
        """
        count = sum(map(len, self.groups))
        with located(self.source):
            if any(name is not None for group in self.groups for name, _ in group):
                raise CheckpointError(
                    "the optimiser's state already has names",
                    remedy="Remove the argument names=.",
                )
            if given.names is None:
                return replace(self, in_order=True)
            if len(given.names) != count:
                raise CheckpointError(
                    f"there are {len(given.names)} names, but the optimiser has {count} parameters",
                    remedy="Give one name for each parameter of the optimiser, group after group.",
                )
        left = iter(given.names)
        groups = [[(next(left), own) for _, own in group] for group in self.groups]
        return replace(self, groups=groups)

    def _by_name(
        self, known: Mapping[str, AdamMoments | None], shapes: Shapes
    ) -> dict[str, AdamMoments]:
        found = {}
        for name, shape in shapes.items():
            own = next((known[p + name] for p in _WRAPPERS if known.get(p + name)), None)
            if own is None:
                was = "was never updated" if name in known else "is not in the optimiser's state"
                raise CheckpointError(
                    f"{name!r} {was}, so there are no moments for it",
                    remedy="Select other parameters. The state has "
                    f"{listed(list(map(repr, known)))}.",
                )
            found[name] = own
            _require_shape(name, shape, own)
        return found

    def _by_shape(self, shapes: Shapes, model: Shapes) -> dict[str, AdamMoments]:
        updated = [[own for _, own in group if own is not None] for group in self.groups]
        flat = [own for group in updated for own in group]
        if len(flat) != len(shapes):
            count = sum(map(len, self.groups))
            raise CheckpointError(
                f"the optimiser has moments for {len(flat)} of its {count} parameters, but "
                f"{len(shapes)} parameters are selected",
                remedy=f"Select all parameters that the optimiser was created with. {_NAMES}",
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
    """Raise for parameters that share a shape with another parameter of the model."""
    every = {**model, **shapes}
    for shape in shapes.values():
        alike = [other for other, its in every.items() if its == shape]
        if len(alike) > 1:
            raise CheckpointError(
                "the optimiser's state has no names, and its moments fit the model in several "
                f"ways: {listed(map(repr, alike), 4)} have the same shape {shape}",
                remedy=f"{_SAVE_NAMES} {_GIVE_NAMES}; or names=model, if each group of the "
                "optimiser has its parameters in the order of model.parameters().",
            )


def _interleaved(groups: Sequence[Sequence[AdamMoments]], shapes: Shapes) -> list[AdamMoments]:
    """Return the moments in the parameters' order, if each group has that order.

    The shapes must determine the next group, for example if weights decay and biases do not.
    """
    left, found = [list(group) for group in groups], []
    for name, shape in shapes.items():
        fitting = [group for group in left if group and group[0].shape == shape]
        if len(fitting) != 1:
            many = f"the next moments of {len(fitting)} groups have its shape {shape}"
            none = f"no group's next moments have its shape {shape}"
            raise CheckpointError(
                f"names=model does not determine the moments of {name!r}: "
                f"{many if fitting else none}",
                remedy=f"{_GIVE_NAMES}. {_SAVE_NAMES}",
            )
        found.append(fitting[0].pop(0))
    return found


def require_distinct(names: Sequence[str], what: str, remedy: str) -> None:
    """Raise a CheckpointError if a name occurs twice."""
    double = [name for name, times in Counter(names).items() if times > 1]
    if double:
        raise CheckpointError(
            f"{what} contain {listed(map(repr, double))} more than once", remedy=remedy
        )


def _require_shape(name: str, shape: tuple[int, ...], own: AdamMoments) -> None:
    if own.shape != shape:
        raise CheckpointError(
            f"the optimiser's moments for {name!r} have the shape {own.shape}, but the parameter "
            f"has the shape {shape}",
            remedy=f"Give the state of an optimiser for model.parameters(). {_NAMES}",
        )
