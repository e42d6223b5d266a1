"""What the figures were measured on and with."""

import os
import platform
import re
from importlib import metadata
from typing import Any

import torch

import gradscope
from gradscope.process.cache import processor

_PEERS = ("opacus", "backpack-for-pytorch")

# What torch, oneDNN and MKL read at their start, for each set of vector instructions.
ISA = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    }
}


def describe(device: str) -> dict[str, Any]:
    """Return processor, memory, threads and versions."""
    found: dict[str, Any] = {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": _memory(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "blas": _blas(),
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
        f"{place}, {machine['isa']}, {machine['threads']} threads, {machine['blas']}, "
        f"{machine['system']}, Python {machine['python']}, "
        f"torch {machine['torch']}, gradscope {machine['gradscope']}{peers}"
    )


def _blas() -> str:
    """Return which library does torch's matrix products, with its version if it says so."""
    found = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    name = found[1] if found else "unknown BLAS"
    version = re.search(r"Math Kernel Library Version ([\d.]+)", torch.__config__.show())
    return f"MKL {version[1]}" if name == "mkl" and version else name


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
