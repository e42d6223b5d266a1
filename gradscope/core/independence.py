"""Evidence that samples are independent: alone or in a batch, a sample has the same loss.

What is compared are numbers, not module names, so any coupling shows: batch statistics, contrastive
losses, a mean over the batch that was cut from the graph. The layer at fault is found likewise.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from gradscope.core.batch import Batch, tensors
from gradscope.core.problem import Problem, differentiable_inputs
from gradscope.core.shortage import is_shortage
from gradscope.errors import CoupledSamplesError, ModelError, RefusedError, UnsupportedError

COUPLED_REMEDY = (
    'The gradient of "sample i" then has two meanings: (a) ∂Lᵢ/∂θ through everybody\'s '
    "statistics, or (b) the share of sample i in the gradient of the total loss.\n"
    "For (a) use --coupling own-loss. Mode eval, or --coupling frozen, puts normalisation layers "
    "on their running statistics; GroupNorm and LayerNorm never couple."
)

_proved: list[tuple[ref[Problem], ref[Batch]]] = []  # the last, until it is asked for

_PROBE = 3  # the middle sample stays in place while its neighbours change


def require_independent(problem: Problem, batch: Batch) -> None:
    """Compare the losses of a few samples in a batch with their losses alone.

    Asked again for the very same batch next, it is taken at its word: a proof and a backend ask
    one after the other.

    Args:
        problem: What is evaluated.
        batch: Where up to three samples are taken from.

    Raises:
        UnsupportedError: The forward pass is random.
        CoupledSamplesError: A loss depends on the other samples.
    """
    known = _proved.pop() if _proved else None
    if known is not None and known[0]() is problem and known[1]() is batch:
        return
    probe = batch.select(torch.linspace(0, len(batch) - 1, _PROBE).long())
    together = require_deterministic(problem, probe)
    try:
        alone = torch.cat([problem.losses(probe.one(i)).detach() for i in range(_PROBE)])
    except ModelError as error:
        raise CoupledSamplesError(
            f"the model runs on a batch but not on one sample alone: {error.what}",
            where=error.where,
            remedy=COUPLED_REMEDY,
        ) from error
    if not _same(together, alone):
        raise coupled(problem, probe, together, alone)
    _require_own_gradients(problem, probe)
    _proved[:] = [(ref(problem), ref(batch))]


def _require_own_gradients(problem: Problem, probe: Batch) -> None:
    """Refuse if a loss has a gradient by the inputs of another sample."""
    given = differentiable_inputs(probe)
    inputs = [t for t in tensors(given.inputs) if t.requires_grad and t.dim()]
    if not inputs:
        return
    try:
        loss = problem.losses(given)[_PROBE // 2]
        slopes = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    except (ModelError, RuntimeError) as error:
        if is_shortage(error):
            raise
        return  # not every model can be differentiated by its inputs
    others = torch.arange(_PROBE) != _PROBE // 2
    # a sample that is not finite makes zeros NaN, which proves nothing
    if any(bool(slope[others.to(slope.device)].nan_to_num().any()) for slope in slopes):
        raise CoupledSamplesError(
            "the loss of a sample has a gradient by the inputs of another",
            where=mixing_layer(problem, probe),
            remedy=COUPLED_REMEDY,
        )


def require_deterministic(problem: Problem, batch: Batch) -> Tensor:
    """Evaluate a batch twice, under different random numbers, and return its losses (n,).

    Raises:
        UnsupportedError: The losses differ; the layer that draws the numbers is named.
    """
    once = problem.losses(batch).detach()
    with _other_random_numbers():
        again = problem.losses(batch).detach()
    if not _same(once, again):
        raise _random(problem, batch)
    return once


def coupled(problem: Problem, probe: Batch, together: Tensor, alone: Tensor) -> CoupledSamplesError:
    """Return the error for losses (n,) that differ between a batch and batches of one."""
    worst = int((together - alone).abs().nan_to_num().argmax())
    return CoupledSamplesError(
        f"the loss of sample {int(probe.index[worst])} is {float(alone[worst]):.6g} alone but "
        f"{float(together[worst]):.6g} in a batch of {len(probe)}: it depends on other samples",
        where=mixing_layer(problem, probe),
        remedy=COUPLED_REMEDY,
    )


def mixing_layer(problem: Problem, batch: Batch) -> str | None:
    """Name the first layer where samples mix, or None when it is not inside a layer."""
    probe = batch.resized(_PROBE)
    first = _recorded(problem, probe)
    second = _recorded(problem, probe.select(torch.tensor([2, 1, 2])))
    return _first(problem, first, second, _middle_kept)


def _random(problem: Problem, probe: Batch) -> RefusedError:
    first = _recorded(problem, probe)
    with _other_random_numbers():
        second = _recorded(problem, probe)
    return UnsupportedError(
        "the forward pass is random: the same samples give other losses the second time",
        where=_first(problem, first, second, _same),
        remedy="Use mode eval, or set the dropout probabilities to zero.",
    )


@contextmanager
def _other_random_numbers() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(int(torch.randint(2**31, ()).item()) ^ 1)
        yield


Calls = list[tuple[nn.Module, list[Tensor], list[Tensor]]]


def _recorded(problem: Problem, batch: Batch) -> Calls:
    """Return (layer, its inputs, its outputs) of each innermost layer, in order of execution."""
    calls: Calls = []

    def record(module: nn.Module, inputs: Any, outputs: Any) -> None:
        if next(module.children(), None) is None:
            calls.append((module, _copies(inputs), _copies(outputs)))

    with _observing(record):
        problem.losses(batch)
    return calls


@contextmanager
def _observing(record: Callable[[nn.Module, Any, Any], None]) -> Iterator[None]:
    """Watch every layer from outside: nothing is attached to the model."""
    handle = register_module_forward_hook(record)
    try:
        yield
    finally:
        handle.remove()


def _copies(tree: Any) -> list[Tensor]:
    return [t.detach().clone() for t in tensors(tree)]


def _first(
    problem: Problem, first: Calls, second: Calls, same: Callable[[Tensor, Tensor], bool]
) -> str | None:
    names = {module: name for name, module in problem.model.named_modules()}
    for (module, *before), (_, *after) in zip(first, second, strict=False):
        kept = [
            all(same(a, b) for a, b in zip(xs, ys, strict=False))
            for xs, ys in zip(before, after, strict=True)
        ]
        if kept == [True, False]:
            return f"layer {names.get(module, '')!r} ({type(module).__name__})"
        if kept[0] is False:
            return f"the code before layer {names.get(module, '')!r} ({type(module).__name__})"
    return "the loss, or the code after the last layer" if first else None


def _middle_kept(a: Tensor, b: Tensor) -> bool:
    """Whether some way to split an axis into three samples leaves the middle one unchanged."""
    for axis, size in enumerate(a.shape):
        if size % _PROBE or a.shape != b.shape:
            continue
        for shape, middle in (((_PROBE, -1), 0), ((-1, _PROBE), 1)):
            xs, ys = (t.movedim(axis, 0).reshape(*shape, *_rest(t, axis)) for t in (a, b))
            if _same(xs.select(middle, 1), ys.select(middle, 1)):
                return True
    return all(size % _PROBE for size in a.shape)


def _rest(t: Tensor, axis: int) -> tuple[int, ...]:
    return (*t.shape[:axis], *t.shape[axis + 1 :])


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree up to the rounding that another batch size causes."""
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return bool((a == b).all())
    tolerance = torch.finfo(a.dtype).eps ** 0.5
    scale = float(a.abs().nan_to_num(posinf=0).max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale * 0.1, equal_nan=True)
