"""Torchvision: every registered model that is small, or has a small setting, at 64×64 pixels."""

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.zoo.groups.inputs import Make, Shape, maker, runnable, small
from benchmarks.zoo.libraries import load
from benchmarks.zoo.subject import Subject

_MOST = 30_000_000
_DRAWN = ("rcnn", "fcos", "retinanet", "ssd", "ssdlite")  # detectors: their boxes need nms


def names(heads: bool = False, wanted: Any = None) -> list[str]:
    """Return the registered models."""
    models = load("torchvision").models
    return [n for n in models.list_models() if not any(word in n for word in _DRAWN)]


def build(name: str) -> Subject:
    """Return a model with random weights. Vision transformers are narrow."""
    models = load("torchvision").models

    def made() -> torch.nn.Module:
        if name.startswith("vit_"):
            patch = int(name.rpartition("_")[2])
            return models.VisionTransformer(64, patch, 2, 4, 32, 64, num_classes=5)
        options: dict[str, Any] = {} if "raft" in name else {"num_classes": 5}
        if any(word in name for word in ("deeplab", "fcn", "lraspp")):
            options["weights_backbone"] = None
        return models.get_model(name, weights=None, **options)

    model = small(made, _MOST)
    return Subject(model, runnable(model, _makes(name)))


def _makes(name: str) -> Iterator[Make]:
    if "raft" in name:
        pair = {"image1": Shape("real", (3, 128, 128)), "image2": Shape("real", (3, 128, 128))}
        yield maker(pair, {"num_flow_updates": 2})
        return
    videos = any(word in name for word in ("r3d", "mc3", "r2plus1d", "s3d", "mvit", "swin3d"))
    for side in (64, 128, 224, 299):
        size = (3, 16 if "mvit" in name else 14 if "s3d" in name else 4, side, side)
        shape = Shape("real", size if videos else (3, side, side))
        make = maker({"x": shape})
        yield lambda seed, n, make=make: make(seed, n)["x"]
