"""The input of the writer: the plan of a result file, and the rows of each batch."""

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

    text: str  # the chain in canonical spelling
    reduced: bool  # whether the chain ends in an aggregate; otherwise its rows are stored


@dataclass(frozen=True)
class FilePlan:
    """Everything about a result file that is known before the first batch."""

    run: dict[str, Any]  # the resolved run, stored as JSON
    fingerprint: dict[str, Any]  # values that must be equal to resume a stopped run
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
        """JSON values that are equal if and only if two runs write the same file."""
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
class FinishedBatch:
    """One finished batch."""

    # the columns of the sample table, in order: index (position in the data set), loss, norm (the
    # raw gradient's L2 norm over all parameters) and finite, each (n,), then optional columns.
    # Texts are UTF-8, (n, w) uint8, padded with zeros; w is the same for all batches
    samples: Mapping[str, Tensor]
    # {parameter: (n,)}, the raw gradient's L2 norm
    norms: Mapping[str, Tensor] = field(default_factory=dict)
    # the transformed rows of each chain, or None if the chain is reduced
    chains: tuple[Gradients | None, ...] = ()

    def __len__(self) -> int:
        return len(self.samples["index"])


def to_json(value: Any) -> str:
    """Return `value` as JSON; objects of other types are written as `str(object)`.

    A lone surrogate, which UTF-8 cannot encode, is escaped as in JSON.
    """
    return printable(json.dumps(value, default=str, ensure_ascii=False))


def differences(found: Any, wanted: Any, key: str = "") -> Iterator[str]:
    """Yield a text for each difference between two identities: dotted key, `found`, `wanted`."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for name in {**found, **wanted}:
            inner = f"{key}.{name}" if key else name
            yield from differences(found.get(name), wanted.get(name), inner)
    elif found != wanted and key.startswith("digests."):
        there, here = (str(digest)[:12] for digest in (found, wanted))
        yield f"{key.removeprefix('digests.')} has changed (SHA-256 {there}… there, {here}… here)"
    elif found != wanted:
        there, here = ("not set" if value is None else repr(value) for value in (found, wanted))
        yield f"{key} is {there} there, {here} here"
