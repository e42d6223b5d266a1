"""Preconditioning by Kronecker factors against the dense matrix that they stand for."""

import numpy as np
import pytest
import torch

from gradscope.blocks import DenseBlock, Gradients
from gradscope.errors import SpecError
from tests.stages.examples import Draw, N, compare, mean, run

FACTORS = {"plain": (1, 1, 4, 3), "positions": (1, 3, 4, 3), "groups": (2, 2, 3, 4)}  # k, t, r, c


def definite(k: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Hermitian positive definite matrices (k, size, size)."""
    root = torch.randn(k, size, size + 2).to(dtype) * (1 + (1j if dtype.is_complex else 0))
    root = root + torch.randn(k, size, size + 2).to(dtype)
    return root @ root.mH / size


def dense_solve(g: np.ndarray, a: np.ndarray, b: np.ndarray, damping: float) -> np.ndarray:
    """Solve with (B + √λ/π) ⊗ (A + π√λ), group by group, written out."""
    k, c, r = len(a), a.shape[-1], b.shape[-1]
    found = []
    for row in g.reshape(len(g), k, r * c):
        parts = []
        for j in range(k):
            pi = np.sqrt((np.trace(a[j]).real / c) / (np.trace(b[j]).real / r))
            left = b[j] + np.sqrt(damping) / pi * np.eye(r)
            right = a[j] + np.sqrt(damping) * pi * np.eye(c)
            parts.append(np.linalg.solve(np.kron(left, right), row[j]))
        found.append(np.concatenate(parts))
    return np.stack(found).reshape(g.shape)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("damping", [0.0, 0.3])
@pytest.mark.parametrize("name", FACTORS)
def test_kronecker_factors(name: str, damping: float, dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    k, t, r, c = FACTORS[name]
    block, rows = Draw(dtype, N, 7).outer(k, t, r, c, (k * r, c))
    a, b = definite(k, c, dtype), definite(k, r, dtype)
    drop = (lambda m: m[0]) if k == 1 else (lambda m: m)
    bias = torch.randn(N, r, dtype=torch.float64)
    stored = {"w.A": drop(a.numpy()), "w.B": drop(b.numpy()), "b.diagonal": np.full(r, 0.5)}
    text = f"precondition:with=stored,damping={damping}"
    right = {
        "w": dense_solve(rows, a.numpy(), b.numpy(), damping),
        "b": bias.numpy() / (0.5 + damping),
    }
    norms = np.sqrt(sum((np.abs(v) ** 2).reshape(N, -1).sum(1) for v in right.values()))
    for w in (block, DenseBlock(torch.from_numpy(rows))):
        gradients = Gradients({"w": w, "b": DenseBlock(bias)}, torch.arange(N))
        compare(run(text, gradients, (2,), stored), right, 1e-9)
        compare(run(f"{text} | mean", gradients, (2,), stored), mean(right), 1e-9)
        compare(run(f"mean | {text}", gradients, (2,), stored), mean(right), 1e-9)
        compare(run(f"{text} | norm", gradients, (), stored), {"norm": norms}, 1e-9)
        sizes = {n: np.abs(v) for n, v in right.items()}
        compare(run(f"{text} | abs", gradients, (), stored), sizes, 1e-9)


def test_with_what_kfac_stores() -> None:
    """The stored factors of one sample without weight sharing: F = g gᵀ, so F⁺g = g/‖g‖²."""
    block, _ = Draw(torch.float64, N, 8).outer(1, 1, 4, 3, (4, 3))
    one = Gradients({"w": block.select(slice(0, 1))}, torch.arange(1))
    stored = {k: v.numpy() for k, v in run("kfac", one).items()}
    g = one["w"].dense()
    found = run("precondition:with=stored", one, (), stored)["w"]
    torch.testing.assert_close(found, g / g.square().sum())


def test_the_power_is_for_second_moments() -> None:
    gradients = Gradients({"w": DenseBlock(torch.ones(2, 3))})
    for stored in ({"w.diagonal": np.ones(3)}, {"w.A": np.eye(3), "w.B": np.ones((1, 1))}):
        with pytest.raises(SpecError, match="power=1 cannot be combined with a stored kfac"):
            run("precondition:with=stored,power=1", gradients, (), stored)


def test_a_factor_of_zeros() -> None:
    block, _ = Draw(torch.float64, N, 8).outer(1, 1, 4, 3, (4, 3))
    stored = {"w.A": np.zeros((3, 3)), "w.B": np.eye(4)}
    gradients = Gradients({"w": block})
    assert not bool(run("precondition:with=stored", gradients, (), stored)["w"].any())
    damped = run("precondition:with=stored,damping=1", gradients, (), stored)["w"]
    assert bool(damped.isfinite().all())


def test_parameters_that_are_called_as_factors_are() -> None:
    """As in low-rank adapters: here NAME.A and NAME.B are second moments."""
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    gradients = Gradients({"w.A": DenseBlock(values), "w.B": DenseBlock(values)})
    stored = {"w.A": np.array([4.0, 1.0]), "w.B": np.array([1.0, 16.0])}
    found = run("precondition:with=stored", gradients, (), stored)
    assert torch.equal(found["w.A"], values / torch.tensor([2.0, 1.0]))
    assert torch.equal(found["w.B"], values / torch.tensor([1.0, 4.0]))
    stored["w.B"] = np.array([-1.0, 16.0])
    with pytest.raises(SpecError, match=r"'w.B' in the stored vector is not a second moment"):
        run("precondition:with=stored", gradients, (), stored)


@pytest.mark.parametrize("shapes", [((3, 3), (3, 3)), ((2, 3, 3), (4, 4)), ((3, 4), (4, 4))])
def test_factors_that_do_not_fit(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    stored = {"w.A": np.ones(shapes[0]), "w.B": np.ones(shapes[1])}
    gradients = Gradients({"w": Draw(torch.float64, N, 8).outer(1, 1, 4, 3, (4, 3))[0]})
    with pytest.raises(SpecError, match="do not fit"):
        run("precondition:with=stored", gradients, (), stored)
