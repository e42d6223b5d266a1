"""Where output goes: odd names, narrow and absent terminals, colours, closed and full streams."""

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
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


@pytest.fixture(scope="module")
def forked() -> Iterator[Forked]:
    with Forked() as process:
        yield process


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
    done = forked.run(*words(folder), "-o", out, cwd=folder)
    assert done.code == 0, done.err
    stats = forked.run("stats", out, cwd=folder, COLUMNS="300")
    assert "[red]w\\x1b]0;title\\x07" in stats.out
    assert SHOWN.replace("/", "|") in stats.out
    missing = forked.run("stats", str(folder / "no.h5"), cwd=folder)
    assert missing.code == 3
    for text in (*done[1:], *stats[1:], *missing[1:]):
        assert "\x1b" not in text and "\x07" not in text


def test_forty_columns(forked: Forked, folder: Path) -> None:
    out = str(folder / "out.h5")
    done = forked.run(*words(folder), "-o", out, cwd=folder, COLUMNS="40")
    stats = forked.run("stats", out, cwd=folder, COLUMNS="40")
    assert (done.code, stats.code) == (0, 0)
    assert stats.out
    for line in (*done.out.splitlines(), *stats.out.splitlines()):
        assert cell_len(line) <= 40, line


def on_terminal(arguments: list[str], **environment: str) -> str:
    """Run a command on a terminal of its own and return what arrives there."""
    outer, inner = pty.openpty()
    variables = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS")}
    process = subprocess.Popen(
        [sys.executable, "-m", "gradscope", *arguments],
        stdin=inner, stdout=inner, stderr=inner,
        env=variables | {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"} | environment,
    )  # fmt: skip
    os.close(inner)
    found = b""
    try:
        while part := os.read(outer, 4096):
            found += part
    except OSError:  # the other end is closed
        pass
    os.close(outer)
    assert process.wait() == 3
    return found.decode()


def test_colours(tmp_path: Path) -> None:
    command = ["stats", str(tmp_path / "missing.h5")]
    assert "\x1b[1;31merror" in on_terminal(command)
    assert "31m" not in on_terminal(command, NO_COLOR="1")


def test_no_terminal(forked: Forked, folder: Path) -> None:
    variables = {"TERM": "dumb", "FORCE_COLOR": "1"}
    done = forked.run(*words(folder), "-o", str(folder / "out.h5"), cwd=folder, **variables)
    assert done.code == 0
    assert "\x1b" not in done.out + done.err
    assert "\r" not in done.out + done.err


def into(stdout: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gradscope", *arguments],
        stdout=stdout, stderr=subprocess.PIPE, text=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.parametrize("arguments", [["list", "losses"], ["list", "losses", "--json"]])
def test_a_closed_pipe(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = into(writing, *arguments)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_full_disk_behind_stdout() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    done = into(full, "list", "losses")
    os.close(full)
    assert done.returncode == 6
    assert done.stderr.startswith("error: stdout: cannot be written to: No space left")
    assert "Traceback" not in done.stderr
