"""Finds the model's state dict in a checkpoint, and checks that every tensor fits.

This module loads nothing into the model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from gradscope.core.precision import dtype_name
from gradscope.core.registry import suggestion
from gradscope.core.texts import article, count, listed
from gradscope.errors import CheckpointError
from gradscope.sources.code import user_file

_DEPTH = 3  # for example checkpoint["ema"]["module"]["state_dict"]
_PREFIXES = ("module.", "_orig_mod.", "model.")  # DataParallel's, torch.compile's, Lightning's
_COMPILED = "._orig_mod."  # in a name: the part was compiled
_COUNTER = "n_averaged"  # the counter of torch's AveragedModel; all other names have "module."
_SAVE = "Save model.state_dict()."
_CHECK = "Check that the factory and its kwargs build the saved model."

StateDict = Mapping[str, Any]  # {name: tensor}, a state dict


@dataclass(frozen=True)
class Fit:
    """A fitting state dict, found under `key`, without `prefix`, in the model's dtypes."""

    state: dict[str, Any]  # all names of the model
    key: str
    prefix: str
    tensors: int  # number of tensors from the checkpoint
    notes: tuple[str, ...]


def fit_state(
    model: nn.Module,
    content: Any,
    key: str | None,
    ignore: Sequence[str],
    asked: torch.dtype | None = None,
) -> Fit:
    """Return the state dict in a checkpoint's content if all of it fits the model, or raise.

    It is the state dict under `key`, or else the only state dict with the model's names. `ignore`
    are globs of names to leave out if the model does not have them. A cast to the dtype `asked`
    is noted only if it rounds.
    """
    with user_file("the model's own state_dict"):
        expected: StateDict = model.state_dict()
    whole = None
    if isinstance(model, nn.ModuleDict) and isinstance(content, Mapping):
        whole = _of_parts(model, content)
    key, state = _state_dict(content, expected, key) if whole is None else ("", whole)
    odd = [repr(name) for name in state if not isinstance(name, str)]
    if odd:
        what = f"these names in the state dict are not text: {listed(odd)}"
        raise CheckpointError(what, remedy="Save model.state_dict() without changes.")
    kept = _without(_without_counter(state, expected), expected, ignore)
    prefix, named = _stripped(kept, expected)
    values = _without(named, expected, ignore)
    # drop further values that a script saved, which are not tensors
    values = {k: v for k, v in values.items() if k in expected or isinstance(v, Tensor)}
    renamed = [k for k in kept if k.removeprefix(prefix) not in named]
    dropped = (*(k for k in state if k not in kept), *(k for k in named if k not in values))
    own = dict(model.named_parameters(remove_duplicate=False))
    values, tied = _with_tied(values, expected, own)
    _check_names(values, expected, key)
    changes = _check_tensors(values, expected)
    lost = [change for change in changes if change.rounds]
    kept_digits = [change for change in changes if not change.rounds]
    casts = [str(change) for change in kept_digits if change.loaded.to_real() != asked]
    cast = {
        name: value.to(expected[name].dtype) if isinstance(value, Tensor) else value
        for name, value in values.items()
    }
    check_finite(values, expected, {*own})
    _require_range(cast, lost)
    notes = {
        f"The weights are read from the key {key!r} of the checkpoint.": (
            key and not isinstance(state, Joined)
        ),
        f"Entries of the checkpoint were ignored: {listed(dropped)}.": dropped,
        f"The prefix {prefix!r} was removed from all names in the checkpoint.": prefix,
        f"Names were matched without the prefix of torch.compile: {listed(renamed)}.": renamed,
        f"Tensors were cast to the model's dtype: {listed(casts)}.": casts,
        rounding_note(lost): lost,
        f"Tied tensors missing in the checkpoint were filled in: {listed(tied)}.": tied,
    }
    if isinstance(state, Joined):
        parts = listed(state.keys_of_parts)
        notes |= {f"The weights are read from several keys of the checkpoint: {parts}.": True}
    told = tuple(note for note, done in notes.items() if done)
    return Fit(cast, key, prefix, len(cast) - len(tied), told)


