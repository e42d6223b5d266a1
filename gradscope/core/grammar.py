"""The grammar of chains: `stage | stage | ...`, a stage is `name` or `name:key=value,key=value`.

Parsing and binding arguments need no torch: a chain's words are checked before anything is loaded.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gradscope.core.registry import suggestion
from gradscope.errors import SpecError

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORDS = {"true": True, "false": False}


@dataclass(frozen=True)
class Stage:
    """One stage as written.

    Attributes:
        name: The transform's or reducer's name.
        arguments: Its arguments, still text.
        chain: The whole chain, for messages.
        position: Where the stage begins in it, in characters from 0.
    """

    name: str
    arguments: dict[str, str] = field(default_factory=dict)
    chain: str = ""
    position: int = 0

    def error(self, what: str, remedy: str | None = None) -> SpecError:
        """Return an error that shows the chain and points at this stage."""
        return pointed(self.chain, self.position, what, remedy)

    def bind(self, factory: Callable[..., T]) -> T:
        """Call `factory` with the arguments converted as its annotations say.

        Raises:
            SpecError: An argument is unknown, missing or of the wrong kind.
        """
        known = inspect.signature(factory, eval_str=True).parameters
        values: dict[str, Any] = {}
        for key, text in self.arguments.items():
            if key not in known:
                hint = suggestion(key, list(known)) if known else "It takes no arguments."
                raise self.error(f"{self.name!r} has no argument {key!r}", hint)
            values[key] = self._converted(key, text, known[key].annotation)
        missing = [k for k, p in known.items() if p.default is p.empty and k not in values]
        if missing:
            example = ",".join(f"{k}=..." for k in missing)
            raise self.error(
                f"{self.name!r} needs {', '.join(missing)}", f"Write {self.name}:{example}."
            )
        try:
            return factory(**values)
        except ValueError as error:
            raise self.error(f"{self.name!r}: {error}") from error

    def _converted(self, key: str, text: str, kind: Any) -> Any:
        try:
            if kind is bool:
                return _WORDS[text.lower()]
            return kind(text) if kind in (int, float) else text
        except (ValueError, KeyError):
            raise self.error(f"{self.name}:{key} must be {kind.__name__}, not {text!r}") from None

    def __str__(self) -> str:
        arguments = ",".join(f"{k}={v}" for k, v in self.arguments.items())
        return f"{self.name}:{arguments}" if arguments else self.name


def parse(chain: str) -> tuple[Stage, ...]:
    """Split a chain into its stages.

    Raises:
        SpecError: A stage is empty or not of the form `name:key=value,...`.
    """
    stages, position = [], 0
    for piece in chain.split("|"):
        start = position + len(piece) - len(piece.lstrip())
        stages.append(_stage(chain, piece.strip(), start))
        position += len(piece) + 1
    return tuple(stages)


def pointed(chain: str, position: int, what: str, remedy: str | None = None) -> SpecError:
    """Return an error that shows `chain` with a caret under the character at `position`."""
    shown = chain.translate(dict.fromkeys(range(32), "�") | {127: "�"})
    picture = f"  {shown}\n  {' ' * position}^"
    return SpecError(
        what, where="chain", remedy=picture if remedy is None else f"{picture}\n{remedy}"
    )


def _stage(chain: str, text: str, start: int) -> Stage:
    name, colon, rest = text.partition(":")
    name = name.strip()
    if not text:
        raise pointed(chain, start, "a stage is empty", "Write stages like clip:max_norm=1 | mean.")
    if not _NAME.fullmatch(name):
        raise pointed(chain, start, f"{name!r} is not the name of a stage")
    arguments: dict[str, str] = {}
    position = start + text.index(":") + 1 if colon else start
    for piece in rest.split(",") if colon else []:
        key, equals, value = (part.strip() for part in piece.partition("="))
        if not (equals and _NAME.fullmatch(key) and value):
            raise pointed(chain, position, f"expected key=value after {name!r}, found {piece!r}")
        if key in arguments:
            raise pointed(chain, position, f"{key!r} is given twice")
        arguments[key] = value
        position += len(piece) + 1
    return Stage(name, arguments, chain, start)
