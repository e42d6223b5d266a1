"""timm: the smallest models of each of its modules, at few pixels; with `heads`, every model."""

import re
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.zoo.groups.inputs import Make, Shape, maker, runnable, small
from benchmarks.zoo.libraries import load
from benchmarks.zoo.subject import NotBuiltError, Subject

_EACH = 4  # models of a module
_SMALL = (
    "test_", "atto", "femto", "pico", "zepto", "nano", "xxs", "xxtiny", "_xx", "xs", "tiny", "_t0",
    "_t1", "small", "_s_", "_s0", "_s1", "_s2", "_s3", "mini", "_t", "_s", "_050", "_035", "_025",
    "_a0", "_b0", "_m0", "10t", "14t", "18", "26t", "lite0", "_002", "_004", "_m", "_b1", "34",
    "50", "_b",
)  # fmt: skip


def names(heads: bool = False, wanted: Any = None) -> list[str]:
    """Return the names that promise the smallest models, some of each module, or all."""
    timm = load("timm")
    if heads:
        return list(timm.list_models())
    found = []
    for module in timm.list_modules():
        models = sorted(timm.list_models(module=module), key=_rank)
        found += models[:_EACH]
    return list(dict.fromkeys(found))


def _rank(name: str) -> tuple[int, int, str]:
    rank = next((k for k, word in enumerate(_SMALL) if word in name), len(_SMALL))
    return rank, len(re.sub(r"\d{3}$", "", name)), name


def build(name: str) -> Subject:
    """Return the model at the smallest image it takes."""
    timm = load("timm")
    reasons = []
    for options in ({"img_size": 64}, {"img_size": 128}, {}, {"img_size": 224}):
        try:

            def made(options: dict[str, int] = options) -> torch.nn.Module:
                return timm.create_model(name, pretrained=False, num_classes=5, **options)

            model = small(made)
            return Subject(model, runnable(model, _makes(model, options.get("img_size"))))
        except Exception as error:  # models raise any class of error here
            reasons.append(f"{options}: {type(error).__name__}: {error}")
            if isinstance(error, NotBuiltError) and "parameters" in str(error):
                break
    raise NotBuiltError("; ".join(reasons))


def _makes(model: torch.nn.Module, side: int | None) -> Iterator[Make]:
    channels = getattr(model, "default_cfg", {}).get("input_size", (3, 224, 224))
    for size in [side] if side else [64, 96, 128, channels[1]]:
        make = maker({"x": Shape("real", (channels[0], size, size))})
        yield lambda seed, n, make=make: make(seed, n)["x"]
