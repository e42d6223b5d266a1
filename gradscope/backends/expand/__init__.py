"""`expand`: every parameter gets a sample axis, and ordinary autograd does the rest.

The model is run once, on tensors that look like a batch of one and hold all samples
(`tensor.PerSample`). Below autograd, an interpreter gives each operator its meaning for all
samples at once (`mode.Interpreter`), forward and backward; so the gradient of the summed losses
with respect to a parameter is one gradient a sample. There is no guess about which axis is the
sample axis: it is never among those that the model sees. An operator without a rule runs sample by
sample, and is exact all the same; where Python code decides by a value, samples that decide
alike run together. Nothing here uses torch.func's transforms or reads the graph.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gradscope.backends.base import (
    ROWS,
    Evaluate,
    Request,
    backends,
    refusing,
    require_unhooked,
)
from gradscope.backends.expand import axes, indexing, layers, matmul  # noqa: F401  (file rules)
from gradscope.backends.expand.evaluation import evaluated
from gradscope.backends.expand.facts import rules
from gradscope.backends.expand.tensor import REMEDY, Differ, Own, SharedWrite
from gradscope.blocks import DenseBlock, Evaluation, Gradients
from gradscope.core.batch import Batch
from gradscope.core.locate import layer_of
from gradscope.core.problem import Problem
from gradscope.errors import UnsupportedError

__all__ = ["expand", "rules"]

CHUNK_BYTES = 256 * 2**20  # of gradients at a time: the backward pass holds about twice as much

Part = tuple[Tensor, dict[str, Tensor]]


@backends.register("expand")
@contextmanager
def expand(problem: Problem) -> Iterator[Evaluate]:
    """Every parameter gets a sample axis, so that ordinary autograd returns per-sample gradients.

    Coupled samples get what a batch of one gives, as with `loop`.
    """
    own = Own.NOTHING  # a model that has written to shared tensors once will do so again

    def attempt(batch: Batch) -> Part:
        nonlocal own
        while True:
            try:
                return evaluated(problem, batch, own)
            except SharedWrite as write:
                own = write.needed
            except Differ as difference:
                groups = _groups(difference.keys)
                break
        return in_parts(batch, groups)

    def in_parts(batch: Batch, parts: list[Tensor]) -> Part:
        losses = torch.empty(0)
        values = {k: p.new_empty(len(batch), *p.shape) for k, p in problem.parameters.items()}
        for rows in parts:
            found, gradients = attempt(batch.select(rows))
            if not losses.numel():
                losses = found.new_empty(len(batch))
            losses[rows] = found
            for name, gradient in gradients.items():
                values[name][rows] = gradient
        return losses, values

    def evaluate(batch: Batch, request: Request = ROWS, /) -> Evaluation:
        require_unhooked("expand", problem)
        with _located(problem), refusing("expand", problem.model, REMEDY):
            n, step = len(batch), _samples_at_once(problem)
            parts = [torch.arange(i, min(i + step, n)) for i in range(0, n, step)]
            losses, values = attempt(batch) if len(parts) == 1 else in_parts(batch, parts)
        blocks = {name: DenseBlock(value) for name, value in values.items()}
        return Evaluation(losses, Gradients(blocks))

    yield evaluate


def _samples_at_once(problem: Problem) -> int:
    """Return how many samples' gradients fit into `CHUNK_BYTES`."""
    size = sum(p.numel() * p.element_size() for p in problem.parameters.values())
    return max(1, CHUNK_BYTES // max(1, size))


def _groups(keys: list[str]) -> list[Tensor]:
    """Return the positions of each key, in the order of first appearance."""
    positions: dict[str, list[int]] = {}
    for position, key in enumerate(keys):
        positions.setdefault(key, []).append(position)
    return [torch.tensor(group) for group in positions.values()]


@contextmanager
def _located(problem: Problem) -> Iterator[None]:
    """Add the layer to a refusal that does not name one."""
    try:
        yield
    except UnsupportedError as error:
        if error.where is None:
            error.where = layer_of(error, problem.model)
        raise
