"""Checkpoint formats: safetensors, torch.save and several files. No code in them is executed.

Only `read_trusted` can execute code of a file, and only with `unsafe_pickle`. This module also
finds the files with weights in a folder. An index.json of several files is
{"weight_map": {name: file}}, the format of Hugging Face.
"""

import argparse
import json
import pathlib
import pickle
import re
import sys
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path, PureWindowsPath
from types import ModuleType
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
from gradscope.sources.code import importable, load_value
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
from gradscope.sources.training import definitions

TRUSTED = ("torch", "torch-legacy", "pickle")  # formats that can execute code with unsafe_pickle

_TORCH_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # first bytes of torch.save before 1.6
_DIRECTORY = 0x10  # the DOS attribute of a directory in a zip entry
_MAX_EXPANSION = 100  # torch.save does not compress, a zip bomb does
_STATE_DICT = (
    "Save model.state_dict() with torch.save or safetensors, and give that file. "
    "If you trust this one, unsafe_pickle=True loads it."
)

_GENERATORS = [
    np.random.Generator(getattr(np.random, name)())
    for name in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
]
# Types that training scripts save with the weights and that have only data: a numpy score, a random
# generator, parsed arguments, a path. torch refuses them by default.
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
    *(type(each) for each in (np.random.RandomState(), *_GENERATORS)),
    *(type(each.bit_generator) for each in _GENERATORS),
    *(each.__reduce__()[0] for each in (np.random.RandomState(), *_GENERATORS)),
    *(each.bit_generator.__reduce__()[0] for each in _GENERATORS),
    np.random.SeedSequence,
    np.random.SeedSequence().__reduce__()[0],
]

# the forms in which torch's unpickler names a refused type
_REFUSED = re.compile(
    r"GLOBAL (?P<g>\S+)|unrecognized function (?P<f>.+)|but got (?P<c><class .+>)"
    r"|(?P<m>\S+) must be imported to load"
)


@checkpoint_readers.register("safetensors")
@matching(is_safetensors)
def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Named tensors of a safetensors file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    size = path.stat().st_size
    if 8 + length > size:
        raise _damaged(f"its header declares {length:,} bytes, but the file has {size:,}")
    return safetensors.torch.load_file(path, device="cpu")


@checkpoint_readers.register("torch")
@matching(is_zip)
def read_torch(path: Path) -> Any:
    """Tensors and plain containers in a zip archive of torch.save."""
    kind = _verified_kind(path)
    if kind != "saved":
        raise CheckpointError(
            f"this is a {kind} archive with a program",
            remedy="Save model.state_dict(). If you trust the file, load it with "
            'unsafe_pickle=True, as weights, or as the model with model="checkpoint".',
        )
    return _torch_load(path)


@checkpoint_readers.register("torch-legacy")
@matching(lambda head: head.startswith(_TORCH_MAGIC))
def read_torch_legacy(path: Path) -> Any:
    """Tensors and plain containers in a file of torch.save before torch 1.6."""
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
    """Any objects in a pickle file, which executes code: only with --unsafe-pickle."""
    what = "this is a Python pickle, which could execute code and is never loaded"
    raise CheckpointError(what, remedy=_STATE_DICT)


