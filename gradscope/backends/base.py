"""Backends: each is bound once to a problem and applied to many batches.

A backend is a function of a problem that returns a context manager, which cleans up at its end.
Inside it, the bound function maps a batch and a request to losses and per-sample gradients:

    with backend(problem) as evaluate:
        evaluation = evaluate(batch, request)

The result is exact, or a `RefusedError` names the layer and the remedy.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from gradscope.blocks import DenseBlock, Evaluation, Gradients
from gradscope.core.batch import Batch, Tokens
from gradscope.core.registry import Registry, suggestion
from gradscope.errors import SpecError, UnsupportedError
from gradscope.model.locate import unsupported
from gradscope.model.problem import Problem, RowKind

AUTO = "auto"

# for auto: hooks keeps structure, loop runs every model; after hooks, the fastest comes first
_ORDER = ("hooks", "vmap", "expand", "loop")

CHUNK_BYTES = 2**28  # size of the dense gradients in one part of a batch
_ROWS = 8  # token rows per part, at least

State = dict[str, Tensor]
Starts = Callable[[Sequence[str], Gradients], dict[str, State]]
LossesAndRows = tuple[Tensor, dict[str, Tensor]]  # losses (n,) and {name: gradients (n, *shape)}


@dataclass(frozen=True)
class Request:
    """Results requested in addition to norms of the gradients; a backend may ignore it."""

    rows: bool = True  # whether the gradients themselves are requested
    keys: tuple[str, ...] = ()  # keys of the requested reductions
    # maps keys and gradients to the state of each reduction after this batch
    starts: Starts = lambda keys, gradients: {}
    # buffers {name: (n, *shape)} for the gradients, if known
    out: Mapping[str, Tensor] | None = None
    stored: bool = False  # whether each entry of the dense gradients is stored
    # the number of batches to come, including this one, if known
    batches_left: int | None = None
    proved: bool = False  # whether the result will be proved, including independence of the samples
    factors: bool = False  # whether to keep the gradients' structure, even for a single sample
    quick: bool = False  # whether to raise `SlowProgramError` instead of a slow analysis


# {part of an exception's message: (its meaning, the remedy)}
Reasons = Mapping[str, tuple[str, str]]

USE_AUTO = (
    'Use backend="auto": it takes the first backend that runs this model and passes the proof. '
    "The backend loop runs every model that can train with a batch of one."
)
OF_TEXT = (
    "the model uses the text of a tensor (str or repr) as a value",
    'Use int(x) or x.item() instead of the text, or use backend="loop".',
)

ROWS = Request()
PROVED = Request(proved=True)


class SlowProgramError(UnsupportedError):
    """The analysis of a program takes many passes, so another backend may be faster."""


class Evaluate(Protocol):
    """A backend bound to a problem."""

    def __call__(self, batch: Batch, request: Request = ROWS, /) -> Evaluation:
        """Return losses (n,) and the gradients of n samples."""


Backend = Callable[[Problem], AbstractContextManager[Evaluate]]

backends: Registry[Backend] = Registry("backend")
own_loss_backends: Registry[Backend] = Registry("own-loss backend")
# backends with their own code for tokens
token_backends: Registry[Backend] = Registry("token backend")


def candidates(name: str, *, own_loss: bool = False) -> tuple[str, ...]:
    """Return the backends to try for a name: one, or for `auto` several, fastest first.

    Args:
        name: A backend's name, or `auto`.
        own_loss: Whether the backend must support coupling="own-loss".

    Raises:
        SpecError: No suitable backend has this name.
    """
    registry = own_loss_backends if own_loss else backends
    if name == AUTO:
        return tuple(candidate for candidate in _ORDER if candidate in registry)
    if name not in registry:
        known = suggestion(name, [AUTO, *registry.names()])
        raise SpecError(f"unknown {registry.kind} {name!r}", remedy=known)
    return (name,)


def backend_of(name: str, rows: RowKind = "sample", *, own_loss: bool = False) -> Backend:
    """Return the backend of a name for rows of samples or tokens."""
    if own_loss:
        return own_loss_backends.get(name)
    plain = backends.get(name)
    if rows == "sample" or name == "loop":  # loop evaluates one row at a time anyway
        return plain
    return token_backends.find(name) or partial(one_token_a_sample, plain)


@contextmanager
def one_token_a_sample(backend: Backend, problem: Problem) -> Iterator[Evaluate]:
    """Compute each token row from a copy of its sample, with any backend.

    This is exact for every model. A sample costs as much as t samples.
    """
    with backend(problem.of_single_tokens) as evaluate:

        def evaluate_rows(batch: Batch, request: Request = ROWS, /) -> Evaluation:
            assert isinstance(batch, Tokens)

            def some(batch: Batch) -> LossesAndRows:
                assert isinstance(batch, Tokens)
                found = evaluate(batch.as_samples(), Request(proved=request.proved))
                return found.losses, found.gradients.dense()

            each = max(_ROWS, len(batch.sample_batch))  # this many samples fit into memory
            parts = torch.split(torch.arange(len(batch)), each)
            return dense_evaluation(*in_parts(problem, batch, parts, some))

        yield evaluate_rows


def in_parts(
    problem: Problem,
    batch: Batch,
    parts: Sequence[Tensor],
    evaluate: Callable[[Batch], LossesAndRows],
) -> LossesAndRows:
    """Evaluate a batch in parts, given by the positions of their samples."""
    if len(parts) == 1:
        return evaluate(batch)
    losses = None
    values = {k: p.new_empty(len(batch), *p.shape) for k, p in problem.parameters.items()}
    for rows in parts:
        found, gradients = evaluate(batch.select(rows))
        losses = found.new_empty(len(batch)) if losses is None else losses
        losses[rows] = found
        for name, gradient in gradients.items():
            values[name][rows] = gradient
    assert losses is not None
    return losses, values


def chunks(problem: Problem, batch: Batch, size: int) -> Sequence[Tensor]:
    """Return the positions of samples in parts, each with at most `size` bytes of gradients."""
    row = sum(p.numel() * p.element_size() for p in problem.parameters.values())
    return torch.split(torch.arange(len(batch)), max(1, size // max(1, row)))


def dense_evaluation(losses: Tensor, values: Mapping[str, Tensor]) -> Evaluation:
    """Return losses (n,) and dense gradients (n, *shape) as an `Evaluation`."""
    return Evaluation(losses, Gradients({name: DenseBlock(g) for name, g in values.items()}))


def no_samples(problem: Problem) -> Evaluation:
    """Return the evaluation of an empty batch: losses (0,) and gradients (0, *shape)."""
    values = {k: p.detach().new_zeros(0, *p.shape) for k, p in problem.parameters.items()}
    losses = torch.zeros(0, dtype=problem.dtype.to_real(), device=problem.device)
    evaluation = dense_evaluation(losses, values)
    index = torch.zeros(0, dtype=torch.int64)
    return replace(evaluation, gradients=Gradients(evaluation.gradients, index))


def require_unhooked(backend: str, problem: Problem) -> None:
    """Raise if a parameter has a hook on its gradient; this backend would not call the hook."""
    for name, p in problem.parameters.items():
        if p._backward_hooks:
            raise UnsupportedError(
                f"the parameter has a hook on its gradient, and {backend} does not call such hooks",
                where=f"parameter {name!r}",
                remedy='Use backend="loop" (auto does), or remove the hook.',
            )


def refusing(backend: str, model: nn.Module, remedy: str) -> AbstractContextManager[None]:
    """Convert torch's exceptions in a backend to an `UnsupportedError` that names the layer."""
    return unsupported(f"the {backend} backend cannot run this model", model, remedy)


@contextmanager
def explaining(backend: str, reasons: Reasons) -> Iterator[None]:
    """Explain exceptions that are about the internal tensors of a backend."""
    try:
        yield
    except UnsupportedError as error:
        text = str(error.__cause__ or "")
        for word, (reason, remedy) in reasons.items():
            if word in text:
                error.what = f"the {backend} backend cannot run this model: {reason}"
                error.remedy = remedy
        raise
