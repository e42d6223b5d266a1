"""Command lines of training scripts, from arguments that checkpoints store. No script is run."""

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradscope.sources.scripts.stored import StoredArguments, options_near
from gradscope.sources.scripts.syntax import Option, Script, key_of, last_name, option_of
from gradscope.sources.training import PARSERS, parses_arguments
from gradscope.sources.variables import Variables, bound_in

# calls whose arguments change no number of the model, the data or the loss
_IDLE = {"add_argument", "device", "set_device", "to", "cuda", "print"}
_MACHINE = {"device", "cuda", "no_cuda", "use_cuda", "gpu", "gpus", "gpu_id", "workers"}


@dataclass(frozen=True)
class CommandLine:
    """The command-line arguments that a script parses when a run imports it."""

    file: Path  # the script
    stored: Sequence[str] | None  # the arguments that the checkpoint stores, or None
    source: str  # where they are stored
    read: Sequence[str] = ()  # the options that the code reads
    required: Sequence[str] = ()  # the options and positional arguments that are required


def command_line(
    file: Path,
    name: str,
    files: Iterable[Path],
    given: Mapping[str, Any],
    checkpoint: Path,
    lines: Sequence[ast.stmt] | None = None,
) -> CommandLine | None:
    """Return the arguments that FILE.py:NAME parses, or None if it parses none or reads none.

    A class or function of the file depends on them only if one of them is required.

    Args:
        file: The script.
        name: A name at its top level, or FUNCTION.NAME for a variable of a function.
        files: Other scripts. A function in them may parse the arguments.
        given: The arguments in the checkpoint.
        checkpoint: The file of the checkpoint. A file near it may have the arguments.
        lines: The statements of the name, if it is no variable.
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
    variables = Variables(script.tree, file)
    if lines is None:
        top = variables.needed(variables.imported, {name}, bound_in(variables.imported))[0]
        lines = variables.statements(place, variable) if place else top
    called = {each for line in lines or () for each in _called(line)}
    parses = not called.isdisjoint(PARSERS | parsing) or parses_arguments(script.tree)
    options = [option_of(call) for each in near for call in each.calls.get("add_argument", ())]
    defined = not place and name in {*script.classes, *script.functions}
    if not parses or (defined and not any(option.required for option in options)):
        return None
    known = {option.name for option in options}
    own = given.of_training if isinstance(given, StoredArguments) else given
    beside, source = ({}, "") if known & own.keys() else options_near(checkpoint, known)
    stored = _written(options, beside or own)
    read = _options_read([*(lines or ()), *_defined(script, name)], near, options)
    required = [option.flag or option.name for option in options if option.required]
    if stored is None and not (read or required):
        return None
    return CommandLine(file, stored, source or "the checkpoint", read, required)


def _defined(script: Script, name: str) -> list[ast.stmt]:
    return [node for node in script.tree.body if getattr(node, "name", "") == name]


def _options_read(
    lines: Sequence[ast.stmt], near: Sequence[Script], options: Sequence[Option]
) -> list[str]:
    """Return the flags of options that statements read, or functions that they call.

    Only the data set and the collate function of a DataLoader are used.
    """
    nodes = {
        node.name: node
        for script in reversed(near)
        for node in script.tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    read, waiting = set[str](), [*lines]
    while waiting:
        inside: list[ast.AST] = [waiting.pop()]
        while inside:
            node = inside.pop()
            read.add(key_of(node))
            if isinstance(node, ast.Name) and node.id in nodes:
                waiting.append(nodes.pop(node.id))
            if isinstance(node, ast.Call) and last_name(node.func) == "DataLoader":
                kept = [k.value for k in node.keywords if k.arg in (None, "dataset", "collate_fn")]
                inside += [*node.args[:1], *kept]
            elif isinstance(node, ast.Call) and last_name(node.func) in _IDLE:
                inside.append(node.func)  # MODEL(args.width).to(args.device)
            else:
                inside += ast.iter_child_nodes(node)
    known = (option for option in options if option.name in read - _MACHINE)
    return [option.flag or option.name for option in known]


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
