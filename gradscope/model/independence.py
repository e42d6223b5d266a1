"""Checks that samples are independent: a sample has the same loss alone and in any batch.

The checks compare numbers, not module names. So they find any coupling: batch statistics,
contrastive losses, a detached mean over the batch. The layer that mixes samples is found in the
same way.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from gradscope.core.batch import Batch, Tokens, samples_of, tensors, with_samples
from gradscope.core.precision import doubled
from gradscope.core.texts import unequal
from gradscope.errors import CoupledSamplesError, ModelError, RefusedError, UnsupportedError
from gradscope.model.draws import EVAL
from gradscope.model.locate import alone_remedy, graph_remedy
from gradscope.model.problem import Problem, differentiable_inputs, slopes
from gradscope.model.quantised import require_fixed_columns
from gradscope.model.randomness import (
    ExtremeDraws,
    extreme_numbers,
    forked,
    random_numbers_kept,
    seed_all,
)
from gradscope.model.rounding import (
    all_in_float64,
    computed_in,
    fits_in_float64,
    is_close,
    nearby,
    same,
)
from gradscope.process.shortage import is_machine_error

T = TypeVar("T")

_TWO_MEANINGS = (
    'The gradient of "sample i" then has two meanings: (a) ∂Lᵢ/∂θ through the shared statistics, '
    "or (b) the share of sample i in the gradient of the total loss.\n"
    'For (a) use coupling="own-loss". '
)
_COUPLED_REMEDY = (
    f"{_TWO_MEANINGS}To remove the coupling, use mode eval or "
    'coupling="frozen": normalisation layers then use their running statistics. GroupNorm and '
    "LayerNorm never couple samples."
)
_EVAL_REMEDY = (
    f"{_TWO_MEANINGS}The model is in eval mode, so its code computes something from the whole "
    "batch, as an adaptive solver that chooses one step size for all samples. For gradients of "
    "single samples, use batches of one sample: batch_size=1."
)

_OWN_TOKENS = (  # tokens have no own-loss gradients
    'For the gradients of the samples\' own losses, use coupling="own-loss" with whole samples '
    '(rows="sample").'
)
_TOKENS_REMEDY = (
    'To remove the coupling, use mode eval or coupling="frozen": normalisation layers then use '
    f"their running statistics. GroupNorm and LayerNorm never couple samples. {_OWN_TOKENS}"
)

_IN_LOSS = "the loss, or the code after the last layer"
_LOSS_REMEDY = (
    "If the loss divides by a number of the whole batch (a mean over all tokens, a sum of "
    "weights), return each sample's sum, and divide by a constant."
)
_OWN_LOSS = (
    "If the loss compares the samples of a batch (contrastive, ranking), a sample has no loss "
    'without its batch. coupling="own-loss" gives ∂Lᵢ/∂θ of its loss in this batch. Then the batch '
    "size is part of the answer."
)

_FEW = 3  # samples that are evaluated alone
_JUDGED = 4  # samples that float64 judges if float32 shows no reason
_OUTSTANDING = 4  # extreme samples that are evaluated alone, at most
_TRIALS, _LUCK = 4, 100.0  # perturbed evaluations; a gap may be this many times their spread
_EXACT = 256.0  # roundings, between losses in batches of a few samples

Calls = list[tuple[nn.Module, list[Tensor], list[Tensor]]]  # layers, their inputs and outputs


def coupled_remedy(where: str | None, batch: Batch, model: nn.Module) -> str:
    """Return the remedy for coupled samples; `where` is the result of `mixing_layer`."""
    if graph := graph_remedy(model, batch):
        return graph
    of_tokens = isinstance(batch, Tokens)
    if where != _IN_LOSS:
        if not of_tokens and not any(module.training for module in model.modules()):
            return _EVAL_REMEDY
        return _TOKENS_REMEDY if of_tokens else _COUPLED_REMEDY
    own = _OWN_TOKENS if of_tokens else _OWN_LOSS
    return "\n".join([_LOSS_REMEDY, *_broadcasting(batch), own])


def _broadcasting(batch: Batch) -> list[str]:
    """Return a remedy for outputs that broadcast with targets (n,) or (n, 1)."""
    samples = batch.sample_batch
    n, target = len(samples), next(iter(tensors(samples.targets)), None)
    if target is None or target.shape not in ((n,), (n, 1)) or not target.is_floating_point():
        return []
    outputs, change = ((n, 1), "squeeze(1)") if target.dim() == 1 else ((n,), "unsqueeze(1)")
    return [
        f"If the outputs are {outputs}, they broadcast with the targets {tuple(target.shape)} to "
        f"{(n, n)}, and each loss mixes the samples: use outputs.{change}."
    ]


def require_independent(
    problem: Problem, batch: Batch, together: Tensor | None = None, seed: int = 0
) -> None:
    """Compare losses (n,) with the losses of the same samples in other batches and alone.

    Raises:
        UnsupportedError: The forward pass is random.
        CoupledSamplesError: A loss depends on the other samples.
    """
    require_fixed_columns(problem.model, batch)
    if together is None:
        together = problem.losses(batch).detach()
    each = [torch.tensor([k]) for k in range(len(batch))]
    if len(batch) == 1:
        return _require_same(problem, batch, together, each)
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(batch), generator=draw)
    few = [order[k : k + 1] for k in range(min(_FEW, len(batch)))]
    try:
        _require_same(problem, batch, together, [*regrouped(batch, draw), *few])
    except ModelError:  # the model may reject some batch sizes; evaluate one sample at a time
        _require_same(problem, batch, together, each)


def regrouped(
    batch: Batch,
    draw: torch.Generator,
    alone: Sequence[int] = (),
    parts: int = 2,
    outstanding: int = _OUTSTANDING,
) -> list[Tensor]:
    """Return the positions of n samples in other batches, in another order.

    First come the positions `alone`, each as a batch of one; then up to `outstanding` extreme
    samples, each alone. The longest, shortest or largest samples often cause or show an effect of
    the batch. The remaining samples form `parts` random parts of nearly equal size.
    """
    if isinstance(batch, Tokens):  # tokens of one sample stay together
        rows, groups = samples_of(batch), regrouped(batch.sample_batch, draw, (), parts)
        left = ~torch.isin(torch.arange(len(batch)), torch.tensor([*alone], dtype=torch.int64))
        shared = [torch.cat([(left & (rows == k)).nonzero().flatten() for k in g]) for g in groups]
        return [*(torch.tensor([k]) for k in alone), *(part for part in shared if len(part))]
    n = len(batch)
    order = torch.randperm(n, generator=draw)
    far = _outstanding(batch) if n > 1 and outstanding else []
    out = dict.fromkeys([*alone, *far[: min(outstanding, n // 2)]])
    rest = order[~torch.isin(order, torch.tensor([*out]))]
    shift = int(int(torch.randint(-(n // 9), n // 9 + 1, (), generator=draw)) / (parts - 1))
    cuts = [max(0, len(rest) * k // parts + shift) for k in range(1, parts)]
    singles = [torch.tensor([k]) for k in out]
    return [*singles, *(part for part in rest.tensor_split(cuts) if len(part))]


def _outstanding(batch: Batch) -> list[int]:
    """Return positions of samples, most extreme first, by sums and by numbers of entries."""
    given = [t for t in tensors((batch.inputs, batch.targets)) if t.dim() and t.numel()]
    rows = [t.detach().reshape(len(t), -1) for t in given]
    sums = [t.abs().sum(1) if t.is_complex() else doubled(t).sum(1) for t in rows]
    found: list[tuple[float, int]] = []
    for values in (*sums, *(t.count_nonzero(1) for t in rows)):
        v = values.cpu().double().nan_to_num()
        far = ((v - v.median()).abs() / v.std().clamp_min(1e-300)).nan_to_num()
        found += [(-float(far[k]), k) for k in (int(v.argmin()), int(v.argmax()))]
    return list(dict.fromkeys(k for _, k in sorted(found)))


def _require_same(
    problem: Problem, batch: Batch, together: Tensor, groups: Sequence[Tensor]
) -> None:
    """Evaluate groups of a batch's samples, and raise if a loss changes."""
    changed: list[tuple[Tensor, Tensor]] = []
    for rows in groups:
        try:
            with other_random_numbers():
                found = problem.losses(batch.select(rows)).detach()
        except ModelError as error:
            if len(rows) > 1:
                raise
            raise CoupledSamplesError(
                f"the model runs on a batch but not on a single sample: {error.what}",
                where=error.where,
                remedy=alone_remedy(error, problem.model, batch, batch.select(rows))
                or coupled_remedy(None, batch, problem.model),
            ) from error
        if not same(together[rows.to(together.device)], found, together, problem.precision):
            changed.append((rows, found))
    if not changed:
        return
    require_deterministic(problem, batch)
    if (wrong := _first_beyond_rounding(problem, batch, together, changed)) is not None:
        rows, found = changed[wrong]
        company = "alone" if len(rows) == 1 else f"in a batch of {len(rows)}"
        said = f"is {{1}} {company} but {{0}} in a batch of {len(batch)}"
        raise _coupled(problem, batch, rows, (together[rows.to(together.device)], found), said)


