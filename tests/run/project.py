"""A small model of its own folder, whose forward pass can run out of memory on purpose."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gradscope.config import RunSpec, resolve

SAMPLES, WIDTH = 60, 5

RUN = """
[model]
factory = "model.py:build"
[checkpoint]
path = "weights.pt"
[dataset]
path = "data.npz"
[loss]
name = "{loss}"
"""
MODEL = '''
import torch
from torch import nn

ERRORS = {
    "torch": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "python": MemoryError(),
    "allocator": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 99999999 bytes. Error code 12 (Cannot allocate memory)"
    ),
}


class Limited(nn.Module):
    """Two layers that raise for more than `limit` samples; `wide` numbers a sample in between."""

    def __init__(self, limit, kind, wide):
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 1)
        self.limit, self.kind, self.wide = limit, kind, wide

    def forward(self, x):
        if len(x) > self.limit:
            raise ERRORS[self.kind]
        hidden = self.first(x).tanh()
        if self.wide:
            hidden = hidden * hidden.repeat(1, self.wide).cos().mean(1, keepdim=True)
        return self.last(hidden).squeeze(1)


def build(limit=10**9, kind="torch", wide=0):
    return Limited(limit, kind, wide)


def loss(outputs, targets):
    return (outputs - targets).square() + outputs.cos()


def weighted(outputs, targets):
    return targets * outputs.cos()
'''


def write(folder: Path, samples: int = SAMPLES) -> Path:
    """Write model, weights and data, the same numbers every time."""
    generator = torch.Generator().manual_seed(0)
    (folder / "model.py").write_text(MODEL)
    layers = nn.ModuleDict({"first": nn.Linear(WIDTH, 4), "last": nn.Linear(4, 1)})
    state = {
        name: torch.randn(value.shape, generator=generator)
        for name, value in layers.state_dict().items()
    }
    torch.save(state, folder / "weights.pt")
    np.savez(
        folder / "data.npz",
        inputs=torch.randn(samples, WIDTH, generator=generator).numpy(),
        targets=torch.randn(samples, generator=generator).numpy(),
    )
    return folder


def spec(
    folder: Path, kwargs: dict[str, Any] | None = None, loss: str = "loss", **compute: Any
) -> RunSpec:
    """Return the run of that folder."""
    return resolve(
        None,
        {
            "model": {"factory": f"{folder}/model.py:build", "kwargs": kwargs or {}},
            "checkpoint": {"path": folder / "weights.pt"},
            "dataset": {"path": folder / "data.npz"},
            "loss": {"name": f"{folder}/model.py:{loss}"},
            "compute": {"dtype": "float64"} | compute,
        },
    )


def expected(folder: Path) -> dict[str, np.ndarray]:
    """Every sample's gradient in closed form, by numpy alone."""
    stored = torch.load(folder / "weights.pt", weights_only=True)
    state = {name: value.double().numpy() for name, value in stored.items()}
    with np.load(folder / "data.npz") as data:
        x, y = (data[name].astype(np.float64) for name in ("inputs", "targets"))
    hidden = np.tanh(x @ state["first.weight"].T + state["first.bias"])
    outputs = (hidden @ state["last.weight"].T + state["last.bias"])[:, 0]
    slope = 2 * (outputs - y) - np.sin(outputs)
    inner = slope[:, None] * state["last.weight"] * (1 - hidden**2)
    return {
        "first.weight": inner[:, :, None] * x[:, None, :],
        "first.bias": inner,
        "last.weight": (slope[:, None] * hidden)[:, None, :],
        "last.bias": slope[:, None],
    }
