"""A loss for any model: smooth, uneven, one number a sample, of everything the model returns."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.zoo.subject import (
    SAMPLES,
    NotBuiltError,
    Place,
    Subject,
    outputs_of,
    parts,
)

_NARROW = 1e-3  # outputs that are smaller are scaled up


class Uneven:
    """Σⱼ wⱼ tanh(oⱼ / s) over all entries of all floating-point outputs that have a sample axis.

    No two entries count alike, so that samples or entries that are exchanged are seen.

    Args:
        places: Where these outputs are.
        scales: The divisor of each output.
    """

    def __init__(self, places: Sequence[Place], scales: Sequence[float]) -> None:
        self.places = list(places)
        self.scales = list(scales)

    def __call__(self, outputs: Any, targets: Any = None) -> Tensor:
        """Return losses (n,)."""
        found = parts(outputs)
        terms = [
            _term(found[place], scale)
            for place, scale in zip(self.places, self.scales, strict=True)
        ]
        return torch.stack([term.to(terms[0].dtype) for term in terms]).sum(0)


def _term(output: Tensor, scale: float) -> Tensor:
    flat = torch.view_as_real(output) if output.is_complex() else output
    flat = flat.reshape(flat.shape[0], -1)
    count = torch.arange(flat.shape[1], device=flat.device, dtype=torch.float64)
    weight = ((1.7 * count + 0.3).cos() + 0.2).to(flat.dtype) / max(1, flat.shape[1]) ** 0.5
    return (weight * (flat / scale).tanh()).sum(1)


def loss_of(subject: Subject) -> Uneven:
    """Return the loss of a model. It reads the outputs whose first axis counts samples.

    Raises:
        NotBuiltError: No output with a sample axis depends on a parameter, or an output is NaN.
    """
    several, single = (
        parts(outputs_of(copy.deepcopy(subject.model), subject.inputs(0, n))) for n in (SAMPLES, 1)
    )
    places, scales = [], []
    for place, t in several.items():
        alone = single.get(place)
        if alone is None or not (t.is_floating_point() or t.is_complex()) or not t.requires_grad:
            continue
        if t.dim() == 0 or len(t) != SAMPLES or len(alone) != 1 or t.shape[1:] != alone.shape[1:]:
            continue
        if t.isnan().any():
            raise NotBuiltError(f"output {place} is not a number")
        size = t.detach().abs().double()
        size = size[size < 1e30]
        middle = float(size.square().mean().sqrt()) if size.numel() else 1.0
        if t.numel():
            places.append(place)
            scales.append(middle if middle > 1 or 0 < middle < _NARROW else 1.0)
    if not places:
        raise NotBuiltError("no output that depends on a parameter has a sample axis")
    return Uneven(places, scales)
