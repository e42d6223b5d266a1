"""What tools that return all gradients make of them, in torch: each task the fastest plain way."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor

from benchmarks.methods.base import Call, DeclinedError, Setting, nothing
from benchmarks.reference import Reference, Result
from benchmarks.tasks import DIMENSIONS, prefixed

Dense = Mapping[str, Tensor]

_BLOCK = 2**14  # rows of the projection's matrix that are made at a time
_KEPT = 2**28  # bytes of a matrix that is made once and kept


def norms(gradients: Dense) -> Dense:
    """Return ‖gᵢ‖ (n,)."""
    each = [g.flatten(1).norm(dim=1) for g in gradients.values()]
    return {"norms": torch.stack(each).norm(dim=0)}


def moments(gradients: Dense, total: Dense | None = None) -> Dense:
    """Return mean and second moment; from Σᵢ gᵢ where the tool has that anyway."""
    n = next(iter(gradients.values())).shape[0]
    mean = (
        {k: g.mean(0) for k, g in gradients.items()}
        if total is None
        else {k: g / n for k, g in total.items()}
    )
    return prefixed(mean=mean, second={k: g.square().mean(0) for k, g in gradients.items()})


def clipped(gradients: Dense, max_norm: float) -> Dense:
    """Return the mean of the clipped gradients."""
    factors = (max_norm / norms(gradients)["norms"]).clamp(max=1.0)
    factors = factors / factors.shape[0]
    return {k: (factors @ g.flatten(1)).view(g.shape[1:]) for k, g in gradients.items()}


class Projection:
    """g ↦ g R with random signs R / √k, made block by block as TRAK's plain projector does.

    R is kept if it is small, and made anew for each call if not. Its rows go by the parameters'
    sorted names: a tool may hand them out in an order of its own.
    """

    def __init__(self, parameters: int, device: torch.device) -> None:
        self.parameters, self.device = parameters, device
        kept = 4 * parameters * DIMENSIONS <= _KEPT
        self._stored = list(self._made()) if kept else None

    def __call__(self, gradients: Dense) -> dict[str, Tensor]:
        """Return {"projection": (n, k)}."""
        flat = torch.cat([gradients[name].flatten(1) for name in sorted(gradients)], 1)
        result = flat.new_zeros(flat.shape[0], DIMENSIONS)
        start = 0
        for block in self._stored or self._made():
            part = flat[:, start : start + len(block)]
            result.addmm_(part, block.to(flat.dtype))
            start += len(block)
        return {"projection": result}

    def _made(self) -> Iterator[Tensor]:
        generator = torch.Generator(self.device).manual_seed(0)
        for start in range(0, self.parameters, _BLOCK):
            size = (min(_BLOCK, self.parameters - start), DIMENSIONS)
            bits = torch.randint(
                0, 2, size, dtype=torch.int8, generator=generator, device=self.device
            )
            yield bits.float().mul_(2).sub_(1).div_(DIMENSIONS**0.5)


def write(batches: Iterable[Dense], count: int, path: Path) -> Path:
    """Write `count` batches {name: (n, *shape)} as contiguous HDF5 datasets, down to the disk."""
    with h5py.File(path, "w") as file:
        for k, gradients in enumerate(batches):
            for name, gradient in gradients.items():
                n, *shape = gradient.shape
                if not k:
                    file.create_dataset(name, (count * n, *shape), np.float32)
                rows = np.ascontiguousarray(gradient.cpu().numpy())
                file[name].write_direct(rows, dest_sel=np.s_[k * n : (k + 1) * n])
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return path


def read(path: Path) -> dict[str, Tensor]:
    """Return what `write` wrote."""
    with h5py.File(path) as file:
        found: dict[str, Tensor] = {}

        def visit(name: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset):
                found[name] = torch.from_numpy(item[()])

        file.visititems(visit)
        return found


def call(
    task: str,
    setting: Setting,
    gradients: Callable[[], Dense],
    *,
    before: Callable[[], object] = nothing,
    total: Callable[[], Dense] | None = None,
) -> Call:
    """Return the call for a task, for a tool that returns all gradients.

    Args:
        task: Its name.
        setting: The setting.
        gradients: Returns {name: (n, *shape)}.
        before: What must be done before each call, untimed.
        total: Returns Σᵢ gᵢ, if the tool has it as a by-product.
    """
    if task == "gradients":
        return Call(gradients, before)
    if task == "norms":
        return Call(lambda: norms(gradients()), before)
    if task == "moments":
        return Call(lambda: moments(gradients(), total and total()), before)
    if task == "clipped":
        return Call(lambda: clipped(gradients(), setting.max_norm), before)
    if task == "projection":
        return _projecting(setting, gradients, before)
    if task == "file":
        return _writing(setting, gradients, before)
    raise DeclinedError("it has no way to do this")


def _projecting(
    setting: Setting, gradients: Callable[[], Dense], before: Callable[[], object]
) -> Call:
    project = Projection(setting.workload.parameters, setting.workload.device)

    def expected(reference: Reference) -> Result:
        return project(reference.gradients)

    return Call(lambda: project(gradients()), before, expected=expected)


def _writing(
    setting: Setting, gradients: Callable[[], Dense], before: Callable[[], object]
) -> Call:
    path, count = setting.scratch / "dense.h5", setting.workload.file_batches

    def batches() -> Iterator[Dense]:
        for _ in range(count):
            before()
            yield gradients()

    setting.stack.callback(path.unlink, missing_ok=True)
    return Call(
        lambda: write(batches(), count, path),
        lambda: path.unlink(missing_ok=True),
        read,
        batches=count,
    )
