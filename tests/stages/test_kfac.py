"""Kronecker factors against the factors written out, and against exact Fisher blocks."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import gradscope
from gradscope.blocks import DenseBlock, Gradients, MappedBlock, OuterBlock
from gradscope.core.batch import Batch
from gradscope.errors import UnsupportedError
from gradscope.stages.chain import bind
from gradscope.stages.reducers import kfac as module
from tests.stages.examples import DTYPES, MANY, compare, example, reducer, split, whole, wide


def written_out(grads: Gradients, positions: str) -> dict[str, np.ndarray]:
    """Sums over samples and positions, one outer product at a time."""
    found = {}
    for name, block in grads.items():
        outer = getattr(block, "outer", block)
        if not isinstance(outer, OuterBlock):
            found[f"{name}.diagonal"] = (np.abs(wide(block.dense())) ** 2).mean(0)
            continue
        left, right = wide(outer.left), wide(outer.right)
        _, k, t, _ = left.shape
        for word, factor, by in (("A", right, t if positions == "mean" else 1), ("B", left, 1)):
            moments = np.zeros((k, factor.shape[3], factor.shape[3]), factor.dtype)
            for i, g, s in np.ndindex(len(factor), k, t):
                moments[g] += np.outer(factor[i, g, s], factor[i, g, s].conj())
            found[f"{name}.{word}"] = moments.squeeze(0) / MANY if k == 1 else moments / MANY
            found[f"{name}.{word}"] /= by
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("positions", ["mean", "sum"])
def test_the_factors(positions: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    grads, _ = example(dtype)
    made = reducer(f"kfac:positions={positions}")
    right, rtol = written_out(grads, positions), 1e-5 if dtype == torch.float32 else 1e-12
    compare(whole(made, grads), right, rtol, 1e-13)
    for seed in range(5):
        compare(split(made, grads, seed), whole(made, grads), 1e-12, 1e-13)
    monkeypatch.setattr(module, "TILE_BYTES", 1)
    compare(whole(made, grads), right, rtol, 1e-13)


def run(model: nn.Module, chain: str, inputs: Any, targets: Any) -> dict[str, Tensor]:
    return gradscope.expectation(model, "mse", chain, inputs, targets, backend="hooks")


@pytest.mark.parametrize("weight", ["0.weight", "2.weight"])
def test_one_sample_without_sharing_has_its_exact_block(weight: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    batch = Batch.of(torch.randn(3, 4).double(), torch.randn(3, 2).double())
    rows = gradscope.per_sample_gradients(model, "mse", batch.inputs, batch.targets, backend="loop")
    made = reducer("kfac")
    grads = gradscope.Scope(model, "mse", backend="hooks").evaluate(batch).gradients
    found = made.result(made.start(grads.select(slice(1, 2))))
    g = rows[weight][1]
    a, b = found[f"{weight}.A"], found[f"{weight}.B"]
    row_by_row, column_by_column = g.flatten(), g.T.flatten()
    torch.testing.assert_close(torch.kron(b, a), torch.outer(row_by_row, row_by_row))
    torch.testing.assert_close(torch.kron(a, b), torch.outer(column_by_column, column_by_column))
    torch.testing.assert_close(found["0.bias.diagonal"], rows["0.bias"][1].square())


def test_a_last_batch_of_one_keeps_its_factors() -> None:
    model, x, y = convolved()
    scope, every, state = gradscope.Scope(model, "mse", backend="hooks"), Batch.of(x, y), None
    chain = bind("kfac")
    for part in (slice(0, 7), slice(7, 8)):
        state = chain.update(state, scope.evaluate(every.select(part)).gradients)
    for key, value in run(model, "kfac", x, y).items():
        torch.testing.assert_close(chain.result(state)[key], value, rtol=1e-10, atol=1e-14)


def convolved() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv1d(4, 6, 3, padding=1, groups=2), nn.Tanh(), nn.Flatten()).double()
    x = torch.randn(8, 4, 5).double()
    return model, x, torch.randn_like(model(x)).detach()


def test_a_grouped_convolution_is_not_off_by_its_positions() -> None:
    """A is the mean over pixels of the patches' moments, B the sum over pixels of b bᵀ."""
    model, x, y = convolved()
    found = run(model, "kfac", x, y)
    patches = F.pad(x, (1, 1)).unfold(2, 3, 1)  # (n, channel, pixel, 3)
    outputs = model[0](x)
    loss = F.mse_loss(outputs.tanh().flatten(1), y, reduction="none").mean(1).sum()
    (b,) = torch.autograd.grad(loss, outputs)
    for group in range(2):
        rows = patches[:, 2 * group : 2 * group + 2].transpose(1, 2).reshape(8 * 5, 6)
        torch.testing.assert_close(found["0.weight.A"][group], rows.T @ rows / (8 * 5))
        part = b[:, 3 * group : 3 * group + 3].transpose(1, 2).reshape(8 * 5, 3)
        torch.testing.assert_close(found["0.weight.B"][group], part.T @ part / 8)


def test_gradients_without_factors_are_refused() -> None:
    grads = Gradients({"w": DenseBlock(torch.ones(2, 3, 3)), "b": DenseBlock(torch.ones(2, 3))})
    with pytest.raises(UnsupportedError, match="none of w, b is") as caught:
        reducer("kfac").start(grads)
    assert "hooks" in str(caught.value)


def test_factors_in_one_batch_only_are_refused() -> None:
    block, bias = OuterBlock.matrix(torch.ones(2, 1, 3), torch.ones(2, 1, 4)), torch.ones(2, 3)
    made = reducer("kfac")
    rest = {"v": block, "b": DenseBlock(bias)}
    a = made.start(Gradients({"w": block, **rest}))
    b = made.start(Gradients({"w": MappedBlock(block, torch.abs), **rest}))
    with pytest.raises(UnsupportedError, match="w: an outer product in one batch"):
        made.merge(a, b)
