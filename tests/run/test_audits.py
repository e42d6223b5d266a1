"""What a run audits, what it records of that, and what becomes of one that an audit finds wrong.

The numbers are held against those of the project in closed form, by numpy.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from gradscope.backends.base import Evaluate, backends
from gradscope.backends.vmap import vmap
from gradscope.blocks import DenseBlock, Evaluation, Gradients
from gradscope.core.batch import Batch
from gradscope.engine.audit import Auditor
from gradscope.errors import CertificateError
from gradscope.model.problem import Problem
from gradscope.model.ranks import OtherProcessError
from gradscope.run import compute, prepare, start
from gradscope.storage import open_file
from tests.run import project

SAMPLES, SIZE = 260, 2  # 130 batches
WRONG_FROM = 16  # the sample from which the mistaken backend is wrong


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return project.write(tmp_path, SAMPLES)


def certificate(folder: Path, name: str = "o.h5", **options: Any) -> dict[str, Any]:
    compute(prepare(project.spec(folder, batch_size=SIZE, **options)), folder / name)
    return recorded(folder / name)


def recorded(path: Path) -> dict[str, Any]:
    with open_file(path) as file:
        return dict(file.certificate)


def chosen(seed: int, window: int) -> int:
    """Which batch of a window of 64 is drawn, as documented: by SHA-256 of seed and window."""
    digest = hashlib.sha256(f"{seed} {window}".encode()).digest()
    return 64 * window + int.from_bytes(digest[:7], "little") % 64


@pytest.mark.parametrize("seed", [0, 3])
def test_the_first_the_last_and_one_of_64_are_recorded(folder: Path, seed: int) -> None:
    audit = certificate(folder, seed=seed)["audit"]
    batches = sorted({0, 129, *(b for b in (chosen(seed, 1), chosen(seed, 2)) if b < 130)})
    samples = {i for first, last in audit["audited"] for i in range(first, last + 1)}
    assert samples == {SIZE * b + k for b in batches for k in range(SIZE)}
    assert (audit["verify"], audit["batches"], audit["proved"]) == ("audit", 130, len(batches))
    assert len(batches) in (3, 4)
    assert 0 < audit["error"] < 1e-12 and audit["parameter"] in project.expected(folder)


def test_what_other_ways_to_verify_record(folder: Path) -> None:
    never = certificate(folder, "never.h5", verify="never")
    assert never["verified"] is False and "audit" not in never
    first = certificate(folder, "first.h5", verify="first")
    assert first["positions"] == [0, 1]
    assert (first["audit"]["proved"], first["audit"]["audited"]) == (1, [[0, 1]])
    always = certificate(folder, "always.h5", verify="always", samples=":40")
    assert (always["audit"]["proved"], always["audit"]["audited"]) == (20, [[0, 39]])
    assert always["positions"] == [0, 1]  # the certificate is that of the first batch


def test_what_an_earlier_pass_proved_counts(folder: Path) -> None:
    """`center` needs the mean first: the first batch is proved in that pass."""
    options = {"verify": "first", "samples": ":40", "transform": ["center | var"]}
    audit = certificate(folder, **options)["audit"]
    assert (audit["batches"], audit["proved"], audit["audited"]) == (20, 1, [[0, 1]])


def stop_and_go_on(folder: Path, after: int, then: str | None = None, **options: Any) -> Any:
    """Return what is recorded of a run that was stopped, and went on with another `verify`."""
    run = project.spec(folder, batch_size=SIZE, **options)
    with pytest.raises(ZeroDivisionError), start(prepare(run), folder / "o.h5") as stopped:
        for batch in stopped.remaining():
            stopped.add(batch)
            if stopped.done >= after:
                raise ZeroDivisionError
    compute(prepare(run.computing(verify=then or run.compute.verify)), folder / "o.h5", resume=True)
    return recorded(folder / "o.h5")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("verify", "samples", "after"),
    [("audit", ":", 142), ("first", ":40", 12), ("always", ":40", 12)],
)
def test_a_stopped_run_records_what_an_uninterrupted_one_does(
    folder: Path, verify: str, samples: str, after: int
) -> None:
    straight = certificate(folder, "straight.h5", verify=verify, samples=samples)
    assert stop_and_go_on(folder, after, verify=verify, samples=samples) == straight


def test_a_run_that_goes_on_with_audits_proves_its_first_batch(folder: Path) -> None:
    """It began with none."""
    found = stop_and_go_on(folder, 12, then="audit", verify="never", samples=":40")
    assert found == certificate(folder, "straight.h5", samples=":40")


def test_batches_of_zeros_postpone_the_proof(folder: Path) -> None:
    with np.load(folder / "data.npz") as data:
        inputs, targets = data["inputs"], data["targets"]
    targets[:6] = 0  # three batches without a gradient
    np.savez(folder / "data.npz", inputs=inputs, targets=targets)
    options = {"loss": "weighted", "verify": "first", "samples": ":40"}
    found = certificate(folder, "straight.h5", **options)
    assert (found["positions"], found["proves"]) == ([6, 7], True)
    assert (found["audit"]["proved"], found["audit"]["audited"]) == (4, [[0, 7]])
    assert stop_and_go_on(folder, 12, **options) == found
    np.savez(folder / "data.npz", inputs=inputs, targets=0 * targets)
    nothing = certificate(folder, "zeros.h5", loss="weighted", samples=":40")
    assert nothing["proves"] is False and nothing["audit"]["proved"] == 20


@contextmanager
def mistaken(problem: Problem) -> Iterator[Evaluate]:
    """Right at first; later the first sample of a batch gets the last one's bias."""
    with vmap(problem) as right:

        def evaluate(batch: Batch, *_: object) -> Evaluation:
            found = right(batch)
            rows = found.gradients.dense()
            if int(batch.index.min()) >= WRONG_FROM:
                rows["first.bias"] = rows["first.bias"].clone()
                rows["first.bias"][0] = rows["first.bias"][-1]
            blocks = {name: DenseBlock(value) for name, value in rows.items()}
            return replace(found, gradients=Gradients(blocks))

        yield evaluate


