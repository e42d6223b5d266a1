"""The libraries: which are installed, how to install them, and what importing them needs."""

import importlib
import sys
import warnings
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

NEEDS = {
    "transformers": ("transformers",),
    "timm": ("timm", "torchvision"),
    "torchvision": ("torchvision",),
    "graphs": ("torch_geometric",),
    "torchaudio": ("torchaudio",),
    "diffusers": ("diffusers",),
    "monai": ("monai",),
    "operators": ("expecttest",),
    "modules": ("expecttest",),
}
GROUPS = "GRADSCOPE_ZOO_GROUPS"  # which groups the server imports the libraries of
PEERS = {"Opacus": "opacus", "BackPACK": "backpack"}
_PACKAGES = (
    "torch",
    "torch-gradscope",
    "opacus",
    "backpack-for-pytorch",
    "transformers",
    "timm",
    "torchvision",
    "torch_geometric",
    "torchaudio",
    "diffusers",
    "monai",
)


def missing(group: str) -> list[str]:
    """Return the libraries that a group needs and that are not installed."""
    return [name for name in NEEDS[group] if find_spec(name) is None]


def how_to_install(names: list[str]) -> str:
    """Return what to do about absent libraries."""
    return (
        f"{', '.join(names)} not installed: make zoo installs all libraries, or "
        "pip install --no-deps -r benchmarks/zoo/requirements.txt"
    )


def versions() -> dict[str, str]:
    """Return the versions of the libraries that are installed."""
    found = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def load(name: str) -> ModuleType:
    """Import a library, next to others whose operators were compiled for another build of torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name not in sys.modules:
            _import_vision()
            _import_audio()
        return importlib.import_module(name)


def load_testing(name: str) -> ModuleType:
    """Import one of torch's own test tables, which would forbid others to set torch's flags."""
    former = torch.backends.disable_global_flags
    torch.backends.disable_global_flags = lambda: None
    try:
        return importlib.import_module(f"torch.testing._internal.{name}")
    finally:
        torch.backends.disable_global_flags = former


def _import_vision() -> None:
    """Import torchvision, and declare the operators that its import expects if they are absent.

    The compiled operators of its wheels for GPUs need torch for GPUs. No model here calls them.
    """
    if find_spec("torchvision") is None or "torchvision" in sys.modules:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for loaded in [key for key in sys.modules if key.split(".")[0] == "torchvision"]:
            del sys.modules[loaded]
        boxes = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        for operator in ("nms", "qnms"):
            torch.library.define(f"torchvision::{operator}", boxes)
        importlib.import_module("torchvision")


def _import_audio() -> None:
    """Import torchaudio. If its compiled operators cannot be loaded, declare them."""
    if find_spec("torchaudio") is None or "torchaudio" in sys.modules:
        return
    former = torch.ops.load_library

    def load_library(path: Any) -> None:
        try:
            former(path)
        except OSError:
            if "_torchaudio" in str(path):
                _define("_torchaudio::cuda_version", "() -> int?", None)
                _define("_torchaudio::is_align_available", "() -> bool", False)
                for name in ("_lfilter_core_loop", "_overdrive_core_loop"):
                    _define(f"torchaudio::{name}", "(Tensor[] arguments) -> ()", None)

    torch.ops.load_library = load_library  # type: ignore[method-assign]
    try:
        importlib.import_module("torchaudio")
    finally:
        torch.ops.load_library = former  # type: ignore[method-assign]


def _define(name: str, schema: str, answer: Any) -> None:
    """Define an operator that returns a constant."""
    torch.library.define(name, schema)
    torch.library.impl(name, "CompositeImplicitAutograd", lambda: answer)
