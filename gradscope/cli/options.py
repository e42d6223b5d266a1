"""The options of commands: those that set something in the run spec, and those of many commands."""

import re
import shlex
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, Signature, signature
from json import dumps
from pathlib import Path
from re import Match
from typing import Annotated, Any, get_origin

import typer

from gradscope.config import RunSpec, Setting, resolve, settings
from gradscope.core.texts import printable
from gradscope.errors import GradscopeError, SpecError
from gradscope.process import streams

_CODE = '\n  File "'  # where lines of a traceback begin
_OPTION = re.compile(r'(?<![\w.:,])(?P<name>[a-z_]+)=(?P<value>"[^"]*"|True)|`(?P<bare>[a-z_]+)`')
NONFINITE = 7  # the exit code of a command that is done, where something is not finite


def option(flag: str, help: str, **how: Any) -> Any:
    """Return what typer is to know of an option, "--top -t K", or of an argument, "FILE"."""
    words = flag.split()
    names = [word for word in words if word.startswith("-")]
    if not names:
        return typer.Argument(metavar=flag, help=help, **how)
    metavar = words[-1] if len(words) > len(names) else None
    return typer.Option(*names, metavar=metavar, help=help, **how)


Config = Annotated[Path | None, option("--config RUN.toml", "A run file; flags win over it.")]
Json = Annotated[bool, option("--json", "Print one JSON document to stdout, and nothing else.")]
Quiet = Annotated[bool, option("--quiet -q", "No progress and no notices.")]
Verbose = Annotated[bool, option("--verbose", "Show which kernels were chosen, and their times.")]
DryRun = Annotated[bool, option("--dry-run", "Load, choose, prove and estimate; write nothing.")]
Overwrite = Annotated[bool, option("--overwrite", "Replace an output of the same kind.")]
OUTPUT = option("--output -o OUT.h5", "The result file.")


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command --config and a flag for every setting that names it, in place of `spec`.

    `command` is called with the `RunSpec` that they make, and its own options.
    """
    taken = {s.parameter: s for s in settings() if command.__name__ in s.commands}

    @wraps(command)
    def run(config: Path | None, **given: Any) -> None:
        spec = run_spec(config, {name: given.pop(name) for name in taken})
        command(spec=spec, **given)

    kinds = {"config": Config} | {k: Annotated[_type(s), _info(s)] for k, s in taken.items()}
    flags = [
        Parameter(k, Parameter.KEYWORD_ONLY, default=None, annotation=a) for k, a in kinds.items()
    ]
    own = [*signature(command).parameters.values()]
    place = [parameter.name for parameter in own].index("spec")
    vars(run)["__signature__"] = Signature([*own[:place], *flags, *own[place + 1 :]])
    return run


def flag(section: str, key: str) -> Any:
    """Return what typer is to know of the flag for a setting."""
    return next(_info(s) for s in settings() if (s.section, s.key) == (section, key))


def _type(setting: Setting) -> Any:
    """Return the type that typer reads a flag's value as."""
    if get_origin(setting.type) is tuple and not _is_list(setting):
        return list[str] | None
    return setting.type | None if setting.type in (bool, int, Path) else str | None


def _info(setting: Setting) -> Any:
    """Return what typer is to know of a setting's flag: its names, its metavar and its help."""
    name, default = setting.flags[0], setting.default
    shown = ",".join(default) if isinstance(default, tuple) else str(default)
    default = "" if default is None or isinstance(default, bool) else f" [{shown}]"
    repeatable = "; repeatable" if _type(setting) == list[str] | None else ""
    names = (f"{name}/--no-{name[2:]}",) if setting.type is bool else setting.flags
    words = [*names, setting.metavar] if setting.metavar else names
    return option(" ".join(words), f"{setting.help}{repeatable}{default}.", show_default=False)


def run_spec(config: Path | None, flags: Mapping[str, Any]) -> RunSpec:
    """Return the run file's settings with the given flags over them; None is not given.

    Raises:
        SpecError: Anything does not fit; all of it is listed.
    """
    overrides: dict[str, dict[str, Any]] = {}
    for setting in settings():
        value = flags.get(setting.parameter)
        if value not in (None, []):
            if _is_list(setting):
                value = [word.strip() for word in value.split(",")]
            overrides.setdefault(setting.section, {})[setting.key] = value
    if "loss" in overrides:
        overrides["loss"]["kwargs"] = {}  # those of the run file's loss are not this one's
    return resolve(config, overrides, _wrong_names)


def told(error: GradscopeError, flags: Mapping[str, str]) -> GradscopeError:
    """Let an error name options as the command line has them, and return it; see `as_flags`."""
    error.where = error.where and as_flags(error.where, flags)
    if error.remedy:
        own, file, code = error.remedy.partition(_CODE)  # the user's code stays as it is
        error.remedy = as_flags(own, flags) + file + code
    return error


def as_flags(text: str, flags: Mapping[str, str]) -> str:
    """Return a message with options as flags: `coupling="own-loss"` is --coupling own-loss.

    Messages name options as Python has them: `name="value"`, `name=True`, or the name in backticks.
    A setting that the command has no flag for is named by its key in the run file.

    Args:
        text: The message.
        flags: The command's flags by their names in Python.
    """
    keys = {s.parameter: (s.section, s.key) for s in settings() if s.parameter}

    def shown(match: Match[str]) -> str:
        name, value = match["name"] or match["bare"], match["value"]
        if name in flags:
            given = "" if value in (None, "True") else shlex.quote(value.strip('"'))
            return f"{flags[name]} {given}".rstrip()
        if name in keys and match["name"]:
            held = value.lower() if value == "True" else value
            section, key = keys[name]
            return f"{key} = {held} under [{section}] of a run file"
        return match[0]

    return _OPTION.sub(shown, text)


def flags_of(command: Any) -> dict[str, str]:
    """Return the long flags of a command of click's by their names in Python."""
    given = (param for param in command.params if param.param_type_name == "option")
    long = ((param.name, [o for o in param.opts if o.startswith("--")]) for param in given)
    return {name: names[0] for name, names in long if names}


def _is_list(setting: Setting) -> bool:
    """Whether one flag has all values, with commas between, as its metavar says."""
    return setting.metavar.endswith(",...")


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
