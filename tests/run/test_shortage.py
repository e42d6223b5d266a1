"""When memory runs out: smaller batches, the same numbers, and one clear error at the end."""

import errno
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gradscope.errors import GradscopeError, RefusedError, SpecError
from gradscope.process.shortage import is_shortage
from gradscope.run import compute, prepare, start
from gradscope.run.overlap import BatchSize
from gradscope.storage import open_file
from tests.run.project import SAMPLES, expected, spec, write

CHAINS = ["identity", "mean", "var:ddof=0", "center | square | mean", "norm | max"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    return write(tmp_path / "project")


def check(path: Path, rows: dict[str, np.ndarray]) -> None:
    """Hold a file of `CHAINS` against the rows in closed form."""
    norms = np.sqrt(sum((g.reshape(len(g), -1) ** 2).sum(1) for g in rows.values()))
    with open_file(path) as file:
        identity, mean, var, centred, largest = file.chains
        np.testing.assert_array_equal(file.samples["index"], np.arange(len(norms)))
        np.testing.assert_allclose(file.samples["norm"], norms, rtol=1e-11)
        np.testing.assert_allclose(largest["norm"][...], norms.max(), rtol=1e-11)
        for name, g in rows.items():
            np.testing.assert_allclose(identity[name][:], g, rtol=1e-10, atol=1e-14)
            np.testing.assert_allclose(mean[name][...], g.mean(0), rtol=1e-10, atol=1e-14)
            for chain in (var, centred):
                np.testing.assert_allclose(chain[name][...], g.var(0), rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize(
    ("kind", "limit", "batch_size"),
    [("torch", 1, 30), ("python", 2, 9), ("allocator", 7, 60), ("torch", 25, 40)],
)
def test_smaller_batches_give_the_same_numbers(
    folder: Path, tmp_path: Path, kind: str, limit: int, batch_size: int
) -> None:
    limits = {"limit": limit, "kind": kind}
    job = prepare(spec(folder, limits, transform=CHAINS, batch_size=batch_size, backend="hooks"))
    report = compute(job, tmp_path / "out.h5")
    check(tmp_path / "out.h5", expected(folder))
    assert report.certificate["verified"] is True
    assert report.certificate["samples"] <= limit
    (note,) = (note for note in report.notes if "memory ran out" in note)
    assert f"batches of {batch_size} samples" in note


def test_a_run_goes_on_where_smaller_batches_stopped(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.h5"
    job = prepare(spec(folder, {"limit": 20}, transform=CHAINS, batch_size=15))
    with pytest.raises(ZeroDivisionError), start(job, path) as run:
        for count, batch in enumerate(run.remaining()):
            job.session.problem.model.limit = 4  # other processes take the memory
            run.add(batch)
            if count == 2:
                raise ZeroDivisionError
    assert not path.exists()
    again = prepare(spec(folder, {"limit": 20}, transform=CHAINS, batch_size=50))
    with start(again, path, resume=True) as run:
        assert 0 < run.writer.completed < SAMPLES
        for batch in run.remaining():
            run.add(batch)
        run.finish()
    check(path, expected(folder))


@pytest.mark.parametrize("backend", ["auto", "loop"])
def test_one_sample_that_does_not_fit_is_one_clear_error(
    folder: Path, tmp_path: Path, backend: str
) -> None:
    job = prepare(spec(folder, {"limit": 0, "kind": "allocator"}, backend=backend))
    with pytest.raises(RefusedError) as refusal:
        compute(job, tmp_path / "out.h5")
    assert refusal.value.exit_code == 4
    assert "single sample" in str(refusal.value)
    assert "can't allocate" in str(refusal.value)
    assert refusal.value.remedy is not None
    assert not list(tmp_path.glob("out*"))
    assert job.session.notes == []  # nobody fell back on a backend that takes more memory


def test_coupled_samples_are_not_parted(folder: Path, tmp_path: Path) -> None:
    limits = {"limit": 7}
    job = prepare(spec(folder, limits, coupling="own-loss", batch_size=20, verify="never"))
    with pytest.raises(RefusedError, match="share a batch"):
        compute(job, tmp_path / "out.h5")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOENT, "No such file"), False),
        (RuntimeError("could not create a primitive"), True),
        (RuntimeError("could not create a primitive descriptor for a convolution"), False),
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"), False),
        (ValueError("out of memory"), False),
    ],
    ids=repr,
)
def test_who_says_that_memory_ran_out(error: Exception, short: bool) -> None:
    assert is_shortage(error) is short


def test_another_error_is_not_taken_for_a_shortage() -> None:
    size, calls = BatchSize(8), []

    def fail(n: int) -> None:
        calls.append(n)
        raise SpecError("wrong")

    with pytest.raises(SpecError):
        size.fitting(fail, 5)
    assert calls == [5]
    assert size.notes == ()


def test_halving_goes_by_what_was_tried() -> None:
    size, tried = BatchSize(100), []

    def action(n: int) -> int:
        tried.append(n)
        if n > 3:
            raise MemoryError
        return n

    assert size.fitting(action, 30) == 3
    assert tried == [30, 15, 7, 3]
    assert size.fitting(action, 2) == 2
    assert size.samples == 3
    with pytest.raises(GradscopeError, match="single sample"):
        BatchSize(1).fitting(lambda n: [][n] if n > 1 else bytearray(2**62), 1)


PROGRAM = """
import json, resource, sys
from pathlib import Path
from gradscope.run import compute, prepare
from tests.run.project import spec

folder, out = map(Path, sys.argv[1:])
job = prepare(spec(folder, {"wide": 20_000}, batch_size=200, backend="hooks", dtype="float64"))
held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
limit = held + 400 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
report = compute(job, out)
print(json.dumps(report.notes))
"""


@pytest.mark.full
def test_a_real_limit_of_the_system(folder: Path, tmp_path: Path) -> None:
    """200 samples take 128 MB for each of several arrays, in 400 MB."""
    write(folder, 200)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, folder, tmp_path / "limited"],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parent.parent.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert any(
        "memory ran out with batches of 200 samples" in note for note in json.loads(done.stdout)
    )
    free = spec(folder, {"wide": 20_000}, batch_size=20, backend="hooks")
    assert not any(
        "memory ran out" in note for note in compute(prepare(free), tmp_path / "free").notes
    )
    with open_file(tmp_path / "limited") as a, open_file(tmp_path / "free") as b:
        for name, rows in a.chains[0].items():
            np.testing.assert_allclose(rows[:], b.chains[0][name][:], rtol=1e-9, atol=1e-12)
