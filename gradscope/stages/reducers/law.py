"""What every reducer has to keep to: any split of the samples gives the same result.

It is tried on a few made-up gradients before a reducer is used: at once, and in three parts.
"""

import torch
from torch import Tensor

from gradscope.blocks import DenseBlock, Gradients, OuterBlock
from gradscope.stages.reducers.base import Reducer, State, carried_state

_N, _CUTS = 7, ((0, 3), (3, 4), (4, 7))
_TOLERANCE = 1e-6  # of the largest number of its kind


def depends_on_split(reducer: Reducer) -> str | None:
    """Return the name of a result that is another one in parts, None where there is none.

    A reducer that does not take gradients such as these is left alone.
    """
    for gradients in (_made_up(), _made_up(broken=True)):
        try:
            whole = reducer.result(carried_state(reducer.start(gradients)))
            parts = reducer.result(_in_parts(reducer, gradients))
        except Exception:  # whatever is wrong with it, a run will tell
            return None
        names = [*whole, *(parts.keys() - whole.keys())]
        found = (k for k in names if not (k in whole and k in parts and _same(whole[k], parts[k])))
        if (name := next(found, None)) is not None:
            return name
    return None


def _in_parts(reducer: Reducer, gradients: Gradients) -> State:
    states = (
        carried_state(reducer.start(gradients.select(slice(*cut)).asked(reducer.powers)))
        for cut in _CUTS
    )
    state = next(states)
    for other in states:
        state = carried_state(reducer.merge(state, other))
    return state


def _made_up(*, broken: bool = False) -> Gradients:
    """Return the gradients of a layer (3, 2) with two positions a sample, and of its bias.

    Args:
        broken: The first sample is not finite.
    """
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(_N, *shape, generator=draw, dtype=torch.float64)

    weight, bias = OuterBlock.matrix(random(2, 3), random(2, 2)), random(3)
    if broken:
        bias[0] = torch.inf
    return Gradients({"weight": weight, "bias": DenseBlock(bias)}, torch.arange(_N))


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    size = float(a.nan_to_num(posinf=0.0, neginf=0.0).abs().amax()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * size, equal_nan=True)
