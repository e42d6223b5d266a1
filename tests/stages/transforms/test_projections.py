"""Projections: one linear map for every kind of block, and inner products kept on average."""

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from gradscope import Scope
from gradscope.blocks import DenseBlock, Gradients, OuterBlock
from gradscope.core.batch import Batch
from gradscope.stages.chain import bind
from tests.stages.transforms.rows import compare, everything, flat, run

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
    for module in ("base", "outer", "scatter"):
        monkeypatch.setattr(f"gradscope.blocks.{module}.TILE_BYTES", 1)
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
        assert kstest(entries.ravel(), "norm").pvalue > 1e-3
    else:
        root = 1.73202
        values = [-1, 1] if kind == "rademacher" else [-root, 0, root]
        np.testing.assert_allclose(np.unique(entries.round(5)), values)
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


@pytest.mark.parametrize("kind", KINDS[:3])
def test_the_spread_of_the_norm(kind: str) -> None:
    """Var ‖Pg‖²/dim = (2‖g‖⁴ + (κ − 3) Σ gⱼ⁴)/dim, κ the entries' fourth moment."""
    g = torch.tensor([[3.0, -1.0, 0.5, 2.0, 0.1]], dtype=torch.float64)
    gradients = Gradients({"g": DenseBlock(g)}, torch.arange(1))
    dim, draws = 512, 300
    found = torch.stack(
        [
            run(f"project:dim={dim},kind={kind},seed={seed}", gradients)["project"].square().sum()
            for seed in range(draws)
        ]
    )
    fourth = {"gaussian": 3, "rademacher": 1, "sparse": 3}[kind]
    spread = (2 * g.norm() ** 4 + (fourth - 3) * g.pow(4).sum()) / dim
    assert abs(found.mean() - g.norm() ** 2) < 5 * (spread / draws) ** 0.5
    assert abs(found.var() / spread - 1) < 5 * (2 / draws) ** 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_products_in_float32_are_near_those_in_float64(kind: str) -> None:
    torch.manual_seed(2)
    left, right = torch.randn(3, 5, 90), torch.randn(3, 5, 1000)
    found = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        block = OuterBlock.matrix(left.bfloat16().to(dtype), right.bfloat16().to(dtype))
        found[dtype] = run(f"project:dim=20,kind={kind}", Gradients({"w": block}))["project"]
        assert found[dtype].dtype == torch.float64
    size = float(found[torch.float64].abs().max())
    torch.testing.assert_close(found[torch.float32], found[torch.float64], rtol=0, atol=2e-6 * size)
    assert torch.equal(found[torch.bfloat16], found[torch.float32])


@pytest.mark.parametrize("kind", KINDS)
def test_order_and_batches_change_nothing(kind: str) -> None:
    gradients, _ = everything()
    text = f"project:dim={DIM},kind={kind}"
    whole = run(text, gradients)["project"]
    order = torch.tensor([3, 0, 4, 2, 1])
    for chosen in (gradients.select(order), gradients.select(order[:1])):
        part = run(text, chosen)["project"]
        torch.testing.assert_close(part, whole[order[: len(part)]], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_backends_and_batch_sizes_agree(kind: str) -> None:
    torch.manual_seed(9)
    model = torch.nn.Sequential(
        torch.nn.Embedding(7, 4), torch.nn.Flatten(), torch.nn.Linear(12, 3)
    )
    inputs, targets = torch.randint(0, 7, (6, 3)), torch.randint(0, 3, (6,))
    chain = bind(f"project:dim={DIM},kind={kind}")
    found = []
    for backend, size in (("loop", 6), ("hooks", 6), ("hooks", 4), ("vmap", 5), ("expand", 1)):
        with Scope(model.double(), "cross_entropy", backend=backend) as scope:
            batches = zip(inputs.split(size), targets.split(size), strict=True)
            parts = [scope.evaluate(Batch.of(*batch)).gradients for batch in batches]
            found.append(torch.cat([chain.rows(p).dense()["project"] for p in parts]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-12, atol=1e-14)


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
