"""Which state dict of a checkpoint is the model's, and whether it fits, tensor by tensor.

Nothing is loaded here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from gradscope.core.precision import dtype_name
from gradscope.core.registry import suggestion
from gradscope.core.texts import article, listed
from gradscope.errors import CheckpointError
from gradscope.sources.code import user_file

_DEPTH = 3  # such as checkpoint["ema"]["module"]["state_dict"]
_PREFIXES = ("module.", "_orig_mod.", "model.")  # DataParallel's, torch.compile's, Lightning's
_COMPILED = "._orig_mod."  # within a name: a part was compiled
_COUNTER = "n_averaged"  # what torch's AveragedModel has beside the names that begin with module.
_SAVE = "Save model.state_dict()."
_CHECK = "Check that the factory and its kwargs build the model that was saved."

StateDict = Mapping[str, Any]  # {name: tensor}, a state dict


@dataclass(frozen=True)
class Fit:
    """A state dict that fits: found under `key`, without `prefix`, in the model's dtypes."""

    state: dict[str, Any]  # all names of the model
    key: str
    prefix: str
    tensors: int  # of the state that were in the checkpoint
    notes: tuple[str, ...]


def fit_state(
    model: nn.Module,
    content: Any,
    key: str | None,
    ignore: Sequence[str],
    asked: torch.dtype | None = None,
) -> Fit:
    """Return the state dict in what a checkpoint holds, if all of it fits the model.

    `key` says where it is, otherwise it is the only one with the model's names; `ignore` are globs
    of names that are left out where the model has no such name. A cast to the dtype that was
    `asked` for is noted only if it rounds.
    """
    with user_file("the model's own state_dict"):
        expected: StateDict = model.state_dict()
    key, state = _state_dict(content, expected, key)
    odd = [repr(name) for name in state if not isinstance(name, str)]
    if odd:
        what = f"these names in the state dict are not text: {listed(odd)}"
        raise CheckpointError(what, remedy="Save model.state_dict() as it is.")
    kept = _without(_without_counter(state, expected), expected, ignore)
    prefix, named = _stripped(kept, expected)
    values = _without(named, expected, ignore)
    # what a script keeps beside the weights is no weight
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
        f"The weights are those under {key!r} of the checkpoint.": key,
        f"Left out of the checkpoint, as not the model's: {listed(dropped)}.": dropped,
        f"The prefix {prefix!r} was taken off all names in the checkpoint.": prefix,
        f"By the same name but for what torch.compile adds: {listed(renamed)}.": renamed,
        f"Cast to the model's dtype: {listed(casts)}.": casts,
        rounding_note(lost): lost,
        f"Not in the checkpoint, tied to others that are: {listed(tied)}.": tied,
    }
    told = tuple(note for note, done in notes.items() if done)
    return Fit(cast, key, prefix, len(cast) - len(tied), told)


@dataclass(frozen=True)
class Change:
    """The dtypes of a tensor in a checkpoint and in the model."""

    name: str
    stored: torch.dtype
    loaded: torch.dtype

    @property
    def rounds(self) -> bool:
        """Whether the model has fewer digits."""
        return torch.finfo(self.stored).eps < torch.finfo(self.loaded).eps

    def __str__(self) -> str:
        change = f"{dtype_name(self.stored)} -> {dtype_name(self.loaded)}"
        return f"{self.name}: {change}" if self.name else change


def rounding_note(lost: Sequence[Change]) -> str:
    """Return a sentence on a checkpoint that has more digits than the model, "" if it has not."""
    if not lost:
        return ""
    widest = min((c.stored.to_real() for c in lost), key=lambda dtype: torch.finfo(dtype).eps)
    return (
        "The checkpoint has more digits than the model: its weights are rounded "
        f"({listed(map(str, lost), 3)}). The dtype {dtype_name(widest)} keeps all digits."
    )


def changed_dtypes(state: Mapping[str, Any], model: nn.Module) -> list[Change]:
    """Return what is rounded of weights that were loaded by another library, by dtype alone."""
    stored = {v.dtype.to_real() for v in state.values() if isinstance(v, Tensor) and _inexact(v)}
    loaded = {p.dtype.to_real() for p in model.parameters() if _inexact(p)}
    most = min(loaded, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)
    every = [Change("", dtype, most) for dtype in stored]
    return [change for change in every if change.rounds]


