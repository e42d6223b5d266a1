"""Running a command: in this process, or in a fork of another, as the installed script would."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gradscope.cli.app import run as command_line
from tests.cli.forked import Outcome

SAMPLES = Path(__file__).parent.parent.parent / "sample_models"
DIGITS = SAMPLES / "digits_mlp" / "run.toml"
LINEAR = "from torch import nn\ndef build(): return nn.Linear(4, 3)\n"
N = 12

Gradscope = Callable[..., Outcome]


@pytest.fixture
def gradscope(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Gradscope:
    """Return a function that runs `gradscope ARGUMENTS`."""

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["gradscope", *map(str, arguments)])
        capfd.readouterr()
        return Outcome(command_line(), *capfd.readouterr())

    return run


@pytest.fixture
def digits() -> Path:
    """The run file of the smallest sample model."""
    return DIGITS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A linear model in model.py, its weights w.pt, and twelve samples in data.npz."""
    random = np.random.default_rng(0)
    torch.manual_seed(0)
    torch.save(nn.Linear(4, 3).state_dict(), tmp_path / "w.pt")
    inputs = random.normal(size=(N, 4)).astype(np.float32)
    np.savez(tmp_path / "data.npz", inputs=inputs, targets=random.integers(0, 3, N))
    (tmp_path / "model.py").write_text(LINEAR)
    return tmp_path


def words(*more: object, command: str = "compute") -> list[object]:
    """Return the arguments of a run of that folder."""
    run = ["w.pt", "data.npz", "--model", "model.py:build", "--loss", "cross_entropy"]
    return [command, *run, *(["-o", "out.h5"] if command == "compute" else []), *more]
