"""Operations on parameters only: the rules give the gradients of single samples."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gradscope.backends.hooks import hooks, pullback
from gradscope.core.batch import Batch
from gradscope.model.problem import Problem

N, D = 5, 4


class Made(nn.Module):
    """Multiplies inputs by a matrix (4, 4) that a function makes of parameters."""

    def __init__(self, make: Callable[["Made"], Tensor]) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.rand(D, D, dtype=torch.float64) + 0.5)
        self.b = nn.Parameter(torch.rand(D, D, dtype=torch.float64) + 0.5)
        self.row = nn.Parameter(torch.rand(1, D, dtype=torch.float64) + 0.5)
        self.vector = nn.Parameter(torch.rand(D, dtype=torch.float64) + 0.5)
        self.scale = nn.Parameter(torch.rand((), dtype=torch.float64) + 0.5)
        self.register_buffer("mask", torch.tensor([[1.0, 0, 1, 0]], dtype=torch.float64))
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.make(self)


MADE: dict[str, Callable[[Made], Tensor]] = {
    "masked": lambda m: m.a * m.mask,
    "masked on the left": lambda m: m.mask.T * m.a,
    "twice": lambda m: m.a * m.a + 2 * m.a,
    "product and sum": lambda m: torch.add(m.a * m.row, m.vector[:, None], alpha=3) - m.scale,
    "ratio": lambda m: m.a / m.row + m.scale / m.b,
    "difference": lambda m: torch.sub(m.row, m.a, alpha=2),
    "elementwise": lambda m: m.a.exp() + m.b.log() + m.a.tanh() * m.b.sigmoid() + m.b.sqrt().neg(),
    "more elementwise": lambda m: (
        (m.a.sin() + m.b.cos() + m.a.expm1() + m.b.log1p() + m.a.abs() + (m.b - 1).relu())
        + m.a.rsqrt()
        + m.b.reciprocal()
        + nn.functional.softplus(m.a)
        + m.b**3
    ),
    "power zero": lambda m: m.a**0 + m.b,
    "expanded": lambda m: m.row.expand(D, D) + m.scale.expand(D, D),
    "sums": lambda m: m.a / m.a.sum() + m.b.sum(0) + m.b.sum(1, keepdim=True),
    "sum of a number": lambda m: m.a * m.scale.sum(0) + m.scale.mean(-1, keepdim=True),
    "means": lambda m: m.a * m.b.mean() + m.a.mean(1),
    "sums of several axes": lambda m: m.a * m.b.sum((0, 1)) + m.row.sum((-1, 0), keepdim=True),
    "matrices": lambda m: m.a @ m.b + torch.diag(m.vector),
    "fixed factors": lambda m: m.a.detach() @ m.b + m.a @ m.b.detach(),
    "vectors": lambda m: (
        m.b / torch.vdot(m.vector, m.a @ m.vector) + m.a / torch.dot(m.row[0], m.vector)
    ),
    "permuted": lambda m: m.a.view(2, 2, 4).permute(1, 2, 0).reshape(4, 4) + m.b.permute(1, 0),
    "parts": lambda m: torch.cat((m.a[1:3], m.b[::3]), 0) * m.a[2] + m.b[:, -1:],
    "split": lambda m: torch.cat(m.a.split((1, 3), 1)[::-1], 1) + m.b.split(3, 0)[1],
    "unbound": lambda m: torch.stack(m.a.unbind(1)[::-1], 0) + m.b.unbind(0)[2],
    "spectral norm": lambda m: m.a / torch.vdot(m.mask[0], torch.mv(m.a, m.vector.detach())),
    "diagonals": lambda m: torch.diag_embed(m.a[:, :2] + m.scale, 0, 1, 2).reshape(4, 4),
}


@pytest.mark.parametrize("name", MADE)
def test_rows_are_those_of_single_samples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    model = Made(MADE[name])
    x, targets = torch.randn(2, N, D, dtype=torch.float64)
    batched: list[object] = []
    own = pullback._dense_pull
    monkeypatch.setattr(pullback, "_dense_pull", lambda *a: batched.append(a[1]) or own(*a))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.sin() * targets).sum(1)

    with hooks(Problem.of(model, loss)) as evaluate:
        found = evaluate(Batch.of(x, targets)).gradients.dense()
    assert bool(batched) == (name == "power zero")  # other rules are enough
    for k in range(N):
        one = loss(model(x[k : k + 1]), targets[k : k + 1]).sum()
        wanted = torch.autograd.grad(
            one, [*model.parameters()], allow_unused=True, materialize_grads=True
        )
        for right, rows in zip(wanted, found.values(), strict=True):
            torch.testing.assert_close(rows[k], right, rtol=1e-12, atol=1e-12)
