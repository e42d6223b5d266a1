"""The checkpoint formats: safetensors, torch.save's, several files; nothing in them is executed.

Only `read_trusted` executes what a file says, and is called only if `unsafe_pickle` is given. Which
of a folder's files hold the weights is found here, too. An index.json of several is
{"weight_map": {name: file}}, as Hugging Face writes it.
"""

import argparse
import json
import pathlib
import pickle
import re
import sys
import warnings
import zipfile
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path, PureWindowsPath
from typing import Any, Literal

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from gradscope.core.filetypes import AGAIN
from gradscope.core.registry import suggestion
from gradscope.core.texts import listed
from gradscope.errors import CheckpointError, InputError
from gradscope.model.locate import first_line
from gradscope.sources.code import importable
from gradscope.sources.formats import (
    checkpoint_readers,
    distinct,
    find_reader,
    is_safetensors,
    is_zip,
    matching,
    reachable,
    reading,
    require_regular,
)

TRUSTED = ("torch", "torch-legacy", "pickle")  # what unsafe_pickle lets execute code

_TORCH_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # what torch.save began with before 1.6
_DIRECTORY = 0x10  # of a zip entry's attributes, as DOS has them
_MAX_EXPANSION = 100  # torch.save does not compress; a bomb does
_STATE_DICT = (
    "Save model.state_dict() with torch.save or safetensors, and give that file. "
    "If you trust this one, unsafe_pickle=True loads it."
)

