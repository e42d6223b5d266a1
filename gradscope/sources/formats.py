"""File formats: the registries of readers, the choice of a reader, and the translation of errors.

The first bytes of a file select the reader, not its suffix. A reader executes no code of the file.
"""

import errno
import functools
import hashlib
import importlib
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gradscope.core.filetypes import AGAIN, CONVERT_IT, describe
from gradscope.core.registry import Registry
from gradscope.errors import DatasetError, GradscopeError, InputError, located
from gradscope.model.locate import first_line
from gradscope.process.shortage import is_shortage

if TYPE_CHECKING:
    from gradscope.sources.data.columns import StoredArrays

T = TypeVar("T")

HEAD = 4096  # number of first bytes that identify a format


CONVERT = """\
Save tensors with one entry a sample, in your script:
    import torch
    inputs, targets = ...  # as the script reads them
    torch.save({"inputs": inputs, "targets": targets}, "data.pt")"""


class Reader(Generic[T]):
    """A reader of one file format.

    Args:
        matches: Returns whether a file with these first bytes (at most 4,096) has the format.
        read: Returns the content of a file: a `StoredArrays`, or a checkpoint's plain containers
            of tensors. Its exceptions are translated into an error that names the file.
            `gradscope list formats` shows the first line of its docstring.
    """

    def __init__(self, matches: Callable[[bytes], bool], read: Callable[[Path], T]) -> None:
        self.matches, self._read = matches, read
        functools.update_wrapper(self, read)

    def __call__(self, path: Path) -> T:
        """Return the content of a file."""
        return self._read(path)


def matching(matches: Callable[[bytes], bool]) -> Callable[[Callable[[Path], T]], Reader[T]]:
    """Return a decorator that turns a function into the `Reader` of matching files."""
    return lambda read: Reader(matches, read)


checkpoint_readers: Registry[Reader[Any]] = Registry("checkpoint format")
dataset_readers: Registry[Reader["StoredArrays"]] = Registry("dataset format")


def is_zip(head: bytes) -> bool:
    """Whether a file with these first bytes is a zip archive."""
    return head.startswith((b"PK\x03\x04", b"PK\x05\x06"))


def is_saved_by_torch(head: bytes) -> bool:
    """Whether a file with these first bytes is a zip archive of torch.save."""
    return is_zip(head) and b"/data.pkl" in head[:HEAD]


def is_safetensors(head: bytes) -> bool:
    """Whether a file with these first bytes is a safetensors file: a length, then JSON."""
    return head[8:9] == b"{"


def find_reader(registry: Registry[Reader[T]], path: Path, error: type[InputError]) -> str:
    """Return the name of the reader for a file, or raise `error` with the type of the file."""
    head = _head(path, error)
    for name in registry:
        if registry.get(name).matches(head):
            return name
    found, remedy = describe(head)
    convert = ""
    if registry is dataset_readers and found.endswith("image"):
        remedy = "Give a folder with one folder of images for each class."
    elif registry is dataset_readers and remedy in (CONVERT_IT, AGAIN):
        convert = f"\n{CONVERT}"
    raise error(
        f"this is {found}, not a supported {registry.kind}",
        where=str(path),
        remedy=f"{remedy} Supported: {', '.join(registry)}.{convert}",
    )


def require_regular(path: Path, error: type[InputError]) -> None:
    """Raise for a pipe or a device: reading it may block, and it cannot be read twice."""
    if path.exists() and not path.is_file():
        raise error("this is not a regular file", where=str(path), remedy="Give a file on disk.")


def _head(path: Path, error: type[InputError]) -> bytes:
    with reachable(path, error):
        if path.is_dir():
            raise error("this is a directory", where=str(path), remedy="Give a file in it.")
        if not path.exists():
            raise error("there is no such file", where=str(path), remedy="Check the path.")
        require_regular(path, error)
        with path.open("rb") as file:
            head = file.read(HEAD)
    if not head:
        raise error("the file is empty", where=str(path), remedy=AGAIN)
    return head


@contextmanager
def reachable(path: Path, error: type[InputError]) -> Iterator[None]:
    """Translate an OSError about a path, such as a path that is too long."""
    try:
        yield
    except OSError as failure:
        reason = f"cannot be read: {failure.strerror}"
        remedy = "Check the path and its permissions."
        raise error(reason, where=str(path), remedy=remedy) from failure


@contextmanager
def reading(error: type[InputError], where: Path | str) -> Iterator[None]:
    """Translate a library's exception about a file into an `error` that names the file."""
    try:
        with located(where):
            yield
    except GradscopeError:
        raise
    except Exception as failure:  # a damaged file can make a parser raise anything
        reason, remedy = first_line(failure), AGAIN
        if isinstance(failure, zipfile.BadZipFile) and "not a zip file" in str(failure):
            reason = "the zip directory at its end is missing"
        if isinstance(failure, OSError) and failure.errno == errno.EINVAL:
            reason = "its zip directory points outside of the file"
        what = f"the file is damaged or cut off: {reason}"
        if is_shortage(failure):
            what = f"the file needs more memory than is available: {reason}"
            remedy = "Split the file. If it should not be that large, write it again."
        raise error(what, where=str(where), remedy=remedy) from failure


class DuplicateKeyError(ValueError):
    """A JSON object has the same key twice, which Python's json module accepts."""

    def __init__(self, key: str) -> None:
        super().__init__(f"it has the key {key!r} twice")
        self.key = key


def distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict; use it as the `object_pairs_hook` of json.

    Raises:
        DuplicateKeyError: A key occurs twice.
    """
    [(key, times)] = Counter(key for key, _ in pairs).most_common(1) or [("", 0)]
    if times > 1:
        raise DuplicateKeyError(key)
    return dict(pairs)


_EXTRAS = {"pyarrow": "data", "PIL": "data", "transformers": "hf", "peft": "peft"}


def need(module: str, what: str, error: type[InputError] = DatasetError) -> Any:
    """Import a module of an optional library, or raise an error that says how to install it."""
    library = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as failure:
        if failure.name is not None and failure.name.partition(".")[0] != library:
            raise
        told = f"{what} needs {'Pillow' if library == 'PIL' else library}, which is not installed"
        raise error(told, remedy=f"pip install 'torch-gradscope[{_EXTRAS[library]}]'") from failure


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content as 64 hexadecimal digits.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_list(digests: Iterable[tuple[str, str]]) -> str:
    """Return the SHA-256 of the lines "DIGEST  NAME", as sha256sum prints them.

    `digests` are pairs (name, digest).
    """
    lines = "".join(f"{digest}  {name}\n" for name, digest in digests)
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


def sha256_of_sources(paths: Sequence[Path]) -> str:
    """Return the SHA-256 of a file, or of the list of digests for a folder or several files.

    Raises:
        DatasetError: A file cannot be read.
    """

    def digest(path: Path) -> str:
        with reachable(path, DatasetError):
            if not path.is_dir():
                return sha256(path)
            files = sorted(p for p in path.rglob("*") if p.is_file())
            return sha256_of_list((p.relative_to(path).as_posix(), sha256(p)) for p in files)

    digests = [(path.name, digest(path)) for path in paths]
    return digests[0][1] if len(digests) == 1 else sha256_of_list(digests)
