"""Shows samples of a run as pictures, texts or rows of numbers.

The data are opened again at the recorded path, and their digest must be unchanged. A data set made
by user code is not opened, because a result file must not decide which code runs.
"""

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradscope.config import DatasetSpec, RunSpec
from gradscope.core.batch import WholeInputs
from gradscope.errors import GradscopeError
from gradscope.sources.data import Dataset, open_dataset, words
from gradscope.sources.data.columns import runs

_LEAST_SIDE = 4  # pixels: narrower arrays are tables of numbers
_SQUARE = 64  # least length of a row that is shown as a picture
_LETTERS, _NUMBERS = 1000, 64  # the most letters and numbers of a sample to show
_TOGETHER = 256  # the most samples to read at once

Decode = Callable[[list[int]], str]
Content = NDArray[Any] | str | dict[str, float]  # pixels (h, w) or (h, w, 3), a text, numbers


@dataclass(frozen=True)
class ShownData:
    """The data of a run, for display."""

    dataset: Dataset | None
    why: str = ""  # the reason why the samples cannot be shown
    texts: Mapping[str, Decode] = field(default_factory=dict)  # {array of encoded texts: decoder}
    spec: DatasetSpec | None = None
    kept: Mapping[int, Content] = field(default_factory=dict)  # previews, if the data are missing
    # the sample of each row, if rows are tokens
    of_row: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        run: Mapping[str, Any],
        samples: Mapping[str, NDArray[Any]] | None = None,
        most: int | None = None,
    ) -> "ShownData":
        """Open the data set of a run from the record in its result file.

        Args:
            run: The record, with the run's spec and digests.
            samples: The file's sample table {column: (N,)}. Its previews are used if the data
                cannot be opened.
            most: The most bytes to read, because reading takes time, or None for no limit.
        """
        try:
            spec = RunSpec.model_validate(run.get("spec")).dataset
        except ValueError:
            return cls(None, "the file has no path of the data")
        if run.get("tokens") and "position" not in (samples or {}):
            return cls(None, "the rows are tokens: the table has their sample and position")
        if "size" in (samples or {}) or run.get("groups"):
            return cls(None, "the rows are groups: the table has their ids and sizes")
        why = ""
        if spec.factory is not None:
            why = f"{spec.factory} makes the data, and gradscope runs no code to show samples"
        elif most is not None and _bytes(spec.path) > most:
            why = "the data are large: gradscope stats --html reads them"
        else:
            try:
                found = open_dataset(spec)
                if found.sha256 == (run.get("digests") or {}).get("dataset"):
                    return replace(cls.made(found), of_row=_tokens(samples or {}))
                why = f"{spec.path} has changed since the run"
            except GradscopeError as error:
                why = f"{error}".partition("\n")[0]
        kept = previews_of(run, samples or {})
        return cls(None, "" if kept else why, spec=spec, kept=kept)

    @classmethod
    def made(cls, dataset: Dataset) -> "ShownData":
        """Return the samples of an open data set."""
        texts = {name: words(dataset.spec, name) for name in dataset.spec.arrays}
        known = {k: v for k, v in texts.items() if v is not None}
        return cls(dataset, texts=known, spec=dataset.spec)

    def contents(self, indexes: Sequence[int]) -> list[Content | None]:
        """Return the first input of each sample that can be shown, or None."""
        if self.dataset is None:
            return [self.kept.get(k) for k in indexes]
        indexes = [self.of_row.get(k, k) for k in indexes]
        found: dict[int, Content | None] = {}
        for rows in _together(sorted(set(indexes))):
            try:
                found |= self._read(rows)
            except GradscopeError:  # a row cannot be read
                for k in rows if len(rows) > 1 else ():
                    found |= dict(zip([k], self.contents([k]), strict=True))
        return [found.get(k) for k in indexes]

    def class_name(self, target: Any) -> str | None:
        """Return the data set's name of a class, or None."""
        named = () if self.spec is None else self.spec.targets[:1]
        names = [*self.spec.classes.get(named[0], ())] if self.spec and named else []
        known = isinstance(target, int) and 0 <= target < len(names)
        return names[target] if known else None

    def _read(self, rows: range) -> dict[int, Content | None]:
        assert self.dataset is not None
        inputs, names = self.dataset.batch(rows).inputs, self.dataset.spec.inputs
        if isinstance(inputs, WholeInputs):
            return dict.fromkeys(rows)
        inputs = inputs[0] if self.dataset.as_mapping else inputs
        if isinstance(names, dict):
            pairs = [(name, inputs[keyword]) for keyword, name in names.items()]
        else:
            pairs = [*zip(names, inputs if isinstance(inputs, tuple) else (inputs,), strict=False)]
        return {row: next(self._shown(pairs, k), None) for k, row in enumerate(rows)}

    def _shown(self, pairs: Sequence[tuple[str, Any]], k: int) -> Iterator[Content]:
        """Yield the inputs of the k-th sample that can be shown."""
        assert self.dataset is not None
        for name, value in pairs:
            if isinstance(value, Tensor) and value.dim() and not value.is_complex():
                whole = not value.is_floating_point() and value.dim() == 2
                text = _text(value[k], self.texts.get(name)) if whole else None
                row = value[k].detach().cpu().double().numpy()
                yield _content(self.dataset.headings(name), row) if text is None else text


