"""The checkpoint formats: safetensors and torch.save's. Nothing in a file is ever executed."""

import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from gradscope.core.locate import first_line
from gradscope.errors import CheckpointError
from gradscope.sources.readers import checkpoint_readers, is_safetensors, is_zip, matching

_TORCH_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # what torch.save began with before 1.6
_MAX_EXPANSION = 100  # torch.save does not compress; a bomb does

_AGAIN = "Write or download it again."
_STATE_DICT = "Save model.state_dict() with torch.save or safetensors, and give that file."

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
        raise _damaged(path, f"its header claims {length:,} bytes, the file has {size:,}")
    with _reading(path):
        return safetensors.torch.load_file(path, device="cpu")


@checkpoint_readers.register("torch")
@matching(is_zip)
def read_torch(path: Path) -> Any:
    """Tensors and plain containers, the zip archive that torch.save writes."""
    with _reading(path), zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        _check_kind(path, [entry.filename for entry in entries])
        claimed = sum(entry.file_size for entry in entries)
        if claimed > _MAX_EXPANSION * path.stat().st_size:
            raise _damaged(path, f"its parts claim {claimed:,} bytes in all")
        broken = archive.testzip()  # torch itself loads a flipped bit without a word
    if broken is not None:
        raise _damaged(path, f"the checksum of its part {broken!r} is wrong")
    return _torch_load(path)


@checkpoint_readers.register("torch-legacy")
@matching(lambda head: head.startswith(_TORCH_MAGIC))
def read_torch_legacy(path: Path) -> Any:
    """Tensors and plain containers, as torch.save wrote them before torch 1.6."""
    return _torch_load(path)


def _torch_load(path: Path) -> Any:
    # weights_only must be given: its default obeys an environment variable. An open file must be
    # given: by a path, torch goes by the suffix.
    with _reading(path), path.open("rb") as file:
        return torch.load(file, map_location="cpu", weights_only=True)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what the libraries raise about a file into a `CheckpointError` of our own words."""
    try:
        yield
    except CheckpointError:
        raise
    except MemoryError as error:
        raise CheckpointError(
            f"it needs more memory than there is: {first_line(error)}",
            where=str(path),
            remedy="Write or download it again if it should not be that large.",
        ) from error
    except Exception as error:  # a damaged file can make a parser raise anything
        refused = _REFUSED.search(str(error))
        if refused is None and isinstance(error, pickle.UnpicklingError):
            # torch's own text advises to switch its protection off
            reason = "its pickled part cannot be read without executing code, or not at all"
            raise _damaged(path, reason) from error
        if refused is None:
            raise _damaged(path, first_line(error)) from error
        name = next(text for text in refused.groups() if text)
        raise CheckpointError(
            f"it holds more than tensors: {name}. Such a file can execute code and is not loaded",
            where=str(path),
            remedy=_STATE_DICT,
        ) from error


def _check_kind(path: Path, names: list[str]) -> None:
    found = "a zip archive without tensors of torch.save"
    inner = {name.partition("/")[2] for name in names}
    if any(name.startswith("code/") for name in inner) or "constants.pkl" in inner:
        found = "a TorchScript archive, which holds code"
    elif "data.pkl" in inner:
        return
    elif any(name.endswith(".npy") for name in names):
        found = "a numpy .npz file: data, not weights"
    elif any("models/" in name or name.endswith("archive_format") for name in names):
        found = "a torch.export archive, which holds a program"
    raise CheckpointError(f"this is {found}", where=str(path), remedy=_STATE_DICT)


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint is damaged or cut off: {reason}", where=str(path), remedy=_AGAIN
    )
