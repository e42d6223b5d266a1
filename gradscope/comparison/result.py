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

    Attributes:
        name: The parameter.
        absolute: The largest |a − b| of an entry.
        relative: The largest ‖aᵢ − bᵢ‖ / ‖bᵢ‖ of a sample, with a floor below which a norm is
            rounding noise.
        cosine: ⟨a, b⟩ / (‖a‖ ‖b‖) over all samples.
        worst_sample: The position in the batch where `relative` is reached.
        factor: c = ⟨a, b⟩ / ⟨b, b⟩, the factor that fits a ≈ c·b best.
        kind: One word for the mistake, or "agrees".
        meaning: What it means and what to do.
        agrees: Whether `relative` is within the tolerance of a's dtype.
    """

    name: str
    absolute: float | None
    relative: float | None
    cosine: float | None
    worst_sample: int | None
    factor: float | None
    kind: str
    meaning: str
    agrees: bool


@dataclass(frozen=True)
class BackendRow:
    """One backend, implementation or stored result.

    Attributes:
        backend: Its name or label.
        status: "agrees", "disagrees", "refused" (it said that it has no exact way) or "failed".
        reason: Why it did not agree.
        remedy: What to do about it.
        seconds: Time for all gradients in the model's own dtype, after a warm-up; None where it
            was not measured.
        peak_bytes: Peak memory above what was in use before, likewise.
        parameters: One entry a parameter; none for a row that refused or failed.
    """

    backend: str
    status: str
    reason: str | None = None
    remedy: str | None = None
    seconds: float | None = None
    peak_bytes: int | None = None
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