class Previews:
    """Small previews of a data set's samples for a result file.

    A picture is reduced to the means of blocks, in bytes (its smallest number is black, its largest
    white), and encoded in base64. Any other sample becomes the first bytes of its text. The first
    sample decides the kind of all previews.

    Attributes:
        record: The record in the file: `kind` ("picture" or "text"), and `shape` of pictures.
    """

    def __init__(self, dataset: Dataset, most: int, first: int) -> None:
        self._opened, self._most = ShownData.made(dataset), most
        (content,) = self._opened.contents([first])
        self.record: dict[str, Any] = {"kind": "text"}
        if isinstance(content, np.ndarray):
            self.record = {"kind": "picture", "shape": [*self._small(content).shape]}

    def of(self, indexes: Sequence[int]) -> Tensor:
        """Return the previews (n, w) uint8 of some samples, padded with zeros."""
        found = np.zeros((len(indexes), self._most), np.uint8)
        for row, content in zip(found, self._opened.contents(indexes), strict=True):
            text = np.frombuffer(self._text(content), np.uint8)
            row[: len(text)] = text
        return torch.from_numpy(found)

    def _text(self, content: Content | None) -> bytes:
        if isinstance(content, np.ndarray):
            small = self._small(content)
            return b64encode(small.tobytes()) if [*small.shape] == self.record.get("shape") else b""
        if self.record["kind"] == "picture" or content is None:
            return b""
        if isinstance(content, dict):
            content = ", ".join(f"{name} {value:.4g}" for name, value in content.items())
        whole = content.replace("\0", "").encode("utf-8", "replace")[: self._most]
        return whole.decode("utf-8", "ignore").encode()  # without an incomplete letter

    def _small(self, picture: NDArray[Any]) -> NDArray[np.uint8]:
        """Return the means of the smallest blocks that fit into 3/4 of the allowed bytes."""
        step = 1
        while 4 * -(-picture.size // step**2 // 3) > self._most:
            step += 1
        h, w = (size // step * step for size in picture.shape[:2])
        blocks = picture[:h, :w].reshape(h // step, step, w // step, step, *picture.shape[2:])
        means = np.nan_to_num(blocks.mean((1, 3)))
        low, high = means.min(initial=np.inf), means.max(initial=-np.inf)
        levels = np.rint((means - low) * (255 / (high - low or 1.0)))
        small: NDArray[np.uint8] = levels.astype(np.uint8)
        return small


def previews_of(run: Mapping[str, Any], samples: Mapping[str, NDArray[Any]]) -> dict[int, Content]:
    """Return the valid previews in a file, {position: content}."""
    told, texts = run.get("previews"), samples.get("preview")
    if not isinstance(told, Mapping) or texts is None:
        return {}
    shape, found = told.get("shape"), {}
    for index, text in zip(samples["index"].tolist(), texts.tolist(), strict=True):
        content: Content | None = str(text)
        if told.get("kind") == "picture":
            try:
                pixels = np.frombuffer(b64decode(str(text), validate=True), np.uint8)
                picture = pixels.reshape(shape).astype(np.float64)
                content = picture if picture.ndim in (2, 3) and picture.size else None
            except (ValueError, TypeError):
                content = None
        if content is not None:
            found[int(index)] = content
    return found


def _tokens(samples: Mapping[str, NDArray[Any]]) -> dict[int, int]:
    """Return {row: sample} if rows are tokens; {} if rows are samples."""
    if "position" not in samples:
        return {}
    return dict(zip(samples["index"].tolist(), samples["sample"].tolist(), strict=True))


def _bytes(path: Path) -> int:
    """Return the bytes of a file or of all files in a folder; 0 if the path does not exist."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _together(indexes: Sequence[int]) -> Iterator[range]:
    """Yield ascending positions as ranges of at most `_TOGETHER` samples."""
    for first, end in runs(indexes) if indexes else ():
        yield from (range(k, min(k + _TOGETHER, end)) for k in range(first, end, _TOGETHER))


def _text(row: Tensor, decode: Decode | None) -> str | None:
    """Return the text that integers (t,) encode; many integers without a text are listed."""
    numbers = row.tolist()
    if decode is not None:
        return decode(numbers)[:_LETTERS]
    if row.dtype == torch.uint8:
        text = bytes(numbers).rstrip(b"\0").decode("utf-8", "replace")
        if "\ufffd" not in text and all(c.isprintable() or c in "\t\r\n" for c in text):
            return text[:_LETTERS]
    return " ".join(map(str, numbers))[:_LETTERS] if len(numbers) > _NUMBERS else None


def _content(names: Sequence[str], row: NDArray[Any]) -> Content:
    """Return a sample's array as a picture, or as numbers with the names of its columns.

    A long row without column names is a picture if its numbers fill one square or three squares.
    """
    square = [(c, s, s) for c in (1, 3) if (s := isqrt(row.size // c)) ** 2 * c == row.size]
    if row.ndim == 1 and len(names) != row.size and square and row.size >= _SQUARE:
        row = row.reshape(square[0])
    picture = row[0] if row.ndim == 3 and row.shape[0] == 1 else row
    if picture.ndim == 3 and picture.shape[0] == 3:
        picture = np.moveaxis(picture, 0, 2)
    coloured = picture.ndim == 3 and picture.shape[2] == 3
    if (coloured or picture.ndim == 2) and min(picture.shape[:2]) >= _LEAST_SIDE:
        return picture
    flat = row.reshape(-1)[:_NUMBERS]
    if len(names) != row.size:
        names = [*map(str, range(row.size))]
    return dict(zip(names, map(float, flat), strict=False))
