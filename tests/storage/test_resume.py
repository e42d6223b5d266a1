"""Stopped runs: nothing finished is lost, and what follows equals an uninterrupted run."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradscope.errors import OutputError
from gradscope.storage import FilePlan, open_file, open_writer
from tests.storage.example import BATCH, DATA, PLAN, N, load, names, rows, same, write


def test_an_exception_midway_keeps_what_is_complete(tmp_path: Path) -> None:
    write(tmp_path / "whole.h5")
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "o.h5", stop_at=48)
    assert names(tmp_path) == ["o.h5.part", "o.h5.part.progress", "whole.h5"]
    with open_writer(tmp_path / "o.h5", PLAN, resume=True) as writer:
        assert writer.completed == 48
        total = DATA["w"][:48].double().sum(0)
        torch.testing.assert_close(writer.states["chain:1"]["sum:w"], total)
    write(tmp_path / "o.h5", resume=True)
    assert same(load(tmp_path / "o.h5"), load(tmp_path / "whole.h5"))
    assert names(tmp_path) == ["o.h5", "whole.h5"]


def test_states_changed_after_append_are_kept_as_they_were(tmp_path: Path) -> None:
    """A reducer may add the next batch in place before the run stops."""
    with pytest.raises(KeyboardInterrupt), open_writer(tmp_path / "o.h5", PLAN) as writer:
        total = torch.ones(3)
        writer.append(rows(0, 16), {"chain:1": {"n": total}})
        total += 5
        raise KeyboardInterrupt
    with open_writer(tmp_path / "o.h5", PLAN, resume=True) as writer:
        assert writer.completed == 16
        assert writer.states["chain:1"]["n"].tolist() == [1, 1, 1]


def test_states_too_large_to_copy_are_kept_from_the_last_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradscope.storage.write.writer.KEEP_BYTES", 4)
    path, total = tmp_path / "o.h5", torch.zeros(3)
    with pytest.raises(KeyboardInterrupt), open_writer(path, PLAN) as writer:
        for start, seconds in ((0, 0.0), (16, 60.0)):  # the second batch is not committed
            monkeypatch.setattr("gradscope.storage.write.journal.COMMIT_SECONDS", seconds)
            monkeypatch.setattr("gradscope.storage.write.journal.COMMIT_SHARE", 0)
            writer.append(rows(start, start + 16), {"chain:1": {"n": total}})
            total += 1
        raise KeyboardInterrupt
    with open_writer(path, PLAN, resume=True) as writer:
        assert (writer.completed, writer.states["chain:1"]["n"].tolist()) == (16, [0, 0, 0])


def test_large_states_are_not_committed_before_that_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradscope.storage.write.writer.KEEP_BYTES", 4)
    monkeypatch.setattr("gradscope.storage.write.journal.COMMIT_SECONDS", 0.0)
    for speed, committed in ((1e-3, False), (1e12, True)):  # bytes in a second
        monkeypatch.setattr("gradscope.storage.write.journal.COMMIT_SPEED", speed)
        with open_writer(tmp_path / "o.h5", PLAN, overwrite=True) as writer:
            writer.append(rows(0, 16), {"chain:1": {"n": torch.zeros(3)}})
        assert (tmp_path / "o.h5.part.progress").exists() == committed


def test_nothing_complete_leaves_nothing(tmp_path: Path) -> None:
    for resume in (False, True):
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "o.h5", stop_at=0, resume=resume)
        assert names(tmp_path) == []
    write(tmp_path / "o.h5", resume=True)
    assert load(tmp_path / "o.h5")["samples/index"].tolist() == list(range(N))


def test_leaving_without_finish_is_not_finishing(tmp_path: Path) -> None:
    with open_writer(tmp_path / "o.h5", PLAN) as writer:
        writer.append(rows(0, 16))
        with pytest.raises(OutputError, match="only 16 of 100"):
            writer.finish({}, {})
    assert names(tmp_path) == ["o.h5.part", "o.h5.part.progress"]


def test_an_existing_file_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    path = tmp_path / "o.h5"
    write(path)
    before = path.read_bytes()
    with pytest.raises(OutputError, match="exists already") as caught:
        write(path)
    assert "overwrite=True" in str(caught.value)
    with pytest.raises(KeyboardInterrupt):
        write(path, overwrite=True, stop_at=64)
    assert path.read_bytes() == before
    write(path, replace(PLAN, run={"second": True}), overwrite=True)
    assert load(path)["documents"][0] == {"second": True}
    assert names(tmp_path) == ["o.h5"]


def test_an_unfinished_file_is_never_cleared_silently(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "o.h5", stop_at=32)
    with pytest.raises(OutputError, match="unfinished") as caught:
        write(tmp_path / "o.h5")
    assert "resume=True" in str(caught.value) and "overwrite=True" in str(caught.value)
    with open_writer(tmp_path / "o.h5", PLAN, overwrite=True) as writer:
        assert writer.completed == 0


def test_a_complete_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    write(tmp_path / "o.h5")
    before = (tmp_path / "o.h5").read_bytes()
    (tmp_path / "o.h5.part.progress").write_bytes(b"left by a kill after the last step")
    with open_writer(tmp_path / "o.h5", PLAN, resume=True) as writer:
        assert writer.completed == N
        with pytest.raises(OutputError, match="exceed the"):
            writer.append(rows(0, 16))
        writer.finish({}, {})
    assert (tmp_path / "o.h5").read_bytes() == before
    assert names(tmp_path) == ["o.h5"]


OTHERS: list[tuple[FilePlan, str]] = [
    (replace(PLAN, fingerprint={"checkpoint": "c2", "options": {"seed": 3}}), "checkpoint is 'c1'"),
    (replace(PLAN, fingerprint={"checkpoint": "c1", "options": {"seed": 4}}), "options.seed is 3"),
    (replace(PLAN, fingerprint={"checkpoint": "c1"}), "options is {'seed': 3} there, not set here"),
    (replace(PLAN, n=99), "stored.samples is 100 there, 99 here"),
    (replace(PLAN, dtype=torch.float64), "stored.dtype is 'float32' there, 'float64' here"),
]


@pytest.mark.parametrize(("plan", "what"), OTHERS)
@pytest.mark.parametrize("stop_at", [48, None])
def test_another_run_is_not_resumed(
    tmp_path: Path, plan: FilePlan, what: str, stop_at: int | None
) -> None:
    if stop_at is None:
        write(tmp_path / "o.h5")
    else:
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "o.h5", stop_at=stop_at)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(OutputError, match="different options or inputs") as caught:
        write(tmp_path / "o.h5", plan, resume=True)
    assert what in str(caught.value)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_file_of_another_kind_is_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "o.h5").write_text("notes")
    with pytest.raises(OutputError, match="another kind"):
        write(tmp_path / "o.h5", resume=True)
    assert (tmp_path / "o.h5").read_text() == "notes"


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with open_writer(tmp_path / "o.h5", PLAN) as writer:
        writer.append(rows(0, 16))
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(OutputError, match="another process is writing"):
                write(tmp_path / "o.h5", **options)
        for start in range(16, N, BATCH):
            writer.append(rows(start, min(start + BATCH, N)))
        writer.finish({}, {})
    with open_file(tmp_path / "o.h5") as file:
        np.testing.assert_array_equal(file.chains[0]["w"][...], DATA["w"].numpy())


@pytest.mark.parametrize("name", ["nowhere/o.h5", "file/o.h5", "folder.h5", "o" * 252 + ".h5"])
def test_a_place_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.h5.part").mkdir()
    with pytest.raises(OutputError) as caught:
        write(tmp_path / name)
    assert caught.value.remedy
    assert caught.value.exit_code == 6


def test_no_samples_and_too_many_rows(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="no sample"):
        write(tmp_path / "o.h5", replace(PLAN, n=0))
    with pytest.raises(OutputError, match="exceed the"):
        write(tmp_path / "o.h5", replace(PLAN, n=20))


def test_a_stopped_run_that_replaces_a_file_goes_on(tmp_path: Path) -> None:
    """The old file stays until then; a run that was not told to replace it does not."""
    write(tmp_path / "whole.h5")
    write(tmp_path / "o.h5", replace(PLAN, fingerprint={"checkpoint": "c2"}))
    old = (tmp_path / "o.h5").read_bytes()
    for stop_at, options in ((32, {"overwrite": True}), (64, {"resume": True})):
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "o.h5", stop_at=stop_at, **options)
        assert (tmp_path / "o.h5").read_bytes() == old
    with pytest.raises(OutputError, match="different options or inputs"):
        write(tmp_path / "o.h5", replace(PLAN, fingerprint={"checkpoint": "c3"}), resume=True)
    write(tmp_path / "o.h5", resume=True)
    assert (tmp_path / "o.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()
    assert names(tmp_path) == ["o.h5", "whole.h5"]


@pytest.mark.parametrize("resume", [False, True])
def test_a_file_that_another_process_finished_meanwhile_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    """Between the look at the final path and the lock of the unfinished file."""
    write(tmp_path / "other.h5", replace(PLAN, fingerprint={"checkpoint": "c2"}))
    old, plain = (tmp_path / "other.h5").read_bytes(), os.open

    def late(path: Any, *rest: Any, **more: Any) -> int:
        if str(path).endswith("o.h5.part"):
            (tmp_path / "other.h5").rename(tmp_path / "o.h5")
        return plain(path, *rest, **more)

    monkeypatch.setattr(os, "open", late)
    with pytest.raises(OutputError, match="another process has just written this file"):
        write(tmp_path / "o.h5", resume=resume)
    assert (tmp_path / "o.h5").read_bytes() == old
    assert names(tmp_path) == ["o.h5"]
