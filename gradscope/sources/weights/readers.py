"""The checkpoint formats of one file, safetensors and torch.save's. Nothing in them is executed.

Only `read_trusted` executes what a file says, and is called only if `unsafe_pickle` is given.
"""

import argparse
import pathlib
import pickle
import re
import sys
import warnings
import zipfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.torch
import torch
from torch import nn

from gradscope.core.locate import first_line
from gradscope.errors import CheckpointError
from gradscope.sources.code import importable
from gradscope.sources.formats import AGAIN, checkpoint_readers, is_safetensors, is_zip, matching

TRUSTED = ("torch", "torch-legacy", "pickle")  # what unsafe_pickle lets execute code

_TORCH_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # what torch.save began with before 1.6
_DIRECTORY = 0x10  # of a zip entry's attributes, as DOS has them
_MAX_EXPANSION = 100  # torch.save does not compress; a bomb does
_STATE_DICT = (
    "Save model.state_dict() with torch.save or safetensors, and give that file. "
    "If you trust this one, --unsafe-pickle loads it."
)

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

# torch's unpickler names what it refuses in one of these ways
_REFUSED = re.compile(
    r"GLOBAL (?P<g>\S+)|unrecognized function (?P<f>.+)|but got (?P<c><class .+>)"
    r"|(?P<m>\S+) must be imported to load"
)


@checkpoint_readers.register("safetensors")
@matching(is_safetensors)
def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Named tensors and nothing else, as safetensors writes them."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    size = path.stat().st_size
    if 8 + length > size:
        raise _damaged(f"its header claims {length:,} bytes, the file has {size:,}")
    return safetensors.torch.load_file(path, device="cpu")


@checkpoint_readers.register("torch")
@matching(is_zip)
def read_torch(path: Path) -> Any:
    """Tensors and plain containers, the zip archive that torch.save writes."""
    kind = _verified_kind(path)
    if kind != "saved":
        raise CheckpointError(
            f"this is a {kind} archive, which holds a program",
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
    what = "this is a Python pickle, which could execute code and is never loaded"
    raise CheckpointError(what, remedy=_STATE_DICT)


def _torch_load(path: Path) -> Any:
    try:
        # weights_only must be given: its default obeys an environment variable. An open file must
        # be given: by a path, torch goes by the suffix.
        with (
            path.open("rb") as file,
            torch.serialization.safe_globals(_HARMLESS),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", "Validating sparse")  # that it does is as well
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        refused = _REFUSED.search(str(error))
        if refused is not None:
            name = next(text for text in refused.groups() if text)
            raise CheckpointError(
                f"it holds more than tensors: {name}. Such a file can execute code and is not "
                "loaded",
                remedy=_STATE_DICT,
            ) from error
        if isinstance(error, pickle.UnpicklingError):
            # torch's own text advises to switch its protection off
            reason = "its pickled part cannot be read without executing code, or not at all"
            raise _damaged(reason) from error
        raise


def _verified_kind(path: Path) -> Literal["saved", "TorchScript", "torch.export"]:
    """Return what of torch's wrote a zip archive, every part of which has its checksum."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        names = [entry.filename for entry in entries]
        inner = {name.partition("/")[2] for name in names}
        program = any("models/" in name or name.endswith("archive_format") for name in names)
        script = any(name.startswith("code/") for name in inner) or "constants.pkl" in inner
        if not (script or program or "data.pkl" in inner):
            found = "zip archive without tensors of torch.save"
            if any(name.endswith(".npy") for name in names):
                found = "numpy .npz file: data, not weights"
            remedy = "Give a file of torch.save or safetensors."
            raise CheckpointError(f"this is a {found}", remedy=remedy)
        if len(set(names)) < len(names):
            raise _damaged("several of its parts have one name")
        claimed = sum(entry.file_size for entry in entries)
        if claimed > _MAX_EXPANSION * path.stat().st_size:
            raise _damaged(f"its parts claim {claimed:,} bytes in all")
        empty = [e.filename for e in entries if e.file_size and e.external_attr & _DIRECTORY]
        if empty:  # torch takes these for folders, and leaves the tensor's memory as it was
            raise _damaged(f"its part {empty[0]!r} is marked as a folder")
        broken = archive.testzip()  # torch itself loads a flipped bit without a word
        if broken is not None:
            raise _damaged(f"the checksum of its part {broken!r} is wrong")
    return "TorchScript" if script else "torch.export" if program else "saved"


def _damaged(reason: str) -> CheckpointError:
    return CheckpointError(f"the file is damaged or cut off: {reason}", remedy=AGAIN)


def read_trusted(path: Path, name: str) -> Any:
    """Return what a file holds that the user trusts, executing whatever it says.

    `name` is the reader for it, one of `TRUSTED`. A TorchScript or torch.export archive becomes
    the module it holds.
    """
    kind = _verified_kind(path) if name == "torch" else "saved"
    try:  # what the file's code prints goes to stderr
        with (
            path.open("rb") as file,
            redirect_stdout(sys.stderr),
            importable(Path.cwd()),
            warnings.catch_warnings(),
        ):
            for deprecated in (DeprecationWarning, FutureWarning):  # torch.jit, by release
                warnings.simplefilter("ignore", deprecated)
            if kind == "TorchScript":
                return torch.jit.load(file, map_location="cpu")  # type: ignore[no-untyped-call]
            if kind == "torch.export":
                return _program(torch.export.load(file))
            if name == "pickle":
                return pickle.load(file)
            return torch.load(file, map_location="cpu", weights_only=False)
    except SystemExit as error:
        what, remedy = f"its code called sys.exit({error.code!r})", "Save model.state_dict()."
        raise CheckpointError(what, remedy=remedy) from error
    except (AttributeError, ImportError) as error:
        raise CheckpointError(
            f"what was pickled needs a name that is not here: {first_line(error)}",
            remedy="Pickled objects are found by module and name: run in the folder of that "
            "module. Better save model.state_dict(), which needs no names.",
        ) from error


def _program(program: torch.export.ExportedProgram) -> nn.Module:
    """Return an exported program as a module, if it takes batches of any size."""
    inputs = set(program.graph_signature.user_inputs)
    values = [n.meta.get("val") for n in program.graph.nodes if n.name in inputs]
    sizes = [v.shape[0] for v in values if isinstance(v, torch.Tensor) and v.dim()]
    if sizes and all(isinstance(size, int) for size in sizes):
        raise CheckpointError(
            f"this program was exported for batches of {sizes[0]} only",
            remedy="Export it with dynamic_shapes: the first axis of its inputs Dim.DYNAMIC.",
        )
    return program.module()
