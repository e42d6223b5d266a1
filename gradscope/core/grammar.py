"""The grammar of chains: `stage | stage | ...`, a stage is `name` or `name:key=value,key=value`.

A name is a registered name or `FILE.py:function`. Put a value that contains `|` or `,` in double
quotes. Parsing and binding do not need torch: names and arguments are checked before anything is
loaded.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin

from gradscope.core.registry import suggestion
from gradscope.errors import SpecError

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CODE = re.compile(r".+\.py:[A-Za-z_][A-Za-z0-9_]*")


def _integer(text: str) -> int:
    value = int(text)
    if not -(2**63) <= value < 2**63:
        raise SpecError(f"{text} does not fit into 64 bits", remedy="Give a smaller number.")
    return value


def _plain(text: str) -> Any:
    """Convert a text without a declared type: to a number, a boolean, a tuple, or the text."""
    for convert in (_CONVERTERS[int], _CONVERTERS[float], _CONVERTERS[bool], _CONVERTERS[tuple]):
        with suppress(ValueError, KeyError):
            return convert(text)
    return text


def entries(text: str) -> list[str]:
    """Split a list at its commas; like a Python tuple, it may end with a comma."""
    return text.removesuffix(",").split(",")


def _number(text: str) -> float:
    with suppress(ValueError):
        return _integer(text)
    return float(text)


_CONVERTERS: dict[Any, Callable[[str], Any]] = {
    int: _integer,
    float: float,
    bool: lambda text: {"true": True, "false": False}[text.lower()],
    str: str,
    Path: Path,
    Any: _plain,
    tuple: lambda text: tuple(map(_number, entries(text))),
    list: lambda text: list(map(_number, entries(text))),
    tuple[float, ...]: lambda text: tuple(map(float, entries(text))),
    list[float]: lambda text: list(map(float, entries(text))),
    tuple[int, ...]: lambda text: tuple(map(_integer, entries(text))),
    list[int]: lambda text: list(map(_integer, entries(text))),
}
_NUMBERS = (tuple, list, tuple[float, ...], list[float])
_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)  # *args and **kwargs
_SIMPLE = (bool, int, float, str, tuple, list)  # types of defaults that determine an option's type


@dataclass(frozen=True)
class Stage:
    """One stage as written, with its position in the chain for error messages."""

    name: str
    arguments: dict[str, str] = field(default_factory=dict)
    chain: str = ""
    position: int = 0
    of_function: bool = False  # a Python function is in the chain at this position

    @property
    def files(self) -> dict[str, Path]:
        """The files that arguments name: `with=FILE.h5:CHAIN`; `state=` and `names=` of `adam`."""
        found = {}
        if "with" in self.arguments:
            place, h5, _ = self.arguments["with"].rpartition(".h5:")  # a chain may contain colons
            found["with"] = Path(f"{place}{h5[:-1]}")
        if self.name == "adam" and "state" in self.arguments:
            found["state"] = Path(self.arguments["state"])
            if self.arguments.get("names", "model") != "model":  # "model": the model's order
                found["names"] = Path(self.arguments["names"])
        return found

    def error(self, what: str, remedy: str | None = None) -> SpecError:
        """Return an error that shows the chain and points at this stage."""
        return error_at(self.chain, self.position, what, remedy)

    def bind(
        self,
        factory: Callable[..., T],
        converters: Mapping[Any, Callable[[str], Any]] | None = None,
        skip: int = 0,
    ) -> T:
        """Call `factory` with the arguments, converted according to its annotations.

        An argument named like a Python keyword, such as `with`, is passed as `with_`. Without an
        annotation, the default determines the type. Without a default, or for `**mapping`, the text
        itself determines it.

        Args:
            factory: Makes the stage.
            converters: Functions that convert text to types beyond int, float, bool, str, lists of
                numbers and Literal.
            skip: The number of leading parameters that are not arguments of the stage.
        """
        every = list(signature(factory).parameters.values())[skip:]
        known = {p.name.rstrip("_"): p for p in every if p.kind not in _REST}
        takes_any = any(p.kind is p.VAR_KEYWORD for p in every)
        values: dict[str, Any] = {}
        own = converters or {}
        kinds = {key: _kind(known[key]) if key in known else Any for key in self.arguments}
        for key in kinds:
            if key not in known and not takes_any:
                hint = suggestion(key, list(known)) if known else "It takes no arguments."
                raise self.error(f"{self.name!r} has no argument {key!r}", hint)

        def reads(key: str) -> bool:
            return any(kind is k for kind in own for k in _alternatives(kinds[key]))

        for key in sorted(kinds, key=reads):  # check words before reading files
            name = known[key].name if key in known else key
            values[name] = self._converted(key, self.arguments[key], kinds[key], own)
        missing = [k for k, p in known.items() if p.default is p.empty and p.name not in values]
        if missing:
            example = ",".join(f"{k}=..." for k in missing)
            raise self.error(
                f"{self.name!r} needs {', '.join(missing)}", f"Write {self.name}:{example}."
            )
        try:
            return factory(**values)
        except ValueError as error:
            raise self.error(f"{self.name!r}: {error}") from error

    def _converted(
        self, key: str, text: str, kind: Any, own: Mapping[Any, Callable[[str], Any]]
    ) -> Any:
        # every text is a str, so try it last
        kinds = sorted(_alternatives(kind), key=lambda k: k is str)
        known = [(k, convert) for k in kinds if (convert := _converter(k, own)) is not None]
        for _, convert in known:
            try:
                return convert(text)
            except (ValueError, KeyError):
                continue
            except SpecError as error:
                raise self.error(f"{self.name}:{key}: {error.what}", error.remedy) from error
        if known:
            accepted = " or ".join(_describe_type(k) for k, _ in known)
            remedy = f"Write {self.name}:{key}=VALUE; stages are joined by |, arguments by commas."
            raise self.error(f"{self.name}:{key} must be {accepted}, not {text!r}", remedy)
        remedy = "Declare it as int, float, bool, str, Literal or list[float], or without a type."
        what = f"{self.name}:{key} has the type {_describe_type(kind)}: text cannot be converted"
        raise self.error(what, remedy)

    def __str__(self) -> str:
        arguments = ",".join(f"{k}={_quoted(v)}" for k, v in self.arguments.items())
        return f"{self.name}:{arguments}" if arguments else self.name


def signature(factory: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function; types that cannot be evaluated stay text."""
    try:
        return inspect.signature(factory, eval_str=True)
    except Exception:  # evaluating an annotation can raise anything; its annotation stays text
        found, names = inspect.signature(factory), _globals(factory)
        every = found.parameters.values()
        return found.replace(
            parameters=[p.replace(annotation=_evaluated(p.annotation, names)) for p in every]
        )


