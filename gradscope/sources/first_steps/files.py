"""Restores the user's files that a script overwrites or deletes while it runs."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from gradscope.core.texts import listed

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_APPEND
_CACHES = {"__pycache__", ".cache", ".config"}  # folders with files that may change


class _Files:
    """Copies of files that were there before a script."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.active = False
        self.copies: dict[Path, Path] = {}
        self.made = set[Path]()  # files of the script

    def audit(self, event: str, values: tuple[Any, ...]) -> None:
        """Keep a file that an event of the interpreter is going to change."""
        if not self.active:
            return
        self.active = False  # this function opens files, too
        with suppress(Exception):  # the script's own call reports a wrong path
            if (event == "open" and _writes(*values[1:3])) or event in ("os.remove", "os.truncate"):
                self.keep(values[0])
            elif event == "os.rename":
                self.keep(values[0])
                self.keep(values[1])
            elif event == "shutil.rmtree":
                for file in [*Path(os.fsdecode(values[0])).rglob("*")]:
                    self.keep(file)
        self.active = True

    def keep(self, name: Any) -> bool:
        """Copy a file, unless the script made it; return whether it was there before."""
        if not isinstance(name, str | bytes | os.PathLike):
            return False
        with suppress(OSError, ValueError):
            path = Path(os.fsdecode(name)).absolute()
            if path in self.made or not _CACHES.isdisjoint(path.parts):
                return False
            if not path.exists():
                self.made.add(path)
            elif path.is_file() and path not in self.copies:
                copy = self.folder / str(len(self.copies))
                shutil.copy2(path, copy)
                self.copies[path] = copy
            return path in self.copies
        return False

    def restored(self) -> list[Path]:
        """Restore the files that have changed, and return them."""
        found = []
        for path, copy in self.copies.items():
            if not path.exists() or path.read_bytes() != copy.read_bytes():
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(copy, path)
                found.append(path)
        return found


def _writes(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return not {*mode}.isdisjoint("wax+")
    return isinstance(flags, int) and bool(flags & _WRITES)


@contextmanager
def files_restored(notes: list[str]) -> Iterator[None]:
    """Restore files after the body that were there before, and add a note on them.

    torch.save() writes no file that was there before, so that a large checkpoint is not copied.
    """
    save = torch.save
    with tempfile.TemporaryDirectory(prefix="gradscope-") as folder:
        files = _Files(Path(folder))
        skipped = list[Path]()

        @wraps(save)
        def save_new(value: Any, f: Any, *args: Any, **options: Any) -> None:
            if isinstance(f, str | os.PathLike):
                path = Path(f).absolute()
                if path.exists() and path not in files.made:
                    skipped.append(path)
                    return
                files.made.add(path)
            save(value, f, *args, **options)

        sys.addaudithook(files.audit)  # it cannot be removed
        torch.save = save_new  # type: ignore[assignment]
        files.active = True
        try:
            yield
        finally:
            files.active = False
            torch.save = save
            found = [*dict.fromkeys([*files.restored(), *skipped])]
    if found:
        names = listed(path.name for path in found)
        notes.append(
            f"The script writes files that were there before; they are unchanged: {names}."
        )
