"""Write docs/reference.md: every option of every command, and every key of the run file.

    python docs/make_reference.py

The page follows from the settings of a run and the options of the commands, which
`gradscope.config` describes; a test compares it with them.
"""

import json
from inspect import signature, unwrap
from pathlib import Path
from typing import Any

import typer

from gradscope.cli.app import app
from gradscope.config import Option, RunSpec, options_of, run_options

PAGE = Path(__file__).parent / "reference.md"

HEAD = """# Commands and options

`python docs/make_reference.py` writes this page from the program; a test compares the two.
The [guide](guide.md) shows how options are used.

{commands}

Results go to stdout, progress and notices to stderr. `--json` prints one versioned JSON document.

| exit code | means |
|---|---|
| `0` | done |
| `1` | a bug in gradscope |
| `2` | a wrong option, run file or chain |
| `3` | a wrong checkpoint, data set or result file |
| `4` | refused: the model is not supported, or its samples are coupled; or `check` \
proved nothing, because every gradient is zero |
| `5` | `compare` found a difference |
| `6` | the output cannot be written |
| `7` | done, but some samples or numbers are not finite; they are flagged or counted |
| `130`, `143` | interrupted |
| `141` | stdout was closed |

## Settings of a run

Each has a key in the [run file](guide.md#the-run-file), and many have a flag, which wins over it.
`spec` in `[dataset]` names a file with the keys of that table at its top level.
`version` is {version}."""


def page() -> str:
    """Return the text of the page."""
    root: Any = typer.main.get_command(app)
    commands = [
        [f"[`gradscope {name}`](#gradscope-{name})", " ".join(command.help.split())]
        for name, command in root.commands.items()
    ]
    version = RunSpec.model_fields["version"].description
    parts = [HEAD.format(commands=_table(["command", "does"], commands), version=version)]
    head = ["key", "flag", "of", "default", "what it may be", "means"]
    for section in RunSpec.model_fields:
        rows = [_run_option(s) for s in run_options() if s.section == section]
        parts += [f"### [{section}]", _table(head, rows)] if rows else []
    parts += ["## Other options of the commands", "Every command also has `-h, --help`."]
    head = ["option", "default", "what it may be", "means"]
    for name, command in root.commands.items():
        (own,) = signature(unwrap(command.callback)).parameters.values()
        rows = [_option(s) for s in options_of(own.annotation) if s.help]
        parts += [f"### gradscope {name}", " ".join(command.help.split()), _table(head, rows)]
    return "\n\n".join(parts) + "\n"


def _run_option(option: Option) -> list[str]:
    """Return the row of an option of a run."""
    row = [_flag(option), ", ".join(option.commands), _default(option), option.accepted]
    return [f"`{option.key}`", *row, option.help]


def _option(option: Option) -> list[str]:
    """Return the row of an option that sets nothing in the run file."""
    limits = ""
    if option.least is not None:
        limits = f"at least {option.least}" + f", at most {option.most}" * bool(option.most)
    return [_flag(option), _default(option), option.accepted or limits, option.help]


def _flag(option: Option) -> str:
    """Return the names of an option on the command line, and what stands for its value."""
    shown = " ".join(filter(None, (", ".join(sorted(option.flags, key=len)), option.metavar)))
    return f"`{shown}`" if shown else ""


def _default(option: Option) -> str:
    """Return the value of an option that is not given, as JSON."""
    given = option.default not in (None, {}, ())
    return f"`{json.dumps(option.default, default=str)}`" if given else ""


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        f"| {' | '.join(c.replace('|', chr(92) + '|') for c in row)} |" for row in lines
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
