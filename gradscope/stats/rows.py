"""One row a parameter: which layers learn and which are noise."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gradscope.errors import ResultFileError
from gradscope.stats.base import Floats, Mask, Record, Source, number, ratio, wide


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
    """

    name: str
    shape: tuple[int, ...]
    entries: int
    mean_norm: float | None
    max_norm: float | None
    share: float | None
    mean_gradient_norm: float | None
    signal_to_noise: float | None


def parameter_row(
    name: str, shape: Sequence[int], norms: Floats, mean_gradient_norm: float, total: float
) -> ParameterRow:
    """Summarise one parameter.

    Args:
        name: The parameter's name.
        shape: Its shape.
        norms: ‖gᵢ‖ (N,) of the finite samples.
        mean_gradient_norm: ‖G‖ over the same samples.
        total: Σᵢ‖gᵢ‖² over all parameters.
    """
    signal, squares = mean_gradient_norm**2, np.square(norms)
    some = norms.size > 0
    return ParameterRow(
        name=name,
        shape=tuple(int(d) for d in shape),
        entries=math.prod(int(d) for d in shape),
        mean_norm=number(norms.mean()) if some else None,
        max_norm=number(norms.max()) if some else None,
        share=ratio(squares.sum(), total),
        mean_gradient_norm=number(mean_gradient_norm),
        signal_to_noise=ratio(signal, squares.mean() - signal) if some else None,
    )


def parameter_rows(file: Source, finite: Mask) -> tuple[ParameterRow, ...]:
    """Summarise every parameter of `file` over its `finite` samples (N,), in the file's order."""
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows becomes None
        total = float(np.square(wide(file.samples["norm"])[finite]).sum())
        return tuple(
            parameter_row(
                name,
                shape,
                wide(file.norms[name])[finite],  # read one by one: they may be many
                mean_gradient_norm(file, name),
                total,
            )
            for name, shape in file.parameters.items()
        )


def mean_gradient_norm(file: Source, name: str) -> float:
    """Return ‖G‖ of the parameter `name` as recorded.

    Raises:
        ResultFileError: It is not recorded.
    """
    attributes: Mapping[str, Any] = file.norm_attributes.get(name, {})
    if "mean_gradient_norm" not in attributes:
        raise ResultFileError(
            f"the norm of the mean gradient of {name!r} is not recorded",
            where=str(file.path),
            remedy="Compute the file again with this version of gradscope.",
        )
    return float(attributes["mean_gradient_norm"])