def _globals(factory: Callable[..., Any]) -> dict[str, Any]:
    function = inspect.unwrap(factory)
    function = function.func if isinstance(function, partial) else function
    own = function if hasattr(function, "__globals__") else type(function).__call__
    return getattr(own, "__globals__", {})


def _evaluated(annotation: Any, names: dict[str, Any]) -> Any:
    if isinstance(annotation, str):
        with suppress(Exception):
            return eval(annotation, names)
    return annotation


def _kind(option: inspect.Parameter) -> Any:
    """Return the declared type of an option, else the type of its default, or Any."""
    if option.annotation is not option.empty:
        return _evaluated(option.annotation, {})  # a text within a text, as in x: "'float'"
    return type(option.default) if isinstance(option.default, _SIMPLE) else Any


def _alternatives(kind: Any) -> list[Any]:
    """Return the types of a union without None, or the type itself."""
    union = get_origin(kind) in (Union, UnionType)
    return [k for k in (get_args(kind) if union else (kind,)) if k is not type(None)]


def _converter(kind: Any, own: Mapping[Any, Callable[[str], Any]]) -> Callable[[str], Any] | None:
    """Return the function that converts text to a type, or None."""
    if get_origin(kind) is Literal:
        return {str(word): word for word in get_args(kind)}.__getitem__
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    with suppress(TypeError):  # an annotation may be unhashable
        return own.get(kind, _CONVERTERS.get(kind))
    return None


