"""Comparison of two files: the changes from the first to the second."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import Field

from gradscope.core.texts import count
from gradscope.errors import SpecError
from gradscope.stats.builtin.batch import NoiseScale, noise_scale
from gradscope.stats.builtin.expectations import Fisher, fisher_of
from gradscope.stats.builtin.parameters import parameter_rows
from gradscope.stats.certificate import FileFacts
from gradscope.stats.products import distances
from gradscope.stats.records import (
    Floats,
    Positions,
    Record,
    SampleRecord,
    average,
    number,
    ratio,
    spread,
)
from gradscope.stats.rows import flat, mean_row
from gradscope.stats.sections import (
    POINTS,
    BarPicture,
    Column,
    Displayable,
    Fact,
    Overview,
    Picture,
    ScatterPicture,
    Section,
    Styled,
    Table,
    index_columns,
    numbers,
    short,
    size,
    target_columns,
)
from gradscope.stats.source import (
    Samples,
    Source,
    finite_samples,
    keys_of,
    mean_gradient_norm,
    mean_gradient_squared,
    mean_of,
    noun_of,
    rows_of,
    rows_unusable,
)

_DRAWN = 40  # the most parameters in a picture
_COMPARED = ("mean_norm", "mean_gradient_norm", "signal_to_noise")  # compared for each parameter

T = TypeVar("T")
Two = tuple[T, T]


class NumberPair(Record):
    """A number of both files, and second / first."""

    first: float | None
    second: float | None
    ratio: float | None

    @classmethod
    def of(cls, numbers: Iterable[float | None]) -> "NumberPair":
        """Return the two numbers with their ratio. A non-finite number becomes None."""
        first, second = map(number, numbers)
        return cls(first=first, second=second, ratio=ratio(second, first))


class ParameterChange(Record):
    """One parameter in both files."""

    name: str
    mean_norm: NumberPair
    mean_gradient_norm: NumberPair
    signal_to_noise: NumberPair
    cosine: float | None


class SampleChange(SampleRecord):
    """One sample in both files."""

    norm: NumberPair
    loss: NumberPair
    moved: float


class Difference(Record, Displayable):
    """The changes from the first file to the second."""

    schema_: Literal["gradscope.stats.difference"] = "gradscope.stats.difference"
    version: Literal[1] = 1
    files: tuple[FileFacts, FileFacts]
    same_data: bool
    loss: NumberPair
    norm: NumberPair
    median_norm: NumberPair
    noise_scale: NumberPair
    noise_scales: tuple[NoiseScale, NoiseScale]
    fisher: tuple[Fisher, Fisher]
    fisher_trace: NumberPair
    cosine: float | None
    parameters: tuple[ParameterChange, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    common: int
    samples: tuple[SampleChange, ...]
    exact: bool
    norms: tuple[tuple[float, float], ...] = Field(default=(), exclude=True, repr=False)

    def overview(self) -> Overview:
        """Return the facts, sections and pictures to show."""
        facts: list[Fact] = []
        records = {}
        for word, file in zip(("first", "second"), self.files, strict=True):
            labels = "" if file.labels == "data" else f", labels {file.labels}"
            facts.append((word, Styled(file.path, "bold")))
            facts.append(("", f"{count(file.samples, file.noun)}, {size(file.bytes)}{labels}"))
            records[f"Certificate of the {word}"] = file.certificate
            records[f"Run of the {word}"] = file.run
        return Overview(
            paths=[file.path for file in self.files],
            facts=facts,
            sections=[_overall(self), _by_parameter(self), *_by_sample(self)],
            pictures=list(_pictures(self)),
            records=records,
            noun=self.files[0].noun,
        )


def difference(first: Source, second: Source, top: int = 10, rows: bool = True) -> Difference:
    """Compare two open result files of the same model, at two checkpoints or on two data sets.

    Args:
        first: The file before the change.
        second: The file after the change.
        top: The number of samples to list.
        rows: Whether to read stored gradients.

    Raises:
        SpecError: The files have no parameter in common, or one holds scores.
    """
    for file in (first, second):
        if "attribution" in file.run:
            raise SpecError(
                "the file holds scores, not gradients",
                where=str(file.path),
                remedy="Give two files that gradscope compute -o wrote, or one score file.",
            )
    names = [k for k, shape in first.parameters.items() if second.parameters.get(k) == shape]
    if not names:
        raise SpecError(
            "the two files have no parameter of the same name and shape",
            remedy="Compare results of one model: two checkpoints, or two data sets.",
        )
    files, tables = (first, second), (Samples.of(first), Samples.of(second))
    both = list(zip(files, tables, strict=True))
    digests = [dict(file.attributes).get("dataset_sha256") for file in files]
    same_data = isinstance(digests[0], str) and digests[0] == digests[1]
    at = _common(both) if same_data else (np.arange(0), np.arange(0))
    norms = [table.norm[k] for table, k in zip(tables, at, strict=True)]
    some = spread(len(at[0]), POINTS)
    with np.errstate(all="ignore"):
        products = _products(files, tables, names, rows)
        apart = _distances(files, tables, at, names) if rows else None
        moved = np.abs(norms[1] - norms[0]) if apart is None else apart
        found = [parameter_rows(file, finite_samples(file)) for file in files]
        by_name = [{row.name: row for row in part} for part in found]
        noises: Any = [
            noise_scale(t.norm, mean_gradient_squared(f), noun=noun_of(f)) for f, t in both
        ]
        traces: Any = [fisher_of(file, table) for file, table in both]
        return Difference(
            files=(FileFacts.of(first), FileFacts.of(second)),
            same_data=same_data,
            loss=NumberPair.of(average(table.loss) for table in tables),
            norm=NumberPair.of(average(table.norm) for table in tables),
            median_norm=NumberPair.of(
                np.median(table.norm) if table.n else None for table in tables
            ),
            noise_scale=NumberPair.of(noise.simple for noise in noises),
            noise_scales=noises,
            fisher=traces,
            fisher_trace=NumberPair.of(fisher.trace for fisher in traces),
            cosine=_cosine(files, names, products),
            parameters=tuple(
                _changed(name, _cosine(files, [name], products), by_name) for name in names
            ),
            only_first=tuple(name for name in first.parameters if name not in names),
            only_second=tuple(name for name in second.parameters if name not in names),
            common=len(at[0]),
            samples=tuple(
                _moved(tables, at[0][k], at[1][k], moved[k])
                for k in np.argsort(-moved, kind="stable")[:top]
            ),
            exact=apart is not None,
            norms=tuple(zip(*(norm[some].tolist() for norm in norms), strict=True)),
        )


def _common(both: Sequence[tuple[Source, Samples]]) -> Two[Positions]:
    """Return the places (m,) in both tables of their common samples, in the first file's order."""
    first, second = (keys_of(file.samples)[table.rows] for file, table in both)
    _, *matched = np.intersect1d(first, second, return_indices=True)
    order = np.argsort(matched[0])
    return matched[0][order], matched[1][order]


