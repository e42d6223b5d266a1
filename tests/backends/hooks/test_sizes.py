"""Values without entries, and parameters without axes: rows as a batch of one has them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from gradscope.blocks import DenseBlock, OuterBlock, ScatterBlock
from gradscope.scope import Scope
from tests import oracle

N, D = 3, 4
Forward = Callable[..., Tensor]

# how a number (), the only parameter, reaches the samples (n, 4)
NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "as_it_is": lambda w: w,
    "transposed": lambda w: w.transpose(0, 0),
    "transposed_by_a_negative_axis": lambda w: w.swapaxes(-1, 0),
    "turned": lambda w: w.t(),
    "permuted": lambda w: w.permute(()),
    "moved": lambda w: w.movedim(0, 0),
    "flipped": lambda w: w.flip(()),
    "expanded": lambda w: w.expand(D),
    "unsqueezed": lambda w: w.unsqueeze(0),
    "squeezed": lambda w: w.squeeze(),
    "squeezed_along_an_axis": lambda w: w.squeeze(0),
    "viewed": lambda w: w.view(1, 1).view(()),
    "flattened": lambda w: w.flatten(),
    "stacked": lambda w: torch.stack([w, w.square(), w, w]),
    "summed": lambda w: w.sum(0),
    "accumulated": lambda w: w.cumsum(0),
    "normalised": lambda w: w / w.norm(),
    "repeated": lambda w: w.repeat(D),
    "cast": lambda w: w.double().transpose(0, 0),
    "gathered": lambda w: w.gather(0, torch.tensor(0)),
    "rolled": lambda w: w[None].roll(1, 0)[0],
}


def beside(made: Tensor, x: Tensor, v: Tensor) -> Tensor:
    """Return what was made next to the product of inputs and v (4,)."""
    return torch.cat([made.flatten(1), x * v], 1)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


# of inputs (n, 4), a parameter v (4,), and parameters of the shapes behind
EMPTY: dict[str, tuple[Forward, tuple[tuple[int, ...], ...]]] = {
    "product": (lambda x, v, w: beside(x[:, :0] * w, x, v), ((0,),)),
    "sum": (lambda x, v, w: beside(x[:, :0] + w, x, v), ((0,),)),
    "power": (lambda x, v, w: beside(x[:, :0] ** w, x, v), ((0,),)),
    "power_of_a_number": (lambda x, v, w: beside(x[:, :0] ** w, x, v), ((),)),
    "cat_of_parameters": (lambda x, v, w: x * torch.cat([w, v, w]), ((0,),)),
    "stack_of_parameters": (
        lambda x, v, w: beside(x[:, :0] * torch.stack([w, w])[1], x, v),
        ((0,),),
    ),
    "linear_without_inputs": (
        lambda x, v, w, b: beside(F.linear(x[:, :0], w, b), x, v),
        ((2, 0), (2,)),
    ),
    "linear_without_outputs": (
        lambda x, v, w, b: beside(F.linear(x, w, b), x, v),
        ((0, 4), (0,)),
    ),
    "product_without_columns": (lambda x, v, w: beside(x @ w, x, v), ((4, 0),)),
    "transposed_product": (lambda x, v, w: beside(x[:, :0] @ w.T, x, v), ((2, 0),)),
    "permuted_product": (
        lambda x, v, w: beside(x[:, :0] @ w.permute(1, 0, 2)[..., 0], x, v),
        ((2, 0, 1),),
    ),
    "viewed_product": (lambda x, v, w: beside(x[:, :0] @ w.view(0, 2), x, v), ((2, 0),)),
    "matrix_of_a_stack": (lambda x, v, w: beside(x[:, :0] @ w[1], x, v), ((3, 0, 2),)),
    "einsum": (
        lambda x, v, w: beside(torch.einsum("ni,ij->nj", x[:, :0], w), x, v),
        ((0, 2),),
    ),
    "convolution_without_space": (
        lambda x, v, w: beside(F.conv1d(x.view(-1, 2, 2), w)[:, :, :0], x, v),
        ((3, 2, 1),),
    ),
    "embedding_without_features": (
        lambda x, v, w: beside(F.embedding((x > 1).long(), w), x, v),
        ((2, 0),),
    ),
    "embedding_of_no_tokens": (
        lambda x, v, w: beside(F.embedding((x > 1).long()[:, :0], w), x, v),
        ((2, 3),),
    ),
    "layer_norm_of_nothing": (
        lambda x, v, w, b: beside(F.layer_norm(x[:, :0], (0,), w, b), x, v),
        ((0,), (0,)),
    ),
    "layer_norm_of_no_tokens": (
        lambda x, v, w, b: beside(F.layer_norm(x.unsqueeze(1)[:, :0], (4,), w, b), x, v),
        ((4,), (4,)),
    ),
    "rms_norm_of_nothing": (lambda x, v, w: beside(F.rms_norm(x[:, :0], (0,), w), x, v), ((0,),)),
    "batch_norm_without_space": (
        lambda x, v, w, b: beside(
            F.batch_norm(x.unsqueeze(2)[:, :, :0], ones(4), ones(4), w, b), x, v
        ),
        ((4,), (4,)),
    ),
    "prelu": (lambda x, v, w: beside(F.prelu(x.unsqueeze(2)[:, :, :0], w), x, v), ((4,),)),
    "flipped": (
        lambda x, v, w: beside((x.view(-1, 4, 1, 1) * w).flip((1,)).square(), x, v),
        ((4, 0, 3),),
    ),
    "sorted": (
        lambda x, v, w: beside((x * v)[x[:, 0].argsort()][:, :0] * w, x, v),
        ((0,),),
    ),
    "sorted_matrices": (
        lambda x, v, w: beside(x[x[:, 0].argsort()].unsqueeze(2) * w, x, v),
        ((0,),),
    ),
}


class Net(nn.Module):
    def __init__(self, forward: Forward, shapes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        every = (torch.rand(shape, dtype=torch.float64) + 0.5 for shape in shapes)
        self.own, self.parts = forward, nn.ParameterList(map(nn.Parameter, every))

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x, *self.parts)


def loss(outputs: Tensor, _: Tensor) -> Tensor:
    factors = torch.arange(1, outputs.shape[1] + 1, dtype=outputs.dtype)
    return (outputs.square() * factors + outputs).sum(1)


def require_right(forward: Forward, shapes: tuple[tuple[int, ...], ...]) -> None:
    """In a first batch, a later one and a batch of one; by rows, norms and sums."""
    torch.manual_seed(4)
    model, x, y = Net(forward, shapes), torch.rand(2 * N, D, dtype=torch.float64) + 0.5, ones(N)
    with Scope(model, loss, backend="hooks") as scope:
        for rows in (slice(0, N), slice(N, 2 * N), slice(0, 1)):
            given, targets = x[rows], y[: len(x[rows])]
            _, wanted = oracle.per_sample_gradients(model, loss, given, targets)
            found = scope.per_sample_gradients(given, targets)
            squares = scope.expectation("square | mean", given, targets)
            for name, value in wanted.items():
                torch.testing.assert_close(found[name], value)
                torch.testing.assert_close(squares[name], value.square().mean(0))
            flat = torch.cat([value.unsqueeze(-1).flatten(1) for value in wanted.values()], 1)
            torch.testing.assert_close(scope.norms(given, targets), flat.norm(dim=1))


@pytest.mark.parametrize("name", NUMBERS)
def test_parameters_without_axes(name):
    require_right(lambda x, w: x * NUMBERS[name](w), ((),))


@pytest.mark.parametrize("name", EMPTY)
def test_values_without_entries(name):
    forward, shapes = EMPTY[name]
    require_right(forward, ((D,), *shapes))


@pytest.mark.parametrize("chain", ["project:dim=2 | mean", "ekfac", "kfac", "gram", "std", "max"])
def test_chains_over_parameters_without_entries(chain):
    """What is asked of all parameters together is that of the others."""

    def forward(x: Tensor, v: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.linear(x[:, :0], w, b) + F.linear(x, v)

    model, x = Net(forward, ((2, D), (2, 0), (2,))), torch.rand(N, D, dtype=torch.float64)
    with Scope(model, loss, backend="hooks") as scope:
        found = scope.expectation(chain, x, ones(N))
    assert all(bool(value.isfinite().all()) for value in found.values())


def test_blocks_without_axes_or_entries():
    number = DenseBlock(torch.arange(3.0))
    assert number.transpose(0, -1).dense().tolist() == [0.0, 1.0, 2.0]
    table = ScatterBlock(torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2, 0), 5)
    assert table.dense().shape == (3, 5, 0)
    assert table.squared_norms().tolist() == [0.0] * 3
    product = OuterBlock.matrix(torch.ones(3, 1, 2), torch.ones(3, 1, 0))
    assert [values.numel() for *_, values in product.pieces()] == [0]
