"""What the `vmap` backend replaces while a model runs: calls that torch.func refuses.

- Fused recurrent kernels (`nn.LSTM`, `nn.GRU`, `nn.RNN`) become steps of linear maps.
- `x.requires_grad_()` inside the loss, which precedes `torch.autograd.grad(u, x)` in a Laplacian
  or gradient penalty, ties x to a zero that requires a gradient.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

Step = Callable[..., tuple[Tensor, ...]]


class Rewrites(TorchFunctionMode):
    """The replacements, in force inside the `with` block.

    Args:
        zero: (), a zero that the surrounding transform differentiates by.
    """

    def __init__(self, zero: Tensor) -> None:
        super().__init__()
        self._zero = zero

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace a call, or let it through."""
        kwargs = kwargs or {}
        if func is Tensor.requires_grad_ and False not in (*args[1:], *kwargs.values()):
            return self._require_gradient(args[0])
        if func is _SET_REQUIRES_GRAD and args[1] is True:
            self._require_gradient(args[0])
            return None
        if func in STEPS:
            return recurrent(STEPS[func], *args, **kwargs)
        return func(*args, **kwargs)

    def _require_gradient(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            return x
        try:
            return x.requires_grad_()  # allowed where torch.func itself calls it, for a transform
        except RuntimeError:
            return x.sub_(self._zero)  # x − 0 is x, now part of the graph


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
    """Do what torch.lstm, torch.gru, torch.rnn_tanh and torch.rnn_relu do, step by step.

    Args:
        step: The cell: (projected input, states, weights) to new states, the output first.
        inputs: (t, n, i), or (n, t, i) when `batch_first`.
        states: Initial states, each (layers·directions, n, o).
        weights: Of each layer and direction: w_ih, w_hh, b_ih and b_hh when `has_biases`, and
            w_hr when the outputs of an LSTM are projected.
        has_biases: Whether there are b_ih and b_hh.
        layers: The number of layers.
        dropout: The probability between layers, when `train`.
        train: Whether the module is in train mode.
        bidirectional: Whether each layer also reads the sequence backwards.
        batch_first: Whether the sample axis of `inputs` comes first.

    Returns:
        The outputs, with the axes of `inputs`, then the final states.

    Raises:
        NotImplementedError: The sequences are packed.
    """
    if not isinstance(has_biases, bool):  # the arguments of a packed sequence come in another order
        raise NotImplementedError("packed sequences have no sample axis")
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
    """Run a cell over x (t, n, o); return its outputs (t, n, o) in order, and its last states."""
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
