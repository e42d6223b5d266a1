"""Evidence that samples are independent: alone, in a batch or in another one, the loss is the same.

What is compared are numbers, not module names, so any coupling shows: batch statistics, contrastive
losses, a mean over the batch that was cut from the graph. The layer at fault is found likewise.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from gradscope.core.batch import Batch, tensors
from gradscope.core.problem import Problem, differentiable_inputs, double_precision
from gradscope.core.rounding import nearby
from gradscope.core.scalar import summed
from gradscope.core.shortage import is_shortage
from gradscope.core.state import random_numbers_kept
from gradscope.errors import CoupledSamplesError, ModelError, RefusedError, UnsupportedError

COUPLED_REMEDY = (
    'The gradient of "sample i" then has two meanings: (a) ∂Lᵢ/∂θ through everybody\'s '
    "statistics, or (b) the share of sample i in the gradient of the total loss.\n"
    "For (a) use --coupling own-loss. Mode eval, or --coupling frozen, puts normalisation layers "
    "on their running statistics; GroupNorm and LayerNorm never couple."
)

_FEW = 3  # samples that are evaluated alone
_OUTSTANDING = 4  # samples, at most, that are alone where others are in company
_TRIALS, _LUCK = 4, 100.0  # other last digits, and how many times more two results may differ


def require_independent(
    problem: Problem,
    batch: Batch,
    together: Tensor | None = None,
    seed: int = 0,
    alone: int = _FEW,
) -> Tensor:
    """Compare the losses of a batch with those of the same samples in other company, and alone.

    Args:
        problem: What is evaluated.
        batch: The samples.
        together: Their losses (n,) in this batch, where they are known.
        seed: Of what is drawn: who comes together, who is alone.
        alone: How many samples are evaluated alone.

    Returns:
        The losses (n,) in this batch.

    Raises:
        UnsupportedError: The forward pass is random.
        CoupledSamplesError: A loss depends on the other samples.
    """
    if together is None:
        together = problem.losses(batch).detach()
    if len(batch) == 1:
        return _require_same(problem, batch, together, [torch.zeros(1).long()])
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(batch), generator=draw)
    few = [order[k : k + 1] for k in range(min(alone, len(batch)))]
    groups = regrouped(batch, draw)
    try:
        return _require_same(problem, batch, together, [*groups, *few])
    except ModelError:  # it does not take any number of samples: one at a time it must
        each = [torch.tensor([k]) for k in range(len(batch))]
        return _require_same(problem, batch, together, each)


def regrouped(batch: Batch, draw: torch.Generator) -> list[Tensor]:
    """Return the positions of n samples in other company, and in another order.

    A few that stand out are alone: what a batch does to its samples it does by the longest, the
    shortest or the largest, or to these. The others are in two groups, by chance.
    """
    n = len(batch)
    order = torch.randperm(n, generator=draw)
    out = _outstanding(batch)[: min(_OUTSTANDING, n // 2)]
    rest = order[~torch.isin(order, torch.tensor(out))]
    cut = len(rest) // 2 + int(torch.randint(-(n // 9), n // 9 + 1, (), generator=draw))
    singles = [torch.tensor([k]) for k in out]
    return [*singles, *(part for part in (rest[:cut], rest[cut:]) if len(part))]


def _outstanding(batch: Batch) -> list[int]:
    """Return positions of samples by how far they stand out, in sums and in numbers of entries."""
    given = [t for t in tensors((batch.inputs, batch.targets)) if t.dim() and t.numel()]
    rows = [t.detach().reshape(len(t), -1) for t in given]
    sums = [t.abs().sum(1) if t.is_complex() else t.double().sum(1) for t in rows]
    found: list[tuple[float, int]] = []
    for values in (*sums, *(t.count_nonzero(1) for t in rows)):
        v = values.double().cpu().nan_to_num()
        far = ((v - v.median()).abs() / v.std().clamp_min(1e-300)).nan_to_num()
        found += [(-float(far[k]), k) for k in (int(v.argmin()), int(v.argmax()))]
    return list(dict.fromkeys(k for _, k in sorted(found)))


def _require_same(
    problem: Problem, batch: Batch, together: Tensor, groups: Sequence[Tensor]
) -> Tensor:
    """Evaluate groups of a batch's samples, and refuse if a loss is not what it was."""
    for rows in groups:
        part = batch.select(rows)
        try:
            with other_random_numbers():
                apart = problem.losses(part).detach()
        except ModelError as error:
            if len(rows) > 1:
                raise
            raise CoupledSamplesError(
                f"the model runs on a batch but not on one sample alone: {error.what}",
                where=error.where,
                remedy=COUPLED_REMEDY,
            ) from error
        here = together[rows.to(together.device)]
        if not same(here, apart, together, problem.precision):
            require_deterministic(problem, batch)
            if not _is_rounding(problem, batch, rows, here, apart):
                raise coupled(problem, batch, here, apart, rows)
    return together