def _inexact(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _require_range(cast: StateDict, lost: Sequence[Change]) -> None:
    """Refuse finite values that are too large for the model's dtype."""
    values = {c.name: cast[c.name] for c in lost if cast[c.name].itemsize > 1}
    bad = {name: int((~torch.isfinite(value)).sum()) for name, value in values.items()}
    wrong = [f"{k} ({n} of {cast[k].numel()})" for k, n in bad.items() if n]
    if wrong:
        dtype = dtype_name(next(cast[k].dtype for k, n in bad.items() if n))
        raise CheckpointError(
            f"{len(wrong)} tensors hold values that are too large for {dtype}: {listed(wrong)}",
            remedy='Compute in a dtype of a larger range, such as dtype="float64".',
        )


def check_finite(values: StateDict, expected: StateDict, parameters: set[str]) -> None:
    """Refuse values that are not finite, but for buffers that hold what the model's own hold."""
    wrong = []
    for name, value in values.items():
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            continue
        bad = ~torch.isfinite(value.float() if value.itemsize == 1 else value)
        if name not in parameters:  # an attention mask holds -inf, as the new model's own does
            bad &= value != expected[name].to(value.device)
        if bad.any():
            wrong.append(f"{name} ({int(bad.sum())} of {value.numel()})")
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} tensors hold values that are not finite: {listed(wrong)}",
            remedy="Take a checkpoint from before the training diverged.",
        )


def state_dicts(content: Any) -> list[tuple[str, Mapping[Any, Any]]]:
    """Return everything in a checkpoint that may be a state dict, each with its dotted key."""
    seen: set[int] = set()

    def below(content: Any, key: str, depth: int) -> Iterator[tuple[str, Mapping[Any, Any]]]:
        if id(content) in seen:  # a pickled table may hold itself
            return
        seen.add(id(content))
        if isinstance(content, nn.Module):
            yield key, content.state_dict()
        elif isinstance(content, Mapping):
            if any(isinstance(value, Tensor) for value in content.values()):
                yield key, content
            for name, value in content.items():
                if depth and isinstance(name, str):
                    yield from below(value, f"{key}.{name}" if key else name, depth - 1)

    return list(below(content, "", _DEPTH))


def _state_dict(
    content: Any, expected: StateDict, key: str | None
) -> tuple[str, Mapping[Any, Any]]:
    """Return the state dict under a key, otherwise the only one that has the most of the names."""
    if isinstance(content, Tensor):
        raise CheckpointError("it holds a single tensor, not a state dict", remedy=_SAVE)
    if not isinstance(content, Mapping | nn.Module):
        kind = article(type(content).__name__)
        raise CheckpointError(f"it holds {kind}, not a state dict", remedy=_SAVE)
    found = state_dicts(content)
    if key is not None:
        return state_dict_under(content, found, key)
    scores = []
    for _, state in found:
        fits = expected if all(isinstance(name, str) for name in state) else {}
        named = _stripped(_without_counter(state, fits), fits)[1] if fits else {}
        scores.append(len(fits.keys() & named.keys()))
    best = max(scores, default=0)
    chosen = [each for each, score in zip(found, scores, strict=True) if score == best]
    if not found or (not best and len(found) > 1):
        if isinstance(content, Mapping) and {"state", "param_groups"} <= content.keys():
            what = "it holds the state of an optimiser, not the weights of a model"
            raise CheckpointError(what, remedy=_SAVE)
        if isinstance(content, Mapping) and any(hasattr(v, "__array__") for v in content.values()):
            what = f"its values are numpy arrays, not tensors: {listed(map(str, content))}"
            remedy = "Save {name: torch.from_numpy(array) for name, array in weights.items()}."
            raise CheckpointError(what, remedy=remedy)
        keys = listed(repr(k) for k in content) if isinstance(content, Mapping) else ""
        raise CheckpointError(
            f"there is no state dict of the model in it; its keys are: {keys or 'none'}",
            remedy=f"{_SAVE} It may stand under a key, such as 'model'; one that is deeper than "
            "four is named with `key`.",
        )
    return _only(chosen)


def state_dict_under(
    content: Any, found: Sequence[tuple[str, Mapping[Any, Any]]], key: str
) -> tuple[str, Mapping[Any, Any]]:
    """Return the state dict under a key of a checkpoint; `found` are its `state_dicts`.

    Raises:
        CheckpointError: There is none.
    """
    below: Any = content
    for part in key.split("."):  # it may lie deeper than is looked by itself
        below = below.get(part) if isinstance(below, Mapping) else None
    deeper = isinstance(below, Mapping) and any(isinstance(v, Tensor) for v in below.values())
    for name, state in (*found, *([(key, below)] if deeper else [])):
        if name == key:
            return key, state
    if beginning := _beginning(found, key):
        return _only(beginning)
    known = [name for name, _ in found if name]
    hint = suggestion(key, known).replace("Supported", "There are")
    what = f"there is no state dict under {key!r} in it"
    raise CheckpointError(what, remedy=hint if known else "There is none under any key.")


