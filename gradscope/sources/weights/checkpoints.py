"""Weights from a file into a model: found, checked against the model, and loaded whole or not."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from gradscope.errors import CheckpointError
from gradscope.sources.code import user_file
from gradscope.sources.data.readers import checkpoint_readers, find_checkpoint_reader, reachable
from gradscope.sources.digests import sha256, sha256_of_all
from gradscope.sources.fit import fitted
from gradscope.sources.listing import listed
from gradscope.sources.weights import formats as checkpoint_formats  # noqa: F401 (it registers the readers)
from gradscope.sources.weights.contents import find_state_dict
from gradscope.sources.weights.folders import weights_in
from gradscope.sources.weights.shards import files_of

TRUSTED = ("torch", "torch-legacy", "pickle")  # what unsafe_pickle lets execute code


@dataclass(frozen=True)
class CheckpointReport:
    """What was loaded, and what was done to make it fit.

    Attributes:
        path: The file.
        format: The reader's name.
        sha256: The file's SHA-256; of several files, one over the list of theirs.
        tensors: How many tensors were loaded.
        key: Where in the file the state dict was, dotted; "" at the top level.
        dropped: Names that were left out.
        prefix: What was taken off every name, "" if nothing.
        casts: "name: float64 -> float32" for each tensor that was cast.
        tied: Names that the file lacks and whose tensor came under another name.
        others: Further notes.
        files: Every file that was read.
    """

    path: Path
    format: str
    sha256: str
    tensors: int
    key: str = ""
    dropped: tuple[str, ...] = ()
    prefix: str = ""
    casts: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each thing done that the user may not expect."""
        notes = list(self.others)
        if self.key:
            notes.append(f"The weights are those under {self.key!r} of the checkpoint.")
        if self.dropped:
            notes.append(f"Left out of the checkpoint, as not the model's: {listed(self.dropped)}.")
        if self.prefix:
            notes.append(f"The prefix {self.prefix!r} was taken off all names in the checkpoint.")
        if self.casts:
            notes.append(f"Cast to the model's dtype: {listed(self.casts)}.")
        if self.tied:
            notes.append(f"Not in the checkpoint, tied to others that are: {listed(self.tied)}.")
        return tuple(notes)


@dataclass(frozen=True)
class Content:
    """A checkpoint as it was read.

    Attributes:
        path: The file, where a folder was given the one in it.
        format: The reader's name.
        sha256: The file's SHA-256; of several files, one over the list of theirs.
        value: What it holds.
        files: Every file that was read.
        notes: What was done.
    """

    path: Path
    format: str
    sha256: str
    value: Any
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()


def read(path: Path, *, unsafe_pickle: bool = False) -> Content:
    """Read a checkpoint: a file, an index of several, or the folder that holds either.

    Args:
        path: The kind of a file is found by content.
        unsafe_pickle: The user trusts the file, which may execute code as it is loaded.

    Raises:
        CheckpointError: It cannot be read or is refused.
    """
    with reachable(path, CheckpointError):
        file = weights_in(path) if path.is_dir() else path
    notes = [] if file == path else [f"The weights of the folder are those in {file.name}."]
    name = find_checkpoint_reader(file)
    with located(file):
        if unsafe_pickle and name in TRUSTED:
            from gradscope.sources.weights.code import read_trusted

            value = read_trusted(file, name)
            notes.append("The checkpoint was trusted to execute code (--unsafe-pickle).")
        else:
            value = checkpoint_readers.get(name)(file)
    files = files_of(file) if name == "index" else (file,)
    digest = sha256(file) if len(files) == 1 else sha256_of_all(files)
    return Content(file, name, digest, value, files, tuple(notes))


def load_into(
    model: nn.Module,
    path: Path,
    *,
    key: str | None = None,
    ignore: Sequence[str] = (),
    unsafe_pickle: bool = False,
) -> CheckpointReport:
    """Load a checkpoint into a model: every tensor of both must fit, or nothing is loaded.

    Args:
        model: The model; its parameters and buffers are overwritten.
        path: A file, an index of several, or the folder that holds either.
        key: Where in it the state dict is, dotted; found by the model's names when None.
        ignore: Globs of names that are left out where the model has no such name.
        unsafe_pickle: The user trusts the file, which may execute code as it is loaded.

    Raises:
        CheckpointError: The file cannot be read or is refused, or it does not fit the model.
    """
    content = read(path, unsafe_pickle=unsafe_pickle)
    with located(content.path):
        found = find_state_dict(content.value, model, key)
        fit = fitted(model, found.state, ignore)
        with user_file("the model's own load_state_dict"):
            model.load_state_dict(fit.state, strict=True)
    return CheckpointReport(
        content.path,
        content.format,
        content.sha256,
        len(fit.state) - len(fit.tied),
        found.key,
        fit.dropped,
        fit.prefix,
        fit.casts,
        fit.tied,
        content.notes,
        content.files,
    )


@contextmanager
def located(path: Path) -> Iterator[None]:
    """Put the file into a `CheckpointError` that names none."""
    try:
        yield
    except CheckpointError as error:
        if error.where is None:
            error.at(str(path))
        raise