def _is_rounding(problem: Problem, batch: Batch, rows: Tensor, here: Tensor, apart: Tensor) -> bool:
    """Whether losses (m,) that differ do so by rounding.

    Then they do not in float64; or there by no more than other last digits of the parameters do.
    """
    try:
        if problem.precision != torch.float64:
            wide, cast = problem.converted(torch.float64), batch.in_double_precision()
            with double_precision():
                whole, part = (wide.losses(b).detach() for b in (cast, cast.select(rows)))
            return same(whole[rows.to(whole.device)], part, whole)
        chosen = batch.select(rows)
        others = [near.losses(chosen).detach() for near in nearby(problem, _TRIALS)]
    except (ModelError, RefusedError):
        return False
    spread = torch.stack([(other - apart).abs() for other in others]).amax(0)
    return bool(((here - apart).abs() <= _LUCK * spread).all())


def require_own_gradients(problem: Problem, batch: Batch, seed: int = 0) -> None:
    """Refuse if a loss has a gradient by the inputs of another sample.

    With loss i weighted by wᵢ, the gradient by sample i's own inputs is wᵢ times as large: to the
    last bit in most operations, where wᵢ is a power of two. Where it is not, the losses of all the
    others tell, whose gradient by these inputs is to be zero but for rounding.

    Args:
        problem: What is evaluated.
        batch: The samples; inputs that cannot be differentiated by prove nothing.
        seed: Of the weights.

    Raises:
        CoupledSamplesError: The gradient of some sample's inputs is not.
    """
    given = differentiable_inputs(batch)
    inputs = [t for t in tensors(given.inputs) if t.requires_grad and t.dim()]
    if not inputs:
        return
    draw = torch.Generator().manual_seed(seed)
    powers = torch.randint(
        0, 4 if problem.precision == torch.float16 else 12, (len(batch),), generator=draw
    )
    signs = torch.randint(0, 2, (len(batch),), generator=draw) * 2 - 1
    weights = signs * 2.0**powers
    try:
        losses = problem.losses(given)
        once, often = (_slopes(losses, inputs, w) for w in (None, weights.to(losses)))
    except (ModelError, RuntimeError) as error:
        if is_shortage(error):
            raise
        return  # not every model can be differentiated by its inputs
    for one, many in zip(once, often, strict=True):
        own = one * weights.to(many.device, many.real.dtype).reshape(-1, *[1] * (one.dim() - 1))
        gap, size = (_rows(t).norm(dim=1) for t in (many - own, own))
        eps = torch.finfo(one.dtype).eps
        suspects = (gap > 64 * eps * size).nonzero().flatten()
        for k in suspects.tolist()[:_FEW]:
            others = torch.ones_like(losses)
            others[k] = 0
            left = [_rows(t).nan_to_num() for t in _slopes(losses, inputs, others)]
            if any(bool(t[k].norm() > 64 * eps * t.norm()) for t in left):
                raise CoupledSamplesError(
                    "the loss of another sample has a gradient by the inputs of sample "
                    f"{int(batch.index[k])}",
                    where=mixing_layer(problem, batch, k),
                    remedy=COUPLED_REMEDY,
                )


def _slopes(losses: Tensor, inputs: list[Tensor], weights: Tensor | None) -> list[Tensor]:
    """Return the gradients of Σᵢ wᵢ Lᵢ by each input."""
    found = torch.autograd.grad(
        summed(losses, weights),
        inputs,
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )
    return list(found)


def _rows(t: Tensor) -> Tensor:
    return t.reshape(len(t), -1).to(torch.complex128 if t.is_complex() else torch.float64)


