"""Time and peak memory of calls whose cost is known."""

import time

import pytest
import torch

from gradscope.comparison import measure as measuring
from gradscope.comparison.measure import measure, peak_memory

CPU = torch.device("cpu")
MIB = 2**20


def allocate():
    a = torch.ones(10 * MIB)  # 40 MiB, written to
    b = a + 1  # and 40 more at the same time
    return float(b[0])


def test_the_peak_counts_what_was_freed_again():
    with peak_memory(CPU) as peak:
        allocate()
    assert 75 * MIB < peak[0] < 100 * MIB


def test_the_sampling_thread_sees_it_too(monkeypatch):
    monkeypatch.setattr(measuring, "_reset_high_water", lambda: False)

    def long():
        a = torch.ones(10 * MIB)
        time.sleep(0.05)
        return float(a[0])

    with peak_memory(CPU) as peak:
        long()
    assert 35 * MIB < peak[0] < 60 * MIB


def test_no_peak_without_a_source(monkeypatch, tmp_path):
    monkeypatch.setattr(measuring, "_PROC", tmp_path)
    seconds, peak = measure(allocate, CPU)
    assert seconds > 0
    assert peak is None


@pytest.mark.parametrize(("slow", "very_slow", "calls"), [(9, 9, 5), (0, 9, 2), (0, 0, 1)])
def test_slow_calls_are_made_less_often(monkeypatch, slow, very_slow, calls):
    monkeypatch.setattr(measuring, "SLOW", slow)
    monkeypatch.setattr(measuring, "VERY_SLOW", very_slow)
    made = []
    seconds, _ = measure(lambda: (made.append(1), time.sleep(0.01)), CPU)
    assert len(made) == calls
    assert 0.01 <= seconds < 5
