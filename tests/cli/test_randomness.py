"""`--randomness fixed`: dropout whose masks do not depend on batches, shards or backends."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from tests.cli.conftest import Gradscope

N = 15
MODEL = """
from torch import nn


def build():
    return nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Dropout(0.5), nn.Linear(20, 3))
"""


@pytest.fixture
def run(tmp_path: Path) -> list[object]:
    """A run of a small model with dropout, in train mode."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Dropout(0.5), nn.Linear(20, 3))
    torch.save(layers.state_dict(), tmp_path / "w.pt")
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(N, 4)), draw.integers(0, 3, N)
    np.savez(tmp_path / "data.npz", inputs=x, targets=y)
    (tmp_path / "model.py").write_text(MODEL)
    model = ["--model", tmp_path / "model.py:build", "--loss", "cross_entropy", "--mode", "train"]
    return [tmp_path / "w.pt", tmp_path / "data.npz", *model, "--dtype", "float64"]


def rows(path: Path) -> dict[str, np.ndarray]:
    with h5py.File(path) as file:
        return {name: value[:] for name, value in file["chains/0"].items()}


def test_a_run_has_the_same_masks_however_it_is_divided(
    gradscope: Gradscope, run: list[object], tmp_path: Path
) -> None:
    refused = gradscope("compute", *run, "-o", tmp_path / "no.h5")
    assert refused.code == 4
    assert "layer '2' (Dropout)" in refused.err and "--randomness fixed" in refused.err
    fixed = [*run, "--randomness", "fixed"]
    found = {}
    options = (["--batch-size", 4], ["--batch-size", 7], ["--backend", "loop"], ["--seed", "1"])
    for k, more in enumerate((*options, ["--backend", "vmap"], ["--backend", "expand"])):
        done = gradscope("compute", *fixed, *more, "-o", tmp_path / f"{k}.h5", "-q")
        assert done.code == 0, done.err
        found[k] = rows(tmp_path / f"{k}.h5")
    for k in range(2):
        shard = ["--shard", f"{k}/2", "--batch-size", 3, "-o", tmp_path / "whole.h5", "-q"]
        assert gradscope("compute", *fixed, *shard).code == 0
    shards = sorted(tmp_path.glob("whole.shard-*.h5"))
    assert gradscope("merge", *shards, "-o", tmp_path / "whole.h5").code == 0
    found["shards"] = rows(tmp_path / "whole.h5")
    first = found.pop(0)
    other = found.pop(3)
    for own in found.values():
        for name, value in first.items():
            np.testing.assert_allclose(own[name], value, rtol=1e-9, atol=1e-12)
    assert all(not np.allclose(other[name], value) for name, value in first.items())
    columns = first["3.weight"].any(1)  # zero where a feature was dropped: (n, 20)
    assert 0.3 < 1 - columns.mean() < 0.7
    assert len(np.unique(columns, axis=0)) == N  # every sample has its own
    with h5py.File(tmp_path / "0.h5") as file:
        assert json.loads(file.attrs["run"])["spec"]["compute"]["randomness"] == "fixed"


def test_another_seed_or_no_fixed_numbers_are_another_run(
    gradscope: Gradscope, run: list[object], tmp_path: Path
) -> None:
    fixed = ["compute", *run, "--randomness", "fixed", "-o", tmp_path / "o.h5", "-q"]
    assert gradscope(*fixed).code == 0
    assert gradscope(*fixed, "--resume").code == 0
    before = (tmp_path / "o.h5").read_bytes()
    for more in (["--seed", "1"], ["--randomness", "refuse"]):
        refused = gradscope(*fixed, *more, "--resume")
        assert refused.code == 6, refused.err
        assert "a run with different options or inputs" in refused.err
    assert (tmp_path / "o.h5").read_bytes() == before


def test_a_comparison_has_the_masks_of_the_run(
    gradscope: Gradscope, run: list[object], tmp_path: Path
) -> None:
    fixed = [*run, "--randomness", "fixed", "--samples", "5:"]
    assert gradscope("compute", *fixed, "-o", tmp_path / "o.h5", "-q").code == 0
    done = gradscope("compare", *fixed, "--against", tmp_path / "o.h5", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["agrees"] and not found["coupled"]
    assert [row["status"] for row in found["rows"]] == ["agrees"] * 5
