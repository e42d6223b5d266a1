"""Stopped runs: nothing finished is lost, and what follows equals an uninterrupted run."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from gradscope.blocks import DenseBlock, Gradients
from gradscope.errors import OutputError
from gradscope.storage import FilePlan, Writer, integrity, open_file, open_writer
from tests.storage.example import BATCH, DATA, PLAN, N, gradients, load, rows, same, write


def _names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_an_exception_midway_keeps_what_is_complete(tmp_path: Path) -> None:
    write(tmp_path / "whole.h5")
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "o.h5", stop_at=48)
    assert _names(tmp_path) == ["o.h5.part", "o.h5.part.progress", "whole.h5"]
    with open_writer(tmp_path / "o.h5", PLAN, resume=True) as writer:
        assert writer.completed == 48
        total = DATA["w"][:48].double().sum(0)
        torch.testing.assert_close(writer.states["chain:1"]["sum:w"], total)
    write(tmp_path / "o.h5", resume=True)
    assert same(load(tmp_path / "o.h5"), load(tmp_path / "whole.h5"))
    assert _names(tmp_path) == ["o.h5", "whole.h5"]


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
    monkeypatch.setattr("gradscope.storage.writer.KEEP_BYTES", 4)
    path, total = tmp_path / "o.h5", torch.zeros(3)
    with pytest.raises(KeyboardInterrupt), open_writer(path, PLAN) as writer:
        for start, seconds in ((0, 0.0), (16, 60.0)):  # the second batch is not committed
            monkeypatch.setattr("gradscope.storage.writer.COMMIT_SECONDS", seconds)
            monkeypatch.setattr("gradscope.storage.writer.COMMIT_SHARE", 0)
            writer.append(rows(start, start + 16), {"chain:1": {"n": total}})
            total += 1
        raise KeyboardInterrupt
    with open_writer(path, PLAN, resume=True) as writer:
        assert (writer.completed, writer.states["chain:1"]["n"].tolist()) == (16, [0, 0, 0])


def test_nothing_complete_leaves_nothing(tmp_path: Path) -> None:
    for resume in (False, True):
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "o.h5", stop_at=0, resume=resume)
        assert _names(tmp_path) == []
    write(tmp_path / "o.h5", resume=True)
    assert load(tmp_path / "o.h5")["samples/index"].tolist() == list(range(N))


def test_leaving_without_finish_is_not_finishing(tmp_path: Path) -> None:
    with open_writer(tmp_path / "o.h5", PLAN) as writer:
        writer.append(rows(0, 16))
        with pytest.raises(OutputError, match="only 16 of 100"):
            writer.finish({}, {})
    assert not (tmp_path / "o.h5").exists()
    with open_writer(tmp_path / "o.h5", PLAN, resume=True) as writer:
        assert writer.completed == 16


def test_an_existing_file_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    path = tmp_path / "o.h5"
    write(path)
    before = path.read_bytes()
    with pytest.raises(OutputError, match="exists already") as caught:
        write(path)
    assert "--overwrite" in str(caught.value)
    with pytest.raises(KeyboardInterrupt):
        write(path, overwrite=True, stop_at=64)
    assert path.read_bytes() == before
    write(path, replace(PLAN, run={"second": True}), overwrite=True)
    assert load(path)["documents"][0] == {"second": True}
    assert _names(tmp_path) == ["o.h5"]


def test_an_unfinished_file_is_never_cleared_silently(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "o.h5", stop_at=32)
    with pytest.raises(OutputError, match="unfinished") as caught:
        write(tmp_path / "o.h5")
    assert "--resume" in str(caught.value) and "--overwrite" in str(caught.value)
    with open_writer(tmp_path / "o.h5", PLAN, overwrite=True) as writer:
        assert writer.completed == 0


def test_a_complete_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    write(tmp_path / "o.h5")
    before = (tmp_path / "o.h5").read_bytes()
    (tmp_path / "o.h5.part.progress").write_bytes(b"left by a kill after the last step")
    with open_writer(tmp_path / "o.h5", PLAN, resume=True) as writer:
        assert writer.completed == N
        with pytest.raises(OutputError, match="do not fit"):
            writer.append(rows(0, 16))
        writer.finish({}, {})
    assert (tmp_path / "o.h5").read_bytes() == before
    assert _names(tmp_path) == ["o.h5"]


OTHERS: list[tuple[FilePlan, str]] = [
    (replace(PLAN, fingerprint={"checkpoint": "c2", "options": {"seed": 3}}), "checkpoint is 'c1'"),
    (replace(PLAN, fingerprint={"checkpoint": "c1", "options": {"seed": 4}}), "options.seed is 3"),
    (replace(PLAN, fingerprint={"checkpoint": "c1"}), "options is {'seed': 3}"),
    (replace(PLAN, n=99), "stored.samples is 100 there, 99 here"),
    (replace(PLAN, dtype=np.float64), "stored.dtype is 'float32' there, 'float64' here"),
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
    with pytest.raises(OutputError, match="another run") as caught:
        write(tmp_path / "o.h5", plan, resume=True)
    assert what in str(caught.value)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_file_of_another_kind_is_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "o.h5").write_text("notes")
    with pytest.raises(OutputError, match="another kind"):
        write(tmp_path / "o.h5", resume=True)
    assert (tmp_path / "o.h5").read_text() == "notes"


def test_appending_changes_no_structure(tmp_path: Path) -> None:
    """Between the first row and the last only data bytes change: a kill finds a sound file."""

    def structure() -> list[bytes]:
        part = tmp_path / "o.h5.part"
        with h5py.File(part, "r", locking=False) as file:
            taken = integrity.extents(file)
        data = part.read_bytes()
        return [data[a:b] for a, b in integrity.gaps(taken, len(data))]

    with open_writer(tmp_path / "o.h5", PLAN) as writer:
        writer.append(rows(0, 16))
        first = structure()
        for start in range(16, 96, BATCH):
            writer.append(rows(start, start + BATCH))
        writer._commit({})
        assert structure() == first and len(b"".join(first)) > 10_000


@pytest.mark.parametrize("size", [BATCH, 7])
def test_a_chunk_cut_short_by_a_kill_is_mended(tmp_path: Path, size: int) -> None:
    """What a kill leaves of a chunk: complete rows as they were, anything after them."""
    write(tmp_path / "whole.h5")
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "o.h5", stop_at=32)
    part = tmp_path / "o.h5.part"
    with h5py.File(part, "r", locking=False) as file:
        places = [(d, [c.byte_offset for c in _chunks(d)]) for d in integrity.datasets(file)]
        tails = []
        for dataset, offsets in places:
            if dataset.chunks is not None:
                row = dataset.dtype.itemsize * int(np.prod(dataset.shape[1:]))
                for k, offset in enumerate(offsets):
                    kept = min(max(0, 32 - k * dataset.chunks[0]), dataset.chunks[0])
                    if kept < dataset.chunks[0]:
                        tails.append((offset + kept * row, offset + dataset.chunks[0] * row + 4))
    data = bytearray(part.read_bytes())
    for start, stop in tails:
        data[start:stop] = b"\xa5" * (stop - start)
    part.write_bytes(data)
    assert len(tails) > 5
    write(tmp_path / "o.h5", size=size, resume=True)
    found, wanted = load(tmp_path / "o.h5"), load(tmp_path / "whole.h5")
    if size == BATCH:
        assert same(found, wanted)
    for key in ("chains/0/w", "chains/0/emb", "chains/0/scale", "samples/loss"):
        np.testing.assert_array_equal(found[key], wanted[key])


def _chunks(dataset: h5py.Dataset) -> list[h5py.h5d.StoreInfo]:
    if dataset.chunks is None:
        return []
    found: list[h5py.h5d.StoreInfo] = []
    dataset.id.chunk_iter(found.append)
    return sorted(found, key=lambda c: c.chunk_offset)


class _StoppedError(Exception):
    """In place of a kill: nothing of ours runs afterwards."""


def test_a_kill_while_a_chunk_is_mended_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "whole.h5")
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "o.h5", stop_at=32)
    _without_clean_up(monkeypatch)
    with monkeypatch.context() as patch, pytest.raises(_StoppedError):
        patch.setattr("gradscope.storage.resume.write_rows", _raise)
        write(tmp_path / "o.h5", resume=True)
    assert "o.h5.part.undo" in _names(tmp_path)
    monkeypatch.undo()
    write(tmp_path / "o.h5", resume=True)
    assert same(load(tmp_path / "o.h5"), load(tmp_path / "whole.h5"))


@pytest.mark.parametrize(
    "step",
    ["complete.add_results", "scales.attach_all", "integrity.write_seal", "complete._verify"],
)
@pytest.mark.parametrize("cleanly", [True, False])
def test_a_stop_while_finishing_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, cleanly: bool
) -> None:
    write(tmp_path / "whole.h5")
    with monkeypatch.context() as patch:
        if not cleanly:
            _without_clean_up(patch)
        patch.setattr(f"gradscope.storage.{step}", _raise)
        with pytest.raises(_StoppedError):
            write(tmp_path / "o.h5")
    assert ("o.h5.part.undo" in _names(tmp_path)) is not cleanly
    with open_writer(tmp_path / "o.h5", PLAN, resume=True) as writer:
        assert writer.completed == N
    write(tmp_path / "o.h5", resume=True)
    assert same(load(tmp_path / "o.h5"), load(tmp_path / "whole.h5"))
    assert _names(tmp_path) == ["o.h5", "whole.h5"]


def _raise(*_: object, **__: object) -> None:
    raise _StoppedError


def _without_clean_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("gradscope.storage.undo.restore", lambda *_: None)
    patch.setattr(Writer, "close", Writer._close_file)


def test_a_stop_after_a_change_of_layout(tmp_path: Path) -> None:
    def make(start: int, stop: int) -> Gradients:
        found = gradients(start, stop)
        return found if start < 32 else found.map(lambda block: DenseBlock(block.dense()))

    write(tmp_path / "whole.h5", make=make)
    for stop_at in (32, 48):
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "o.h5", make=make, stop_at=stop_at, resume=True)
    write(tmp_path / "o.h5", make=make, resume=True)
    assert same(load(tmp_path / "o.h5"), load(tmp_path / "whole.h5"))


_KILLS = """
import os, random, signal, sys, time
from pathlib import Path
from gradscope.blocks import DenseBlock
from gradscope.storage import writer
from tests.storage.example import gradients, write

