"""A summary as one self-contained page: no network, light and dark, everything escaped."""

import io
from collections.abc import Sequence
from html import escape
from pathlib import Path

from gradscope.errors import OutputError
from gradscope.report import plots
from gradscope.report.certificate import unused, verdict
from gradscope.report.page import page
from gradscope.report.text import NONE, count, percent, shape, short, size, visible
from gradscope.stats import Summary

Cell = tuple[str, float | None]  # what is shown, and what it is sorted by if that is a number

_INK = "#010203"  # in the picture, to be replaced by the page's own text colour


def write_html(summary: Summary, path: str | Path) -> None:
    """Write the page; it has pictures when matplotlib is installed.

    Raises:
        OutputError: The file cannot be written.
    """
    text = render_html(summary)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"the page cannot be written: {error.strerror or error}", where=str(path)
        ) from error


def render_html(summary: Summary) -> str:
    """Return the page."""
    name = Path(summary.file.path).name
    sections = [
        _facts(summary),
        _picture(summary),
        _table("Parameters", *_parameters(summary)),
        _table("Samples with the largest gradients", *_samples(summary)),
    ]
    return page(f"{_safe(name)}: gradient statistics", _safe(summary.file.path), sections)


def _safe(text: object) -> str:
    return escape(visible(str(text)))


def _facts(summary: Summary) -> str:
    file, noise = summary.file, summary.noise_scale
    rows = [
        ("samples", f"{file.samples:,}"),
        ("not finite, left out", _nonfinite(summary)),
        ("parameters", f"{file.parameters:,} ({file.entries:,} entries)"),
        ("size", size(file.bytes)),
        ("backend", file.backend or "not recorded"),
        ("certificate", verdict(file.certificate).plain),
        ("unused parameters", unused(file.certificate) or "none recorded"),
        *(("chain", chain.text) for chain in file.chains),
    ]
    for name, values in (("loss", summary.loss), ("norm", summary.norm)):
        if values is not None:
            text = f"mean {short(values.mean)}, std {short(values.std)}"
            rows.append((name, f"{text}, from {short(values.min)} to {short(values.max)}"))
    if summary.norm is not None:
        shares = summary.norm.percentiles.items()
        rows.append(("norm percentiles", ", ".join(f"{k}%: {short(v)}" for k, v in shares)))
    if noise.simple is not None:
        parts = f"{short(noise.trace_covariance)} / {short(noise.gradient_norm_squared)}"
        rows.append(("gradient noise scale", f"{short(noise.simple)} samples ({parts})"))
    else:
        rows.append(("gradient noise scale", f"undefined: {noise.flag}"))
    items = "\n".join(f"<dt>{_safe(label)}</dt><dd>{_safe(value)}</dd>" for label, value in rows)
    return f"<section><h2>File</h2><dl>\n{items}\n</dl></section>"


def _nonfinite(summary: Summary) -> str:
    found = summary.nonfinite
    listed = ", ".join(map(str, found.index)) + (", ..." if found.count > len(found.index) else "")
    return f"{count(found.count, 'sample')}: {listed}" if found.count else "none"


def _picture(summary: Summary) -> str:
    if not plots.available():
        return ""
    buffer = io.BytesIO()
    plots.save(plots.figure(summary, ink=_INK), buffer, "svg", transparent=True)
    svg = buffer.getvalue().decode("utf-8")
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    label = "Norm distribution, norm against loss, and mean norm and signal to noise by parameter"
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    return f"<section><h2>Pictures</h2>\n{svg}</section>"


def _parameters(summary: Summary) -> tuple[list[str], list[list[Cell]]]:
    titles = [
        "parameter", "shape", "entries", "mean norm", "largest norm", "norm of mean", "share",
        "signal to noise",
    ]  # fmt: skip
    rows: list[list[Cell]] = [
        [
            (row.name, None),
            (shape(row.shape), None),
            (f"{row.entries:,}", row.entries),
            _number(row.mean_norm),
            _number(row.max_norm),
            _number(row.mean_gradient_norm),
            (percent(row.share), row.share),
            _number(row.signal_to_noise),
        ]
        for row in summary.parameters
    ]
    return titles, rows


def _samples(summary: Summary) -> tuple[list[str], list[list[Cell]]]:
    rows: list[list[Cell]] = [
        [
            (str(row.index), row.index),
            _number(row.norm),
            _number(row.times_median),
            _number(row.loss),
            _target(row.target),
        ]
        for row in summary.samples
    ]
    return ["index", "norm", "times median", "loss", "target"], rows


def _number(value: float | None) -> Cell:
    return short(value), value


def _target(value: bool | int | float | str | None) -> Cell:
    if value is None or isinstance(value, str):
        return value or NONE, None
    return short(value) if isinstance(value, float) else str(value), value


def _table(title: str, titles: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return a table; its headings are buttons that sort it."""
    head = "".join(
        f'<th scope="col"><button type="button">{_safe(text)}</button></th>' for text in titles
    )
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    label = _safe(title)
    return (
        f"<section><h2>{label}</h2>"
        f'<div class="wide" tabindex="0" role="region" aria-label="{label}"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div></section>"
    )


def _cell(cell: Cell) -> str:
    text, value = cell
    if value is None and text != NONE:
        return f"<td>{_safe(text)}</td>"
    sort = "" if value is None else f' data-value="{float(value)!r}"'
    return f'<td class="number"{sort}>{_safe(text)}</td>'
