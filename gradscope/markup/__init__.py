"""HTML of pages and notebooks: their parts, and the page around them. All text is escaped."""

import io
import json
from base64 import b64encode
from collections.abc import Iterable, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

from gradscope.core.texts import visible
from gradscope.markup.glossary import explained

if TYPE_CHECKING:
    from PIL.Image import Image

_LEFT = "style='text-align:left'"  # a notebook would align it to the right
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; connect-src {connect}; "
    "script-src {scripts}; base-uri 'none'; form-action 'none'"
)


class Html(str):
    """HTML that needs no escaping."""


class Column(NamedTuple):
    """One column of a table."""

    title: str
    cells: Sequence[str]
    values: Sequence[float | None] | None = None  # numbers to sort by; by default it sorts cells
    from_data: bool = False  # whether the title comes from the user's data, not from gradscope


def safe(text: str, keep: str = "") -> str:
    """Return a text for HTML. Unprintable characters are made visible, except those in `keep`."""
    return escape(visible(text, keep))


def facts(rows: Iterable[tuple[str, str]], label: str = "") -> str:
    """Return labels, explained, with their values; a value without a label continues the cell."""
    cells: list[tuple[str, list[str]]] = []
    for name, value in rows:
        if not name and cells:
            cells[-1][1].append(_shown(value))
        else:
            cells.append((explained(name), [_shown(value)]))
    items = "".join(
        f"<tr><th scope='row' {_LEFT}>{name}</th><td {_LEFT}>{'<br>'.join(values)}</td></tr>"
        for name, values in cells
    )
    return f"<table class='facts'{_named(label)}><tbody>{items}</tbody></table>"


def _shown(value: str) -> str:
    return value if isinstance(value, Html) else safe(value)


def bars(values: Sequence[float | None], label: str, name: str) -> Html:
    """Return a small bar for each number, scaled from least to largest, followed by a label.

    `name` describes the bars for screen readers.
    """
    known = [value for value in values if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    drawn = "".join(
        f'<rect x="{k}" y="{19 - height:.1f}" width="1" height="{1 + height:.1f}"/>'
        for k, value in enumerate(values)
        if value is not None
        for height in [19 * (value - low) / ((high - low) or 1.0)]
    )
    size = f'viewBox="0 0 {len(values)} 20" preserveAspectRatio="none" width="{6 * len(values)}"'
    shape = f'<svg class="bars" {size} height="20" fill="currentColor" role="img"{_named(name)}>'
    return Html(f"{shape}{drawn}</svg> {safe(label)}".rstrip())


def table(columns: Sequence[Column], names: Column | None = None, label: str = "") -> str:
    """Return a table of columns, with the `names` of rows first; with a `label` it can scroll."""
    every = columns if names is None else [names, *columns]
    cells = [_cells(column) for column in columns]
    if names is not None:
        shown = safe if names.title else explained  # without a title, names are our terms
        cells.insert(0, [f'<th scope="row">{shown(name)}</th>' for name in names.cells])
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in zip(*cells, strict=True))
    head = f"<thead><tr>{''.join(map(_heading, every))}</tr></thead>"
    found = f"<table{_named(label)}>{head}<tbody>{body}</tbody></table>"
    if not label:
        return found
    return f'<div class="wide" tabindex="0" role="region"{_named(label)}>{found}</div>'


def _named(label: str) -> str:
    return f' aria-label="{safe(label)}"' if label else ""


def _heading(column: Column) -> str:
    if not column.title:
        return "<td></td>"
    kind = "" if column.values is None else ' class="number"'
    title = safe(column.title) if column.from_data else explained(column.title)
    return f'<th scope="col"{kind}>{title}</th>'


def _cells(column: Column) -> list[str]:
    """Return the cells of a column. A cell of a number holds the value to sort by."""
    if column.values is None:
        return [f"<td>{safe(text)}</td>" for text in column.cells]
    found = []
    for text, value in zip(column.cells, column.values, strict=True):
        key = "" if value is None else f' data-value="{float(value)!r}"'
        found.append(f'<td class="number"{key}>{safe(text)}</td>')
    return found


def details(summary: str, content: str) -> str:
    """Return content that a click on its summary opens."""
    return f"<details><summary>{safe(summary)}</summary>{content}</details>"


def section(title: str, content: str) -> str:
    """Return a part of a page under its title."""
    return f"<section><h2>{explained(title)}</h2>\n{content}</section>"


def source(picture: "Image") -> str:
    """Return a picture as the data URI of a PNG."""
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"


def document(title: str, *parts: str) -> str:
    """Return parts of HTML under a title, for a notebook."""
    return f"<div><strong>{safe(title)}</strong>{''.join(parts)}</div>"


def page(
    title: str,
    body: str,
    maker: str,
    style: str = "",
    scripts: Sequence[str] = (),
    connect: str = "'none'",
) -> str:
    """Return a page that needs no network and runs only its own scripts, by their digests.

    Args:
        title: The title of the window.
        body: The HTML of the page.
        maker: The command that writes the page, and may replace it.
        style: CSS after the style of all pages.
        scripts: JavaScript after the script of all pages.
        connect: The `connect-src` of the page's Content-Security-Policy.
    """
    every = [resource("gradscope.markup", "page.js"), *scripts]
    digests = (b64encode(sha256(script.encode()).digest()).decode() for script in every)
    policy = _POLICY.format(connect=connect, scripts=" ".join(f"'sha256-{d}'" for d in digests))
    running = "\n".join(f"<script>{script}</script>" for script in every)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="{maker}">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{safe(title)}</title>
<style>
{resource("gradscope.markup", "page.css")}
{style}
</style>
</head>
<body>
{body}
{running}
</body>
</html>
"""


def chart_scripts(*more: str) -> list[str]:
    """Return the scripts by which a page draws charts, and `more` scripts of this package."""
    return [resource("gradscope.markup", name) for name in ("charts.js", "draw.js", *more)]


def embedded(value: Any, name: str) -> str:
    """Return plain data for the scripts of a page, in an element with the id `name`."""
    data = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{data}</script>'


def resource(package: str, *names: str) -> str:
    """Return a file of a package."""
    return files(package).joinpath(*names).read_text(encoding="utf-8").strip()