def _moved(tables: Two[Samples], before: int, after: int, by: float) -> SampleChange:
    """Return the change of a sample from place `before` of the first file to `after`."""
    a, b = tables
    return SampleChange(
        **a.described(int(before)),
        norm=NumberPair.of([a.norm[before], b.norm[after]]),
        loss=NumberPair.of([a.loss[before], b.loss[after]]),
        moved=float(by),
    )


def _changed(name: str, cosine: float | None, rows: Sequence[Mapping[str, Any]]) -> ParameterChange:
    """Return the change of one parameter."""
    both = {k: NumberPair.of(getattr(of_file[name], k) for of_file in rows) for k in _COMPARED}
    return ParameterChange(name=name, cosine=cosine, **both)


def _products(
    files: Two[Source], tables: Two[Samples], names: Sequence[str], rows: bool
) -> dict[str, float] | None:
    """Return ⟨G, G′⟩ by parameter, or None if a mean is not stored and cannot be computed."""
    means = []
    for file, table in zip(files, tables, strict=True):
        mean, arrays = mean_of(file), rows_of(file)
        if mean is not None:
            means.append([flat(mean[name]) for name in names])
        elif arrays is None or not rows or not table.n or rows_unusable(file):
            return None
        else:
            means.append([mean_row(arrays[name], table.rows) for name in names])
    found = {name: float(a @ b) for name, a, b in zip(names, *means, strict=True)}
    return found if np.isfinite(list(found.values())).all() else None


def _cosine(
    files: Two[Source], names: Sequence[str], products: dict[str, float] | None
) -> float | None:
    if products is None:
        return None
    squares = [sum(mean_gradient_norm(file, name) ** 2 for name in names) for file in files]
    found = ratio(sum(products[name] for name in names), np.sqrt(squares[0] * squares[1]))
    return None if found is None else min(max(found, -1.0), 1.0)


