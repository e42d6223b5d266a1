"""Cards of samples: a picture or a text with its label and the prediction."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gradscope.sources.opened import Content, ShownData
from gradscope.stats.records import Plain
from gradscope.stats.sections import Card, Displayable, Overview, Pixels, Section, short, value_text


class NamedSample(Protocol):
    """A row about a sample."""

    index: int  # its position in the data set
    id: int | str | None  # its name in the data


class PredictedSample(NamedSample, Protocol):
    """A row with the target and the prediction of a sample."""

    target: Plain
    prediction: Plain  # the model's prediction


def sample_name(row: NamedSample) -> str:
    """Return the name of a sample: its id, else its position in the data set."""
    return str(row.index if row.id is None else row.id)


def is_wrong(row: PredictedSample) -> bool:
    """Whether the model predicts a class that is not the target."""
    target, prediction = row.target, row.prediction
    return isinstance(target, int) and isinstance(prediction, int) and prediction != target


def target_text(opened: ShownData, target: Any) -> str:
    """Return a target, with the name of its class if the data have one."""
    name = opened.class_name(target)
    return value_text(target) if name is None else f"{name} ({target})"


class Album:
    """The inputs of samples, read from their data sets.

    Attributes:
        datasets: The data sets, by name.
        contents: Pictures, texts or rows of numbers by (data set, index), if known.
    """

    def __init__(
        self, datasets: Mapping[str, ShownData], wanted: Mapping[str, Sequence[int]]
    ) -> None:
        self.datasets = datasets
        keys = [(name, k) for name, indexes in wanted.items() for k in indexes]
        found = [c for name, some in wanted.items() for c in datasets[name].contents(some)]
        self.contents: dict[tuple[str, int], Pixels | str | dict[str, float]] = {
            key: Pixels(content) if isinstance(content, np.ndarray) else content
            for key, content in zip(keys, scaled(found), strict=True)
            if content is not None
        }

    def card(
        self, dataset: str, row: PredictedSample, lines: Sequence[str] = (), kind: str = "sample"
    ) -> Card:
        """Return the card of a sample: label, prediction, and further `lines`."""
        opened, known = self.datasets[dataset], list[str]()
        kind = "token" if kind == "sample" and opened.of_row else kind
        if row.target is not None:
            known.append(f"target {target_text(opened, row.target)}")
        if row.prediction is not None:
            known.append(f"predicted {target_text(opened, row.prediction)}")
        content = self.contents.get((dataset, row.index))
        if isinstance(content, dict):
            content = ", ".join(f"{k} {short(v)}" for k, v in content.items())
        at = len(known) - 1 if is_wrong(row) else None
        return Card(f"{kind} {sample_name(row)}", [*known, *lines], content, wrong=at)


def scaled(contents: Sequence[Content | None]) -> list[Content | None]:
    """Return samples with pictures as bytes; pictures of one shape share a scale, 0 to 255."""
    pictures = [content for content in contents if isinstance(content, np.ndarray)]
    ranges = {}
    for shape in {picture.shape for picture in pictures}:
        finite = [p[np.isfinite(p)] for p in pictures if p.shape == shape]
        low = min((float(p.min()) for p in finite if p.size), default=0.0)
        high = max((float(p.max()) for p in finite if p.size), default=1.0)
        ranges[shape] = low, high - low or 1.0

    def in_bytes(picture: NDArray[Any]) -> NDArray[np.uint8]:
        low, width = ranges[picture.shape]
        levels = (np.nan_to_num(picture, nan=low) - low) * (255 / width)
        found: NDArray[np.uint8] = np.clip(np.rint(levels), 0, 255).astype(np.uint8)
        return found

    return [in_bytes(c) if isinstance(c, np.ndarray) else c for c in contents]


def with_samples(result: Displayable, opened: ShownData) -> Overview:
    """Return the overview of a result with a card for each sample that it lists.

    Samples that are rows of numbers get no card.
    """
    found = result.overview()
    every = [*found.sections, *(found.brief.sections if found.brief else ())]
    wanted = sorted({row.index for section in every for row in section.samples})
    album = Album({"": opened}, {"": wanted})
    seen = {k for k, c in album.contents.items() if not isinstance(c, dict)}

    def with_cards(section: Section) -> Section:
        rows = [row for row in section.samples if ("", row.index) in seen]
        names = ("norm", "loss", "cosine")
        known = ({name: getattr(row, name) for name in names} for row in rows)
        lines = ([f"{k} {short(v)}" for k, v in one.items() if v is not None] for one in known)
        cards = [album.card("", *both) for both in zip(rows, lines, strict=True)]
        return replace(section, cards=[*section.cards, ("", cards)]) if cards else section

    brief = found.brief
    if brief is not None:
        brief = replace(brief, sections=[*map(with_cards, brief.sections)])
    facts = [*found.facts, (f"{found.noun}s not shown", opened.why)] if opened.why else found.facts
    sections = [*map(with_cards, found.sections)]
    return replace(found, facts=facts, sections=sections, brief=brief)
