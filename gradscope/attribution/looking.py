"""Scores with the samples that they are about, as they are: pictures, texts, rows of numbers.

The data are opened again where the recorded run had them, and must be the same by their digest. A
data set that the user's own code makes is not: a file is not to say what code is run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradscope.attribution.scores import Scores
from gradscope.attribution.summary import (
    INFLUENCE,
    QueryRow,
    Scored,
    ScoreSummary,
    name_of,
    queries,
)
from gradscope.config import RunSpec
from gradscope.errors import GradscopeError
from gradscope.sources import Dataset, open_dataset, words
from gradscope.stats.sections import Card, Column, Overview, Pixels, Section, Table, short

QUERIES = 40  # on a page
_SIDES = {"query": "queries", "train": "training samples"}
_LEAST_SIDE = 4  # pixels: narrower arrays are tables of numbers
_LETTERS, _NUMBERS = 1000, 64  # of a sample that are shown

Decode = Callable[[list[int]], str]
Groups = Sequence[tuple[str, str, Sequence[QueryRow | Scored]]]  # heading, side, samples
Content = NDArray[Any] | str | dict[str, float]  # pixels (h, w) or (h, w, 3), a text, numbers


@dataclass(frozen=True)
class Opened:
    """The data of one side."""

    dataset: Dataset | None
    why: str = ""  # they cannot be shown
    texts: Mapping[str, Decode] = field(default_factory=dict)  # of arrays that stand for texts

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> "Opened":
        """Open the data set of a side as a score file tells of it."""
        try:
            spec = RunSpec.model_validate(told.get("spec")).dataset
        except ValueError:
            return cls(None, "the file does not say where the data are")
        if spec.factory is not None:
            return cls(None, f"they are made by {spec.factory}, and code is not run to show them")
        try:
            found = open_dataset(spec)
            if found.sha256 != (told.get("digests") or {}).get("dataset"):
                return cls(None, f"{spec.path} has changed since")
            texts = {name: words(spec, name) for name in spec.arrays}
        except GradscopeError as error:
            return cls(None, f"{error}".partition("\n")[0])
        return cls(found, texts={k: v for k, v in texts.items() if v is not None})

    def content(self, index: int) -> Content | None:
        """Return the first input of a sample that can be shown."""
        if self.dataset is None:
            return None
        try:
            batch = self.dataset.batch(range(index, index + 1))
            return next(self._contents(batch.inputs), None)
        except GradscopeError:
            return None

    def _contents(self, inputs: Any) -> Iterator[Content]:
        """Yield what can be shown of one sample's inputs, each (1, ...)."""
        assert self.dataset is not None
        names = self.dataset.spec.inputs
        if isinstance(names, dict):
            pairs = [(name, inputs[keyword]) for keyword, name in names.items()]
        else:
            pairs = [*zip(names, inputs if isinstance(inputs, tuple) else (inputs,), strict=False)]
        for name, value in pairs:
            if isinstance(value, Tensor) and value.dim() and not value.is_complex():
                whole = not value.is_floating_point() and value.dim() == 2
                text = _text(value[0], self.texts.get(name)) if whole else None
                row = value[0].detach().cpu().double().numpy()
                yield _content(self.dataset.headings(name), row) if text is None else text

    def label(self, target: Any) -> str:
        """Return a target, with the name that the data have for its class."""
        named = () if self.dataset is None else self.dataset.spec.targets[:1]
        names = [*self.dataset.spec.classes.get(named[0], ())] if self.dataset and named else []
        known = isinstance(target, int) and 0 <= target < len(names)
        return f"{names[target]} ({target})" if known else _plain(target)


def _text(row: Tensor, decode: Decode | None) -> str | None:
    """Return the text that whole numbers (t,) stand for; many that stand for none as they are."""
    numbers = row.tolist()
    if decode is not None:
        return decode(numbers)[:_LETTERS]
    if row.dtype == torch.uint8:
        text = bytes(numbers).rstrip(b"\0").decode("utf-8", "replace")
        if "\ufffd" not in text and all(c.isprintable() or c in "\t\r\n" for c in text):
            return text[:_LETTERS]
    return " ".join(map(str, numbers))[:_LETTERS] if len(numbers) > _NUMBERS else None


def _content(names: Sequence[str], row: NDArray[Any]) -> Content:
    """Return a sample's array as a picture, or as numbers with the names of its columns."""
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


