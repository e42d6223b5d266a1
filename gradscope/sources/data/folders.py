"""Folders as data: images by class, .npy files, shards of one format, what Hugging Face saved."""

from collections.abc import Callable, Sequence
from pathlib import Path

from gradscope.errors import DatasetError
from gradscope.sources.data.columns import StoredArrays
from gradscope.sources.data.images import image_files, open_image_folder
from gradscope.sources.data.numpy import open_npy_folder
from gradscope.sources.data.tables import arrow, parquet, saved_dataset

_SHARDS: dict[str, Callable[[Sequence[Path]], StoredArrays]] = {
    "parquet": parquet,
    "arrow": arrow,
}


def open_folder(path: Path) -> tuple[str, StoredArrays]:
    """Return what a folder is, and its arrays.

    Raises:
        DatasetError: It holds nothing that is known, or several data sets.
    """
    if (path / "dataset_dict.json").is_file():
        parts = sorted(p.name for p in path.iterdir() if (p / "state.json").is_file())
        raise DatasetError(
            f"this folder holds several data sets: {', '.join(parts)}",
            where=str(path),
            remedy=f"Give one of them, such as {path / (parts[0] if parts else 'train')}.",
        )
    if (path / "state.json").is_file():
        return "arrow", saved_dataset(path)
    for suffix, opener in _SHARDS.items():
        shards = sorted(path.glob(f"*.{suffix}"))
        if shards:
            return suffix, opener(shards)
    if any(path.glob("*.npy")):
        return "npy", open_npy_folder(path)
    if image_files(path):
        return "images", open_image_folder(path)
    raise DatasetError(
        "this directory holds no data that can be read",
        where=str(path),
        remedy="Give a file in it; or a folder of class folders with images, of .npy, .parquet or "
        ".arrow files, or one that Hugging Face's save_to_disk wrote.",
    )
