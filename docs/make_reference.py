"""Write docs/reference.md: every option of every command, and every key of the run file.

    python docs/make_reference.py

The page follows from the settings (`gradscope.config`) and from the other options of the commands
(`gradscope.cli`); a test compares it with them.
"""

import json
from pathlib import Path
from typing import Any

import typer

from gradscope.cli.app import app
from gradscope.config import RunSpec, Setting, settings

PAGE = Path(__file__).parent / "reference.md"

HEAD = """# Every option

`python docs/make_reference.py` writes this page from the program; a test compares the two.
The [guide](guide.md) shows how options are used.

## Settings of a run

Each has a key in the [run file](guide.md#the-run-file), and many have a flag, which wins over it.
`spec` in `[dataset]` names a file with the keys of that table at its top level.
`version` is {version}."""


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD.format(version=RunSpec.model_fields["version"].description)]
    head = ["key", "flag", "of", "default", "what it may be", "means"]
    for section in RunSpec.model_fields:
        rows = [_setting(s) for s in settings() if s.section == section]
        parts += [f"### [{section}]", _table(head, rows)] if rows else []
    parts += ["## Other options of the commands"]
    root: Any = typer.main.get_command(app)
    above = root.make_context("gradscope", [], resilient_parsing=True)
    for name, command in root.commands.items():
        taken = {s.parameter for s in settings() if name in s.commands}
        with command.make_context(name, [], parent=above, resilient_parsing=True) as context:
            own = [p for p in command.get_params(context) if p.name not in taken]
        summary = " ".join(command.help.split())
        rows = [_option(parameter) for parameter in own]
        parts += [f"### gradscope {name}", summary, _table(["option", "means"], rows)]
    return "\n\n".join(parts) + "\n"


def _setting(setting: Setting) -> list[str]:
    """Return the row of a setting."""
    value = setting.default
    default = "" if value is None or value == {} else f"`{json.dumps(value)}`"
    shown = " ".join(filter(None, (", ".join(sorted(setting.flags, key=len)), setting.metavar)))
    flag = f"`{shown}`" if shown else ""
    commands = ", ".join(setting.commands)
    return [f"`{setting.key}`", flag, commands, default, setting.accepted, setting.help]


def _option(parameter: Any) -> list[str]:
    """Return the row of an option or argument that sets nothing in the run file."""
    flags = parameter.opts if parameter.param_type_name == "option" else []
    value = None if getattr(parameter, "is_flag", False) else parameter.metavar
    words = filter(None, (", ".join(sorted(flags, key=len)), value))
    return [f"`{' '.join(words) or parameter.name}`", parameter.help or ""]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        f"| {' | '.join(c.replace('|', chr(92) + '|') for c in row)} |" for row in lines
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
