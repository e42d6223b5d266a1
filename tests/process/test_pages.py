"""Freed memory stays with the process, and only where nobody has said otherwise."""

import os
import platform
import subprocess
import sys

import pytest

KEPT = "from gradscope.process.libc import keep_pages; print(keep_pages())"
FAULTS = """
import resource, torch
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def use():
    return [torch.ones(2**18) for _ in range(100)]  # 100 MiB, a MiB each
use()
before = faults()
for _ in range(5):
    use()
print((faults() - before) // 5)
"""
MEASURED = """
import torch
from gradscope.process.libc import keep_pages
from gradscope.training import Monitor
batch = torch.ones(8, 3), torch.ones(8, 1)
monitor = Monitor(torch.nn.Linear(3, 1), "mse", every=2, samples=8, overhead=None)
monitor.start()
print(keep_pages.cache_info().currsize)  # nothing is measured yet
monitor.step(*batch)
"""


def _run(program: str, **settings: str) -> list[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=clean | settings, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_freed_memory_is_not_fetched_again() -> None:
    kept, faults = _run(KEPT + FAULTS)
    assert (kept == "True") == (platform.libc_ver()[0] == "glibc")  # others give none back
    assert kept == "False" or int(faults) < 1000  # of 25,600 pages that are written


@pytest.mark.full
def test_a_training_fetches_no_more_pages_for_having_been_measured() -> None:
    """What a measurement frees moves glibc's thresholds, and each later step may pay for that."""
    before, faults = _run(MEASURED + FAULTS)
    assert before == "0"
    assert platform.libc_ver()[0] != "glibc" or int(faults) < 1000


def test_settings_of_the_environment_are_left_alone() -> None:
    assert _run(KEPT, MALLOC_TRIM_THRESHOLD_="131072") == ["False"]
