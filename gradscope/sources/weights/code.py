"""Checkpoints that can execute code as they are loaded: read only where the user said so.

Nothing here is imported or called unless `unsafe_pickle` is given.
"""

import pickle
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradscope.core.locate import first_line
from gradscope.errors import CheckpointError
from gradscope.sources.code import importable
from gradscope.sources.weights.archives import verified_kind
from gradscope.sources.weights.trouble import reading


def read_trusted(path: Path, name: str) -> Any:
    """Return what a file holds, executing whatever it says.

    A TorchScript or torch.export archive becomes the module it holds.

    Args:
        path: A file that the user trusts.
        name: The reader for it: "torch", "torch-legacy" or "pickle".

    Raises:
        CheckpointError: It is damaged, or needs classes that are not there.
    """
    kind = verified_kind(path) if name == "torch" else "saved"
    with reading(path), _executing(path), path.open("rb") as file:
        if kind == "TorchScript":
            return torch.jit.load(file, map_location="cpu")  # type: ignore[no-untyped-call]
        if kind == "torch.export":
            return _program(path, torch.export.load(file))
        if name == "pickle":
            return pickle.load(file)
        return torch.load(file, map_location="cpu", weights_only=False)


def _program(path: Path, program: torch.export.ExportedProgram) -> nn.Module:
    """Return an exported program as a module, if it takes batches of any size."""
    inputs = set(program.graph_signature.user_inputs)
    values = [n.meta.get("val") for n in program.graph.nodes if n.name in inputs]
    sizes = [v.shape[0] for v in values if isinstance(v, torch.Tensor) and v.dim()]
    if sizes and all(isinstance(size, int) for size in sizes):
        raise CheckpointError(
            f"this program was exported for batches of {sizes[0]} only",
            where=str(path),
            remedy="Export it with dynamic_shapes: the first axis of its inputs Dim.DYNAMIC.",
        )
    return program.module()


@contextmanager
def _executing(path: Path) -> Iterator[None]:
    """What the file's code prints goes to stderr; what it raises becomes a `CheckpointError`."""
    try:
        with redirect_stdout(sys.stderr), importable(Path.cwd()), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit's own
            yield
    except SystemExit as error:
        raise CheckpointError(
            f"its code called sys.exit({error.code!r})",
            where=str(path),
            remedy="Save model.state_dict() instead.",
        ) from error
    except (AttributeError, ImportError) as error:
        raise CheckpointError(
            f"what was pickled needs a name that is not here: {first_line(error)}",
            where=str(path),
            remedy="Pickled objects are found by module and name: run in the folder of that "
            "module. Better save model.state_dict(), which needs no names.",
        ) from error
