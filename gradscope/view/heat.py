"""Norms and signal to noise by class and parameter."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from gradscope.core.markup import visible
from gradscope.stats.records import Floats, wide
from gradscope.stats.source import rows_unusable
from gradscope.stats.summary import Data


@dataclass(frozen=True)
class Heat:
    """Classes (c,), parameters (p,), and numbers (c, p); NaN where there is none."""

    classes: list[int]
    parameters: list[str]
    norm: Floats  # mean ‖gᵢ‖ of the class in the parameter
    snr: Floats | None  # ‖G_c‖² / tr Σ_c of the class in the parameter; None without rows

    def document(self) -> dict[str, Any]:
        """Return it as plain JSON values."""

        def table(values: Floats) -> list[list[float | None]]:
            return [[float(v) if np.isfinite(v) else None for v in row] for row in values]

        return {
            "classes": self.classes,
            "parameters": [visible(name) for name in self.parameters],
            "norm": table(self.norm),
            "snr": None if self.snr is None else table(self.snr),
        }


def heat(data: Data) -> Heat | None:
    """Return the means of each class; None where targets are no classes."""
    samples, file = data.samples, data.file
    if samples.target is None or not samples.n:
        return None
    classes, of = np.unique(samples.target, return_inverse=True)
    member = np.zeros((len(classes), samples.n))
    member[of, np.arange(samples.n)] = 1.0
    share = member / member.sum(1, keepdims=True)
    names = list(file.norms)
    norms = {name: wide(file.norms[name])[samples.rows] for name in names}
    mean = np.stack([share @ norms[name] for name in names], 1)
    sums: dict[str, Floats] = {}
    if rows_unusable(file) is None:
        for name, places, values in data.rows():
            part = share[:, places] @ values
            sums[name] = sums[name] + part if name in sums else part
    if set(sums) != set(names):
        return Heat(classes.tolist(), names, mean, None)
    with np.errstate(all="ignore"):
        signal = np.stack([np.square(sums[name]).sum(1) for name in names], 1)
        square = np.stack([share @ np.square(norms[name]) for name in names], 1)
        noise = square - signal
        snr = np.where(noise > 0, signal / noise, np.nan)
    return Heat(classes.tolist(), names, mean, snr)