def misfit(
    model: nn.Module, content: Any, key: str | None, ignore: Sequence[str]
) -> tuple[int, int]:
    """Return the number of names in which a model and a checkpoint differ, and that of numbers.

    The tensors of the model may be on the meta device.
    """
    expected: StateDict = model.state_dict()
    _, state = _state_dict(content, expected, key)
    kept = _without(_without_counter(state, expected), expected, ignore)
    values = _without(_stripped(kept, expected)[1], expected, ignore)
    values = {k: v for k, v in values.items() if k in expected or isinstance(v, Tensor)}
    both = expected.keys() & values.keys()
    shapes = [{k: getattr(own[k], "shape", ()) for k in both} for own in (expected, values)]
    pairs = [(shapes[0][k], shapes[1][k]) for k in both]
    sizes = sum(abs(prod(a) - prod(b)) + (a != b) for a, b in pairs)
    return len(expected.keys() ^ values.keys()), sizes


@dataclass(frozen=True)
class Change:
    """The dtypes of a tensor in a checkpoint and in the model."""

    name: str
    stored: torch.dtype
    loaded: torch.dtype

    @property
    def rounds(self) -> bool:
        """Whether the model's dtype has fewer digits."""
        return torch.finfo(self.stored).eps < torch.finfo(self.loaded).eps

    def __str__(self) -> str:
        change = f"{dtype_name(self.stored)} -> {dtype_name(self.loaded)}"
        return f"{self.name}: {change}" if self.name else change


def rounding_note(lost: Sequence[Change]) -> str:
    """Return a note for a checkpoint with more digits than the model, or ""."""
    if not lost:
        return ""
    widest = min((c.stored.to_real() for c in lost), key=lambda dtype: torch.finfo(dtype).eps)
    return (
        "The checkpoint has more digits than the model: its weights are rounded "
        f"({listed(map(str, lost), 3)}). The dtype {dtype_name(widest)} keeps all digits."
    )


def changed_dtypes(state: Mapping[str, Any], model: nn.Module) -> list[Change]:
    """Return the dtypes that are rounded in weights loaded by a different library."""
    stored = {v.dtype.to_real() for v in state.values() if isinstance(v, Tensor) and _inexact(v)}
    loaded = {p.dtype.to_real() for p in model.parameters() if _inexact(p)}
    most = min(loaded, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)
    every = [Change("", dtype, most) for dtype in stored]
    return [change for change in every if change.rounds]