def require_same_losses(problem: Problem, batch: Batch, losses: Tensor, found: Tensor) -> None:
    """Raise if losses (n,) differ from those found in other batches by more than rounding."""
    if not same(losses, found, precision=problem.precision):
        rows, said = torch.arange(len(batch)), "changes from {0} to {1} in another batch"
        raise _coupled(problem, batch, rows, (losses, found), said)


def _coupled(
    problem: Problem,
    batch: Batch,
    rows: Tensor,
    losses: tuple[Tensor, Tensor],
    said: str,
    tolerance: float | None = None,
) -> CoupledSamplesError:
    """Return the error for losses that differ between two evaluations.

    Args:
        problem: Model and loss.
        batch: The samples.
        rows: Positions (m,) in the batch of the evaluated samples.
        losses: Their losses (m,), in the batch and in the other evaluation.
        said: A text with the two losses as {0} and {1}.
        tolerance: The relative tolerance between outputs of layers; rounding if not given.
    """
    here, other = losses
    worst = int((here - other).abs().nan_to_num().argmax())
    where = None
    if problem.model_parallel is None:  # otherwise all processes would need these passes
        where = mixing_layer(problem, batch, int(rows[worst]), tolerance)
    numbers = unequal(float(here[worst]), float(other[worst]))
    return CoupledSamplesError(
        f"the loss of {batch.select(rows[worst][None]).description} {said.format(*numbers)}: "
        "it depends on other samples",
        where=where,
        remedy=coupled_remedy(where, batch, problem.model),
    )


