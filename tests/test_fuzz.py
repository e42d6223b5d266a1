"""A few hundred damaged files; `python -m tests.fuzz` reads as many as one likes."""

from pathlib import Path

import pytest

from tests import fuzz


def test_the_good_files_are_good(tmp_path: Path) -> None:
    files = fuzz.good_files()
    (tmp_path / "shard.safetensors").write_bytes(files["w.safetensors"])
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        assert fuzz.outcome(name, tmp_path / name) == "loaded"


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_damaged_the_answer_is_ours(tmp_path: Path, seed: int) -> None:
    found = fuzz.rounds(tmp_path, 500, seed)
    assert sum(found.values()) == 500
    refused = {name for name, what in found if what != "loaded"}
    assert refused == set(fuzz.good_files())  # every kind was really damaged


def test_a_finding_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> None:
        raise KeyError("not ours")

    monkeypatch.setattr(fuzz, "load", broken)
    with pytest.raises(AssertionError, match=r"of seed 0, .*KeyError"):
        fuzz.rounds(tmp_path, 50, 0)
