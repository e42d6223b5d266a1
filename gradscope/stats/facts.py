"""What a file is, and which of its samples are left out."""

from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from gradscope.stats.base import Json, Record, Source
from gradscope.stats.proof import Proof
from gradscope.stats.stored import labels_of
from gradscope.stats.table import Table, finite_samples


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
        labels: What the losses were held against: data, sampled or exact.
        certificate: As recorded.
        proof: What it says of the whole file.
        run: As recorded.
    """

    path: str
    bytes: int | None
    samples: int
    parameters: int
    entries: int
    chains: tuple[ChainFacts, ...]
    backend: str | None
    labels: str = "data"
    certificate: Json
    proof: Proof = Field(default_factory=Proof)
    run: Json = Field(default_factory=dict)


class NonFinite(Record):
    """Samples whose loss or gradient is not finite; all other statistics leave them out.

    Attributes:
        count: How many.
        index: The first of them, as positions in the data set.
    """

    count: int
    index: tuple[int, ...]


def facts(file: Source) -> FileFacts:
    """Return what `file` is."""
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
        labels=labels_of(file),
        certificate=file.certificate,
        proof=Proof.of(file.certificate),
        run=file.run,
    )


def nonfinite(file: Source, table: Table, top: int) -> NonFinite:
    """Count the samples that `table` lacks, and name the first `top`."""
    rows = np.flatnonzero(~finite_samples(file))[:top]
    return NonFinite(
        count=table.total - table.n, index=tuple(int(file.samples["index"][i]) for i in rows)
    )


def _backend(run: dict[str, Any], certificate: dict[str, Any]) -> str | None:
    """Return the backend that computed the file: the one proved, else the one asked for."""
    for place in (certificate, run, run.get("compute") or {}):
        if isinstance(place.get("backend"), str):
            return str(place["backend"])
    return None
