"""A few hundred damaged files; `python -m tests.fuzz` reads as many as one likes."""

from pathlib import Path

import pytest

from tests import fuzz, fuzz_files


@pytest.mark.parametrize("name", fuzz.good_files())
def test_the_good_files_are_good(tmp_path: Path, name: str) -> None:
    for companion, content in fuzz_files.companions().items():
        (tmp_path / companion).write_bytes(content)
    content, read = fuzz.good_files()[name]
    (tmp_path / name).write_bytes(content)
    assert fuzz.outcome(tmp_path / name, read) == "loaded"


@pytest.mark.parametrize("seed", range(4))
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
        fuzz.rounds(tmp_path, 100, 0)
