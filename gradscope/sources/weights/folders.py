"""A checkpoint of several files: which of a folder holds the weights, and what an index lists.

An index.json is {"weight_map": {name: file}}, as Hugging Face writes it.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

from torch import Tensor

from gradscope.core.registry import suggestion
from gradscope.core.texts import listed
from gradscope.errors import CheckpointError
from gradscope.sources.formats import checkpoint_readers, find_reader, matching, reachable, reading

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
    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        if twice:
            raise ValueError(f"{twice[0]!r} stands in it twice")
        return dict(pairs)

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
