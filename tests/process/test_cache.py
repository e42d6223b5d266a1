"""Facts that are kept for later processes."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from gradscope.process.cache import Cache, machine

CPU = torch.device("cpu")


@pytest.mark.parametrize("word", ["off", "OFF", "", "0"])
def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setenv("GRADSCOPE_CACHE", word)
    assert Cache.of("variants", CPU) is None


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRADSCOPE_CACHE", str(tmp_path))
    cache = Cache.of("variants", CPU)
    assert cache is not None and cache.folder == tmp_path / "variants" / machine(CPU)
    monkeypatch.delenv("GRADSCOPE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    usual = Cache.of("variants", CPU)
    assert usual is not None and "gradscope" in usual.folder.parts


def test_what_times_depend_on_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    here, threads = machine(CPU), torch.get_num_threads()
    assert torch.__version__ in here and torch.backends.cpu.get_cpu_capability() in here
    try:
        torch.set_num_threads(threads + 1)
        assert machine(CPU) != here
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert machine(CPU) != here


def test_the_first_wins(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert cache.get("x") is None
    assert cache.put("x", {"n": 1}) == cache.put("x", {"n": 2}) == cache.get("x") == {"n": 1}
    assert cache.put("x", {"n": 3}, over=True) == cache.get("x") == {"n": 3}
    assert [file.suffix for file in cache.folder.iterdir()] == [".json"]


def test_names_that_make_one_file_are_told_apart(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.put("a/b", {"n": 1})
    assert cache.get("a b") is None
    assert cache.put("a b", {"n": 2}) == {"n": 2} == cache.get("a b")


@pytest.mark.parametrize("text", ["", "{", "3", "{}", '{"name": "x", "fact": []}', "\0" * 40])
def test_damaged_facts_count_as_absent(tmp_path: Path, text: str) -> None:
    cache = Cache(tmp_path)
    cache.put("x", {"n": 1})
    (file,) = tmp_path.iterdir()
    file.write_text(text, encoding="utf-8")
    assert cache.get("x") is None
    assert cache.put("x", {"n": 2}) == cache.get("x") == {"n": 2}


def test_where_nothing_can_be_written_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("GRADSCOPE_CACHE", str(tmp_path / "file"))
    assert Cache.of("variants", CPU) is None
    cache = Cache(tmp_path / "file" / "folder")  # it vanished in the meantime
    assert cache.put("x", {"n": 1}) == {"n": 1} and cache.get("x") is None


def _put(folder: Path, k: int) -> int:
    found = [Cache(folder).put(f"fact {i}", {"from": os.getpid(), "k": k}) for i in range(40)]
    return len(json.dumps(found)) and hash(json.dumps([one["k"] for one in found]))


def test_processes_at_one_time_go_on_with_the_same_facts(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        answers = pool.starmap(_put, [(tmp_path, k) for k in range(8)])
    kept = [Cache(tmp_path).get(f"fact {i}") for i in range(40)]
    right = hash(json.dumps([one["k"] for one in kept if one]))
    assert set(answers) == {right}
