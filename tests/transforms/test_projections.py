"""Projections: one linear map for every kind of block, and inner products kept on average."""

import numpy as np
import pytest
import torch

from gradscope.blocks import DenseBlock, Gradients, OuterBlock
from tests.transforms.rows import compare, everything, flat, run

KINDS = ["gaussian", "rademacher", "sparse", "kronecker"]
DIM = 6


def matrix(kind: str, shapes: dict[str, tuple[int, ...]], seed: int = 0) -> np.ndarray:
    """The projection (dim, entries), read off the gradients that are one at one place."""
    sizes = [int(np.prod(s)) for s in shapes.values()]
    basis = torch.eye(sum(sizes), dtype=torch.float64)
    blocks = {
        name: DenseBlock(part.reshape(-1, *shape))
        for (name, shape), part in zip(shapes.items(), basis.split(sizes, 1), strict=True)
    }
    return run(f"project:dim={DIM},kind={kind},seed={seed}", Gradients(blocks))["project"].numpy().T


def shapes() -> dict[str, tuple[int, ...]]:
    return {name: block.shape for name, block in everything()[0].items()}


@pytest.mark.parametrize("cuts", [(), (2,), (1, 2, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_sums(kind: str, cuts: tuple[int, ...]) -> None:
    gradients, rows = everything()
    text = f"project:dim={DIM},kind={kind}"
    right = flat(rows) @ matrix(kind, shapes()).T
    compare(run(text, gradients, cuts), {"project": right})
    compare(run(f"{text} | mean", gradients, cuts), {"project": right.mean(0)}, 1e-10)
    compare(run(f"mean | {text}", gradients, cuts), {"project": right.mean(0)}, 1e-10)
    compare(run(f"{text} | var", gradients, cuts), {"project": right.var(0, ddof=1)}, 1e-9)
    centred = right - right.mean(0)
    compare(run(f"center | {text}", gradients, cuts), {"project": centred}, 1e-10)
    norms = np.linalg.norm(flat(rows), axis=1)
    clipped = right * np.minimum(1, 0.5 / norms)[:, None]
    compare(run(f"clip:max_norm=0.5 | {text}", gradients, cuts), {"project": clipped})
    moments = {k: v / 1 for k, v in run("abs | " + text, gradients, cuts).items()}
    whole = np.abs(flat(rows)) @ matrix(kind, shapes()).T
    compare(moments, {"project": whole})


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients, _ = everything()
    text = f"project:dim={DIM},kind={kind}"
    whole = run(text, gradients)["project"]
    monkeypatch.setattr("gradscope.transforms.projections._CHUNK_BYTES", 1)
    monkeypatch.setattr("gradscope.transforms.projections._KEPT_BYTES", 200)
    torch.testing.assert_close(run(text, gradients)["project"], whole, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_the_matrix_depends_on_seed_and_name_only(kind: str) -> None:
    one, two = {"a": (3, 4)}, {"b": (2, 2), "a": (3, 4)}
    alone = matrix(kind, one)
    assert np.array_equal(alone, matrix(kind, two)[:, 4:])
    assert not np.allclose(alone, matrix(kind, one, seed=1))
    assert not np.allclose(alone, matrix(kind, {"c": (3, 4)}))


@pytest.mark.parametrize("kind", KINDS[:3])
def test_entries(kind: str) -> None:
    entries = matrix(kind, {"a": (40, 50)}) * DIM**0.5
    size = entries.size
    assert abs(entries.mean()) < 5 / size**0.5
    fourth = {"gaussian": 3, "rademacher": 1, "sparse": 3}[kind]
    assert abs((entries**2).mean() - 1) <= 5 * ((fourth - 1) / size) ** 0.5 + 1e-12
    if kind == "gaussian":
        assert len(np.unique(entries)) == size
    else:
        root = 3**0.5
        values = [-1, 1] if kind == "rademacher" else [-root, 0, root]
        np.testing.assert_allclose(np.unique(entries.round(12)), values)
    rows = entries @ entries.T / entries.shape[1] - np.eye(DIM)
    assert np.abs(rows).max() < 6 / entries.shape[1] ** 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_inner_products_are_kept_on_average(kind: str) -> None:
    gradients, rows = everything()
    right = flat(rows) @ flat(rows).conj().T
    found = []
    for seed in range(100):
        projected = run(f"project:dim=6,kind={kind},seed={seed}", gradients)["project"].numpy()
        found.append(projected @ projected.conj().T)
    stack = np.stack(found)
    for part in (np.real, np.imag):
        error = np.abs(part(stack).mean(0) - part(right))
        spread = part(stack).std(0, ddof=1) / len(stack) ** 0.5
        assert np.all(error <= 5 * spread + 1e-9)


def test_two_sided_never_forms_an_outer_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix of 10^10 entries a sample, from its factors."""
    big = OuterBlock.matrix(torch.randn(2, 3, 100_000), torch.randn(2, 3, 100_000))

    def refuse(self: object, out: object = None) -> torch.Tensor:
        raise AssertionError("formed")

    monkeypatch.setattr(OuterBlock, "dense", refuse)
    gradients = Gradients({"w": big}, torch.arange(2))
    found = run("project:dim=4,kind=kronecker", gradients)["project"]
    assert found.shape == (2, 4) and bool(found.isfinite().all())


def test_dim_is_split_as_evenly_as_it_divides() -> None:
    gradients, _ = everything()
    for dim in (1, 2, 7, 12, 36):
        assert run(f"project:dim={dim},kind=kronecker", gradients)["project"].shape == (5, dim)
