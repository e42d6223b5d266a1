"""`vmap`: torch.func's gradient of one sample's loss, vectorised over the samples.

Each sample keeps an axis n = 1, so the model gets the same shapes as in `loop`. torch.func does
not support some calls that have an exact equivalent. They are replaced while the model runs:

- Fused recurrent kernels (`nn.LSTM`, `nn.GRU`, `nn.RNN`) become steps of linear maps.
- `x.requires_grad_()` inside the loss, before `torch.autograd.grad(u, x)` in a Laplacian or
  gradient penalty, adds a zero that requires a gradient to x.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradscope.backends.base import (
    CHUNK_BYTES,
    OF_TEXT,
    ROWS,
    USE_AUTO,
    Evaluate,
    LossesAndRows,
    Request,
    backends,
    chunks,
    dense_evaluation,
    explaining,
    in_parts,
    refusing,
    require_unhooked,
)
from gradscope.blocks import Evaluation
from gradscope.core.batch import Batch, map_tensors, tensors
from gradscope.errors import UnsupportedError
from gradscope.model.problem import Problem

Step = Callable[..., tuple[Tensor, ...]]

_OTHERS = 'Use backend="expand" or backend="auto".'
_REASONS = {
    "bdim=": OF_TEXT,
    "calling .item()": (
        "the model branches on values of the data, or reads a value as a number",
        _OTHERS,
    ),
    "Cannot access data pointer": (
        "the model reads the values of a tensor in Python, as tolist and numpy do",
        _OTHERS,
    ),
}
_REMEDIES = {  # {part of torch's message: the remedy}
    "inplace randomness": "The model fills a tensor that all samples share with random numbers. "
    'Create it by torch.rand, randn or bernoulli, or use backend="auto".',
    "randomness": "The model draws random numbers. Put it in eval mode, set dropout to 0, or fix "
    'the numbers for each sample: randomness="fixed".',
    "dynamic shape": "A mask or nonzero gives samples different shapes. " + _OTHERS,
    "nplace": 'Replace the in-place operation by an out-of-place one, or use backend="auto".',
    "saved tensor hooks": 'Turn off gradient checkpointing, or use backend="auto".',
    "_NoopSaveInputs": 'Turn off gradient checkpointing, or use backend="auto".',  # torch 2.8
    "it does not have vmap support": "Set generate_vmap_rule = True in the autograd.Function, "
    'or use backend="auto".',
    "differently shaped": "masked_select gives samples different shapes. " + _OTHERS,
    "atch norm": "Put BatchNorm in eval mode: in train mode it couples the samples of a batch.",
    "value per channel": "Put BatchNorm in eval mode: in train mode it couples the samples of a "
    "batch, and a batch of one has no variance.",
    "packed": "Give padded sequences, and mask the loss.",
}


@backends.register("vmap")
@contextmanager
def vmap(problem: Problem, chunk: int = CHUNK_BYTES) -> Iterator[Evaluate]:
    """torch.func: vmap over samples of the gradient of one sample's loss."""

    def evaluate(batch: Batch, request: Request = ROWS, /) -> Evaluation:
        require_unhooked("vmap", problem)
        values = {k: p.detach() for k, p in problem.parameters.items()}
        parts = chunks(problem, batch, chunk)
        with explaining("vmap", _REASONS):
            try:
                with (
                    refusing("vmap", problem.model, USE_AUTO),
                    problem.state.restoring(),
                    untouched(),
                ):
                    answer = in_parts(problem, batch, parts, partial(per_sample, problem, values))
            except UnsupportedError as error:
                problem.losses(batch)  # raises the model's own errors
                if error.__cause__ is not None:
                    text = str(error.__cause__)
                    error.remedy = next((v for k, v in _REMEDIES.items() if k in text), USE_AUTO)
                raise
        return dense_evaluation(*answer)

    yield evaluate


def per_sample(problem: Problem, values: dict[str, Tensor], batch: Batch) -> LossesAndRows:
    """Return losses (n,) and gradients (n, *shape) of a batch that fits into memory."""
    leaves = tensors((batch.inputs, batch.targets))
    shared = [t.dim() == 0 for t in leaves]  # constants without a sample axis

    def loss(
        values: dict[str, Tensor], zero: Tensor, sample: list[Tensor], index: Tensor
    ) -> tuple[Tensor, Tensor]:
        def own(t: Tensor, constant: bool) -> Tensor:
            # A tensor that the model may differentiate by must belong to the gradient transform. An
            # operation with `zero`, which belongs to it, achieves that. t − 0 equals t exactly,
            # including signed zeros, infinities and NaN.
            if t.is_floating_point() or t.is_complex():
                t = t - zero.detach().to(t.dtype)
            return t if constant else t.unsqueeze(0)

        each = iter([own(t, constant) for t, constant in zip(sample, shared, strict=True)])
        inputs, targets = map_tensors(lambda _: next(each), (batch.inputs, batch.targets))
        with _Rewrites(zero, None if problem.state.randomness is None else index):
            one = Batch(inputs, targets, index.unsqueeze(0))
            value = problem.functional_losses(values, one)[0]
        return value, value

    over = (None, None, [None if s else 0 for s in shared], 0)
    gradient = torch.func.grad(loss, argnums=(0, 1), has_aux=True)
    zero = torch.zeros((), device=problem.device)
    drawing = "error" if problem.state.randomness is None else "different"
    every = torch.func.vmap(gradient, in_dims=over, randomness=drawing)
    with torch.no_grad():  # torch.func needs no graph outside
        (gradients, _), losses = problem.with_randomness(
            batch, lambda: every(values, zero, leaves, batch.index), single=True
        )
    return losses, gradients


