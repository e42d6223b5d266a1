"""Progress: every batch passes unchanged, and what is shown fits where it is shown."""

import io
import os
import pty

import pytest
from rich.console import Console

from gradscope.report import console, track


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


def test_lines_come_every_few_seconds_and_at_the_end():
    lines = run([range(10)] * 8, 80, seconds_each=2.0)
    assert lines == [
        "30 of 80 samples, 5.00 samples/s, 10 s left",
        "60 of 80 samples, 5.00 samples/s, 4 s left",
        "80 samples in 16 s, 5.00 samples/s",
    ]


def test_unknown_total_and_other_units():
    lines = run(["ab", "c"], None, seconds_each=6.0, unit="files", size=lambda _: 1)
    assert lines == [
        "1 file, 0.167 files/s",
        "2 files, 0.167 files/s",
        "2 files in 12 s, 0.167 files/s",
    ]


def test_quiet_and_empty():
    assert run([[1]] * 3, 3, 9.0, quiet=True) == []
    assert run([], 0, 1.0) == ["0 samples in 0 ms"]


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
