"""Loops over batches that run: their rounds, and what is recorded of them."""

import ast
import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from gradscope.errors import ModelError
from gradscope.model.copies import graph_leaves
from gradscope.sources.first_steps.values import copied, leaves, random_states, same, size_of
from gradscope.sources.loops import Round, rounds
from gradscope.sources.variables import Variables

_MODULE = "<module>"  # the name of the code of a file


@dataclass
class Recorded:
    """A round: a batch, and the losses whose backward() was called until an optimizer's step."""

    values: dict[str, Any]  # the variables at its start
    batch: Any
    loader: "DataLoader[Any] | None"  # the DataLoader that made the batch
    random: tuple[Any, ...] = ()  # the states of the random generators at its start
    losses: list[float] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)  # the line of backward() for each loss
    parameters: dict[int, nn.Parameter] = field(
        default_factory=dict
    )  # by id: the losses depend on them
    weights: dict[int, Tensor] = field(default_factory=dict)  # their values at that time
    ended: bool = False
    fetched: list[Any] = field(default_factory=list)  # the batches of DataLoaders since its start

    @property
    def loss(self) -> float:
        """The sum of the losses; NaN if backward() was not called."""
        return math.fsum(self.losses) if self.losses else math.nan

    def add(self, loss: Tensor, line: int, *, keep: bool) -> None:
        """Add a loss; with `keep`, remember the values of the parameters."""
        self.losses.append(float(loss.detach().sum()))
        self.lines.append(line)
        for p in graph_leaves(loss):
            if isinstance(p, nn.Parameter) and id(p) not in self.parameters:
                self.parameters[id(p)] = p
                if keep:
                    self.weights[id(p)] = p.detach().clone()


@dataclass
class Feed:
    """Batches that iterators of DataLoaders return in place of the next ones."""

    batches: list[Any] | None = None

    @contextmanager
    def giving(self, batches: Any) -> Iterator[None]:
        """Let the iterators return these batches in the body."""
        self.batches = [*batches]
        try:
            yield
        finally:
            self.batches = None


class Batches:
    """An iterator of a DataLoader, whose batches are noted."""

    def __init__(self, batches: Iterator[Any], feed: Feed, note: Callable[[Any], None]) -> None:
        self._batches, self._feed, self._note = batches, feed, note

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Any:
        if self._feed.batches is not None:
            if not self._feed.batches:
                raise ModelError("the lines take more batches than the script's round did")
            return self._feed.batches.pop(0)
        batch = next(self._batches)
        self._note(batch)
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


@dataclass
class Place:
    """A loop that runs, or a function that is called once a batch."""

    code: CodeType
    file: Path
    round: Round
    names: dict[str, Any]  # the global names
    feed: "Feed"
    name: str = ""  # a sentence about the lines, if they belong to a library
    rounds: list[Recorded] = field(default_factory=list)

    @property
    def done(self) -> list[Recorded]:
        """The rounds that have ended; the round of the first backward() if there is no other."""
        ended = [each for each in self.rounds[1:] if each.ended]
        if self.round.fetches:
            return [each for each in ended if each.fetched]
        return ended or self.rounds[:1]

    @property
    def open(self) -> Recorded | None:
        """The round that runs."""
        last = self.rounds[-1] if self.rounds else None
        return None if last is None or last.ended else last

    def take(self, frame: FrameType, yielded: Iterable[tuple[Any, Any]]) -> None:
        """Record the start of a round; `yielded` are DataLoaders and their last batches."""
        self.end()
        batch = _value_of(self.round.target, frame)
        own = leaves(batch)
        loaders = (
            loader
            for loader, made in yielded
            if same(own, leaves(made)) and _unpacks(self.round.target, made)
        )
        values = {**frame.f_locals}
        self.rounds.append(Recorded(values, copied(batch), next(loaders, None), random_states()))

    def end(self) -> None:
        """End the round that runs, or forget it if it did not call backward()."""
        if self.open is not None and not self.open.losses:
            self.rounds.pop()
        elif self.open is not None:
            if self.round.fetches:
                self.open.batch = tuple(self.open.fetched)
            self.open.ended = True

    def of_lines(self, lines: Iterable[int]) -> "Place":
        """Return the place with the round up to the last of some calls of backward()."""
        called = [*lines]
        if not called or self.name or called == [self.round.lines[1]]:
            return self
        wanted = self.round.head, ast.dump(self.round.target), self.round.fetches
        for found in _rounds(self.code, self.file, called[-1], whole=len(called) > 1):
            if not found.head and not wanted[0] and not found.fetches:
                found = replace(found, target=self.round.target)
            if (found.head, ast.dump(found.target), found.fetches) == wanted:
                return replace(self, round=found)
        return self

    def told(self) -> str:
        """Return a sentence about the lines."""
        if self.name:
            return self.name
        first, last = self.round.lines
        return (
            f"The loss is that of lines {first} to {last} of {self.file.name}, for one sample each."
        )


def places_of(frame: FrameType, feed: "Feed") -> Iterator[Place]:
    """Yield the loops over batches that run in a frame, the innermost first."""
    file, code = Path(frame.f_code.co_filename), frame.f_code
    with suppress(OSError, SyntaxError, ValueError):
        for found in _rounds(code, file, frame.f_lineno):
            if not found.head and not found.fetches:  # the parameters that are tensors
                assert isinstance(found.target, ast.Tuple)
                kept = [each for each in found.target.elts if leaves(_value_of(each, frame))]
                target = kept[0] if len(kept) == 1 else ast.Tuple(kept, ast.Store())
                found = replace(found, target=target)
            if found.fetches or size_of(_value_of(found.target, frame)):
                yield Place(code, file, found, frame.f_globals, feed)


def _rounds(code: CodeType, file: Path, line: int, *, whole: bool = False) -> Iterator[Round]:
    tree = ast.parse(file.read_bytes(), str(file))
    function = None if code.co_name == _MODULE else (code.co_name, code.co_firstlineno)
    return rounds(tree, function, line, Variables(tree, file), whole=whole)


def _unpacks(target: ast.expr, batch: Any) -> bool:
    """Whether the variables of a batch are assigned by unpacking it."""
    if not isinstance(target, ast.Tuple | ast.List):
        return True
    several = isinstance(batch, tuple | list) and len(batch) == len(target.elts)
    pairs = zip(target.elts, batch, strict=True) if several else ()
    return several and all(_unpacks(inner, part) for inner, part in pairs)


def _value_of(target: ast.expr, frame: FrameType) -> Any:
    """Return the value of the variables of a batch, or None."""
    read = copy.deepcopy(target)
    for node in ast.walk(read):
        if hasattr(node, "ctx"):
            node.ctx = ast.Load()
    code = compile(ast.fix_missing_locations(ast.Expression(read)), "<batch>", "eval")
    with suppress(Exception):
        return eval(code, frame.f_globals, frame.f_locals)
    return None
