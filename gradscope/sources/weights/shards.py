"""A checkpoint in several files, as an index.json lists them: {"weight_map": {name: file}}."""

import json
import re
from collections.abc import Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

from torch import Tensor

from gradscope.core.registry import suggestion
from gradscope.errors import CheckpointError
from gradscope.sources.data.readers import (
    checkpoint_readers,
    find_checkpoint_reader,
    matching,
    reachable,
)
from gradscope.sources.listing import listed

_MAX_BYTES = 2**27  # the names of the largest models take a few megabytes
_AGAIN = "Download the folder again, or write it again with save_pretrained."


def is_index(head: bytes) -> bool:
    """Whether a file that begins like this is an index: JSON text, where safetensors has NULs."""
    table = re.match(rb'(\xef\xbb\xbf)?\s*\{\s*"', head) is not None
    return table and b"\0" not in head[:8] and b'"weight_map"' in head


@checkpoint_readers.register("index")
@matching(is_index)
def read_index(path: Path) -> dict[str, Tensor]:
    """Tensors in several files that an index.json lists, as Hugging Face writes them."""
    content: dict[str, Tensor] = {}
    for file, names in _shards(path).items():
        held = _shard(path, file)
        absent = [name for name in names if name not in held]
        if absent:
            raise _wrong(
                path,
                f"{len(absent)} tensors that it lists in {file} are not there: {listed(absent)}",
            )
        twice = [name for name in held if name in content]
        if twice:
            raise _wrong(path, f"{len(twice)} tensors are in more than one file: {listed(twice)}")
        content.update(held)
    return content


def files_of(path: Path) -> tuple[Path, ...]:
    """Return all files that an index stands for, itself first."""
    return (path, *(path.parent / file for file in _shards(path)))


def _shards(path: Path) -> dict[str, list[str]]:
    """Return {file: the names listed in it}, the files in order."""
    table = _table(path)
    shards: dict[str, list[str]] = {}
    for name, file in table.items():
        if not isinstance(file, str) or not _is_inside(file):
            raise _wrong(path, f"{name!r} is in {file!r}, which is no file of its own folder")
        shards.setdefault(file, []).append(name)
    with reachable(path, CheckpointError):
        absent = [file for file in shards if not (path.parent / file).exists()]
    if absent:
        beside = sorted(p.name for p in path.parent.iterdir() if p != path)
        hint = suggestion(absent[0], beside).replace("Supported", "The folder holds")
        raise _wrong(
            path, f"{len(absent)} of its {len(shards)} files are missing: {listed(absent)}", hint
        )
    return dict(sorted(shards.items()))


def _table(path: Path) -> Mapping[str, Any]:
    if path.stat().st_size > _MAX_BYTES:
        raise _wrong(path, f"it is larger than {_MAX_BYTES:,} bytes")
    try:
        content = json.loads(path.read_bytes(), object_pairs_hook=_distinct)
    except RecursionError as error:
        raise _wrong(path, "it is nested too deeply") from error
    except ValueError as error:  # not JSON, not UTF-8, a key twice
        raise _wrong(path, f"it cannot be read: {error}") from error
    table = content.get("weight_map")
    if not isinstance(table, dict) or not table:
        raise _wrong(
            path,
            "it is JSON without a table `weight_map`, so no index of a checkpoint",
            "Give the file with the weights, or the folder that holds it.",
        )
    return table


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in table if names.count(name) > 1)
        raise ValueError(f"{twice!r} stands in it twice")
    return table


def _is_inside(file: str) -> bool:
    """Whether it is a plain relative path, on whatever system it was written."""
    path = PureWindowsPath(file)
    parts = path.parts
    plain = not path.drive and not path.root and ".." not in parts and bool(parts)
    return plain and file.isprintable()


def _shard(path: Path, file: str) -> Mapping[str, Tensor]:
    shard = path.parent / file
    name = find_checkpoint_reader(shard)
    if name == "index":
        raise _wrong(path, f"{file} is itself an index")
    content = checkpoint_readers.get(name)(shard)
    if not isinstance(content, Mapping) or not all(isinstance(v, Tensor) for v in content.values()):
        raise _wrong(path, f"{file} holds something other than named tensors")
    return content


def _wrong(path: Path, what: str, remedy: str = _AGAIN) -> CheckpointError:
    return CheckpointError(f"the index is wrong: {what}", where=str(path), remedy=remedy)
