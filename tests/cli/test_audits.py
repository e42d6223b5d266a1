"""What `compute` and `stats` tell of audits."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Gradscope
from tests.run import project
from tests.run.test_audits import SAMPLES


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    folder = project.write(tmp_path, SAMPLES)
    return [
        *("compute", f"{folder}/weights.pt", f"{folder}/data.npz", "--dtype", "float64"),
        *("--model", f"{folder}/model.py:build", "--loss", f"{folder}/model.py:loss"),
        *("--batch-size", "2", "-o", f"{folder}/o.h5"),
    ]


@pytest.mark.parametrize("width", ["40", "200"])
def test_compute_and_stats_tell_of_audits(
    gradscope: Gradscope, words: list[str], width: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    done = gradscope(*words)
    assert done.code == 0
    assert "of 130 batches audited" in " ".join(done.out.split())
    told = gradscope("stats", words[-1]).out
    assert all(len(line) <= int(width) for line in told.splitlines()[1:])
    proof = json.loads(gradscope("stats", words[-1], "--json").out)["file"]["proof"]
    assert f"{proof['proved']} of 130 batches audited: samples 0 to 1," in " ".join(told.split())
    assert proof["audited"][-1][1] == SAMPLES - 1
    never = [*words, "--overwrite", "--verify", "never"]
    assert "NOT VERIFIED" in gradscope(*never).out
    assert "audited" not in gradscope("stats", words[-1]).out
