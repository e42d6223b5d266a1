"""Help: the groups of options, what `gradscope` alone prints, and completion in shells."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from gradscope.cli.app import app
from gradscope.cli.names import registries
from gradscope.cli.options import GROUPS
from tests.cli.conftest import Gradscope

ROOT: Any = typer.main.get_command(app)


def _sections(text: str) -> dict[str, set[str]]:
    """Return the options below each heading of a help text."""
    parts = re.split(r"^(\w[^\n]*):$", text, flags=re.M)[1:]
    return {
        title: set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", body, re.M))
        for title, body in zip(parts[::2], parts[1::2], strict=True)
    }


def test_the_help_of_compute_has_each_option_in_one_group(gradscope: Gradscope) -> None:
    sections = _sections(gradscope("compute", "--help").out)
    assert list(sections) == ["Arguments", *GROUPS]
    shown = [option for options in sections.values() for option in options]
    long = [[o for o in p.opts if o.startswith("--")] for p in ROOT.commands["compute"].params]
    assert sorted(shown) == sorted([*(names[0] for names in long if names), "--help"])
    assert len(sections["General"]) < 8


def test_a_group_names_no_option_that_does_not_exist() -> None:
    known = {parameter.name for parameter in ROOT.commands["compute"].params}
    assert not {name for names in GROUPS.values() for name in names.split()} - known


def test_a_command_with_few_options_has_one_list(gradscope: Gradscope) -> None:
    assert list(_sections(gradscope("stats", "--help").out)) == ["Arguments", "Options"]


def test_gradscope_alone_shows_commands_that_exist(gradscope: Gradscope) -> None:
    done = gradscope()
    assert done.code == 2
    lines = [shlex.split(line) for line in re.findall(r"^    (gradscope .*)$", done.out, re.M)]
    assert len(lines) >= 6
    assert max(map(len, done.out.splitlines())) <= 80
    for _, name, *words in lines:
        options = {option for p in ROOT.commands[name].params for option in p.opts}
        assert {word for word in words if word.startswith("-")} <= options


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("words", "kinds", "stem"),
    [
        ("compute --loss ", ["losses"], ""),
        ("compute --backend ", ["backends"], ""),
        ("compute -t ", ["transforms", "reducers"], ""),
        ("compute -t 'clip:max_norm=1 | m", ["transforms", "reducers"], "clip:max_norm=1 | "),
    ],
)
def test_a_shell_completes_names(words: str, kinds: list[str], stem: str) -> None:
    variables = {
        "_GRADSCOPE_COMPLETE": "complete_zsh",
        "_TYPER_COMPLETE_ARGS": f"gradscope {words}",
    }
    command = [sys.executable, "-m", "gradscope"]
    root = str(Path(__file__).parent.parent.parent)
    environment = os.environ | variables | {"PYTHONPATH": root}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    names = {name for kind in kinds for each in registries()[kind] for name in each.names()}
    names = {name for name in names if name.startswith("m" if stem else "")}
    done.stdout = re.sub(r"\\+:", ":", done.stdout)  # colons are escaped for zsh
    found = set(re.findall(r'"((?:[^"\\]|\\.)*)"', done.stdout))
    assert {stem + name for name in names} <= found, done.stdout + done.stderr
