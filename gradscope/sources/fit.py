"""Whether a state dict fits a model, tensor by tensor; nothing is loaded here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from gradscope.errors import CheckpointError
from gradscope.sources.code import user_file
from gradscope.sources.conversion import dtype_name
from gradscope.sources.listing import listed

PREFIXES = ("module.", "_orig_mod.", "model.")  # DataParallel's, torch.compile's, Lightning's
_COUNTER = "n_averaged"  # what torch's AveragedModel has beside the names that begin with module.


@dataclass(frozen=True)
class Fit:
    """A state dict that fits.

    Attributes:
        state: {name: tensor}, the model's names and dtypes.
        dropped: Names that were left out, as they belong to no model.
        prefix: What was taken off every other name, "" if nothing.
        casts: "name: float64 -> float32" for each tensor that was cast.
        tied: Names that came under another name of the same tensor.
    """

    state: dict[str, Any]
    dropped: tuple[str, ...]
    prefix: str
    casts: tuple[str, ...]
    tied: tuple[str, ...]


def fitted(model: nn.Module, state: Mapping[Any, Any], ignore: Sequence[str] = ()) -> Fit:
    """Return the state dict with the model's names and dtypes.

    Args:
        model: What it is to fit.
        state: What was read.
        ignore: Globs of names that are left out where the model has no such name.

    Raises:
        CheckpointError: Names are missing or unexpected, or a tensor's shape, dtype or values are
            not what the model can use.
    """
    with user_file("the model's own state_dict"):
        expected: dict[str, Any] = model.state_dict()
    _check_text(state)
    kept = _without(_without_counter(state, expected), expected, ignore)
    prefix, named = _stripped(kept, expected)
    values = _without(named, expected, ignore)
    dropped = (*(k for k in state if k not in kept), *(k for k in named if k not in values))
    values, tied = _with_tied(values, expected)
    _check_names(values, expected)
    _check_shapes(values, expected)
    casts = _check_dtypes(values, expected)
    cast = {
        name: value.to(expected[name].dtype) if isinstance(value, Tensor) else value
        for name, value in values.items()
    }
    check_finite(cast, expected, {k for k, _ in model.named_parameters(remove_duplicate=False)})
    return Fit(cast, dropped, prefix, casts, tied)


def shared(state: Mapping[Any, Any], model: nn.Module) -> float:
    """Return the share of the model's names that a mapping has, prefixes aside."""
    if not all(isinstance(name, str) for name in state):
        return 0.0
    with user_file("the model's own state_dict"):
        expected: dict[str, Any] = model.state_dict()
    _, values = _stripped(_without_counter(state, expected), expected)
    return len(expected.keys() & values.keys()) / max(1, len(expected))


def check_finite(
    values: Mapping[str, Any], expected: Mapping[str, Any], parameters: set[str]
) -> None:
    """Refuse values that are not finite, but for buffers that hold what the model's own hold.

    Args:
        values: {name: tensor}, what is loaded.
        expected: {name: tensor}, what the model holds itself.
        parameters: Which of them are parameters.

    Raises:
        CheckpointError: A value is not finite.
    """
    wrong = []
    for name, value in values.items():
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            continue
        bad = ~torch.isfinite(value)
        if name not in parameters:  # an attention mask holds -inf, as the new model's own does
            bad &= value != expected[name].to(value.device)
        if bad.any():
            wrong.append(f"{name} ({int(bad.sum())} of {value.numel()})")
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} tensors hold values that are not finite: {listed(wrong)}",
            remedy="Take a checkpoint from before the training diverged.",
        )


