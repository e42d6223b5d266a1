"""Time and peak memory of a call, the same way for every backend."""

import ctypes
import gc
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from gradscope.core.libc import function

SLOW, VERY_SLOW = 2.0, 10.0  # seconds a call
REPEATS = 3
_PROC = Path("/proc/self")
_SLACK = 4 * 2**20  # the kernel counts resident pages in bundles


def measure(call: Callable[[], object], device: torch.device) -> tuple[float, int | None]:
    """Return (seconds, peak bytes above the start) of `call`.

    The first call warms up. Then one call is watched for its memory, and the time is the median
    of three more. A slow call is made once after the warm-up, a very slow one not again.
    """
    seconds, peak = _watched(call, device)
    if seconds > VERY_SLOW:
        return seconds, peak
    warm = seconds
    seconds, peak = _watched(call, device)
    if warm > SLOW:
        return seconds, peak
    return statistics.median(_seconds(call, device) for _ in range(REPEATS)), peak


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    start = time.perf_counter()
    call()
    _synchronize(device)
    return time.perf_counter() - start


def _watched(call: Callable[[], object], device: torch.device) -> tuple[float, int | None]:
    with peak_memory(device) as peak:
        seconds = _seconds(call, device)
    return seconds, peak[0] if peak else None


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def peak_memory(device: torch.device) -> Iterator[list[int]]:
    """Watch the memory of `device`; the list yielded then holds the peak above the start.

    On CUDA it is the allocator's; otherwise the resident memory of the process. It stays empty
    where neither can be known.
    """
    gc.collect()
    result: list[int] = []
    watch = _cuda_peak if device.type == "cuda" else _resident_peak
    with watch(device, result):
        yield result


@contextmanager
def _cuda_peak(device: torch.device, result: list[int]) -> Iterator[None]:
    _synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.memory_allocated(device)
    yield
    _synchronize(device)
    result.append(torch.cuda.max_memory_allocated(device) - start)


@contextmanager
def _resident_peak(device: torch.device, result: list[int]) -> Iterator[None]:
    release_freed_memory()
    start = _resident()
    if start is None:
        yield
        return
    if _reset_high_water():
        yield
        peak = _high_water()
    else:
        with _sampled() as samples:
            yield
        peak = max([start, *samples])
    if peak is not None:
        result.append(max(0, peak - start))


def release_freed_memory() -> None:
    """Give freed memory back to the system, or reusing it would not show (glibc only)."""
    trim = function("malloc_trim", ctypes.c_size_t)
    if trim is not None:
        trim(0)


def _status(field: str) -> int | None:
    """Return a field of /proc/self/status in bytes, or None where there is none."""
    try:
        lines = (_PROC / "status").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(found[0]) * 1024 if found else None


def _resident() -> int | None:
    return _status("VmRSS")


def _high_water() -> int | None:
    return _status("VmHWM")


def _reset_high_water() -> bool:
    """Set the kernel's high-water mark to the present; False where that is not allowed."""
    try:
        (_PROC / "clear_refs").write_text("5")
    except OSError:
        return False
    mark, resident = _high_water(), _resident()  # some kernels take the order and ignore it
    return mark is not None and resident is not None and mark <= resident + _SLACK


@contextmanager
def _sampled(interval: float = 0.002) -> Iterator[list[int]]:
    """Read the resident memory again and again from another thread."""
    samples: list[int] = []
    done = threading.Event()

    def sample() -> None:
        while True:
            resident = _resident()
            if resident is not None:
                samples.append(resident)
            if done.wait(interval):
                return

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()
