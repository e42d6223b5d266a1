"""What the system is asked to do for a large file: to keep space, and to begin early."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gradscope.errors import OutputError
from gradscope.storage import open_file
from gradscope.storage.format import files
from tests.storage.example import load, same, write

SIZE = 2**21 + 4096 + 7


def _answers(number: int) -> Callable[..., Callable[..., int]]:
    """Return what takes the place of a function of the C library: it fails with `number`."""

    def call(*given: int) -> int:
        files.ctypes.set_errno(number)
        return -1

    return lambda *named: call


def test_reserved_space_is_taken_and_reads_as_before(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("w+b") as file:
        os.ftruncate(file.fileno(), SIZE)
        os.pwrite(file.fileno(), b"kept", 4096)
        files.secure_space(path, file.fileno())
    expected = bytes(4096) + b"kept" + bytes(SIZE - 4100)
    assert path.read_bytes() == expected
    assert path.stat().st_blocks >= SIZE // 512


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR, errno.EINVAL])
def test_what_cannot_be_done_is_left(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "function", _answers(number))
    write(tmp_path / "failing.h5")
    monkeypatch.setattr(files, "function", lambda *named: None)  # another system
    write(tmp_path / "absent.h5")
    for name in ("failing.h5", "absent.h5"):
        with open_file(tmp_path / name) as file:
            assert len(file.samples["index"]) == 100
    assert same(load(tmp_path / "failing.h5"), load(tmp_path / "absent.h5"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_will_be_full_is_refused_at_once(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "function", _answers(number))
    with pytest.raises(OutputError, match="disk is full") as refusal:
        write(tmp_path / "out.h5")
    assert refusal.value.remedy is not None
    assert not list(tmp_path.iterdir())
