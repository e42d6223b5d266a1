"""Mixtures of experts by grouped products: float32 alone, so held against a float64 loop."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.backends.hooks import block_of, hooks
from gradscope.backends.hooks.graph.trace import Trace
from gradscope.backends.hooks.rules import Site
from gradscope.blocks import Block, SegmentBlock
from gradscope.core.batch import Batch
from gradscope.model.problem import Problem
from tests.oracle import per_sample_gradients

EXPERTS, WIDTH, N, T = 4, 8, 4, 6
Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def has_grouped() -> bool:
    """Whether this torch has grouped products on the CPU; 2.8 has them on GPUs only."""
    try:
        torch._grouped_mm(torch.ones(1, 8, 8), torch.ones(1, 8, 8))
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True


GROUPED = has_grouped()


def of_each(weights: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """Look up every row's own matrix; those of nobody get the last one."""
    expert = torch.bucketize(torch.arange(len(rows)), ends, right=True)
    return weights[expert.clamp(max=EXPERTS - 1)]


def by_rows(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    if GROUPED:
        return torch._grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    return (rows.unsqueeze(1) @ of_each(weights, rows, ends).mT).squeeze(1)


def by_columns(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    if GROUPED:
        return torch._grouped_mm(weights, rows.mT, offs=ends).mT
    return (of_each(weights, rows, ends) @ rows.unsqueeze(2)).squeeze(2)


def one_by_one(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    starts = [0, *ends.tolist()]
    parts = [rows[starts[e] : starts[e + 1]] @ weights[e].T for e in range(EXPERTS)]
    return torch.cat([*parts, rows.new_zeros(len(rows) - starts[-1], weights.shape[1])])


class Mixture(nn.Module):
    """The two likeliest of four experts for each token; of a fifth there is no matrix."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.route = nn.Linear(WIDTH, EXPERTS + 1)
        self.up = nn.Parameter(torch.randn(EXPERTS, 12, WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 12) / 3)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        tokens = self.inner(x).tanh().flatten(0, 1)
        logits = self.route(x) + shift.unsqueeze(1)
        top, which = logits.softmax(2).flatten(0, 1).topk(2)
        expert, order = which.flatten().sort(stable=True)
        ends = torch.bincount(expert, minlength=EXPERTS + 1)[:EXPERTS].cumsum(0).int()
        nobody = (expert == EXPERTS).unsqueeze(1)
        h = tokens[order // 2].masked_fill(nobody, 0.0)
        h = self.product(h, self.up, ends).masked_fill(nobody, 0.0).relu()
        h = self.product(h, self.down, ends).masked_fill(nobody, 0.0)
        h = h * top.flatten()[order].unsqueeze(1)
        return h[order.argsort()].view(len(x), T, 2, WIDTH).sum((1, 2))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean(1)


SHIFTS = {
    "balanced": [0.0, 0.0, 0.0, 0.0, -9.0],
    "two empty experts": [9.0, 0.0, 9.0, 0.0, -9.0],
    "some go nowhere": [0.0, 0.0, 0.0, 0.0, 1.0],
    "half of them go nowhere": [0.0, 0.0, 9.0, 0.0, 9.0],
}


@pytest.mark.parametrize("product", [by_rows, by_columns])
def test_gradients_of_experts_whatever_the_routing(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one backward pass each, but for the analysis of the first batch."""
    torch.manual_seed(3)
    model, passes, kinds = Mixture(product), [], set()
    exact = Mixture(one_by_one).double()
    exact.load_state_dict(model.state_dict())
    taken = Trace.gradients
    monkeypatch.setattr(Trace, "gradients", lambda *a: (passes.append(1), taken(*a))[1])

    def watched(kind: str, site: Site) -> Block:
        block = block_of(kind, site)
        if kind == "GroupedMmBackward0":
            kinds.add(type(block))
        return block

    with hooks(Problem.of(model, loss), contract=watched) as evaluate:
        for shift in SHIFTS.values():
            x, y = torch.randn(N, T, WIDTH), torch.randn(N, WIDTH)
            shifts = torch.tensor([shift] * N)
            passes.clear()
            found = evaluate(Batch((x, shifts), y, torch.arange(N))).gradients
            assert len(passes) == 1
            for name, right in per_sample_gradients(exact, loss, (x, shifts), y)[1].items():
                ours = found[name].dense().double()
                torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-6)
    assert kinds == ({SegmentBlock} if GROUPED else set())


@pytest.mark.parametrize("product", [by_rows, by_columns])
def test_in_float64_too(product: Product) -> None:
    """In which `compare` computes its reference: torch has no grouped product of it."""
    torch.manual_seed(3)
    model, exact = Mixture(product).double(), Mixture(one_by_one).double()
    exact.load_state_dict(model.state_dict())
    x, y = (torch.randn(N, *shape, dtype=torch.float64) for shape in ((T, WIDTH), (WIDTH,)))
    given = x, torch.tensor([SHIFTS["some go nowhere"]] * N, dtype=torch.float64)
    for backend in ("hooks", "expand", "loop"):
        found = gradscope.per_sample_gradients(model, loss, given, y, backend=backend)
        right = gradscope.per_sample_gradients(exact, loss, given, y, backend="loop")
        for name, gradient in right.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)
    single = given[0].float(), given[1].float()
    assert gradscope.compare(model.float(), loss, single, y.float(), backends=["hooks"]).agrees


@pytest.mark.parametrize("product", [by_rows, one_by_one])
def test_whose_a_row_is_where_a_part_computes_in_fewer_digits(product: Product) -> None:
    """As transformers' routers and norms do, in float32 whatever the model: marks are rounded."""

    class Rounded(Mixture):
        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            return super().forward(x, shift).float().tanh().double()

    torch.manual_seed(3)
    model = Rounded(product).double()
    x, y = (torch.randn(N, *shape, dtype=torch.float64) for shape in ((T, WIDTH), (WIDTH,)))
    given = x, torch.tensor([SHIFTS["balanced"]] * N, dtype=torch.float64)
    found = gradscope.per_sample_gradients(model, loss, given, y, backend="hooks")
    right = gradscope.per_sample_gradients(model, loss, given, y, backend="loop")
    for name, gradient in right.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)


class Stack(nn.Module):
    """Every expert sees every token: without offsets it is what `bmm` computes."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(EXPERTS, WIDTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        every = x.flatten(0, 1).expand(EXPERTS, -1, -1).contiguous()
        product = torch._grouped_mm if GROUPED else torch.bmm
        return product(every, self.stack).view(EXPERTS, len(x), -1).transpose(0, 1)


def test_a_batch_of_products_of_stacked_matrices() -> None:
    """Of Σ y², the gradient of expert e is 2 Σₜ xₜ ⊗ (xₜ Wₑ)."""
    torch.manual_seed(4)
    model, x = Stack(), torch.randn(N, T, WIDTH)
    with hooks(Problem.of(model, lambda out, _: out.square().sum((1, 2)))) as evaluate:
        found = evaluate(Batch(x, torch.zeros(N), torch.arange(N))).gradients["stack"].dense()
    wide = x.double()
    out = torch.einsum("nti,eio->neto", wide, model.stack.detach().double())
    right = 2 * torch.einsum("nti,neto->neio", wide, out)
    torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-4)
