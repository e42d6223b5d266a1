"""Commits: what is complete is made durable, and then said to be complete."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradscope.core.shortage import is_shortage
from gradscope.errors import OutputError
from gradscope.storage.plan import States
from gradscope.storage.sidecar import Paths, Progress
from gradscope.storage.stream import Mark
from gradscope.storage.structure import Structure
from gradscope.storage.trouble import writing

COMMIT_SECONDS = 1.0
COMMIT_SHARE = 20  # a commit may take one part in so many of the time


@dataclass(frozen=True)
class Kept:
    """The file as it was after a batch.

    Attributes:
        completed: The rows that are there.
        states: A copy of the reducers' states after them; None where they are too large to copy.
        marks: Where every stream stood, by path.
    """

    completed: int
    states: States | None
    marks: Mapping[str, Mark] = field(default_factory=dict)


class Commits:
    """The commits of one file.

    Attributes:
        completed: The rows that the last one made durable.
        trusted: Whether the disk has kept what it was given. Once it failed, a second try may
            succeed without having written what the first one lost.
    """

    def __init__(
        self,
        paths: Paths,
        descriptor: int,
        identity: dict[str, Any],
        completed: int,
        replaces: bool,
    ) -> None:
        self.completed, self.trusted = completed, True
        self._paths, self._descriptor, self._identity = paths, descriptor, identity
        self._replaces = replaces
        self._last, self._cost = time.monotonic(), 0.0

    def are_due(self) -> bool:
        """Whether the last one was long ago, measured by what it cost."""
        return time.monotonic() - self._last >= max(COMMIT_SECONDS, COMMIT_SHARE * self._cost)

    def make(self, kept: Kept, states: States, structure: Structure, records: np.ndarray) -> None:
        """Make the rows durable, then say so."""
        begin = time.monotonic()
        marks = kept.marks.items()
        with self.trusting():
            os.fsync(self._descriptor)
            Progress(
                completed=kept.completed,
                identity=self._identity,
                states={owner: dict(state) for owner, state in states.items()},
                tails={path: mark.tail for path, mark in marks if len(mark.tail)},
                overflowed={path: mark.overflowed for path, mark in marks if mark.overflowed},
                structure=structure,
                records=records,
                replaces=self._replaces,
            ).save(self._paths.progress)
        self.completed = kept.completed
        self._last = time.monotonic()
        self._cost = self._last - begin

    @contextmanager
    def trusting(self) -> Iterator[None]:
        """Report what goes wrong in the body, and trust the disk no more."""
        try:
            with writing(self._paths.final):
                yield
        except OutputError as error:
            cause = error.__cause__
            self.trusted = cause is not None and is_shortage(cause)  # the disk is not to blame
            raise
