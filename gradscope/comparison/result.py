"""What a comparison found, as plain values, and the JSON document of it."""

import json
import math
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from gradscope.blocks import Chosen

_SCHEMA = {"schema": "gradscope.compare", "version": 1}


@dataclass(frozen=True)
class ParameterAgreement:
    """How close one parameter's per-sample gradients a are to the loop's b.

    Numbers are None where the shapes do not allow them.
    """

    name: str  # the parameter
    absolute: float | None  # the largest |a − b| of an entry
    # the largest ‖aᵢ − bᵢ‖ / ‖bᵢ‖ of a sample, with a floor below which a norm is noise
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
    seconds: float | None = None  # for all gradients in the model's own dtype; None: not measured
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
    """The table that `compare` makes."""

    agrees: bool  # no row disagrees or failed; a row that refused does no harm
    samples: int  # n
    dtype: str  # the model's own, in which time and memory were measured
    baseline_seconds: float  # one plain forward and backward pass of the batch
    baseline_bytes: int | None  # its peak memory; None where it cannot be measured
    # whether the losses of the batch differ from those of batches of one: the samples depend on
    # each other, or the model draws random numbers
    coupled: bool
    rows: tuple[BackendRow, ...]  # one a backend, then one an implementation or stored result
    ways: tuple[Chosen, ...] = ()  # which kernel variant was chosen where there are several

    def to_json(self) -> dict[str, Any]:
        """Return a document of plain JSON values; what is not finite becomes null."""
        plain = json.loads(TypeAdapter(Comparison).dump_json(self))
        return {**_SCHEMA, **plain, "ways": [one.to_json() for one in self.ways]}
