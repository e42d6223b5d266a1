"""Kills, full disks, and stops at the worst moments: nothing complete is lost or changed."""

import errno
import itertools
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from gradscope.blocks import DenseBlock, Gradients
from gradscope.errors import OutputError
from gradscope.storage import Writer, open_file, open_writer
from gradscope.storage.format.layout import ChunkOffsets, datasets
from tests.storage.example import BATCH, DATA, PLAN, N, gradients, load, names, rows, same, write


@pytest.mark.parametrize("size", [BATCH, 7])
def test_only_whole_chunks_of_complete_rows_are_needed(tmp_path: Path, size: int) -> None:
    """A kill may leave anything in the other chunks, and in the structure."""
    write(tmp_path / "whole.h5")
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "o.h5", stop_at=32)
    part = tmp_path / "o.h5.part"
    data, kept = part.read_bytes(), []
    with h5py.File(part, "r", locking=False) as file:
        for _, dataset in datasets(file):
            place, row = (
                ChunkOffsets.of(dataset),
                dataset.dtype.itemsize * int(np.prod(dataset.shape[1:])),
            )
            if place.checked:
                count = 32 // dataset.chunks[0] if dataset.chunks[0] > 1 else len(place.offsets)
                kept += place.extents[:count].tolist()
            else:
                kept.append((int(place.offsets[0]), 32 * row))
    spoilt = bytearray(b"\xa5" * len(data))
    for start, length in kept:
        spoilt[start : start + length] = data[start : start + length]
    assert len(kept) > 5
    part.write_bytes(spoilt + b"more")
    write(tmp_path / "o.h5", size=size, resume=True)
    found, wanted = load(tmp_path / "o.h5"), load(tmp_path / "whole.h5")
    if size == BATCH:
        assert same(found, wanted)
    for key in ("chains/0/w", "chains/0/emb", "chains/0/scale", "samples/loss"):
        np.testing.assert_array_equal(found[key], wanted[key])


class _StoppedError(Exception):
    """In place of a kill: nothing of ours runs afterwards."""


@pytest.mark.parametrize(
    "step",
    ["create_results", "attach_scales", "write_seal", "_verify"],
)
@pytest.mark.parametrize("cleanly", [True, False])
def test_a_stop_while_finishing_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, cleanly: bool
) -> None:
    write(tmp_path / "whole.h5")
    with monkeypatch.context() as patch:
        if not cleanly:
            _commit_always(patch)
            patch.setattr(Writer, "close", lambda writer: writer._target.close())
        patch.setattr(f"gradscope.storage.write.finish.{step}", _raise)
        with pytest.raises(_StoppedError):
            write(tmp_path / "o.h5")
    with open_writer(tmp_path / "o.h5", PLAN, resume=True) as writer:
        assert writer.completed == N
    write(tmp_path / "o.h5", resume=True)
    assert same(load(tmp_path / "o.h5"), load(tmp_path / "whole.h5"))
    assert names(tmp_path) == ["o.h5", "whole.h5"]


def _raise(*_: object, **__: object) -> None:
    raise _StoppedError


def _commit_always(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("gradscope.storage.write.journal.COMMIT_SECONDS", 0.0)
    patch.setattr("gradscope.storage.write.journal.COMMIT_SHARE", 0)


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
from gradscope.storage.write import journal as commits
from tests.storage.example import gradients, write

commits.COMMIT_SECONDS, commits.COMMIT_SHARE = 0.0, 0
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
    limit = time.monotonic() + random.uniform(0.01, 0.08 + 0.01 * kills)
    while time.monotonic() < limit:
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    if os.waitpid(child, 0)[1] == 0:
        break
    kills += 1
print(kills)
"""


def test_kill_at_random_moments(tmp_path: Path) -> None:
    def make(start: int, stop: int) -> Gradients:
        found = gradients(start, stop)
        return found if start < 60 else found.map(lambda block: DenseBlock(block.dense()))

    write(tmp_path / "whole.h5", size=4, make=make)
    command = [sys.executable, "-c", _KILLS, str(tmp_path / "o.h5"), "7"]
    kills = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert kills >= 2
    assert same(load(tmp_path / "o.h5"), load(tmp_path / "whole.h5"))
    assert names(tmp_path) == ["o.h5", "whole.h5"]


_FULL = """
import os, resource, signal, sys
from pathlib import Path
from gradscope.errors import OutputError
from gradscope.storage import open_writer
from gradscope.storage.write import journal as module
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
        assert names(tmp_path) == []
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
    monkeypatch.setattr(
        "shutil.disk_usage",
        lambda _: type("Usage", (), {"free": 100}),
    )
    with pytest.raises(OutputError, match="more bytes, the disk has 100"):
        write(tmp_path / "o.h5")
    assert names(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize(
    "call", ["preadv", "pwrite", "unlink", "stat", "fstat", "ftruncate", "fsync"]
)
def test_a_disk_that_died_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """Also where what is unfinished cannot be removed any more."""
    plain: Any = getattr(os, call)

    def dead(place: Any, *rest: Any, **options: Any) -> Any:
        if isinstance(place, int) or Path(place).parent == tmp_path:
            raise OSError(number, os.strerror(number), place)
        return plain(place, *rest, **options)

    monkeypatch.setattr(os, call, dead)
    if call == "unlink":
        monkeypatch.setattr(os, "pwrite", dead)
    with pytest.raises(OutputError, match=r"Input/output error|disk is full") as caught:
        write(tmp_path / "o.h5")
    assert "o.h5" in str(caught.value)
    monkeypatch.undo()
    write(tmp_path / "o.h5", resume=True)
    write(tmp_path / "whole.h5")
    assert same(load(tmp_path / "o.h5"), load(tmp_path / "whole.h5"))


def test_what_hdf5_cannot_read_of_an_unfinished_file_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It becomes an error of any kind: here a KeyError."""
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "o.h5", stop_at=32)

    def unreadable(file: h5py.File) -> None:
        file["chains/9"]

    monkeypatch.setattr("gradscope.storage.write.writer.Regions.of", unreadable)
    with pytest.raises(OutputError, match="writing failed"):
        write(tmp_path / "o.h5", resume=True)


def test_a_commit_is_durable_before_anything_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes, then the record of them, then its name: the folder is synced, too."""
    _commit_always(monkeypatch)
    seen: list[str] = []
    sync, move = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        place = Path(f"/proc/self/fd/{descriptor}").readlink()
        seen.append(f"sync {place.name}")
        sync(descriptor)

    def moved(old: str, new: str) -> None:
        seen.append(f"move {Path(new).name}")
        move(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", moved)
    write(tmp_path / "o.h5")
    name, folder = "o.h5.part", f"sync {tmp_path.name}"
    record = [f"sync {name}.progress.tmp", f"move {name}.progress", folder]
    assert seen == [f"sync {name}", *record] * 7 + [f"sync {name}", "move o.h5", folder]


def test_hdf5_is_not_told_that_the_size_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception in its midst would be one that nobody can catch."""
    plain, left = os.fstat, [0]

    def failing(descriptor: int) -> os.stat_result:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(descriptor)

    monkeypatch.setattr(os, "fstat", failing)
    for k in itertools.count(1):
        left[0] = k
        with suppress(OutputError):
            write(tmp_path / "o.h5", overwrite=True)
        if left[0] > 0:  # it was not called so often
            break
        left[0] = 0
        write(tmp_path / "o.h5", overwrite=True)
    monkeypatch.undo()
    assert k > 10
    assert names(tmp_path) == ["o.h5"]
