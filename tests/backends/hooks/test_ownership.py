"""Programs whose operations differ with the number of samples, or that use a sample's rows for all.

A loop over samples, one sample's row in place of a constant, a table that is looked up once for all
samples: which sample owns an entry is found by exact zeros in the gradients of one batch.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradscope.backends.hooks.graph.axes import OwnerPasses, binary
from gradscope.backends.hooks.graph.ownership import owned_axes
from gradscope.errors import RefusedError
from gradscope.scope import Scope
from tests.oracle import per_sample_gradients
from tests.zoo.base import Net, param, seeded, smooth

T, D = 3, 6
Forward = Callable[[Any, Tensor], Tensor]


def members() -> dict[str, Any]:
    return {
        "a": nn.Linear(D, D),
        "b": nn.Linear(D, D),
        "norm": nn.LayerNorm(D),
        "table": nn.Embedding(7, D),
        "scale": nn.Parameter(torch.tensor(0.7)),
        "token": param(1, 1, D),
        "gate": nn.Parameter(torch.zeros(())),
    }


def each_by_itself(net, x):
    return torch.stack([net.b(net.norm(net.a(row).tanh())) for row in x])


def numbers_of_each(net, x):
    return torch.stack([net.a(row).tanh().sum() * net.scale + net.scale.sin() for row in x])


def written_one_by_one(net, x):
    h, out = net.a(x).tanh(), x.new_zeros(x.shape[0], T, D)
    for k in range(len(x)):
        best = h[k, :, 0].topk(2).indices
        out[k, :2] = net.b(h[k][best]) * net.scale
    return out.sin()


def padded_to_the_longest(net, x):
    kept = [net.a(row[: 1 + int((row[:, 0] > 0).sum()) % T]).tanh() for row in x]
    rows = nn.utils.rnn.pad_sequence([net.b(t) + net.token[0] for t in kept], batch_first=True)
    return torch.cat([net.norm(rows.sum(1)), net.norm(x).mean(1)], 1)


def some_take_another_branch(net, x):
    rows = [
        net.b(row) if given[0, 0] > 0.7 else row * net.gate
        for given, row in zip(x, net.a(x).tanh(), strict=True)
    ]
    return torch.stack(rows) * net.scale


def a_token_of_another_sample(net, x):
    """Time and samples on one axis: a class token for each sample comes from the first rows."""
    n = len(x)
    frames = torch.cat([net.token.expand(n * T, -1, -1), net.a(x).view(n * T, 1, D)], 1)
    frames = net.norm(frames * net.scale + net.table.weight[:2])
    return torch.cat([frames[:n, 0], frames[:, 1].reshape(n, T * D)], 1).sin()


def looked_up_once_for_all(net, x):
    ids = (x[..., 0].detach().abs() * 10).long() % 7
    distinct, place = ids.unique(return_inverse=True)
    return net.a(net.b(net.table(distinct)).tanh()[place] * x).sin()


def in_groups_of_two(net, x):
    return torch.cat([net.b(net.a(part).tanh()) for part in x.split(2)])


INDEPENDENT = [
    each_by_itself,
    numbers_of_each,
    written_one_by_one,
    padded_to_the_longest,
    some_take_another_branch,
    a_token_of_another_sample,
    looked_up_once_for_all,
    in_groups_of_two,
]


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("forward", INDEPENDENT)
def test_hooks_answers_what_one_batch_shows(forward: Forward, dtype: torch.dtype) -> None:
    with seeded(forward.__name__, dtype):
        model = Net(forward, **members())
        inputs = [torch.randn(n, T, D) for n in (5, 5, 3, 4, 5)]
        batches = [(x, torch.randn(model(x).shape)) for x in inputs]
        scope = Scope(model, smooth, backend="hooks")
        tolerance = 1e-10 if dtype == torch.float64 else 1e-5
        for batch in batches:
            found = scope.per_sample_gradients(*batch)
            _, right = per_sample_gradients(model, smooth, *batch)
            for name, rows in right.items():
                torch.testing.assert_close(
                    found[name].double(), rows, rtol=tolerance, atol=tolerance, msg=name
                )


def carried_on(net, x, c):
    state, rows = 0.0, []
    for row in net.a(x).tanh():
        rows.append(net.b(row + c * state))
        state = state + row
    return torch.stack(rows)


def by_a_gate(net, x, c):
    h = net.a(x).tanh()
    return torch.stack([net.b(row + c * net.gate * h.mean(0)) for row in h])


def in_the_gradient_alone(net, x, c):
    h = net.a(x).tanh()
    mean = h.mean(0)
    return torch.stack([net.b(row + c * (mean - mean.detach())) for row in h])


def cut_from_the_graph(net, x, c):
    h = net.a(x).tanh()
    return torch.stack([net.b(row + c * h.mean(0).detach()) for row in h])


def looked_up_with_neighbours(net, x, c):
    ids = (x[..., 0].detach().abs() * 10).long() % 7
    distinct, place = ids.unique(return_inverse=True)
    rows = net.b(net.table(distinct)).tanh()
    return net.a((rows + c * rows.mean(0))[place] * x).sin()


COUPLED = [
    carried_on,
    by_a_gate,
    in_the_gradient_alone,
    cut_from_the_graph,
    looked_up_with_neighbours,
]


@pytest.mark.sampled
@pytest.mark.parametrize("share", [1e-6, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("forward", COUPLED)
def test_what_samples_share_is_refused(forward: Any, dtype: torch.dtype, share: float) -> None:
    with seeded(forward.__name__, dtype):
        model = Net(lambda net, x: forward(net, x, share), **members())
        x = torch.randn(5, T, D)
        for backend in ("hooks", "auto"):
            with pytest.raises(RefusedError):
                Scope(model, smooth, backend=backend).norms(x, torch.randn(model(x).shape))


@pytest.mark.parametrize(
    ("owners", "axes"),
    [
        ([[0, 0, 0], [2, 2, 2]], (0,)),
        ([[0, 1, -1], [0, 1, 2]], (1,)),
        ([[0, 1, 2], [1, 2, 0]], (0, 1)),
        ([[-1, 1, 1], [1, 1, -1]], (0,)),
        ([[-1, -1, -1], [-1, -1, -1]], (0,)),
    ],
)
def test_entries_have_owners_along_as_few_axes_as_will_do(
    owners: list[list[int]], axes: tuple[int, ...]
) -> None:
    owner = torch.tensor(owners)
    shared = torch.zeros_like(owner, dtype=torch.bool)
    assert owned_axes((owner, shared), tuple(owner.shape)) == axes
    shared[1, 1] = True
    assert owned_axes((owner, shared), tuple(owner.shape)) is None


@pytest.mark.parametrize("n", [2, 6, 50])
def test_what_two_samples_share_is_seen_whoever_they_are(n: int) -> None:
    some = OwnerPasses.of(torch.zeros(n), seed=0)
    for first in range(n):
        both = some.chosen | some.chosen[first]
        _, shared = some.owners(binary(both.T))
        assert shared.tolist() == [k != first for k in range(n)]
