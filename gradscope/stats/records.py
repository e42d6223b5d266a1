"""Records: frozen results with a stable JSON form, in float64."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, JsonValue

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Positions = NDArray[np.int64]


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


Json = Annotated[dict[str, JsonValue], BeforeValidator(_without_nan)]
Plain = bool | int | float | str | None  # a target as a JSON value


class Record(BaseModel):
    """A frozen part of a result. None (null in JSON) stands for an undefined number."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        validate_by_name=True,
        serialize_by_alias=True,
        alias_generator=lambda name: name.removesuffix("_"),  # `schema` is a name of pydantic's
    )

    def to_json(self) -> dict[str, Any]:
        """Return a document of plain JSON values."""
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Return the record whose `to_json` is `document`."""
        return cls.model_validate(document)


class SampleRecord(Record):
    """A record about one sample, with its index and id."""

    index: int  # its position in the data set
    id: int | str | None = None  # its name in the data
    target: Plain


class Interval(Record):
    """A confidence interval; for an unbounded end the value is missing (None)."""

    low: float | None
    high: float | None


class Histogram(Record):
    """Counts of the positive values between edges."""

    scale: Literal["linear", "log"]
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    zeros: int


def wide(values: Any) -> Floats:
    """Return `values` as float64, the dtype of all statistics."""
    return np.asarray(values, dtype=np.float64)


def number(value: Any) -> float | None:
    """Return `value` as a float, or None if it is unknown or not finite."""
    return None if value is None or not math.isfinite(value) else float(value)


def ratio(above: Any, below: Any) -> float | None:
    """Return above / below, or None if unknown or not finite, or if `below` is not positive."""
    if above is None or below is None or not below > 0:
        return None
    return number(float(above) / float(below))


def average(values: Floats) -> float | None:
    """Return the mean of the finite `values` (n,), or None if no value is finite."""
    known = values[np.isfinite(values)]
    return number(known.mean()) if known.size else None


def cosines_of(products: Floats, lengths: Floats) -> Floats:
    """Return products / lengths, between -1 and 1; NaN where a length is not positive."""
    nothing = np.full(products.shape, np.nan)
    return wide(np.clip(np.divide(products, lengths, out=nothing, where=lengths > 0), -1.0, 1.0))


def spread(n: int, most: int) -> Positions:
    """Return at most `most` of n places, evenly spread."""
    return np.linspace(0, n - 1, min(n, most)).round().astype(np.int64)


def descending(values: Floats, most: int | None = None) -> Positions:
    """Return places by falling value, at least the first `most`; NaN comes last.

    Equal values keep their order.
    """
    if most is None or most >= len(values):
        return np.argsort(-values, kind="stable")
    bound = -np.partition(-values, most)[most]  # NaN if there are fewer numbers
    some = np.flatnonzero(values >= bound) if bound == bound else np.arange(len(values))
    return some[np.argsort(-values[some], kind="stable")]


def rounding(values: Any) -> float:
    """Return the relative rounding error of squares of `values`, by their dtype."""
    dtype = np.asarray(values).dtype
    return 4 * float(np.finfo(dtype).eps) if dtype.kind == "f" else 1e-12


def plain(value: Any) -> Plain:
    """Return a target or an id as a JSON value, or None for arrays and non-finite numbers."""
    if np.ndim(value):
        return None
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, float):
        return number(value)
    return value if isinstance(value, bool | int | str) else None
