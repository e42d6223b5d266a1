"""Where escape sequences go, on a real terminal and off it; errors; progress."""

import io
import os
import pty

import pytest
from rich.console import Console
from rich.text import Text

from gradscope.errors import SpecError
from gradscope.report.console import console, render_error
from gradscope.report.progress import track

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


def test_colour_on_a_terminal(environment):
    assert "\x1b[1;31mword" in on_terminal()
    assert "31" not in on_terminal(color=False)
    environment(NO_COLOR="1")
    assert "31" not in on_terminal()
    assert "word" in on_terminal()


def test_force_color_brings_no_escapes_to_a_pipe(environment):
    environment(FORCE_COLOR="1", TTY_COMPATIBLE="1")
    stream = io.StringIO()
    console(file=stream).print(Text("word", style="bold red"))
    assert stream.getvalue() == "word\n"


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


CARET = f"  {'clip | ' * 20}mean\n  {' ' * 140}^"


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (SpecError("no such thing"), "no such thing"),
        (
            SpecError("no such thing", where="run.toml: loss", remedy="Did you mean 'mse'?"),
            "run.toml: loss: no such thing\nDid you mean 'mse'?",
        ),
        (SpecError("bad", remedy=CARET), f"bad\n{CARET}"),  # the caret stays in its place
        (
            SpecError("[bold]\x1b[2J", where="[/x]\x07", remedy="\x9b31m:smile:"),
            "[/x]\\x07: [bold]\\x1b[2J\n\\x9b31m:smile:",
        ),
    ],
)
def test_an_error_is_plain_text(error, shown):
    stream = io.StringIO()
    target = console(file=stream)
    target.width = 40
    render_error(error, target)
    assert stream.getvalue() == f"error: {shown}\n"


class Clock:
    """Time that passes only when told to."""

    now = 100.0

    def __call__(self):
        return self.now


def run(batches, total, seconds_each, **options):
    file, clock = io.StringIO(), Clock()
    target = Console(file=file, force_terminal=False, width=40)
    seen = []
    for batch in track(batches, total, console=target, clock=clock, **options):
        seen.append(batch)
        clock.now += seconds_each
    assert seen == list(batches)
    return file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("batches", "total", "each", "options", "lines"),
    [
        (
            [range(10)] * 8,
            80,
            2.0,
            {},
            [
                "30 of 80 samples, 5.00 samples/s, 10 s left",
                "60 of 80 samples, 5.00 samples/s, 4 s left",
                "80 samples in 16 s, 5.00 samples/s",
            ],
        ),
        (
            ["ab", "c"],
            None,
            6.0,
            {"unit": "files", "size": lambda _: 1},
            ["1 file, 0.167 files/s", "2 files, 0.167 files/s", "2 files in 12 s, 0.167 files/s"],
        ),
        ([[1]] * 3, 3, 9.0, {"quiet": True}, []),
        ([], 0, 1.0, {}, ["0 samples in 0 ms"]),
    ],
    ids=["total", "unknown", "quiet", "empty"],
)
def test_lines_come_every_few_seconds_and_at_the_end(batches, total, each, options, lines):
    assert run(batches, total, each, **options) == lines


def test_no_final_line_after_an_error():
    file = io.StringIO()
    with pytest.raises(ValueError, match="stop"):
        for _ in track([[1]], 1, console=Console(file=file, force_terminal=False)):
            raise ValueError("stop")
    assert file.getvalue() == ""


def test_bar_on_a_terminal_is_gone_when_an_error_is_caught():
    reading, writing = pty.openpty()
    with os.fdopen(writing, "w") as stream:
        target = console(file=stream)
        try:
            for k, _ in enumerate(track([range(64)] * 4, 256, console=target)):
                if k == 2:
                    raise ValueError
        except ValueError:
            stream.write("caught")
        stream.flush()
        text = ""
        while "caught" not in text:  # a terminal hands over what it has, in pieces
            text += os.read(reading, 100_000).decode()
    os.close(reading)
    assert "/256" in text
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert text.index(hide) < text.index(show) < text.index("caught")
