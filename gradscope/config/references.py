"""How the user's own functions and losses are named, before anything is loaded.

A function is "FILE.py:NAME" or "package.module:NAME". A loss is that or a registered name, with
arguments as a stage of a chain has them: `cross_entropy:label_smoothing=0.1,per_sample=sum`.
"""

import re
from collections.abc import Mapping
from typing import Any

from gradscope.core.grammar import Stage, arguments
from gradscope.errors import SpecError

REFERENCE_FORMS = "FILE.py:NAME or package.module:NAME"
HELD = "checkpoint"  # in a factory's place: the model that the checkpoint itself holds

_DOTTED = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_REFERENCE = re.compile(rf"(?P<place>.+\.py|{_DOTTED}):(?P<name>{_DOTTED})", re.DOTALL)
_WITH_ARGUMENTS = re.compile(rf"(?P<function>(?:.+?\.py|{_DOTTED}):{_DOTTED})(?::.*)?", re.DOTALL)


def split_reference(reference: str) -> tuple[str, str]:
    """Split "FILE.py:NAME" or "package.module:NAME" into the place and the name.

    Raises:
        SpecError: It has neither form.
    """
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise SpecError(f"found {reference!r}", remedy=f"Accepted: {REFERENCE_FORMS}.")
    return match["place"], match["name"]


def function_of(loss: str) -> str | None:
    """Return the reference "FILE.py:NAME" in front of a loss's arguments, or None for a name."""
    match = _WITH_ARGUMENTS.fullmatch(loss)
    return None if match is None else match["function"]


def parse_loss(text: str, kwargs: Mapping[str, Any] | None = None) -> Stage:
    """Return the loss's name and its arguments, those of the text and those of a table.

    Args:
        text: A registered name or a reference, arguments behind a colon.
        kwargs: Further arguments by name: numbers, text, booleans, lists of numbers.

    Raises:
        SpecError: An argument is not of the form key=value, is given twice, or is a table.
    """
    name = function_of(text) or text.partition(":")[0]
    rest = text[len(name) :]
    try:
        given = arguments(text, name, rest[1:], len(name) + 1) if rest else {}
    except SpecError as error:
        error.where = "loss"
        raise
    for key, value in (kwargs or {}).items():
        if key in given:
            raise SpecError(f"{key!r} is given twice, in the name and in kwargs", where="loss")
        given[key] = _written(key, value)
    return Stage(name, given, text)


def _written(key: str, value: Any) -> str:
    """Return a value as it is written in a stage."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, list | tuple) and all(isinstance(v, int | float) for v in value):
        return ",".join(map(str, value))
    raise SpecError(
        f"{key!r} is {value!r}",
        where="loss.kwargs",
        remedy="Accepted: a number, text, true or false, or a list of numbers.",
    )
