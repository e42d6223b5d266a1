"""The self-contained page of a result: no network, light and dark, everything escaped."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradscope import markup
from gradscope.core.texts import visible
from gradscope.markup.glossary import explained
from gradscope.report import plots
from gradscope.stats import html
from gradscope.stats.sections import CurvePicture, Displayable, Overview, Picture
from gradscope.storage import write_page

_INK = "#010203"  # in a picture, to be replaced by the page's own text colour
_MAKER = "gradscope stats"


def write_html(result: Displayable, path: str | Path) -> None:
    """Write the page. Pictures need matplotlib; curves do not.

    Raises:
        OutputError: The file cannot be written, or exists and is not such a page.
    """
    write_page(Path(path), _MAKER, _page(result.overview()))


def _page(found: Overview) -> str:
    """Return the page: first samples, then pictures, then numbers."""
    first, *others = html.shown(found.sections)
    samples = [section for section in others if section.cards]
    numbers = [section for section in others if not section.cards]
    curves = [p for p in found.pictures if isinstance(p, CurvePicture) and p.interactive]
    drawn = [p for p in found.pictures if p not in curves] if plots.available() else []
    pictures = "\n".join([*map(_curves, curves), *map(_picture, drawn)])
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
    scripts = []
    if any(not picture.empty for picture in curves):
        data = [
            {"across": p.across, "curves": _named(p.curves), "bands": _named(p.bands)}
            for p in curves
            if not p.empty
        ]
        body += markup.embedded(data, "curves")
        scripts = markup.chart_scripts("curves.js")
    return markup.page(f"{html.title(found)}: gradient statistics", body, _MAKER, scripts=scripts)


def _named(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table with visible names: unprintable characters are replaced."""
    return {visible(name): value for name, value in table.items()}


def _curves(picture: CurvePicture) -> str:
    """Return the place where the page's script draws curves."""
    term, *of = picture.title.partition(", ")
    title = f"<figcaption>{explained(term)}{markup.safe(''.join(of))}</figcaption>"
    if picture.empty:
        return f"<figure>{title}<p>{markup.safe(picture.empty)}</p></figure>"
    chart = f'<div class="chart" role="img" aria-label="{markup.safe(picture.label)}"></div>'
    return f'<figure class="curves">{title}{chart}<p class="values soft"></p></figure>'


def _picture(picture: Picture) -> str:
    """Return a picture as SVG, in the page's own colours."""
    buffer = io.BytesIO()
    plots.save(plots.figure([picture], _INK), buffer, "svg", transparent=True)
    svg = buffer.getvalue().decode("utf-8")
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    named = f'<svg role="img" aria-label="{markup.safe(picture.label)}"'
    return f"<figure>{svg.replace('<svg', named, 1)}</figure>"
