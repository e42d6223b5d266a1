"""What the figures were measured on and with."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import gradscope

_PEERS = ("opacus", "backpack-for-pytorch")


def describe(device: str) -> dict[str, Any]:
    """Return processor, memory, threads and versions."""
    found: dict[str, Any] = {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": _memory(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "gradscope": gradscope.__version__,
        "peers": {name: version for name in _PEERS if (version := _version(name)) is not None},
        "device": device,
    }
    if device.startswith("cuda"):
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def line(machine: dict[str, Any]) -> str:
    """Return the description in a line."""
    peers = "".join(f", {name} {version}" for name, version in machine["peers"].items())
    place = machine.get("gpu", f"{machine['cpu']}, {machine['cores']} cores")
    return (
        f"{place}, {machine['threads']} threads, {machine['system']}, Python {machine['python']}, "
        f"torch {machine['torch']}, gradscope {machine['gradscope']}{peers}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown processor"
    names = [text.partition(":")[2].strip() for text in lines if text.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
