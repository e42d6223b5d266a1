"""Flags from the options that `gradscope.config` describes, and a spec from flags."""

import re
import shlex
from collections.abc import Callable, Mapping
from enum import Enum
from functools import wraps
from inspect import Parameter, Signature, signature
from json import dumps
from pathlib import Path
from re import Match
from typing import Annotated, Any, get_args, get_origin

import typer

from gradscope.cli.names import completion
from gradscope.config import Option, RunSpec, options_of, resolve, run_options
from gradscope.config.commands import Options
from gradscope.core.texts import printable
from gradscope.errors import GradscopeError, SpecError
from gradscope.process import streams

_CODE = '\n  File "'  # the beginning of a traceback's lines
_OPTION = re.compile(r'(?<![\w.:,])(?P<name>[a-z_]+)=(?P<value>"[^"]*"|True)|`(?P<bare>[a-z_]+)`')
# the groups of `--help`, in order, with their options by name in Python
GROUPS = {
    "Model and loss": "model mode key ignore unsafe_pickle loss",
    "Data": "samples shard",
    "Gradients and transforms": "transform parameters rows group group_reduction labels randomness "
    "nonfinite seed",
    "Result": "output resume overwrite layout compression predictions previews dry_run",
    "Precision, memory and speed": "backend dtype device batch_size memory compile cache sharded",
    "Trust": "coupling verify",
    "General": "",  # all other options
}
FEW_OPTIONS = 20  # a command with at most so many options shows one list
UNPROVED = 4  # the exit code of a check that proved nothing
NONFINITE = 7  # the exit code of a finished command with numbers that are not finite


def with_flags(command: Callable[[Any], None]) -> Callable[..., None]:
    """Return a command whose argument is an `Options` as a function of its flags."""
    (own,) = signature(command).parameters.values()
    options: type[Options] = own.annotation

    @wraps(command)
    def run(**given: Any) -> None:
        values = {s.key: given[s.parameter] for s in options_of(options)}
        if "spec" in options.model_fields:
            values["spec"] = run_spec(values.get("config"), given, options.examples)
        command(options.of(values))

    taken = {option.key: [option] for option in options_of(options)}
    taken["spec"] = [option for option in run_options() if command.__name__ in option.commands]
    flags = [_parameter(option) for key in options.model_fields for option in taken[key]]
    vars(run)["__signature__"] = Signature(flags)
    return run


