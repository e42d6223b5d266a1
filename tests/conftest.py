"""What every test runs under."""

import gc
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.cli.forked import Forked

settings.register_profile("ci", derandomize=True)  # the same examples on every run of a commit
if os.environ.get("CI"):
    settings.load_profile("ci")

# a virtual machine may announce AMX and not have it: torch's own products in bfloat16 then end the
# process, unless oneDNN is told before it first asks
_BFLOAT16 = """import torch
x = torch.ones(64, 64, dtype=torch.bfloat16)
torch.nn.functional.linear(x, x)"""
_PROCESSOR = Path("/proc/cpuinfo")
if (
    "ONEDNN_MAX_CPU_ISA" not in os.environ
    and _PROCESSOR.exists()
    and "amx_bf16" in _PROCESSOR.read_text("utf-8")
    and subprocess.run([sys.executable, "-c", _BFLOAT16], check=False).returncode == -signal.SIGILL
):
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"

# what is measured on one day is not to decide on the last digits of another's
os.environ.setdefault("GRADSCOPE_CACHE", "off")

# a shell's job in the background ignores Ctrl-C, and so would the commands that are stopped here
signal.signal(signal.SIGINT, signal.default_int_handler)

# the files whose tests take longest
_LONGEST = (
    *("test_drill.py", "test_gpu.py", "test_docs.py", "test_ranks.py", "test_wheel.py"),
    *("test_benchmarks.py", "test_validation.py", "test_memory.py", "test_compiled.py"),
)
_FROZEN = pytest.StashKey[tuple[Path, int]]()  # when that was done last

workers = os.environ.get("PYTEST_XDIST_WORKER_COUNT")
if workers:  # or they, and whatever they start, would run as many threads each as there are cores
    share = max(1, (os.cpu_count() or 1) // int(workers))
    os.environ.setdefault("OMP_NUM_THREADS", str(share))


def pytest_configure(config: pytest.Config) -> None:
    """Let pass what torch itself warns about in models that are meant as they are."""
    for text in (
        "Using padding='same' with even kernel lengths:UserWarning",
        "`torch.jit.script` is deprecated",  # a FutureWarning from torch 2.15 on
    ):
        config.addinivalue_line("filterwarnings", f"ignore:{text}")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `sampled` leaves to `make test-full`, and put the longest tests first.

    Of several processes, none then works alone at the end.
    """
    sampled = Counter[str]()
    for item in items:
        if item.get_closest_marker("sampled"):
            name = item.nodeid.partition("[")[0]
            k = sampled[name]
            if (k + k // 3) % 3:  # where three cases alternate, each of them is among the chosen
                item.add_marker(pytest.mark.full)
            sampled[name] += 1
    places = {name: k for k, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_collection_finish() -> None:
    """Load what vmap loads when it first runs: before memory is measured, it is there."""
    import torch._dynamo  # noqa: F401


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave what earlier tests left and imported out of collections: memory is watched after one.

    Each of them would look through all of it.
    """
    now = item.path, len(sys.modules) // 50
    if item.config.stash.get(_FROZEN, None) != now:
        item.config.stash[_FROZEN] = now
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def forked() -> Iterator[Forked]:
    """Return a process that runs commands in forks of its own."""
    with Forked() as process:
        yield process
