"""Statistics of each class, and the share of the noise between classes."""

from collections.abc import Iterator

import numpy as np

from gradscope.stats.records import Plain, Record, average, number, plain, ratio
from gradscope.stats.sections import Section, Table, count_column, numbers, percent
from gradscope.stats.summary import Data, Summary, statistic


class ClassRow(Record):
    """The samples of one class."""

    target: Plain
    samples: int
    mean_loss: float | None
    mean_norm: float | None
    mean_cosine: float | None
    opposing: float | None
    mean_gradient_norm: float | None
    cosine: float | None
    trace_covariance: float | None


class Classes(Record):
    """All classes. `between` + `within` is the variance mean‖gᵢ‖² − ‖G‖²."""

    rows: tuple[ClassRow, ...]
    between: float | None
    within: float | None


def _sections(found: Classes, summary: Summary) -> Iterator[Section]:
    rows = found.rows
    columns = [
        count_column(f"{summary.noun}s", [r.samples for r in rows], rank=1),
        numbers("mean loss", [r.mean_loss for r in rows], rank=2),
        numbers("mean norm", [r.mean_norm for r in rows]),
    ]
    if any(r.mean_cosine is not None for r in rows):
        columns.append(numbers("mean cosine", [r.mean_cosine for r in rows]))
        columns.append(numbers("opposed", [r.opposing for r in rows], rank=3, show=percent))
    if any(r.cosine is not None for r in rows):
        columns.append(numbers("cosine of mean", [r.cosine for r in rows], rank=4))
        columns.append(numbers("noise", [r.trace_covariance for r in rows]))
    notes = []
    if found.between is not None and found.within is not None and found.between + found.within:
        share = found.between / (found.between + found.within)
        notes.append(f"{percent(share)} of the noise lies between the classes, the rest within.")
    formulas = [
        "noise = (mean‖gᵢ‖² − ‖G_c‖²) · n/(n − 1)",
        "between = Σ_c n_c/N · ‖G_c − G‖²",
        "within = Σ_c n_c/N · (mean‖gᵢ‖² − ‖G_c‖²)",
    ]
    table = Table(columns, "class", [str(r.target) for r in rows])
    yield Section("Classes", table=table, notes=notes, formulas=formulas)


@statistic("classes", place=60, sections=_sections)
def classes(data: Data) -> Classes | None:
    """Summarise every class. Returns None if the targets are not classes."""
    members, samples, dots = data.groups, data.samples, data.products.dots
    if members is None:
        return None
    squares = None if dots is None else data.products.group_squares  # ‖G_c‖² (k,)
    rows, between, within = [], 0.0, 0.0
    big = 0.0 if dots is None else float(dots.mean())  # ‖G‖²
    for k, target in enumerate(members.targets):
        mine = members.of == k
        n, small = int(mine.sum()), float(np.square(samples.norm[mine]).mean())
        length = along = cosine = trace = None
        if squares is not None and dots is not None:
            length, along = float(squares[k]), float(dots[mine].mean())
            between += n / samples.n * (length - 2 * along + big)
            within += n / samples.n * (small - length)
            cosine = ratio(along, np.sqrt(length * big))
            trace = number((small - length) * n / (n - 1)) if n > 1 else None
        row = ClassRow(
            target=plain(target),
            samples=n,
            mean_loss=number(samples.loss[mine].mean()),
            mean_norm=number(samples.norm[mine].mean()),
            mean_cosine=None if data.cosines is None else average(data.cosines[mine]),
            opposing=None if dots is None else float(np.mean(dots[mine] < 0)),
            mean_gradient_norm=length and number(np.sqrt(length)),
            cosine=cosine,
            trace_covariance=trace,
        )
        rows.append(row)
    return Classes(
        rows=tuple(rows),
        between=None if squares is None else number(max(between, 0.0)),
        within=None if squares is None else number(max(within, 0.0)),
    )
