"""What a reader of files is, and how the one for a file is found: by content, not by suffix."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from gradscope.core.registry import Registry
from gradscope.errors import CheckpointError, DatasetError, InputError
from gradscope.sources.data.columns import Arrays

HEAD = 4096  # bytes that are looked at to tell what a file is


class CheckpointReader(Protocol):
    """Reads a checkpoint: whatever it holds, as plain containers of tensors."""

    matches: Callable[[bytes], bool]

    def __call__(self, path: Path) -> Any:
        """Return the content, on the CPU."""


class DatasetReader(Protocol):
    """Opens a data file."""

    matches: Callable[[bytes], bool]

    def __call__(self, path: Path) -> Arrays:
        """Return its arrays."""


checkpoint_readers: Registry[CheckpointReader] = Registry("checkpoint format")
dataset_readers: Registry[DatasetReader] = Registry("dataset format")

R = TypeVar("R", CheckpointReader, DatasetReader)


def is_zip(head: bytes) -> bool:
    """Whether a file that begins like this is a zip archive."""
    return head.startswith((b"PK\x03\x04", b"PK\x05\x06"))


def is_safetensors(head: bytes) -> bool:
    """Whether a file that begins like this is a safetensors file: a length, then JSON."""
    return head[8:9] == b"{"


def matching(matches: Callable[[bytes], bool]) -> Callable[[Any], Any]:
    """Return a decorator that says which files a reader is for, by their first bytes."""

    def add(reader: Any) -> Any:
        reader.matches = matches
        return reader

    return add


def find_checkpoint_reader(path: Path) -> str:
    """Return the name of the reader for a checkpoint.

    Raises:
        CheckpointError: The path is no file, or no reader knows what it holds.
    """
    return _find(checkpoint_readers, path, CheckpointError)


def find_dataset_reader(path: Path) -> str:
    """Return the name of the reader for a data file.

    Raises:
        DatasetError: The path is no file, or no reader knows what it holds.
    """
    return _find(dataset_readers, path, DatasetError)


def _find(registry: Registry[R], path: Path, error: type[InputError]) -> str:
    head = _head(path, error)
    for name in registry:
        if registry.get(name).matches(head):
            return name
    found, remedy = _description(head)
    raise error(
        f"this is {found}, no {registry.kind} that can be read",
        where=str(path),
        remedy=f"{remedy} Supported: {', '.join(registry)}.",
    )


@contextmanager
def reachable(path: Path, error: type[InputError]) -> Iterator[None]:
    """Turn what the system says of a path, such as that it is too long, into an error of ours."""
    try:
        yield
    except OSError as failure:
        raise error(
            f"cannot be read: {failure.strerror}",
            where=str(path),
            remedy="Check the path and its permissions.",
        ) from failure


def _head(path: Path, error: type[InputError]) -> bytes:
    with reachable(path, error):
        if path.is_dir():
            raise error("this is a directory", where=str(path), remedy="Give a file in it.")
        if not path.exists():
            raise error("there is no such file", where=str(path), remedy="Check the path.")
        if not path.is_file():
            raise error("this is no regular file", where=str(path), remedy="Give a file on disk.")
        with path.open("rb") as file:
            head = file.read(HEAD)
    if not head:
        raise error("the file is empty", where=str(path), remedy="Write or download it again.")
    return head


_MAGIC = {
    b"\x89HDF": "an HDF5 file",
    b"\x93NUMPY": "a single numpy array (.npy)",
    b"\x1f\x8b": "a gzip archive",
    b"BZh": "a bzip2 archive",
    b"\xfd7zXZ": "an xz archive",
    b"\x28\xb5\x2f\xfd": "a zstd archive",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"\x80": "a Python pickle, which could execute code and is never loaded",
    b"PK\x03\x04": "a zip archive",
    b"PK\x05\x06": "an empty zip archive",
    b"GGUF": "a GGUF file",
}


def _description(head: bytes) -> tuple[str, str]:
    """Say what a file that begins like this is, and what to do."""
    again = "Write or download it again."
    if head.startswith(b"version https://git-lfs"):
        return "a git-LFS pointer, not the file itself", "Run `git lfs pull`."
    if re.match(rb"\s*<(!doctype|html|head|body|\?xml)", head, re.IGNORECASE):
        return "an HTML page, as a failed download leaves it", "Download the file again."
    if len(head) < 16:
        return f"a file of {len(head)} bytes, probably cut off", again
    if head[257:262] == b"ustar":
        return "a tar archive", "Unpack it, and give the file in it."
    for magic, what in _MAGIC.items():
        if head.startswith(magic):
            packed = what.endswith("archive")
            return what, "Unpack it, and give the file in it." if packed else "Convert it."
    try:
        text = head[:-4].decode()  # not the last bytes: a character may be cut
    except UnicodeDecodeError:
        return "a file of an unknown kind, or a damaged one", again
    if all(c.isprintable() or c.isspace() for c in text):
        return "a text file", "Check that it is the right one."
    return "a file of an unknown kind, or a damaged one", again
