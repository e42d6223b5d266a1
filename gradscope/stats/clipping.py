"""Which clipping norm, and whom it clips."""

from collections.abc import Sequence

import numpy as np

from gradscope.stats.base import Floats, Record

SHARES = (0.01, 0.05, 0.1, 0.5)


class Clip(Record):
    """One clipping norm.

    Attributes:
        norm: c of g · min(1, c / ‖g‖).
        clipped: The share of samples with ‖gᵢ‖ > c.
    """

    norm: float
    clipped: float


class Clipping(Record):
    """Clipping norms and the shares they clip.

    Attributes:
        asked: The norms asked for.
        by_share: The norms that clip 1, 5, 10 and 50% of the samples.
    """

    asked: tuple[Clip, ...]
    by_share: dict[str, Clip]


def clipping(norms: Floats, asked: Sequence[float] = ()) -> Clipping | None:
    """Say what clips whom among `norms` (n,); None where there are none."""
    if not norms.size:
        return None
    cuts = np.quantile(norms, [1 - share for share in SHARES])
    return Clipping(
        asked=tuple(_clip(norms, c) for c in asked),
        by_share={f"{100 * s:g}": _clip(norms, c) for s, c in zip(SHARES, cuts, strict=True)},
    )


def _clip(norms: Floats, norm: float) -> Clip:
    return Clip(norm=float(norm), clipped=float(np.mean(norms > norm)))
