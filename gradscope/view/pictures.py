"""What samples are, for a page: pictures on one sheet, texts, rows of numbers."""

import io
from base64 import b64encode
from collections.abc import Sequence
from importlib.util import find_spec
from math import ceil, isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscope.core.markup import visible
from gradscope.sources.opened import Content, Opened
from gradscope.stats.looking import scale

_LARGEST = 96  # pixels of a picture's side
_PIXELS = 6_000_000  # on a sheet
_LETTERS = 2_000_000  # of all texts


class Album:
    """Samples of a data set, by their positions there."""

    def __init__(self, opened: Opened, indexes: Sequence[int]) -> None:
        self.contents = opened.contents(indexes)

    @property
    def lacks(self) -> str:
        """What has to be installed before its pictures can be shown, if anything."""
        drawn = any(isinstance(content, np.ndarray) for content in self.contents)
        lacks = drawn and find_spec("PIL") is None
        return "pictures need Pillow: pip install 'torch-gradscope[data]'" if lacks else ""

    def document(self) -> dict[str, Any]:
        """Return the sheet, the texts and the numbers, with one entry a sample or None."""
        pictures = [c if isinstance(c, np.ndarray) else None for c in self.contents]
        rows = [c for c in self.contents if isinstance(c, dict)]
        names = list(dict.fromkeys(name for row in rows for name in row))
        longest = max(80, _LETTERS // max(1, len(self.contents)))
        return {
            "sheet": _sheet(pictures),
            "texts": _some(self.contents, str, lambda text: visible(text[:longest], keep="\n")),
            "names": [visible(name) for name in names],
            "numbers": _some(self.contents, dict, lambda row: [row.get(name) for name in names]),
        }


def _some(contents: Sequence[Content | None], kind: type, shown: Any) -> list[Any] | None:
    """Return what is shown of those of a kind, None for the others; None where there are none."""
    found = [shown(c) if isinstance(c, kind) else None for c in contents]
    return found if any(one is not None for one in found) else None


def _sheet(pictures: Sequence[NDArray[Any] | None]) -> dict[str, Any] | None:
    """Return pictures side by side in one PNG: its cells, and which samples they are of.

    Pictures of one shape share their scale: black is the least number of all, white the largest.
    """
    known = [k for k, picture in enumerate(pictures) if picture is not None]
    if not known or find_spec("PIL") is None:
        return None
    from PIL import Image

    every = [p for p in pictures if p is not None]
    side = min(_LARGEST, max(8, isqrt(_PIXELS // len(every))))
    largest = max(max(p.shape[:2]) for p in every)
    side = min(side, largest)
    mode = "RGB" if any(p.ndim == 3 for p in every) else "L"
    across = ceil(len(every) ** 0.5)
    sheet = Image.new(mode, (across * side, ceil(len(every) / across) * side))
    shapes = {p.shape for p in every}
    scales = {shape: scale([p for p in every if p.shape == shape]) for shape in shapes}
    sizes = []
    for k, picture in enumerate(every):
        one = Image.fromarray(scales[picture.shape](picture)).convert(mode)
        if max(one.size) > side:
            one.thumbnail((side, side))
        sheet.paste(one, (k % across * side, k // across * side))
        sizes.append([one.size[0], one.size[1]])
    file = io.BytesIO()
    sheet.save(file, "PNG", optimize=len(every) < 10_000)
    source = f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"
    alike = sizes[0] if all(size == sizes[0] for size in sizes) else None
    return {
        "source": source,
        "side": side,
        "across": across,
        "of": known,
        "size": alike,
        "sizes": None if alike else sizes,
    }
