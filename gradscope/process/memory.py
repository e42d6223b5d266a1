"""Memory and time: what a device has free, what this process uses, and what a call takes."""

import ctypes
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from gradscope.process.libc import function

if sys.platform != "win32":
    import resource

T = TypeVar("T")

_SYSTEM = Path("/")
_SLACK = 4 * 2**20  # the kernel counts resident pages in batches
_FILES = {  # limit and use of a control group, in versions 2 and 1
    "memory.max": "memory.current",
    "memory.limit_in_bytes": "memory.usage_in_bytes",
}


def slices(n: int, size: int, most: int) -> Iterator[slice]:
    """Cut n items of `size` bytes each into slices of at most `most` bytes, or of one item."""
    step = max(1, most // max(1, size))
    return (slice(start, min(start + step, n)) for start in range(0, n, step))


def accelerator_module(device: torch.device | None) -> Any:
    """Return torch's module of a device, such as `torch.cuda` (None for the CPU)."""
    if device is None or device.type in ("cpu", "meta"):
        return None
    return getattr(torch, device.type, None)


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished its work; on the CPU, return immediately."""
    module = accelerator_module(device)
    if module is not None:
        module.synchronize(*([] if device.type == "mps" else [device]))


def _counts(device: torch.device) -> Any:
    """Return the device's module if its allocator counts bytes, as for CUDA and XPU."""
    module = accelerator_module(device)
    return module if hasattr(module, "mem_get_info") else None


def available(device: torch.device, system: Path = _SYSTEM) -> int | None:
    """Return the bytes that are available, or None if the system does not report them.

    On a GPU: its free memory and torch's reserve. On the CPU: the system's available memory, or
    less if a control group or a limit of the process allows less.
    """
    if module := _counts(device):
        reserved = module.memory_reserved(device) - module.memory_allocated(device)
        return int(module.mem_get_info(device)[0] + reserved)
    found = [
        *_fields(system / "proc/meminfo", "MemAvailable"),
        *_left_in_groups(system),
        *_left_of_address_space(system),
    ]
    return max(0, min(found)) if found else None


def used_memory(device: torch.device, system: Path = _SYSTEM) -> int | None:
    """Return the bytes that this process uses on a device (None if unknown)."""
    if module := _counts(device):
        return int(module.memory_allocated(device))
    return next(_fields(system / "proc/self/status", "VmRSS"), None)


def timed(
    run: Callable[[], T], device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, T]:
    """Return the seconds that `run` takes, including its work on a GPU, and its result."""
    synchronize(device)
    begun = clock()
    answer = run()
    synchronize(device)
    return clock() - begun, answer


@contextmanager
def peak_memory(device: torch.device, system: Path = _SYSTEM) -> Iterator[list[int]]:
    """Yield a list that afterwards contains the peak bytes above the start, if they are known.

    On a GPU, this is the allocator's peak; on the CPU, the peak of the resident memory.
    """
    gc.collect()
    result: list[int] = []
    if module := _counts(device):
        synchronize(device)
        module.reset_peak_memory_stats(device)
        start = module.memory_allocated(device)
        yield result
        synchronize(device)
        result.append(module.max_memory_allocated(device) - start)
        return
    release_freed_memory()
    resident = used_memory(device, system)
    if resident is None:
        yield result
    elif _reset_high_water(resident, system):
        yield result
        result += [max(0, size - resident) for size in _high_water(system)]
    else:
        with _sampled(system) as samples:
            yield result
        result.append(max(samples, default=resident) - resident)


def release_freed_memory() -> None:
    """Give freed memory back to the system, so that its reuse can be measured (glibc only)."""
    trim = function("malloc_trim", ctypes.c_size_t)
    if trim is not None:
        trim(0)


def _high_water(system: Path) -> Iterator[int]:
    yield from _fields(system / "proc/self/status", "VmHWM")


def _reset_high_water(resident: int, system: Path) -> bool:
    """Set the kernel's high-water mark to the current use; False if that has no effect."""
    try:
        (system / "proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    # # a kernel may accept the command and ignore it
    return any(size <= resident + _SLACK for size in _high_water(system))


@contextmanager
def _sampled(system: Path, interval: float = 0.002) -> Iterator[list[int]]:
    """Sample the resident memory repeatedly from another thread."""
    samples: list[int] = []
    done = threading.Event()

    def sample() -> None:
        while True:
            samples.extend(_fields(system / "proc/self/status", "VmRSS"))
            if done.wait(interval):
                return

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def _fields(path: Path, name: str) -> Iterator[int]:
    """Yield the field `name: SIZE kB` of a file, in bytes, if it exists."""
    for line in _text(path).splitlines():
        if line.startswith(f"{name}:"):
            yield int(line.split()[1]) * 1024


def _left_in_groups(system: Path) -> Iterator[int]:
    """Yield the bytes left in each control group of this process, and in its parent groups."""
    for line in _text(system / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = system / "sys/fs/cgroup" / ("memory" if controllers else "")
        group = root / name.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            yield from _left(folder)


def _left(folder: Path) -> Iterator[int]:
    for limit, use in _FILES.items():
        allowed, taken = _text(folder / limit).strip(), _text(folder / use).strip()
        if allowed.isdecimal() and taken.isdecimal():  # otherwise "max": no limit
            yield int(allowed) - int(taken) + _reclaimable(folder)


def _reclaimable(folder: Path) -> int:
    """Return the bytes of cached files, which count as used but can be reclaimed."""
    lines = (line.split() for line in _text(folder / "memory.stat").splitlines())
    stat = {words[0]: int(words[1]) for words in lines if len(words) == 2}
    return stat.get("total_inactive_file", stat.get("inactive_file", 0))


def _left_of_address_space(system: Path) -> Iterator[int]:
    if sys.platform == "win32":
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        for taken in _fields(system / "proc/self/status", "VmSize"):
            yield limit - taken


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