def _torch_load(path: Path) -> Any:
    try:
        # Pass weights_only: an environment variable changes its default. Pass an open file: with a
        # path, torch reads the suffix.
        with (
            path.open("rb") as file,
            torch.serialization.safe_globals(_HARMLESS),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # torch's warnings; no user code runs here
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        refused = _REFUSED.search(str(error))
        if refused is not None:
            name = next(text for text in refused.groups() if text)
            raise CheckpointError(
                f"it has values that are not tensors: {name}. The file could execute code and is "
                "not loaded",
                remedy=_STATE_DICT,
            ) from error
        if isinstance(error, pickle.UnpicklingError):
            # torch's message advises to disable its protection
            reason = "its pickled part is invalid, or cannot be read without executing code"
            raise _damaged(reason) from error
        raise


def _verified_kind(path: Path) -> Literal["saved", "TorchScript", "torch.export"]:
    """Return the torch function that wrote a zip archive, after a check of all checksums."""
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
            raise _damaged("several of its parts have the same name")
        claimed = sum(entry.file_size for entry in entries)
        if claimed > _MAX_EXPANSION * path.stat().st_size:
            raise _damaged(f"its parts declare {claimed:,} bytes in total")
        empty = [e.filename for e in entries if e.file_size and e.external_attr & _DIRECTORY]
        if empty:  # torch reads these as folders and leaves the tensor's memory unset
            raise _damaged(f"its part {empty[0]!r} is marked as a folder")
        broken = archive.testzip()  # torch loads a flipped bit without an error
        if broken is not None:
            raise _damaged(f"the checksum of its part {broken!r} is wrong")
    return "TorchScript" if script else "torch.export" if program else "saved"


def _damaged(reason: str) -> CheckpointError:
    return CheckpointError(f"the file is damaged or cut off: {reason}", remedy=AGAIN)


def read_trusted(path: Path, name: str) -> Any:
    """Return the content of a file that the user trusts; this can execute any code in the file.

    `name` is the reader, one of `TRUSTED`. A TorchScript or torch.export archive gives its module.
    The entries of a list, such as [model, optimizer], get the keys "0", "1", ....
    """
    kind = _verified_kind(path) if name == "torch" else "saved"
    try:  # output of the file's code is sent to stderr
        with (
            path.open("rb") as file,
            redirect_stdout(sys.stderr),
            importable(Path.cwd()),
            warnings.catch_warnings(),
        ):
            for deprecated in (DeprecationWarning, FutureWarning):  # some releases: torch.jit
                warnings.simplefilter("ignore", deprecated)
            # torch.export.load of torch 2.10 warns about its own reading
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            if kind == "TorchScript":
                return torch.jit.load(file, map_location="cpu")  # type: ignore[no-untyped-call]
            if kind == "torch.export":
                return _program(torch.export.load(file))
            reader = _reader((Path.cwd(), path.absolute().parent))
            if name == "pickle":
                found = reader.load(file)
            else:
                found = torch.load(
                    file, map_location="cpu", pickle_module=reader, weights_only=False
                )
            listed = isinstance(found, list | tuple)
            return {str(k): entry for k, entry in enumerate(found)} if listed else found
    except SystemExit as error:
        what, remedy = f"its code called sys.exit({error.code!r})", "Save model.state_dict()."
        raise CheckpointError(what, remedy=remedy) from error
    except (AttributeError, ImportError) as error:
        raise CheckpointError(
            f"a pickled object needs a module or name that is missing: {first_line(error)}",
            remedy="Run in the folder of this module, or of the script that defines the name. Or "
            "save model.state_dict(), which needs no modules.",
        ) from error


def _reader(folders: Sequence[Path]) -> ModuleType:
    """Return the module pickle, for objects of classes that a script run as __main__ defines.

    The scripts are in some folders. They are imported without their training.
    """

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if module == "__main__" and not hasattr(sys.modules[module], name):
                for file in (file for place in folders for file in sorted(place.glob("*.py"))):
                    if name in definitions(file):
                        return load_value(f"{file}:{name}", "class", callable)
            return super().find_class(module, name)

    made = ModuleType(pickle.__name__)
    vars(made).update(vars(pickle))
    vars(made).update(
        Unpickler=Unpickler, load=lambda file, **options: Unpickler(file, **options).load()
    )
    return made


def _program(program: torch.export.ExportedProgram) -> nn.Module:
    """Return an exported program as a module, if it takes batches of any size."""
    inputs = set(program.graph_signature.user_inputs)
    values = [n.meta.get("val") for n in program.graph.nodes if n.name in inputs]
    sizes = [v.shape[0] for v in values if isinstance(v, torch.Tensor) and v.dim()]
    if sizes and all(isinstance(size, int) for size in sizes):
        raise CheckpointError(
            f"this program was exported for batches of {sizes[0]} only",
            remedy="Export it with dynamic_shapes, with Dim.DYNAMIC for the first axis of inputs.",
        )
    return program.module()


ADAPTER = "adapter_config.json"  # PEFT's config file
ADAPTER_WEIGHTS = "adapter_model"  # PEFT's file of weights, without suffix

_NAMES = (  # Hugging Face's files, in its order of search
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_SUFFIXES = {".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".pt2"}
_OTHERS = {"optimizer", "scheduler", "rng_state", "training_args", "scaler"}  # a trainer's files
_MAX_BYTES = 2**27  # the names of the largest models take a few megabytes
_AGAIN = "Download the folder again, or write it again with save_pretrained."


def table(path: Path, error: type[InputError], remedy: str, most: int = 2**24) -> dict[str, Any]:
    """Return the table of settings in a JSON file of at most `most` bytes, or raise `error`."""
    with reachable(path, error):
        require_regular(path, error)
    with reachable(path, error), path.open("rb") as file:
        text = file.read(most + 1)
    try:
        content = json.loads(text, object_pairs_hook=distinct) if len(text) <= most else None
    except (ValueError, RecursionError) as failure:
        what = f"the file is not valid JSON: {first_line(failure)}"
        raise error(what, where=str(path), remedy=remedy) from failure
    if not isinstance(content, dict):
        what = f"the file is not a table of settings of at most {most:,} bytes"
        raise error(what, where=str(path), remedy=remedy)
    return content


def weights_in(folder: Path) -> Path:
    """Return the file of a folder that has the weights, or the index of the files with weights."""
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
        remedy = f"Convert it with {tool} dcp_to_torch FOLDER OUT.pt"
    elif ADAPTER in names and (own := [n for n in files if Path(n).stem == ADAPTER_WEIGHTS]):
        return folder / own[0]  # .bin is before .safetensors
    elif "data.pkl" in names:
        what = "this is an unpacked archive of torch.save"
        remedy = "Give the original file, or pack the folder again."
    elif len(found) == 1:
        return folder / found[0]
    elif not found:
        held = f"it has {listed(names)}" if names else "it is empty"
        what, remedy = f"this folder has no weights; {held}", "Give the file with the weights."
    elif any("-of-" in name for name in found):
        what = f"the index.json of the checkpoint's parts is missing: {listed(found)}"
        remedy = "Download the folder again, including the index."
    else:
        what, remedy = f"this folder has several checkpoints: {listed(found)}", "Give one file."
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
    """Tensors in several files listed in an index.json (Hugging Face)."""
    content: dict[str, Tensor] = {}
    for file, names in _shards(path).items():
        shard = path.parent / file
        reader = find_reader(checkpoint_readers, shard, CheckpointError)
        if reader == "index":
            raise _wrong(f"{shard.name} is itself an index")
        with reading(CheckpointError, shard):
            held = checkpoint_readers.get(reader)(shard)
        if not isinstance(held, Mapping) or not all(isinstance(v, Tensor) for v in held.values()):
            raise _wrong(f"{shard.name} has values that are not named tensors")
        absent = [name for name in names if name not in held]
        if absent:
            count = f"{len(absent)} tensors that it lists in {file}"
            raise _wrong(f"{count} are missing: {listed(absent)}")
        twice = [name for name in held if name in content]
        if twice:
            raise _wrong(f"{len(twice)} tensors are in more than one file: {listed(twice)}")
        content.update(held)
    return content


def files_of(path: Path) -> tuple[Path, ...]:
    """Return the index and all files that it lists."""
    return (path, *(path.parent / file for file in _shards(path)))


def _shards(path: Path) -> dict[str, list[str]]:
    """Return {file: names of its tensors}, sorted by file."""
    shards: dict[str, list[str]] = {}
    for name, file in _table(path).items():
        place = PureWindowsPath(str(file))  # the index may be written on any system
        inside = not place.drive and not place.root and ".." not in place.parts
        if not isinstance(file, str) or not file.isprintable() or not (inside and place.parts):
            raise _wrong(f"{name!r} is in {file!r}, which is not a file in the index's folder")
        shards.setdefault(file, []).append(name)
    with reachable(path, CheckpointError):
        absent = [file for file in shards if not (path.parent / file).exists()]
    if absent:
        beside = sorted(p.name for p in path.parent.iterdir() if p != path)
        hint = suggestion(absent[0], beside).replace("Supported", "The folder has")
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
    except ValueError as error:  # not JSON, not UTF-8, or a repeated key
        raise _wrong(f"it cannot be read: {error}") from error
    table = content.get("weight_map")
    if not isinstance(table, dict) or not table:
        raise _wrong(
            "it is JSON without a table `weight_map`, so it is not an index of a checkpoint",
            "Give the file with the weights, or its folder.",
        )
    return table


def _wrong(what: str, remedy: str = _AGAIN) -> CheckpointError:
    return CheckpointError(f"the index is wrong: {what}", remedy=remedy)