@dataclass(frozen=True)
class Looked:
    """A summary of scores with its samples, each of them opened."""

    summary: ScoreSummary
    sides: Mapping[str, Opened]
    contents: Mapping[tuple[str, int], Content]  # by side and index

    def overview(self) -> Overview:
        """Return what is shown: each query with its most helpful and harmful samples."""
        plain = self.summary.overview()
        shown = self.summary.rows[:QUERIES] if self.contents else ()
        kept = [s for s in plain.sections if not (shown and s.title == INFLUENCE)]
        missing = [
            (f"{_SIDES[side]} not shown", opened.why)
            for side, opened in self.sides.items()
            if opened.why
        ]
        more = len(self.summary.rows) - len(shown)
        if shown and more:
            missing.append(("not shown", f"{queries(more)} more: --json has all"))
        sections = [self._section(row) for row in shown]
        facts, pictures = [*plain.facts, *missing], () if shown else plain.pictures
        return replace(plain, facts=facts, sections=[*sections, *kept], pictures=pictures)

    def _section(self, row: QueryRow) -> Section:
        groups: Groups = [
            ("The query", "query", [row]),
            ("Helped most: its loss would be higher without", "train", row.helpful),
            ("Harmed most: its loss would be lower without", "train", row.harmful),
        ]
        every = (self.contents.get((side, r.index)) for side, r in self._named(groups))
        found = [content for content in every if content is not None]
        title = f"Query {name_of(row)}"
        if found and all(isinstance(c, dict) for c in found):
            return Section(title, table=self._table(groups))
        cards = [
            (name, [self._card(side, sample) for sample in samples])
            for name, side, samples in groups
            if samples
        ]
        return Section(title, cards=cards)

    @staticmethod
    def _named(groups: Groups) -> list[tuple[str, QueryRow | Scored]]:
        return [(side, sample) for _, side, samples in groups for sample in samples]

    def _card(self, side: str, sample: QueryRow | Scored) -> Card:
        """Return a sample with its label, the model's prediction, and its loss or score."""
        label = self.sides[side].label
        lines = []
        if sample.target is not None:
            lines.append(f"target {label(sample.target)}")
        wrong = isinstance(sample.prediction, int) and sample.prediction != sample.target
        if sample.prediction is not None:
            lines.append(f"predicted {label(sample.prediction)}{' (wrong)' * wrong}")
        if isinstance(sample, Scored):
            lines.append(f"score {short(sample.score)}")
        elif sample.loss is not None:
            lines.append(f"loss {short(sample.loss)}")
        kind = "query" if side == "query" else "sample"
        found = self._shown(self.contents.get((side, sample.index)))
        return Card(f"{kind} {name_of(sample)}", lines, found, marked=wrong)

    def _shown(self, content: Content | None) -> Pixels | str | None:
        if isinstance(content, np.ndarray):
            return self._pixels(content)
        if isinstance(content, dict):
            return ", ".join(f"{k} {short(v)}" for k, v in content.items())
        return content

    def _pixels(self, values: NDArray[Any]) -> Pixels:
        """Scale pictures of one shape by their common range, which is of all that are shown."""
        alike = [
            c
            for c in self.contents.values()
            if isinstance(c, np.ndarray) and c.shape == values.shape
        ]
        finite = [c[np.isfinite(c)] for c in alike]
        low = min((float(c.min()) for c in finite if c.size), default=0.0)
        high = max((float(c.max()) for c in finite if c.size), default=1.0)
        scaled = (np.nan_to_num(values, nan=low) - low) * (255 / (high - low or 1.0))
        return Pixels(np.clip(np.rint(scaled), 0, 255).astype(np.uint8))

    def _table(self, groups: Groups) -> Table:
        """Return a row a sample, a column an entry."""
        rows = self._named(groups)
        roles = [name.partition(" most")[0] for name, _, samples in groups for _ in samples]
        found = [self.contents.get((side, r.index)) for side, r in rows]
        entries = dict.fromkeys(k for c in found if isinstance(c, dict) for k in c)
        scores = [r.score if isinstance(r, Scored) else None for _, r in rows]
        columns = [
            Column("sample", [name_of(r) for _, r in rows]),
            Column("target", [self.sides[side].label(r.target) for side, r in rows]),
            Column("predicted", [self.sides[side].label(r.prediction) for side, r in rows]),
            Column("score", [short(s) for s in scores], values=scores),
        ]
        for entry in entries:
            values = [c.get(entry) if isinstance(c, dict) else None for c in found]
            columns.append(Column(entry, [short(v) for v in values], values=values))
        return Table(columns, "", roles)


def looked(summary: ScoreSummary, scores: Scores) -> Looked:
    """Open the samples of a summary's first queries, and of who helped and harmed them."""
    sides = {side: Opened.of(scores.record.get(side) or {}) for side in _SIDES}
    wanted: dict[tuple[str, int], None] = {}
    for row in summary.rows[:QUERIES]:
        wanted["query", row.index] = None
        wanted |= {("train", s.index): None for s in (*row.helpful, *row.harmful)}
    found = {(side, index): sides[side].content(index) for side, index in wanted}
    return Looked(summary, sides, {k: v for k, v in found.items() if v is not None})


def _plain(target: Any) -> str:
    return short(target) if target is None or isinstance(target, float) else str(target)
