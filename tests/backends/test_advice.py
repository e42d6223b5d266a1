"""What a backend says to do where it refuses a model: the backends it names compute its rows."""

import re

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import gradscope
from gradscope.errors import UnsupportedError
from tests.oracle import per_sample_gradients
from tests.zoo.base import Net, smooth


def _each(choose):
    return lambda net, x: torch.stack([choose(net, row) for row in x])


class Twice(Function):
    """Has no rule for vmap."""

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def _written(net, x):
    sums = torch.zeros(len(x), 3, dtype=x.dtype)
    sums[:, :] = net.a(x)
    return sums.tanh()


REFUSED = [
    ("vmap", _each(lambda net, row: net.a(row) * row.sum().item())),
    ("vmap", _each(lambda net, row: net.a(row).sin() if row.sum() > 0 else net.a(row).tanh())),
    ("vmap", _each(lambda net, row: net.a(row) * row[row > 0].sum())),
    ("vmap", _each(lambda net, row: net.a(row) * row.masked_select(row > 0).sum())),
    ("vmap", _each(lambda net, row: net.a(row) * row.tolist()[0])),
    ("vmap", _written),
    ("vmap", lambda net, x: Twice.apply(net.a(x))),
    ("vmap", lambda net, x: checkpoint(net.a, x, use_reentrant=False).tanh()),
    ("expand", _each(lambda net, row: net.a(row) * torch.tensor([1.0, row[1]])[1])),
]


@pytest.mark.parametrize(("backend", "forward"), REFUSED)
def test_the_backends_that_a_refusal_names_compute_the_rows(backend, forward):
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(5, k, dtype=torch.float64, generator=draw) for k in (4, 3))
    model = Net(forward, a=nn.Linear(4, 3)).double()
    with pytest.raises(UnsupportedError) as caught:
        gradscope.norms(model, smooth, x, y, backend=backend)
    named = re.findall(r'backend="(\w+)"', caught.value.remedy)
    _, right = per_sample_gradients(model, smooth, x, y)
    assert named
    for other in named:
        found = gradscope.per_sample_gradients(model, smooth, x, y, backend=other)
        for name, wanted in right.items():
            torch.testing.assert_close(found[name], wanted, rtol=1e-10, atol=1e-12)
