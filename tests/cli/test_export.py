"""`gradscope export` from the outside."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.cli.conftest import Gradscope


@pytest.fixture
def result(gradscope: Gradscope, digits: Path, tmp_path: Path) -> Path:
    out = tmp_path / "out.h5"
    options = ["--config", digits, "--samples", "100:160", "-q", "-o", out]
    assert gradscope("compute", *options, "-t", "identity", "-t", "square | mean").code == 0
    return out


def test_rows_and_aggregates(gradscope: Gradscope, result: Path, tmp_path: Path) -> None:
    rows, means = tmp_path / "rows.npy", tmp_path / "means.safetensors"
    arguments = ["--parameter", "0.weight", "--samples", "110:120"]
    done = gradscope("export", result, "-o", rows, *arguments)
    assert done.code == 0, done.err
    assert "0.weight 10x64x64" in done.out
    done = gradscope("export", result, "-o", means, "--chain", "square|mean", "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["schema"] == "gradscope.export"
    assert document["files"][0]["bytes"] == means.stat().st_size
    with h5py.File(result) as file:
        np.testing.assert_array_equal(np.load(rows), file["chains/0/0.weight"][10:20])
        found = load_file(means)
        assert set(found) == set(file["chains/1"])
        for name, values in found.items():
            np.testing.assert_array_equal(values, file[f"chains/1/{name}"])


def test_a_table(gradscope: Gradscope, result: Path, tmp_path: Path) -> None:
    out = tmp_path / "samples.csv"
    done = gradscope("export", result, "-o", out)
    assert done.code == 0, done.err
    assert "60 rows, 7 columns" in done.out
    lines = out.read_text().splitlines()
    assert lines[0].split(",") == [
        "finite", "index", "loss", "margin", "norm", "prediction", "target",
    ]  # fmt: skip
    assert lines[1].startswith("true,100,")
