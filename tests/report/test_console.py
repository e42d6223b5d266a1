"""Where escape sequences go, on a real terminal and off it."""

import io
import os
import pty

import pytest
from rich.text import Text

from gradscope.errors import SpecError
from gradscope.report import console, render_error

PLAIN = {"TERM": "xterm-256color", "FORCE_COLOR": None, "NO_COLOR": None, "COLUMNS": None}


@pytest.fixture
def environment(monkeypatch):
    def set_to(**values):
        for name, value in (PLAIN | values).items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    set_to()
    return set_to


def on_terminal(**options):
    """Print a red word on a pseudo-terminal and return what arrives at its other end."""
    reading, writing = pty.openpty()
    with os.fdopen(writing, "w") as stream:
        console(file=stream, **options).print(Text("word", style="bold red"))
        stream.flush()
        found = os.read(reading, 1000).decode()
    os.close(reading)
    return found


def piped(**options):
    stream = io.StringIO()
    console(file=stream, **options).print(Text("word", style="bold red"))
    return stream.getvalue()


def test_colour_on_a_terminal(environment):
    assert "\x1b[1;31mword" in on_terminal()
    assert "31" not in on_terminal(color=False)


def test_no_color(environment):
    environment(NO_COLOR="1")
    assert "31" not in on_terminal()
    assert "word" in on_terminal()


def test_force_color_brings_no_escapes_to_a_pipe(environment):
    environment(FORCE_COLOR="1", TTY_COMPATIBLE="1")
    assert piped() == "word\n"


def test_width_of_a_pipe(environment):
    assert console(file=io.StringIO()).width == 80
    environment(COLUMNS="123")
    assert console(file=io.StringIO()).width == 123


def test_streams(environment, capsys):
    console().print("to [bold]stdout[/bold]")
    console(stderr=True).print("to stderr")
    assert capsys.readouterr() == ("to [bold]stdout[/bold]\n", "to stderr\n")


def test_old_locale(environment):
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding="latin-1") as stream:
        console(file=stream).print("… ‖g‖ é")
        stream.flush()
        assert raw.getvalue().decode("latin-1") == "? ?g? é\n"


def rendered(error, width=40):
    stream = io.StringIO()
    target = console(file=stream)
    target.width = width
    render_error(error, target)
    return stream.getvalue()


def test_error():
    error = SpecError("no such thing", where="run.toml: loss", remedy="Did you mean 'mse'?")
    assert rendered(error) == "error: run.toml: loss: no such thing\nDid you mean 'mse'?\n"
    assert rendered(SpecError("no such thing")) == "error: no such thing\n"


def test_error_keeps_a_caret_in_its_place():
    picture = f"  {'clip | ' * 20}mean\n  {' ' * 140}^"
    assert rendered(SpecError("bad", remedy=picture)) == f"error: bad\n{picture}\n"


def test_error_is_plain_text():
    error = SpecError("[bold]\x1b[2J", where="[/x]\x07", remedy="\x9b31m:smile:")
    assert rendered(error) == "error: [/x]\\x07: [bold]\\x1b[2J\n\\x9b31m:smile:\n"
