"""What a run needs is told before it computes, and what does not fit is refused."""

import resource
import shutil
from collections import namedtuple
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from gradscope.errors import OutputError
from gradscope.run import compute, prepare
from gradscope.run import preflight as usual
from tests.run.project import SAMPLES, spec, write

Usage = namedtuple("Usage", "total used free")
preflight = partial(usual, large=0)  # every file is a large one
CHAINS = ("identity", "clip:max_norm=1 | mean", "gram")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    return write(tmp_path / "project")


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """No disk has room for more than 15,000 bytes."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - 15_000, 15_000))


@pytest.fixture
def limited() -> Iterator[int]:
    """No file may have more than 100,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, before[1]))
    yield 10**5
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("layout", "batch_size"), [("dense", 7), ("factored", 60), ("auto", 7), ("dense", 60)]
)
def test_every_layout_is_told(folder: Path, tmp_path: Path, layout: str, batch_size: int) -> None:
    """The gram matrix grows with the number of samples, squared."""
    write(folder, samples=150)
    job = prepare(spec(folder, transform=CHAINS, layout=layout, batch_size=batch_size))
    path = tmp_path / f"{layout}.h5"
    told = preflight(job, path)
    compute(job, path)
    assert told is not None and told.layout == layout
    assert told.bytes == told.layouts[layout]
    assert abs(told.bytes - path.stat().st_size) < 40_000


def test_what_was_tried_is_forgotten(folder: Path, tmp_path: Path) -> None:
    job = prepare(spec(folder))
    compute(job, tmp_path / "plain.h5")
    job = prepare(spec(folder))
    room = preflight(job, tmp_path / "o.h5")
    assert room is not None and room.seconds > 0
    assert job.session.certificate is None and not job.session.notes
    report = compute(job, tmp_path / "o.h5")
    assert report.certificate["samples"] == SAMPLES


def test_a_small_run_is_not_asked_about(folder: Path, tmp_path: Path, full: None) -> None:
    assert usual(prepare(spec(folder)), tmp_path / "o.h5") is None


def test_what_is_refused_anyway_is_not_computed(folder: Path, tmp_path: Path) -> None:
    job = prepare(spec(folder))
    (tmp_path / "o.h5").write_bytes(b"old")
    assert preflight(job, tmp_path / "o.h5") is None
    assert preflight(job, tmp_path / "nowhere" / "o.h5") is None
    assert preflight(job, tmp_path / "o.h5", overwrite=True) is not None


def test_bytes_that_are_there_already_count(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = prepare(spec(folder))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 0))
    with pytest.raises(OutputError, match="the disk has 0 MB free"):
        preflight(job, tmp_path / "o.h5")
    (tmp_path / "o.h5.part").write_bytes(b"1" * 10**6)
    assert preflight(job, tmp_path / "o.h5") is not None


def test_a_limit_on_files_is_refused_beforehand(folder: Path, tmp_path: Path, limited: int) -> None:
    write(folder, samples=2000)
    job = prepare(spec(folder))
    with pytest.raises(OutputError, match="ulimit -f") as caught:
        preflight(job, tmp_path / "o.h5")
    assert caught.value.exit_code == 6
    assert not list(tmp_path.glob("o.h5*"))
    write(folder, samples=4)
    small = prepare(spec(folder, transform=["mean"]))
    assert preflight(small, tmp_path / "o.h5") is not None


def test_what_would_fit_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, samples=2000)
    job = prepare(spec(folder, layout="dense"))
    found = preflight(job, tmp_path / "o.h5")
    assert found is not None
    half = found.smaller["--dtype float16"]
    assert 0.2 < half / found.bytes < 0.6
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, half + 1))
    with pytest.raises(OutputError) as caught:
        preflight(job, tmp_path / "o.h5")
    assert caught.value.remedy is not None and "--dtype float16" in caught.value.remedy
    assert "reducer" in caught.value.remedy
