"""Damped inverses against dense matrices, inverted by numpy in float64."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

import gradscope
from gradscope.attribution.curvature import (
    Curvature,
    RemainingGradient,
    adam_curvature,
    diagonal_curvature,
    ekfac_curvature,
    kfac_curvature,
)
from gradscope.blocks import DenseBlock, Gradients
from gradscope.core.batch import Batch
from gradscope.errors import InputError, SpecError
from tests.stages.test_ekfac import LAYERS, dense_rows, example, layers_of, matrices

ALPHA = 0.07
Aggregate = Mapping[str, Tensor]


def aggregate(name: str, chain: str) -> dict[str, Tensor]:
    model, x, y = example(name)
    return gradscope.expectation(model, "mse", chain, x, y, backend="hooks")


def queries(name: str, backend: str = "hooks") -> Gradients:
    model, x, y = example(name)
    return gradscope.Scope(model, "mse", backend=backend).evaluate(Batch.of(x, y)).gradients


def fisher(found: Aggregate, weight: str, group: int) -> np.ndarray:
    """The matrix that a layer's group is approximated by, for its gradient read row by row."""

    def own(word: str) -> np.ndarray:
        values = found[f"{weight}.{word}"].numpy()
        return values if values.ndim == 2 else values[group]

    if f"{weight}.eigenvalues" in found:
        vectors = np.kron(own("B.vectors"), own("A.vectors"))
        return vectors * own("eigenvalues").ravel() @ vectors.T
    return np.kron(own("B"), own("A"))


