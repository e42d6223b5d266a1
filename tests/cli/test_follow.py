"""`stats RUN.jsonl --follow`: on a terminal of any width, as lines, as documents; and Ctrl-C."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len

from gradscope.report.following import follow as following
from gradscope.stats import summarize
from gradscope.training import History, Step, record
from gradscope.training.history import End, HistoryReader, append
from tests.cli.conftest import Gradscope
from tests.report.shown import HOSTILE, summary_of
from tests.report.test_curves import curves_of
from tests.stats.fakes import fake


def steps(path: Path, *numbers: int) -> Path:
    append(path)
    for step in numbers:
        record(path, step, summarize(fake(9, seed=step)))
    return path


def test_a_history_that_has_ended_is_printed_in_lines(gradscope: Gradscope, tmp_path: Path) -> None:
    path = steps(tmp_path / "run.jsonl", 10, 20)
    append(path, End(step=25, reason="stopped by \x1b[2JError"))
    done = gradscope("stats", path, "--follow")
    lines = done.out.splitlines()
    assert done.code == 0
    assert [line.partition(":")[0] for line in lines[:2]] == ["step 10", "step 20"]
    assert lines[2:] == [r"training ended at step 25: stopped by \x1b[2JError"]
    done = gradscope("stats", path, "--follow", "--json")
    assert done.code == 0
    documents = [json.loads(line) for line in done.out.splitlines()]
    assert [(one["schema"], one["step"]) for one in documents] == [
        ("gradscope.step", 10),
        ("gradscope.step", 20),
    ]
    document = json.loads(gradscope("stats", path, "--json").out)
    assert [step["step"] for step in document["steps"]] == [10, 20]
    assert document["end"]["step"] == 25


@pytest.mark.parametrize(
    ("name", "more", "code", "word"),
    [
        ("out.h5", [], 2, "--follow applies to a history"),
        ("absent.jsonl", [], 3, "cannot be read"),
        ("run.jsonl", ["--clip", "1"], 2, "--clip"),
    ],
)
def test_what_cannot_be_followed(
    gradscope: Gradscope, tmp_path: Path, name: str, more: list[str], code: int, word: str
) -> None:
    steps(tmp_path / "run.jsonl", 10)
    done = gradscope("stats", tmp_path / name, "--follow", *more)
    assert done.code == code
    assert word in done.err


def test_an_end_without_a_step_says_why(gradscope: Gradscope, tmp_path: Path) -> None:
    append(tmp_path / "run.jsonl", End(step=7, reason="no measurement: too short"))
    for arguments in (["--follow"], []):
        done = gradscope("stats", tmp_path / "run.jsonl", *arguments)
        assert done.code == 3
        assert "ended at step 7: no measurement: too short" in done.err


def test_steps_are_told_as_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradscope.report.console import console

    path, told = steps(tmp_path / "run.jsonl"), []
    events = iter([10, 20, None])

    def sleep(seconds: float) -> None:  # meanwhile, the training goes on
        step = next(events)
        if step is None:
            append(path, End(step=20))
        else:
            steps(path, step)

    monkeypatch.setattr(time, "sleep", sleep)

    def tell(found: History | None, new: list[Step]) -> None:
        told.append([step.step for step in new])

    found = following(HistoryReader(path), console(), tell)
    assert told == [[], [10], [20], []]
    assert [step.step for step in found.steps] == [10, 20]


def _frames(fd: int) -> Iterator[list[str]]:
    """Yield what a terminal shows, each time that it is drawn to its last line."""
    seen, end = "", time.monotonic() + 60
    while time.monotonic() < end:
        if select.select([fd], [], [], 0.1)[0]:
            seen += os.read(fd, 65536).decode(errors="replace")
        *whole, seen = re.split(r"(?<=the training continues)", seen)
        for frame in whole:
            text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", frame.split("\x1b[H")[-1])
            yield text.replace("\r", "").split("\n")
    raise AssertionError(seen)


@pytest.mark.full
def test_a_terminal_is_drawn_anew_until_ctrl_c(tmp_path: Path) -> None:
    path = steps(tmp_path / "run.jsonl")
    fd, inner = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    words = [sys.executable, "-m", "gradscope", "stats", str(path), "--follow"]
    with subprocess.Popen(
        words, stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
        env=environment | {"TERM": "xterm", "OMP_NUM_THREADS": "1"},
    ) as process:  # fmt: skip
        try:
            os.close(inner)
            frames = _frames(fd)
            assert any("no step has been measured yet" in line for line in next(frames))
            for step in range(5, 100, 5):
                record(path, step, summary_of(HOSTILE))
            next(lines for lines in frames if any("5 to 95" in line for line in lines))
            for width in (40, 80, 200):
                fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 30, width, 0, 0))
                drawn = (lines for lines in frames if max(map(cell_len, lines[:-1])) == width)
                lines = next(drawn)
                assert len(lines) <= 30
                assert any("noise scale" in line for line in lines)
                assert any("[red]x[/red]" in line for line in lines)
            path.write_text("")
            next(
                lines
                for lines in frames
                if any("no step has been measured" in line for line in lines)
            )
            process.send_signal(signal.SIGINT)
            next(lines for lines in frames if any("stopped following" in line for line in lines))
            assert process.wait(60) == 130
        finally:
            process.kill()
            os.close(fd)


def test_several_histories_on_the_command_line(gradscope: Gradscope, tmp_path: Path) -> None:
    paths = [steps(tmp_path / f"{name}.jsonl", 1, 4) for name in ("first", "second")]
    done = gradscope("stats", *paths, "--html", tmp_path / "out.html")
    assert done.code == 0
    assert "first" in done.out and "second" in done.out
    assert {*curves_of(tmp_path / "out.html")[0]["curves"]} == {"first", "second"}
    document = json.loads(gradscope("stats", *paths, "--json").out)
    assert document["schema"] == "gradscope.histories"
    assert [[s["step"] for s in h["steps"]] for h in document["histories"]] == [[1, 4], [1, 4]]
    done = gradscope("stats", *paths, "--follow")
    assert (done.code, "--follow takes a single history" in done.err) == (2, True)
    done = gradscope("stats", paths[0], tmp_path / "out.h5")
    assert (done.code, "out.h5 is not a history" in done.err) == (2, True)
    done = gradscope("stats", paths[0], tmp_path / "absent.jsonl")
    assert (done.code, "absent.jsonl" in done.err) == (3, True)
