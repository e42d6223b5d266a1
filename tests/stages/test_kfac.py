"""Kronecker factors against the factors written out, and against exact Fisher blocks."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import gradscope
from gradscope.backends.base import Request
from gradscope.blocks import DenseBlock, Gradients, MappedBlock, OuterBlock, segmented
from gradscope.core.batch import Batch
from gradscope.engine.chains import bind
from gradscope.errors import UnsupportedError
from gradscope.stages.reducers import kfac as module
from tests.stages.examples import (
    DTYPES,
    MANY,
    accumulated,
    compare,
    example,
    reducer,
    split,
    whole,
    wide,
)


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
    scope, every = gradscope.Scope(model, "mse", backend="hooks"), Batch.of(x, y)
    parts = [every.select(part) for part in (slice(0, 7), slice(7, 8))]
    found = accumulated(bind("kfac"), [(scope.evaluate(part).gradients,) for part in parts])
    for key, value in run(model, "kfac", x, y).items():
        torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-14)


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
    with pytest.raises(UnsupportedError, match="gradients of w, b are not") as caught:
        reducer("kfac").start(grads)
    assert "hooks" in str(caught.value)


def test_factors_in_one_batch_only_are_refused() -> None:
    block, bias = OuterBlock.matrix(torch.ones(2, 1, 3), torch.ones(2, 1, 4)), torch.ones(2, 3)
    made = reducer("kfac")
    rest = {"v": block, "b": DenseBlock(bias)}
    a = made.start(Gradients({"w": block, **rest}))
    b = made.start(Gradients({"w": MappedBlock(block, torch.abs), **rest}))
    with pytest.raises(UnsupportedError, match="the gradient of w is an outer product"):
        made.merge(a, b)


LENGTHS = (2, 3, 0, 4, 6)


class Padded(nn.Module):
    """A layer on sequences (n, t, 3), of which a mask (n, t) says what counts."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        self.layer = layer
        self.w, self.v = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(3, 2))
        self.conv, self.back = nn.Conv1d(3, 2, 1), nn.ConvTranspose1d(3, 2, 1, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        match self.layer:
            case "linear":
                out = x @ self.w.t()
            case "inputs first":
                out = x @ self.v
            case "convolution":
                out = self.conv(x.mT).mT
            case "transposed":
                out = self.back(x.mT).mT
            case "tied":  # the weight is used in both directions
                out = (x @ self.w.t()).tanh() @ self.w
        return (out * mask.unsqueeze(-1)).sum(1)


def padded(padding: float, t: int = 6) -> tuple[Tensor, Tensor]:
    """Return sequences (5, t, 3) and their mask (5, t), the rest filled with `padding`."""
    torch.manual_seed(2)
    x, mask = torch.randn(5, 6, 3), torch.arange(6) < torch.tensor(LENGTHS)[:, None]
    return x.masked_fill(~mask.unsqueeze(-1), padding)[:, :t], mask[:, :t].float()


def by_hand(model: Padded, x: Tensor, mask: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Moments over the positions of a mask, as the docs define them, in float64."""
    real, count, n = mask.bool(), mask.sum(), len(x)
    x = x.double()
    slopes = (torch.softmax(model(x, mask), -1) - F.one_hot(y, model(x, mask).shape[-1])).detach()
    inside = slopes.unsqueeze(1).expand(*mask.shape, -1)[real]  # the gradient of each position
    a, b = x[real], inside
    if model.layer == "tied":
        hidden = (x @ model.w.t()).tanh().detach()[real]
        back = (b @ model.w.t()).detach() * (1 - hidden**2)
        left, right = torch.cat([back, hidden]), torch.cat([a, b])
        return {"w.A": right.T @ right / (2 * count), "w.B": left.T @ left / n}
    names = {"linear": "w", "convolution": "conv.weight", "transposed": "back.weight"}
    name = names.get(model.layer, "v")
    straight = model.layer in ("linear", "convolution")
    left, right = (b, a) if straight else (a, b)
    return {f"{name}.A": right.T @ right / count, f"{name}.B": left.T @ left / n}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layer", ["linear", "inputs first", "convolution", "transposed", "tied"])
def test_padding_does_not_count(layer: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    model = Padded(layer).to(dtype)
    y = torch.tensor([0, 1, 1, 0, 1])
    x, mask = padded(0.0)
    expected = by_hand(copy.deepcopy(model).double(), x, mask.double(), y)
    for padding in (0.0, 100.0):
        x, mask = padded(padding)
        with gradscope.Scope(model, "cross_entropy", backend="hooks") as scope:
            found = scope.expectation("kfac", (x.to(dtype), mask.to(dtype)), y)
        for key, value in expected.items():
            close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {}
            torch.testing.assert_close(found[key].double(), value, **close)


@pytest.mark.parametrize("chain", ["kfac", "kfac:positions=sum", "kfac:bias=column", "ekfac"])
@pytest.mark.parametrize("layer", ["linear", "convolution", "tied"])
def test_batches_padded_to_other_lengths(layer: str, chain: str) -> None:
    torch.manual_seed(1)
    model, y = Padded(layer).double(), torch.tensor([0, 1, 1, 0, 1])
    x, mask = (t.double() for t in padded(7.0))
    whole = gradscope.expectation(model, "cross_entropy", chain, (x, mask), y, backend="hooks")
    bound, parts = bind(chain), []
    with gradscope.Scope(model, "cross_entropy", backend="hooks") as scope:
        if bound.first_pass is not None:
            first = scope.expectation("kfac:bias=column,full=512", (x, mask), y)
            bound = bound.given(first)
        for rows, t in ((slice(0, 3), 3), (slice(3, 4), 4), (slice(4, 5), 6)):
            cut = tuple(v.double()[rows] for v in padded(-50.0, t))
            evaluated = scope.evaluate(Batch.of(cut, y[rows]), Request(factors=True))
            parts.append((evaluated.gradients,))
    for key, value in accumulated(bound, parts).items():
        if not key.endswith("vectors"):
            torch.testing.assert_close(value, whole[key], rtol=1e-10, atol=1e-14)


def test_the_column_of_a_bias_counts_real_positions() -> None:
    torch.manual_seed(1)
    model, y = Padded("convolution").double(), torch.tensor([0, 1, 1, 0, 1])
    x, mask = (t.double() for t in padded(9.0))
    with gradscope.Scope(model, "cross_entropy", backend="hooks") as scope:
        found = scope.expectation("kfac:bias=column", (x, mask), y)["conv.weight.A"]
    rows = torch.cat([x, torch.ones(5, 6, 1)], -1)[mask.bool()]
    torch.testing.assert_close(found, rows.T @ rows / len(rows))


def test_ignored_tokens_do_not_count() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)).double()
    tokens = torch.randint(9, (4, 6))
    labels = tokens.masked_fill(torch.arange(6) >= torch.tensor([[6], [4], [1], [2]]), -100)
    real = labels[:, 1:] != -100  # of the third sample none
    a = model[0](tokens)[:, :-1][real].detach()
    for labelled in ("data", "sampled"):
        with gradscope.Scope(model, "causal_lm", backend="hooks", labels=labelled) as scope:
            found = scope.expectation("kfac", tokens, labels)["1.weight.A"]
        torch.testing.assert_close(found, a.T @ a / len(a))


def test_rows_of_tokens_count_where_their_loss_does() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2)).double()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        values = F.cross_entropy(outputs.mT, targets.clamp(min=0), reduction="none")
        return values * (targets >= 0)

    x, y = torch.randn(3, 5, 3).double(), torch.randint(2, (3, 5))
    y[0, 3:] = y[1, 1:] = -1
    with gradscope.Scope(model, loss, backend="hooks", rows="token") as scope:
        found = scope.expectation("kfac", x, y)["0.weight.A"]
    seen = x[y >= 0]
    torch.testing.assert_close(found, seen.T @ seen / len(seen))


def test_ragged_rows_count_one_by_one() -> None:
    torch.manual_seed(1)
    left, right = torch.randn(7, 2).double(), torch.randn(7, 3).double()
    left[[1, 5]] = 0
    sample = torch.tensor([0, 0, 1, 1, 1, 2, 2])
    for turned, pair, shape in ((False, (left, right), (2, 3)), (True, (right, left), (3, 2))):
        block = segmented((*pair, sample, torch.zeros_like(sample)), (4, 1), shape, turned)
        blocks = block, block.transpose(0, 1), block.select(torch.arange(4).flip(0))
        for made, flipped in zip(blocks, (turned, not turned, turned), strict=True):
            found = reducer("kfac").result(reducer("kfac").start(Gradients({"w": made})))
            rows = {"A": left, "B": right} if flipped else {"A": right, "B": left}
            kept = [0, 2, 3, 4, 6]
            torch.testing.assert_close(found["w.A"], rows["A"][kept].T @ rows["A"][kept] / 5)
            torch.testing.assert_close(found["w.B"], rows["B"][kept].T @ rows["B"][kept] / 4)


def test_no_position_counts() -> None:
    """Activations that are not finite where no gradient arrives reach no factor."""
    right = torch.full((3, 2, 4), torch.nan)
    grads = Gradients({"w": OuterBlock.matrix(torch.zeros(3, 2, 5), right)})
    found = reducer("kfac").result(reducer("kfac").start(grads))
    assert not found["w.A"].any() and not found["w.B"].any()


def test_groups_count_by_themselves() -> None:
    torch.manual_seed(1)
    left, right = torch.randn(3, 2, 4, 5).double(), torch.randn(3, 2, 4, 6).double()
    left[:, 0, 2:] = 0
    found = reducer("kfac").result(
        reducer("kfac").start(Gradients({"w": OuterBlock(left, right, (10, 6))}))
    )["w.A"]
    for group, rows in enumerate((right[:, 0, :2].reshape(6, 6), right[:, 1].reshape(12, 6))):
        torch.testing.assert_close(found[group], rows.T @ rows / len(rows))


def long_sequences(scale: float = 1.0) -> tuple[Gradients, np.ndarray, np.ndarray]:
    """Return gradients of a layer (300, 140) with its bias in float32, and (b) and (a, 1)."""
    torch.manual_seed(4)
    left, right = torch.randn(6, 200, 300) * scale, torch.randn(6, 200, 140).exp()
    left[:, 150:] = 0.0
    left[3] = 0.0
    right[0, 160] = torch.nan  # a position that does not count
    blocks = {"l.weight": OuterBlock.matrix(left, right), "l.bias": DenseBlock(left.sum(1))}
    inside = [0, 1, 2, 4, 5]
    a, b = (f[inside, :150].flatten(0, 1).double().numpy() for f in (right, left))
    return Gradients(blocks), b, np.concatenate([a, np.ones((len(a), 1))], 1)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e-25], ids=["float32", "out of range"])
def test_long_rows_have_the_sums_of_float64(scale: float, in_place: bool) -> None:
    """Within 1e-6 of √(Aᵢᵢ Aⱼⱼ), also if float32 cannot hold the squares."""
    gradients, b, a = long_sequences(scale)
    made = reducer("kfac:bias=column")
    assert made.add is not None
    if in_place:
        state = made.add(gradients.select(slice(0, 2)), {})
        state = made.add(gradients.select(slice(2, 6)), state)
    else:
        state = made.merge(*(made.start(gradients.select(s)) for s in (slice(0, 4), slice(4, 6))))
    before = {key: value.clone() for key, value in state.items()}
    found = made.result(state)
    assert all(torch.equal(state[key], value) for key, value in before.items())
    for name, rows, count in (("A", a, len(a)), ("B", b, 6)):
        right = rows.T @ rows / count
        root = np.sqrt(np.diag(right))
        np.testing.assert_array_less(
            np.abs(found[f"l.weight.{name}"].numpy() - right), 1e-6 * np.outer(root, root)
        )
        assert torch.equal(found[f"l.weight.{name}"], found[f"l.weight.{name}"].mT)
