"""`gradscope compute` before a large run: what it will write is told, what does not fit refused."""

import json
import shutil
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from tests.cli.conftest import Gradscope
from tests.run.project import write

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A run whose file counts as large."""
    import gradscope.run  # noqa: F401

    monkeypatch.setattr(sys.modules["gradscope.run.disk"], "LARGE", 0)
    (tmp_path / "project").mkdir()
    folder = write(tmp_path / "project", samples=2000)
    names = [folder / "weights.pt", folder / "data.npz", "--model", f"{folder}/model.py:build"]
    return ["compute", *names, "--loss", f"{folder}/model.py:loss", "-o", tmp_path / "o.h5"]


def test_a_full_disk_is_refused_beforehand(
    gradscope: Gradscope, run: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 15_000))
    done = gradscope(*run)
    assert (done.code, done.out) == (6, "")
    assert "would take" in done.err and "free" in done.err and "another disk" in done.err
    plan = gradscope(*run, "--dry-run", "--json")
    assert plan.code == 6
    assert json.loads(plan.out)["fits"] is False
    assert not list(tmp_path.glob("o.h5*"))


def test_a_large_run_says_so_on_stderr(gradscope: Gradscope, run: list[object]) -> None:
    done = gradscope(*run)
    assert done.code == 0, done.err
    assert all(word in done.err for word in ("in the dense layout", "free", "time"))
    assert "in the dense layout" not in done.out
    quiet = gradscope(*run, "--overwrite", "-q")
    assert (quiet.code, quiet.err) == (0, "")