# What training scripts put beside the weights, and what only holds data: a best score of numpy's,
# a random state, the parsed arguments, a path. torch itself refuses these.
_HARMLESS: list[Any] = [
    argparse.Namespace,
    torch.utils.data.TensorDataset,
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
            remedy="Save model.state_dict(). If you trust the file, unsafe_pickle=True loads it, "
            'as weights or, with model="checkpoint", as the model.',
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
            warnings.simplefilter("ignore")  # torch's own, by release: no code of the user's runs
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
            remedy = "Give a file of torch.save or safetensors as CHECKPOINT, and data as DATASET."
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
            # torch.export.load of 2.10 says this of its own reading
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
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


ADAPTER = "adapter_config.json"  # PEFT's
ADAPTER_WEIGHTS = "adapter_model"  # with a suffix

_NAMES = (  # Hugging Face's, in the order in which it looks for them
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_SUFFIXES = {".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".pt2"}
_OTHERS = {"optimizer", "scheduler", "rng_state", "training_args", "scaler"}  # of a trainer
_MAX_BYTES = 2**27  # the names of the largest models take a few megabytes
_AGAIN = "Download the folder again, or write it again with save_pretrained."


def table(path: Path, error: type[InputError], remedy: str, most: int = 2**24) -> dict[str, Any]:
    """Return a file's table of settings, JSON of at most so many bytes, or raise `error`."""
    with reachable(path, error):
        require_regular(path, error)
    with reachable(path, error), path.open("rb") as file:
        text = file.read(most + 1)
    try:
        content = json.loads(text, object_pairs_hook=distinct) if len(text) <= most else None
    except (ValueError, RecursionError) as failure:
        what = f"is no JSON, or ambiguous: {first_line(failure)}"
        raise error(what, where=str(path), remedy=remedy) from failure
    if not isinstance(content, dict):
        what = f"is no table of settings of at most {most:,} bytes"
        raise error(what, where=str(path), remedy=remedy)
    return content


def weights_in(folder: Path) -> Path:
    """Return the one file of a folder that holds the weights, or that lists those which do."""
    names = sorted(entry.name for entry in folder.iterdir())
    for name in _NAMES:
        if name in names:
            return folder / name
    indices = [name for name in names if name.endswith(".index.json")]
    files = [n for n in names if Path(n).suffix in _SUFFIXES and Path(n).stem not in _OTHERS]
    found = indices or files
    if ".metadata" in names and any(name.endswith(".distcp") for name in names):
        what = "this is a distributed checkpoint; its metadata are a pickle, which is never loaded"
        tool = "python -m torch.distributed.checkpoint.format_utils"
        remedy = f"Convert it: {tool} dcp_to_torch FOLDER OUT.pt"
    elif ADAPTER in names and (own := [n for n in files if Path(n).stem == ADAPTER_WEIGHTS]):
        return folder / own[0]  # of two, .bin and .safetensors, the older form comes first
    elif "data.pkl" in names:
        what = "this is an unpacked archive of torch.save"
        remedy = "Pack it again, or give the file as it was."
    elif len(found) == 1:
        return folder / found[0]
    elif not found:
        held = f"it holds: {listed(names)}" if names else "it is empty"
        what, remedy = f"no weights are in this folder; {held}", "Give the file itself."
    elif any("-of-" in name for name in found):
        what = f"the index.json that lists the parts of the checkpoint is missing: {listed(found)}"
        remedy = "Download the folder again, index included."
    else:
        what, remedy = f"several files may be meant: {listed(found)}", "Give one of them."
    raise CheckpointError(what, where=str(folder), remedy=remedy)


@checkpoint_readers.register("index")
@matching(
    lambda head: (
        re.match(rb'(\xef\xbb\xbf)?\s*\{\s*"', head) is not None
        and b"\0" not in head[:8]  # as in safetensors
        and b'"weight_map"' in head
    )
)
def read_index(path: Path) -> dict[str, Tensor]:
    """Tensors in several files that an index.json lists, as Hugging Face writes them."""
    content: dict[str, Tensor] = {}
    for file, names in _shards(path).items():
        shard = path.parent / file
        reader = find_reader(checkpoint_readers, shard, CheckpointError)
        if reader == "index":
            raise _wrong(f"{shard.name} is itself an index")
        with reading(CheckpointError, shard):
            held = checkpoint_readers.get(reader)(shard)
        if not isinstance(held, Mapping) or not all(isinstance(v, Tensor) for v in held.values()):
            raise _wrong(f"{shard.name} holds something other than named tensors")
        absent = [name for name in names if name not in held]
        if absent:
            count = f"{len(absent)} tensors that it lists in {file}"
            raise _wrong(f"{count} are not there: {listed(absent)}")
        twice = [name for name in held if name in content]
        if twice:
            raise _wrong(f"{len(twice)} tensors are in more than one file: {listed(twice)}")
        content.update(held)
    return content


def files_of(path: Path) -> tuple[Path, ...]:
    """Return all files that an index stands for, itself first."""
    return (path, *(path.parent / file for file in _shards(path)))


def _shards(path: Path) -> dict[str, list[str]]:
    """Return {file: the names listed in it}, the files in order."""
    shards: dict[str, list[str]] = {}
    for name, file in _table(path).items():
        place = PureWindowsPath(str(file))  # whatever system it was written on
        inside = not place.drive and not place.root and ".." not in place.parts
        if not isinstance(file, str) or not file.isprintable() or not (inside and place.parts):
            raise _wrong(f"{name!r} is in {file!r}, which is no file of its own folder")
        shards.setdefault(file, []).append(name)
    with reachable(path, CheckpointError):
        absent = [file for file in shards if not (path.parent / file).exists()]
    if absent:
        beside = sorted(p.name for p in path.parent.iterdir() if p != path)
        hint = suggestion(absent[0], beside).replace("Supported", "The folder holds")
        count = f"{len(absent)} of its {len(shards)} files"
        raise _wrong(f"{count} are missing: {listed(absent)}", hint)
    return dict(sorted(shards.items()))


def _table(path: Path) -> Mapping[str, Any]:
    if path.stat().st_size > _MAX_BYTES:
        raise _wrong(f"it is larger than {_MAX_BYTES:,} bytes")
    try:
        content = json.loads(path.read_bytes(), object_pairs_hook=distinct)
    except RecursionError as error:
        raise _wrong("it is nested too deeply") from error
    except ValueError as error:  # not JSON, not UTF-8, a key twice
        raise _wrong(f"it cannot be read: {error}") from error
    table = content.get("weight_map")
    if not isinstance(table, dict) or not table:
        raise _wrong(
            "it is JSON without a table `weight_map`, so no index of a checkpoint",
            "Give the file with the weights, or the folder that holds it.",
        )
    return table


def _wrong(what: str, remedy: str = _AGAIN) -> CheckpointError:
    return CheckpointError(f"the index is wrong: {what}", remedy=remedy)
