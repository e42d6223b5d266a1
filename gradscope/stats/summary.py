"""`summarize`: the statistics of a result file.

A statistic is a function of `Data`. The decorator `statistic` registers it together with its tables
and pictures. JSON, terminal, page and pictures all follow the registry. The module
`gradscope.stats.builtin` holds the statistics of the package.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_type_hints

import numpy as np
from pydantic import TypeAdapter

from gradscope.blocks.base import as_rows
from gradscope.core.registry import Registry
from gradscope.errors import SpecError
from gradscope.stats.certificate import FileFacts
from gradscope.stats.products import groups, products
from gradscope.stats.records import Floats, Positions, cosines_of, rounding
from gradscope.stats.rows import Entries, Limits, row_blocks
from gradscope.stats.sections import Brief, Displayable, Overview, Picture, Section, join_sections
from gradscope.stats.source import (
    Samples,
    Source,
    aggregate_of,
    mean_gradient_squared,
    mean_of,
    noun_of,
    rows_of,
)

# the questions in "In short", in this order; questions of plug-ins follow
QUESTIONS = (
    "largest gradient",
    "clipping norm",
    "batch size",
    "what learns",
    "problems",
    "check labels",
)

TOP = 10  # samples in a list

SCHEMA = {"schema": "gradscope.stats", "version": 1}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `summarize`."""

    top: int = TOP  # the number of samples in each list
    learning_rate: float | None = None  # for the batch size of CABS
    clip: Sequence[float] = ()  # clipping norms, to compute which share they clip
    nearest: int | None = None  # list the neighbours of the sample with this position in the data
    rows: bool = True  # whether to read stored gradients (once or twice)
    limits: Limits = field(default_factory=Limits)  # memory limits for reading rows

    def __post_init__(self) -> None:
        if self.top < 0:
            remedy = "Give a number of at least 0."
            raise SpecError(f"the number of samples to list is {self.top}", remedy=remedy)
        rate = () if self.learning_rate is None else (("learning rate", self.learning_rate),)
        for what, value in (*rate, *(("clipping norm", norm) for norm in self.clip)):
            if not 0 < value < float("inf"):
                remedy = "Give a number above 0, such as 0.1."
                raise SpecError(f"the {what} is {value:g}", remedy=remedy)


class Data:
    """The input of statistics, over the n finite samples of a file.

    Attributes:
        file: The open result file.
        options: The options of `summarize`.
        noun: The kind of row: sample or token.
        recorded: The samples as recorded.
        recorded_squared: ‖G‖² as recorded, or None if it is not finite.
        groups: The samples' classes, or None if the targets are not classes.
        place: The place among the samples of the sample whose neighbours are listed.
        products: Products of gradients, from the file's chains.
        samples: The samples; their norms are computed from rows if rows are more exact.
        mean_squared: ‖G‖², from rows if rows are more exact.
        rounding: The relative error of the squared norms.
    """

    def __init__(self, file: Source, options: Options) -> None:
        self.file, self.options, self.noun = file, options, noun_of(file)
        self.recorded = self.samples = Samples.of(file)
        self.recorded_squared = self.mean_squared = mean_gradient_squared(file)
        self.rounding = rounding(file.samples["norm"])
        self.groups = groups(self.samples)
        nearest = options.nearest
        self.place = None if nearest is None else self.samples.place(nearest)
        limits = options.limits if options.rows else None
        known = self.samples, self.mean_squared, self.groups, self.place
        self.products = products(file, *known, limits)
        if self.products.totals and self.products.exact:  # more exact than rounded norms
            self.samples = replace(self.samples, norm=np.sqrt(self.products.squares))
            self.mean_squared, self.rounding = self.products.mean_squared, 1e-12
        self._results: dict[str, Any] = {}

    @cached_property
    def cosines(self) -> Floats | None:
        """⟨gᵢ, G⟩ / (‖gᵢ‖ ‖G‖) (n,), or None if unknown; NaN where gᵢ or G is zero."""
        dots, big = self.products.dots, self.mean_squared
        length = np.sqrt(np.nan if big is None else big)
        return None if dots is None else cosines_of(dots, self.samples.norm * length)

    @cached_property
    def entries(self) -> dict[str, Entries] | None:
        """Signal and noise by entry, from rows, or from chains `mean` and `second_moment`.

        The chains do not serve complex parameters: |gⱼ|² mixes real and imaginary parts.
        """
        if self.products.totals:
            return {name: one.entries for name, one in self.products.totals.items()}
        mean, second = mean_of(self.file), aggregate_of(self.file, "second_moment")
        if mean is None or second is None or any(map(np.iscomplexobj, mean.values())):
            return None
        return {name: Entries.of(g, second[name]) for name, g in mean.items()}

    def rows(self) -> Iterator[tuple[str, Positions, Floats]]:
        """Yield the stored rows: (parameter, places (b,) among the samples, gradients (b, w)).

        Yields nothing if the file has no rows or `--no-rows` is given. Real and imaginary parts
        are separate entries. Each iteration reads the rows once more.
        """
        if self.options.rows:
            for name, array in (rows_of(self.file) or {}).items():
                blocks = row_blocks(array, self.samples.rows, self.options.limits)
                for places, block in blocks:
                    rows = as_rows(block.dense()).double()
                    yield name, np.arange(places.start, places.stop), rows.numpy()

    def result(self, name: str) -> Any:
        """Return the result of the statistic `name`; it is computed once."""
        if name not in self._results:
            self._results[name] = statistics.get(name).compute(self)
        return self._results[name]