def _first_beyond_rounding(
    problem: Problem, batch: Batch, together: Tensor, changed: Sequence[tuple[Tensor, Tensor]]
) -> int | None:
    """Return the first of the groups whose losses change by more than rounding, or None.

    Losses that change by rounding agree in float64. If a layer of a float64 model computes in a
    narrower dtype only, the rounding of that dtype is accepted.

    Args:
        problem: Model and loss.
        batch: The samples.
        together: Their losses (n,).
        changed: The positions (m,) of each group, and their losses (m,) in a batch of their own.
    """
    try:
        with all_in_float64(problem, batch) as (wide, cast):
            whole = wide.losses(cast).detach()
            for k, (rows, _) in enumerate(changed):
                part = wide.losses(cast.select(rows)).detach()
                if same(whole[rows.to(whole.device)], part, whole):
                    continue
                if not _is_spread(wide, cast, rows, whole, part):
                    return k
            return None
    except (ModelError, RefusedError):
        if problem.precision != torch.float64:
            return 0
        narrow = computed_in(problem, batch)
        for k, (rows, found) in enumerate(changed):
            if not same(together[rows.to(together.device)], found, precision=narrow):
                return k
        return None


def _is_spread(problem: Problem, batch: Batch, rows: Tensor, losses: Tensor, found: Tensor) -> bool:
    """Whether `found` (m,) differs from losses (n,) at `rows` by no more than rounding can explain.

    Rounding is measured in the same batch, with perturbed last digits of the parameters.
    """
    rows = rows.to(losses.device)
    gap, spread = (losses[rows] - found).abs(), torch.zeros_like(losses[rows])
    for near in nearby(problem, _TRIALS):
        spread = torch.maximum(spread, (near.losses(batch).detach() - losses).abs()[rows])
        if problem.model_parallel is None and bool((gap <= _LUCK * spread).all()):
            return True
    return bool((gap <= _LUCK * spread).all())


