"""Which clipping norm, and whom it clips."""

from collections.abc import Iterator

import numpy as np

from gradscope.stats.records import Record
from gradscope.stats.sections import Fact, Section, percent, short
from gradscope.stats.summary import Data, Summary, statistic

_SHARES = (0.01, 0.05, 0.1, 0.5)


class Clip(Record):
    """One clipping norm: c of g · min(1, c / ‖g‖), and the share of samples with ‖gᵢ‖ > c."""

    norm: float
    clipped: float


class Clipping(Record):
    """The clipping norms asked for, and those that clip 1, 5, 10 and 50% of the samples."""

    asked: tuple[Clip, ...]
    by_share: dict[str, Clip]


def _sections(found: Clipping, summary: Summary) -> Iterator[Section]:
    rows: list[Fact] = [(f"clips {s}%", f"norm {short(c.norm)}") for s, c in found.by_share.items()]
    rows += [(f"norm {short(c.norm)}", f"clips {percent(c.clipped)}") for c in found.asked]
    formulas = ["clipped: the share of samples with ‖gᵢ‖ > c"]
    yield Section("Which clipping norm", rows, formulas=formulas)


def _answer(found: Clipping, summary: Summary) -> Iterator[tuple[str, str]]:
    parts = [f"{short(found.by_share[s].norm)} clips {s}%" for s in ("1", "10")]
    some = summary.norm is not None and summary.norm.max > 0
    yield "where to clip", f"norm {', '.join(parts)}" if some else "nothing to clip"


@statistic("clipping", place=20, sections=_sections, answers=_answer)
def clipping(data: Data) -> Clipping | None:
    """Say what clips whom; None where there is no sample."""
    norms = data.samples.norm
    if not norms.size:
        return None

    def clip(c: float) -> Clip:
        return Clip(norm=float(c), clipped=float(np.mean(norms > c)))

    cuts = np.quantile(norms, [1 - share for share in _SHARES])
    return Clipping(
        asked=tuple(map(clip, data.options.clip)),
        by_share={f"{100 * s:g}": clip(c) for s, c in zip(_SHARES, cuts, strict=True)},
    )
