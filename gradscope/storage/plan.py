"""What the pipeline tells the writer: what to store, and the rows of each batch."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from gradscope.blocks import Gradients
from gradscope.config import Compression
from gradscope.core.precision import dtype_name
from gradscope.core.texts import printable

Layout = Literal["auto", "dense", "factored"]
States = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class ChainPlan:
    """One chain."""

    text: str  # its canonical spelling
    reduced: bool  # whether it ends in an aggregate; otherwise its rows are stored


@dataclass(frozen=True)
class FilePlan:
    """Everything about a result file that is known before the first batch."""

    run: dict[str, Any]  # the resolved run, stored as JSON
    fingerprint: dict[str, Any]  # what must be equal for a stopped run to be resumed
    # more root attributes: the hashes of checkpoint and data, the version
    attributes: dict[str, str]
    n: int  # the number of samples
    parameters: dict[str, tuple[int, ...]]  # the selected parameters' shapes, in the model's order
    chains: tuple[ChainPlan, ...]  # the chains, in the order given
    dtype: torch.dtype = torch.float32  # the number format of the chains' rows
    # whether rows are stored as factors: where smaller, never, or wherever possible
    layout: Layout = "auto"
    compression: Compression | None = None  # of rows

    @property
    def identity(self) -> dict[str, Any]:
        """What must be equal for two runs to write the same file, as plain JSON values."""
        facts = {
            **self.fingerprint,
            "stored": {
                "samples": self.n,
                "parameters": self.parameters,
                "chains": [chain.text for chain in self.chains],
                "dtype": dtype_name(self.dtype),
                "layout": self.layout,
                "compression": None if self.compression is None else str(self.compression),
            },
        }
        plain: dict[str, Any] = json.loads(to_json(facts))
        return plain


@dataclass(frozen=True)
class Rows:
    """One finished batch."""

    index: Tensor  # (n,), the samples' positions in their data set
    loss: Tensor  # (n,)
    norm: Tensor  # (n,), the raw gradient's L2 norm over all parameters
    finite: Tensor  # (n,) bool
    # (n,), where a target is one number a sample; anything else is not stored
    target: Tensor | None = None
    # {column: (n,)}, what the model predicts: prediction, margin
    predicted: Mapping[str, Tensor] = field(default_factory=dict)
    # the samples' own names, where they have any: (n,) int64, or UTF-8 (n, w) uint8 with zeros
    # behind a name, w the same for all batches
    id: Tensor | None = None
    # (n,) int64 each, of rows of tokens: the sample's position in the data set, and its own there
    sample: Tensor | None = None
    position: Tensor | None = None
    preview: Tensor | None = None  # UTF-8 (n, w) likewise: what a sample looks like
    # {parameter: (n,)}, the raw gradient's L2 norm
    norms: Mapping[str, Tensor] = field(default_factory=dict)
    # the transformed rows of each chain; None for a reduced chain
    chains: tuple[Gradients | None, ...] = ()

    @property
    def samples(self) -> dict[str, Tensor]:
        """The columns of the sample table (n,)."""
        table = {"index": self.index, "loss": self.loss, "norm": self.norm, "finite": self.finite}
        if self.sample is not None and self.position is not None:
            table |= {"sample": self.sample, "position": self.position}
        if self.target is not None and self.target.shape == self.index.shape:
            table["target"] = self.target
        table |= self.predicted
        if self.id is not None:
            table["id"] = self.id
        if self.preview is not None:
            table["preview"] = self.preview
        return table


def to_json(value: Any) -> str:
    """Return JSON; what JSON has no form for is written as its text.

    Half of a surrogate pair, which UTF-8 does not have, is escaped as in JSON.
    """
    return printable(json.dumps(value, default=str, ensure_ascii=False))


def differences(found: Any, wanted: Any, key: str = "") -> Iterator[str]:
    """Yield what differs between two runs' identities, by dotted key: there, here."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for name in {**found, **wanted}:
            inner = f"{key}.{name}" if key else name
            yield from differences(found.get(name), wanted.get(name), inner)
    elif found != wanted and key.startswith("digests."):
        there, here = (str(digest)[:12] for digest in (found, wanted))
        yield f"{key.removeprefix('digests.')} has changed (SHA-256 {there}… there, {here}… here)"
    elif found != wanted:
        yield f"{key} is {found!r} there, {wanted!r} here"