def _inexact(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _require_range(cast: StateDict, lost: Sequence[Change]) -> None:
    """Raise for finite values that are too large for the model's dtype."""
    values = {c.name: cast[c.name] for c in lost if cast[c.name].itemsize > 1}
    bad = {name: int((~torch.isfinite(value)).sum()) for name, value in values.items()}
    wrong = [f"{k} ({n} of {cast[k].numel()})" for k, n in bad.items() if n]
    if wrong:
        dtype = dtype_name(next(cast[k].dtype for k, n in bad.items() if n))
        raise CheckpointError(
            f"{len(wrong)} tensors have values that are too large for {dtype}: {listed(wrong)}",
            remedy='Compute in a dtype with a larger range, such as dtype="float64".',
        )


def check_finite(values: StateDict, expected: StateDict, parameters: set[str]) -> None:
    """Raise for values that are not finite, except for buffers that equal the new model's."""
    wrong = []
    for name, value in values.items():
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            continue
        bad = ~torch.isfinite(value.float() if value.itemsize == 1 else value)
        if name not in parameters:  # an attention mask has -inf, also in the new model
            bad &= value != expected[name].to(value.device)
        if bad.any():
            wrong.append(f"{name} ({int(bad.sum())} of {value.numel()})")
    if wrong:
        raise CheckpointError(
            f"values are not finite in {count(len(wrong), 'tensor')}: {listed(wrong)}",
            remedy="Use a checkpoint from before the training diverged.",
        )


def stored_modules(content: Any, key: str | None = None) -> dict[str, nn.Module]:
    """Return {key: module} of the modules with parameters in a checkpoint; a module has key ""."""
    held = content if isinstance(content, Mapping) else {"": content}
    return {
        k: v
        for k, v in held.items()
        if isinstance(v, nn.Module) and key in (None, k) and any(True for _ in v.parameters())
    }


class Joined(dict[str, Any]):
    """A state dict from several state dicts in a checkpoint: {"KEY.NAME": tensor}."""

    keys_of_parts: Sequence[str] = ()


def state_dicts(content: Any, *, joined: bool = False) -> list[tuple[str, Mapping[Any, Any]]]:
    """Return all possible state dicts in a checkpoint, each with its dotted key.

    With `joined`, several state dicts in one table, {"encoder": ..., "decoder": ...}, are also one
    state dict of a model with these parts.
    """
    seen: set[int] = set()

    def below(content: Any, key: str, depth: int) -> Iterator[tuple[str, Mapping[Any, Any]]]:
        if id(content) in seen:  # a pickled table may contain itself
            return
        seen.add(id(content))
        if isinstance(content, nn.Module):
            yield key, content.state_dict()
        elif isinstance(content, Mapping):
            if any(isinstance(value, Tensor) for value in content.values()):
                yield key, content
            elif joined and (whole := _joined(content)) is not None:
                yield key, whole
            for name, value in content.items():
                if depth and isinstance(name, str):
                    yield from below(value, f"{key}.{name}" if key else name, depth - 1)

    return list(below(content, "", _DEPTH))


def _joined(content: Mapping[Any, Any]) -> Joined | None:
    """Return the state dicts in a table as one state dict, or None for fewer than two."""
    parts = {k: v.state_dict() if isinstance(v, nn.Module) else v for k, v in content.items()}
    parts = {
        k: v
        for k, v in parts.items()
        if isinstance(k, str)
        and isinstance(v, Mapping)
        and all(isinstance(name, str) for name in v)
        and any(isinstance(value, Tensor) for value in v.values())
    }
    if len(parts) < 2:
        return None
    found = Joined({f"{k}.{name}": value for k, v in parts.items() for name, value in v.items()})
    found.keys_of_parts = [*parts]
    return found


def _of_parts(model: nn.ModuleDict, content: Mapping[Any, Any]) -> Joined | None:
    """Return the state dict of a model from a table with a state dict for each of its parts.

    If a part fits several state dicts, the one with the most similar key is taken. The result is
    None if a part fits none, or if several keys are equally similar.
    """
    tables = {key: state for key, state in content.items() if isinstance(state, Mapping)}
    found, keys = dict[str, Any](), list[str]()
    for name, part in model.items():
        fits = {k: named for k, v in tables.items() if (named := fits_part(v, part)) is not None}
        alike = {key: SequenceMatcher(None, name, str(key)).ratio() for key in fits}
        best = [key for key in fits if alike[key] == max(alike.values())]
        if len(best) != 1:
            return None
        found |= {f"{name}.{entry}": value for entry, value in fits[best[0]].items()}
        keys.append(f"{best[0]} for {name}")
        del tables[best[0]]
    whole = Joined(found)
    whole.keys_of_parts = keys
    return whole


def fits_part(state: Mapping[Any, Any], part: nn.Module) -> Mapping[Any, Any] | None:
    """Return a state dict with the names and shapes of a part of a model, or None.

    A common prefix of the names in the state dict is removed.
    """
    if not all(isinstance(name, str) for name in state):
        return None
    wanted = part.state_dict()
    named = _stripped(state, wanted)[1]
    return named if _shapes(named) == _shapes(wanted) else None


def _shapes(state: Mapping[Any, Any]) -> dict[str, tuple[int, ...]]:
    return {str(k): tuple(v.shape) for k, v in state.items() if isinstance(v, Tensor)}


def _state_dict(
    content: Any, expected: StateDict, key: str | None
) -> tuple[str, Mapping[Any, Any]]:
    """Return the state dict under a key, or the only state dict with most of the model's names."""
    if isinstance(content, Tensor):
        raise CheckpointError("it has a single tensor, not a state dict", remedy=_SAVE)
    if not isinstance(content, Mapping | nn.Module):
        kind = article(type(content).__name__)
        raise CheckpointError(f"it has {kind}, not a state dict", remedy=_SAVE)
    if key is not None:
        return state_dict_under(content, state_dicts(content), key)
    found = state_dicts(content, joined=True)
    scores = []
    for _, state in found:
        fits = expected if all(isinstance(name, str) for name in state) else {}
        named = _stripped(_without_counter(state, fits), fits)[1] if fits else {}
        both = fits.keys() & named.keys()
        alike = (getattr(fits[k], "shape", 0) == getattr(named[k], "shape", 1) for k in both)
        scores.append((len(both), sum(alike)))
    best = max(scores, default=(0, 0))
    chosen = [each for each, score in zip(found, scores, strict=True) if score == best]
    if not found or (not best[0] and len(found) > 1):
        if isinstance(content, Mapping) and {"state", "param_groups"} <= content.keys():
            what = "it has the state of an optimiser, not the weights of a model"
            raise CheckpointError(what, remedy=_SAVE)
        if isinstance(content, Mapping) and any(hasattr(v, "__array__") for v in content.values()):
            what = f"its values are numpy arrays, not tensors: {listed(map(str, content))}"
            remedy = "Save {name: torch.from_numpy(array) for name, array in weights.items()}."
            raise CheckpointError(what, remedy=remedy)
        keys = listed(repr(k) for k in content) if isinstance(content, Mapping) else ""
        raise CheckpointError(
            f"it has no state dict of the model; its keys are: {keys or 'none'}",
            remedy=f"{_SAVE} A state dict under a key, such as 'model', is found up to four levels "
            "deep; name a deeper key with `key`.",
        )
    return _only(chosen)


def state_dict_under(
    content: Any, found: Sequence[tuple[str, Mapping[Any, Any]]], key: str
) -> tuple[str, Mapping[Any, Any]]:
    """Return the state dict under a key of a checkpoint; `found` are its `state_dicts`.

    Raises:
        CheckpointError: There is no state dict under the key.
    """
    below: Any = content
    for part in key.split("."):  # a given key may be deeper than the search
        below = below.get(part) if isinstance(below, Mapping) else None
    deeper = isinstance(below, Mapping) and any(isinstance(v, Tensor) for v in below.values())
    for name, state in (*found, *([(key, below)] if deeper else [])):
        if name == key:
            return key, state
    if beginning := _beginning(found, key):
        return _only(beginning)
    known = [name for name, _ in found if name]
    hint = suggestion(key, known).replace("Supported", "It has")
    what = f"there is no state dict under {key!r} in it"
    raise CheckpointError(what, remedy=hint if known else "It has no state dict under any key.")


def _only(chosen: Sequence[tuple[str, Mapping[Any, Any]]]) -> tuple[str, Mapping[Any, Any]]:
    if len(chosen) > 1:
        keys = listed(name or "the top level" for name, _ in chosen)
        raise CheckpointError(
            f"several state dicts fit, under the keys {keys}",
            remedy="Name the key with `key`.",
        )
    return chosen[0]


def _beginning(
    found: Sequence[tuple[str, Mapping[Any, Any]]], key: str
) -> list[tuple[str, Mapping[Any, Any]]]:
    """Return the parts of state dicts whose names begin with a key, without the key."""
    parts: list[tuple[str, Mapping[Any, Any]]] = []
    for name, state in found:
        own = key.removeprefix(f"{name}.") if name else key
        names = [k for k in state if isinstance(k, str) and k.startswith(f"{own}.")]
        if names:
            part = {k.removeprefix(f"{own}."): state[k] for k in names}
            parts.append((f"{name}.{own}" if name else own, part))
    return parts


def _without_counter(state: StateDict, expected: StateDict) -> StateDict:
    """Drop the counter of averaged weights if all remaining names have AveragedModel's prefix."""
    others = [name for name in state if name != _COUNTER]
    averaged = _COUNTER in state and _COUNTER not in expected and others
    if not averaged or not all(name.startswith(_PREFIXES[0]) for name in others):
        return state
    return {name: state[name] for name in others}


def _without(state: StateDict, expected: StateDict, ignore: Sequence[str]) -> StateDict:
    """Drop names that match a glob and that the model does not have, with or without prefixes."""

    def known(name: str) -> bool:
        while name not in expected and (found := [p for p in _PREFIXES if name.startswith(p)]):
            name = name.removeprefix(found[0])
        return name in expected

    return {
        name: value
        for name, value in state.items()
        if known(name) or not any(fnmatchcase(name, glob) for glob in ignore)
    }


def _stripped(state: StateDict, expected: StateDict) -> tuple[str, StateDict]:
    """Remove prefixes that all names have, if more names then fit."""
    candidates = [("", state)]
    while (current := candidates[-1][1]) and (part := next(iter(current)).partition(".")[0] + "."):
        if not all(name.startswith(part) and name != part for name in current):
            break
        shorter = {name.removeprefix(part): value for name, value in current.items()}
        candidates.append((candidates[-1][0] + part, shorter))
    plain = [(prefix, _uncompiled(names, expected)) for prefix, names in candidates]
    return max(plain, key=lambda c: len(c[1].keys() & expected.keys()))


def _uncompiled(state: StateDict, expected: StateDict) -> StateDict:
    """Rename parts that are compiled only in the checkpoint, or only in the model."""
    plain = {name.replace(_COMPILED, "."): name for name in expected}
    named = {
        k if k in expected else plain.get(k.replace(_COMPILED, "."), k): v for k, v in state.items()
    }
    return named if len(named) == len(state) else state


def _with_tied(
    values: StateDict, expected: StateDict, own: Mapping[str, Tensor]
) -> tuple[dict[str, Any], list[str]]:
    """Fill in missing names of tied tensors that the checkpoint has under a different name.

    Tensors on the meta device are tied if they are the same parameter in `own`.
    """
    groups: dict[Any, list[str]] = {}
    for name, tensor in expected.items():
        if isinstance(tensor, Tensor) and tensor.numel():
            at = id(own.get(name)) if tensor.is_meta else tensor.data_ptr()
            memory = (at, tensor.shape, tensor.stride(), tensor.dtype)
            groups.setdefault(memory, []).append(name)
    result, tied = dict(values), []
    for names in groups.values():
        there = [name for name in names if isinstance(values.get(name), Tensor)]
        for name in there[1:]:
            first, other = values[there[0]], values[name]
            if first.shape == other.shape and not torch.equal(first.to(other.dtype), other):
                raise CheckpointError(
                    f"{there[0]!r} and {name!r} are tied in the model, but differ in the file",
                    remedy="Save the state dict of a model that also ties them.",
                )
        for name in names if there else []:
            if name not in values:
                result[name] = values[there[0]]
                tied.append(name)
    return result, tied


def _check_names(values: StateDict, expected: StateDict, key: str) -> None:
    missing = [name for name in expected if name not in values]
    unexpected = [name for name in values if name not in expected]
    if not missing and not unexpected:
        return
    sides = ((missing, "missing"), (unexpected, "unexpected"))
    told = "; ".join(f"{len(names)} {what} ({listed(names)})" for names, what in sides if names)
    remedy = _CHECK
    if not missing:
        remedy += ' Or leave out names that the model does not have with ignore="GLOB".'
    mixed = [p for p in _PREFIXES if any(name.startswith(p) for name in unexpected)]
    parts = {name.partition(".")[0] for name in unexpected if "." in name}
    own = [p for p in sorted(parts) if _covers(values, p, expected)]
    if own:
        keys = listed(f"{key}.{p}" if key else p for p in own)
        remedy += f" All names of the model are under {keys}: give the key with `key`."
    elif mixed:
        remedy += f" Not every name begins with {mixed[0]!r}, so this prefix was not removed."
    what = f"the names do not fit the model's {len(expected)} names: {told}"
    raise CheckpointError(what, remedy=remedy)


def _covers(values: StateDict, part: str, expected: StateDict) -> bool:
    """Whether the names that begin with a part are exactly the model's names."""
    begin = f"{part}."
    named = {k.removeprefix(begin): v for k, v in values.items() if k.startswith(begin)}
    return _stripped(named, expected)[1].keys() == expected.keys()


def _check_tensors(values: StateDict, expected: StateDict) -> list[Change]:
    """Return the casts to make, or raise if a tensor does not fit.

    Only floating-point numbers are cast to floating-point numbers.
    """
    wrong: list[str] = []
    casts: list[Change] = []
    for name, want in expected.items():
        got = values[name]
        if not isinstance(want, Tensor):  # extra state of a module can have any type
            continue
        if not isinstance(got, Tensor):
            wrong.append(f"{name}: a {type(got).__name__}, not a tensor")
        elif got.is_meta:
            wrong.append(f"{name}: a tensor on the meta device, without values")
        elif got.layout != torch.strided or got.is_quantized:
            wrong.append(f"{name}: a sparse or quantized tensor")
        elif got.shape != want.shape:
            wrong.append(
                f"{name}: {tuple(got.shape)} in the checkpoint, {tuple(want.shape)} in the model"
            )
        elif got.dtype != want.dtype:
            change = Change(name, got.dtype, want.dtype)
            both = got.is_complex() if want.is_complex() else got.is_floating_point()
            if both and (want.is_complex() or want.is_floating_point()):
                casts.append(change)
            else:
                wrong.append(str(change))
    if wrong:
        what = f"{len(wrong)} of {len(expected)} tensors do not fit: {listed(wrong)}"
        remedy = f"{_CHECK} Dtypes are cast only between floating-point dtypes."
        raise CheckpointError(what, remedy=remedy)
    return casts
