"""Inner products of all pairs of samples, from factors that are kept as they are."""

import random
from math import prod

import numpy as np
import pytest
import torch

import gradscope
from gradscope.blocks import DenseBlock, Gradients, OuterBlock, ScatterBlock
from tests.stages.examples import DTYPES, MANY, Draw, compare, example, flat, reducer, run, split

GRAM = reducer("gram")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_in_the_order_of_the_index(dtype: torch.dtype) -> None:
    grads, rows = example(dtype)
    order = torch.randperm(MANY, generator=torch.Generator().manual_seed(2))
    mixed = Gradients(grads.select(order), order)  # sample `order[j]` of a data set comes j-th
    right = flat(rows) @ flat(rows).conj().T
    for seed in range(4):
        compare(split(GRAM, mixed, seed), {"gram": right}, 1e-5 if dtype == DTYPES[0] else 1e-11)


def test_without_an_index_rows_stay_as_they_come() -> None:
    values = torch.randn(6, 4, dtype=torch.float64)
    a, b, c = (GRAM.start(Gradients({"w": DenseBlock(v)})) for v in values.split(2))
    found = GRAM.result(GRAM.merge(GRAM.merge(a, b), c))["gram"]
    np.testing.assert_allclose(found, values @ values.T, rtol=1e-13)


def batch(n: int, t: int, kind: str, first: int) -> tuple[Gradients, np.ndarray]:
    """Gradients (n, 9, 8) with t positions."""
    draw = Draw(torch.float64, n, 10 * n + t)
    outer = draw.outer(1, t, 9, 8, (9, 8))
    made = {"outer": outer, "scatter": draw.scatter(9, 8, t)}
    block, rows = made.get(kind, (DenseBlock(torch.from_numpy(outer[1])), outer[1]))
    return Gradients({"w": block}, torch.arange(first, first + n)), rows.reshape(n, -1)


@pytest.mark.parametrize(
    "kinds",
    [
        [("outer", 1), ("outer", 1), ("outer", 3)],
        [("outer", 2), ("outer", 50), ("outer", 1)],  # fifty positions are no longer small
        [("scatter", 2), ("scatter", 5), ("scatter", 90)],
        [("outer", 1), ("scatter", 2), ("dense", 1)],
        [("dense", 1), ("outer", 2), ("outer", 2)],
    ],
)
def test_batches_whose_blocks_differ(kinds: list[tuple[str, int]]) -> None:
    parts = [batch(2 + k, t, kind, 10 * k) for k, (kind, t) in enumerate(kinds)]
    rows = np.concatenate([dense for _, dense in parts])
    for seed in range(6):
        states = [GRAM.start(grads) for grads, _ in parts]
        random.Random(seed).shuffle(states)
        state = GRAM.merge(states[0], GRAM.merge(states[1], states[2]))
        state = {key: state[key] for key in sorted(state, reverse=True)}  # as read from a file
        found = GRAM.result(state)["gram"].numpy()
        np.testing.assert_allclose(found, rows @ rows.T, rtol=1e-12, atol=1e-12)


def test_what_is_kept_is_the_smaller_form() -> None:
    grads, rows = example(torch.float32)
    state = GRAM.start(grads)
    for name, g in rows.items():
        held = [v for k, v in state.items() if k.endswith(f":{name}") and ".shape:" not in k]
        assert sum(prod(v.shape[1:]) for v in held) <= g[0].size, name
    assert "0.left:outer" in state and "0.values:grouped" in state
    assert "1.index:total" not in state  # 4 × 3 numbers are fewer than its factors


def test_a_wide_layer_is_never_made_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 × 512 weights and a table of 1,000 rows: the state is 200 times smaller than the rows."""
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(12, 1, 512, generator=generator) for _ in range(2))
    table = ScatterBlock(torch.randint(0, 1000, (12, 3)), torch.randn(12, 3, 64), 1000)
    grads = Gradients({"w": OuterBlock.matrix(left, right), "e": table}, torch.arange(12))
    state = GRAM.merge(
        GRAM.start(grads.select(slice(0, 5))), GRAM.start(grads.select(slice(5, 12)))
    )
    monkeypatch.setattr(OuterBlock, "dense", None)
    dense = table.to(torch.float64).dense().flatten(1)
    products = (left @ right.mT).new_zeros(12, 12, dtype=torch.float64)
    for i, j in np.ndindex(12, 12):
        products[i, j] = (left[i] @ left[j].T).double() * (right[i] @ right[j].T).double()
    assert sum(v.nbytes for v in state.values()) < 12 * (512 * 512 + 1000 * 64) * 4 / 200
    found = GRAM.result(state)["gram"]
    right_answer = products + dense @ dense.T
    np.testing.assert_allclose(found, right_answer, rtol=1e-4, atol=1e-4 * right_answer.max())


def test_one_matrix_for_a_model_with_tied_weights() -> None:
    """The kernel of the linearised model: ⟨∇f(xᵢ), ∇f(xⱼ)⟩, cross terms of the tie included."""
    torch.manual_seed(0)
    table = torch.nn.Embedding(11, 6).double()

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = table

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids).tanh().mean(1) @ self.table.weight.T

    ids, targets = torch.randint(0, 11, (7, 4)), torch.randint(0, 11, (7,))
    rows = gradscope.per_sample_gradients(Tied(), "cross_entropy", ids, targets, backend="loop")
    found = gradscope.expectation(Tied(), "cross_entropy", "gram", ids, targets, backend="hooks")
    right = rows["table.weight"].flatten(1)
    np.testing.assert_allclose(found["gram"], right @ right.T, rtol=1e-11, atol=1e-14)


def test_norm_before_it() -> None:
    grads, rows = example(torch.float64)
    norms = np.linalg.norm(flat(rows), axis=1)
    compare(run("norm | gram", grads), {"gram": np.outer(norms, norms)}, 1e-12)