writer.COMMIT_SECONDS, writer.COMMIT_SHARE = 0.0, 0
random.seed(int(sys.argv[2]))

def make(start, stop):
    time.sleep(0.002)
    found = gradients(start, stop)
    return found if start < 60 else found.map(lambda block: DenseBlock(block.dense()))

kills = 0
while True:
    child = os.fork()
    if not child:
        write(Path(sys.argv[1]), size=4, make=make, resume=True)
        os._exit(0)
    limit = time.monotonic() + random.uniform(0.01, 0.09)
    while time.monotonic() < limit:
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    if os.waitpid(child, 0)[1] == 0:
        break
    kills += 1
    assert kills < 60, "no progress"
print(kills)
"""


def test_kill_at_random_moments(tmp_path: Path) -> None:
    def make(start: int, stop: int) -> Gradients:
        found = gradients(start, stop)
        return found if start < 60 else found.map(lambda block: DenseBlock(block.dense()))

    write(tmp_path / "whole.h5", size=4, make=make)
    command = [sys.executable, "-c", _KILLS, str(tmp_path / "o.h5"), "7"]
    kills = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert kills >= 3
    assert same(load(tmp_path / "o.h5"), load(tmp_path / "whole.h5"))
    assert _names(tmp_path) == ["o.h5", "whole.h5"]


_FULL = """
import os, resource, signal, sys
from pathlib import Path
from gradscope.errors import OutputError
from gradscope.storage import open_writer, writer as module
from tests.storage.example import PLAN, batches, rows, write

