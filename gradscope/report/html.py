"""A result as one self-contained page: no network, light and dark, everything escaped."""

import io
import json
from base64 import b64encode
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from gradscope import markup
from gradscope.report import plots
from gradscope.report.terminal import bins
from gradscope.stats.sections import (
    NONE,
    Card,
    Column,
    Fact,
    Line,
    Overview,
    Picture,
    Pixels,
    Section,
    Shown,
    Spark,
    Table,
    symbols,
    text_of,
    whole,
)
from gradscope.storage import write_page

_LARGEST = 112  # pixels of a sample's side
_INK = "#010203"  # in the picture, to be replaced by the page's own text colour
_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #ffffff; --line: #d5d9de;
  --soft: #59636e; --link: #0b5cad; --shade: #f4f6f8; --warn: #a4161a; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --paper: #15181c; --line: #3a4048; --soft: #a3acb7; --link: #7ab8f5;
    --shade: #1d2127; --warn: #ff9b94; }
}
* { box-sizing: border-box; }
body { margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: var(--ink);
  background: var(--paper); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 0.5rem; }
p { margin: 0.3rem 0; }
.warning { color: var(--warn); font-weight: 600; }
dl { display: grid; grid-template-columns: minmax(8rem, max-content) 1fr; gap: 0.2rem 1.5rem;
  margin: 0.5rem 0; }
dt { color: var(--soft); grid-column: 1; }
dd { margin: 0; overflow-wrap: anywhere; grid-column: 2; }
.pairs { display: flex; flex-wrap: wrap; gap: 0.2rem 1.8rem; }
.pairs dd { font-variant-numeric: tabular-nums; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
  gap: 1rem; align-items: start; }
figure { margin: 0; }
svg { width: 100%; height: auto; color: var(--ink); display: block; }
.wide { overflow-x: auto; }
caption { position: absolute; width: 1px; height: 1px; overflow: hidden; white-space: nowrap;
  clip-path: inset(50%); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; min-width: 24rem; }
th, td { border-bottom: 1px solid var(--line); padding: 0.25rem 0.7rem; text-align: left;
  vertical-align: bottom; }
tbody th { font-weight: 400; overflow-wrap: anywhere; min-width: 8rem; }
tbody tr:hover { background: var(--shade); }
.number, th.number { text-align: right; }
th button { all: unset; cursor: pointer; font-weight: 600; }
summary { cursor: pointer; color: var(--link); width: max-content; padding: 0.2rem 0; }
details ul { margin: 0.2rem 0 0.8rem; padding-left: 1.2rem; }
pre { overflow: auto; max-height: 24rem; background: var(--shade); padding: 0.7rem;
  font-size: 0.8rem; }
:focus-visible, th button:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
th[aria-sort="ascending"] button::after { content: " \\2191"; }
th[aria-sort="descending"] button::after { content: " \\2193"; }
.cards { display: flex; flex-wrap: wrap; gap: 0.7rem; padding: 0; margin: 0.3rem 0 0.8rem;
  list-style: none; }
.cards li { border: 1px solid var(--line); border-radius: 0.4rem; padding: 0.5rem;
  width: 9.5rem; max-width: 100%; overflow-wrap: anywhere; font-size: 0.85rem; }
.cards li.text { width: min(100%, 34rem); }
.cards li.marked { border-color: var(--warn); }
.cards strong { display: block; }
.cards img { width: 100%; display: block; margin-bottom: 0.3rem; image-rendering: pixelated;
  background: var(--shade); }
.cards p { white-space: pre-wrap; font-family: ui-monospace, monospace; background: var(--shade);
  margin: 0 0 0.4rem; padding: 0.4rem; max-height: 12rem; overflow: auto; }
h3 { font-size: 0.95rem; font-weight: 600; color: var(--soft); margin: 0.6rem 0 0.2rem; }
@media (max-width: 34rem) {
  .cards li { width: calc(33.3% - 0.5rem); }
  .cards li.text { width: 100%; }
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { grid-column: 1; margin-bottom: 0.4rem; }
}
@media print { details { display: none; } }
"""

_SCRIPT = """
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const heading = button.parentElement, table = heading.closest("table");
    const up = heading.getAttribute("aria-sort") === "descending";
    for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", up ? "ascending" : "descending");
    const sign = up ? 1 : -1, column = heading.cellIndex, body = table.tBodies[0];
    const key = (row) => row.cells[column];
    const order = (a, b) => {
      const x = parseFloat(key(a).dataset.value), y = parseFloat(key(b).dataset.value);
      if (isNaN(x) && isNaN(y))
        return sign * key(a).textContent.localeCompare(key(b).textContent, "en", { numeric: true });
      if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y);
      return sign * (x - y);
    };
    body.append(...[...body.rows].sort(order));
  });
}
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def write_html(result: Shown, path: str | Path) -> None:
    """Write the page; it has pictures when matplotlib is installed.

    Raises:
        OutputError: The file cannot be written, or is another one.
    """
    write_page(Path(path), _page(result.overview()), "gradscope stats")


def _page(found: Overview) -> str:
    names = " and ".join(Path(path).name for path in found.paths)
    first, *others = found.sections
    samples = [section for section in others if section.cards]
    rest = [section for section in others if not section.cards]
    drawn = found.pictures if plots.available() else ()
    pictures = "\n".join(f"<figure>{_picture(picture)}</figure>" for picture in drawn)
    parts = [
        "".join(f'<p class="warning" role="alert">{_safe(line)}</p>' for line in found.warnings),
        _titled("Run", _facts(found.facts) + _records(found)),
        _section(first, found.noun),
        *(_section(section, found.noun) for section in samples),
        _titled("Pictures", f'<div class="pictures">\n{pictures}\n</div>') if pictures else "",
        *(_section(section, found.noun) for section in rest),
    ]
    body = "\n".join(part for part in parts if part)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="gradscope stats">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_safe(names)}: gradient statistics</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>{_safe(", ".join(found.paths))}</h1>
{body}
</main>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _safe(text: Line, keep: str = "") -> str:
    return markup.safe(text_of(text), keep)