@dataclass(frozen=True)
class Statistic:
    """A statistic and how it is shown. `docs/statistics.md` explains the package's statistics."""

    # from the data of a file to a `Record`, a tuple of records, or None if nothing applies; its
    # return annotation is used to read JSON
    compute: Callable[[Data], Any]
    place: int = 900  # the position in the output; the package uses 10, 20, ... 140
    # (result, summary) -> sections. This and the next four are called only if the result is not
    # None
    sections: "Callable[[Any, Summary], Iterable[Section]] | None" = None
    # (result, summary) -> sections, for the output of one screen
    brief: "Callable[[Any, Summary], Iterable[Section]] | None" = None
    # (result, summary) -> pairs of a question and its answer, for "In short"
    answers: "Callable[[Any, Summary], Iterable[tuple[str, str]]] | None" = None
    # (result, summary) -> warnings, for the first lines
    warnings: "Callable[[Any, Summary], Iterable[str]] | None" = None
    # (result, summary) -> pictures
    pictures: "Callable[[Any, Summary], Iterable[Picture]] | None" = None
    in_json: bool = True  # whether the JSON document contains the result

    def __call__(self, data: Data) -> Any:
        """Return the result."""
        return self.compute(data)

    @cached_property
    def form(self) -> TypeAdapter[Any]:
        """The type of the result, for writing and reading JSON."""
        return TypeAdapter(get_type_hints(self.compute)["return"])


statistics: Registry[Statistic] = Registry("statistic")


def statistic(name: str, **how: Any) -> Callable[[Callable[[Data], Any]], Statistic]:
    """Register a function of `Data` as a statistic.

    Args:
        name: The key of its result in JSON and in a `Summary`.
        **how: Fields of `Statistic`: place, sections, brief, answers, warnings, pictures, in_json.

    Raises:
        SpecError: A statistic of this name is registered already.
    """

    def add(compute: Callable[[Data], Any]) -> Statistic:
        return statistics.register(name)(Statistic(compute, **how))

    return add


def ordered_statistics() -> list[tuple[str, Statistic]]:
    """Return all statistics with their names, in the order in which they are shown."""
    every = ((name, statistics.get(name)) for name in statistics.names())
    return sorted(every, key=lambda item: item[1].place)


