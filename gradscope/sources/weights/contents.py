"""Where in a checkpoint the weights are: all of it, or what is under one of its keys."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gradscope.core.registry import suggestion
from gradscope.errors import CheckpointError
from gradscope.sources.fit import shared
from gradscope.sources.listing import article, listed

_DEPTH = 3  # such as checkpoint["ema"]["module"]["state_dict"]
_REMEDY = "Save model.state_dict()."


@dataclass(frozen=True)
class StateDict:
    """A state dict found in a checkpoint.

    Attributes:
        key: Where it was, dotted; "" for the top level.
        state: {name: tensor}; whatever else is in it is for the fit to refuse.
    """

    key: str
    state: Mapping[Any, Any]


def find_state_dict(content: Any, model: nn.Module, key: str | None = None) -> StateDict:
    """Return the state dict in a checkpoint that is the model's.

    Args:
        content: What the checkpoint holds.
        model: Whose weights are wanted.
        key: The one that was asked for; otherwise the only one that has all of the model's names.

    Raises:
        CheckpointError: There is none, or there are several.
    """
    if isinstance(content, Tensor):
        raise CheckpointError("it holds a single tensor, not a state dict", remedy=_REMEDY)
    if not isinstance(content, Mapping | nn.Module):
        kind = type(content).__name__
        raise CheckpointError(f"it holds {article(kind)}, not a state dict", remedy=_REMEDY)
    found = state_dicts(content)
    if key is not None:
        return _named(key, content, found)
    if len(found) == 1:
        return found[0]
    scores = [shared(each.state, model) for each in found]
    best = max(scores, default=0.0)
    chosen = [each for each, score in zip(found, scores, strict=True) if score == best]
    if not best:
        keys = listed(repr(k) for k in content) if isinstance(content, Mapping) else ""
        raise CheckpointError(
            f"there is no state dict of the model in it; its keys are: {keys or 'none'}",
            remedy=f"{_REMEDY} It may stand under a key, such as 'model'; one that is deeper than "
            "four is named with --key.",
        )
    if len(chosen) > 1:
        keys = listed(each.key or "the top level" for each in chosen)
        raise CheckpointError(
            f"there is a state dict that may be meant under each of {keys}",
            remedy="Name the one you mean with --key, or `key` under [checkpoint].",
        )
    return chosen[0]


def state_dicts(content: Any) -> list[StateDict]:
    """Return everything in a checkpoint that may be a state dict."""
    return list(_state_dicts(content, "", _DEPTH, set()))


def _state_dicts(content: Any, key: str, depth: int, seen: set[int]) -> Iterator[StateDict]:
    if id(content) in seen:  # a pickled table may hold itself
        return
    seen.add(id(content))
    if isinstance(content, nn.Module):
        yield StateDict(key, content.state_dict())
    elif isinstance(content, Mapping):
        if any(isinstance(value, Tensor) for value in content.values()):
            yield StateDict(key, content)
        for name, value in content.items():
            if depth and isinstance(name, str):
                yield from _state_dicts(value, f"{key}.{name}" if key else name, depth - 1, seen)


def _named(key: str, content: Any, found: list[StateDict]) -> StateDict:
    for each in found:
        if each.key == key:
            return each
    value = content
    for part in key.split("."):  # it may lie deeper than is looked by itself
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, Mapping) and any(isinstance(v, Tensor) for v in value.values()):
        return StateDict(key, value)
    keys = [each.key for each in found if each.key]
    raise CheckpointError(
        f"there is no state dict under {key!r} in it",
        remedy=suggestion(key, keys).replace("Supported", "There are")
        if keys
        else "There is none under any key.",
    )
