"""How much memory there is for a run on its device, and how much it has."""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

if sys.platform != "win32":
    import resource

_SYSTEM = Path("/")
_FILES = {  # of a control group: its limit and its use, versions 2 and 1
    "memory.max": "memory.current",
    "memory.limit_in_bytes": "memory.usage_in_bytes",
}


def available(device: torch.device, system: Path = _SYSTEM) -> int | None:
    """Return the bytes that can still be taken, or None where nobody knows.

    On a GPU what it has free and what torch holds in reserve; else what the system calls
    available, or less where a control group or a limit of the process allows less.

    Args:
        device: Where the model is.
        system: The root of the file system.
    """
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + reserved
    found = [
        *_fields(system / "proc/meminfo", "MemAvailable"),
        *_left_in_groups(system),
        *_left_of_address_space(system),
    ]
    return max(0, min(found)) if found else None


def taken(device: torch.device, system: Path = _SYSTEM) -> int | None:
    """Return the bytes that this process holds on a device, or None where nobody knows."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return next(_fields(system / "proc/self/status", "VmRSS"), None)


def _fields(path: Path, name: str) -> Iterator[int]:
    """Yield the field `name: SIZE kB` of a file, in bytes, if it is there."""
    for line in _text(path).splitlines():
        if line.startswith(f"{name}:"):
            yield int(line.split()[1]) * 1024


def _left_in_groups(system: Path) -> Iterator[int]:
    """Yield what each control group of this process, and those above, still allow."""
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
        if allowed.isdecimal() and taken.isdecimal():  # else "max": there is no limit
            yield int(allowed) - int(taken) + _reclaimable(folder)


def _reclaimable(folder: Path) -> int:
    """Return the bytes of cached files, which count as used and are given up on demand."""
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
