"""From the options that `gradscope.config` describes to flags, and from flags to a spec."""

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

_CODE = '\n  File "'  # where lines of a traceback begin
_OPTION = re.compile(r'(?<![\w.:,])(?P<name>[a-z_]+)=(?P<value>"[^"]*"|True)|`(?P<bare>[a-z_]+)`')
# the groups of `--help`, in order, with the options that belong to them by their names in Python
GROUPS = {
    "Model and loss": "model mode key ignore unsafe_pickle loss",
    "Data": "samples shard",
    "Gradients and transforms": "transform parameters labels rows randomness nonfinite seed",
    "Result": "output resume overwrite layout compression predictions previews dry_run",
    "Precision, memory and speed": "backend dtype device batch_size memory compile cache sharded",
    "Trust": "coupling verify",
    "General": "",  # all other options
}
FEW_OPTIONS = 20  # a command with no more options shows them as one list
NONFINITE = 7  # the exit code of a command that is done, where something is not finite


def with_flags(command: Callable[[Any], None]) -> Callable[..., None]:
    """Return a command of one argument, an `Options`, as a function of the flags that make it."""
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
    """Return an option as a parameter of a function from which typer makes a command."""
    default = option.default
    if option.required and not option.section:
        default = Parameter.empty
    elif option.section or isinstance(default, tuple):
        default = None  # not given: the run file or the spec has the value
    kind: Any = Annotated[_type(option) | None, _declare(option)]
    return Parameter(option.parameter, Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _type(option: Option) -> Any:
    """Return the type that typer reads a flag's value as."""
    several = get_origin(option.type) is tuple and not _is_list(option)
    kind: Any = get_args(option.type)[0] if several else option.type
    plain = isinstance(kind, type) and issubclass(kind, bool | int | float | Path | Enum)
    kind = kind if plain else str
    return list[kind] if several else kind


def _declare(option: Option) -> Any:
    """Return what typer is to know of an option: its names, its metavar, its help, its limits.

    The help of a run's option names the default. The flag has no default, because the run file may
    set another value. Each switch of a run also has a --no- form, for the same reason.
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
    """Return the run file's settings with the given flags over them; None is not given.

    Args:
        config: The run file, or None.
        flags: The values of the flags by their names in Python.
        examples: {section: {key: value}} of settings that need not be given.

    Raises:
        SpecError: Anything does not fit; all of it is listed.
    """
    overrides: dict[str, dict[str, Any]] = {}
    for option in run_options():
        value = flags.get(option.parameter)
        if value not in (None, []):
            if _is_list(option):
                value = [word.strip() for word in value.split(",")]
            overrides.setdefault(option.section, {})[option.key] = value
    if "loss" in overrides:
        overrides["loss"]["kwargs"] = {}  # those of the run file's loss are not this one's
    return resolve(config, overrides, _wrong_names, examples or {})


def group_of(name: str) -> str:
    """Return the group of `--help` that has an option."""
    return next((group for group, names in GROUPS.items() if name in names.split()), "General")


def naming_flags(error: GradscopeError, flags: Mapping[str, str]) -> GradscopeError:
    """Return an error that names options as the command line does; see `as_flags`."""
    error.where = error.where and as_flags(error.where, flags)
    if error.remedy:
        own, file, code = error.remedy.partition(_CODE)  # the user's code stays as it is
        error.remedy = as_flags(own, flags) + file + code
    return error


def as_flags(text: str, flags: Mapping[str, str]) -> str:
    """Return a message with options as flags: `coupling="own-loss"` is --coupling own-loss.

    Messages name options as Python has them: `name="value"`, `name=True`, or the name in backticks.
    An option that the command has no flag for is named by its key in the run file.

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
    """Return the long flags of a command of click's by their names in Python."""
    given = (param for param in command.params if param.param_type_name == "option")
    long = ((param.name, [o for o in param.opts if o.startswith("--")]) for param in given)
    return {name: names[0] for name, names in long if names}


def _is_list(option: Option) -> bool:
    """Whether one flag has all values, with commas between, as its metavar says."""
    return option.metavar.endswith(",...")


def _wrong_names(spec: RunSpec) -> tuple[SpecError, ...]:
    """Return what is wrong with the names of chains, backends and loss, beside what else is."""
    from gradscope.run import resolve_names

    try:
        resolve_names(spec)
    except SpecError as error:
        return error.parts or (error,)
    except GradscopeError:  # of the user's code, which is told when it is all that is wrong
        pass
    return ()


def show(
    found: Any, render: Callable[..., None], *, json: bool, quiet: bool = False, **how: bool
) -> None:
    """Print what a command found as one document (itself, or its `to_json`), as text, or not."""
    from gradscope.report import console

    if json:  # names in their own letters
        document = found if isinstance(found, dict) else found.to_json()
        typer.echo(printable(dumps(document, ensure_ascii=False, indent=2)), file=streams.out())
    elif not quiet:
        render(found, console(), **how)


def exit_of(report: Any) -> None:
    """Leave with the exit code for what is done, but has something that is not finite.

    Raises:
        typer.Exit: The report of a run or of a merge says so.
    """
    if report.nonfinite or any(report.chains_nonfinite):
        raise typer.Exit(NONFINITE)
