"""`gradscope compute --memory` from the outside."""

import json
from pathlib import Path

import h5py
import pytest

from tests.cli.conftest import Gradscope
from tests.run.project import SAMPLES, write


@pytest.fixture
def arguments(tmp_path: Path) -> list[object]:
    """A model whose run takes next to nothing beside what is loaded when it first runs."""
    (tmp_path / "project").mkdir()
    folder = write(tmp_path / "project")
    names = [folder / "weights.pt", folder / "data.npz", "--model", f"{folder}/model.py:build"]
    return ["compute", *names, "--loss", f"{folder}/model.py:loss"]


def test_the_batch_size_follows(
    gradscope: Gradscope, arguments: list[object], tmp_path: Path
) -> None:
    out = tmp_path / "out.h5"
    done = gradscope(*arguments, "--memory", "2 GB", "-o", out)
    assert done.code == 0, done.err
    assert "--memory" in done.out
    with h5py.File(out) as file:
        run = json.loads(file.attrs["run"])
    assert run["batch_size"] == SAMPLES
    assert run["spec"]["compute"]["memory"] == "2 GB"
    plan = json.loads(gradscope(*arguments, "--dry-run", "--json").out)
    assert plan["schema"] == "gradscope.plan"
    assert 0 < plan["memory"] < plan["available"]
    resumed = gradscope(*arguments, "--memory", "1GB", "-o", out, "--resume")
    assert resumed.code == 0, resumed.err  # how much is computed at a time is no other run


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--memory", "much"], "1.5GiB"),
        (["--memory", "1KB"], "single sample"),
        (["--memory", "1GB", "--coupling", "own-loss"], "--batch-size"),
        (["--memory", "1GB", "--batch-size", "60"], "Give one of them"),
    ],
)
def test_what_is_no_budget(
    gradscope: Gradscope, arguments: list[object], tmp_path: Path, options: list[str], said: str
) -> None:
    done = gradscope(*arguments, *options, "-o", tmp_path / "out.h5")
    assert done.code == 2, done.err
    assert said in done.err
    assert "Traceback" not in done.err
    assert not list(tmp_path.glob("out*"))
