"""Lists of samples: largest losses and gradients, most opposed, nearest to a sample."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from gradscope.stats.records import (
    Floats,
    Plain,
    Positions,
    Record,
    cosines_of,
    descending,
    number,
    plain,
    ratio,
)
from gradscope.stats.sections import (
    POINTS,
    Picture,
    ScatterPicture,
    Section,
    Table,
    count_column,
    index_and_name,
    index_columns,
    numbers,
    percent,
    short,
    target_columns,
)
from gradscope.stats.summary import Data, Summary, statistic

_FORMULAS = ("times median = ‖gᵢ‖ / median‖g‖", "most opposed: the most negative ⟨gᵢ, G⟩")
_ANSWERED = 3  # the number of samples in the answer "check labels"
_BRIEF = 5  # the most samples in the output of one screen
LARGEST = "{}s with the largest gradients"  # {}: Sample or Token


class SampleRow(Record):
    """One sample."""

    index: int
    id: int | str | None = None
    size: int | None = None  # the number of members of a group
    loss: float | None
    norm: float
    target: Plain
    prediction: Plain = None
    times_median: float | None
    cosine: float | None = None


def _rows(data: Data, places: Positions, cosines: Floats | None) -> tuple[SampleRow, ...]:
    samples = data.samples
    median = float(np.median(samples.norm)) if samples.n else 0.0
    return tuple(
        SampleRow(
            **samples.described(int(k)),
            size=None if samples.size is None else int(samples.size[k]),
            prediction=None if samples.prediction is None else plain(samples.prediction[k]),
            loss=number(samples.loss[k]),
            norm=float(samples.norm[k]),
            times_median=ratio(samples.norm[k], median),
            cosine=None if cosines is None else number(cosines[k]),
        )
        for k in places[: data.options.top]
    )


def _table(rows: Sequence[SampleRow]) -> Table:
    sizes = [row.size for row in rows if row.size is not None]
    columns = [
        *index_columns(rows),
        *([count_column("size", sizes)] if sizes else []),
        numbers("norm", [r.norm for r in rows]),
        numbers("times median", [r.times_median for r in rows], rank=1),
        numbers("loss", [r.loss for r in rows]),
    ]
    if any(r.cosine is not None for r in rows):
        columns.append(numbers("cosine", [r.cosine for r in rows], rank=3))
    return Table([*columns, *target_columns(rows)])


def _sample_sections(
    title: str, most: int | None = None
) -> Callable[[Sequence[SampleRow], Summary], Iterator[Section]]:
    def sections(rows: Sequence[SampleRow], summary: Summary) -> Iterator[Section]:
        if rows:
            some = rows[:most]
            heading = title.format(summary.noun.capitalize())
            yield Section(heading, table=_table(some), samples=some, formulas=_FORMULAS)

    return sections


def _answer_losses(rows: Sequence[SampleRow], summary: Summary) -> Iterator[tuple[str, str]]:
    if rows and summary.noun != "group":  # the loss of a group is a sum
        listed = ", ".join(index_and_name(row.index, row.id) for row in rows[:_ANSWERED])
        found = summary.predictions
        wrong = "" if found is None else f"; {percent(found.wrong)} predicted wrongly"
        yield "check labels", f"largest losses: {summary.noun}s {listed}{wrong}"


class PredictionSummary(Record):
    """The share of wrong predictions."""

    samples: int  # the number of samples whose target is a class
    wrong: float  # the share of these whose predicted class is not the target
    median_margin: float | None


@statistic("predictions", place=129)
def predictions(data: Data) -> PredictionSummary | None:
    """Count wrong predictions. Returns None if the file has no classes or predictions."""
    samples = data.samples
    target, prediction, margin = samples.target, samples.prediction, samples.margin
    if target is None or prediction is None or margin is None:
        return None
    known = ~np.isnan(margin)
    n = int(known.sum())
    if not n:
        return None
    wrong = float(np.mean(prediction[known] != target[known]))
    return PredictionSummary(
        samples=n, wrong=wrong, median_margin=number(float(np.median(margin[known])))
    )


_losses = _sample_sections("{}s with the largest losses")


@statistic("largest_losses", place=130, sections=_losses, answers=_answer_losses)
def largest_losses(data: Data) -> tuple[SampleRow, ...]:
    """List the samples with the largest losses, largest first."""
    return _rows(data, descending(data.samples.loss, data.options.top), data.cosines)


@statistic(
    "most_opposed",
    place=131,
    sections=_sample_sections("{}s most opposed to the mean gradient"),
)
def most_opposed(data: Data) -> tuple[SampleRow, ...] | None:
    """List the samples with the most negative ⟨gᵢ, G⟩. A step along −G raises their loss most."""
    dots = data.products.dots
    if dots is None:
        return None
    order = descending(-dots, data.options.top)
    return _rows(data, order[dots[order] < 0], data.cosines)


def _answer_largest(rows: Sequence[SampleRow], summary: Summary) -> Iterator[tuple[str, str]]:
    text = "not listed"
    if rows:
        first, times = rows[0], rows[0].times_median
        zero = times is None and not first.norm
        text = (
            f"{summary.noun} {index_and_name(first.index, first.id)}, "
            f"{short(times)} times the median norm"
        )
        text = "every gradient is zero" if zero else text
    yield "largest gradient", text


@statistic(
    "samples",
    place=132,
    sections=_sample_sections(LARGEST),
    brief=_sample_sections(LARGEST, _BRIEF),
    answers=_answer_largest,
)
def samples(data: Data) -> tuple[SampleRow, ...]:
    """List the samples with the largest norms, largest first."""
    return _rows(data, descending(data.samples.norm, data.options.top), data.cosines)


class Points(Record):
    """Loss and norm (k,) of `of` samples, thinned evenly without losing the largest norms."""

    loss: tuple[float, ...]
    norm: tuple[float, ...]
    of: int


def _picture(found: Points, summary: Summary) -> Iterator[Picture]:
    loss, norm, noun = found.loss, found.norm, summary.noun
    some = f" ({len(norm):,} of {found.of:,} {noun}s)" if len(norm) < found.of else ""
    yield ScatterPicture(
        label=f"Gradient norm against loss, one point for each {noun}, the largest labelled",
        title=f"Norm against loss{some}",
        across="loss",
        up="norm",
        empty="" if norm else f"no finite {noun}",
        x=loss,
        y=norm,
        named=[
            (r.loss, r.norm, summary.file.label(r)) for r in summary.samples if r.loss is not None
        ],
        place=20,
    )


@statistic("points", pictures=_picture, in_json=False)
def points(data: Data) -> Points:
    """Return at most 4,000 samples: half the largest norms, half evenly spread."""
    samples = data.samples
    rows = np.flatnonzero(np.isfinite(samples.loss))
    of = int(rows.size)
    if of > POINTS:
        order, half = descending(samples.norm[rows]), POINTS // 2
        even = np.linspace(half, of - 1, POINTS - half).astype(np.int64)
        rows = rows[np.concatenate([order[:half], order[even]])]
    return Points(loss=samples.loss[rows].tolist(), norm=samples.norm[rows].tolist(), of=of)


class Nearest(Record):
    """The samples most and least aligned with a given sample."""

    index: int
    id: int | str | None = None
    source: str
    exact: bool
    aligned: tuple[SampleRow, ...]
    opposed: tuple[SampleRow, ...]


def _nearest_sections(found: Nearest, summary: Summary) -> Iterator[Section]:
    about = "" if found.exact else f", approximately, from {found.source}"
    for word, rows in (("Most", found.aligned), ("Least", found.opposed)):
        if rows:
            which = f"{summary.noun} {index_and_name(found.index, found.id)}"
            title = f"{word} aligned with {which}{about}"
            formulas = ["cosine = ⟨gᵢ, gⱼ⟩ / (‖gᵢ‖ ‖gⱼ‖)"]
            yield Section(title, table=_table(rows), samples=rows, formulas=formulas)


@statistic("nearest", place=120, sections=_nearest_sections)
def nearest(data: Data) -> Nearest | None:
    """Rank the samples by the cosine of their gradient with the gradient of one sample."""
    place, dots, samples = data.place, data.products.probed, data.samples
    if place is None or dots is None:
        return None
    squares = np.square(samples.norm)
    found = cosines_of(dots, np.sqrt(squares * squares[place]))
    found[place] = np.nan
    order = descending(found)
    order = order[np.isfinite(found[order])]
    source = data.products.pairs
    return Nearest(
        index=int(samples.index[place]),
        id=samples.described(place)["id"],
        source=source,
        exact=source in ("rows", "gram"),
        aligned=_rows(data, order, found),
        opposed=_rows(data, order[::-1], found),
    )