def _only(chosen: Sequence[tuple[str, Mapping[Any, Any]]]) -> tuple[str, Mapping[Any, Any]]:
    if len(chosen) > 1:
        keys = listed(name or "the top level" for name, _ in chosen)
        raise CheckpointError(
            f"there is a state dict that may be meant under each of {keys}",
            remedy="Name the one you mean with `key`.",
        )
    return chosen[0]


def _beginning(
    found: Sequence[tuple[str, Mapping[Any, Any]]], key: str
) -> list[tuple[str, Mapping[Any, Any]]]:
    """Return what stands in state dicts of several models under names that begin with a key."""
    parts: list[tuple[str, Mapping[Any, Any]]] = []
    for name, state in found:
        own = key.removeprefix(f"{name}.") if name else key
        names = [k for k in state if isinstance(k, str) and k.startswith(f"{own}.")]
        if names:
            part = {k.removeprefix(f"{own}."): state[k] for k in names}
            parts.append((f"{name}.{own}" if name else own, part))
    return parts


def _without_counter(state: StateDict, expected: StateDict) -> StateDict:
    """Leave out the counter of averaged weights, where that is clearly what it is."""
    others = [name for name in state if name != _COUNTER]
    averaged = _COUNTER in state and _COUNTER not in expected and others
    if not averaged or not all(name.startswith(_PREFIXES[0]) for name in others):
        return state
    return {name: state[name] for name in others}


def _without(state: StateDict, expected: StateDict, ignore: Sequence[str]) -> StateDict:
    """Leave out what one of the globs names and the model has not, with or without prefixes."""

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
    """Take prefixes off that every name has, as far as it makes more of the names fit."""
    candidates = [("", state)]
    while (current := candidates[-1][1]) and (part := next(iter(current)).partition(".")[0] + "."):
        if not all(name.startswith(part) and name != part for name in current):
            break
        shorter = {name.removeprefix(part): value for name, value in current.items()}
        candidates.append((candidates[-1][0] + part, shorter))
    plain = [(prefix, _uncompiled(names, expected)) for prefix, names in candidates]
    return max(plain, key=lambda c: len(c[1].keys() & expected.keys()))


def _uncompiled(state: StateDict, expected: StateDict) -> StateDict:
    """Name what was compiled in one of the two alone as the model does."""
    plain = {name.replace(_COMPILED, "."): name for name in expected}
    named = {
        k if k in expected else plain.get(k.replace(_COMPILED, "."), k): v for k, v in state.items()
    }
    return named if len(named) == len(state) else state


def _with_tied(
    values: StateDict, expected: StateDict, own: Mapping[str, Tensor]
) -> tuple[dict[str, Any], list[str]]:
    """Fill in names of a tensor that the checkpoint has under another of its names.

    One without memory is the same if it is the same of the model's `own` parameters.
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
                    f"{there[0]!r} and {name!r} are one tensor in the model, but differ here",
                    remedy="Save the state dict of a model that ties them too.",
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
        remedy += ' ignore="GLOB" leaves out what it does not have.'
    mixed = [p for p in _PREFIXES if any(name.startswith(p) for name in unexpected)]
    parts = {name.partition(".")[0] for name in unexpected if "." in name}
    own = [p for p in sorted(parts) if _covers(values, p, expected)]
    if own:
        keys = listed(f"{key}.{p}" if key else p for p in own)
        remedy += f" All of the model's are under {keys}: name one with `key`."
    elif mixed:
        remedy += f" Not every name begins with {mixed[0]!r}, so it was not taken off."
    what = f"the names do not fit the model's {len(expected)}: {told}"
    raise CheckpointError(what, remedy=remedy)


def _covers(values: StateDict, part: str, expected: StateDict) -> bool:
    """Whether the names that begin with a part are the model's, all of them."""
    begin = f"{part}."
    named = {k.removeprefix(begin): v for k, v in values.items() if k.startswith(begin)}
    return _stripped(named, expected)[1].keys() == expected.keys()


def _check_tensors(values: StateDict, expected: StateDict) -> list[Change]:
    """Return what is to be cast: floating-point numbers to other floating-point numbers only."""
    wrong: list[str] = []
    casts: list[Change] = []
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
        elif got.dtype != want.dtype:
            change = Change(name, got.dtype, want.dtype)
            both = got.is_complex() if want.is_complex() else got.is_floating_point()
            if both and (want.is_complex() or want.is_floating_point()):
                casts.append(change)
            else:
                wrong.append(str(change))
    if wrong:
        what = f"{len(wrong)} of {len(expected)} tensors do not fit: {listed(wrong)}"
        remedy = f"{_CHECK} Only floating-point numbers are cast, to floating-point numbers."
        raise CheckpointError(what, remedy=remedy)
    return casts
