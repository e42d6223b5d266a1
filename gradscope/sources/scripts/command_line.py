"""Command lines of training scripts, from arguments that checkpoints store. No script is run."""

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradscope.sources.scripts.stored import StoredArguments, options_near
from gradscope.sources.scripts.syntax import Option, Script, last_name, option_of
from gradscope.sources.training import PARSERS, parses_arguments
from gradscope.sources.variables import Variables


@dataclass(frozen=True)
class CommandLine:
    """The command-line arguments that a script parses when a run imports it."""

    file: Path  # the script
    stored: Sequence[str] | None  # the arguments that the checkpoint stores, or None
    source: str  # where they are stored


def command_line(
    file: Path, name: str, files: Iterable[Path], given: Mapping[str, Any], checkpoint: Path
) -> CommandLine | None:
    """Return the arguments that FILE.py:NAME parses, or None if it parses none.

    A class or function of the file depends on them only if one of them is required.

    Args:
        file: The script.
        name: A name at its top level, or FUNCTION.NAME for a variable of a function.
        files: Other scripts. A function in them may parse the arguments.
        given: The arguments in the checkpoint.
        checkpoint: The file of the checkpoint. A file near it may have the arguments.
    """
    script = Script.read(file)
    if script is None:
        return None
    others = [found for each in files if (found := Script.read(each)) is not None]
    near = [script, *(other for other in others if other is not script and script.imports(other))]
    parsing = {
        function.name
        for each in near
        for function in each.functions.values()
        if not PARSERS.isdisjoint(_called(function))
    }
    place, _, variable = name.rpartition(".")
    lines = Variables(script.tree, file).statements(place, variable) if place else None
    called = {each for line in lines or () for each in _called(line)}
    parses = not called.isdisjoint(PARSERS | parsing) or parses_arguments(script.tree)
    options = [option_of(call) for each in near for call in each.calls.get("add_argument", ())]
    defined = not place and name in {*script.classes, *script.functions}
    if not parses or (defined and not any(option.required for option in options)):
        return None
    known = {option.name for option in options}
    own = given.of_training if isinstance(given, StoredArguments) else given
    beside, source = ({}, "") if known & own.keys() else options_near(checkpoint, known)
    return CommandLine(file, _written(options, beside or own), source or "the checkpoint")


def _called(node: ast.AST) -> set[str]:
    return {last_name(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}


def _written(options: Sequence[Option], given: Mapping[str, Any]) -> list[str] | None:
    """Return the command line that sets options to values, or None if the values are not known.

    A flag with a truth value, as of type=bool, has no certain form.
    """
    found: list[str] = []
    if given.keys().isdisjoint(option.name for option in options):
        return None
    for option in options:
        value = given.get(option.name)
        if value is None:
            if option.required:
                return None
            continue
        if value == option.default:
            continue
        if isinstance(value, bool) and not option.switch:
            return None
        values = [str(v) for v in value] if isinstance(value, list | tuple) else [str(value)]
        found += [*([option.flag] if option.flag else []), *([] if option.switch else values)]
    return found
