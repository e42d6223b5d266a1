"""The trace of the Fisher, and the Jensen gap between E[T(g)] and T(E[g])."""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from gradscope.stats.records import Floats, Record, number, ratio
from gradscope.stats.sections import Fact, Section, percent, short
from gradscope.stats.source import Samples, Source, aggregate_of, labels_of, stages_of
from gradscope.stats.summary import Data, Summary, statistic

_TITLE = "Expectations"
Kind = Literal["empirical", "sampled", "exact"]
_KINDS: dict[str, Kind] = {"sampled": "sampled", "exact": "exact"}  # by labels; data: empirical


class Fisher(Record):
    """The trace of the Fisher, tr (1/N) Σ gᵢ gᵢᵀ."""

    kind: Kind
    trace: float | None


def fisher_of(file: Source, samples: Samples) -> Fisher:
    """Return the trace: mean‖gᵢ‖², or the sum of a stored second moment with exact labels."""
    kind = _KINDS.get(labels_of(file), "empirical")
    trace = np.square(samples.norm).mean() if samples.n else None
    if kind == "exact":  # norms are expectations over labels there
        second = aggregate_of(file, "second_moment")
        trace = None if second is None else sum(v.sum() for v in second.values())
    return Fisher(kind=kind, trace=number(trace))


def _fisher_section(found: Fisher, summary: Summary) -> Iterator[Section]:
    rows = [("Fisher trace", f"{short(found.trace)} ({found.kind})")]
    yield Section(_TITLE, rows, formulas=["Fisher trace = mean‖gᵢ‖²"])


@statistic("fisher", place=80, sections=_fisher_section)
def fisher(data: Data) -> Fisher:
    """Return the trace of the Fisher for the labels of the run."""
    return fisher_of(data.file, data.samples)


class Gap(Record):
    """The gap between two chains with the same stages before and after the mean."""

    transform: str
    inside: float | None
    outside: float | None
    gap: float | None
    cosine: float | None


def _jensen_section(found: Sequence[Gap], summary: Summary) -> Iterator[Section]:
    rows: list[Fact] = []
    for gap in found:
        share = "undefined" if gap.gap is None else percent(gap.gap)
        text = (
            f"{gap.transform}: E[T(g)] differs from T(E[g]) by {share}, cosine {short(gap.cosine)}"
        )
        rows.append(("Jensen gap", text))
    yield Section(_TITLE, rows, formulas=["Jensen gap = ‖E[T(g)] − T(E[g])‖ / ‖T(E[g])‖"])


@statistic("jensen", place=81, sections=_jensen_section)
def jensen(data: Data) -> tuple[Gap, ...]:
    """Find all pairs `T | mean` and `mean | T`."""
    inside: dict[str, dict[str, Floats]] = {}
    outside: dict[str, dict[str, Floats]] = {}
    for chain in data.file.chains:
        words = [str(stage) for stage in stages_of(data.file, chain)] if chain.reduced else []
        if words.count("mean") == 1 and len(words) > 1 and "mean" in (words[0], words[-1]):
            side, stages = (inside, words[:-1]) if words[-1] == "mean" else (outside, words[1:])
            side[" | ".join(stages)] = {k: np.asarray(v[...]) for k, v in chain.items()}
    gaps = []
    for transform in filter(outside.__contains__, inside):
        sides = inside[transform], outside[transform]
        shapes = [{name: v.shape for name, v in side.items()} for side in sides]
        if shapes[0] != shapes[1]:
            continue
        a, b = (np.concatenate([np.ravel(v) for v in side.values()]) for side in sides)
        b = b.astype(np.result_type(b, np.float64))
        norm_a, norm_b = float(np.linalg.norm(a)), float(np.linalg.norm(b))
        gap = Gap(
            transform=transform,
            inside=number(norm_a),
            outside=number(norm_b),
            gap=ratio(np.linalg.norm(a - b), norm_b),
            cosine=ratio(np.vdot(b, a).real, norm_a * norm_b),
        )
        gaps.append(gap)
    return tuple(gaps)
