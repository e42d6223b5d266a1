"""What was measured on this machine, kept for later processes in the user's cache folder.

Each fact is a small JSON file of its own, in a folder for the machine it was measured on, so that
a person can read or delete it. Files are complete when they appear, and the first to write one
wins: processes that measure at the same time go on with the same answer. What cannot be read
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
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")  # on instructions
_PROCESSOR = ("vendor_id", "cpu family", "model", "stepping", "model name")  # of /proc/cpuinfo


@dataclass(frozen=True)
class Cache:
    """Facts by name, of one kind and one machine."""

    folder: Path

    @classmethod
    def of(cls, kind: str, device: torch.device) -> "Cache | None":
        """Return the facts of this machine and its present settings, None if none can be kept.

        They lie in the folder that `GRADSCOPE_CACHE` names, by default the user's cache folder;
        `GRADSCOPE_CACHE=off` is for nothing to be read or kept.
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
        """Return what is known under a name, if it is there and whole."""
        try:
            found = json.loads(self._place(name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or found.get("name") != name:
            return None
        return found["fact"] if isinstance(found.get("fact"), dict) else None

    def put(self, name: str, fact: Mapping[str, Any], *, over: bool = False) -> dict[str, Any]:
        """Keep a fact, unless another process was first; return the one that is kept.

        Args:
            name: What it is about.
            fact: Plain data.
            over: What is there is of no use, and is replaced.
        """
        text = json.dumps({"name": name, "fact": fact}, indent=1) + "\n"
        place = self._place(name)
        with suppress(OSError):
            file, draft = tempfile.mkstemp(dir=place.parent, prefix=".draft-")
            try:
                with open(file, "w", encoding="utf-8") as stream:  # noqa: PTH123
                    stream.write(text)
                place.hardlink_to(draft)
            except OSError:  # another was first; or it is damaged, or there are no links here
                if over or self.get(name) is None:
                    Path(draft).replace(place)
            finally:
                Path(draft).unlink(missing_ok=True)
        return self.get(name) or dict(fact)

    def _place(self, name: str) -> Path:
        return self.folder / f"{_file_name(name)}.json"


def machine(device: torch.device) -> str:
    """Return what measured times depend on, as a folder's name."""
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
    """Return what the system tells of the processor's kind."""
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
    """Return a text as a file's name; `Cache.get` tells two of one name apart."""
    return re.sub(r"[^\w.,=+()-]+", "-", text)[:200]