def _describe_type(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    if kind in _NUMBERS:
        return 'numbers such as "1,2.5"'
    if get_origin(kind) is not None:
        return inspect.formatannotation(kind)
    return getattr(kind, "__name__", str(kind))


class StageFactory(Generic[T]):
    """Makes a stage from keyword arguments.

    It has the name, help text and signature of `make`.
    """

    def __init__(self, make: Callable[..., T]) -> None:
        self.make = make
        update_wrapper(self, make)

    def __call__(self, **options: Any) -> T:
        """Return the stage with these options."""
        return self.make(**options)


def parse(chain: str) -> tuple[Stage, ...]:
    """Split a chain into its stages; an error points at the position of the mistake."""
    stages, position = [], 0
    for piece in _split(chain, "|"):
        start = position + len(piece) - len(piece.lstrip())
        stages.append(_stage(chain, piece.strip(), start))
        position += len(piece) + 1
    return tuple(stages)


def arguments(chain: str, name: str, text: str, position: int) -> dict[str, str]:
    """Parse `text`, the `key=value,...` of stage `name`, which begins at `position` of `chain`."""
    found: dict[str, str] = {}
    for piece in _split(text, ","):
        key, equals, value = (part.strip() for part in piece.partition("="))
        if not (equals and _NAME.fullmatch(key) and value):
            remedy = "Name the argument, as in clip:max_norm=1.0."
            if found and not equals and _NAME.fullmatch(value := piece.strip()):
                remedy = f"Put | between stages: {name}:{text.partition(',')[0]} | {value}."
            elif found:
                remedy = 'Put a value that contains a comma in double quotes: NAME="1,2".'
            what = f"expected name=value after {name!r}, found {piece.strip()!r}"
            raise error_at(chain, position, what, remedy)
        if key in found:
            raise error_at(chain, position, f"{key!r} is given twice")
        found[key] = _unquoted(value)
        position += len(piece) + 1
    return found


def resolve_paths(chain: str, base: Path) -> str:
    """Make the paths in a chain absolute, in `FILE.py:function` and in `Stage.files`.

    A chain that does not parse is returned unchanged; binding it reports the error.
    """
    try:
        stages = parse(chain)
    except SpecError:
        return chain
    moved = []
    for stage in stages:
        name = f"{base / stage.name}" if ".py:" in stage.name else stage.name
        given = dict(stage.arguments)
        given |= {key: f"{base / given[key]}" for key in stage.files}
        moved.append(str(Stage(name, given)))
    return " | ".join(moved)


def error_at(chain: str, position: int, what: str, remedy: str | None = None) -> SpecError:
    """Return an error that shows `chain` with a caret under the character at `position`."""
    shown = chain.translate(dict.fromkeys(range(32), "�") | {127: "�"})
    picture = f"  {shown}\n  {' ' * position}^"
    return SpecError(
        what, where="chain", remedy=picture if remedy is None else f"{picture}\n{remedy}"
    )


def _stage(chain: str, text: str, start: int) -> Stage:
    code = _CODE.match(text)
    head = code.group() if code else text.partition(":")[0]
    name, rest = head.strip(), text[len(head) :]
    if not text:
        raise error_at(
            chain, start, "a stage is empty", "Write stages as in clip:max_norm=1 | mean."
        )
    if not (code or _NAME.fullmatch(name)) or rest[:1] not in ("", ":"):
        remedy = "Write NAME:argument=value,argument=value, such as clip:max_norm=1.0 | mean."
        raise error_at(chain, start, f"{name!r} is not the name of a stage", remedy)
    given = arguments(chain, name, rest[1:], start + len(head) + 1) if rest else {}
    return Stage(name, given, chain, start)


def _split(text: str, at: str) -> list[str]:
    """Split at a character, but not within double quotes."""
    pieces, start, quoted = [], 0, False
    for k, character in enumerate(text):
        quoted ^= character == '"'
        if character == at and not quoted:
            pieces.append(text[start:k])
            start = k + 1
    return [*pieces, text[start:]]


def _unquoted(value: str) -> str:
    whole = len(value) > 2 and value[0] == value[-1] == '"' and value.count('"') == 2
    return value[1:-1] if whole else value


def _quoted(value: str) -> str:
    return f'"{value}"' if any(c in value for c in "|,") else value
