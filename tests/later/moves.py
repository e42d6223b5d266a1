"""Samples that are sorted, routed, masked, gathered or packed: in order in the first batch only."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.later.base import Batch, Net, Stage, case, program, rows, smooth


def _with(batches: list[Batch], *columns: list[list[float]]) -> list[Batch]:
    """Add inputs (n,) to each batch; whole numbers are lengths or indices."""
    found = []
    for (x, y), *values in zip(batches, *columns, strict=True):
        found.append(((x, *(torch.tensor(v) for v in values)), y))
    return found


IN_ORDER = [[4, 3, 2, 1, 0], [0, 4, 1, 3, 2], [2, 2, 1, 4, 0]]
TASKS = [[0, 0, 1, 1, 1], [1, 0, 1, 0, 0], [1, 1, 1, 0, 0]]


def _two_layers(**more: object) -> dict[str, object]:
    return {"a": nn.Linear(4, 7), "b": nn.Linear(7, 3), **more}


def _sorted(net: nn.Module, x: Tensor, key: Tensor) -> Tensor:
    order = key.argsort(descending=True, stable=True)
    return net.b(net.a(x[order]).tanh())[order.argsort()]


@case("moves")
def sorted_by_length() -> Stage:
    return Stage(Net(_sorted, **_two_layers()), smooth, _with(rows(5, 5, 5), IN_ORDER))


@case("moves")
def nearly_sorted_by_length() -> Stage:
    """The first, the middle and the last sample are in place."""
    lengths = [
        [10, 8, 9, 7, 6, 4, 5, 3, 1],
        [9, 8, 7, 6, 5, 4, 3, 2, 1],
        [1, 2, 3, 4, 5, 6, 7, 8, 9],
    ]
    return Stage(Net(_sorted, **_two_layers()), smooth, _with(rows(9, 9, 9), lengths))


@case("moves")
def sorted_by_a_feature_with_ties() -> Stage:
    keys = [[1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 2.0, 1.0]]
    return Stage(Net(_sorted, **_two_layers()), smooth, _with(rows(4, 4, 4), keys))


@program("moves", lambda: (_two_layers(), _with(rows(5, 5, 5), IN_ORDER)))
def gathered_and_scattered(net, x, key):
    order = key.argsort(descending=True)
    h = net.a(x.gather(0, order[:, None].expand_as(x))).tanh()
    return net.b(torch.zeros_like(h).scatter(0, order[:, None].expand_as(h), h))


@program(
    "moves",
    lambda: (
        {"first": nn.Linear(4, 7), "second": nn.Linear(4, 7), "b": nn.Linear(7, 3)},
        _with(rows(5, 5, 5), TASKS),
    ),
)
def routed_by_task_and_concatenated(net, x, task):
    order = torch.cat([(task == 0).nonzero(), (task == 1).nonzero()]).squeeze(1)
    h = torch.cat([net.first(x[task == 0]), net.second(x[task == 1])]).tanh()
    return net.b(h[order.argsort()])


@case("moves")
def top_one_experts() -> Stage:
    def forward(net, x, task):
        out = x.new_zeros(len(x), 3)
        for k, expert in enumerate(net.experts):
            mine = (task == k).nonzero().squeeze(1)
            out = out.index_add(0, mine, expert(x[mine]).tanh())
        return out

    experts = nn.ModuleList(nn.Linear(4, 3) for _ in range(2))
    return Stage(Net(forward, experts=experts), smooth, _with(rows(5, 5, 5), TASKS))


@case("moves")
def entries_flattened_by_a_mask() -> Stage:
    def forward(net, x, length):
        mask = torch.arange(x.shape[1]) < length[:, None]
        out = x.new_zeros(*x.shape[:2], 3)
        out[mask] = net.b(net.a(x[mask]).tanh())
        return out.sum(1)

    lengths = [[3, 3, 3, 3], [5, 1, 4, 2], [1, 6, 3, 2]]
    batches = [(torch.randn(4, 6, 4), torch.randn(4, 3)) for _ in range(3)]
    return Stage(Net(forward, **_two_layers()), smooth, _with(batches, lengths))


@program("moves", lambda: (_two_layers(), _with(rows(4, 4), [[0, 0, 0, 0], [1, 0, 2, 0]])))
def rolled_by_the_data(net, x, shift):
    k = int(shift.sum()) % len(x)
    return net.b(net.a(x.roll(k, 0)).tanh()).roll(-k, 0)


@program("moves", lambda: (_two_layers(), _with(rows(5, 5, 5), IN_ORDER)))
def permuted_by_a_matrix(net, x, key):
    p = torch.eye(len(x), dtype=x.dtype)[key.argsort(descending=True)]
    return p.T @ net.b(net.a(p @ x).tanh())


@case("moves")
def swapped_where_a_flag_is_set() -> Stage:
    def forward(net, x, flag):
        swap = (flag.sum() > 0).reshape(1, 1)
        h = net.a(torch.where(swap, x.flip(0), x)).tanh()
        return net.b(torch.where(swap, h.flip(0), h))

    flags = [[0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 0, 0]]
    return Stage(Net(forward, **_two_layers()), smooth, _with(rows(4, 4, 4), flags))


class Permuted(torch.autograd.Function):
    """Rows in another order, by a function whose name torch gives to a view."""

    @staticmethod
    def forward(ctx, x, order):
        ctx.save_for_backward(order)
        return x[order]

    @staticmethod
    def backward(ctx, gradient):
        (order,) = ctx.saved_tensors
        return gradient[order.argsort()], None


Permuted.__name__ = "Permute"


@program("moves", lambda: (_two_layers(), _with(rows(5, 5, 5), IN_ORDER)))
def permuted_by_a_function(net, x, key):
    order = key.argsort(descending=True)
    return net.b(Permuted.apply(net.a(Permuted.apply(x, order)).tanh(), order.argsort()))


@program("moves", lambda: (_two_layers(), _with(rows(5, 5, 5), IN_ORDER)))
def sorted_under_a_checkpoint(net, x, key):
    return checkpoint(lambda x, key: _sorted(net, x, key), x, key, use_reentrant=False)


@case("moves")
def moved_by_numpy_and_back_in_the_loss() -> Stage:
    def forward(net, x, key):
        order = np.argsort(-key.numpy(), kind="stable")
        return net.b(net.a(x[order]).tanh()), torch.from_numpy(order)

    def loss(outputs, targets):
        values, order = outputs
        return smooth(values, targets[order])[order.argsort()]

    return Stage(Net(forward, **_two_layers()), loss, _with(rows(5, 5, 5), IN_ORDER))


@program("moves", lambda: (_two_layers(), _with(rows(5, 5, 5), IN_ORDER)))
def copied_into_place(net, x, key):
    order = key.argsort(descending=True)
    h = net.a(x.index_select(0, order)).tanh()
    return net.b(torch.empty_like(h).index_copy(0, order, h))


@case("moves")
def packed_by_length() -> Stage:
    def forward(net, x, length):
        packed = nn.utils.rnn.pack_padded_sequence(x, length, True, enforce_sorted=False)
        return net.b(net.rnn(packed)[1][0])

    lengths = [[4, 4, 4, 4], [2, 5, 1, 3], [1, 2, 6, 4]]
    batches = [(torch.randn(4, 6, 4), torch.randn(4, 3)) for _ in range(3)]
    model = Net(forward, rnn=nn.GRU(4, 7, batch_first=True), b=nn.Linear(7, 3))
    return Stage(model, smooth, _with(batches, lengths))


@case("moves")
def time_major_and_sorted() -> Stage:
    def forward(net, x, key):
        order = key.argsort(descending=True)
        s = x[order].transpose(0, 1).reshape(-1, 4)
        h = net.a(s).tanh().reshape(x.shape[1], len(x), 7).transpose(0, 1)
        return net.b(h.sum(1))[order.argsort()]

    batches = [(torch.randn(5, 6, 4), torch.randn(5, 3)) for _ in range(3)]
    return Stage(Net(forward, **_two_layers()), smooth, _with(batches, IN_ORDER))


@case("moves")
def the_last_positions_of_sequences() -> Stage:
    """An index over the samples in order: nothing moves, in any batch."""

    def forward(net, x, length):
        h = net.a(x).tanh()
        return net.b(h[torch.arange(len(x)), length - 1])

    lengths = [[6, 6, 6, 6], [2, 5, 1, 3], [1, 2, 6, 4]]
    batches = [(torch.randn(4, 6, 4), torch.randn(4, 3)) for _ in range(3)]
    return Stage(Net(forward, **_two_layers()), smooth, _with(batches, lengths))


def _stack(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / 2)


def _experts() -> tuple[dict[str, object], list[Batch]]:
    """Two of four experts a token; a shift of the router leaves some of them empty later on."""
    members = {"a": nn.Linear(4, 6), "route": nn.Linear(6, 4, bias=False), "b": nn.Linear(6, 3)}
    stacks = {"up": _stack(4, 5, 6), "down": _stack(4, 6, 5)}
    given = [(torch.randn(4, 3, 4), torch.randn(4, 3)) for _ in range(3)]
    shifts = [[0.0] * 4, [9.0, 9.0, 0.0, 0.0], [0.0, 9.0, 0.0, 9.0]]
    shifted = [((x, torch.tensor([s] * 4)), y) for (x, y), s in zip(given, shifts, strict=True)]
    return {**members, **stacks}, shifted


def _routed(net, x, shift):
    """Return tokens (n·3, 6), and which two experts (n·3, 2) get them by how much."""
    h = net.a(x).tanh()
    logits = net.route(h) + shift.unsqueeze(1)
    top, which = logits.softmax(2).flatten(0, 1).topk(2)
    return h.flatten(0, 1), top / top.sum(1, keepdim=True), which


def _pooled(net, tokens, n):
    return net.b(tokens.view(n, 3, 6).mean(1))


@program("moves", _experts)
def two_of_four_stacked_experts_in_a_loop(net, x, shift):
    tokens, top, which = _routed(net, x, shift)
    out = torch.zeros_like(tokens)
    for e in range(4):
        row, place = (which == e).nonzero(as_tuple=True)
        h = nn.functional.linear(tokens[row], net.up[e]).relu()
        h = nn.functional.linear(h, net.down[e]) * top[row, place, None]
        out = out.index_add(0, row, h)
    return _pooled(net, out, len(x))


@program("moves", _experts)
def two_of_four_experts_sorted_and_put_back(net, x, shift):
    """Each pair of token and expert has the expert's own matrix."""
    tokens, top, which = _routed(net, x, shift)
    expert, order = which.flatten().sort(stable=True)
    h = torch.bmm(net.up[expert], tokens[order // 2].unsqueeze(2)).relu()
    h = torch.bmm(net.down[expert], h).squeeze(2) * top.flatten()[order].unsqueeze(1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return _pooled(net, h[back].view(-1, 2, 6).sum(1), len(x))


@program("moves", _experts)
def experts_with_places_that_nobody_takes(net, x, shift):
    """Rows of zeros at the end belong to no sample."""
    tokens, top, which = _routed(net, x, shift)
    room = torch.cat([tokens, tokens.new_zeros(len(tokens), 6)])
    h = nn.functional.linear(nn.functional.linear(room, net.up[0]).relu(), net.down[0])
    return _pooled(net, h[which[:, 0] * 0 + torch.arange(len(tokens))] * top[:, :1], len(x))


def _graphs() -> tuple[dict[str, object], list[Batch]]:
    """All nodes of all graphs in one axis; whose they are differs from batch to batch."""
    members = {"a": nn.Linear(4, 6), "m": nn.Linear(12, 6), "n": nn.LayerNorm(6)}
    members["b"] = nn.Linear(6, 3)
    batches = []
    for counts in ([5, 5, 5, 5], [1, 5, 2, 4], [2, 1, 1, 5]):
        x, adjacent = torch.randn(4, 5, 4), torch.rand(4, 5, 5) < 0.4
        here = torch.arange(5) < torch.tensor(counts).unsqueeze(1)
        adjacent = adjacent & here.unsqueeze(1) & here.unsqueeze(2)
        batches.append(((x, adjacent, torch.tensor(counts)), torch.randn(4, 3)))
    return members, batches


@program("moves", _graphs)
def packed_graphs(net, x, adjacent, counts):
    here = torch.arange(x.shape[1]) < counts.unsqueeze(1)
    graph, start = here.nonzero()[:, 0], counts.cumsum(0) - counts
    g, i, j = adjacent.nonzero(as_tuple=True)
    source, target = start[g] + i, start[g] + j
    h = net.a(x[here]).tanh()
    message = net.m(torch.cat([h[source], h[target]], 1)).relu()
    h = net.n(h + torch.zeros_like(h).index_add(0, target, message))
    at = graph.unsqueeze(1).expand_as(h)
    return net.b(h.new_zeros(len(x), 6).scatter_add(0, at, h))
