"""Running a command in this process, as the installed script would."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from gradscope.cli.app import run as command_line

SAMPLES = Path(__file__).parent.parent.parent / "sample_models"


class Outcome(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


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
    return SAMPLES / "digits_mlp" / "run.toml"
