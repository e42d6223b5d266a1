"""Noise and stochastic rounding: what they depend on, their levels, their expectation."""

from functools import partial

import numpy as np
import pytest
import torch

from gradscope.blocks import DenseBlock, Gradients
from tests.stages.examples import N, Rows, everything, run

TEXTS = ["noise:std=0.5,seed=3", "quantize:bits=3,seed=3"]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("text", TEXTS)
def test_neither_batches_nor_order_nor_kind_of_block_matter(text: str) -> None:
    structured, _ = everything()
    gradients = structured.of({k: DenseBlock(b.dense()) for k, b in structured.items()})
    whole = run(text, gradients)
    for name, values in run(text, structured).items():
        torch.testing.assert_close(values, whole[name], rtol=1e-12, atol=1e-13)
    for cuts in [(1, 2, 3, 4), (2,), (4,)]:
        assert same(run(text, gradients, cuts), whole)
    order = torch.tensor([3, 0, 4, 2, 1])
    moved = run(text, gradients.select(order))
    assert same(moved, {k: v[order] for k, v in whole.items()})
    mask = torch.tensor([True, False, True, True, False])
    assert same(run(text, gradients.select(mask)), {k: v[mask] for k, v in whole.items()})


@pytest.mark.parametrize("text", TEXTS)
def test_the_seed_the_name_and_the_sample_matter(text: str) -> None:
    values = DenseBlock(torch.linspace(-1, 2, 24).reshape(1, 24).repeat(2, 1))
    gradients = Gradients({"a": values, "b": values}, torch.tensor([5, 6]))
    found = run(text, gradients)
    rows = [*found["a"], *found["b"], run(text.replace("seed=3", "seed=4"), gradients)["a"][0]]
    aggregate = run(text, Gradients({"a": DenseBlock(values.values[:1])}))["a"][0]
    zeroth = run(text, Gradients({"a": DenseBlock(values.values[:1])}, torch.tensor([0])))["a"][0]
    rows += [aggregate, zeroth]
    for i, row in enumerate(rows):
        assert not any(torch.equal(row, other) for other in rows[:i])


@pytest.mark.parametrize("text", TEXTS)
def test_every_form_of_a_row_has_the_same_numbers(text: str) -> None:
    """Sums, norms and clipped rows see the numbers that the stored rows have."""
    gradients, _ = everything()
    rows = {k: v.numpy() for k, v in run(text, gradients).items()}
    means = run(f"{text} | mean", gradients, (2,))
    squares = run(f"{text} | square | mean", gradients, (1, 4))
    norm = run(f"{text} | norm", gradients, (3,))["norm"]
    total = np.sqrt(sum((np.abs(v) ** 2).reshape(N, -1).sum(1) for v in rows.values()))
    np.testing.assert_allclose(norm, total, rtol=1e-12)
    for name, values in rows.items():
        close = partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12)
        close(means[name], values.mean(0))
        close(squares[name], (np.abs(values) ** 2).mean(0))


@pytest.mark.parametrize("index", [torch.arange(4), None])
def test_noise_is_normal(index: torch.Tensor | None) -> None:
    zero = torch.zeros(4, 5000, dtype=torch.float64)
    parts = {"real": DenseBlock(zero), "complex": DenseBlock(torch.complex(zero, zero))}
    found = run("noise:std=2,seed=1", Gradients(parts, index))
    pair = torch.view_as_real(found["complex"])
    draws = torch.stack([found["real"], pair[..., 0], pair[..., 1]]).flatten(0, 1) / 2
    size = draws.shape[1]
    assert draws.mean(1).abs().max() < 5 / size**0.5
    assert (draws.var(1) - 1).abs().max() < 5 * (2 / size) ** 0.5
    assert (draws.pow(4).mean(1) - 3).abs().max() < 5 * (96 / size) ** 0.5
    correlations = draws @ draws.T / size - torch.eye(len(draws))
    assert correlations.abs().max() < 8 / size**0.5  # no two rows share a stream


def parts(rows: Rows) -> dict[str, np.ndarray]:
    """Real and imaginary parts side by side (n, entries)."""
    return {k: np.ascontiguousarray(v.reshape(N, -1)).view(float) for k, v in rows.items()}


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_levels(bits: int) -> None:
    """Each entry is one of the two levels around it."""
    gradients, rows = everything()
    found = parts({k: v.numpy() for k, v in run(f"quantize:bits={bits}", gradients).items()})
    steps = 2 ** (bits - 1) - 1
    for name, values in parts(rows).items():
        largest = np.abs(values).max(1, keepdims=True)
        level = found[name] / largest * steps
        np.testing.assert_allclose(level, level.round(), atol=1e-9)
        exact = values / largest * steps
        assert np.all(np.abs(level - exact) < 1 + 1e-9)
        assert np.all(np.abs(level) <= steps + 1e-9)
        assert np.all(found[name] * values >= 0)


def test_quantize_is_unbiased() -> None:
    gradients, rows = everything()
    draws = 100
    stacks: dict[str, list[np.ndarray]] = {k: [] for k in rows}
    for seed in range(draws):
        for name, values in run(f"quantize:bits=2,seed={seed}", gradients).items():
            stacks[name].append(values.numpy())
    for name, right in parts(rows).items():
        sample = np.stack([parts({name: v})[name] for v in stacks[name]])
        error = np.abs(sample.mean(0) - right)
        spread = sample.std(0, ddof=1) / draws**0.5
        largest = np.abs(right).max(1, keepdims=True)
        # where no draw differed, the probability of the other level is below some 10/draws
        same = spread <= 1e-12 * largest
        assert np.all(error <= 5 * spread + largest * (10 / draws * same + 1e-12)), name


@pytest.mark.parametrize("text", TEXTS)
def test_half_precision_becomes_float32(text: str) -> None:
    values = torch.randn(2, 6, generator=torch.Generator().manual_seed(1)).half()
    half = Gradients({"w": DenseBlock(values)}, torch.arange(2))
    single = Gradients({"w": DenseBlock(values.float())}, torch.arange(2))
    found = run(text, half)["w"]
    assert found.dtype == torch.float32
    assert torch.equal(found, run(text, single)["w"])