def require_unaffected(
    problem: Problem, batch: Batch, losses: Tensor, *, seed: int = 0, judged: bool = False
) -> bool:
    """Raise if losses (n,) change when other samples of the batch are replaced by copies.

    Samples keep their positions, so shapes and the order of sums stay the same. Independent samples
    mostly have bitwise the same loss. If not, float64 decides. A sharded model cannot be copied to
    float64. There, rounding is measured in the model's precision, and all processes must call this
    together, with equal numbers of samples.

    Args:
        problem: Model and loss.
        batch: The samples.
        losses: The losses of the unchanged batch.
        seed: Seed of the choice of replaced samples.
        judged: Whether to check a few samples in float64 in any case.

    Returns:
        Whether independence was shown. False if float64 must decide but cannot: the model does not
        run in float64, or there is no memory for a copy.

    Raises:
        CoupledSamplesError: A loss depends on the other samples.
        UnsupportedError: The forward pass is random.
    """
    if len(batch) == 1:
        return True
    few = batch.select((samples_of(batch) < _JUDGED).nonzero().flatten()) if judged else batch
    if not judged or len(few) < len(batch):
        try:
            found = [*_replaced(problem, batch, seed)]
        except ModelError:  # the model rejects copies
            if problem.model_parallel is not None:
                raise
            return False
        # a backend may sum its losses in another order than the model does
        changed = problem.any(not _unchanged(losses, found)) and problem.any(
            not _unchanged(problem.losses(batch).detach(), found)
        )
        if not (changed or judged):
            return True
        few = batch if changed else few
    if problem.model_parallel is not None:
        _require_unaffected_exactly(problem, batch, seed)
        return True
    if not fits_in_float64(problem):
        return False
    try:
        with all_in_float64(problem, few) as (wide, cast):
            _require_unaffected_exactly(wide, cast, seed)
    except (ModelError, RefusedError) as error:
        random = isinstance(error, UnsupportedError) and problem.state.randomness is None
        if random or isinstance(error, CoupledSamplesError):
            raise
        return False
    return True


def _unchanged(losses: Tensor, found: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether losses (n,) equal those found at some rows to the last bit; NaN equals NaN."""
    pairs = ((losses[rows.to(losses.device)], again) for rows, again in found)
    return all(is_close(own, again, 0.0) for own, again in pairs)


def _replaced(problem: Problem, batch: Batch, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield positions (m,) of rows, and their losses when all other samples are replaced.

    First half of the samples is kept, then the other half.
    """
    whole, owner = batch.sample_batch, samples_of(batch)
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(whole), generator=draw)
    for kept, gone in (order.tensor_split(2), order.tensor_split(2)[::-1]):
        if not (len(kept) and len(gone)):
            return
        source = torch.arange(len(whole))
        source[gone] = kept[torch.randint(len(kept), (len(gone),), generator=draw)]
        rows = torch.isin(owner, kept).nonzero().flatten()
        with other_random_numbers():
            found = problem.losses(with_samples(batch, whole.select(source))).detach()
        yield rows, found[rows.to(found.device)]


def _require_unaffected_exactly(problem: Problem, batch: Batch, seed: int) -> None:
    """Raise for losses that change by more than rounding; the problem is in float64 or sharded.

    In float64, some samples are evaluated alone and the others in two parts. If the model rejects a
    batch of one, other samples are replaced instead. So they are for a sharded model: it would
    round differently in other shapes, and only float64 separates that from coupling.
    """
    losses = problem.losses(batch).detach()
    if problem.model_parallel is None:
        draw = torch.Generator().manual_seed(seed)
        alone = torch.randperm(len(batch), generator=draw)[:_FEW].tolist()
        with suppress(ModelError):
            for rows in regrouped(batch, draw, alone, outstanding=0):
                with other_random_numbers():
                    found = problem.losses(batch.select(rows)).detach()
                company = "alone" if len(rows) == 1 else f"in a batch of {len(rows)}"
                changed = f"when it is evaluated {company}"
                _require_equal(problem, batch, rows, losses, found, changed)
            return
    for kept, found in _replaced(problem, batch, seed):
        _require_equal(problem, batch, kept, losses, found, "when other samples are replaced")


def _require_equal(
    problem: Problem, batch: Batch, rows: Tensor, losses: Tensor, found: Tensor, change: str
) -> None:
    """Raise if losses of rows (m,) of a batch differ from `found` by more than rounding."""
    own = losses[rows.to(losses.device)]
    tolerance = _EXACT * torch.finfo(problem.precision).eps
    equal = is_close(own, found, tolerance, losses)
    if problem.any(not equal):
        equal = _is_spread(problem, batch, rows, losses, found) or equal
    if not problem.any(not equal):
        return
    require_deterministic(problem, batch)
    if not equal:
        said = f"changes from {{0}} to {{1}} {change}"
        raise _coupled(problem, batch, rows, (own, found), said, tolerance)


