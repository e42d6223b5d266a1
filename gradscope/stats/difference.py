"""Two files: what changed from the first to the second."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, Literal

import numpy as np
from pydantic import Field

from gradscope.errors import SpecError
from gradscope.stats.builtin.batch import NoiseScale, noise_scale, signal_to_noise
from gradscope.stats.builtin.expectations import Fisher, fisher_of
from gradscope.stats.certificate import FileFacts
from gradscope.stats.products import Tiles, flat
from gradscope.stats.records import (
    Floats,
    Positions,
    Record,
    average,
    number,
    ratio,
    rounding,
    wide,
)
from gradscope.stats.sections import (
    POINTS,
    BarPicture,
    Column,
    Fact,
    Overview,
    Picture,
    ScatterPicture,
    Section,
    Styled,
    Table,
    count,
    numbers,
    positions,
    short,
    size,
    targets,
)
from gradscope.stats.source import (
    Samples,
    Source,
    mean_gradient_norm,
    mean_gradient_squared,
    mean_of,
    rows_of,
    rows_unusable,
)

_TILE = 2**21  # numbers of a file in work at a time
_DRAWN = 40  # parameters in a picture

Places = tuple[Positions, Positions]


class Both(Record):
    """A number of both files, and second / first."""

    first: float | None
    second: float | None
    ratio: float | None

    @classmethod
    def of(cls, numbers: Sequence[float | None]) -> "Both":
        """Return the two numbers with their ratio."""
        first, second = numbers
        known = first is not None and second is not None
        return cls(first=first, second=second, ratio=ratio(second, first) if known else None)


class ParameterChange(Record):
    """One parameter in both files."""

    name: str
    mean_norm: Both
    mean_gradient_norm: Both
    signal_to_noise: Both
    cosine: float | None


class Moved(Record):
    """One sample in both files."""

    index: int
    id: int | str | None = None
    target: bool | int | float | str | None
    norm: Both
    loss: Both
    moved: float


class Difference(Record):
    """What changed."""

    schema_: Literal["gradscope.stats.difference"] = Field(
        default="gradscope.stats.difference",
        validation_alias="schema",
        serialization_alias="schema",
    )
    version: Literal[1] = 1
    files: tuple[FileFacts, FileFacts]
    same_data: bool
    loss: Both
    norm: Both
    median_norm: Both
    noise_scale: Both
    noise_scales: tuple[NoiseScale, NoiseScale]
    fisher: tuple[Fisher, Fisher]
    fisher_trace: Both
    cosine: float | None
    parameters: tuple[ParameterChange, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    common: int
    samples: tuple[Moved, ...]
    exact: bool
    norms: tuple[tuple[float, float], ...] = Field(default=(), exclude=True, repr=False)

    def overview(self) -> Overview:
        """Return all that is shown of it."""
        facts: list[Fact] = []
        records = {}
        for word, file in zip(("first", "second"), self.files, strict=True):
            labels = "" if file.labels == "data" else f", labels {file.labels}"
            facts.append((word, Styled(file.path, "bold")))
            facts.append(("", f"{count(file.samples, 'sample')}, {size(file.bytes)}{labels}"))
            records[f"Certificate of the {word}"] = file.certificate
            records[f"Run of the {word}"] = file.run
        return Overview(
            paths=[file.path for file in self.files],
            facts=facts,
            sections=[_overall(self), _by_parameter(self), *_by_sample(self)],
            pictures=list(_pictures(self)),
            records=records,
        )


def difference(first: Source, second: Source, top: int = 10, rows: bool = True) -> Difference:
    """Compare two open result files of the same model, at two checkpoints or on two data sets.

    Args:
        first: Before.
        second: After.
        top: How many samples to list.
        rows: Whether to read stored gradients.

    Raises:
        SpecError: They have no parameter in common.
    """
    names = [k for k, shape in first.parameters.items() if second.parameters.get(k) == shape]
    if not names:
        raise SpecError(
            "the two files have no parameter of the same name and shape",
            remedy="Compare results of one model: two checkpoints, or two data sets.",
        )
    with np.errstate(all="ignore"):
        return _Compared((first, second), names, rows).result(top)


class _Compared:
    """Two files, their tables, and where in these the samples are that both have (m,) each."""

    def __init__(self, files: tuple[Source, Source], names: Sequence[str], rows: bool) -> None:
        self.files, self.names, self.rows = files, names, rows
        self.tables = Samples.of(files[0]), Samples.of(files[1])
        digests = [dict(file.attributes).get("dataset_sha256") for file in files]
        self.same_data = isinstance(digests[0], str) and digests[0] == digests[1]
        self.places: Places = np.empty(0, np.int64), np.empty(0, np.int64)
        if self.same_data:
            index = self.tables[0].index, self.tables[1].index
            _, first, second = np.intersect1d(index[0], index[1], return_indices=True)
            order = np.argsort(first)
            self.places = first[order], second[order]
        means = [self._means(k) for k in (0, 1)]
        self.products: dict[str, float] | None = None  # ⟨G, G′⟩ by parameter
        if means[0] is not None and means[1] is not None:
            pairs = zip(names, means[0], means[1], strict=True)
            products = {name: float(a @ b) for name, a, b in pairs}
            if np.isfinite(list(products.values())).all():
                self.products = products

    def result(self, top: int) -> Difference:
        files, names = self.files, self.names
        noises = _noise_of(files[0], self.tables[0]), _noise_of(files[1], self.tables[1])
        traces = fisher_of(files[0], self.tables[0]), fisher_of(files[1], self.tables[1])
        moved = self._distances() if self.rows else None
        return Difference(
            files=(FileFacts.of(files[0]), FileFacts.of(files[1])),
            same_data=self.same_data,
            loss=Both.of([average(table.loss) for table in self.tables]),
            norm=Both.of([average(table.norm) for table in self.tables]),
            median_norm=Both.of([number(np.median(t.norm)) if t.n else None for t in self.tables]),
            noise_scale=Both.of([noise.simple for noise in noises]),
            noise_scales=noises,
            fisher=traces,
            fisher_trace=Both.of([fisher.trace for fisher in traces]),
            cosine=self._cosine(names),
            parameters=tuple(map(self._parameter, names)),
            only_first=tuple(name for name in files[0].parameters if name not in names),
            only_second=tuple(name for name in files[1].parameters if name not in names),
            common=len(self.places[0]),
            samples=self._moved(moved, top),
            exact=moved is not None,
            norms=self._norms(),
        )

    def _means(self, k: int) -> list[Any] | None:
        """Return G of each parameter (w,) of a file, or None without `mean` and without rows."""
        file, table = self.files[k], self.tables[k]
        mean, arrays = mean_of(file), rows_of(file)
        if mean is not None:
            return [flat(np.asarray(mean[name])[None])[0] for name in self.names]
        if arrays is None or not self.rows or not table.n or rows_unusable(file):
            return None
        found = []
        for name in self.names:
            tiles = Tiles.walked(arrays[name], table)
            found.append(sum(values.sum(0, dtype=np.float64) for _, values in tiles) / table.n)
        return found

    def _distances(self) -> Floats | None:
        """Return ‖gᵢ′ − gᵢ‖ (m,) of the samples of both; None without the rows of both."""
        arrays = [rows_of(file) for file in self.files]
        if arrays[0] is None or arrays[1] is None or any(map(rows_unusable, self.files)):
            return None
        rows = [table.rows[p] for table, p in zip(self.tables, self.places, strict=True)]
        squares = np.zeros(len(rows[0]))
        for name in self.names:
            both = arrays[0][name], arrays[1][name]
            step = max(1, _TILE // max(1, prod(both[0].shape[1:])))
            for start in range(0, len(squares), step):
                part = slice(start, start + step)
                a, b = (_read(array, r[part]) for array, r in zip(both, rows, strict=True))
                squares[part] += np.square(np.abs(b - a)).reshape(len(a), -1).sum(1)
        return np.sqrt(squares) if np.isfinite(squares).all() else None

    def _parameter(self, name: str) -> ParameterChange:
        norms, lengths, signals = [], [], []
        for file, table in zip(self.files, self.tables, strict=True):
            own, length = wide(file.norms[name])[table.rows], mean_gradient_norm(file, name)
            small, rounded = float(np.square(own).mean()), rounding(file.norms[name])
            signals.append(signal_to_noise(own.size, small, length**2, rounded))
            norms.append(average(own))
            lengths.append(number(length))
        return ParameterChange(
            name=name,
            mean_norm=Both.of(norms),
            mean_gradient_norm=Both.of(lengths),
            signal_to_noise=Both.of(signals),
            cosine=self._cosine([name]),
        )

    def _cosine(self, names: Sequence[str]) -> float | None:
        if self.products is None:
            return None
        squares = [sum(mean_gradient_norm(f, name) ** 2 for name in names) for f in self.files]
        above = sum(self.products[name] for name in names)
        found = ratio(above, np.sqrt(squares[0] * squares[1]))
        return None if found is None else min(max(found, -1.0), 1.0)

    def _moved(self, exact: Floats | None, top: int) -> tuple[Moved, ...]:
        (first, second), (a, b) = self.tables, self.places
        moved = np.abs(second.norm[b] - first.norm[a]) if exact is None else exact
        return tuple(
            Moved(
                **first.described(int(a[k])),
                norm=Both.of([number(first.norm[a[k]]), number(second.norm[b[k]])]),
                loss=Both.of([number(first.loss[a[k]]), number(second.loss[b[k]])]),
                moved=float(moved[k]),
            )
            for k in np.argsort(-moved, kind="stable")[:top]
        )

    def _norms(self) -> tuple[tuple[float, float], ...]:
        """Return at most 4,000 of the pairs of norms, evenly spread."""
        m = len(self.places[0])
        some = np.linspace(0, m - 1, min(m, POINTS)).round().astype(np.int64)
        both = (t.norm[p[some]].tolist() for t, p in zip(self.tables, self.places, strict=True))
        return tuple(zip(*both, strict=True))


def _read(array: Any, rows: Positions) -> Any:
    """Return the rows (b, *shape) in double precision; those in sequence are read as one."""
    in_sequence = len(rows) and (np.diff(rows) == 1).all()
    values = array[slice(int(rows[0]), int(rows[-1]) + 1) if in_sequence else rows]
    return np.asarray(values, dtype=np.result_type(values.dtype, np.float64))


def _noise_of(file: Source, table: Samples) -> NoiseScale:
    return noise_scale(table.norm, mean_gradient_squared(file))


def _overall(found: Difference) -> Section:
    kinds = [each.kind for each in found.fisher]
    which = "Fisher" if kinds[0] == kinds[1] else f"{kinds[0]}, {kinds[1]} Fisher"
    rows = {
        "mean loss": found.loss,
        "mean norm": found.norm,
        "median norm": found.median_norm,
        "noise scale": found.noise_scale,
        f"trace of {which}": found.fisher_trace,
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


def _both(title: str, pairs: Sequence[Both], rank: int = 0) -> list[Column]:
    first, second = [both.first for both in pairs], [both.second for both in pairs]
    return [numbers(title, first, rank), numbers(f"{title} then", second, rank)]


def _by_parameter(found: Difference) -> Section:
    rows = found.parameters
    columns = [
        *_both("mean norm", [r.mean_norm for r in rows], rank=2),
        numbers("ratio of norms", [r.mean_norm.ratio for r in rows]),
        *_both("SNR", [r.signal_to_noise for r in rows], rank=3),
        numbers("ratio of means", [r.mean_gradient_norm.ratio for r in rows], rank=1),
    ]
    if found.cosine is not None:
        columns.append(numbers("cosine of means", [r.cosine for r in rows]))
    lone = (("first", found.only_first), ("second", found.only_second))
    notes = [f"only in the {word}: {', '.join(names)}" for word, names in lone if names]
    table = Table(columns, "parameter", [r.name for r in rows])
    return Section("Parameters", table=table, notes=notes)


def _by_sample(found: Difference) -> list[Section]:
    if not found.same_data:
        note = "The data are not the same, so samples are not compared one by one."
        return [Section("Samples", notes=[note])]
    rows = found.samples
    if not rows:
        return []
    columns = [
        *positions(rows),
        numbers("moved" if found.exact else "at least", [r.moved for r in rows]),
        *_both("norm", [r.norm for r in rows]),
        *_both("loss", [r.loss for r in rows], rank=1),
        *targets(rows),
    ]
    formulas = ["moved = ‖gᵢ′ − gᵢ‖; without rows at least |‖gᵢ′‖ − ‖gᵢ‖|"]
    return [Section("Samples that moved most", table=Table(columns), formulas=formulas)]


def _pictures(found: Difference) -> Iterator[Picture]:
    rows = found.parameters[:_DRAWN]
    names, height = [row.name for row in rows], max(1.8, 1.0 + 0.2 * len(rows))
    some = len(rows) < len(found.parameters)
    which = f" (first {len(rows)} of {len(found.parameters)})" if some else ""
    yield BarPicture(
        label="Mean norm of each parameter, second file over first",
        title=f"Mean norm, second / first{which}",
        names=names,
        values=[row.mean_norm.ratio for row in rows],
        height=height,
    )
    if found.cosine is not None:
        yield BarPicture(
            label="Cosine of the mean gradients of each parameter",
            title=f"Cosine of the means{which}",
            names=names,
            values=[row.cosine for row in rows],
            height=height,
            second=True,
        )
    if found.samples:
        named = [(r.norm.first or 0.0, r.norm.second or 0.0, r.index) for r in found.samples]
        pairs = found.norms or [(x, y) for x, y, _ in named]  # read back from JSON it has no others
        yield ScatterPicture(
            label="Norms of the samples in both files",
            title="Norms, second against first",
            across="norm in the first",
            up="norm in the second",
            x=[x for x, _ in pairs],
            y=[y for _, y in pairs],
            named=named,
            diagonal=True,
        )
