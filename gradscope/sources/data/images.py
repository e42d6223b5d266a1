"""Images: folders of classes, and images in tables; decoded with Pillow, a batch at a time."""

import io
import warnings
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradscope.errors import DatasetError
from gradscope.sources.data.columns import Sliced, Stored, StoredArrays, Texts, reading
from gradscope.sources.extras import need

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
_GREY = ("1", "L")


def image_files(path: Path) -> list[Path]:
    """Return the images in the folders of `path`, sorted by class and name."""
    folders = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    return [
        file
        for folder in folders
        for file in sorted(folder.rglob("*"))
        if file.suffix.lower() in SUFFIXES and file.is_file()
    ]


def open_image_folder(path: Path) -> StoredArrays:
    """One folder a class: `inputs` (N, c, h, w) uint8, `targets` 0, 1, ... by folder, `path`."""
    files = image_files(path)
    names = [file.relative_to(path).parts[0] for file in files]
    classes = {name: k for k, name in enumerate(sorted(set(names)))}
    mode, shape = _one_form(files)

    def load(name: str) -> Stored:
        if name == "targets":
            return torch.tensor([classes[name] for name in names])
        if name == "path":
            texts = [file.relative_to(path).as_posix() for file in files]
            return Texts(len(files), lambda a, b: texts[a:b])
        return Sliced(
            (len(files), *shape),
            torch.uint8,
            lambda a, b: torch.stack([_pixels(f, f, mode) for f in files[a:b]]),
        )

    found = ", ".join(f"{k} {name}" for name, k in islice(classes.items(), 10))
    more = ", ..." if len(classes) > 10 else ""
    return StoredArrays(("inputs", "targets", "path"), load, (f"classes: {found}{more}",))


def decoded(value: Any, k: int, shape: Sequence[int] | None = None) -> Tensor:
    """Return an image that a table holds as {"bytes": ...}, (c, h, w) uint8.

    Raises:
        DatasetError: It is none, or has another shape than the first.
    """
    content = None if value is None else value["bytes"]
    if content is None:
        raise DatasetError(
            f"sample {k} has no image in the table, only a path or nothing",
            remedy="Save the images themselves in the table.",
        )
    image = _pixels(io.BytesIO(content), f"sample {k}", None)
    if shape is not None and tuple(image.shape) != tuple(shape):
        raise _differ(f"sample {k}", tuple(image.shape), tuple(shape))
    return image


def _one_form(files: Sequence[Path]) -> tuple[str, tuple[int, ...]]:
    """Return the mode that all images are decoded in, and their shape; only headers are read."""
    library = need("PIL.Image", "an image folder")
    sizes, modes = [], set()
    for file in files:
        with reading(file), warnings.catch_warnings():
            warnings.simplefilter("error", library.DecompressionBombWarning)
            with library.open(file) as image:
                sizes.append(image.size)
                modes.add(image.mode)
    mode = "L" if modes <= set(_GREY) else "RGB"
    channels = 1 if mode == "L" else 3
    shapes = [(channels, height, width) for width, height in sizes]
    for file, shape in zip(files, shapes, strict=True):
        if shape != shapes[0]:
            raise _differ(str(file), shape, shapes[0])
    return mode, shapes[0]


def _pixels(source: Any, name: Any, mode: str | None) -> Tensor:
    library = need("PIL.Image", "an image")
    with reading(Path(str(name))), warnings.catch_warnings():
        warnings.simplefilter("error", library.DecompressionBombWarning)
        with library.open(source) as image:
            wanted = mode or ("L" if image.mode in _GREY else "RGB")
            values = np.array(image.convert(wanted))
    pixels = torch.from_numpy(values)
    return pixels[None] if pixels.dim() == 2 else pixels.permute(2, 0, 1).contiguous()


def _differ(where: str, shape: tuple[int, ...], first: tuple[int, ...]) -> DatasetError:
    return DatasetError(
        f"this image is {shape}, the first is {first} (channels, height, width)",
        where=where,
        remedy="Make them all of one size, or load them with FILE.py:FACTORY.",
    )