def require_own_gradients(problem: Problem, batch: Batch, seed: int = 0) -> Tensor:
    """Return losses (n,); raise if a loss has a gradient by the inputs of another sample.

    If loss i is weighted by wᵢ, the gradient by sample i's inputs is wᵢ times as large. For powers
    of two, this is exact in most operations. If it is not, the losses of all other samples are
    checked: their gradient by these inputs must be zero up to rounding.
    """
    given = differentiable_inputs(batch)
    inputs = [t for t in tensors(given.inputs) if t.requires_grad and t.dim()]
    if not inputs:
        return problem.losses(batch).detach()
    draw = torch.Generator().manual_seed(seed)
    owner = samples_of(batch)
    n = len(batch.sample_batch)
    powers = torch.randint(0, 4 if problem.precision == torch.float16 else 12, (n,), generator=draw)
    signs = torch.randint(0, 2, (n,), generator=draw) * 2 - 1
    weights = signs * 2.0**powers
    try:
        losses = problem.losses(given)
        once, often = (slopes(losses, inputs, w) for w in (None, weights[owner].to(losses)))
    except (ModelError, RuntimeError) as error:
        if is_machine_error(error):
            raise
        # the model is not differentiable with respect to some inputs
        return problem.losses(batch).detach()
    for one, many in zip(once, often, strict=True):
        own = one * weights.to(many.device, many.real.dtype).reshape(-1, *[1] * (one.dim() - 1))
        _require_own(problem, batch, (losses, inputs), own, many)
    return losses.detach()


def _require_own(
    problem: Problem, batch: Batch, graph: tuple[Tensor, list[Tensor]], own: Tensor, many: Tensor
) -> None:
    """Raise if the gradient by some inputs (n, ...) has parts from other samples' losses."""
    losses, inputs = graph
    eps = torch.finfo(own.dtype).eps
    gap, size = (_rows(t).norm(dim=1) for t in (many - own, own))
    suspects = (gap > 64 * eps * size).nonzero().flatten()
    for k in suspects.tolist()[:_FEW]:
        others = (samples_of(batch) != k).to(losses)
        left = [_rows(t).nan_to_num() for t in slopes(losses, inputs, others)]
        if any(bool(t[k].norm() > 64 * eps * t.norm()) for t in left):
            where = mixing_layer(problem, batch.sample_batch, k)
            raise CoupledSamplesError(
                "the loss of another sample has a gradient with respect to the inputs of "
                f"{batch.sample_batch.one(k).description}",
                where=where,
                remedy=coupled_remedy(where, batch, problem.model),
            )


def _rows(t: Tensor) -> Tensor:
    return doubled(t.reshape(len(t), -1))


def require_deterministic(problem: Problem, batch: Batch) -> None:
    """Evaluate a batch again with other random numbers; if it draws any, also with extreme ones.

    Raises:
        UnsupportedError: The losses differ; the layer that draws the numbers is named.
    """
    sources: list[Callable[[], AbstractContextManager[None]]] = [other_random_numbers]
    # otherwise all processes must try equally often
    if problem.state.drew and problem.model_parallel is None:
        sources += [partial(other_random_numbers, trial) for trial in range(2, _TRIALS + 1)]
        sources += [partial(extreme_numbers, word) for word in ExtremeDraws.WORDS]
    for other in sources:
        once, again = (t.detach() for t in _twice(Problem.losses, problem, batch, other))
        differs = not same(once, again, precision=problem.precision)
        if len(sources) > 1 and not differs and not torch.equal(once, again):
            # low precision hides small differences
            differs = torch.equal(once, problem.losses(batch))
        if differs:
            where = None
            if problem.model_parallel is None:
                where = _first(problem, *_twice(_recorded, problem, batch, other), same)
            raise UnsupportedError(
                "the forward pass is random: the same samples have different losses when evaluated "
                "again",
                where=where,
                remedy=_random_remedy(problem.model),
            )


def _random_remedy(model: nn.Module) -> str:
    first = EVAL
    if not any(module.training for module in model.modules()):  # so dropout is not the cause
        first = (
            "The model or the loss draws random numbers in mode eval too (torch.randn_like). Draw "
            "them in advance, and pass them as an input or a target."
        )
    fixed = "each sample then has its own numbers, determined by seed and position in the data."
    return f'{first} Or use randomness="fixed": {fixed}'


def _twice(
    evaluate: Callable[[Problem, Batch], T],
    problem: Problem,
    batch: Batch,
    other: Callable[[], AbstractContextManager[None]],
) -> tuple[T, T]:
    once = evaluate(problem, batch)
    with other():
        return once, evaluate(problem, batch)


