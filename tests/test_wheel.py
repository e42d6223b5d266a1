"""The wheel: built from a clean copy, installed, and used outside the checkout."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gradscope

ROOT = Path(__file__).parent.parent


def _run(*arguments: str, cwd: Path, **variables: str) -> str:
    done = subprocess.run(arguments, cwd=cwd, env=os.environ | variables, capture_output=True)
    assert not done.returncode, done.stderr.decode()
    return done.stdout.decode()


@pytest.mark.full
def test_the_wheel_installs_and_runs_outside_the_checkout(tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "gradscope", source / "gradscope", ignore=ignored)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    _run(*pip, "wheel", ".", "--no-deps", "--no-build-isolation", "-w", "wheels", cwd=source)
    (wheel,) = (source / "wheels").iterdir()
    assert wheel.name == f"torch_gradscope-{gradscope.__version__}-py3-none-any.whl"
    _run(*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel), cwd=source)
    found = _run(
        *(sys.executable, "-c", "import gradscope; print(gradscope.__file__)"),
        cwd=tmp_path,
        PYTHONPATH=str(site),
    )
    assert Path(found.strip()) == site / "gradscope" / "__init__.py"
    made = {p.relative_to(site) for p in (site / "gradscope").rglob("*.py")}
    assert made == {p.relative_to(ROOT) for p in (ROOT / "gradscope").rglob("*.py")}
    command, result = str(site / "bin" / "gradscope"), str(tmp_path / "out.h5")
    config = str(ROOT / "sample_models" / "digits_mlp" / "run.toml")
    options = ("--samples", "0:4", "--quiet", "-o", result)
    _run(command, "compute", "--config", config, *options, cwd=tmp_path, PYTHONPATH=str(site))
    with gradscope.open(result) as file:
        assert file.n == 4