def require_deterministic(problem: Problem, batch: Batch) -> Tensor:
    """Evaluate a batch twice, under different random numbers, and return its losses (n,).

    Raises:
        UnsupportedError: The losses differ; the layer that draws the numbers is named.
    """
    once = problem.losses(batch).detach()
    with other_random_numbers():
        again = problem.losses(batch).detach()
    if not same(once, again, precision=problem.precision):
        raise _random(problem, batch)
    return once


def coupled(
    problem: Problem, batch: Batch, together: Tensor, apart: Tensor, rows: Tensor
) -> CoupledSamplesError:
    """Return the error for losses (m,) of the samples `rows` that differ with their company."""
    worst = int((together - apart).abs().nan_to_num().argmax())
    company = "alone" if len(rows) == 1 else f"in a batch of {len(rows)}"
    return CoupledSamplesError(
        f"the loss of sample {int(batch.index[rows[worst]])} is {float(apart[worst]):.6g} "
        f"{company} but {float(together[worst]):.6g} in a batch of {len(batch)}: it depends on "
        "other samples",
        where=mixing_layer(problem, batch, int(rows[worst])),
        remedy=COUPLED_REMEDY,
    )


def mixing_layer(problem: Problem, batch: Batch, sample: int = 0) -> str | None:
    """Name the first layer where a sample mixes with others, None when it is not inside a layer.

    Args:
        problem: What is evaluated.
        batch: The samples.
        sample: The position of one whose loss depends on others.
    """
    alone = torch.full((len(batch),), sample)
    try:
        first, second = (_recorded(problem, b) for b in (batch, batch.select(alone)))
    except ModelError:
        return None

    def kept(a: Tensor, b: Tensor) -> bool:
        return _row_kept(a, b, len(batch), sample)

    return _first(problem, first, second, kept)


def _random(problem: Problem, probe: Batch) -> RefusedError:
    first = _recorded(problem, probe)
    with other_random_numbers():
        second = _recorded(problem, probe)
    return UnsupportedError(
        "the forward pass is random: the same samples give other losses the second time",
        where=_first(problem, first, second, same),
        remedy="Use mode eval, or set the dropout probabilities to zero.",
    )


@contextmanager
def other_random_numbers() -> Iterator[None]:
    """Let the body draw other random numbers than the caller would."""
    with torch.random.fork_rng(), random_numbers_kept():
        seed = int(torch.randint(2**31, ()).item()) ^ 1
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed_all(seed)
        random.seed(seed)
        np.random.seed(seed)
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


def _row_kept(a: Tensor, b: Tensor, n: int, sample: int) -> bool:
    """Whether some way to split an axis into n samples leaves one of them unchanged."""
    for axis, size in enumerate(a.shape):
        if size % n or a.shape != b.shape:
            continue
        for shape, at in (((n, -1), 0), ((-1, n), 1)):
            xs, ys = (t.movedim(axis, 0).reshape(*shape, *_rest(t, axis)) for t in (a, b))
            if same(xs.select(at, sample), ys.select(at, sample)):
                return True
    return all(size % n for size in a.shape)


def _rest(t: Tensor, axis: int) -> tuple[int, ...]:
    return (*t.shape[:axis], *t.shape[axis + 1 :])


def same(
    a: Tensor, b: Tensor, among: Tensor | None = None, precision: torch.dtype = torch.float64
) -> bool:
    """Whether two tensors agree up to the rounding that another batch size causes.

    Args:
        a: One.
        b: The other.
        among: What they are part of, by whose size rounding is measured, too.
        precision: What they are computed in, which may be less than their own.
    """
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()) or not b.is_floating_point() | b.is_complex():
        return bool((a == b).all())
    dtypes = (a.dtype, b.dtype, precision)
    tolerance = max(_ROUNDING.get(dtype, torch.finfo(dtype).eps ** 0.5) for dtype in dtypes)
    a, b = (t.to(torch.promote_types(a.dtype, b.dtype)) for t in (a, b))
    whole = a if among is None else among
    scale = float(whole.abs().nan_to_num(posinf=0).max()) if whole.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale * 0.1, equal_nan=True)


_ROUNDING = {torch.float64: 1e-9, torch.float32: 3e-5}  # what is more in float32 is looked into
