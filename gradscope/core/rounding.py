"""What rounding alone can do to a result: seen by changing the parameters in their last digits."""

from collections.abc import Iterator

import torch
from torch import Tensor

from gradscope.core.problem import Problem

_UNITS = 2.0  # in the last place, by which a number is changed at most


def nearby(problem: Problem, trials: int) -> Iterator[Problem]:
    """Yield the problem on a copy of its model, each time with other last digits.

    Args:
        problem: It is left alone.
        trials: How many times.
    """
    near = problem.converted(None)
    originals = {name: p.detach().clone() for name, p in near.parameters.items()}
    draw = torch.Generator(problem.device).manual_seed(0)
    for _ in range(trials):
        with torch.no_grad():
            for name, p in near.parameters.items():
                p.copy_(_changed(originals[name], draw))
        yield near


def _changed(p: Tensor, draw: torch.Generator) -> Tensor:
    real = torch.view_as_real(p) if p.is_complex() else p
    noise = torch.rand(real.shape, generator=draw, device=p.device, dtype=torch.float64) * 2 - 1
    changed = (real.double() * (1 + _UNITS * torch.finfo(p.dtype).eps * noise)).to(real.dtype)
    return torch.view_as_complex(changed) if p.is_complex() else changed
