"""What is handed to torch as functions: attention by a function of scores, map, loops."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as mapped
from torch.nn.attention import flex_attention as attention

import gradscope
from tests.oracle import cross_entropy, per_sample_gradients

N, T = 4, 6


class Attention(nn.Module):
    """Scores have a bias by distance, which is a parameter; earlier positions alone are seen."""

    plain = False

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 24)
        self.bias = nn.Parameter(torch.randn(2, 2 * T))
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, 3) of x (n, t, 4)."""
        n, t, _ = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, 2, 4).permute(2, 0, 3, 1, 4)
        if self.plain:
            place = torch.arange(t)
            scores = q @ k.transpose(-1, -2) / 2 + self.bias[:, place[:, None] - place + T]
            hidden = scores.masked_fill(place > place[:, None], -torch.inf).softmax(-1) @ v
        else:
            mask = attention.create_block_mask(lambda b, h, q, k: q >= k, None, None, t, t, "cpu")

            def score(given: Tensor, _: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return given + self.bias[h, q - k + T]

            hidden = attention.flex_attention(q, k, v, score, block_mask=mask)
        return self.out(hidden.transpose(1, 2).reshape(n, t, 8).mean(1))


class Mapped(nn.Module):
    """A function of each position, which closes over a parameter."""

    plain = False

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(4, 5), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.rand(5) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, 3) of x (n, t, 4)."""

        def step(row: Tensor) -> Tensor:
            return torch.tanh(self.inner(row) * self.scale)

        if self.plain:
            return self.out(step(x).mean(1))
        return self.out(mapped(step, x.transpose(0, 1)).mean(0))


class Trees(nn.Module):
    """Loops that carry tensors in trees: two states and a parameter; one of them never runs."""

    plain = False

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.state, self.out = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.rand(5) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, 3) of x (n, t, 4)."""
        start, positions = x.new_zeros(len(x), 5), x.transpose(0, 1)

        def step(carried: tuple[Tensor, Tensor], row: Tensor) -> tuple[Any, dict[str, Tensor]]:
            h, c = carried
            c = torch.tanh(self.state(h) + self.inner(row)) + c * self.scale
            return (c.tanh(), c), {"sine": h.sin(), "square": h * h}

        def body(k: Tensor, carried: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
            h, (w,) = carried["h"], carried["w"]
            return k + 1, {"h": self.state(h) * w, "w": [w * 1.1]}

        if self.plain:
            carried, rows = (start, start), [None] * T
            for t in reversed(range(T)):
                carried, rows[t] = step(carried, positions[t])
            found = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
            last = {"h": carried[0], "w": [self.scale]}
            for k in range(3):
                _, last = body(torch.tensor(k), last)
        else:
            carried, found = scan(step, (start, start.clone()), positions, reverse=True)
            last = {"h": carried[0], "w": [self.scale]}
            for most in (0, 3):
                begun = torch.tensor(0), last
                _, last = while_loop(lambda k, _, most=most: k < most, body, begun)
        weights = torch.arange(T, dtype=x.dtype)[:, None, None]
        hidden = (found["sine"] * weights + found["square"]).sum(0)
        return self.out(hidden + last["h"] * last["w"][0])


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("backend", ["auto", "loop", "expand"])
@pytest.mark.parametrize("kind", [Attention, Mapped, Trees])
def test_what_a_function_closes_over_has_its_gradient(
    kind: type[Attention | Mapped | Trees], backend: str
) -> None:
    torch.compile(lambda x: x, backend="eager")  # what is compiled runs as it is written
    torch.manual_seed(0)
    check = attention._validate_device  # that torch can train it there
    model = kind().double()
    x, y = torch.randn(N, T, 4, dtype=torch.float64), torch.arange(N) % 3
    with gradscope.Scope(model, "cross_entropy", backend=backend) as scope:
        found = scope.per_sample_gradients(x, y)
    model.plain = True
    _, right = per_sample_gradients(model, cross_entropy, x, y)
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-12)
    assert attention._validate_device is check
