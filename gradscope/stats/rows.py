"""One row a parameter: which layers learn and which are noise."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from gradscope.stats.base import Floats, Mask, Record, Source, number, ratio, rounding, wide
from gradscope.stats.noise import estimates, signal_to_noise
from gradscope.stats.table import mean_gradient_norm


class ParameterRow(Record):
    """The gradients of one parameter over the finite samples.

    Attributes:
        name: As in the model.
        shape: Of the parameter.
        entries: The product of `shape`.
        mean_norm: mean ‖gᵢ‖.
        max_norm: max ‖gᵢ‖.
        share: Σᵢ‖gᵢ‖² of this parameter over that of all parameters, between 0 and 1.
        mean_gradient_norm: ‖G‖ with G = mean gᵢ.
        signal_to_noise: ‖G‖² / (mean‖gᵢ‖² − ‖G‖²), plug-in; None where the noise is not positive.
        noise_scale: B_simple of this parameter alone, in samples; None where it does not exist.
        entry_signal_to_noise: The mean over entries of Gⱼ² / (E[gⱼ²] − Gⱼ²); None without rows.
        opposing: The share of samples with ⟨gᵢ, G⟩ < 0, likewise.
    """

    name: str
    shape: tuple[int, ...]
    entries: int
    mean_norm: float | None
    max_norm: float | None
    share: float | None
    mean_gradient_norm: float | None
    signal_to_noise: float | None
    noise_scale: float | None = None
    entry_signal_to_noise: float | None = None
    opposing: float | None = None


def parameter_row(
    name: str,
    shape: Sequence[int],
    norms: Floats,
    mean_gradient_norm: float,
    total: float,
    entry: float | None = None,
    opposing: float | None = None,
    exact: tuple[float, float] | None = None,
    resolved: float = 1e-12,
) -> ParameterRow:
    """Summarise one parameter.

    Args:
        name: The parameter's name.
        shape: Its shape.
        norms: ‖gᵢ‖ (N,) of the finite samples.
        mean_gradient_norm: ‖G‖ over the same samples.
        total: Σᵢ‖gᵢ‖² over all parameters.
        entry: The mean signal to noise of its entries, where known.
        opposing: The share of samples opposed to its mean, where known.
        exact: mean‖gᵢ‖² and ‖G‖² from its rows, which are exacter than rounded norms.
        resolved: The relative size below which a variance is rounding.
    """
    n, known = norms.size, (np.nan, mean_gradient_norm**2)
    if n:
        known = float(np.square(norms).mean()), known[1]
    small, big = known if exact is None else exact
    trace, signal = estimates(n, small, big) if n > 1 else (None, None)
    return ParameterRow(
        name=name,
        shape=tuple(int(d) for d in shape),
        entries=math.prod(int(d) for d in shape),
        mean_norm=number(norms.mean()) if n else None,
        max_norm=number(norms.max()) if n else None,
        share=ratio(n * small, total) if n else None,
        mean_gradient_norm=number(mean_gradient_norm),
        signal_to_noise=signal_to_noise(n, small, big, resolved),
        noise_scale=None if trace is None or signal is None else ratio(trace, signal),
        entry_signal_to_noise=entry,
        opposing=opposing,
    )


def parameter_rows(
    file: Source,
    finite: Mask,
    entry: Mapping[str, float | None] | None = None,
    opposing: Mapping[str, float] | None = None,
    exact: Mapping[str, tuple[float, float]] | None = None,
) -> tuple[ParameterRow, ...]:
    """Summarise every parameter of `file`, in the file's order.

    Args:
        file: The file.
        finite: Which samples are taken (N,).
        entry: The mean signal to noise of each parameter's entries, where known.
        opposing: The share of samples opposed to each parameter's mean, where known.
        exact: mean‖gᵢ‖² and ‖G‖² of each parameter, where rows gave them.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows becomes None
        total = float(np.square(wide(file.samples["norm"])[finite]).sum())
        if exact:
            total = float(finite.sum()) * sum(small for small, _ in exact.values())
        return tuple(
            parameter_row(
                name,
                shape,
                wide(file.norms[name])[finite],  # read one by one: they may be many
                mean_gradient_norm(file, name),
                total,
                (entry or {}).get(name),
                (opposing or {}).get(name),
                (exact or {}).get(name),
                1e-12 if exact else rounding(file.norms[name]),
            )
            for name, shape in file.parameters.items()
        )
