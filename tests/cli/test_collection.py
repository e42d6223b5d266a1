"""The command line collects garbage rarely while modules load, and as usual in the user's code."""

import gc
import json
import subprocess
import sys
from pathlib import Path

from tests.cli.conftest import LINEAR, words

LOOKS = """
import gc, json
found = {"threshold": gc.get_threshold(), "skipped": gc.get_freeze_count()}
json.dump(found, open("found.json", "w"))
"""
WITHIN = """
import gc, sys
from gradscope.cli.app import run
own = gc.get_threshold()
sys.argv = ["gradscope", "list", "losses"]
run()
assert (gc.get_threshold(), gc.get_freeze_count()) == (own, 0)
"""


def test_the_users_code_has_the_usual_collections(folder: Path) -> None:
    (folder / "model.py").write_text(LINEAR + LOOKS)
    command = [sys.executable, "-m", "gradscope", *map(str, words())]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    found = json.loads((folder / "found.json").read_text())
    assert tuple(found["threshold"]) == gc.get_threshold()
    assert found["skipped"] > 100_000  # objects of torch


def test_a_command_within_another_program_leaves_its_collections_alone() -> None:
    subprocess.run([sys.executable, "-c", WITHIN], check=True, capture_output=True)
