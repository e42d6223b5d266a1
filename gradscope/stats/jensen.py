"""The Jensen gap: how far E[T(g)] is from T(E[g]), where a file has both."""

import numpy as np

from gradscope.stats.base import Floats, Record, Source, number, ratio, stages_of


class Gap(Record):
    """Two chains of the same stages, once before and once after the mean.

    Attributes:
        transform: T.
        inside: ‖E[T(g)]‖.
        outside: ‖T(E[g])‖.
        gap: ‖E[T(g)] − T(E[g])‖ / ‖T(E[g])‖.
        cosine: Of the two.
    """

    transform: str
    inside: float | None
    outside: float | None
    gap: float | None
    cosine: float | None


def jensen(file: Source) -> tuple[Gap, ...]:
    """Find all pairs `T | mean` and `mean | T` of `file`."""
    sides: tuple[dict[str, dict[str, Floats]], ...] = ({}, {})
    for chain in file.chains:
        if not chain.reduced:
            continue
        words = [str(stage) for stage in stages_of(file, chain)]
        if words.count("mean") == 1 and len(words) > 1 and "mean" in (words[0], words[-1]):
            inside = words[-1] == "mean"
            stages = words[:-1] if inside else words[1:]
            sides[not inside][" | ".join(stages)] = {k: v[...] for k, v in chain.items()}
    return tuple(
        _gap(transform, first, sides[1][transform])
        for transform, first in sides[0].items()
        if transform in sides[1] and _shapes(first) == _shapes(sides[1][transform])
    )


def _shapes(arrays: dict[str, Floats]) -> dict[str, tuple[int, ...]]:
    return {name: np.shape(array) for name, array in arrays.items()}


def _gap(transform: str, inside: dict[str, Floats], outside: dict[str, Floats]) -> Gap:
    a, b = (np.concatenate([np.ravel(v) for v in side.values()]) for side in (inside, outside))
    b = b.astype(np.result_type(b, np.float64))
    norm_a, norm_b = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    return Gap(
        transform=transform,
        inside=number(norm_a),
        outside=number(norm_b),
        gap=ratio(np.linalg.norm(a - b), norm_b),
        cosine=ratio(np.vdot(b, a).real, norm_a * norm_b),
    )
