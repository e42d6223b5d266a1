"""Checkpoints of models whose parts are in several files."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from gradscope.errors import CheckpointError
from gradscope.sources.formats import checkpoint_readers, find_reader, reading
from gradscope.sources.weights.fit import fits_part, state_dicts

_NUMBERS = re.compile(r"\d+")
_MOST = 200  # files of a folder to read


def files_of_parts(model: nn.ModuleDict, path: Path, content: Any) -> dict[str, Path]:
    """Return {part: file} if a checkpoint has one part of a model, and its folder the other parts.

    A file belongs to a part if it has the names and shapes of the part. Of several files, the one
    whose name ends with the same number as the checkpoint's name is taken. The result is {} if the
    checkpoint does not have exactly one part, or if a part has no file, or several.
    """
    own = [name for name, part in model.items() if _state(content, part) is not None]
    if len(own) != 1 or not path.is_file():
        return {}
    found = {own[0]: path}
    others = [f for f in sorted(path.parent.iterdir()) if f.suffix == path.suffix and f != path]
    read = {file: content for file in others[:_MOST] if (content := _content(file)) is not None}
    for name, part in model.items():
        if name in found:
            continue
        fits = [file for file, content in read.items() if _state(content, part) is not None]
        alike = [f for f in fits if _number(f) == _number(path)]
        fits = alike or fits
        if len(fits) != 1:
            return {}
        found[name] = fits[0]
    return dict(sorted(found.items()))


def _number(file: Path) -> str:
    """Return the last number in the name of a file."""
    return "".join(_NUMBERS.findall(file.stem)[-1:])


def contents_of(model: nn.ModuleDict, files: Mapping[str, Path]) -> dict[str, Any]:
    """Return {part: state dict} of the files of a model's parts."""
    return {name: _state(_content(file), model[name]) for name, file in files.items()}


def _content(file: Path) -> Any:
    """Return what a checkpoint holds, or None if it cannot be read."""
    try:
        name = find_reader(checkpoint_readers, file, CheckpointError)
        with reading(CheckpointError, file):
            return checkpoint_readers.get(name)(file)
    except CheckpointError:
        return None


def _state(content: Any, part: nn.Module) -> Mapping[Any, Any] | None:
    """Return the state dict in a checkpoint with the names and shapes of a part, or None."""
    found = (fits_part(state, part) for _, state in state_dicts(content))
    return next((state for state in found if state is not None), None)
