"""Measurements on this machine, stored for later processes in the user's cache folder.

Each measurement is a small JSON file that a person can read or delete. A folder holds the
measurements of one machine. Files are complete when they appear. The first process to write a file
wins, so processes that measure at the same time use the same value. A file that cannot be read
counts as absent.
"""

import json
import os
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import platformdirs
import torch

from gradscope.process.memory import accelerator_module

_VARIABLE = "GRADSCOPE_CACHE"
_OFF = ("", "0", "off", "no", "none")
# limit the processor's instructions
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
_PROCESSOR = ("vendor_id", "cpu family", "model", "stepping", "model name")  # in /proc/cpuinfo


@dataclass(frozen=True)
class Cache:
    """Measurements by name, of one kind, on one machine."""

    folder: Path

    @classmethod
    def of(cls, kind: str, device: torch.device) -> "Cache | None":
        """Return the cache for this machine and its current settings, or None.

        The folder is `GRADSCOPE_CACHE`, by default the user's cache folder. With
        `GRADSCOPE_CACHE=off` nothing is read or stored.
        """
        asked = os.environ.get(_VARIABLE)
        if asked is not None and asked.lower() in _OFF:
            return None
        root = platformdirs.user_cache_path("gradscope") if asked is None else Path(asked)
        folder = root.expanduser() / kind / machine(device)
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        return cls(folder) if os.access(folder, os.R_OK | os.W_OK | os.X_OK) else None

    def get(self, name: str) -> dict[str, Any] | None:
        """Return the stored fact of this name, or None."""
        try:
            found = json.loads(self._place(name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or found.get("name") != name:
            return None
        return found["fact"] if isinstance(found.get("fact"), dict) else None

    def put(self, name: str, fact: Mapping[str, Any], *, over: bool = False) -> dict[str, Any]:
        """Store a fact, unless another process stored one first; return the stored fact.

        Args:
            name: The name of the fact.
            fact: Plain data.
            over: Replace a stored fact.
        """
        text = json.dumps({"name": name, "fact": fact}, indent=1) + "\n"
        place = self._place(name)
        with suppress(OSError):
            file, draft = tempfile.mkstemp(dir=place.parent, prefix=".draft-")
            try:
                with open(file, "w", encoding="utf-8") as stream:  # noqa: PTH123
                    stream.write(text)
                place.hardlink_to(draft)
            # another process was first, the file is damaged, or the file system has no links
            except OSError:
                if over or self.get(name) is None:
                    Path(draft).replace(place)
            finally:
                Path(draft).unlink(missing_ok=True)
        return self.get(name) or dict(fact)

    def _place(self, name: str) -> Path:
        return self.folder / f"{_file_name(name)}.json"


def machine(device: torch.device) -> str:
    """Return a folder name made of everything that measured times depend on."""
    parts = [processor(), torch.backends.cpu.get_cpu_capability()]
    parts += [f"{name}={os.environ[name]}" for name in _LIMITS if name in os.environ]
    parts += [f"{torch.get_num_threads()} threads", f"torch {torch.__version__}"]
    module = accelerator_module(device)
    if module is not None:
        name = getattr(module, "get_device_name", None)
        parts.append(str(device.type) if name is None else str(name(device)))
    return _file_name(", ".join(parts))


@cache
def processor() -> str:
    """Return the system's description of the processor."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        import platform

        return platform.processor() or platform.machine()
    first = text.partition("\n\n")[0]
    fields = dict(re.findall(r"^([^\t:]+?)\s*: (.*)$", first, re.MULTILINE))
    known = [fields[key].strip() for key in _PROCESSOR if key in fields]
    return " ".join(known) or "unknown processor"


def _file_name(text: str) -> str:
    """Return a text as a file name; `Cache.get` checks the full name."""
    return re.sub(r"[^\w.,=+()-]+", "-", text)[:200]
