"""A result as one self-contained page: no network, light and dark, everything escaped."""

import io
from pathlib import Path

from gradscope import markup
from gradscope.report import plots
from gradscope.stats import html
from gradscope.stats.sections import Displayable, Overview, Picture
from gradscope.storage import write_page

_INK = "#010203"  # in a picture, to be replaced by the page's own text colour
_MAKER = "gradscope stats"


def write_html(result: Displayable, path: str | Path) -> None:
    """Write the page; it has pictures when matplotlib is installed.

    Raises:
        OutputError: The file cannot be written, or is another one.
    """
    write_page(Path(path), _page(result.overview()), _MAKER)


def _page(found: Overview) -> str:
    """Return the page: samples stand before pictures, and these before numbers."""
    first, *others = html.shown(found.sections)
    samples = [section for section in others if section.cards]
    numbers = [section for section in others if not section.cards]
    pictures = "\n".join(map(_picture, found.pictures if plots.available() else ()))
    parts = [
        html.header(found),
        markup.section("Run", html.about(found, "Run")),
        *(markup.section(s.title, html.section(s, found.noun)) for s in (first, *samples)),
        markup.section("Pictures", f'<div class="pictures">\n{pictures}\n</div>')
        if pictures
        else "",
        *(markup.section(s.title, html.section(s, found.noun)) for s in numbers),
    ]
    body = "\n".join(["<main>", *filter(None, parts), "</main>"])
    return markup.page(f"{html.title(found)}: gradient statistics", body, _MAKER)


def _picture(picture: Picture) -> str:
    """Return a picture as SVG, in the page's own colours."""
    buffer = io.BytesIO()
    plots.save(plots.figure([picture], _INK), buffer, "svg", transparent=True)
    svg = buffer.getvalue().decode("utf-8")
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    named = f'<svg role="img" aria-label="{markup.safe(picture.label)}"'
    return f"<figure>{svg.replace('<svg', named, 1)}</figure>"
