"""A single sample keeps its factors where a reducer reads them."""

import pytest
import torch

import gradscope


@pytest.mark.parametrize("chain", ["kfac", "kfac:bias=column", "ekfac"])
def test_batches_of_one_have_the_factors_of_larger_ones(chain: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    model.double()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    one = gradscope.expectation(model, "mse", chain, x[:1], y[:1])
    both = gradscope.expectation(model, "mse", chain, x[:1].repeat(2, 1), y[:1].repeat(2, 1))
    assert one.keys() == both.keys()
    for name in one:
        if not name.endswith("vectors"):  # of one eigenvalue there are many bases
            torch.testing.assert_close(one[name], both[name])
