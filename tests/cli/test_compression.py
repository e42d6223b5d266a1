"""`gradscope compute --compression` from the outside."""

import json
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.cli.conftest import Gradscope


@pytest.mark.parametrize("text", ["gzip:2", "zstd", "blosc2"])
def test_the_same_rows(gradscope: Gradscope, digits: Path, tmp_path: Path, text: str) -> None:
    run = ["compute", "--config", digits, "--samples", ":50", "-q", "-t", "identity", "-t", "mean"]
    assert gradscope(*run, "-o", tmp_path / "plain.h5").code == 0
    done = gradscope(*run, "-o", tmp_path / "o.h5", "--compression", text)
    assert done.code == 0, done.err
    with h5py.File(tmp_path / "plain.h5") as a, h5py.File(tmp_path / "o.h5") as b:
        for chain in ("0", "1"):
            for name in a[f"chains/{chain}"]:
                path = f"chains/{chain}/{name}"
                np.testing.assert_array_equal(a[path], b[path])
        spec = json.loads(b.attrs["run"])["spec"]
        assert spec["compute"]["compression"] == text
    assert gradscope("stats", tmp_path / "o.h5").code == 0
    assert gradscope("export", tmp_path / "o.h5", "-o", tmp_path / "rows.safetensors").code == 0


def test_a_plan_says_that_bytes_are_the_most(
    gradscope: Gradscope, digits: Path, tmp_path: Path
) -> None:
    done = gradscope(
        "compute", "--config", digits, "--dry-run", "--compression", "gzip", "--samples", ":20"
    )
    assert done.code == 0, done.err
    assert "before compression" in done.out


@pytest.mark.parametrize("text", ["lz4", "gzip:11", "zstd:"])
def test_what_is_no_compression(
    gradscope: Gradscope, digits: Path, tmp_path: Path, text: str
) -> None:
    done = gradscope("compute", "--config", digits, "-o", tmp_path / "o.h5", "--compression", text)
    assert (done.code, done.out) == (2, "")
    assert "compression" in done.err and "zstd" in done.err
    assert not list(tmp_path.iterdir())


def test_a_library_that_is_not_there(
    gradscope: Gradscope, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found before anything is loaded."""
    monkeypatch.setitem(sys.modules, "hdf5plugin", None)
    run = ["compute", "missing.pt", "--config", digits, "-o", tmp_path / "o.h5"]
    done = gradscope(*run, "--compression", "zstd")
    assert (done.code, done.out) == (2, "")
    assert "gradscope[compression]" in done.err
    assert not list(tmp_path.iterdir())
