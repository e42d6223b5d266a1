"""The data of the page: columns of all samples of a result file, and the details of some.

The numbers come from the file, in float64. The details of a sample are large: a picture or a text,
norms by parameter, nearest and most opposed samples, training samples that helped and harmed. The
page has the details of a limited number of samples, mainly samples with large norms and losses. A
server has the details of all samples.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from math import ceil, isqrt, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscope import markup
from gradscope.attribution import Scores
from gradscope.core.texts import visible
from gradscope.errors import SpecError
from gradscope.process.memory import slices
from gradscope.sources.opened import Content, ShownData
from gradscope.stats import Options
from gradscope.stats.album import scaled
from gradscope.stats.certificate import FileFacts
from gradscope.stats.records import Floats, cosines_of, descending, plain, wide
from gradscope.stats.sections import WRONG, Overview
from gradscope.stats.source import (
    gram_of,
    keys_of,
    projections_of,
    rows_of,
    rows_unusable,
    token_names,
)
from gradscope.stats.summary import Data, summary_of
from gradscope.storage import GradientFile

VERSION = 1
_MOST = 5000  # the most samples with details on a page
_LAYERED = 500_000  # the most norms by parameter on a page
_TOP = 5  # the number of training samples that helped, and that harmed
_BESIDE = 6  # the number of neighbours of a sample
_ROWS = 2**30  # the most bytes of rows in memory
_TILE = 2**25  # the most products in memory
_CLASSES = 100  # the most classes in the list of classes

Places = NDArray[np.int64]
Contents = Sequence[Content | None]  # pictures, texts or numbers of samples


def packed(values: Any) -> dict[str, str]:
    """Return numbers (n, ...) as base64 of little-endian int32, float32 or float64, by dtype."""
    array = np.asarray(values)
    if array.dtype == np.float64:
        with np.errstate(over="ignore"):
            narrow = array.astype(np.float32)  # half as long, if the numbers were stored so
        array = narrow if np.array_equal(narrow, array, equal_nan=True) else array
    kind = "i4" if array.dtype.kind in "iub" else "f4" if array.dtype == np.float32 else "f8"
    return {kind: b64encode(np.ascontiguousarray(array, f"<{kind}").tobytes()).decode()}


class View:
    """The data of the page for a result file, with an optional second file and optional scores.

    Raises:
        SpecError: The second file or the scores were computed from different data.
    """

    def __init__(
        self, file: GradientFile, other: GradientFile | None = None, scores: Scores | None = None
    ) -> None:
        self.file, self.other, self.scores = file, other, scores
        self.opened = ShownData.of(file.run, file.samples)
        for what, record in (("second file", self.other), ("scores", self.scores)):
            if record is not None and self.digest not in _digests(record):
                raise SpecError(
                    f"the {what} and {self.file.path} were computed from different data",
                    remedy="Give files that were computed from one data set.",
                )
            table = record.queries if isinstance(record, Scores) else getattr(record, "samples", {})
            kinds = sorted({_kind(table), _kind(self.file.samples)})
            if record is not None and len(kinds) > 1:
                raise SpecError(
                    f"the {what} and {self.file.path} have different rows: {' and '.join(kinds)}",
                    remedy="Give files of the same gradscope compute --rows and --group.",
                )

    @property
    def digest(self) -> str:
        """The SHA-256 of the data."""
        return str(self.file.attributes.get("dataset_sha256"))

    @cached_property
    def noun(self) -> str:
        """The kind of row: "sample", "token" or "group"."""
        return FileFacts.of(self.file).noun

    @cached_property
    def data(self) -> Data:
        """The finite samples (n,), as input of statistics."""
        return Data(self.file, Options())

    @cached_property
    def _keys(self) -> Places:
        """The keys of the finite samples or tokens (n,); see `keys_of`."""
        return keys_of(self.file.samples)[self.data.samples.rows]

    @cached_property
    def _rows(self) -> dict[str, Floats] | None:
        """The stored gradients {name: (n, w)}, or None if they are too large for memory."""
        rows = None if rows_unusable(self.file) else rows_of(self.file)
        if not rows or sum(8 * prod(array.shape) for array in rows.values()) > _ROWS:
            return None
        found: dict[str, Floats] = {}
        for name, places, values in self.data.rows():
            if name not in found:
                found[name] = np.empty((self.data.samples.n, values.shape[1]))
            found[name][places[0] : places[-1] + 1] = values  # consecutive places
        return found

    @cached_property
    def neighbours(self) -> "Neighbours | str":
        """The nearest samples, from the most exact chain; or a text that says what is missing."""
        samples = self.data.samples
        gram = gram_of(self.file, samples.n)
        if gram is not None:
            return Neighbours(samples.norm, gram=gram)
        if self._rows is not None:
            return Neighbours(samples.norm, [*self._rows.values()])
        found = projections_of(self.file)
        if found is not None:
            return Neighbours(samples.norm, [found[1][samples.rows]])
        return "compute with -t identity, -t gram or -t project:dim=256"

    def overview(self) -> Overview:
        """Return the statistics of the file without lists of samples, which the page has."""
        found = summary_of(self.data).overview()
        others = [] if self.other is None else [str(self.other.path)]
        sections = [section for section in found.sections if not section.samples]
        return replace(found, paths=[*found.paths, *others], sections=sections)

    def document(self, most: int | None = _MOST) -> dict[str, Any]:
        """Return all data of the page, as plain JSON values.

        `most` samples have details. With None the page gets all details from a server.
        """
        samples, places = self.data.samples, _chosen(self.data, most or 0)
        contents = self._contents(places)
        some = contents if len(places) else self._contents(np.arange(min(1, samples.n)))
        return {
            "version": VERSION,
            "samples": samples.n,
            "noun": self.noun,
            "wrong": WRONG,
            "left_out": samples.total - samples.n,
            "served": most is None,
            "columns": {name: packed(column) for name, column in self._columns().items()},
            "ids": None if samples.id is None else [visible(str(plain(i))) for i in samples.id],
            "classes": self._classes(),
            "parameters": [visible(name) for name in self.file.norms],
            "heat": self._heat(),
            "second": self.other is not None,
            "scored": self.scores is not None,
            "why": self._why(some),
            **self.details(places, contents),
        }

    def _contents(self, places: Places) -> Contents:
        return self.opened.contents(self.data.samples.index[places].tolist())

    def details(self, places: Places, contents: Contents | None = None) -> dict[str, Any]:
        """Return the details of the samples at `places` (k,); their `contents`, if known."""
        samples = self.data.samples
        names, rows = list(self.file.norms), samples.rows[places]
        few = places if len(places) * len(names) <= _LAYERED else places[: _LAYERED // len(names)]
        norms = [np.asarray(self.file.norms[name])[rows[: len(few)]] for name in names]
        found: dict[str, Any] = {
            "places": packed(places),
            "album": _album(self._contents(places) if contents is None else contents),
            "norms": packed(np.stack(norms, 1).astype(np.float32)) if norms else packed([]),
        }
        if isinstance(self.neighbours, Neighbours):
            ranked = self.neighbours.of(places)
            found["beside"] = ranked.shape[-1]
            for word, (beside, cosines) in zip(("aligned", "opposed"), ranked, strict=True):
                which = packed(beside.astype(np.int32))
                found[word] = {"places": which, "cosines": packed(cosines)}
        if self.scores is not None:
            found["scores"] = self._scored(self._keys[places].tolist())
        return found

    def _columns(self) -> dict[str, NDArray[Any]]:
        samples = self.data.samples
        found = {"index": samples.index, "loss": samples.loss, "norm": samples.norm}
        more = {"cosine": self.data.cosines, "margin": samples.margin, "size": samples.size}
        one = {"target": samples.target, "prediction": samples.prediction}
        more |= {k: v for k, v in one.items() if v is not None and v.ndim == 1}
        found |= {name: np.asarray(v, np.float64) for name, v in more.items() if v is not None}
        return found | (self._second() if self.other is not None else {})

    def _second(self) -> dict[str, NDArray[Any]]:
        """Return the columns of the second file for the same samples, NaN for missing samples."""
        assert self.other is not None
        table = self.other.samples
        keys = keys_of(table)
        order = np.argsort(keys, kind="stable")
        at = order[np.searchsorted(keys[order], self._keys, side="right") - 1]
        rows = np.where(keys[at] == self._keys, at, -1)
        found = {}
        for name in ("loss", "norm", "prediction", "margin"):
            if name in table:
                values = np.append(np.asarray(table[name], np.float64), np.nan)
                found[f"{name}2"] = values[rows]
        return found

    def _classes(self) -> dict[str, str] | None:
        """Return {class: its name}, or None if the targets are not at most 100 classes."""
        target = self.data.samples.target
        if target is None or target.ndim != 1 or target.dtype.kind not in "iub":
            return None
        known = np.unique(target).tolist()
        if len(known) > _CLASSES:
            return None
        return {str(c): visible(self.opened.class_name(c) or str(c)) for c in known}

    def _heat(self) -> dict[str, Any] | None:
        """Return numbers (c, p) of each class in each parameter, or None without classes.

        The numbers are mean ‖gᵢ‖ and, with rows, ‖G_c‖² / tr Σ_c. Undefined numbers are null.
        """
        if not self._classes():
            return None
        samples, file, data = self.data.samples, self.file, self.data
        classes, of = np.unique(np.asarray(samples.target), return_inverse=True)
        member = np.zeros((len(classes), samples.n))
        member[of, np.arange(samples.n)] = 1.0
        share = member / member.sum(1, keepdims=True)
        norms = {name: wide(column)[samples.rows] for name, column in file.norms.items()}
        sums: dict[str, Floats] = {}  # G_c (c, w) of each parameter
        if self._rows is not None:
            sums = {name: share @ values for name, values in self._rows.items()}
        elif rows_unusable(file) is None:
            for name, places, values in data.rows():
                some = share[:, places] @ values
                sums[name] = sums[name] + some if name in sums else some
        snr = None
        if set(sums) == set(norms):
            with np.errstate(all="ignore"):
                signal = np.stack([np.square(sums[name]).sum(1) for name in norms], 1)
                noise = np.stack([share @ np.square(v) for v in norms.values()], 1) - signal
                snr = _table(np.where(noise > 0, signal / noise, np.nan))
        return {
            "classes": classes.tolist(),
            "parameters": [visible(name) for name in norms],
            "norm": _table(np.stack([share @ v for v in norms.values()], 1)),
            "snr": snr,
        }

    def _why(self, contents: Contents) -> dict[str, str]:
        """Return what the page cannot show, with what to do."""
        found = {"samples": self.opened.why or _missing_package(contents)}
        if isinstance(self.neighbours, str):
            found["neighbours"] = self.neighbours
        if self.data.cosines is None:
            found["cosines"] = 'compute with -t identity, -t gram or -t "cosine:to=mean"'
        return {name: visible(text) for name, text in found.items() if text}

    def _scored(self, keys: Sequence[int]) -> dict[str, Any]:
        """Return the training samples that helped and harmed the queries among the samples."""
        scores = self.scores
        assert scores is not None
        at = {key: q for q, key in enumerate(keys_of(scores.queries).tolist())}
        found: dict[str, list[list[tuple[int, float]]]] = {}
        for k, key in enumerate(keys):
            if key in at:
                ranked = (scores.helpful(at[key], _TOP), scores.harmful(at[key], _TOP))
                found[str(k)] = [
                    [(int(p), float(s)) for p, s in zip(r.places, r.scores, strict=True)]
                    for r in ranked
                ]
        used = sorted({p for lists in found.values() for one in lists for p, _ in one})
        table = scores.samples
        side = ShownData.of(scores.record.get("train") or {}, table)
        known: dict[str, Any] = {
            name: packed(np.asarray(table[name][used], np.float64))
            for name in ("index", "target", "prediction")
            if name in table and np.ndim(table[name]) == 1
        }
        album = _album(side.contents(np.asarray(table["index"])[used].tolist()))
        if "position" in table:
            some = {k: np.asarray(table[k])[used] for k in ("sample", "position")}
            known["ids"] = [*map(str, token_names(some))]
        elif "size" in table:
            known["ids"] = [str(plain(name)) for name in np.asarray(table["id"])[used]]
        known |= {"unit": str(scores.record.get("unit")), "noun": scores.noun}
        return {"of": found, "places": packed(np.asarray(used, np.int32)), **known, "album": album}


def _table(values: Floats) -> list[list[float | None]]:
    return [[float(v) if np.isfinite(v) else None for v in row] for row in values]


@dataclass(frozen=True)
class Neighbours:
    """Finds the nearest and the most opposed of n samples, from vectors or a Gram matrix."""

    lengths: Floats  # (n,)
    vectors: Sequence[Floats] = ()  # the vectors, in parts (n, w)
    gram: Floats | None = None  # products (n, n)

    def of(self, places: Places) -> NDArray[np.float64]:
        """Return places and cosines (2, 2, k, b) of the b nearest and b most opposed, of k samples.

        If there are fewer neighbours, the remaining places are -1 and their cosines NaN.
        """
        n = len(self.lengths)
        found = np.empty((2, 2, len(places), min(_BESIDE, max(n - 1, 0))))
        for rows in slices(len(places), n, _TILE):
            some = places[rows]
            dots = np.zeros((len(some), n)) if self.gram is None else self.gram[some]
            for part in self.vectors:
                dots += part[some] @ part.T
            cosines = cosines_of(dots, np.outer(self.lengths[some], self.lengths))
            cosines[np.arange(len(some)), some] = np.nan  # a sample is not its own neighbour
            for ranked, sign in zip(found[:, :, rows], (-1.0, 1.0), strict=True):
                keys = np.where(np.isnan(cosines), np.inf, sign * cosines)
                order = np.argsort(keys, axis=1, kind="stable")[:, : found.shape[-1]]
                known = np.take_along_axis(cosines, order, 1)
                ranked[:] = np.where(np.isnan(known), -1, order), known
        return found


def _kind(table: Mapping[str, Any]) -> str:
    """Return the kind of the rows of a sample table."""
    return "tokens" if "position" in table else "groups" if "size" in table else "samples"


def _digests(record: GradientFile | Scores) -> set[str]:
    if isinstance(record, Scores):
        query: Mapping[str, Any] = record.record.get("query") or {}
        return {str((query.get("digests") or {}).get("dataset"))}
    return {str(record.attributes.get("dataset_sha256"))}


def _chosen(data: Data, most: int) -> Places:
    """Return `most` places: 1/2 largest norms, 1/4 largest losses, the rest evenly spread."""
    n = data.samples.n
    if n <= most:
        return np.arange(n)
    by_norm = descending(data.samples.norm, most // 2)[: most // 2]
    loss = np.where(np.isnan(data.samples.loss), -np.inf, data.samples.loss)
    by_loss = descending(loss, most // 4)[: most // 4]
    even = np.linspace(0, n - 1, most).astype(np.int64) if most else np.arange(0)
    first = dict.fromkeys([*by_norm.tolist(), *by_loss.tolist()])
    return np.array([*dict.fromkeys([*first, *even.tolist()])][:most], np.int64)


_LARGEST = 96  # the largest side of a picture, in pixels
_PIXELS = 6_000_000  # the most pixels of a sheet
_LETTERS = 2_000_000  # the most letters in all texts


def _missing_package(contents: Contents) -> str:
    """Return how to install the package that pictures need, or "" if nothing is missing."""
    drawn = any(isinstance(content, np.ndarray) for content in contents)
    lacks = drawn and find_spec("PIL") is None
    return "pictures need Pillow: pip install 'torch-gradscope[data]'" if lacks else ""


def _album(contents: Contents) -> dict[str, Any]:
    """Return the sheet, the texts and the numbers of samples, or None for a missing kind."""
    rows = [c for c in contents if isinstance(c, dict)]
    names = list(dict.fromkeys(name for row in rows for name in row))
    longest = max(80, _LETTERS // max(1, len(contents)))
    return {
        "sheet": _sheet(contents),
        "texts": _of_kind(contents, str, lambda text: visible(text[:longest], keep="\n")),
        "names": [visible(name) for name in names],
        "numbers": _of_kind(contents, dict, lambda row: [row.get(name) for name in names]),
    }


def _of_kind(contents: Contents, kind: type, shown: Any) -> list[Any] | None:
    """Return `shown(c)` for contents of the kind and None for other contents, if any."""
    found = [shown(c) if isinstance(c, kind) else None for c in contents]
    return found if any(one is not None for one in found) else None


def _sheet(contents: Contents) -> dict[str, Any] | None:
    """Return all pictures in one PNG, the size of its cells, and the sample of each picture.

    Pictures of one shape share a scale: the least number is black, the largest is white.
    """
    known = [k for k, content in enumerate(contents) if isinstance(content, np.ndarray)]
    if not known or find_spec("PIL") is None:
        return None
    from PIL import Image

    every: list[Any] = scaled([contents[k] for k in known])
    side = min(_LARGEST, max(8, isqrt(_PIXELS // len(every))))
    largest = max(max(p.shape[:2]) for p in every)
    side = min(side, largest)
    mode = "RGB" if any(p.ndim == 3 for p in every) else "L"
    across = ceil(len(every) ** 0.5)
    sheet = Image.new(mode, (across * side, ceil(len(every) / across) * side))
    sizes = []
    for k, picture in enumerate(every):
        one = Image.fromarray(picture).convert(mode)
        if max(one.size) > side:
            one.thumbnail((side, side))
        sheet.paste(one, (k % across * side, k // across * side))
        sizes.append([one.size[0], one.size[1]])
    alike = sizes[0] if all(size == sizes[0] for size in sizes) else None
    return {
        "source": markup.source(sheet),
        "side": side,
        "across": across,
        "of": known,
        "size": alike,
        "sizes": None if alike else sizes,
    }
