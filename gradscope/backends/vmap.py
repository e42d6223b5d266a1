"""`vmap`: torch.func's gradient of one sample's loss, vectorised over the samples.

Each sample keeps its axis n = 1, so a model sees what it sees in `loop`. Where plain torch.func
refuses although an exact way exists, `vmap_rewrites` puts it in the place of torch's own.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gradscope.backends.base import Evaluate, backends, refusing, require_unhooked
from gradscope.backends.vmap_rewrites import Rewrites
from gradscope.blocks import DenseBlock, Evaluation, Gradients
from gradscope.core.batch import Batch, map_tensors, tensors
from gradscope.core.problem import Problem
from gradscope.errors import UnsupportedError

CHUNK_BYTES = 256 * 2**20  # gradients computed at a time; one sample's, if these are larger

_REMEDIES = {  # a word of torch's message, and what helps
    "randomness": "The model draws random numbers: put it in eval mode, or set dropout to 0.",
    ".item()": "The model branches on the data or reads a number of them; hooks and loop can.",
    "dynamic shape": "A mask or nonzero gives every sample another shape; hooks and loop can.",
    "nplace": "Write it out of place, or use hooks or loop.",
    "saved tensor hooks": "Switch checkpointing off, or use hooks or loop.",
    "it does not have vmap support": "Give the autograd.Function generate_vmap_rule = True, "
    "or use hooks or loop.",
    "atch norm": "Put BatchNorm in eval mode: in train mode it couples the samples of a batch.",
    "value per channel": "Put BatchNorm in eval mode: in train mode it couples the samples of a "
    "batch, and a batch of one has no variance.",
    "packed": "Give padded sequences and mask the loss.",
}
_REMEDY = "Use the backend hooks, or loop, which runs everything that trains with a batch of one."


@backends.register("vmap")
@contextmanager
def vmap(problem: Problem) -> Iterator[Evaluate]:
    """torch.func: vmap over samples of the gradient of one sample's loss."""

    def evaluate(batch: Batch) -> Evaluation:
        require_unhooked("vmap", problem)
        try:
            with refusing("vmap", problem.model, _REMEDY), problem.state.kept(), untouched():
                return _evaluate(problem, batch)
        except UnsupportedError as error:
            problem.losses(batch)  # a model that fails by itself is not for us to refuse
            text = str(error.__cause__)
            error.remedy = next((v for k, v in _REMEDIES.items() if k in text), _REMEDY)
            raise

    yield evaluate


def _evaluate(problem: Problem, batch: Batch) -> Evaluation:
    values = {k: p.detach() for k, p in problem.parameters.items()}
    row = sum(p.numel() * p.element_size() for p in values.values())
    step = max(1, CHUNK_BYTES // max(1, row))
    if step >= len(batch):
        gradients, losses = per_sample(problem, values, batch)
        return _evaluation(gradients, losses)
    parts = []
    dense = {k: p.new_empty(len(batch), *p.shape) for k, p in values.items()}
    for start in range(0, len(batch), step):
        rows = slice(start, start + step)
        gradients, losses = per_sample(problem, values, batch.select(rows))
        parts.append(losses)
        for name, gradient in gradients.items():
            dense[name][rows] = gradient
    return _evaluation(dense, torch.cat(parts))


def _evaluation(gradients: dict[str, Tensor], losses: Tensor) -> Evaluation:
    return Evaluation(losses, Gradients({k: DenseBlock(v) for k, v in gradients.items()}))


def per_sample(
    problem: Problem, values: dict[str, Tensor], batch: Batch
) -> tuple[dict[str, Tensor], Tensor]:
    """Return {name: gradients (n, *shape)} and losses (n,) of a batch that fits in memory."""
    leaves = tensors((batch.inputs, batch.targets))
    shared = [t.dim() == 0 for t in leaves]  # constants without a sample axis

    def loss(
        values: dict[str, Tensor], zero: Tensor, sample: list[Tensor], index: Tensor
    ) -> tuple[Tensor, Tensor]:
        own = [_own(t, zero) for t in sample]
        axes = iter([t if s else t.unsqueeze(0) for t, s in zip(own, shared, strict=True)])
        inputs, targets = map_tensors(lambda _: next(axes), (batch.inputs, batch.targets))
        with Rewrites(zero):
            one = Batch(inputs, targets, index.unsqueeze(0))
            value = problem.functional_losses(values, one)[0]
        return value, value

    over = (None, None, [None if s else 0 for s in shared], 0)
    gradient = torch.func.grad(loss, argnums=(0, 1), has_aux=True)
    zero = torch.zeros((), device=problem.device)
    with torch.no_grad():  # what torch.func differentiates needs no graph outside it
        (gradients, _), losses = torch.func.vmap(gradient, in_dims=over)(
            values, zero, leaves, batch.index
        )
    return gradients, losses


def _own(t: Tensor, zero: Tensor) -> Tensor:
    """Return `t` as a tensor of the gradient transform, which may then be differentiated by.

    It becomes one by an operation with `zero`, which is one already; t − 0 is t exactly, signed
    zeros, infinities and NaN included.
    """
    return t - zero.detach().to(t.dtype) if t.is_floating_point() or t.is_complex() else t


@contextmanager
def untouched() -> Iterator[None]:
    """Restore torch's switches after a forward pass."""
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # a fused kernel without derivative
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # exact, only slower
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
