"""Signal and noise entry by entry: from sums over rows, or from stored moments."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from gradscope.stats.base import Floats, Record, Source, number
from gradscope.stats.noise import signal_to_noise
from gradscope.stats.stored import aggregate_of, mean_of

_ROUNDING = 1e-12  # of E[g²]: a variance below it is what rounding leaves of none


@dataclass(frozen=True)
class Entries:
    """Sums over the entries of a parameter.

    Attributes:
        noisy: How many have a variance.
        noiseless: How many have none.
        signal: Σⱼ Gⱼ² / (E[gⱼ²] − Gⱼ²) over the noisy ones.
    """

    noisy: int
    noiseless: int
    signal: float

    @classmethod
    def of(cls, mean: Floats, second: Floats) -> "Entries":
        """Sum over entries with E[g] `mean` and E[g²] `second`, both of one shape."""
        square = np.square(mean)
        variance = second - square
        noisy = variance > _ROUNDING * second
        return cls(
            noisy=int(noisy.sum()),
            noiseless=int(noisy.size - noisy.sum()),
            signal=float((square[noisy] / variance[noisy]).sum()),
        )

    @property
    def mean_ratio(self) -> float | None:
        """Return the mean over the noisy entries of Gⱼ² / (E[gⱼ²] − Gⱼ²)."""
        return number(self.signal / self.noisy) if self.noisy else None


def total(parts: Iterable[Entries]) -> Entries:
    """Return the sums over all parameters."""
    every = list(parts)
    return Entries(
        sum(e.noisy for e in every), sum(e.noiseless for e in every), sum(e.signal for e in every)
    )


def stored_entries(file: Source) -> dict[str, Entries] | None:
    """Return the sums of each parameter from chains `mean` and `second_moment`, if both are there.

    Complex parameters have |gⱼ|² in the second moment: their parts cannot be told apart.
    """
    mean, second = mean_of(file), aggregate_of(file, "second_moment")
    if mean is None or second is None or any(np.iscomplexobj(g) for g in mean.values()):
        return None
    return {name: Entries.of(g, second[name]) for name, g in mean.items()}


class Signal(Record):
    """How much of a gradient is signal, and whether any is left.

    Attributes:
        signal_to_noise: ‖G‖² / (mean‖gᵢ‖² − ‖G‖²), all parameters together.
        mean_entry: The mean over entries of Gⱼ² / (E[gⱼ²] − Gⱼ²); None without rows.
        entries: How many entries it is taken over.
        noiseless: How many were left out because they do not vary.
        evidence: 1 − N · meanⱼ Gⱼ² / Varⱼ, the early-stopping criterion; None without rows.
        stop: Whether `evidence` is positive: the mean gradient is what noise alone would give.
    """

    signal_to_noise: float | None
    mean_entry: float | None
    entries: int | None
    noiseless: int | None
    evidence: float | None
    stop: bool | None


def signal(
    norms: Floats, big: float | None, entries: Entries | None, rounding: float = 1e-12
) -> Signal:
    """Summarise all parameters (Mahsereci et al. 2017 for the evidence).

    Args:
        norms: ‖gᵢ‖ (n,).
        big: ‖G‖².
        entries: Sums over all entries, where known.
        rounding: Of the squared norms, relative.
    """
    n = norms.size
    mean = None if entries is None else entries.mean_ratio
    evidence = None if mean is None or n < 2 else number(1 - (n - 1) * mean)
    plug_in = None
    if big is not None and n:
        plug_in = signal_to_noise(n, float(np.square(norms).mean()), big, rounding)
    return Signal(
        signal_to_noise=plug_in,
        mean_entry=mean,
        entries=None if entries is None else entries.noisy,
        noiseless=None if entries is None else entries.noiseless,
        evidence=evidence,
        stop=None if evidence is None else evidence > 0,
    )
