"""Where output goes: odd names, narrow and absent terminals, colours, closed and full streams."""

import json
import os
import pty
import shlex
import subprocess
import sys
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.cells import cell_len

from tests.cli.forked import Forked

ODD = "[bold]x\x1b[31m:smile:[/]"
SHOWN = "[bold]x\\x1b[31m:smile:[/]"

MODEL = """
import torch
from torch import nn


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_parameter("[red]w\\x1b]0;title\\x07", nn.Parameter(torch.ones(3)))

    def forward(self, x):
        return x @ next(self.parameters())


def build():
    return Odd()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / ODD.replace("/", "|")
    path.mkdir()
    (path / "model.py").write_text(MODEL)
    torch.save({"[red]w\x1b]0;title\x07": torch.ones(3)}, path / "weights.pt")
    np.savez(path / "data.npz", inputs=np.ones((6, 3), np.float32), targets=np.arange(6.0))
    return path


def words(folder: Path) -> list[str]:
    data, weights = (str(folder / name) for name in ("data.npz", "weights.pt"))
    return ["compute", weights, data, "--model", f"{folder}/model.py:build", "--loss", "mse"]


def test_names_are_shown_and_not_obeyed(forked: Forked, folder: Path) -> None:
    out = str(folder / "out.h5")
    narrow = {"TERM": "dumb", "FORCE_COLOR": "1", "COLUMNS": "40"}
    done = forked.run(*words(folder), "-o", out, cwd=folder, **narrow)
    assert done.code == 0, done.err
    assert "\r" not in done.out + done.err
    stats = forked.run("stats", out, "--full", cwd=folder, COLUMNS="300")
    assert "[red]w\\x1b]0;title\\x07" in stats.out
    assert SHOWN.replace("/", "|") in stats.out
    told = forked.run("stats", out, "--full", cwd=folder, **narrow).out
    for line in (*done.out.splitlines(), *told.splitlines()):
        assert cell_len(line) <= 40, line
    missing = forked.run("stats", str(folder / "no.h5"), cwd=folder)
    assert missing.code == 3
    for text in (*done[1:], *stats[1:], *missing[1:]):
        assert "\x1b" not in text and "\x07" not in text


def on_terminal(forked: Forked, folder: Path, **environment: str) -> str:
    """Run a command on a terminal of its own and return what arrives there."""
    outer, inner = pty.openpty()
    first = f"for k in range(3): os.dup2(os.open({os.ttyname(inner)!r}, os.O_RDWR), k)"
    variables = {"TERM": "xterm-256color"} | environment
    done = forked.run("stats", "missing.h5", cwd=folder, first=first, **variables)
    assert done == (3, "", "")
    os.close(inner)
    found = b""
    try:
        while part := os.read(outer, 4096):
            found += part
    except OSError:  # the other end is closed
        pass
    os.close(outer)
    return found.decode()


def test_colours(forked: Forked, tmp_path: Path) -> None:
    assert "\x1b[1;31merror" in on_terminal(forked, tmp_path)
    assert "31m" not in on_terminal(forked, tmp_path, NO_COLOR="1")


SPOILT = {
    "closed": "sys.stdout.close(); sys.stderr.close()",
    "replaced": "sys.stdout = sys.stderr = io.StringIO()",
    "none": "sys.stdout = sys.stderr = None",
    "detached": "sys.stdout.line_buffering and sys.stdout.detach()",
    "underneath": "sys.__stdout__.close(); sys.stdout.buffer.close(); os.closerange(1, 2)",
    "printed": "print('noise'); os.write(1, b'noise'); subprocess.run(['echo', 'noise'])",
    "of the library": "ctypes.CDLL(None).puts(b'noise')",
}
USERS = """
import ctypes, io, os, subprocess, sys
import torch
from torch import nn
def spoil():
    try:
        {}
    except ValueError:  # done already
        pass
class Spoiling(nn.Linear):
    def forward(self, x):
        {}
        return super().forward(x)
def build():
    {}
    return Spoiling(3, 1, bias=False)
def loss(outputs, targets):
    {}
    return outputs[:, 0] - targets
{}
"""


PLACES = ("forward", "factory", "loss", "import")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("what", "place"), [*zip(SPOILT, cycle(PLACES), strict=False), ("closed", "import")]
)
def test_what_the_users_code_does_to_stdout(
    forked: Forked, tmp_path: Path, what: str, place: str
) -> None:
    torch.save({"weight": torch.ones(1, 3)}, tmp_path / "w.pt")
    np.savez(tmp_path / "d.npz", inputs=np.ones((6, 3), np.float32), targets=np.arange(6.0))
    calls = ["spoil()" if place == name else "pass" for name in ("forward", "factory", "loss")]
    calls.append("spoil()" if place == "import" else "")
    (tmp_path / "mine.py").write_text(USERS.format(SPOILT[what], *calls))
    run = ["w.pt", "d.npz", "--model", "mine.py:build", "--loss", "mine.py:loss"]
    done = forked.run("compute", *run, "-o", "o.h5", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    assert json.loads(done.out)["samples"] == 6
    assert "Traceback" not in done.err
    (tmp_path / "w.pt").write_bytes(b"")
    failed = forked.run("check", *run, cwd=tmp_path)
    assert failed.code == 3 and "w.pt: the file is empty" in failed.err


@pytest.mark.full
def test_closed_streams(forked: Forked, folder: Path) -> None:
    """A file that is opened must not get the number of stdout, or what is printed lands in it."""
    command = shlex.join([sys.executable, "-m", "gradscope", *words(folder), "-o", "out.h5"])
    done = subprocess.run(f"{command} <&- >&- 2>&-", shell=True, cwd=folder, check=False)
    assert done.returncode == 0
    assert forked.run("stats", "out.h5", cwd=folder).code == 0


@pytest.mark.parametrize("arguments", [["list", "losses"], ["list", "losses", "--json"]])
def test_a_closed_pipe(forked: Forked, tmp_path: Path, arguments: list[str]) -> None:
    first = "reading, writing = os.pipe(); os.close(reading); os.dup2(writing, 1)"
    assert forked.run(*arguments, cwd=tmp_path, first=first) == (141, "", "")


def test_a_full_disk_behind_stdout(forked: Forked, tmp_path: Path) -> None:
    first = "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)"
    done = forked.run("list", "losses", cwd=tmp_path, first=first)
    assert done.code == 6
    assert done.err.startswith("error: stdout: cannot be written to: No space left")
    assert "Traceback" not in done.err
