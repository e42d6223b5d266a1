"""Registries: the names of backends, transforms, reducers, losses, readers and node rules.

A registry raises for duplicate names. Other packages add names through entry points of the group
`gradscope.KIND`. Every "Supported: ..." message and `gradscope list` read from registries.
"""

import difflib
import inspect
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from gradscope.errors import SpecError

T = TypeVar("T")

_LONG = 200  # letters; a longer name is not a misspelling, and the comparison would be slow


def suggestion(name: str, known: list[str]) -> str:
    """Return a sentence with the nearest known name, and all known names, for an unknown `name`."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5) if len(name) < _LONG else []
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return f"{hint}Supported: {', '.join(known)}."


class Registry(Generic[T]):
    """A table from a name to an entry of one kind.

    Args:
        kind: The singular noun used in messages; its plural names the entry point group.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}
        self._plugins_loaded = False

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers its argument under `name` and returns it unchanged."""

        def add(entry: T) -> T:
            if name in self._entries:
                raise SpecError(f"the {self.kind} {name!r} is registered twice")
            self._entries[name] = entry
            return entry

        return add

    def get(self, name: str) -> T:
        """Return the entry called `name`."""
        if name not in self:
            raise SpecError(
                f"unknown {self.kind} {name!r}", remedy=suggestion(name, list(self.names()))
            )
        return self._entries[name]

    def find(self, name: str) -> T | None:
        """Return the entry called `name`, or None."""
        found = self._entries.get(name)
        return found if found is not None or name not in self else self._entries[name]

    def names(self) -> tuple[str, ...]:
        """Return all names, sorted."""
        self._load_plugins()
        return tuple(sorted(self._entries))

    @property
    def group(self) -> str:
        """The entry point group for entries of other packages."""
        plural = "es" if self.kind.endswith("s") else "s"
        return f"gradscope.{self.kind.replace(' ', '_').replace('-', '_')}{plural}"

    def summary(self, name: str) -> str:
        """Return the first line of the entry's docstring, for `gradscope list`."""
        return (inspect.getdoc(self.get(name)) or "").partition("\n")[0]

    def __contains__(self, name: object) -> bool:
        if name not in self._entries:
            self._load_plugins()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def _load_plugins(self) -> None:
        if self._plugins_loaded:
            return
        self._plugins_loaded = True  # set first: a plugin may look up a name
        for point in entry_points(group=self.group):
            entry = point.load()
            if self._entries.get(point.name) is not entry:  # its module may have registered it
                self.register(point.name)(entry)
