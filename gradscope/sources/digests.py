"""Which file exactly: its SHA-256, recorded with every result."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content as 64 hexadecimal digits.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_all(paths: Iterable[Path]) -> str:
    """Return the SHA-256 of the list "DIGEST  NAME" of several files, as sha256sum prints it."""
    lines = [f"{sha256(path)}  {path.name}\n" for path in paths]
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def sha256_of_folder(folder: Path) -> str:
    """Return the SHA-256 of the list "DIGEST  PATH" of all files in a folder, sorted by path."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    lines = [f"{sha256(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def sha256_of_sources(paths: Sequence[Path]) -> str:
    """Return the SHA-256 of one file as it is, else of the list of all files and folders."""
    digests = [sha256_of_folder(p) if p.is_dir() else sha256(p) for p in paths]
    if len(digests) == 1:
        return digests[0]
    lines = [f"{digest}  {path.name}\n" for digest, path in zip(digests, paths, strict=True)]
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()