@contextmanager
def untouched() -> Iterator[None]:
    """Restore torch's global switches after a forward pass."""
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # a fused kernel without derivative
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # exact, only slower
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class _Rewrites(TorchFunctionMode):
    """Replaces calls while the model runs.

    Args:
        zero: (), a tensor that the surrounding transform differentiates by.
        own: A tensor with one value per sample, if random numbers may be written to new memory.
    """

    def __init__(self, zero: Tensor, own: Tensor | None) -> None:
        super().__init__()
        self._zero, self._own = zero, own

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace a call, or pass it through."""
        kwargs = kwargs or {}
        if func is Tensor.requires_grad_ and False not in (*args[1:], *kwargs.values()):
            return self._require_gradient(args[0])
        if func is _SET_REQUIRES_GRAD and args[1] is True:
            self._require_gradient(args[0])
            return None
        if func in (torch.empty, Tensor.new) and self._own is not None:
            made = func(*args, **kwargs)
            return self._own.new_empty(made.shape, dtype=made.dtype, device=made.device)
        if func in STEPS:
            return recurrent(STEPS[func], *args, **kwargs)
        return func(*args, **kwargs)

    def _require_gradient(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            return x
        try:
            return x.requires_grad_()  # allowed if torch.func itself calls it, for a transform
        except RuntimeError:
            return x.sub_(self._zero)  # x − 0 equals x, but belongs to the graph


def recurrent(
    step: Step,
    inputs: Tensor,
    states: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Compute torch.lstm, torch.gru, torch.rnn_tanh or torch.rnn_relu step by step.

    The cell `step` maps (projected input, states, weights) to new states; the first state is the
    output. Inputs are (t, n, i). Each initial state is (layers·directions, n, o). For each layer
    and direction, the weights are w_ih and w_hh, then b_ih and b_hh if `has_biases`, and w_hr for
    an LSTM with projected outputs. Returns the outputs, with the axes of `inputs`, then the final
    states.
    """
    # For a packed sequence, torch calls these functions with (data, batch_sizes, states, weights,
    # has_biases, ...). Then `has_biases` here is a list of weights. The rows of all sequences are
    # interleaved in `data`, so vmap has no sample axis.
    if not isinstance(has_biases, bool):
        raise UnsupportedError(
            "the vmap backend cannot run this model: packed sequences have no sample axis",
            remedy=_REMEDIES["packed"],
        )
    starts = (states,) if isinstance(states, Tensor) else tuple(states)
    directions = 2 if bidirectional else 1
    each = len(weights) // (layers * directions)
    x = inputs.transpose(0, 1) if batch_first else inputs
    finals = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            k = layer * directions + direction
            w_ih, w_hh, *rest = weights[k * each : (k + 1) * each]
            b_ih, b_hh, *w_hr = rest if has_biases else (None, None, *rest)
            cell = partial(step, w_hh=w_hh, b_hh=b_hh, w_hr=w_hr[0] if w_hr else None)
            output, final = _scan(cell, F.linear(x, w_ih, b_ih), [s[k] for s in starts], direction)
            outputs.append(output)
            finals.append(final)
        x = torch.cat(outputs, -1)
        if dropout and train and layer < layers - 1:
            x = F.dropout(x, dropout)
    x = x.transpose(0, 1) if batch_first else x
    return x, *(torch.stack(final) for final in zip(*finals, strict=True))


def _scan(
    cell: Step, x: Tensor, states: Sequence[Tensor], backward: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run a cell over x (t, n, o); return the outputs (t, n, o) in order, and the last states."""
    steps = x.unbind(0)
    state, outputs = tuple(states), []
    for projected in reversed(steps) if backward else steps:
        state = cell(projected, *state)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backward else outputs), state


def _lstm(
    x: Tensor, h: Tensor, c: Tensor, w_hh: Tensor, b_hh: Tensor | None, w_hr: Tensor | None
) -> tuple[Tensor, ...]:
    """One step of torch.nn.LSTM: gates i, f, g, o."""
    i, f, g, o = (x + F.linear(h, w_hh, b_hh)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return h if w_hr is None else F.linear(h, w_hr), c


def _gru(x: Tensor, h: Tensor, w_hh: Tensor, b_hh: Tensor | None, w_hr: None) -> tuple[Tensor, ...]:
    """One step of torch.nn.GRU: gates r, z, n."""
    (r, z, n), (hr, hz, hn) = x.chunk(3, -1), F.linear(h, w_hh, b_hh).chunk(3, -1)
    new = (n + (r + hr).sigmoid() * hn).tanh()
    return (new + (z + hz).sigmoid() * (h - new),)


def _rnn(
    activation: Callable[[Tensor], Tensor],
    x: Tensor,
    h: Tensor,
    w_hh: Tensor,
    b_hh: Tensor | None,
    w_hr: None,
) -> tuple[Tensor, ...]:
    """One step of torch.nn.RNN."""
    return (activation(x + F.linear(h, w_hh, b_hh)),)


STEPS: dict[Any, Step] = {
    torch.lstm: _lstm,
    torch.gru: _gru,
    torch.rnn_tanh: partial(_rnn, torch.tanh),
    torch.rnn_relu: partial(_rnn, torch.relu),
}
_SET_REQUIRES_GRAD = Tensor.requires_grad.__set__  # type: ignore[attr-defined]
