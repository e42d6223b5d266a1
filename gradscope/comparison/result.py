"""What a comparison found, as plain values, and the JSON document of it."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from gradscope.blocks import Chosen

SCHEMA = "gradscope.compare"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class ParameterAgreement:
    """How close one parameter's per-sample gradients a are to the loop's b.

    Numbers are None where the shapes do not allow them.
    """

    name: str  # the parameter
    absolute: float | None  # the largest |a − b| of an entry
    # the largest ‖aᵢ − bᵢ‖ / ‖bᵢ‖ of a sample, with a floor below which a norm is rounding
    # noise
    relative: float | None
    cosine: float | None  # ⟨a, b⟩ / (‖a‖ ‖b‖) over all samples
    worst_sample: int | None  # the position in the batch where `relative` is reached
    factor: float | None  # c = ⟨a, b⟩ / ⟨b, b⟩, the factor that fits a ≈ c·b best
    kind: str  # one word for the mistake, or "agrees"
    meaning: str  # what it means and what to do
    agrees: bool  # whether `relative` is within the tolerance of a's dtype


@dataclass(frozen=True)
class BackendRow:
    """One backend, implementation or stored result."""

    backend: str  # its name or label
    status: str  # "agrees", "disagrees", "refused" (it said that it has no exact way) or "failed"
    reason: str | None = None  # why it did not agree
    remedy: str | None = None  # what to do about it
    # time for all gradients in the model's own dtype, after a warm-up; None where it was not
    # measured
    seconds: float | None = None
    peak_bytes: int | None = None  # peak memory above what was in use before, likewise
    # one entry a parameter; none for a row that refused or failed
    parameters: tuple[ParameterAgreement, ...] = ()

    @property
    def worst(self) -> ParameterAgreement | None:
        """The parameter that is furthest off, those without numbers before all others."""
        if not self.parameters:
            return None
        return max(self.parameters, key=lambda p: math.inf if p.relative is None else p.relative)


@dataclass(frozen=True)
class Comparison:
    """The table that `compare` makes.

    Attributes:
        agrees: No row disagrees or failed. A row that refused does no harm.
        samples: n.
        dtype: The model's own dtype, in which time and memory were measured.
        baseline_seconds: One plain forward and backward pass of the batch.
        baseline_bytes: Its peak memory; None where it cannot be measured.
        coupled: Whether the losses of the batch differ from those of batches of one: the samples
            depend on each other, or the model draws random numbers.
        rows: One a backend, then one an implementation or stored result.
        ways: Which kernel variant was chosen where there are several, with what each took.
    """

    agrees: bool
    samples: int
    dtype: str
    baseline_seconds: float
    baseline_bytes: int | None
    coupled: bool
    rows: tuple[BackendRow, ...]
    ways: tuple[Chosen, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return a document of plain JSON values; what is not finite becomes null."""
        document = {"schema": SCHEMA, "version": SCHEMA_VERSION, **asdict(self)}
        document["ways"] = [one.to_json() for one in self.ways]
        plain: dict[str, Any] = _plain(document)
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
