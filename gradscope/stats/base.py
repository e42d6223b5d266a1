"""What every result of this floor is: a frozen record with a stable JSON form."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, JsonValue

from gradscope.core.grammar import Stage, parse
from gradscope.errors import ResultFileError, SpecError

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


Json = Annotated[dict[str, JsonValue], BeforeValidator(_without_nan)]


class Record(BaseModel):
    """A frozen part of a result. JSON has no NaN: what is undefined is None, and null there."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        validate_by_name=True,
        serialize_by_alias=True,
    )

    def to_json(self) -> dict[str, Any]:
        """Return a document of plain JSON values."""
        return self.model_dump(mode="json", by_alias=True)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Return the record whose `to_json` is `document`."""
        return cls.model_validate(document)


class Interval(Record):
    """A confidence interval.

    Attributes:
        low: Its lower end; None where it has none.
        high: Its upper end, likewise.
    """

    low: float | None
    high: float | None


class Source(Protocol):
    """What statistics need of a result file; `gradscope.storage.GradientFile` has it.

    `samples` holds index, loss, norm and finite, each (N,), and target where there is one;
    `norms` maps a parameter's name to ‖gᵢ‖ of that parameter, (N,); `norm_attributes` maps it
    to {"mean_gradient_norm": ‖mean gᵢ‖ over the finite samples}. A chain has `text`, `reduced` and
    its arrays by name.
    """

    path: Any
    n: int
    attributes: Any
    run: Any
    certificate: Any
    parameters: Any
    samples: Any
    norms: Any
    chains: Any

    @property
    def norm_attributes(self) -> Any:
        """{parameter: {attribute: number}}."""


def stages_of(file: Source, chain: Any) -> tuple[Stage, ...]:
    """Return the stages of a chain that a file holds.

    Raises:
        ResultFileError: Its text is no chain.
    """
    try:
        return parse(chain.text)
    except SpecError as error:
        raise ResultFileError(
            f"it holds a chain that is none: {error.what}",
            where=str(file.path),
            remedy=f"{error.remedy}\nIt was changed, or something else wrote it: compute it again.",
        ) from error


def wide(values: Any) -> Floats:
    """Return `values` as float64, where all statistics are taken."""
    return np.asarray(values, dtype=np.float64)


def number(value: Any) -> float | None:
    """Return `value` as a float, or None where it is not finite."""
    result = float(value)
    return result if math.isfinite(result) else None


def rounding(values: Any) -> float:
    """Return what rounding leaves of nothing, relative to the squares of `values` as stored."""
    dtype = np.asarray(values).dtype
    return 4 * float(np.finfo(dtype).eps) if dtype.kind == "f" else 1e-12


def ratio(above: Any, below: Any) -> float | None:
    """Return above / below, or None where `below` is not positive or the ratio not finite."""
    above, below = float(above), float(below)
    return number(above / below) if below > 0 else None
