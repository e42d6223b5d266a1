"""Zip archives of torch's: whole, and of which kind."""

import zipfile
from pathlib import Path
from typing import Literal

from gradscope.errors import CheckpointError
from gradscope.sources.weights.trouble import damaged, reading

ArchiveKind = Literal["saved", "TorchScript", "torch.export"]

_DIRECTORY = 0x10  # of the attributes, as DOS has them
_MAX_EXPANSION = 100  # torch.save does not compress; a bomb does


def verified_kind(path: Path) -> ArchiveKind:
    """Return what wrote an archive, every part of which has its checksum.

    Raises:
        CheckpointError: It is damaged, or none of torch's.
    """
    with reading(path), zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        kind = _kind(path, [entry.filename for entry in entries])
        if len({entry.filename for entry in entries}) < len(entries):
            raise damaged(path, "several of its parts have one name")
        claimed = sum(entry.file_size for entry in entries)
        if claimed > _MAX_EXPANSION * path.stat().st_size:
            raise damaged(path, f"its parts claim {claimed:,} bytes in all")
        empty = [e.filename for e in entries if e.file_size and e.external_attr & _DIRECTORY]
        if empty:  # torch takes these for folders, and leaves the tensor's memory as it was
            raise damaged(path, f"its part {empty[0]!r} is marked as a folder")
        broken = archive.testzip()  # torch itself loads a flipped bit without a word
    if broken is not None:
        raise damaged(path, f"the checksum of its part {broken!r} is wrong")
    return kind


def _kind(path: Path, names: list[str]) -> ArchiveKind:
    inner = {name.partition("/")[2] for name in names}
    if any(name.startswith("code/") for name in inner) or "constants.pkl" in inner:
        return "TorchScript"
    if any("models/" in name or name.endswith("archive_format") for name in names):
        return "torch.export"
    if "data.pkl" in inner:
        return "saved"
    numpy = any(name.endswith(".npy") for name in names)
    found = (
        "numpy .npz file: data, not weights"
        if numpy
        else "zip archive without tensors of torch.save"
    )
    raise CheckpointError(
        f"this is a {found}", where=str(path), remedy="Give a file of torch.save or safetensors."
    )