def _titled(title: str, content: str) -> str:
    return f"<section><h2>{_safe(title)}</h2>\n{content}</section>"


def _section(section: Section, noun: str) -> str:
    """Return a section, or nothing where pictures show all it has."""
    parts = []
    if any(not isinstance(value, Spark) for _, value in section.facts):
        parts.append(_facts(section.facts))
    if section.pairs:
        items = "".join(
            f"<div><dt>{_safe(label)}</dt><dd>{_safe(value)}</dd></div>"
            for label, value in section.pairs
        )
        parts.append(f'<dl class="pairs">{items}</dl>')
    if section.histogram is not None:  # in numbers behind a click, since there is a picture
        names, counts = zip(*bins(section.histogram), strict=True)
        table = _table("Bins", Table([whole(f"{noun}s", counts)], "norm", names))
        parts.append(f"<details><summary>Bins</summary>{table}</details>")
    if section.table is not None:
        parts.append(_table(section.title, section.table))
    for heading, cards in section.cards:
        parts.append(f"<h3>{_safe(heading)}</h3>")
        parts.append(f'<ul class="cards">{"".join(map(_card, cards))}</ul>')
    parts += [f"<p>{_safe(note)}</p>" for note in section.notes]
    content = "\n".join(parts)
    if content and section.formulas:
        lines = "".join(f"<li>{_safe(line)}</li>" for line in (*section.formulas, symbols(noun)))
        content += f"<details><summary>Formulas</summary><ul>{lines}</ul></details>"
    return _titled(section.title, content) if content else ""


def _card(card: Card) -> str:
    """Return a sample; a text of it can be scrolled by the keyboard."""
    kinds = ["text"] * isinstance(card.content, str) + ["marked"] * (card.wrong is not None)
    shown = ""
    if isinstance(card.content, str):
        label = _safe(card.title)
        text = _safe(card.content, keep="\n")
        shown = f'<p tabindex="0" role="region" aria-label="{label}">{text}</p>'
    elif card.content is not None and (source := _png(card.content)):
        alt = _safe(", ".join([card.title, *card.told()]))
        shown = f'<img src="{source}" alt="{alt}">'
    lines = "<br>".join(map(_safe, card.told()))
    return f'<li class="{" ".join(kinds)}">{shown}<strong>{_safe(card.title)}</strong>{lines}</li>'


def _png(pixels: Pixels) -> str:
    """Return a picture as a data URI, large ones made smaller; "" where Pillow is not installed."""
    if find_spec("PIL") is None:
        return ""
    from PIL import Image

    picture, file = Image.fromarray(pixels.values), io.BytesIO()
    picture.thumbnail((_LARGEST, _LARGEST))
    picture.save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"


def _facts(rows: Sequence[Fact]) -> str:
    """Return labels with values; a label stands once for the values that follow without one."""
    items: list[str] = []
    for label, value in rows:
        if not isinstance(value, Spark):  # pictures show those
            term = f"<dt>{_safe(label)}</dt>" if label or not items else ""
            items.append(f"{term}<dd>{_safe(value)}</dd>")
    return f"<dl>\n{chr(10).join(items)}\n</dl>"


def _records(found: Overview) -> str:
    """Return what was recorded, as it is, behind a click."""
    parts = []
    for name, record in (found.records or {}).items():
        if record:
            text = _safe(json.dumps(record, ensure_ascii=False, indent=2), keep="\n")
            head = f"<details><summary>{_safe(name)}, as recorded</summary>"
            parts.append(f'{head}<pre tabindex="0">{text}</pre></details>')
    return "\n".join(parts)


def _picture(picture: Picture) -> str:
    buffer = io.BytesIO()
    plots.save(plots.figure([picture], _INK), buffer, "svg", transparent=True)
    svg = buffer.getvalue().decode("utf-8")
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    return svg.replace("<svg", f'<svg role="img" aria-label="{_safe(picture.label)}"', 1)


def _table(label: str, table: Table) -> str:
    """Return a table; its headings are buttons that sort it."""
    heads = [] if table.names is None else [_heading(table.title, False)]
    heads += [_heading(column.title, column.values is not None) for column in table.columns]
    columns = [_cells(column) for column in table.columns]
    if table.names is not None:
        columns.insert(0, [f'<th scope="row">{_safe(name)}</th>' for name in table.names])
    body = "\n".join(f"<tr>{''.join(cells)}</tr>" for cells in zip(*columns, strict=True))
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{_safe(label)}"><table>\n'
        f"<caption>{_safe(label)}</caption>\n"
        f"<thead><tr>{''.join(heads)}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def _heading(title: str, number: bool) -> str:
    if not title:
        return "<td></td>"
    kind = ' class="number"' if number else ""
    return f'<th scope="col"{kind}><button type="button">{_safe(title)}</button></th>'


def _cells(column: Column) -> list[str]:
    """Return the cells, those of numbers with what they are sorted by."""
    found = []
    for text, value in zip(column.cells, column.values or [None] * len(column.cells), strict=True):
        number = column.values is not None or text == NONE
        sort = "" if value is None else f' data-value="{float(value)!r}"'
        kind = f' class="number"{sort}' if number else ""
        found.append(f"<td{kind}>{_safe(text)}</td>")
    return found
