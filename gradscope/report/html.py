"""A result as one self-contained page: no network, light and dark, everything escaped."""

import io
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from rich.text import Text

from gradscope.errors import OutputError
from gradscope.report import plots, results
from gradscope.report.formulas import formulas
from gradscope.report.layout import whole
from gradscope.report.page import page
from gradscope.report.panels import Panel
from gradscope.report.results import Result
from gradscope.report.sections import Section, Spark, Table
from gradscope.report.stats import warnings
from gradscope.report.text import NONE, short, visible
from gradscope.stats import Difference, Histogram, Summary

_INK = "#010203"  # in the picture, to be replaced by the page's own text colour


def write_html(found: Result, path: str | Path) -> None:
    """Write the page; it has pictures when matplotlib is installed.

    Raises:
        OutputError: The file cannot be written.
    """
    text = render_html(found)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"the page cannot be written: {error.strerror or error}", where=str(path)
        ) from error


def render_html(found: Result) -> str:
    """Return the page."""
    places = [f.path for f in found.files] if isinstance(found, Difference) else [_path(found)]
    names = " and ".join(Path(place).name for place in places)
    told = warnings(found) if isinstance(found, Summary) else []
    answers = [
        _section(section.title, text, section.key) if (text := _content(section)) else ""
        for section in results.sections(found)
    ]
    parts = [
        "".join(f'<p class="warning" role="alert">{_safe(line)}</p>' for line in told),
        _section("Run", _facts(results.facts(found)) + _records(found)),
        *answers[:1],
        _pictures(plots.panels(found)) if plots.available() else "",
        *answers[1:],
    ]
    return page(f"{_safe(names)}: gradient statistics", _safe(", ".join(places)), parts)


def _path(found: Result) -> str:
    assert not isinstance(found, Difference)  # it has two
    return found.file.path if isinstance(found, Summary) else found.path


def _safe(text: object) -> str:
    return escape(visible(str(text)))


def _section(title: str, content: str, key: str = "") -> str:
    lines = formulas(key)
    if lines:
        items = "".join(f"<li>{_safe(line)}</li>" for line in lines)
        content += f"<details><summary>Formulas</summary><ul>{items}</ul></details>"
    return f"<section><h2>{_safe(title)}</h2>\n{content}</section>"


def _content(section: Section) -> str:
    parts = []
    rows = [(k, v) for k, v in section.facts if not isinstance(v, Spark)]  # pictures show those
    if rows:
        parts.append(_facts(rows))
    if section.pairs:
        items = "".join(
            f"<div><dt>{_safe(label)}</dt><dd>{_safe(value)}</dd></div>"
            for label, value in section.pairs
        )
        parts.append(f'<dl class="pairs">{items}</dl>')
    if section.histogram is not None:
        parts.append(_bins(section.histogram))
    if section.table is not None:
        parts.append(_table(section.title, section.table))
    notes = [note.plain if isinstance(note, Text) else note for note in section.notes]
    parts += [f"<p>{_safe(note)}</p>" for note in notes]
    return "\n".join(parts)


def _facts(rows: Sequence[tuple[str, str | Text]]) -> str:
    """Return labels with values; a label stands once for the values that follow without one."""
    items: list[str] = []
    for label, value in rows:
        plain = value.plain if isinstance(value, Text) else value
        term = f"<dt>{_safe(label)}</dt>" if label or not items else ""
        items.append(f"{term}<dd>{_safe(plain)}</dd>")
    return f"<dl>\n{chr(10).join(items)}\n</dl>"


def _records(found: Result) -> str:
    """Return the certificates and runs as recorded, behind a click."""
    if isinstance(found, Summary):
        files = [("", found.file)]
    elif isinstance(found, Difference):
        files = list(zip((" of the first", " of the second"), found.files, strict=True))
    else:
        return ""
    parts = []
    for of, file in files:
        for name, record in (("Certificate", file.certificate), ("Run", file.run)):
            if record:
                text = _kept(json.dumps(record, ensure_ascii=False, indent=2))
                parts.append(
                    f"<details><summary>{name}{of}, as recorded</summary>"
                    f'<pre tabindex="0">{text}</pre></details>'
                )
    return "\n".join(parts)


def _kept(text: str) -> str:
    return escape(visible(text, keep="\n"))


def _pictures(panels: Sequence[Panel]) -> str:
    figures = "\n".join(f"<figure>{_picture(panel)}</figure>" for panel in panels)
    return _section("Pictures", f'<div class="pictures">\n{figures}\n</div>')


def _picture(panel: Panel) -> str:
    buffer = io.BytesIO()
    plots.save(plots.picture(panel, _INK), buffer, "svg", transparent=True)
    svg = buffer.getvalue().decode("utf-8")
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    return svg.replace("<svg", f'<svg role="img" aria-label="{_safe(panel.label)}"', 1)


def _bins(found: Histogram) -> str:
    """Return the bins in numbers behind a click, since there is a picture."""
    names = [
        f"{short(low)} to {short(high)}"
        for low, high in zip(found.edges, found.edges[1:], strict=False)
    ]
    counts = list(found.counts)
    if found.zeros:
        names, counts = ["zero", *names], [found.zeros, *counts]
    table = _table("Bins", Table([whole("samples", counts)], "norm", names))
    return f"<details><summary>Bins</summary>{table}</details>"


def _table(label: str, table: Table) -> str:
    """Return a table; its headings are buttons that sort it."""
    names = [] if table.names is None else [_heading(table.title)]
    heads = [_heading(column.title, column.values is not None) for column in table.columns]
    head = "".join(names + heads)
    body = "\n".join(f"<tr>{row}</tr>" for row in _rows(table))
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{_safe(label)}"><table>\n'
        f"<caption>{_safe(label)}</caption>\n"
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def _heading(title: str, number: bool = False) -> str:
    if not title:
        return "<td></td>"
    kind = ' class="number"' if number else ""
    return f'<th scope="col"{kind}><button type="button">{_safe(title)}</button></th>'


def _rows(table: Table) -> list[str]:
    columns = []
    if table.names is not None:
        columns.append([f'<th scope="row">{_safe(name)}</th>' for name in table.names])
    for column in table.columns:
        values = column.values or [None] * len(column.cells)
        number = column.values is not None
        cells = zip(column.cells, values, strict=True)
        columns.append([_cell(str(text), value, number) for text, value in cells])
    return ["".join(cells) for cells in zip(*columns, strict=True)]


def _cell(text: str, value: float | None, number: bool) -> str:
    if not number and text != NONE:
        return f"<td>{_safe(text)}</td>"
    sort = "" if value is None else f' data-value="{float(value)!r}"'
    return f'<td class="number"{sort}>{_safe(text)}</td>'
