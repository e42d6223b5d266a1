"""What runs in processes of its own: a model's files are written, answers are compared."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks.architectures.cases import ARCHITECTURES

_ROWS = 4  # parameters whose rows are compared
_SMALL = 2**20  # entries of these at most
_NOTHING = 1e-5


Found = dict[str, Any]


def write(name: str, folder: Path) -> None:
    """Write weights, data, a description of the data, and which rows are to be compared."""
    torch.manual_seed(0)
    case = ARCHITECTURES[name]
    case.save(folder)
    inputs, targets = case.data()
    arrays = {key: value.numpy() for key, value in inputs.items()} | {"targets": targets.numpy()}
    np.savez(folder / "data.npz", **arrays)  # type: ignore[arg-type]
    order = json.dumps([*inputs])
    (folder / "data.toml").write_text(f'path = "data.npz"\ninputs = {order}\n')
    model = case.load(folder, torch.float32)
    sizes = {k: p.numel() for k, p in model.named_parameters() if p.requires_grad}
    small = [key for key, size in sizes.items() if size <= _SMALL]
    picked = [small[k * (len(small) - 1) // (_ROWS - 1)] for k in range(_ROWS)]
    count, n = sum(sizes.values()), len(targets)
    content = {"names": picked, "count": count, "samples": n}
    (folder / "rows.json").write_text(json.dumps(content))


def compared(name: str, folder: Path, rows: list[str]) -> Found:
    """Return the largest relative errors: the command's, and those of a loop in float32."""
    exact = alone(name, folder, rows, torch.float64)
    rounded = alone(name, folder, rows, torch.float32)
    worst = largest(_written(folder, rows), exact)
    return {"error": worst[0], "at": worst[1], "float32": largest(rounded, exact)[0]}


def on_its_sides(name: str, folder: Path, rows: list[str]) -> Found:
    """Return the command's error to float64 with each ReLU on the side on which float32 has it."""
    model, (arrays, _) = ARCHITECTURES[name].load(folder, torch.float32), given(folder)
    with torch.no_grad(), Sides() as sides:
        model(*arrays.values())
    if not sides.seen:
        return {}
    exact = alone(name, folder, rows, torch.float64, sides.seen)
    return {"held": largest(_written(folder, rows), exact)[0]}


def _written(folder: Path, rows: list[str]) -> "Answer":
    import gradscope

    with gradscope.open(folder / "norms.h5") as file, gradscope.open(folder / "rows.h5") as other:
        norms = {key: file.norms[key][:] for key in file.parameters}
        return norms, {key: other.chains[0][key][:] for key in rows}


def given(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], Tensor]:
    """Return the inputs by name, and the targets."""
    data = np.load(folder / "data.npz")
    arrays = {key: torch.from_numpy(data[key]) for key in data.files}
    arrays = {k: v.to(dtype) if v.is_floating_point() else v for k, v in arrays.items()}
    return arrays, arrays.pop("targets")


class Wide(TorchFunctionMode):
    """Let a model in float64 stay so where it asks for float32, as transformers' norms do."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Ask for float64 instead."""
        func = torch.Tensor.double if func is torch.Tensor.float else func
        named = {k: _wide(v) for k, v in (kwargs or {}).items()}
        return func(*(_wide(v) for v in args), **named)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


class Sides(TorchFunctionMode):
    """Keeps on which side of its kink each ReLU stands, or puts it there.

    Of millions of inputs a few lie nearer to 0 than float32 tells: its derivative there is that of
    either side, and both are right. At the other side's, the gradient is another one by far more
    than rounding.
    """

    def __init__(self, kept: list[Tensor] | None = None, sample: int = 0) -> None:
        super().__init__()
        self.seen: list[Tensor] = []  # of each call, (n, ...) bool
        self._kept, self._sample = iter(kept or []), sample
        self._puts = kept is not None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Keep the side of a ReLU's input, or take the side that was kept."""
        if func not in (F.relu, torch.relu, torch.relu_, torch.Tensor.relu):
            return func(*args, **(kwargs or {}))
        if self._puts:
            return args[0] * next(self._kept)[self._sample, None]
        self.seen.append(args[0] > 0)
        return func(*args, **(kwargs or {}))


Answer = tuple[dict[str, Any], dict[str, Any]]  # {parameter: (n,)}, {parameter: (n, *shape)}


def alone(
    name: str,
    folder: Path,
    rows: list[str],
    dtype: torch.dtype,
    sides: list[Tensor] | None = None,
) -> Answer:
    """Return norms and rows of batches of one; of a gradient no more is kept than is needed.

    Float64 is so throughout, whatever the model casts to; ReLUs stand on their `sides`, if given.
    """
    case = ARCHITECTURES[name]
    model = case.load(folder, dtype)
    arrays, targets = given(folder, dtype)
    own = {key: p for key, p in model.named_parameters() if p.requires_grad}
    norms = {key: np.zeros(len(targets)) for key in own}
    kept = {key: np.zeros((len(targets), *own[key].shape)) for key in rows}

    def watch(key: str, i: list[int]) -> Any:
        def hook(p: Tensor) -> None:
            if p.grad is None:
                return
            gradient = p.grad.to_dense()
            norms[key][i[0]] = torch.linalg.vector_norm(gradient, dtype=torch.float64).item()
            if key in kept:
                kept[key][i[0]] = gradient.numpy()
            p.grad = None

        return hook

    current = [0]
    for key, p in own.items():
        p.register_post_accumulate_grad_hook(watch(key, current))
    for i in range(len(targets)):
        current[0] = i
        with ExitStack() as stack:
            if dtype == torch.float64:
                stack.enter_context(Wide())
            if sides is not None:
                stack.enter_context(Sides(sides, i))
            outputs = model(*(value[i : i + 1] for value in arrays.values()))
            case.alone(outputs, targets[i : i + 1]).backward()
    return norms, kept


def largest(found: Answer, exact: Answer) -> tuple[float, str]:
    """Return the largest relative error of a norm, or of a row by its norm, and where it is.

    Errors are relative to the norm, or to `_NOTHING` of that of the sample's whole gradient where
    this is more: a gradient that is zero in exact numbers (of a key's bias) has only rounding.
    """
    assert found[0].keys() == exact[0].keys(), "other parameters than the model's own"
    worst = (0.0, "")
    whole = np.linalg.norm([*exact[0].values()], axis=0)
    for key, right_norms in exact[0].items():
        base = np.maximum(right_norms, _NOTHING * whole)
        error = np.abs(found[0][key] - right_norms) / base
        worst = max(worst, (float(error.max()), key))
        if key in exact[1]:
            apart_by = (found[1][key] - exact[1][key]).reshape(len(base), -1)
            error = np.linalg.norm(apart_by, axis=1) / base
            worst = max(worst, (float(error.max()), f"rows of {key}"))
    return worst