def mixing_layer(
    problem: Problem, batch: Batch, sample: int = 0, tolerance: float | None = None
) -> str | None:
    """Name the first layer where a sample mixes with others, or None if no layer does it.

    The layers' outputs for the sample are compared with their outputs in a batch of copies of the
    sample, up to a relative `tolerance`, or up to rounding. If this finds no layer, the sample is
    moved to the front: earlier samples may have used up a limited resource, such as the capacity of
    an expert.
    """
    if isinstance(batch, Tokens):
        sample, batch = int(batch.sample[sample]), batch.sample_batch
    n = len(batch)
    moved = torch.arange(n).roll(-sample)
    equal = same if tolerance is None else partial(is_close, tolerance=tolerance)
    found = None
    try:
        first = _recorded(problem, batch)
        for order, place in ((torch.full((n,), sample), sample), (moved, 0)):
            kept = partial(_row_kept, n=n, rows=(sample, place), equal=equal)
            found = _first(problem, first, _recorded(problem, batch.select(order)), kept)
            if found != _IN_LOSS:
                break
    except ModelError:
        return found
    return found


@contextmanager
def other_random_numbers(trial: int = 1) -> Iterator[None]:
    """Draw random numbers in the body that differ from the caller's next numbers."""
    with forked(), random_numbers_kept():
        seed = int(torch.randint(2**31, (), generator=torch.default_generator).item()) ^ trial
        seed_all(seed)
        random.seed(seed)
        np.random.seed(seed)
        yield


def _recorded(problem: Problem, batch: Batch) -> Calls:
    """Return the calls of the innermost layers, in order; no hook stays on the model."""
    calls: Calls = []

    def record(module: nn.Module, inputs: Any, outputs: Any) -> None:
        if next(module.children(), None) is None:
            copies = ([t.detach().clone() for t in tensors(tree)] for tree in (inputs, outputs))
            calls.append((module, *copies))  # type: ignore[arg-type]

    handle = register_module_forward_hook(record)
    try:
        problem.losses(batch)
    finally:
        handle.remove()
    return calls


def _first(
    problem: Problem,
    first: Calls,
    second: Calls,
    kept: Callable[[Tensor, Tensor], bool | None],
) -> str | None:
    """Name the first layer with unchanged inputs and changed outputs.

    A layer with unchanged inputs clears all layers before it: an expert that gets the tokens of
    many samples mixes nothing if each sample gets its own tokens back. Calls of a layer are matched
    by order. A call with a different shape, as of an expert, is skipped.
    """
    names = {module: name for name, module in problem.model.named_modules()}
    found = _IN_LOSS if first else None
    for (module, *before), (_, *after) in _matched(first, second):
        given, made = (
            [kept(a, b) for a, b in zip(xs, ys, strict=False)]
            for xs, ys in zip(before, after, strict=True)
        )
        layer = f"layer {names.get(module, '')!r} ({type(module).__name__})"
        if None in given or None in made:
            continue
        if not all(given):
            found = f"the code before {layer}" if found in (None, _IN_LOSS) else found
        elif all(made):
            found = _IN_LOSS
        elif found in (None, _IN_LOSS):
            found = layer
    return found


def _matched(first: Calls, second: Calls) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of calls of one layer: the first calls of both runs, then the second calls."""
    waiting: dict[nn.Module, list[Any]] = {}
    for call in second:
        waiting.setdefault(call[0], []).append(call)
    for call in first:
        if waiting.get(call[0]):
            yield call, waiting[call[0]].pop(0)


def _row_kept(
    a: Tensor,
    b: Tensor,
    n: int,
    rows: tuple[int, int],
    equal: Callable[[Tensor, Tensor], bool],
) -> bool | None:
    """Whether a sample is unchanged for some way to split an axis into n samples.

    The sample is at position `rows[0]` in `a` and at `rows[1]` in `b`. Different shapes give None:
    nothing is known.
    """
    if a.shape != b.shape:
        return None
    for axis, size in enumerate(a.shape):
        if size % n:
            continue
        rest = (*a.shape[:axis], *a.shape[axis + 1 :])
        for shape, at in (((n, -1), 0), ((-1, n), 1)):
            xs, ys = (t.movedim(axis, 0).reshape(*shape, *rest) for t in (a, b))
            if equal(xs.select(at, rows[0]), ys.select(at, rows[1])):
                return True
    return all(size % n for size in a.shape)