@dataclass(frozen=True)
class Summary(Displayable):
    """The statistics of one result file, as attributes: `summary.noise_scale.simple`.

    A statistic that the file lacks gradients for has the value None. `missing` lists these
    statistics. `docs/statistics.md` has every key and formula.
    """

    file: FileFacts  # facts of the file
    results: Mapping[str, Any]  # results by the name of the statistic
    asked: Sequence[str] = ()  # the statistics requested by options

    def __getattr__(self, name: str) -> Any:
        results = self.__dict__.get("results", {})
        if name in results:
            return results[name]
        raise AttributeError(f"a summary has no statistic {name!r}")

    @property
    def noun(self) -> str:
        """The kind of row: sample or token."""
        return self.file.noun

    @property
    def finite(self) -> int:
        """N, the number of finite samples."""
        return int(self.file.samples - self.nonfinite.count)

    def to_json(self) -> dict[str, Any]:
        """Return a document of plain JSON values."""
        found = {
            name: one.form.dump_python(self.results[name], mode="json", by_alias=True)
            for name, one in ordered_statistics()
            if one.in_json and name in self.results
        }
        return {**SCHEMA, "file": self.file.to_json(), **found}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Summary":
        """Return the summary whose `to_json` is `document`, without data that only pictures use."""
        found = {
            name: one.form.validate_python(document[name]) if one.in_json else None
            for name, one in ordered_statistics()
            if name in document or not one.in_json
        }
        return cls(FileFacts.from_json(document["file"]), found)

    def overview(self) -> Overview:
        """Return the facts, sections and pictures to show."""

        def collect(how: str) -> Iterator[Any]:
            for name, one in ordered_statistics():
                asked = how == "brief" and name in self.asked
                show, found = getattr(one, "sections" if asked else how), self.results.get(name)
                if show is not None and found is not None:
                    yield from show(found, self)

        answers: dict[str, list[str]] = {question: [] for question in QUESTIONS}
        for question, answer in collect("answers"):
            answers.setdefault(question, []).append(answer)
        facts = [(question, ", ".join(found)) for question, found in answers.items() if found]
        short = [Section("In short", facts)] if self.finite else []
        sections = join_sections([*short, *collect("sections")])
        some = join_sections([*short, *collect("brief")])
        left = f"{len(sections) - len(some)} more sections: gradscope stats --full."
        left += f" A page of {self.noun}s: gradscope view"
        records = {"Certificate": self.file.certificate, "Run": self.file.run}
        return Overview(
            paths=[self.file.path],
            facts=self.file.shown(),
            warnings=list(collect("warnings")),
            sections=sections,
            brief=Brief(self.file.in_short(), some, left) if len(some) < len(sections) else None,
            pictures=sorted(collect("pictures"), key=lambda picture: picture.place),
            records=records,
            noun=self.noun,
        )


def summarize(
    file: Source,
    top: int | None = None,
    learning_rate: float | None = None,
    clip: Sequence[float] = (),
    nearest: int | None = None,
    rows: bool = True,
) -> Summary:
    """Compute the statistics of an open result file, a `GradientFile`, with these `Options`.

    Raises:
        SpecError: An argument is out of its range.
        ResultFileError: The file is incomplete or damaged.
    """
    most = TOP if top is None else top
    options = Options(top=most, learning_rate=learning_rate, clip=clip, nearest=nearest, rows=rows)
    asked = {
        "clipping": bool(clip),
        "cabs": learning_rate is not None,
        "nearest": nearest is not None,
        **dict.fromkeys(("samples", "most_opposed", "largest_losses"), top is not None),
    }
    with np.errstate(all="ignore"):  # an overflow becomes None
        data = Data(file, options)
    return summary_of(data, [name for name, known in asked.items() if known])


def summary_of(data: Data, asked: Sequence[str] = ()) -> Summary:
    """Return all statistics of a file's data; `asked` names those requested by options."""
    with np.errstate(all="ignore"):
        found = {name: data.result(name) for name, _ in ordered_statistics()}
    return Summary(FileFacts.of(data.file), found, asked)
