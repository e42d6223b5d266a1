"""HTML of small results, as a notebook shows them. All text is escaped."""

from collections.abc import Iterable, Sequence
from html import escape

from gradscope.core.texts import visible


def safe(text: str, keep: str = "") -> str:
    """Return a text for HTML, its unprintable characters but those to `keep` made visible."""
    return escape(visible(text, keep))


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Return labels with their values."""
    items = "".join(
        f"<tr><th style='text-align:left'>{safe(label)}</th>"
        f"<td style='text-align:left'>{safe(value)}</td></tr>"
        for label, value in rows
    )
    return f"<table><tbody>{items}</tbody></table>"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return rows of cells under headings."""
    head = "".join(f"<th scope='col'>{safe(heading)}</th>" for heading in headings)
    body = "".join(
        f"<tr>{''.join(f'<td>{safe(cell)}</td>' for cell in cells)}</tr>" for cells in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def document(title: str, *parts: str) -> str:
    """Return parts of HTML under a title."""
    return f"<div><strong>{safe(title)}</strong>{''.join(parts)}</div>"
