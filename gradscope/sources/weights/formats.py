"""The checkpoint formats of one file: safetensors and torch.save's. Nothing in them is executed."""

import argparse
import pathlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from gradscope.errors import CheckpointError
from gradscope.sources.data.readers import checkpoint_readers, is_safetensors, is_zip, matching
from gradscope.sources.weights.archives import verified_kind
from gradscope.sources.weights.trouble import STATE_DICT, damaged, reading

_TORCH_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # what torch.save began with before 1.6

# What training scripts put beside the weights, and what only holds data: a best score of numpy's,
# a random state, the parsed arguments, a path. torch itself refuses these.
_HARMLESS: list[Any] = [
    argparse.Namespace,
    pathlib.PosixPath,
    np.ndarray,
    np.dtype,
    *(getattr(np.dtypes, name) for name in np.dtypes.__all__),
    *(
        (value.__reduce__()[0], f"numpy.{core}.multiarray.{name}")
        for value, name in ((np.float64(), "scalar"), (np.zeros(1), "_reconstruct"))
        for core in ("core", "_core")
    ),
]


@checkpoint_readers.register("safetensors")
@matching(is_safetensors)
def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Named tensors and nothing else, as safetensors writes them."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    size = path.stat().st_size
    if 8 + length > size:
        raise damaged(path, f"its header claims {length:,} bytes, the file has {size:,}")
    with reading(path):
        return safetensors.torch.load_file(path, device="cpu")


@checkpoint_readers.register("torch")
@matching(is_zip)
def read_torch(path: Path) -> Any:
    """Tensors and plain containers, the zip archive that torch.save writes."""
    kind = verified_kind(path)
    if kind != "saved":
        raise CheckpointError(
            f"this is a {kind} archive, which holds a program",
            where=str(path),
            remedy="Save model.state_dict(). If you trust the file, --unsafe-pickle loads it, as "
            "weights or, with --model checkpoint, as the model.",
        )
    return _torch_load(path)


@checkpoint_readers.register("torch-legacy")
@matching(lambda head: head.startswith(_TORCH_MAGIC))
def read_torch_legacy(path: Path) -> Any:
    """Tensors and plain containers, as torch.save wrote them before torch 1.6."""
    return _torch_load(path)


@checkpoint_readers.register("pickle")
@matching(
    lambda head: (
        re.match(rb"\x80[\2-\5].{14}", head, re.DOTALL) is not None
        and not is_safetensors(head)
        and not head.startswith(_TORCH_MAGIC)
    )
)
def refuse_pickle(path: Path) -> Any:
    """Any objects, as pickle writes them: they execute code, so only with --unsafe-pickle."""
    raise CheckpointError(
        "this is a Python pickle, which could execute code and is never loaded",
        where=str(path),
        remedy=STATE_DICT,
    )


def _torch_load(path: Path) -> Any:
    # weights_only must be given: its default obeys an environment variable. An open file must be
    # given: by a path, torch goes by the suffix.
    with reading(path), path.open("rb") as file, torch.serialization.safe_globals(_HARMLESS):
        return torch.load(file, map_location="cpu", weights_only=True)
