"""A value that several operations of one kind use is contracted once, as the loop computes it."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from gradscope.backends.hooks import block_of, hooks
from gradscope.backends.hooks.rules import Site
from gradscope.blocks import Block
from gradscope.core.batch import Batch
from gradscope.model.problem import Problem

N = 4


class Steps(nn.Module):
    """Applies one step three times; the parameters are matrices, a kernel and a vector."""

    def __init__(self, step: Callable[["Steps", Tensor, int], Tensor]) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))
        self.two = nn.Parameter(torch.randn(2, 2, dtype=torch.float64))
        self.three = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))
        self.kernel = nn.Parameter(torch.randn(2, 2, 3, dtype=torch.float64))
        self.vector = nn.Parameter(torch.randn(6, dtype=torch.float64))
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        for k in range(3):
            x = torch.tanh(self.step(self, x, k)) + 0.5 * x
        return x


# {name: (step, kind, nodes that are contracted together; 1: the operations differ)}
STEPS: dict[str, tuple[Callable[[Steps, Tensor, int], Tensor], str, int]] = {
    "linear": (lambda m, x, k: F.linear(x, m.matrix, m.vector), "Addmm", 3),
    "matrix": (lambda m, x, k: x @ m.matrix, "Mm", 3),
    "matrix on the left": (lambda m, x, k: (m.matrix @ x.T).T, "Mm", 3),
    "positions": (lambda m, x, k: (x.view(-1, 3, 2) @ m.two).flatten(1), "Mm", 3),
    "positions first": (
        lambda m, x, k: (x.view(-1, 3, 2).mT @ m.three).mT.flatten(1),
        "Mm",
        3,
    ),
    "scaled": (lambda m, x, k: torch.addmm(m.vector, x, m.matrix, alpha=2, beta=3), "Addmm", 3),
    "scaled differently": (
        lambda m, x, k: torch.addmm(m.vector, x, m.matrix, alpha=k + 1, beta=k + 2),
        "Addmm",
        1,
    ),
    "factor": (lambda m, x, k: m.vector * x, "Mul", 3),
    "factor of other shapes": (
        lambda m, x, k: m.vector * x if k else m.vector * x[:, :1] + x,
        "Mul",
        1,
    ),
    "summand": (lambda m, x, k: m.vector + x, "Add", 3),
    "difference": (lambda m, x, k: torch.sub(x, m.vector, alpha=k + 1), "Sub", 1),
    "convolution": (
        lambda m, x, k: F.conv1d(x.view(-1, 2, 3), m.kernel, padding=1).flatten(1),
        "Convolution",
        3,
    ),
    "convolutions of other strides": (
        lambda m, x, k: (
            F.conv1d(x.view(-1, 2, 3), m.kernel, padding=1 + k, stride=1 + k).sum(2).repeat(1, 3)
        ),
        "Convolution",
        1,
    ),
    "some without a gradient": (
        lambda m, x, k: F.linear(x, m.matrix) if k else F.linear(x, m.matrix).detach(),
        "Mm",
        2,
    ),
}


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.sin() * targets).sum(1)


@pytest.mark.parametrize("name", STEPS)
def test_rows_are_those_of_the_loop(name: str) -> None:
    torch.manual_seed(3)
    step, kind, together = STEPS[name]
    model, seen = Steps(step), []

    def contract(own: str, site: Site) -> Block:
        block = block_of(own, site)
        if own == f"{kind}Backward0":
            seen.append(1 + len(site.others))
        return block

    x, targets = torch.randn(2, N, 6, dtype=torch.float64)
    with hooks(Problem.of(model, loss), contract) as evaluate:
        evaluate(Batch.of(x, targets))
        found = evaluate(Batch.of(x, targets)).gradients.dense()  # with the known analysis
    assert max(seen) == together
    for k in range(N):
        wanted = torch.autograd.grad(
            loss(model(x[k : k + 1]), targets[k : k + 1]).sum(),
            [*model.parameters()],
            allow_unused=True,
            materialize_grads=True,
        )
        for own, rows in zip(wanted, found.values(), strict=True):
            torch.testing.assert_close(rows[k], own, rtol=1e-12, atol=1e-12)
