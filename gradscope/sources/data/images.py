"""Images in class folders and in tables, decoded with Pillow a batch at a time."""

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradscope.core.texts import listed
from gradscope.errors import DatasetError
from gradscope.sources.data.columns import NumberColumn, StoredArrays, StoredColumn, TextColumn
from gradscope.sources.formats import need, reading

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
_GREY = ("1", "L")


def image_files(path: Path) -> list[Path]:
    """Return the images in the folders of `path`, sorted by class and name."""
    folders = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    files = (file for folder in folders for file in sorted(folder.rglob("*")))
    return [file for file in files if file.suffix.lower() in SUFFIXES and file.is_file()]


def open_image_folder(path: Path) -> StoredArrays:
    """Images in class folders: `inputs` (N, c, h, w) uint8, `targets` 0, 1, ... and `path`."""
    files = image_files(path)
    texts = [file.relative_to(path).as_posix() for file in files]
    names = [text.partition("/")[0] for text in texts]
    classes = {name: k for k, name in enumerate(sorted(set(names)))}
    sizes, modes = [], set()
    for file in files:  # only headers are read
        with _opened(file, file) as image:
            sizes.append(image.size)
            modes.add(image.mode)
    mode, channels = ("L", 1) if modes <= set(_GREY) else ("RGB", 3)
    shape = (channels, *sizes[0][::-1])
    for file, size in zip(files, sizes, strict=True):
        _require_shape(str(file), (channels, *size[::-1]), shape)

    def load(name: str) -> StoredColumn:
        if name == "targets":
            return torch.tensor([classes[name] for name in names])
        if name == "path":
            return TextColumn(len(files), lambda a, b: texts[a:b])
        return NumberColumn(
            (len(files), *shape),
            torch.uint8,
            lambda a, b: torch.stack([_pixels(f, f, mode) for f in files[a:b]]),
        )

    found = listed(f"{k} {name}" for name, k in classes.items())
    return StoredArrays(("inputs", "targets", "path"), load, (f"classes: {found}",))


def decode_image(value: Any, k: int, shape: Sequence[int] | None = None) -> Tensor:
    """Return an image stored as {"bytes": ...} in a table, (c, h, w) uint8, of the given shape."""
    content = None if value is None else value["bytes"]
    if content is None:
        raise DatasetError(
            f"sample {k} has no image in the table, only a path or nothing",
            remedy="Save the images themselves in the table.",
        )
    image = _pixels(io.BytesIO(content), f"sample {k}", None)
    _require_shape(f"sample {k}", image.shape, image.shape if shape is None else shape)
    return image


def _pixels(source: Any, where: Any, mode: str | None) -> Tensor:
    with _opened(source, where) as image:
        wanted = mode or ("L" if image.mode in _GREY else "RGB")
        pixels = torch.from_numpy(np.array(image.convert(wanted)))
    return pixels[None] if pixels.dim() == 2 else pixels.permute(2, 0, 1).contiguous()


@contextmanager
def _opened(source: Any, where: Any) -> Iterator[Any]:
    library = need("PIL.Image", "an image")
    with reading(DatasetError, where), warnings.catch_warnings():
        warnings.simplefilter("error", library.DecompressionBombWarning)
        with library.open(source) as image:
            yield image


def _require_shape(where: str, shape: Sequence[int], first: Sequence[int]) -> None:
    if tuple(shape) != tuple(first):
        raise DatasetError(
            f"this image has shape {tuple(shape)}, but the first image has {tuple(first)} "
            "(channels, height, width)",
            where=where,
            remedy="Resize all images to the same size, or load them with FILE.py:FACTORY.",
        )
