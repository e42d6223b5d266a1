"""HTML of an overview, for pages and notebooks: facts, tables and cards."""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from gradscope import markup
from gradscope.stats.records import Histogram
from gradscope.stats.sections import (
    BARS,
    Card,
    Fact,
    Line,
    Overview,
    Pixels,
    Section,
    Sparkline,
    Table,
    bins,
    count_column,
    facts_under,
    short,
    symbols,
    text_of,
)

_LARGEST = 112  # the largest side of a sample's picture, in pixels


def facts(rows: Sequence[Fact], label: str = "") -> str:
    """Return labels with their values."""
    return markup.facts([(name, _value(value, name)) for name, value in rows], label)


def _value(value: Line | Sparkline, name: str) -> str:
    if isinstance(value, Sparkline):
        return markup.bars(value.thinned(BARS), value.label, name)
    return text_of(value)


def table(found: Table, label: str = "") -> str:
    """Return a table."""
    columns = [
        markup.Column(c.title, [*map(text_of, c.cells)], c.values, c.from_data)
        for c in found.columns
    ]
    names = None if found.names is None else markup.Column(found.title, found.names)
    return markup.table(columns, names, label)


def title(found: Overview) -> str:
    """Return the names of the result files."""
    return " and ".join(Path(path).name for path in found.paths)


def header(found: Overview) -> str:
    """Return the first lines of a page: the names of the files, and warnings."""
    return f"<h1>{markup.safe(title(found))}</h1>\n{warnings(found)}"


def warnings(found: Overview) -> str:
    """Return the warnings of a result."""
    lines = (f'<p class="warning" role="alert">{markup.safe(line)}</p>' for line in found.warnings)
    return "".join(lines)


def about(found: Overview, label: str) -> str:
    """Return the paths and facts of the files. A click opens their certificates and runs."""
    named = {text_of(value) for _, value in found.facts}
    paths = facts_under("file", [path for path in found.paths if path not in named])
    parts = [facts([*paths, *found.facts], label)]
    for name, record in (found.records or {}).items():
        if record:
            text = markup.safe(json.dumps(record, ensure_ascii=False, indent=2), keep="\n")
            parts.append(markup.details(f"{name}, as recorded", f'<pre tabindex="0">{text}</pre>'))
    return "\n".join(parts)


def shown(sections: Sequence[Section]) -> list[Section]:
    """Return the sections of a page. Sections with `instead` are left out if there are cards."""
    cards = any(section.cards for section in sections)
    return [section for section in sections if not (cards and section.instead)]


def section(found: Section, noun: str) -> str:
    """Return the content of a section without its title. A click opens its formulas.

    If there are cards, they come first, and a click opens the table of the same samples.
    """
    parts = []
    if found.facts:
        parts.append(facts(found.facts, found.title))
    if found.histogram is not None:
        names, numbers = zip(*bins(found.histogram), strict=True)
        counted = table(Table([count_column(f"{noun}s", numbers)], "norm", names), "Bins")
        parts.append(facts([(_range(found.histogram), Sparkline(numbers))], found.title))
        parts.append(markup.details("Bins", counted))
    parts.append(_groups(found.cards))
    if found.table is not None:
        listed = table(found.table, found.title)
        parts.append(markup.details("In numbers", listed) if found.cards else listed)
    parts += [f"<p>{markup.safe(text_of(note))}</p>" for note in found.notes]
    if found.formulas:
        lines = (*found.formulas, symbols(noun))
        items = "".join(f"<li>{markup.safe(line)}</li>" for line in lines)
        parts.append(markup.details("Formulas", f"<ul>{items}</ul>"))
    return "\n".join(filter(None, parts))


def _groups(groups: Sequence[tuple[str, Sequence[Card]]]) -> str:
    """Return cards of samples, several groups side by side."""
    parts = []
    for heading, cards in groups:
        above = f"<h3>{markup.safe(heading)}</h3>" if heading else ""
        parts.append(f'{above}<ul class="cards">{"".join(map(_card, cards))}</ul>')
    if len(parts) < 2:
        return "".join(parts)
    return f'<div class="groups">{"".join(f"<div>{part}</div>" for part in parts)}</div>'


def _range(histogram: Histogram) -> str:
    edges = histogram.edges
    return f"norm {short(edges[0])} to {short(edges[-1])}" if edges else "norm 0"


def _card(card: Card) -> str:
    """Return the card of a sample. A long text can be scrolled with the keyboard."""
    kinds, content = "card", ""
    if card.wrong is not None:
        kinds += " wrong"
    if isinstance(card.content, str):
        kinds += " text"
        label, text = markup.safe(card.title), markup.safe(card.content, keep="\n")
        content = f'<p class="excerpt" tabindex="0" role="region" aria-label="{label}">{text}</p>'
    elif card.content is not None and find_spec("PIL") is not None:
        alt = markup.safe(", ".join([card.title, *card.captions()]))
        content = f'<img class="picture" src="{_source(card.content)}" alt="{alt}">'
    lines = "".join(f"<span>{markup.safe(line)}</span>" for line in card.captions())
    title = markup.safe(card.title)
    return f'<li><div class="{kinds}">{content}<strong>{title}</strong>{lines}</div></li>'


def _source(pixels: Pixels) -> str:
    """Return a picture as a data URI; a large picture is made smaller."""
    from PIL import Image

    picture = Image.fromarray(pixels.values)
    picture.thumbnail((_LARGEST, _LARGEST))
    return markup.source(picture)