def _without_counter(state: Mapping[str, Any], expected: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave out the counter of averaged weights, where that is clearly what it is."""
    others = [name for name in state if name != _COUNTER]
    averaged = _COUNTER in state and _COUNTER not in expected and others
    if not averaged or not all(name.startswith(PREFIXES[0]) for name in others):
        return state
    return {name: state[name] for name in others}


def _without(
    state: Mapping[str, Any], expected: Mapping[str, Any], ignore: Sequence[str]
) -> Mapping[str, Any]:
    """Leave out what one of the globs names and the model has not."""
    return {
        name: value
        for name, value in state.items()
        if _bare(name, expected) in expected or not any(fnmatchcase(name, glob) for glob in ignore)
    }


def _bare(name: str, expected: Mapping[str, Any]) -> str:
    """Return a name without its prefixes, as far as the model does not know it with them."""
    while name not in expected and (found := [p for p in PREFIXES if name.startswith(p)]):
        name = name.removeprefix(found[0])
    return name


def _check_text(state: Mapping[Any, Any]) -> None:
    odd = [repr(name) for name in state if not isinstance(name, str)]
    if odd:
        raise CheckpointError(
            f"these names in the state dict are not text: {listed(odd)}",
            remedy="Save model.state_dict() as it is.",
        )


def _stripped(
    state: Mapping[str, Any], expected: Mapping[str, Any]
) -> tuple[str, Mapping[str, Any]]:
    """Take prefixes off that every name has, as far as it makes more of the names fit."""
    prefix, current = "", state
    candidates = [(prefix, current)]
    while common := [p for p in PREFIXES if all(k.startswith(p) and k != p for k in current)]:
        prefix += common[0]
        current = {name.removeprefix(common[0]): value for name, value in current.items()}
        candidates.append((prefix, current))
    return max(candidates, key=lambda c: len(c[1].keys() & expected.keys()))


def _with_tied(
    values: Mapping[str, Any], expected: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Fill in names of a tensor that the checkpoint has under another of its names."""
    groups: dict[Any, list[str]] = {}
    for name, tensor in expected.items():
        if isinstance(tensor, Tensor) and tensor.numel():
            place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            groups.setdefault(place, []).append(name)
    result, tied = dict(values), []
    for names in groups.values():
        there = [name for name in names if isinstance(values.get(name), Tensor)]
        for name in there[1:]:
            first, other = values[there[0]], values[name]
            if first.shape == other.shape and not torch.equal(first.to(other.dtype), other):
                raise CheckpointError(
                    f"{there[0]!r} and {name!r} are one tensor in the model, but differ here",
                    remedy="Save the state dict of a model that ties them too.",
                )
        for name in names if there else []:
            if name not in values:
                result[name] = values[there[0]]
                tied.append(name)
    return result, tuple(tied)


def _check_names(values: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    missing = [name for name in expected if name not in values]
    unexpected = [name for name in values if name not in expected]
    if not missing and not unexpected:
        return
    sides = [
        f"{len(names)} {what} ({listed(names)})"
        for names, what in ((missing, "missing"), (unexpected, "unexpected"))
        if names
    ]
    mixed = [p for p in PREFIXES if any(name.startswith(p) for name in unexpected)]
    remedy = "Check that the factory and its kwargs build the model that was saved."
    if unexpected and not missing:
        remedy += " --ignore GLOB leaves out what it does not have."
    if mixed:
        remedy += f" Not every name begins with {mixed[0]!r}, so it was not taken off."
    raise CheckpointError(
        f"the names do not fit the model's {len(expected)}: {'; '.join(sides)}", remedy=remedy
    )


def _check_shapes(values: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    wrong = []
    for name, want in expected.items():
        got = values[name]
        if not isinstance(want, Tensor):  # extra state, of whatever kind the module makes of it
            continue
        if not isinstance(got, Tensor):
            wrong.append(f"{name}: a {type(got).__name__}, not a tensor")
        elif got.is_meta:
            wrong.append(f"{name}: a tensor of the meta device, without numbers")
        elif got.layout != torch.strided or got.is_quantized:
            wrong.append(f"{name}: a sparse or quantized tensor")
        elif got.shape != want.shape:
            wrong.append(f"{name}: {tuple(got.shape)} here, {tuple(want.shape)} in the model")
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} of {len(expected)} tensors do not fit: {listed(wrong)}",
            remedy="Check that the factory and its kwargs build the model that was saved.",
        )


def _check_dtypes(values: Mapping[str, Any], expected: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what is to be cast: floating-point numbers to other floating-point numbers only."""
    casts: list[str] = []
    wrong: list[str] = []
    for name, want in expected.items():
        got = values[name]
        if isinstance(want, Tensor) and got.dtype != want.dtype:
            note = f"{name}: {dtype_name(got.dtype)} -> {dtype_name(want.dtype)}"
            both = got.is_floating_point() and want.is_floating_point()
            (casts if both else wrong).append(note)
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} of {len(expected)} tensors are of a kind that is not cast: "
            f"{listed(wrong)}",
            remedy="Only floating-point numbers are cast, and only to floating-point numbers.",
        )
    return tuple(casts)
