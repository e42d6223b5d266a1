"""Freed memory stays with the process, and only where nobody has said otherwise."""

import os
import platform
import subprocess
import sys

PROGRAM = """
import resource, torch
from gradscope.core.libc import keep_pages
print(keep_pages())
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


def _run(**settings: str) -> tuple[bool, int]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=clean | settings,
        capture_output=True,
        text=True,
        check=True,
    )
    kept, faults = done.stdout.split()
    return kept == "True", int(faults)


def test_freed_memory_is_not_fetched_again() -> None:
    kept, faults = _run()
    assert kept == (platform.libc_ver()[0] == "glibc")  # nobody else gives pages back so
    assert not kept or faults < 1000  # of 25,600 pages that are written


def test_settings_of_the_environment_are_left_alone() -> None:
    assert not _run(MALLOC_TRIM_THRESHOLD_="131072")[0]