def _parameter(option: Option) -> Parameter:
    """Return an option as a parameter of a function for typer."""
    default = option.default
    if option.required and not option.section:
        default = Parameter.empty
    elif option.section or isinstance(default, tuple):
        default = None  # the run file or the spec has the value
    kind: Any = Annotated[_type(option) | None, _declare(option)]
    return Parameter(option.parameter, Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _type(option: Option) -> Any:
    """Return the type of a flag's value for typer."""
    several = get_origin(option.type) is tuple and not _is_list(option)
    kind: Any = get_args(option.type)[0] if several else option.type
    plain = isinstance(kind, type) and issubclass(kind, bool | int | float | Path | Enum)
    kind = kind if plain else str
    return list[kind] if several else kind


def _declare(option: Option) -> Any:
    """Return typer's declaration of an option: its names, its metavar, its help, its limits.

    The help of a run's option names the default. The flag itself has no default, because the run
    file may set a different value. For the same reason each switch of a run has a --no- form.
    """
    name, text, default = option.flags[0], option.help, option.default
    if not name.startswith("-"):
        if not text:
            return typer.Argument(metavar="", show_default=False, hidden=True)
        return typer.Argument(metavar=name, show_default=False, help=f"{text}.")
    names, metavar = option.flags, option.metavar or None
    if get_origin(_type(option)) is list and not option.metavar.endswith("..."):
        text += "; repeatable"
    if not option.section:
        limits: Any = {"min": option.least, "max": option.most}
        return typer.Option(*names, metavar=metavar, help=f"{text}.", **limits)
    complete = completion(option.parameter)
    if option.type is bool:
        names = (f"{name}/--no-{name[2:]}",)
    elif default is not None:
        text += f" [{','.join(default) if isinstance(default, tuple) else default}]"
    shown: Any = {"help": f"{text}.", "show_default": False, "autocompletion": complete}
    return typer.Option(*names, metavar=metavar, **shown)


def run_spec(
    config: Path | None,
    flags: Mapping[str, Any],
    examples: Mapping[str, Mapping[str, Any]] | None = None,
) -> RunSpec:
    """Return the run file's settings, overridden by the flags that are not None.

    Args:
        config: The run file, or None.
        flags: The values of the flags by their names in Python.
        examples: {section: {key: value}} of settings that are optional for this command.

    Raises:
        SpecError: A setting is wrong; all wrong settings are listed.
    """
    overrides: dict[str, dict[str, Any]] = {}
    for option in run_options():
        value = flags.get(option.parameter)
        if value not in (None, []):
            if _is_list(option):
                value = [word.strip() for word in value.split(",")]
            overrides.setdefault(option.section, {})[option.key] = value
    if "loss" in overrides:
        overrides["loss"]["kwargs"] = {}  # the options of the run file's loss do not apply
    return resolve(config, overrides, _wrong_names, examples or {})


def group_of(name: str) -> str:
    """Return the group of an option in `--help`."""
    return next((group for group, names in GROUPS.items() if name in names.split()), "General")


def naming_flags(error: GradscopeError, flags: Mapping[str, str]) -> GradscopeError:
    """Return an error that names options by their flags; see `as_flags`."""
    error.where = error.where and as_flags(error.where, flags)
    if error.remedy:
        own, file, code = error.remedy.partition(_CODE)  # the user's code is not changed
        error.remedy = as_flags(own, flags) + file + code
    return error


def as_flags(text: str, flags: Mapping[str, str]) -> str:
    """Return a message with options as flags: `coupling="own-loss"` is --coupling own-loss.

    Messages use the Python names of options: `name="value"`, `name=True`, or the name in backticks.
    If the command has no flag for an option, it is named by its key in the run file.

    Args:
        text: The message.
        flags: The command's flags by their names in Python.
    """
    keys = {s.parameter: (s.section, s.key) for s in run_options() if s.parameter}

    def shown(match: Match[str]) -> str:
        name, value = match["name"] or match["bare"], match["value"]
        if name in flags:
            given = "" if value in (None, "True") else shlex.quote(value.strip('"'))
            return f"{flags[name]} {given}".rstrip()
        if name in keys:
            held = "true" if value == "True" else value
            section, key = keys[name]
            setting = f"`{key}`" if held is None else f"{key} = {held}"
            return f"{setting} under [{section}] of a run file"
        return match[0]

    return _OPTION.sub(shown, text)


def flags_of(command: Any) -> dict[str, str]:
    """Return the long flags of a click command by their names in Python."""
    given = (param for param in command.params if param.param_type_name == "option")
    long = ((param.name, [o for o in param.opts if o.startswith("--")]) for param in given)
    return {name: names[0] for name, names in long if names}


def _is_list(option: Option) -> bool:
    """Whether one flag takes several values with commas between, by its metavar."""
    return option.metavar.endswith(",...")


def _wrong_names(spec: RunSpec) -> tuple[SpecError, ...]:
    """Return the errors in the names of chains, backends and loss."""
    from gradscope.run import resolve_names

    try:
        resolve_names(spec)
    except SpecError as error:
        return error.parts or (error,)
    except GradscopeError:  # an error in the user's code is raised when the code is loaded
        pass
    return ()


def show(
    found: Any, render: Callable[..., None], *, json: bool, quiet: bool = False, **how: bool
) -> None:
    """Print a result as one JSON document (itself, or its `to_json`), or as text unless quiet."""
    from gradscope.report.console import console

    if json:  # names are not escaped to ASCII
        document = found if isinstance(found, dict) else found.to_json()
        typer.echo(printable(dumps(document, ensure_ascii=False, indent=2)), file=streams.out())
    elif not quiet:
        render(found, console(), **how)


def exit_of(report: Any) -> None:
    """Exit with code 7 if the report of a run or merge counts non-finite numbers.

    Raises:
        typer.Exit: A sample, or a number in a chain's result, is not finite.
    """
    if report.nonfinite or any(report.chains_nonfinite):
        raise typer.Exit(NONFINITE)
