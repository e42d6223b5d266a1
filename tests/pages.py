"""Runs a page of the documentation from top to bottom and compares what it prints.

A fenced block may have an HTML comment on the line before it:

    <!-- file: NAME -->             the block is written to a file first
    <!-- needs: MODULE -->          the block is run if the module is installed
    <!-- output -->                 what the Python block before it prints
    <!-- output of: COMMAND -->     lines that the command prints on stdout
    <!-- errors of: COMMAND -->     likewise on stderr

A command may say how it ends: `# exit code 5`.
"""

import io
import json
import re
import runpy
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch
from warnings import catch_warnings

from benchmarks.__main__ import parser
from benchmarks.architectures.__main__ import parser as architectures
from benchmarks.attribution.__main__ import parser as attributions
from benchmarks.fallbacks import parser as fallbacks
from benchmarks.later import parser as later
from benchmarks.zoo.__main__ import parser as zoo
from gradscope.cli.app import run as command_line
from tests.drill.__main__ import parser as drills

ROOT = Path(__file__).parent.parent
FENCE = re.compile(
    r"(?:<!-- (?P<note>[^\n]*?) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```", re.M | re.S
)
SLOW: dict[str, Callable[[], ArgumentParser]] = {
    "python -m benchmarks": parser,
    "python -m benchmarks.architectures": architectures,
    "python -m benchmarks.attribution": attributions,
    "python -m benchmarks.fallbacks": fallbacks,
    "python -m benchmarks.later": later,
    "python -m benchmarks.zoo": zoo,
    "python -m tests.drill": drills,
}
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]\d+)?")


@dataclass
class Page:
    """What has been run of a page so far."""

    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "page"})
    printed: str = ""
    commands: dict[str, tuple[str, str]] = field(default_factory=dict)


def run(path: Path) -> Page:
    """Run a page from top to bottom in the working directory."""
    page = Page()
    text = path.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        note, language, body = match["note"] or "", match["language"], match["text"]
        kind, _, rest = note.partition(":")
        if kind == "needs" and find_spec(rest.strip()) is None:
            continue
        if kind == "file":
            Path(rest.strip()).write_text(body, encoding="utf-8")
        elif language == "python":
            where = "\n" * text.count("\n", 0, match.start("text")) + body  # lines as in the page
            optional = kind == "needs"  # the warnings of an optional module are not ours
            quiet = catch_warnings(action="ignore") if optional else nullcontext()
            with redirect_stdout(io.StringIO()) as out, quiet:  # a page may set its own filters
                exec(compile(where, str(path), "exec"), page.names)
            page.printed = out.getvalue()
        elif language == "sh":
            for line in body.splitlines():
                command(line, page)
        elif kind == "output":
            assert_alike(body, page.printed)
        elif kind in ("output of", "errors of"):
            printed = page.commands[rest.strip()][kind == "errors of"]
            assert_lines_of(body, printed)
    return page


def run_notebook(path: Path) -> None:
    """Run the cells of a notebook and compare what they print with the stored outputs."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            with redirect_stdout(io.StringIO()) as out:
                exec(compile("".join(cell["source"]), str(path), "exec"), names)
            stored = "".join(text for o in cell["outputs"] for text in o["text"])
            assert_alike(stored, out.getvalue())


def command(line: str, page: Page) -> None:
    """Run one command line of a page; of `make`, check that there is such a target."""
    words = shlex.split(line, comments=True)
    if not words:
        return
    if words[0] == "mkdir":
        Path(words[-1]).mkdir(exist_ok=True)
    elif words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert set(words[1:]) <= set(targets)
    elif words[0] == "python" and any(Path(word).exists() for word in words[1:2]):
        with patch.object(sys, "argv", words[1:]):
            runpy.run_path(words[1], run_name="__main__")
    elif " ".join(words[:3]) in SLOW:  # minutes to run: only its options
        known = _options(SLOW[" ".join(words[:3])])
        assert {w for w in words if w.startswith("--")} <= known
    else:
        assert words[0] == "gradscope", f"the test cannot run {words[0]!r}"
        said = re.search(r"# exit code (\d+)", line)
        code, out, err = gradscope(words)
        assert code == (int(said[1]) if said else 0), f"{line}\nexit code {code}\n{err}"
        page.commands[line.partition("#")[0].strip()] = (out, err)


def slow_options() -> set[str]:
    """Return the options of the benchmarks and of the drill."""
    return {option for parser in SLOW.values() for option in _options(parser)}


def _options(parser: Callable[[], ArgumentParser]) -> set[str]:
    return {option for action in parser()._actions for option in action.option_strings}


def gradscope(words: list[str]) -> tuple[int, str, str]:
    """Run the installed command in this process."""
    with (
        patch.object(sys, "argv", words),
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
    ):
        code = command_line()
    return code, out.getvalue(), err.getvalue()


def assert_alike(expected: str, found: str) -> None:
    """The same words, and the same numbers to within one unit of the last digit printed."""
    assert _words(expected) == _words(found), f"printed is\n{found}\nnot\n{expected}"
    for wanted, got in zip(_NUMBER.findall(expected), _NUMBER.findall(found), strict=True):
        assert abs(_value(wanted) - _value(got)) <= 1.01 * _unit(wanted), f"{wanted} is {got}"


def assert_lines_of(expected: str, printed: str) -> None:
    """Each line is one of those printed."""
    lines = printed.splitlines()
    for line in filter(None, map(str.strip, expected.splitlines())):
        near = [other for other in lines if _words(other) == _words(line)]
        assert near, f"not printed: {line!r} in\n{printed}"
        assert any(_close(line, other) for other in near), f"{line!r} is {near}"


def _close(line: str, other: str) -> bool:
    try:
        assert_alike(line, other)
    except AssertionError:
        return False
    return True


def _words(text: str) -> list[str]:
    return _NUMBER.sub(" # ", text).split()


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def _unit(number: str) -> float:
    """One unit of the last digit; whole numbers must be equal."""
    digits, _, exponent = number.partition("e")
    decimals = len(digits.partition(".")[2])
    return 10.0 ** (int(exponent or 0) - decimals) if decimals else 0.0
