"""The unit and the floors: rows that do no task, but say what the others are measured by."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.methods.base import Call, DeclinedError, Method, Setting, plain

_CHUNK = 2**22  # numbers written at a time


def _plain(task: str, setting: Setting) -> Call:
    return Call(plain(setting.workload))


def _floor(task: str, setting: Setting) -> Call:
    """Prepare the plain pass and the writing of n·P numbers: what no method can avoid."""
    workload = setting.workload
    if task == "gradients":
        return Call(_filling(workload.n * workload.parameters, plain(workload), workload.device))
    if task == "file":
        path = setting.scratch / "raw.bin"
        setting.stack.callback(path.unlink, missing_ok=True)

        def fresh() -> None:
            path.unlink(missing_ok=True)

        count = workload.file_batches
        storing = _storing(workload.n * workload.parameters, count, plain(workload), path)
        return Call(storing, fresh, batches=count)
    raise DeclinedError("none is defined for this task")


def _filling(
    numbers: int, unit: Callable[[], tuple[Tensor, ...]], device: torch.device
) -> Callable[[], Tensor]:
    buffer = torch.zeros(numbers, device=device)

    def run() -> Tensor:
        unit()
        return buffer.fill_(1.5)

    return run


def _storing(
    numbers: int, batches: int, unit: Callable[[], tuple[Tensor, ...]], path: Path
) -> Callable[[], Path]:
    chunk = torch.randn(min(numbers, _CHUNK)).numpy()

    def run() -> Path:
        with path.open("wb", buffering=0) as file:
            for _ in range(batches):
                unit()
                for start in range(0, numbers, len(chunk)):
                    file.write(chunk[: numbers - start].tobytes())
            os.fsync(file.fileno())
        return path

    return run


METHODS = (
    Method("plain backward", _plain, comparable=False),
    Method("floor", _floor, comparable=False),
)
