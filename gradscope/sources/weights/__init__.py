"""Loads the weights of a checkpoint into a model after a check; on an error, nothing is loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradscope.core.texts import listed
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
from gradscope.sources.weights.parts import contents_of, files_of_parts
from gradscope.sources.weights.readers import TRUSTED, files_of, read_trusted, weights_in


@dataclass(frozen=True)
class CheckpointReport:
    """The file that was read, and the changes made to load it."""

    path: Path  # the file; for a folder, the file in it
    format: str  # the reader's name
    sha256: str  # the SHA-256 of the file, or of the list of digests for several files
    files: tuple[Path, ...]  # all files that were read
    notes: tuple[str, ...]  # a sentence for each change that the user may not expect
    tensors: int = 0  # the number of loaded tensors
    key: str = ""  # the dotted key of the state dict; "" at the top level
    prefix: str = ""  # the prefix removed from all names, or ""


def read(path: Path, *, unsafe_pickle: bool = False) -> tuple[Any, CheckpointReport]:
    """Return the content of a checkpoint, and a report without loaded tensors.

    The path is a file, an index of several files, or a folder with such a file or index.
    """
    with reachable(path, CheckpointError):
        part = path.suffix == ".distcp" and (path.parent / ".metadata").exists()
        folder = path.parent if part else path
        file = weights_in(folder) if folder.is_dir() else path
    notes = [] if file == path else [f"The weights are read from {file.name} in the folder."]
    name = find_reader(checkpoint_readers, file, CheckpointError)
    with reading(CheckpointError, file):
        if unsafe_pickle and name in TRUSTED:
            value = read_trusted(file, name)
            notes.append("The checkpoint was allowed to execute code.")
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
    """Load a checkpoint into a model. If any tensor of the two does not fit, nothing is loaded.

    Args:
        model: The model; its parameters and buffers are overwritten.
        path: A file, an index of several files, or a folder with such a file or index.
        key: The dotted key of the state dict; if None, it is found by the model's names.
        ignore: Globs of names to leave out if the model does not have them.
        unsafe_pickle: The user trusts the file, which may execute code while it is loaded.
        assign: Use the checkpoint's tensors in the model; its parameters may be on "meta".
        asked: The dtype that the model was cast to. A cast to it is noted only if it rounds.

    Raises:
        CheckpointError: The file cannot be read, is refused, or does not fit the model.
    """
    content, report = read(path, unsafe_pickle=unsafe_pickle)
    parts = files_of_parts(model, report.path, content) if isinstance(model, nn.ModuleDict) else {}
    if isinstance(model, nn.ModuleDict) and parts:
        content, report = contents_of(model, parts), _joined(report, parts)
    with located(report.path):
        fit = fit_state(model, content, key, ignore, asked)
        with user_file("the model's own load_state_dict"):
            tied = _tied(model) if assign else []
            model.load_state_dict(fit.state, strict=True, assign=assign)
            for (first, name), *others in tied:
                for module, other in others:
                    module._parameters[other] = first._parameters[name]
    keys = "" if not parts else "several keys"  # the keys of files are made up
    notes = report.notes + tuple(note for note in fit.notes if not keys or keys not in note)
    return replace(report, notes=notes, tensors=fit.tensors, key=fit.key, prefix=fit.prefix)


def _joined(report: CheckpointReport, files: Mapping[str, Path]) -> CheckpointReport:
    """Return the report of a checkpoint whose parts are in several files."""
    digest = sha256_of_list([(file.name, sha256(file)) for file in files.values()])
    told = listed(f"{name} of {file.name}" for name, file in files.items())
    notes = (*report.notes, f"The weights are read from several files: {told}.")
    return replace(report, sha256=digest, files=(*files.values(),), notes=notes)


def _tied(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return for each parameter the (module, name) pairs that refer to it."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                places.setdefault(id(p), []).append((module, name))
    return list(places.values())
