"""Raw parameters: scales, tokens, tables, stacked weights, temperatures."""

import torch
from torch import nn

from tests.zoo.base import N, Net, Setup, case, param, program, regression


@program(lambda: ({"d": param(4), "e": param(6, 1)}, torch.randn(N, 6, 4)))
def parameter_as_denominator_and_exponent(net, x):
    return (x / (1 + net.d.square())).abs().add(0.1) ** net.e


@program(
    lambda: (
        {"a": nn.Linear(4, 7), "temperature": nn.Parameter(torch.tensor(0.3))},
        torch.randn(N, 4),
    )
)
def scalar_temperature(net, x):
    return (net.a(x) / net.temperature.exp()).softmax(-1)


@program(lambda: ({"mix": param(6), "a": nn.Linear(4, 3)}, torch.randn(N, 6, 4)))
def softmax_over_a_parameter(net, x):
    return torch.einsum("t,ntd->nd", net.mix.softmax(0), net.a(x).tanh())


@program(
    lambda: (
        {"token": param(1, 1, 4), "a": nn.Linear(4, 7), "b": nn.Linear(7, 3)},
        torch.randn(N, 6, 4),
    )
)
def class_token_by_expand(net, x):
    tokens = torch.cat([net.token.expand(len(x), -1, -1), x], 1)
    return net.b((net.a(tokens).tanh().cumsum(1)).tanh())


@program(lambda: ({"table": nn.Embedding(8, 4), "a": nn.Linear(4, 3)}, torch.randn(N, 6, 4)))
def position_ids_without_sample_axis(net, x):
    return net.a(x + net.table(torch.arange(x.shape[1], device=x.device))).tanh()


@case()
def position_ids_with_axis_of_one() -> Setup:
    def forward(net: nn.Module, x):
        return net.a((x + net.table(net.ids[:, : x.shape[1]])).tanh())

    ids = torch.arange(8).flip(0).unsqueeze(0)
    model = Net(forward, ids=ids, table=nn.Embedding(8, 4), a=nn.Linear(4, 3))
    return regression(model, torch.randn(N, 6, 4))


@program(lambda: ({"table": nn.Embedding(8, 4), "a": nn.Linear(4, 3)}, torch.randn(N, N, 4)))
def position_ids_expanded_to_the_batch(net, x):
    ids = torch.arange(x.shape[1], device=x.device).unsqueeze(0).expand(x.shape[0], -1)
    return net.a((x + net.table(ids)).tanh())


@program(
    lambda: ({"w": param(3, 4, 7), "bias": param(3, 7), "gate": nn.Linear(4, 3)}, torch.randn(N, 4))
)
def expert_weights_by_einsum(net, x):
    gate = net.gate(x).softmax(-1)
    return torch.einsum("ni,eio,ne->no", x, net.w, gate).tanh() + gate @ net.bias


@case()
def expert_weights_indexed() -> Setup:
    def forward(net: nn.Module, x, which):
        w = net.w[which]  # (n, i, o)
        return torch.bmm(x.unsqueeze(1), w).squeeze(1).tanh()

    inputs = (torch.randn(N, 4), torch.tensor([2, 0, 2, 1, 2]))
    return regression(Net(forward, w=param(3, 4, 7)), inputs)


@case()
def indexed_table_with_repeats() -> Setup:
    def forward(net: nn.Module, index):
        return (net.table[index].tanh() * net.weight.index_select(0, index[:, 0])[:, None]).sum(1)

    index = torch.tensor([[0, 3, 3], [1, 1, 1], [3, 0, 2], [4, 4, 0], [2, 2, 4]])
    return regression(Net(forward, table=param(6, 4), weight=param(6, 4)), index)


@case()
def gathered_parameter() -> Setup:
    def forward(net: nn.Module, x, index):
        rows = net.table.unsqueeze(0).expand(len(x), -1, -1)
        picked = rows.gather(1, index.unsqueeze(-1).expand(-1, -1, 4))
        return (picked * x.unsqueeze(1)).tanh()

    index = torch.tensor([[0, 3, 3], [1, 1, 1], [3, 0, 2], [4, 4, 0], [2, 2, 4]])
    return regression(Net(forward, table=param(6, 4)), (torch.randn(N, 4), index))


@program(
    lambda: (
        {"centres": param(7, 4), "width": param(7, scale=0.1), "out": param(7, 3)},
        torch.randn(N, 4),
    )
)
def distances_to_centres(net, x):
    squared = (x.unsqueeze(1) - net.centres).square().sum(-1)
    return (-squared * net.width.exp()).exp() @ net.out


@program(lambda: ({"a": param(3, 4), "b": param(4)}, torch.randn(N, 4)))
def parameters_joined_and_split(net, x):
    w = torch.cat([net.a, torch.stack([net.b, net.b.flip(0)])])
    first, second = w.split([3, 2])
    return (x @ first.T).tanh() @ x.new_ones(3, 6) + (x @ second.T).sin().repeat(1, 3)


@program(
    lambda: (
        {"up": param(4), "down": param(4), "low": nn.Parameter(torch.tensor(-0.8))},
        torch.randn(N, 6, 4),
    )
)
def parameter_through_where_and_clamp(net, x):
    return torch.where(x > 0, x * net.up, x * net.down).clamp(net.low, net.low + 2).tanh()


@case()
def cumsum_sort_and_gather_of_data() -> Setup:
    def forward(net: nn.Module, x, index):
        values = net.a(x).tanh().cumsum(1).sort(1).values
        return net.b(values.gather(1, index.unsqueeze(-1).expand(-1, -1, 7)))

    index = torch.tensor([[0, 3, 3], [1, 1, 1], [3, 0, 2], [4, 4, 0], [2, 2, 4]])
    model = Net(forward, a=nn.Linear(4, 7), b=nn.Linear(7, 3))
    return regression(model, (torch.randn(N, 6, 4), index))


@program(lambda: ({"decay": param(3), "b": param(4, 3), "c": param(3, 2)}, torch.randn(N, 6, 4)))
def low_rank_state_space(net, x):
    state, states = x.new_zeros(x.shape[0], 3), []
    for t in range(x.shape[1]):
        state = state * net.decay.sigmoid() + (x[:, t] @ net.b).tanh()
        states.append(state @ net.c)
    return torch.stack(states, 1)


@program(lambda: ({"bias": param(3, 1, 7), "weight": param(3, 4, 7)}, torch.randn(N, 3, 4)))
def stacked_expert_weights_with_bias(net, x):
    flat = x.transpose(0, 1)  # (3 experts, n, 4): the samples lie along the rows
    return torch.baddbmm(net.bias, flat, net.weight, beta=0.5, alpha=1.5).sum(0).tanh()