def _distances(
    files: Two[Source], tables: Two[Samples], at: Two[Positions], names: Sequence[str]
) -> Floats | None:
    """Return ‖gᵢ′ − gᵢ‖ (m,) of the common samples, or None if a file has no usable rows."""
    arrays = [rows_of(file) for file in files]
    if arrays[0] is None or arrays[1] is None or any(map(rows_unusable, files)):
        return None
    pairs = ((arrays[0][name], arrays[1][name]) for name in names)
    found = distances(pairs, tables[0].rows[at[0]], tables[1].rows[at[1]])
    return found if np.isfinite(found).all() else None


def _overall(found: Difference) -> Section:
    kinds = [each.kind for each in found.fisher]
    which = "" if kinds[0] == kinds[1] else f" ({kinds[0]}, {kinds[1]})"
    rows = {
        "mean loss": found.loss,
        "mean norm": found.norm,
        "median norm": found.median_norm,
        "noise scale": found.noise_scale,
        f"Fisher trace{which}": found.fisher_trace,
    }
    columns = [
        numbers("first", [both.first for both in rows.values()]),
        numbers("second", [both.second for both in rows.values()]),
        numbers("second / first", [both.ratio for both in rows.values()]),
    ]
    cosine = Styled(f"cosine of the two mean gradients: {short(found.cosine)}")
    return Section(
        "What changed",
        table=Table(columns, "", list(rows)),
        notes=[] if found.cosine is None else [cosine],
        formulas=["cosine = ⟨G, G′⟩ / (‖G‖ ‖G′‖)"],
    )


def _both(title: str, pairs: Sequence[NumberPair], rank: int = 0) -> list[Column]:
    first, second = [both.first for both in pairs], [both.second for both in pairs]
    return [numbers(f"{title}, {k}", of, rank) for k, of in (("first", first), ("second", second))]


def _by_parameter(found: Difference) -> Section:
    rows = found.parameters
    columns = [
        *_both("mean norm", [r.mean_norm for r in rows], rank=2),
        numbers("second / first", [r.mean_norm.ratio for r in rows]),
        *_both("SNR", [r.signal_to_noise for r in rows], rank=3),
        numbers("norm of mean, second / first", [r.mean_gradient_norm.ratio for r in rows], rank=1),
    ]
    if found.cosine is not None:
        columns.append(numbers("cosine of means", [r.cosine for r in rows]))
    lone = (("first", found.only_first), ("second", found.only_second))
    notes = [f"Only in the {word} file: {', '.join(names)}" for word, names in lone if names]
    table = Table(columns, "parameter", [r.name for r in rows])
    return Section("Parameters", table=table, notes=notes)


def _by_sample(found: Difference) -> list[Section]:
    noun = found.files[0].noun
    if not found.same_data:
        note = f"The data differ, so single {noun}s are not compared."
        return [Section(f"{noun.capitalize()}s", notes=[note])]
    rows = found.samples
    if not rows:
        return []
    columns = [
        *index_columns(rows),
        numbers("change" if found.exact else "change, at least", [r.moved for r in rows]),
        *_both("norm", [r.norm for r in rows]),
        *_both("loss", [r.loss for r in rows], rank=1),
        *target_columns(rows),
    ]
    formulas = ["change = ‖gᵢ′ − gᵢ‖; without rows at least |‖gᵢ′‖ − ‖gᵢ‖|"]
    return [
        Section(
            f"{noun.capitalize()}s whose gradients changed most",
            table=Table(columns),
            formulas=formulas,
        )
    ]


def _pictures(found: Difference) -> Iterator[Picture]:
    rows = found.parameters[:_DRAWN]
    names, some = [row.name for row in rows], len(rows) < len(found.parameters)
    which = f" (first {len(rows)} of {len(found.parameters)})" if some else ""
    yield BarPicture(
        label="Mean norm of each parameter, second file over first",
        title=f"Mean norm, second / first{which}",
        across="mean norm, second file / first file",
        names=names,
        values=[row.mean_norm.ratio for row in rows],
    )
    if found.cosine is not None:
        yield BarPicture(
            label="Cosine of the mean gradients of each parameter",
            title=f"Cosine of the means{which}",
            across="cosine",
            names=names,
            values=[row.cosine for row in rows],
            second=True,
        )
    if found.samples:
        label = found.files[0].label
        named = [(r.norm.first or 0.0, r.norm.second or 0.0, label(r)) for r in found.samples]
        pairs = found.norms or [(x, y) for x, y, _ in named]  # after `from_json`
        yield ScatterPicture(
            label=f"Norms of the {found.files[0].noun}s in both files",
            title="Norms, second against first",
            across="norm in the first file",
            up="norm in the second file",
            x=[x for x, _ in pairs],
            y=[y for _, y in pairs],
            named=named,
            diagonal=True,
        )
