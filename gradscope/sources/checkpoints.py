"""Weights from a file into a model: found, checked against the model, and loaded whole or not."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gradscope.errors import CheckpointError
from gradscope.sources import checkpoint_formats  # noqa: F401 (it registers the readers)
from gradscope.sources.code import user_file
from gradscope.sources.digests import sha256
from gradscope.sources.fit import covers, fitted, listed
from gradscope.sources.readers import checkpoint_readers, find_checkpoint_reader

_REMEDY = "Save model.state_dict()."


@dataclass(frozen=True)
class CheckpointReport:
    """What was loaded, and what was done to make it fit.

    Attributes:
        path: The file.
        format: The reader's name.
        sha256: The file's SHA-256.
        tensors: How many tensors were loaded.
        key: Where in the file the state dict was; None at the top level.
        prefix: What was taken off every name, "" if nothing.
        casts: "name: float64 -> float32" for each tensor that was cast.
        tied: Names that the file lacks and whose tensor came under another name.
    """

    path: Path
    format: str
    sha256: str
    tensors: int
    key: str | None = None
    prefix: str = ""
    casts: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each thing done that the user may not expect."""
        notes = []
        if self.key is not None:
            notes.append(f"The weights are those under {self.key!r} of the checkpoint.")
        if self.prefix:
            notes.append(f"The prefix {self.prefix!r} was taken off all names in the checkpoint.")
        if self.casts:
            notes.append(f"Cast to the model's dtype: {listed(self.casts)}.")
        if self.tied:
            notes.append(f"Not in the checkpoint, tied to others that are: {listed(self.tied)}.")
        return tuple(notes)


def load_into(model: nn.Module, path: Path) -> CheckpointReport:
    """Load a checkpoint into a model: every tensor of both must fit, or nothing is loaded.

    Args:
        model: The model; its parameters and buffers are overwritten.
        path: A safetensors file or one of torch.save; the kind is found by content.

    Raises:
        CheckpointError: The file cannot be read or is refused, or it does not fit the model.
    """
    name = find_checkpoint_reader(path)
    try:
        digest = sha256(path)
        key, state = _state_dict(checkpoint_readers.get(name)(path), model)
        fit = fitted(model, state)
        with user_file("the model's own load_state_dict"):
            model.load_state_dict(fit.state, strict=True)
    except CheckpointError as error:
        if error.where is None:
            error.at(str(path))
        raise
    return CheckpointReport(path, name, digest, len(state), key, fit.prefix, fit.casts, fit.tied)


def _state_dict(content: Any, model: nn.Module) -> tuple[str | None, Mapping[str, Any]]:
    """Find the state dict: all of the content, or what is under the one key that fits."""
    if isinstance(content, Tensor):
        raise CheckpointError("it holds a single tensor, not a state dict", remedy=_REMEDY)
    if not isinstance(content, Mapping):
        kind = type(content).__name__
        raise CheckpointError(f"it holds a {kind}, not a state dict", remedy=_REMEDY)
    if _has_tensors(content):
        return None, content
    every = [k for k, v in content.items() if isinstance(v, Mapping) and _has_tensors(v)]
    found = [k for k in every if covers(content[k], model)] or every
    if len(found) > 1:
        raise CheckpointError(
            f"there is a state dict under each of {listed(found)}",
            remedy="Save the one you mean to a file of its own.",
        )
    if not found:
        keys = [repr(key) for key in content]
        raise CheckpointError(
            f"there is no state dict in it; its keys are: {listed(keys) or 'none'}",
            remedy=f"{_REMEDY} It may stand under a key, such as 'model' or 'state_dict'.",
        )
    return found[0], content[found[0]]


def _has_tensors(content: Mapping[Any, Any]) -> bool:
    return any(isinstance(value, Tensor) for value in content.values())
