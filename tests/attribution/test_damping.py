"""The damping's trust region against its definition and dense matrices."""

import numpy as np
import pytest
import torch

from gradscope.attribution.curvature import LEAST, Ridge, along, raised_damping, trusted


def rows(mean: float, n: int = 40, p: int = 12, seed: int = 0) -> torch.Tensor:
    """Gradients (n, p) of many sizes, with that mean in units of their spread."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(n, p, generator=generator, dtype=torch.float64)
    drawn = drawn - drawn.mean(0) + mean
    return drawn * torch.logspace(0, -3, p, dtype=torch.float64)


def move(gradients: torch.Tensor, mean: torch.Tensor, damping: float) -> float:
    """dᵀHd of the damped Newton step, by a dense inverse."""
    fisher = gradients.mT @ gradients / len(gradients)
    raised = fisher + damping * fisher.trace() / len(fisher) * torch.eye(len(fisher)).double()
    step = torch.linalg.solve(raised, mean)
    return float(step @ fisher @ step)


def in_eigenbasis(gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    eigenvalues, vectors = torch.linalg.eigh(gradients.mT @ gradients / len(gradients))
    return eigenvalues, (gradients.mean(0) @ vectors).square()


def test_a_model_at_its_minimum_has_the_least_damping() -> None:
    eigenvalues, squares = in_eigenbasis(rows(0.0))
    assert trusted([eigenvalues], [squares], 40) == Ridge(LEAST)
    assert trusted([eigenvalues], [squares], 40, 0.3) == Ridge(0.3)


@pytest.mark.parametrize("mean", [1.0, 3.0])
def test_the_step_is_as_long_as_twice_the_noise(mean: float) -> None:
    gradients = rows(mean)
    eigenvalues, squares = in_eigenbasis(gradients)
    damping = trusted([eigenvalues], [squares], 40)
    assert damping.own == LEAST and damping.common > 0
    found = damping.relative
    fisher = gradients.mT @ gradients / 40
    raised = fisher + LEAST * fisher.trace() / 12 * torch.eye(12).double()
    once = torch.linalg.solve(raised, fisher)
    noise = 2.0 / 40 * float((once @ once).trace())  # E dᵀHd of ḡ with second moment H / N
    assert move(gradients, gradients.mean(0), found) == pytest.approx(noise, rel=1e-6)
    assert move(gradients, gradients.mean(0), found * 0.99) > noise


def test_it_does_not_depend_on_the_scale_of_the_loss() -> None:
    gradients = rows(2.0)
    first, second = in_eigenbasis(gradients), in_eigenbasis(1e-4 * gradients)
    one, other = (trusted([e], [s], 40) for e, s in (first, second))
    assert one.common == pytest.approx(other.common, rel=1e-6)


def test_what_an_early_stop_adds_is_the_same_in_all_layers() -> None:
    parts = [rows(2.0), 1e3 * rows(0.5, p=5, seed=1)]
    bases = [in_eigenbasis(part) for part in parts]
    found = trusted([e for e, _ in bases], [s for _, s in bases], 40)
    fishers = [part.mT @ part / 40 for part in parts]
    own = [float(fisher.trace()) / len(fisher) for fisher in fishers]
    together = sum(float(fisher.trace()) for fisher in fishers) / 17
    added = [LEAST * mean + found.common * together for mean in own]
    steps = 0.0
    for part, fisher, one in zip(parts, fishers, added, strict=True):
        step = torch.linalg.solve(fisher + one * torch.eye(len(fisher)).double(), part.mean(0))
        steps += float(step @ fisher @ step)
    noise = sum(float((e.square() / (e + LEAST * e.mean()).square()).sum()) for e, _ in bases)
    assert steps == pytest.approx(2.0 / 40 * noise, rel=1e-6)
    assert found.of([*own, 0.0], [12, 5, 9]) == pytest.approx([*added, found.common * together])


def test_a_gram_matrix_knows_the_fishers_spectrum_and_the_mean_along_it() -> None:
    gradients = rows(2.0)
    eigenvalues, squares = along(gradients @ gradients.mT / 40, 40)
    expected = in_eigenbasis(gradients)
    np.testing.assert_allclose(eigenvalues[-12:], expected[0], rtol=1e-9, atol=1e-18)
    np.testing.assert_allclose(squares[-12:], expected[1], rtol=1e-6, atol=1e-15)
    padded = torch.zeros(43, 43, dtype=torch.float64)
    padded[1:41, 1:41] = gradients @ gradients.mT / 40  # three samples are left out
    eigenvalues, squares = along(padded, 40)
    np.testing.assert_allclose(squares[-12:], expected[1], rtol=1e-6, atol=1e-15)


def test_no_gradient_at_all_is_no_reason_for_more() -> None:
    nothing = torch.zeros(3)
    assert trusted([nothing], [nothing], 10) == Ridge(LEAST)
    assert trusted([], [], 10) == Ridge(LEAST)
    assert Ridge(LEAST, 0.5).of([0.0], [3]) == [0.0]


@pytest.mark.parametrize(("n", "times"), [(0, 1.0), (4, None), (10_000, 100.0)])
def test_damping_beside_the_fisher_rises_with_the_samples_of_a_direction(
    n: int, times: float | None
) -> None:
    parts = [rows(0.0), 1e3 * rows(0.0, p=5, seed=1)]
    together = sum(float(part.square().sum()) for part in parts) / 40 / 17
    directions = 0.0
    for part in parts:
        fisher = part.mT @ part / 40
        own = 0.2 * fisher.trace() / len(fisher) + 0.1 * together
        raised = fisher + own * torch.eye(len(fisher)).double()
        directions += float(torch.linalg.solve(raised, fisher).trace())
    found = raised_damping([in_eigenbasis(part)[0] for part in parts], Ridge(0.2, 0.1), n)
    factor = 10 * n / directions if times is None else times
    assert found == pytest.approx((0.2 * factor, 0.1 * factor))


@pytest.mark.parametrize(
    ("damping", "found"),
    [((5.0, 0.0), (100.0, 0.0)), ((1.0, 4.0), (20.0, 80.0)), ((300.0, 0.0), (300.0, 0.0))],
)
def test_damping_is_raised_to_a_hundred_at_most(
    damping: tuple[float, float], found: tuple[float, float]
) -> None:
    raised = raised_damping([in_eigenbasis(rows(0.0))[0]], Ridge(*damping), 10_000)
    assert raised == pytest.approx(found)
