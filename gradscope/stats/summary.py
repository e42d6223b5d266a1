"""`summarize`: what a result file says, from the file alone."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from gradscope.errors import SpecError
from gradscope.stats.base import Json, Mask, Record, Source, number, wide
from gradscope.stats.distribution import Distribution, Moments, distribution, moments
from gradscope.stats.noise import NoiseScale, noise_scale
from gradscope.stats.rows import ParameterRow, parameter_rows
from gradscope.stats.samples import Points, SampleRow, largest, points

_POINTS = 4000


class ChainFacts(Record):
    """One chain of the file."""

    text: str
    reduced: bool


class FileFacts(Record):
    """What the file is.

    Attributes:
        path: As it was opened.
        bytes: Its size.
        samples: N, finite or not.
        parameters: How many.
        entries: Of all parameters together.
        chains: In the file's order.
        backend: Which one computed it, as recorded.
        certificate: As recorded.
    """

    path: str
    bytes: int | None
    samples: int
    parameters: int
    entries: int
    chains: tuple[ChainFacts, ...]
    backend: str | None
    certificate: Json


class NonFinite(Record):
    """Samples whose loss or gradient is not finite; all other statistics leave them out.

    Attributes:
        count: How many.
        index: The first of them, as positions in the data set.
    """

    count: int
    index: tuple[int, ...]


class Summary(Record):
    """The statistics of one result file. docs/statistics.md has every formula.

    Attributes:
        file: Facts of the file.
        loss: None when no sample is finite; likewise norm.
        norm: ‖gᵢ‖ over all parameters.
        noise_scale: How large a batch is worth.
        parameters: One row each, in the model's order.
        samples: Those with the largest norms, largest first.
        nonfinite: Those left out.
        points: For pictures; not part of the JSON form.
    """

    schema_: Literal["gradscope.stats"] = Field(
        default="gradscope.stats", validation_alias="schema", serialization_alias="schema"
    )
    version: Literal[1] = 1
    file: FileFacts
    loss: Moments | None
    norm: Distribution | None
    noise_scale: NoiseScale
    parameters: tuple[ParameterRow, ...]
    samples: tuple[SampleRow, ...]
    nonfinite: NonFinite
    points: Points | None = Field(default=None, exclude=True, repr=False)


def summarize(file: Source, top: int = 10) -> Summary:
    """Compute the statistics of an open result file.

    Args:
        file: A `GradientFile`.
        top: How many of the largest samples to list.

    Raises:
        SpecError: `top` is negative.
        ResultFileError: The file lacks something it must have.
    """
    if top < 0:
        raise SpecError(f"the number of samples to list must not be negative, not {top}")
    norms = wide(file.samples["norm"])
    finite: Mask = np.asarray(file.samples["finite"], dtype=bool) & np.isfinite(norms)
    rows = parameter_rows(file, finite)
    return Summary(
        file=_facts(file),
        loss=moments(wide(file.samples["loss"])[finite]),
        norm=distribution(norms[finite]),
        noise_scale=noise_scale(norms[finite], _mean_gradient_squared(rows)),
        parameters=rows,
        samples=largest(file, finite, top),
        nonfinite=_nonfinite(file, finite, top),
        points=points(file, finite, _POINTS),
    )


def _facts(file: Source) -> FileFacts:
    path = Path(file.path)
    sizes = [int(np.prod(shape, dtype=np.int64)) for shape in file.parameters.values()]
    return FileFacts(
        path=str(path),
        bytes=path.stat().st_size if path.is_file() else None,
        samples=file.n,
        parameters=len(sizes),
        entries=sum(sizes),
        chains=tuple(ChainFacts(text=c.text, reduced=c.reduced) for c in file.chains),
        backend=_backend(dict(file.run), dict(file.certificate)),
        certificate=file.certificate,
    )


def _backend(run: dict[str, Any], certificate: dict[str, Any]) -> str | None:
    """Return the backend that computed the file: the one proved, else the one asked for."""
    for place in (certificate, run, run.get("compute") or {}):
        if isinstance(place.get("backend"), str):
            return str(place["backend"])
    return None


def _mean_gradient_squared(rows: tuple[ParameterRow, ...]) -> float | None:
    """Return ‖G‖² over all parameters."""
    norms = [row.mean_gradient_norm for row in rows]
    known = [norm for norm in norms if norm is not None]
    return number(sum(norm**2 for norm in known)) if len(known) == len(norms) else None


def _nonfinite(file: Source, finite: Mask, top: int) -> NonFinite:
    rows = np.flatnonzero(~finite)
    return NonFinite(
        count=int(rows.size), index=tuple(int(file.samples["index"][i]) for i in rows[:top])
    )
