"""How long OpenMP's threads spin: briefly in a process of the command line, else as ever."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.full  # each starts a process of its own

COMMAND = "import sys; sys.argv[1:] = ['list', 'losses']; from gradscope.cli import main; main()"
SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def _spins(program: str, **settings: str) -> str | None:
    """Return the count that torch's libgomp says it uses in a new process, if it has libgomp."""
    clean = {key: value for key, value in os.environ.items() if key not in SETTINGS}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=clean | settings | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = [line for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    return found[0].split("'")[1] if found else None


@pytest.fixture(scope="module")
def usual() -> str | None:
    """What it is without gradscope."""
    return _spins("import torch")


def test_the_library_leaves_it_as_it_is(usual: str | None) -> None:
    assert _spins("import gradscope; gradscope.Scope") == usual


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "1000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "passive"}, "0"),
    ],
)
def test_a_command_spins_briefly_unless_told(
    settings: dict[str, str], expected: str, usual: str | None
) -> None:
    assert _spins(COMMAND, **settings) == (usual and expected)