@pytest.fixture
def with_a_mistake(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Put the mistaken backend in the place of hooks; return what puts hooks back."""
    monkeypatch.setitem(backends._entries, "hooks", mistaken)
    return monkeypatch.undo


def test_a_run_that_is_found_wrong_keeps_what_was_proved(
    folder: Path, with_a_mistake: Callable[[], None]
) -> None:
    path = folder / "o.h5"
    run = project.spec(folder, backend="hooks", batch_size=SIZE, samples=":60")
    with pytest.raises(CertificateError) as failure:
        compute(prepare(run), path)
    assert failure.value.exit_code == 4
    told = str(failure.value)
    for word in ("hooks backend failed the proof", "'first.bias'", "sample", "relative error"):
        assert word in told
    assert "only proved samples are kept" in told
    assert not path.exists()
    with_a_mistake()
    with start(prepare(run), path, resume=True) as going_on:
        kept = going_on.writer.completed
        assert 0 < kept <= WRONG_FROM and kept % SIZE == 0
        for batch in going_on.remaining():
            going_on.add(batch)
        going_on.finish()
    assert_right(folder, path)


def test_an_error_of_another_process_costs_none_of_the_samples_of_this_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, run = folder / "o.h5", project.spec(folder, batch_size=SIZE, samples=":60")
    with monkeypatch.context() as patch:
        patch.setattr(Auditor, "clock", lambda _: 0.0)  # time for no more than the first proof
        stopped = prepare(run)
        evaluate = stopped.session.evaluate

        def failing(batch: Batch, *asked: Any, **more: Any) -> Evaluation:
            if int(batch.index.min()) >= WRONG_FROM:
                raise OtherProcessError("process 1 failed: on purpose")
            return evaluate(batch, *asked, **more)

        patch.setattr(stopped.session, "evaluate", failing)
        with pytest.raises(OtherProcessError, match="on purpose"):
            compute(stopped, path)
    with start(prepare(run), path, resume=True) as going_on:
        assert going_on.writer.completed == WRONG_FROM


def test_auto_goes_on_from_what_was_proved(
    folder: Path, with_a_mistake: Callable[[], None]
) -> None:
    path = folder / "o.h5"
    report = compute(prepare(project.spec(folder, batch_size=SIZE, samples=":60")), path)
    assert_right(folder, path)
    assert recorded(path)["backend"] == report.backend == "hooks, vmap"
    (note,) = [note for note in report.notes if "a different backend" in note]
    assert "hooks backend failed the proof" in note and "'first.bias'" in note


def assert_right(folder: Path, path: Path) -> None:
    with h5py.File(path) as file:
        for name, rows in project.expected(folder).items():
            np.testing.assert_allclose(
                file[f"chains/0/{name}"][...], rows[:60], rtol=1e-9, atol=1e-12, err_msg=name
            )


@pytest.mark.parametrize(("inside", "outside", "audited"), [(1.0, 0.0, True), (0.0, 1.0, False)])
def test_only_time_of_evaluations_pays_for_audits(
    inside: float, outside: float, audited: bool
) -> None:
    now = 0.0
    auditor = Auditor(0, clock=lambda: now)
    plans = []
    for ordinal in range(1, 40):
        now += outside
        auditor.start()
        now += inside
        plans.append(auditor.begin(8, ordinal, last=False, new=False, proof=None))
        now += 0.01 if plans[-1].whole_batch or plans[-1].singles else 0.0
        auditor.end(plans[-1], None)
    later = [plan.whole_batch for plan in plans[1:]]  # the first batch has a new size
    assert any(later) == audited
