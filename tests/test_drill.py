"""A few cases of every drill, and that each of them sees what it is to see.

`make drill` runs them in full.
"""

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gradscope.errors import ResultFileError
from tests.cli.forked import Outcome
from tests.drill import fuzz
from tests.drill.disk import Operation, disk_after
from tests.drill.verdicts import FAILURE, REFUSED, RIGHT, Setting, Verdict, is_one_message, judged

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"│ (.*?) +│ +([\d,]+)[^│]*│ +([\d,]+) │ +([\d,]+) │ +([\d,]+) │ +[\d,]+ │")


@pytest.fixture(scope="module")
def table() -> dict[str, list[int]]:
    """{drill: cases, right, refused, failures}."""
    words = [sys.executable, "-m", "tests.drill", "--most", "1"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return {
        name: [int(n.replace(",", "")) for n in rest] for name, *rest in ROW.findall(done.stdout)
    }


@pytest.mark.full
def test_every_drill_runs(table: dict[str, list[int]]) -> None:
    needs_faults = 6 if any(map(shutil.which, ("cc", "gcc", "clang"))) else 0
    assert len(table) >= 9 + needs_faults, list(table)
    for cases, right, refused, failures in table.values():
        assert cases == right + refused >= 1
        assert failures == 0


def test_what_is_not_right_is_a_failure() -> None:
    def judge(case: int) -> Verdict | list[Verdict]:
        if case == 3:
            raise KeyError("a judge that fails")
        if case == 4:
            return [Verdict(RIGHT), Verdict(FAILURE, "four")]
        return Verdict(REFUSED if case % 2 else RIGHT)

    row = judged("some", range(6), judge, Setting(seed=0, workers=2, seconds=60))
    assert (row.counts, len(row.failures), row.cases) == ({RIGHT: 3, REFUSED: 2}, 2, 7)
    assert any("a judge that fails" in text for text in row.failures)


@pytest.mark.parametrize(
    ("outcome", "good"),
    [
        (Outcome(6, "", "error: o.h5: the disk is full\nFree some.\n"), True),
        (Outcome(1, "", "error: o.h5: the disk is full\n"), False),
        (Outcome(6, "", "Traceback (most recent call last)\nerror: x\n"), False),
        (Outcome(6, "", "error: one\nerror: two\n"), False),
        (Outcome(-11, "", ""), False),
    ],
)
def test_one_message_is_one_message(outcome: Outcome, good: bool) -> None:
    assert is_one_message(outcome) == good


def _operations(*, synced: bool) -> list[Operation]:
    return [
        Operation("o", 3, os.O_CREAT | os.O_RDWR, b"/x/new.part"),
        Operation("w", 3, 0, b"a" * 5000),
        *([Operation("s", 3, 0, b"")] if synced else []),
        Operation("r", -1, 0, b"/x/new.part\0/x/new"),
        Operation("o", 4, os.O_RDONLY | os.O_DIRECTORY, b"/x"),
        Operation("s", 4, 0, b""),
    ]


def test_a_loss_of_power_takes_what_was_not_synced() -> None:
    """Without the sync before it takes its place, a file may be there without its bytes."""
    for synced, contents in ((True, 1), (False, 3)):
        rngs = map(random.Random, range(50))
        disks = [disk_after({"new": b"old"}, _operations(synced=synced), rng) for rng in rngs]
        assert {*map(tuple, disks)} == {("new",)}
        assert len({disk["new"] for disk in disks}) >= contents
    earlier = [disk_after({}, _operations(synced=True)[:4], random.Random(k)) for k in range(50)]
    assert {name for disk in earlier for name in disk} == {"new", "new.part"}


def test_a_reader_of_wrong_numbers_is_found_out(tmp_path: Path) -> None:
    def careless(path: Path) -> fuzz.Found:
        return {"first": path.read_bytes()[:1]}

    def careful(path: Path) -> fuzz.Found:
        if path.read_bytes() != b"good":
            raise ResultFileError("damaged", where=str(path), remedy="Take another copy.")
        return {"first": b"g"}

    (tmp_path / "f").write_bytes(b"bad")

    def broken(path: Path) -> fuzz.Found:
        raise KeyError("not ours")

    for read, verdict in ((careless, FAILURE), (broken, FAILURE), (careful, REFUSED)):
        kind = fuzz.Kind({"f": b"good"}, "f", read)
        assert fuzz._verdict(kind, tmp_path / "f", {"first": b"g"})[0] == verdict
    kind = fuzz.Kind({"f": b"good"}, "f", careless, other=careless)
    assert fuzz._verdict(kind, tmp_path / "f", {"first": b"g"})[0] == RIGHT
