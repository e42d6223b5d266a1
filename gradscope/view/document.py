"""What the page knows of a result file: columns of all samples, and the details of some.

Numbers are the file's own, in float64. Details (a picture or a text, norms by parameter, nearest
and most opposed samples, who helped and harmed) take room: the page has them for as many samples
as it may, those with the largest norms and losses first; a server has them for all.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscope.attribution import Scores
from gradscope.core.markup import visible
from gradscope.errors import SpecError
from gradscope.sources.opened import Opened
from gradscope.stats import Options
from gradscope.stats.certificate import FileFacts
from gradscope.stats.records import plain
from gradscope.stats.sections import Fact, Spark
from gradscope.stats.summary import Data, summary_of
from gradscope.storage import GradientFile
from gradscope.view.heat import Heat, heat
from gradscope.view.neighbours import Neighbours, neighbours
from gradscope.view.pictures import Album

VERSION = 1
_MOST = 5000  # samples with details on a page
_LAYERED = 500_000  # norms by parameter on a page
_TOP = 5  # who helped and who harmed

Places = NDArray[np.int64]


def packed(values: Any) -> dict[str, str]:
    """Return numbers (n, ...) as base64 of little-endian float64, or of int32 for whole ones."""
    array = np.asarray(values)
    kind = "i4" if array.dtype.kind in "iub" else "f4" if array.dtype == np.float32 else "f8"
    return {kind: b64encode(np.ascontiguousarray(array, f"<{kind}").tobytes()).decode()}


@dataclass(frozen=True)
class View:
    """An open result file to be looked at, with a second one and scores where they are given."""

    file: GradientFile
    opened: Opened
    other: GradientFile | None = None
    scores: Scores | None = None

    def __post_init__(self) -> None:
        for what, record in (("second file", self.other), ("scores", self.scores)):
            if record is not None and self.digest not in _digests(record):
                raise SpecError(
                    f"the {what} and {self.file.path} are about other data",
                    remedy="Give files that were computed from one data set.",
                )

    @property
    def digest(self) -> str:
        """The SHA-256 of the data."""
        return str(self.file.attributes.get("dataset_sha256"))

    @cached_property
    def data(self) -> Data:
        """The finite samples (n,) and what statistics know of them."""
        return Data(self.file, Options())

    @cached_property
    def neighbours(self) -> Neighbours | str:
        """Where the file's chains give them, the nearest samples of any; else why not."""
        return neighbours(self.data)

    def document(self, most: int | None = _MOST) -> dict[str, Any]:
        """Return all that the page knows, as plain JSON values.

        Args:
            most: How many samples have details; None for none, which are asked of a server.
        """
        samples = self.data.samples
        return {
            "version": VERSION,
            "name": visible(Path(self.file.path).name),
            "facts": self._facts(),
            "warnings": [visible(line) for line in summary_of(self.data).overview().warnings],
            "samples": samples.n,
            "left_out": samples.total - samples.n,
            "served": most is None,
            "columns": {name: packed(column) for name, column in self._columns().items()},
            "ids": None if samples.id is None else [visible(str(plain(i))) for i in samples.id],
            "classes": self._classes(),
            "parameters": [visible(name) for name in self.file.norms],
            "heat": self._heat(),
            "second": None if self.other is None else visible(Path(self.other.path).name),
            "why": self._why(),
            **self.details(_chosen(self.data, most or 0)),
        }

    def details(self, places: Places) -> dict[str, Any]:
        """Return the details of the samples at `places` (k,) among the finite ones."""
        samples = self.data.samples
        album = Album(self.opened, samples.index[places].tolist())
        names, rows = list(self.file.norms), samples.rows[places]
        few = places if len(places) * len(names) <= _LAYERED else places[: _LAYERED // len(names)]
        norms = [np.asarray(self.file.norms[name])[rows[: len(few)]] for name in names]
        found: dict[str, Any] = {
            "places": packed(places),
            "album": album.document(),
            "norms": packed(np.stack(norms, 1).astype(np.float32)) if norms else packed([]),
        }
        if isinstance(self.neighbours, Neighbours):
            aligned, opposed = self.neighbours.of(places)
            found["aligned"], found["opposed"] = (
                {"places": packed(one.places.astype(np.int32)), "cosines": packed(one.cosines)}
                for one in (aligned, opposed)
            )
            found["beside"] = aligned.places.shape[1]
        if self.scores is not None:
            found["scores"] = self._scored(samples.index[places].tolist())
        return found

    def _facts(self) -> list[tuple[str, str]]:
        rows: list[Fact] = [("file", str(self.file.path)), *FileFacts.of(self.file).in_short()]
        told = [
            (key, v if isinstance(v, str) else v.text)
            for key, v in rows
            if not isinstance(v, Spark)
        ]
        return [(visible(key), visible(text)) for key, text in told]

    def _columns(self) -> dict[str, NDArray[Any]]:
        samples = self.data.samples
        found = {"index": samples.index, "loss": samples.loss, "norm": samples.norm}
        more = {"cosine": self.data.cosines, "margin": samples.margin}
        one = {"target": samples.target, "prediction": samples.prediction}
        more |= {k: v for k, v in one.items() if v is not None and v.ndim == 1}
        found |= {name: np.asarray(v, np.float64) for name, v in more.items() if v is not None}
        return found | (self._second() if self.other is not None else {})

    def _second(self) -> dict[str, NDArray[Any]]:
        """Return the same samples' columns in the second file; NaN where it has none of them."""
        assert self.other is not None
        table = self.other.samples
        at = {int(index): k for k, index in enumerate(table["index"])}
        rows = np.array([at.get(int(index), -1) for index in self.data.samples.index], np.int64)
        found = {}
        for name in ("loss", "norm", "prediction", "margin"):
            if name in table:
                values = np.append(np.asarray(table[name], np.float64), np.nan)
                found[f"{name}2"] = values[rows]
        return found

    def _classes(self) -> dict[str, str] | None:
        """Return {class: its name} where targets are a few classes."""
        target = self.data.samples.target
        if target is None or target.ndim != 1 or target.dtype.kind not in "iub":
            return None
        known = np.unique(target).tolist()
        if len(known) > _CLASSES:
            return None
        return {str(c): visible(self.opened.class_name(c) or str(c)) for c in known}

    def _heat(self) -> dict[str, Any] | None:
        found: Heat | None = heat(self.data) if self._classes() else None
        return None if found is None else found.document()

    def _why(self) -> dict[str, str]:
        """Say what the page cannot show, and what to do."""
        first = self.data.samples.index[:1].tolist()
        found = {"samples": self.opened.why or Album(self.opened, first).lacks}
        if isinstance(self.neighbours, str):
            found["neighbours"] = self.neighbours
        if self.data.cosines is None:
            found["cosines"] = 'compute with -t identity, -t gram or -t "cosine:to=mean"'
        return {name: visible(text) for name, text in found.items() if text}

    def _scored(self, indexes: Sequence[int]) -> dict[str, Any]:
        """Return who helped and who harmed the samples that are queries of the scores."""
        scores = self.scores
        assert scores is not None
        at = {int(index): q for q, index in enumerate(scores.queries["index"])}
        found: dict[str, list[list[tuple[int, float]]]] = {}
        for k, index in enumerate(indexes):
            if index in at:
                ranked = (scores.helpful(at[index], _TOP), scores.harmful(at[index], _TOP))
                found[str(k)] = [
                    [(int(p), float(s)) for p, s in zip(r.places, r.scores, strict=True)]
                    for r in ranked
                ]
        used = sorted({p for lists in found.values() for one in lists for p, _ in one})
        table = scores.samples
        side = Opened.of(scores.record.get("train") or {})
        known = {
            name: packed(np.asarray(table[name][used], np.float64))
            for name in ("index", "target", "prediction")
            if name in table and np.ndim(table[name]) == 1
        }
        album = Album(side, np.asarray(table["index"])[used].tolist()).document()
        return {"of": found, "places": packed(np.asarray(used, np.int32)), **known, "album": album}


_CLASSES = 100  # more are not classes to choose from


def _digests(record: GradientFile | Scores) -> set[str]:
    if isinstance(record, Scores):
        told: Mapping[str, Any] = record.record.get("query") or {}
        return {str((told.get("digests") or {}).get("dataset"))}
    return {str(record.attributes.get("dataset_sha256"))}


def _chosen(data: Data, most: int) -> Places:
    """Return at most so many places: half the largest norms, a quarter losses, the rest even."""
    n = data.samples.n
    if n <= most:
        return np.arange(n)
    by_norm = np.argsort(-data.samples.norm, kind="stable")[: most // 2]
    loss = np.where(np.isnan(data.samples.loss), -np.inf, data.samples.loss)
    by_loss = np.argsort(-loss, kind="stable")[: most // 4]
    even = np.linspace(0, n - 1, most).astype(np.int64) if most else np.arange(0)
    first = dict.fromkeys([*by_norm.tolist(), *by_loss.tolist()])
    return np.array([*dict.fromkeys([*first, *even.tolist()])][:most], np.int64)


def look(
    file: GradientFile, other: GradientFile | None = None, scores: Scores | None = None
) -> View:
    """Open the samples of a file, and what goes with them.

    Args:
        file: The result file.
        other: A second one of the same data, such as of a later checkpoint.
        scores: Attribution of the file's samples, as queries, to training samples.

    Raises:
        SpecError: They are about other data.
    """
    return View(file, Opened.of(file.run, file.samples), other, scores)