def solved(
    name: str, found: Aggregate, *, paired: bool, full: bool
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Every layer's rows times the inverse of its matrix + λ, and λ."""
    rows = dense_rows(name)
    result, damping = {}, {}
    layers = layers_of(name, full=full)
    for weight, layer in layers.items():
        bias, k, r, c, below = layer
        if not paired and bias is not None:
            layer = bias, k, r, c, below = None, k, r - below, c - (not below), below
        g = matrices(rows, weight, layer)
        blocks = [fisher(found, weight, group) for group in range(k)]
        damping[weight] = ALPHA * float(np.mean([np.trace(f) / len(f) for f in blocks]))
        for group, block in enumerate(blocks):
            damped = block + damping[weight] * np.eye(len(block))
            flat = g[:, group].reshape(len(g), -1).T
            g[:, group] = np.linalg.solve(damped, flat).T.reshape(g[:, group].shape)
        if bias is None:
            result[weight] = g.reshape(rows[weight].shape)
        else:
            size = g.shape[2 if below else 3] - 1
            parts = np.split(g, [size], axis=2 if below else 3)
            result[weight], result[bias] = (
                part.reshape(rows[own].shape)
                for part, own in zip(parts, (weight, bias), strict=True)
            )
    for own in rows.keys() - result.keys():
        values = found[f"{own}.diagonal"].numpy()
        damping[own] = ALPHA * values.mean()
        result[own] = rows[own] / (values + damping[own])
    return result, damping


MADE: dict[str, Callable[[Aggregate, float], Curvature]] = {
    "kfac": kfac_curvature,
    "kfac:bias=column": kfac_curvature,
    "kfac:bias=column,positions=sum": kfac_curvature,
    "kfac:bias=column,full=9": kfac_curvature,
    "ekfac": ekfac_curvature,
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("chain", MADE)
def test_the_dense_inverse(chain: str, name: str) -> None:
    found = aggregate(name, chain)
    right, damping = solved(
        name, found, paired=chain != "kfac", full="full" in chain or chain == "ekfac"
    )
    made = MADE[chain](found, ALPHA)
    assert made.damping.keys() == damping.keys()
    for own, value in damping.items():
        assert made.damping[own] == pytest.approx(value, rel=1e-10)
    for backend in ("hooks", "loop"):
        ours = made.apply(queries(name, backend), None)
        assert list(ours) == list(queries(name)) and ours.keys() == right.keys()
        for own, values in right.items():
            scale = np.abs(values).max()
            np.testing.assert_allclose(ours[own], values, rtol=1e-8, atol=1e-8 * scale)
    single = made.apply(queries(name), torch.float32)
    for own, values in right.items():
        assert single[own].dtype == torch.float32
        np.testing.assert_allclose(single[own], values, atol=2e-5 * np.abs(values).max())
    again = made.apply(queries(name).map(lambda b: b.to(torch.float32)), torch.float64)
    assert {v.dtype for v in again.values()} == {torch.float64}


@pytest.mark.parametrize("name", LAYERS)
def test_a_mean_gradient_far_from_zero_raises_the_damping(name: str) -> None:
    found, mean, n = aggregate(name, "ekfac"), aggregate(name, "mean"), 1000
    assert ekfac_curvature(found, ALPHA, RemainingGradient(mean, 1)).chosen.relative == ALPHA
    made = ekfac_curvature(found, ALPHA, RemainingGradient(mean, n))
    assert made.chosen.relative > ALPHA
    rows = Gradients({k: DenseBlock(v[None]) for k, v in mean.items()})
    step = {k: v[0] for k, v in made.apply(rows, None).items()}  # d, and so Hd = ḡ − λd
    layer = {name: name for name in step} | {v[0]: k for k, v in LAYERS[name].items() if v[0]}
    moved = sum(float((d * (mean[k] - made.damping[layer[k]] * d)).sum()) for k, d in step.items())
    spectra = [v for k, v in found.items() if k.endswith((".eigenvalues", ".diagonal"))]
    noise = sum(float((v / (v + ALPHA * v.mean())).square().sum()) for v in spectra) / n
    assert moved == pytest.approx(2.0 * noise, rel=1e-6)


@pytest.mark.parametrize("name", ["kfac", "ekfac"])
def test_without_damping_it_is_the_pseudo_inverse(name: str) -> None:
    """Two samples do not fill a layer's space."""
    model, x, y = example("linear")
    chain = "kfac:bias=column" if name == "kfac" else name
    found = gradscope.expectation(model, "mse", chain, x[:2], y[:2], backend="hooks")
    made = MADE[name](found, 0.0)
    ours = made.apply(queries("linear"), None)
    g = matrices(dense_rows("linear"), "0.weight", LAYERS["linear"]["0.weight"]).reshape(9, -1)
    inverse = np.linalg.pinv(fisher(found, "0.weight", 0), rcond=1e-12, hermitian=True)
    right = (g @ inverse).reshape(9, 5, 5)
    joined = np.concatenate([ours["0.weight"], ours["0.bias"][..., None]], axis=2)
    np.testing.assert_allclose(joined, right, rtol=1e-6, atol=1e-8 * np.abs(right).max())
    assert set(made.damping.values()) == {0.0}


def test_diagonals() -> None:
    rows = dense_rows("words")
    moments = {own: np.mean(v**2, axis=0) for own, v in rows.items()}
    given = {own: torch.from_numpy(v) for own, v in moments.items()}
    plain, adam = diagonal_curvature(given, ALPHA), adam_curvature(given, ALPHA)
    one, other = (made.apply(queries("words"), None) for made in (plain, adam))
    for own, v in moments.items():
        np.testing.assert_allclose(one[own], rows[own] / (v + ALPHA * v.mean()), rtol=1e-9)
        root = np.sqrt(v)
        np.testing.assert_allclose(other[own], rows[own] / (root + ALPHA * root.mean()), rtol=1e-9)
        assert plain.damping[own] == pytest.approx(ALPHA * v.mean())
        assert adam.damping[own] == pytest.approx(ALPHA * root.mean())


def test_a_layer_without_gradient_gives_zeros() -> None:
    gradients = Gradients({"w": DenseBlock(torch.zeros(3, 2, 4))})
    for alpha in (0.0, ALPHA):
        found = {"w.A": torch.eye(4), "w.B": torch.zeros(2, 2)}
        assert not kfac_curvature(found, alpha).apply(gradients, None)["w"].any()
        moments = {"w": torch.zeros(2, 4)}
        assert not diagonal_curvature(moments, alpha).apply(gradients, None)["w"].any()


def test_what_does_not_fit_is_refused() -> None:
    ones = Gradients({"w": DenseBlock(torch.ones(3, 2, 4)), "v": DenseBlock(torch.ones(3, 2))})
    factors = {"w.A": torch.eye(4), "w.B": torch.eye(2)}
    for alpha in (-1.0, float("nan"), float("inf")):
        with pytest.raises(SpecError, match="negative or not finite"):
            kfac_curvature(factors, alpha)
    with pytest.raises(SpecError, match="lacks the parameters 'v'"):
        kfac_curvature(factors, ALPHA).apply(ones, None)
    with pytest.raises(SpecError, match="does not fit"):
        kfac_curvature({"w.A": torch.eye(3), "w.B": torch.eye(2)}, ALPHA).apply(ones, None)
    with pytest.raises(SpecError, match="shape"):
        diagonal_curvature({"v": torch.ones(3), "w": torch.ones(2, 4)}, ALPHA).apply(ones, None)
    with pytest.raises(InputError, match="the eigenvalues of 'w' are missing"):
        ekfac_curvature(factors, ALPHA)
    with pytest.raises(InputError, match="no Kronecker factors"):
        kfac_curvature({"v": torch.ones(2)}, ALPHA)
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="'v' contain negative or non-finite"):
            diagonal_curvature({"v": torch.tensor([1.0, bad])}, ALPHA)