module.COMMIT_SECONDS, module.COMMIT_SHARE = 0.0, 0
path, at = Path(sys.argv[1]), sys.argv[2]

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

try:
    if at == "start":
        limit(20_000)
        write(path)
    else:
        with open_writer(path, PLAN) as writer:
            for start, stop in batches():
                if start == 48:
                    limit(1000)
                writer.append(rows(start, stop), {})
except OutputError as error:
    print(error)
"""


@pytest.mark.parametrize("at", ["start", "middle"])
def test_a_full_disk(tmp_path: Path, at: str) -> None:
    """A limit on the file's size stands for a full disk: the writes fail in the same places."""
    command = [sys.executable, "-c", _FULL, str(tmp_path / "o.h5"), at]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "the disk is full" in found.stdout and "--resume" in found.stdout
    if at == "start":
        assert _names(tmp_path) == []
        return
    with open_writer(tmp_path / "o.h5", PLAN, resume=True) as writer:
        assert writer.completed == 48
        for start in range(48, N, BATCH):
            writer.append(rows(start, min(start + BATCH, N)), {})
        writer.finish({}, {})
    with open_file(tmp_path / "o.h5") as file:
        np.testing.assert_array_equal(file.chains[0]["w"][...], DATA["w"].numpy())


def test_too_little_space_is_known_with_the_first_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = os.statvfs(tmp_path)
    assert usage.f_bavail > 0
    monkeypatch.setattr(
        "gradscope.storage.trouble.shutil.disk_usage", lambda _: type("Usage", (), {"free": 100})
    )
    with pytest.raises(OutputError, match="more bytes, the disk has 100"):
        write(tmp_path / "o.h5")
    assert _names(tmp_path) == []


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


def _missing_folder(folder: Path) -> Path:
    return folder / "nowhere" / "o.h5"


def _file_as_folder(folder: Path) -> Path:
    (folder / "file").write_text("")
    return folder / "file" / "o.h5"


def _folder_in_the_way(folder: Path) -> Path:
    (folder / "o.h5.part").mkdir()
    return folder / "o.h5"


def _name_too_long(folder: Path) -> Path:
    return folder / ("o" * 252 + ".h5")


@pytest.mark.parametrize(
    "place", [_missing_folder, _file_as_folder, _folder_in_the_way, _name_too_long]
)
def test_a_place_that_cannot_be_written(tmp_path: Path, place: Callable[[Path], Path]) -> None:
    with pytest.raises(OutputError) as caught:
        write(place(tmp_path))
    assert caught.value.remedy
    assert caught.value.exit_code == 6


def test_no_samples_and_too_many_rows(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="no sample"):
        write(tmp_path / "o.h5", replace(PLAN, n=0))
    with pytest.raises(OutputError, match="do not fit"):
        write(tmp_path / "o.h5", replace(PLAN, n=20))
