"""Kills, full disks, and stops at the worst moments: nothing complete is lost or changed."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from gradscope.config import parse_compression
from gradscope.errors import OutputError
from gradscope.storage.format.layout import ChunkOffsets, datasets
from gradscope.storage.write import journal
from tests.storage import example
from tests.storage.disk import BROKEN, FULL, Disk, Stopped, operations
from tests.storage.example import BATCH, PLAN, changing, load, names, same, with_layout


@pytest.fixture(autouse=True)
def _commits_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(journal, "COMMIT_SHARE", 0)


GZIP = parse_compression("gzip:1")
KINDS: dict[str, tuple[Any, ...]] = {
    "plain": (PLAN,),
    "compressed": (with_layout("dense", compression=GZIP),),
    "laid out anew": (PLAN, 25, changing),
    "laid out anew, compressed": (with_layout("auto", compression=GZIP), 25, changing),
}


@pytest.fixture(
    params=[
        *("plain", "laid out anew, compressed"),
        *(pytest.param(kind, marks=pytest.mark.full) for kind in ("compressed", "laid out anew")),
    ]
)
def write(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return what writes a whole run of some kind."""
    return lambda path, **more: example.write(path, *KINDS[request.param], **more)


def test_a_stop_at_any_moment_loses_nothing(tmp_path: Path, write: Callable[..., None]) -> None:
    with Disk(tmp_path).inserted() as disk:
        write(tmp_path / "whole.h5")
    wanted, found = (tmp_path / "whole.h5").read_bytes(), []
    for k in operations(len(disk.seen), 6):
        path = tmp_path / str(k) / "o.h5"
        path.parent.mkdir()
        with pytest.raises(Stopped), Disk(path.parent, k).inserted():
            write(path)
        found.append(path.exists())
        write(path, resume=True)
        assert path.read_bytes() == wanted, disk.seen[k]
        assert names(path.parent) == ["o.h5"]
    assert not all(found)


@pytest.mark.parametrize("number", [FULL, BROKEN])
def test_a_disk_that_fails_is_told_of_once(
    tmp_path: Path, write: Callable[..., None], number: int
) -> None:
    """Also where what is unfinished cannot be removed any more; HDF5 is not told of it at all."""
    with Disk(tmp_path).inserted() as disk:
        write(tmp_path / "whole.h5")
    wanted = load(tmp_path / "whole.h5")
    for k in operations(len(disk.seen), 6):
        path = tmp_path / str(k) / "o.h5"
        path.parent.mkdir()
        with Disk(path.parent, k, number, once=k % 2 == 0).inserted():
            try:
                write(path)
            except OutputError as error:
                said = "disk is full" if number == FULL else "Input/output error"
                assert said in str(error) and "o.h5" in str(error) and error.remedy
            else:
                assert k % 2 == 0 and disk.seen[k] in ("stat", "unlink", "fstat")
        write(path, resume=True)
        assert same(load(path), wanted), disk.seen[k]
        assert names(path.parent) == ["o.h5"]


@pytest.mark.parametrize("size", [BATCH, 7])
def test_only_whole_chunks_of_complete_rows_are_needed(tmp_path: Path, size: int) -> None:
    """A kill may leave anything in the other chunks, and in the structure."""
    example.write(tmp_path / "whole.h5")
    with pytest.raises(KeyboardInterrupt):
        example.write(tmp_path / "o.h5", stop_at=32)
    part = tmp_path / "o.h5.part"
    data, kept = part.read_bytes(), []
    with h5py.File(part, "r", locking=False) as file:
        for _, dataset in datasets(file):
            place = ChunkOffsets.of(dataset)
            row = dataset.dtype.itemsize * int(np.prod(dataset.shape[1:]))
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
    example.write(tmp_path / "o.h5", size=size, resume=True)
    found, wanted = load(tmp_path / "o.h5"), load(tmp_path / "whole.h5")
    if size == BATCH:
        assert same(found, wanted)
    for key in ("chains/0/w", "chains/0/emb", "chains/0/scale", "samples/loss"):
        np.testing.assert_array_equal(found[key], wanted[key])


_KILLS = """
import os, random, signal, sys, time
from pathlib import Path
from gradscope.storage.write import journal as commits
from tests.storage.example import changing, write

commits.COMMIT_SECONDS, commits.COMMIT_SHARE = 0.0, 0
random.seed(int(sys.argv[2]))

def make(start, stop):
    time.sleep(0.002)
    return changing(start, stop)

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


@pytest.mark.full
def test_kill_at_random_moments(tmp_path: Path) -> None:
    example.write(tmp_path / "whole.h5", size=4, make=changing)
    command = [sys.executable, "-c", _KILLS, str(tmp_path / "o.h5"), "7"]
    kills = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert kills >= 2
    assert same(load(tmp_path / "o.h5"), load(tmp_path / "whole.h5"))
    assert names(tmp_path) == ["o.h5", "whole.h5"]


def test_too_little_space_is_known_with_the_first_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 100}))
    with pytest.raises(OutputError, match="more bytes; the disk has 100"):
        example.write(tmp_path / "o.h5")
    assert names(tmp_path) == []


def test_what_hdf5_cannot_read_of_an_unfinished_file_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It becomes an error of any kind: here a KeyError."""
    with pytest.raises(KeyboardInterrupt):
        example.write(tmp_path / "o.h5", stop_at=32)

    def unreadable(file: h5py.File) -> None:
        file["chains/9"]

    monkeypatch.setattr("gradscope.storage.write.writer.Regions.of", unreadable)
    with pytest.raises(OutputError, match="writing failed"):
        example.write(tmp_path / "o.h5", resume=True)


def test_a_commit_is_durable_before_anything_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes, then the record of them, then its name: the folder is synced, too."""
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
    example.write(tmp_path / "o.h5")
    name, folder = "o.h5.part", f"sync {tmp_path.name}"
    record = [f"sync {name}.progress.tmp", f"move {name}.progress", folder]
    assert seen == [f"sync {name}", *record] * 7 + [f"sync {name}", "move o.h5", folder]
