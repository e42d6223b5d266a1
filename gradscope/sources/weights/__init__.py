"""Weights from a file into a model: found, checked against the model, and loaded whole or not."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradscope.errors import CheckpointError, located
from gradscope.sources.code import user_file
from gradscope.sources.formats import (
    checkpoint_readers,
    find_reader,
    reachable,
    reading,
    sha256,
    sha256_of_list,
)
from gradscope.sources.weights.fit import fit_state
from gradscope.sources.weights.readers import TRUSTED, files_of, read_trusted, weights_in


@dataclass(frozen=True)
class CheckpointReport:
    """What was read, and what was done to make it fit."""

    path: Path  # the file, where a folder was given the one in it
    format: str  # the reader's name
    sha256: str  # the file's SHA-256; of several files, one over the list of theirs
    files: tuple[Path, ...]  # every file that was read
    notes: tuple[str, ...]  # one sentence for each thing done that the user may not expect
    tensors: int = 0  # how many tensors were loaded
    key: str = ""  # where in the file the state dict was, dotted; "" at the top level
    prefix: str = ""  # what was taken off every name, "" if nothing


def read(path: Path, *, unsafe_pickle: bool = False) -> tuple[Any, CheckpointReport]:
    """Return what a checkpoint holds, and a report in which no tensor has been loaded.

    The path is a file, an index of several, or the folder that holds either.
    """
    with reachable(path, CheckpointError):
        part = path.suffix == ".distcp" and (path.parent / ".metadata").exists()
        folder = path.parent if part else path
        file = weights_in(folder) if folder.is_dir() else path
    notes = [] if file == path else [f"The weights of the folder are those in {file.name}."]
    name = find_reader(checkpoint_readers, file, CheckpointError)
    with reading(CheckpointError, file):
        if unsafe_pickle and name in TRUSTED:
            value = read_trusted(file, name)
            notes.append("The checkpoint was trusted to execute code.")
        else:
            value = checkpoint_readers.get(name)(file)
        files = files_of(file) if name == "index" else (file,)
    digests = [(each.name, sha256(each)) for each in files]
    digest = digests[0][1] if len(files) == 1 else sha256_of_list(digests)
    return value, CheckpointReport(file, name, digest, files, tuple(notes))


def load_into(
    model: nn.Module,
    path: Path,
    *,
    key: str | None = None,
    ignore: Sequence[str] = (),
    unsafe_pickle: bool = False,
    assign: bool = False,
    asked: torch.dtype | None = None,
) -> CheckpointReport:
    """Load a checkpoint into a model: every tensor of both must fit, or nothing is loaded.

    Args:
        model: The model; its parameters and buffers are overwritten.
        path: A file, an index of several, or the folder that holds either.
        key: Where in it the state dict is, dotted; found by the model's names when None.
        ignore: Globs of names that are left out where the model has no such name.
        unsafe_pickle: The user trusts the file, which may execute code as it is loaded.
        assign: The checkpoint's tensors become the model's, whose parameters may be on "meta".
        asked: The dtype that the model was cast to; a cast to it is noted only if it rounds.

    Raises:
        CheckpointError: The file cannot be read or is refused, or it does not fit the model.
    """
    content, report = read(path, unsafe_pickle=unsafe_pickle)
    with located(report.path):
        fit = fit_state(model, content, key, ignore, asked)
        with user_file("the model's own load_state_dict"):
            tied = _tied(model) if assign else []
            model.load_state_dict(fit.state, strict=True, assign=assign)
            for (first, name), *others in tied:
                for module, other in others:
                    module._parameters[other] = first._parameters[name]
    notes = report.notes + fit.notes
    return replace(report, notes=notes, tensors=fit.tensors, key=fit.key, prefix=fit.prefix)


def _tied(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return where each parameter is held, and under which name."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                places.setdefault(id(p), []).append((module, name))
    return list(places.values())
