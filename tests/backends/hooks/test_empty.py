"""Layers that get no row in some batches: a branch, an expert or a kind of token without use."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from gradscope.core.batch import Batch
from gradscope.errors import CoupledSamplesError, RefusedError
from gradscope.scope import Scope
from tests.oracle import per_sample_gradients
from tests.zoo.base import Net, param, seeded, smooth

N, T, D = 4, 3, 6
Pattern = Callable[[Tensor], Tensor]  # from positions (n, t) to which of them are of the first kind

PATTERNS: dict[str, Pattern] = {
    "some": lambda place: place % 3 == 1,
    "none": lambda place: place < 0,
    "all": lambda place: place >= 0,
    "few": lambda place: place == 5,
}
Program = Callable[[Any, Tensor, Tensor], Tensor]
PROGRAMS: dict[str, tuple[Callable[[], dict[str, nn.Module]], Program]] = {}


def program(**members: Callable[[], Any]) -> Callable[[Program], Program]:
    """File a forward pass (net, x (n, t, d), kind (n, t)) under its own name."""

    def add(forward: Program) -> Program:
        PROGRAMS[forward.__name__] = (lambda: {k: make() for k, make in members.items()}, forward)
        return forward

    return add


def linear() -> nn.Module:
    return nn.Linear(D, D)


def norm() -> nn.Module:
    return nn.LayerNorm(D)


@program(a=linear, b=linear)
def assigned_by_a_mask(net, x, kind):
    h = net.a(x)
    out = h.sin()
    out[kind] = net.b(h[kind]).tanh()
    return out


@program(a=linear, b=norm, c=norm)
def masked_scatter(net, x, kind):
    h = net.a(x)
    h = h.masked_scatter(kind[..., None], net.b(h[kind]))
    return h.masked_scatter(~kind[..., None], net.c(h[~kind]))


@program(a=linear, b=linear)
def added_by_nonzero(net, x, kind):
    h = net.a(x).flatten(0, 1)
    rows = kind.flatten().nonzero().squeeze(1)
    return h.index_add(0, rows, net.b(h[rows]).tanh()).view_as(x)


@program(a=linear, b=linear, c=linear)
def split_by_kind(net, x, kind):
    h = net.a(x).flatten(0, 1)
    order = kind.flatten().int().argsort(stable=True)
    p, q = h[order].split(torch.bincount(kind.flatten().int(), minlength=2).tolist())
    rows = torch.cat([net.b(p).tanh(), net.c(q).sin()])
    return torch.zeros_like(h).index_add(0, order, rows).view_as(x)


@program(a=linear, b=linear, c=linear)
def experts(net, x, kind):
    h = net.a(x).flatten(0, 1)
    out = torch.zeros_like(h)
    for k, expert in enumerate((net.b, net.c)):
        rows = torch.where(kind.flatten() == bool(k))[0]
        out = out.index_add(0, rows, expert(h.index_select(0, rows)).tanh())
    return out.view_as(x)


@program(a=linear, b=linear, c=linear)
def experts_that_are_left_out(net, x, kind):
    h = net.a(x).flatten(0, 1)
    out = h.sin()
    for k, expert in enumerate((net.b, net.c)):
        rows = torch.where(kind.flatten() == bool(k))[0]
        if len(rows):
            out = out.index_add(0, rows, expert(h[rows]).tanh())
    return out.view_as(x)


@program(a=linear, b=linear, gate=lambda: nn.Linear(D, 1))
def put_with_accumulation(net, x, kind):
    h = net.a(x)
    n, t = kind.nonzero().unbind(1)
    rows = net.b(h[n, t]) * net.gate(h[n, t]).sigmoid()
    return h.index_put((n, t), rows, accumulate=True)


@program(a=linear, table=lambda: nn.Embedding(5, D))
def looked_up(net, x, kind):
    h = net.a(x)
    ids = (h[..., 0].detach().abs() * 10).long() % 5
    return h.masked_scatter(kind[..., None], net.table(ids[kind]))


@program(a=linear, token=lambda: param(D), scale=lambda: param(1, D))
def a_token_for_each(net, x, kind):
    h = net.a(x)
    count = int(kind.sum())
    h = h.index_put(kind.nonzero().unbind(1), net.token.expand(count, -1) * net.scale)
    return h.sin()


@program(a=linear, b=lambda: nn.Conv1d(T, 2, 3), c=lambda: nn.GroupNorm(2, 2), d=lambda: param(2))
def whole_samples(net, x, kind):
    h, some = net.a(x), kind.any(1)
    images = net.c(net.b(h[some]))
    images = F.batch_norm(images, net.d.detach(), net.d.detach().exp(), weight=net.d)
    out = torch.zeros(len(x), 2, D - 2, dtype=x.dtype).index_add(0, some.nonzero()[:, 0], images)
    return torch.cat([out.flatten(1), h.flatten(1)], 1)


@program(a=lambda: nn.MultiheadAttention(D, 2, batch_first=True), b=linear)
def attention_of_some(net, x, kind):
    some = kind.any(1).nonzero()[:, 0]
    h = net.b(x)
    return h.index_add(0, some, net.a(x[some], x[some], x[some], need_weights=False)[0])


@program(a=linear, b=lambda: nn.utils.parametrizations.weight_norm(linear()))
def weight_norm(net, x, kind):
    h = net.a(x)
    rows = torch.einsum("td,od->to", h[kind].relu(), net.b.weight) + net.b.bias
    return h.masked_scatter(kind[..., None], rows.view(-1))


@program(a=linear, b=lambda: param(D))
def a_matrix_of_all_rows(net, x, kind):
    h = net.a(x)
    rows = h[kind].reshape(-1, 2, D // 2).transpose(0, 1).flatten(1)
    rows = rows.view(2, -1, D // 2).transpose(0, 1).reshape(-1, D) * net.b
    return h.masked_scatter(kind[..., None], rows)


def build(name: str, dtype: torch.dtype) -> tuple[nn.Module, dict[str, tuple[Any, Tensor]]]:
    """Return the model and a batch for each pattern."""
    with seeded(name, dtype):
        members, forward = PROGRAMS[name]
        model = Net(forward, **members()).eval()
        batches = {}
        for key, pattern in PATTERNS.items():
            x = torch.randn(N, T, D)
            given = (x, pattern(torch.arange(N * T).view(N, T)))
            batches[key] = (given, torch.randn(model(*given).shape))
    return model, batches


@pytest.mark.sampled
@pytest.mark.parametrize("order", ["none some", "some none", "all few none", "few none all some"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", PROGRAMS)
def test_hooks_answers_with_and_without_rows(name: str, dtype: torch.dtype, order: str) -> None:
    model, batches = build(name, dtype)
    scope = Scope(model, smooth, backend="hooks")
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    for k, key in enumerate(order.split()):
        found = scope.evaluate(Batch.of(*batches[key]), ordinal=k).gradients.dense()
        _, right = per_sample_gradients(model, smooth, *batches[key])
        assert found.keys() == right.keys()
        for parameter, rows in right.items():
            torch.testing.assert_close(
                found[parameter].double(), rows, rtol=tolerance, atol=tolerance, msg=parameter
            )


@pytest.mark.parametrize("backend", ["hooks", "auto"])
@pytest.mark.parametrize("order", ["none some", "none all", "some none few"])
def test_rows_that_are_pooled_over_samples_are_refused(order: str, backend: str) -> None:
    """Of rows that nobody has, nothing is known; of later ones it is."""

    def forward(net: Any, x: Tensor, kind: Tensor) -> Tensor:
        h = net.a(x)
        return h + net.b(h[kind]).tanh().sum(0)

    with seeded("pooled", torch.float64):
        model = Net(forward, a=linear(), b=linear())
        place = torch.arange(N * T).view(N, T)
        scope = Scope(model, smooth, backend=backend)
        with pytest.raises((CoupledSamplesError, RefusedError)):
            for k, key in enumerate(order.split()):
                given = (torch.randn(N, T, D), PATTERNS[key](place))
                batch = Batch.of(given, torch.randn(N, T, D))
                scope.evaluate(batch, ordinal=k, last=key == order.split()[-1])
