"""How much of the gradients is signal, and whether any is left (Mahsereci et al. 2017)."""

from collections.abc import Iterator

import numpy as np

from gradscope.stats.builtin.batch import TITLE, signal_to_noise
from gradscope.stats.products import Entries
from gradscope.stats.records import Record, number
from gradscope.stats.sections import Fact, Section, Styled, short
from gradscope.stats.source import aggregate_of, mean_of
from gradscope.stats.summary import Data, Summary, statistic


class Signal(Record):
    """How much of a gradient is signal, and whether any is left."""

    signal_to_noise: float | None
    mean_entry: float | None
    entries: int | None
    noiseless: int | None
    evidence: float | None
    stop: bool | None


def entries_of(data: Data) -> dict[str, Entries] | None:
    """Return signal and noise by entry, from rows, or from chains `mean` and `second_moment`.

    Complex parameters have |gⱼ|² in the second moment: their parts cannot be told apart.
    """
    if data.products.parts:
        return {name: part.entries for name, part in data.products.parts.items()}
    mean, second = mean_of(data.file), aggregate_of(data.file, "second_moment")
    if mean is None or second is None or any(np.iscomplexobj(g) for g in mean.values()):
        return None
    return {name: Entries.of(g, second[name]) for name, g in mean.items()}


def _sections(found: Signal, summary: Summary) -> Iterator[Section]:
    rows: list[Fact] = [("signal to noise", short(found.signal_to_noise))]
    if found.mean_entry is not None:
        rows.append(("its mean over entries", short(found.mean_entry)))
    if found.evidence is not None:
        left = Styled(f"{short(found.evidence)}: what is left is noise", "yellow")
        signal = f"{short(found.evidence)}: there is signal left"
        rows.append(("evidence to stop", left if found.stop else signal))
    formula = "evidence = 1 − N · meanⱼ Gⱼ² / Varⱼ (Mahsereci et al. 2017)"
    yield Section(TITLE, rows, formulas=[formula])


@statistic("signal", place=33, sections=_sections)
def signal(data: Data) -> Signal:
    """Summarise all parameters together."""
    n, parts, plug_in = data.samples.n, entries_of(data), None
    every = list((parts or {}).values())
    total = Entries(
        sum(e.noisy for e in every), sum(e.noiseless for e in every), sum(e.signal for e in every)
    )
    mean = total.mean_ratio
    evidence = None if mean is None or n < 2 else number(1 - (n - 1) * mean)
    if data.mean_squared is not None and n:
        small = float(np.square(data.samples.norm).mean())
        plug_in = signal_to_noise(n, small, data.mean_squared, data.rounding)
    return Signal(
        signal_to_noise=plug_in,
        mean_entry=mean,
        entries=None if parts is None else total.noisy,
        noiseless=None if parts is None else total.noiseless,
        evidence=evidence,
        stop=None if evidence is None else evidence > 0,
    )
