"""What a file's chains supply beside the table: rows, inner products, aggregates."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from gradscope.stats.base import Floats, Source, stages_of, wide

Arrays = Mapping[str, Any]


def rows_of(file: Source) -> Arrays | None:
    """Return {name: (N, *shape)}, every sample's own gradient, or None where it is not stored."""
    found: Arrays | None = _named(file, "identity")
    return found


def rows_unusable(file: Source) -> str | None:
    """Say why the stored rows cannot be summed, or return None."""
    rows = rows_of(file) or {}
    lost = [name for name, array in rows.items() if getattr(array, "overflowed", 0)]
    return f"stored rows of {lost[0]!r} overflowed; compute with --dtype float32" if lost else None


def in_half(file: Source) -> bool:
    """Return whether rows are stored in half precision: then the recorded norms are exacter."""
    return dict(file.run).get("dtype") in ("float16", "bfloat16")


def gram_of(file: Source, n: int) -> Floats | None:
    """Return ⟨gᵢ, gⱼ⟩ (n, n) of the n finite samples from a chain `gram`, in the table's order."""
    found = _named(file, "gram")
    if found is None or tuple(found["gram"].shape) != (n, n):
        return None
    index = np.asarray(file.samples["index"])[np.asarray(file.samples["finite"], dtype=bool)]
    back = np.argsort(np.argsort(index, kind="stable"), kind="stable")  # it is sorted by index
    gram = wide(np.real(found["gram"][...]))
    return gram[np.ix_(back, back)]


def cosines_of(file: Source) -> Floats | None:
    """Return the cosine with the mean (N,) of each sample from a chain `cosine:to=mean`."""
    found = _named(file, "cosine:to=mean")
    return None if found is None else wide(found["cosine"][...])


def projections_of(file: Source) -> tuple[str, Floats] | None:
    """Return a chain `project:...` without reducer: its text and P gᵢ (N, dim)."""
    for chain in file.chains:
        stages = stages_of(file, chain)
        alone = not chain.reduced and len(stages) == 1 and stages[0].name == "project"
        if alone and "project" in chain and len(chain["project"].shape) == 2:
            return chain.text, wide(chain["project"][...])
    return None


def aggregate_of(file: Source, text: str) -> dict[str, Floats] | None:
    """Return {name: (*shape)} of the reduced chain `text` in float64 (complex128)."""
    found = _named(file, text)
    if found is None:
        return None
    return {name: np.asarray(array[...]) for name, array in found.items()}


def mean_of(file: Source) -> dict[str, Floats] | None:
    """Return G, {name: (*shape)}, from a chain `mean`, or from the sums that small files keep."""
    found = aggregate_of(file, "mean")
    kept = getattr(file, "states", {}).get("mean_gradient", {})
    if found is None and all(k in kept for k in ("n", *(f"sum:{p}" for p in file.parameters))):
        n = float(kept["n"][...])
        if n == np.count_nonzero(file.samples["finite"]) > 0:
            return {name: np.asarray(kept[f"sum:{name}"][...]) / n for name in file.parameters}
    return found


def labels_of(file: Source) -> str:
    """Return what the losses were held against: data, sampled or exact."""
    spec = dict(file.run).get("spec")
    compute = spec.get("compute") if isinstance(spec, dict) else None
    return str((compute or {}).get("labels") or "data")


def _named(file: Source, text: str) -> Any:
    for chain in file.chains:
        if chain.text == text:
            return chain
    return None
