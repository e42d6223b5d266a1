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
