"""Two files: what changed from the first to the second."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from gradscope.errors import SpecError
from gradscope.stats.base import Floats, Record, Source, number, ratio, rounding, wide
from gradscope.stats.facts import FileFacts, facts
from gradscope.stats.fisher import Fisher, fisher
from gradscope.stats.moving import Sources, Tables, common, distances, mean_products
from gradscope.stats.noise import NoiseScale, noise_scale, signal_to_noise
from gradscope.stats.samples import scalar
from gradscope.stats.table import Positions, Table, mean_gradient_norm, mean_gradient_squared

_POINTS = 4000


class Both(Record):
    """A number of both files.

    Attributes:
        first: Of the first.
        second: Of the second.
        ratio: second / first.
    """

    first: float | None
    second: float | None
    ratio: float | None


class ParameterChange(Record):
    """One parameter in both files.

    Attributes:
        name: As in the model.
        mean_norm: mean ‖gᵢ‖.
        mean_gradient_norm: ‖G‖.
        signal_to_noise: ‖G‖² / (mean‖gᵢ‖² − ‖G‖²).
        cosine: Of the two mean gradients; None unless both files have rows or a chain `mean`.
    """

    name: str
    mean_norm: Both
    mean_gradient_norm: Both
    signal_to_noise: Both
    cosine: float | None


class Moved(Record):
    """One sample in both files.

    Attributes:
        index: Its position in the data set.
        id: Its own name; None where none is stored.
        target: As stored.
        norm: ‖gᵢ‖.
        loss: Lᵢ.
        moved: ‖gᵢ′ − gᵢ‖, or |‖gᵢ′‖ − ‖gᵢ‖|, the least it can be, where rows are missing.
    """

    index: int
    id: int | str | None = None
    target: bool | int | float | str | None
    norm: Both
    loss: Both
    moved: float


class Difference(Record):
    """What changed.

    Attributes:
        files: Facts of both.
        same_data: Whether both were computed from the same data.
        loss: The mean losses.
        norm: The mean norms.
        median_norm: The median norms.
        noise_scale: B_simple; `noise_scales` has how it comes about.
        noise_scales: Of both.
        fisher: Of both; `fisher_trace` has their ratio.
        fisher_trace: The traces.
        cosine: Of the two mean gradients, over the parameters that both have.
        parameters: Those that both have in the same shape.
        only_first: Parameters of the first alone; likewise only_second.
        common: How many finite samples both have.
        samples: Those that moved most, farthest first; none unless the data are the same.
        exact: Whether `moved` is from rows.
        norms: ‖gᵢ‖ in both, for a picture; not part of the JSON form.
    """

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
    files = first, second
    with np.errstate(all="ignore"):
        tables = Table.of(first), Table.of(second)
        same = _data(first) is not None and _data(first) == _data(second)
        none = np.empty(0, np.int64)
        places = common(tables) if same else (none, none)
        products = mean_products(files, tables, names, rows)
        moved = distances(files, tables, places, names) if rows else None
        noises = (
            noise_scale(tables[0].norm, mean_gradient_squared(first)),
            noise_scale(tables[1].norm, mean_gradient_squared(second)),
        )
        traces = fisher(first, tables[0]), fisher(second, tables[1])
        return Difference(
            files=(facts(first), facts(second)),
            same_data=same,
            loss=_both(*(_mean(table.loss) for table in tables)),
            norm=_both(*(_mean(table.norm) for table in tables)),
            median_norm=_both(*(_median(table.norm) for table in tables)),
            noise_scale=_both(noises[0].simple, noises[1].simple),
            noise_scales=noises,
            fisher=traces,
            fisher_trace=_both(traces[0].trace, traces[1].trace),
            cosine=_cosine(files, names, products),
            parameters=tuple(_parameter(files, tables, name, products) for name in names),
            only_first=tuple(name for name in first.parameters if name not in names),
            only_second=tuple(name for name in second.parameters if name not in names),
            common=len(places[0]),
            samples=_moved(tables, places, moved, top),
            exact=moved is not None,
            norms=_norms(tables, places),
        )


def _data(file: Source) -> str | None:
    """Return the digest of the data, or None where it is not recorded."""
    digest = dict(file.attributes).get("dataset_sha256")
    return digest if isinstance(digest, str) else None


def _parameter(
    files: Sources, tables: Tables, name: str, products: dict[str, float] | None
) -> ParameterChange:
    lengths = [mean_gradient_norm(file, name) for file in files]
    norms = [wide(f.norms[name])[t.rows] for f, t in zip(files, tables, strict=True)]
    rounded = [rounding(file.norms[name]) for file in files]
    signals = [
        signal_to_noise(own.size, float(np.square(own).mean()), length**2, limit)
        for length, own, limit in zip(lengths, norms, rounded, strict=True)
    ]
    return ParameterChange(
        name=name,
        mean_norm=_both(*map(_mean, norms)),
        mean_gradient_norm=_both(*map(number, lengths)),
        signal_to_noise=_both(*signals),
        cosine=_cosine(files, [name], products),
    )


def _cosine(
    files: Sources, names: Sequence[str], products: dict[str, float] | None
) -> float | None:
    if products is None:
        return None
    lengths = [sum(mean_gradient_norm(f, name) ** 2 for name in names) for f in files]
    found = ratio(sum(products[name] for name in names), np.sqrt(lengths[0] * lengths[1]))
    return None if found is None else min(max(found, -1.0), 1.0)


def _moved(
    tables: Tables, places: tuple[Positions, Positions], exact: Floats | None, top: int
) -> tuple[Moved, ...]:
    a, b = places
    moved = np.abs(tables[1].norm[b] - tables[0].norm[a]) if exact is None else exact
    target: Any = tables[0].target
    return tuple(
        Moved(
            index=int(tables[0].index[a[k]]),
            id=tables[0].name(int(a[k])),
            target=None if target is None else scalar(target[a[k]]),
            norm=_both(number(tables[0].norm[a[k]]), number(tables[1].norm[b[k]])),
            loss=_both(number(tables[0].loss[a[k]]), number(tables[1].loss[b[k]])),
            moved=float(moved[k]),
        )
        for k in np.argsort(-moved, kind="stable")[:top]
    )


def _norms(tables: Tables, places: tuple[Positions, Positions]) -> tuple[tuple[float, float], ...]:
    """Return at most 4,000 of the pairs of norms, evenly spread."""
    m = len(places[0])
    some = np.linspace(0, m - 1, min(m, _POINTS)).round().astype(np.int64)
    both = (table.norm[p[some]].tolist() for table, p in zip(tables, places, strict=True))
    return tuple(zip(*both, strict=True))


def _both(first: float | None, second: float | None) -> Both:
    known = first is not None and second is not None
    return Both(first=first, second=second, ratio=ratio(second, first) if known else None)


def _mean(values: Floats) -> float | None:
    return number(values.mean()) if values.size else None


def _median(values: Floats) -> float | None:
    return number(np.median(values)) if values.size else None
