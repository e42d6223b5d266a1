"""What one `gradscope compute` did."""

from typing import Literal

from pydantic import Field

from gradscope.stats.builtin.parameters import ParameterRow
from gradscope.stats.records import Json, Record


class RunReport(Record):
    """What one `gradscope compute` did, for its last words and its `--json`.

    Attributes:
        parameters: One row each, in the model's order.
        certificate: The proof of the first batch, and what was audited.
        backend: Which one ran.
        notes: Why that backend, unused parameters, and what else is worth a line.
        samples: N.
        nonfinite: How many of them are not finite.
        chains_nonfinite: For each chain, how many of its numbers are not finite, the rows of
            such samples aside.
        seconds: Wall time.
        path: What was written, or None.
        bytes: Its size.
        chains: In canonical spelling.
        audits: What was audited, in a line.
    """

    schema_: Literal["gradscope.compute"] = Field(
        default="gradscope.compute", validation_alias="schema", serialization_alias="schema"
    )
    version: Literal[1] = 1
    parameters: tuple[ParameterRow, ...]
    certificate: Json
    backend: str
    notes: tuple[str, ...] = ()
    samples: int
    nonfinite: int
    chains_nonfinite: tuple[int, ...] = ()
    seconds: float
    path: str | None = None
    bytes: int | None = None
    chains: tuple[str, ...] = ()
    audits: str | None = None
