"""Finds arguments of a factory with which all tensors of a checkpoint fit, if the given do not.

Small integers, truth values and fractions are changed. Models are built on the meta device.
"""

import io
import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from gradscope.config import CheckpointSpec, ModelSpec
from gradscope.sources.weights import read
from gradscope.sources.weights.fit import misfit

_SECONDS = 30.0  # the most CPU time to search
_SLOW = 1.0  # seconds; a model that takes longer to build is built once
_INTEGERS = (*range(65), 96, 100, 101, 110, 121, 128, 152, 160, 161, 164, 169, 190, 200, 201)
_INTEGERS += (256, 264, 384, 512, 768, 1024)
_FRACTIONS = (0.1, 0.125, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 1.0)
_FLAGS = 3  # the most truth values to change together
_SAME = 4  # a number is unchanged if so many values make no difference
_RISING = 8  # larger numbers are not tried if so many in turn fit less well
_ROUNDS = 3  # how often each number is changed

Path = tuple[str, ...]  # the keys of an argument in nested tables
Misfit = tuple[int, int]  # the number of names that do not fit, and the difference of sizes
_NEVER = (2**31, 0)  # the factory refuses the arguments


def fitting_arguments(
    model: ModelSpec, checkpoint: CheckpointSpec, build: Any
) -> dict[str, tuple[Any, Any]]:
    """Return {argument: (given value, fitting value)}, or {} if no values are found.

    Args:
        model: The factory and its arguments.
        checkpoint: The weights.
        build: A function that calls a factory with arguments and returns the model.
    """
    values = dict(_leaves(model.kwargs))
    if not values:
        return {}
    content, _ = read(checkpoint.path, unsafe_pickle=checkpoint.unsafe_pickle)

    def score(changed: Mapping[Path, Any]) -> Misfit:
        with suppress(Exception), _quiet():
            made: nn.Module = build(model.factory, _replaced(model.kwargs, changed))
            return misfit(made, content, checkpoint.key, checkpoint.ignore or ())
        return _NEVER

    score({})  # torch loads code for the meta device
    began = time.process_time()
    first = score({})
    if time.process_time() - began > _SLOW:
        return {}
    flags = [path for path, value in values.items() if isinstance(value, bool)][:_FLAGS]
    numbers = [path for path in values if path not in flags]
    for flipped in itertools.product((False, True), repeat=len(flags)):
        chosen = {p: not values[p] for p, flip in zip(flags, flipped, strict=True) if flip}
        best = score(chosen) if chosen else first
        for path in numbers * _ROUNDS:
            tried, rising = [best], 0
            for value in _FRACTIONS if isinstance(values[path], float) else _INTEGERS:
                over = time.process_time() - began > _SECONDS
                useless = rising > _RISING or (len(tried) > _SAME and len({*tried}) == 1)
                if best == (0, 0) or over or useless:
                    break
                found = score({**chosen, path: value})
                if found == _NEVER:
                    continue
                rising = rising + 1 if found >= tried[-1] and found > best else 0
                tried.append(found)
                if found < best:
                    chosen, best = {**chosen, path: value}, found
        if best == (0, 0):
            pairs = {".".join(path): (values[path], value) for path, value in chosen.items()}
            return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    return {}


def _leaves(table: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the integers, truth values and fractions in nested tables."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*above, name))
        elif isinstance(value, bool | int) or (isinstance(value, float) and 0 < value <= 1):
            yield (*above, name), value


def _replaced(table: Mapping[str, Any], changed: Mapping[Path, Any]) -> dict[str, Any]:
    found: dict[str, Any] = deepcopy(dict(table))
    for path, value in changed.items():
        inner = found
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Build modules on the meta device, without output."""
    with ExitStack() as around:
        around.enter_context(redirect_stdout(io.StringIO()))
        around.enter_context(redirect_stderr(io.StringIO()))
        around.enter_context(torch.device("meta"))
        yield
