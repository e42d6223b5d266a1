"""The tuner's choice among kernel variants, and the variants of products against float64."""

import pytest
import torch
from torch import Tensor

from gradscope.blocks import OuterBlock, Tuner, products, unmeasured
from gradscope.blocks.variants import Variant, fastest


class Clock:
    """Variants that say how long they took, and count how often they ran."""

    def __init__(self, **seconds: float) -> None:
        self.seconds, self.runs = seconds, dict.fromkeys(seconds, 0)
        self.tuner = Tuner(timed=self._timed)

    def _timed(self, run, device: torch.device) -> tuple[float, Tensor]:
        answer = run()
        return self.seconds[self.last], answer

    def asked(self, n: int = 8, **predicted: float) -> str:
        def variant(k: int, name: str) -> Variant:
            def run() -> Tensor:
                self.runs[name] += 1
                self.last = name
                return torch.tensor(float(k))

            return Variant(predicted.get(name, 1.0), run)

        table = {name: variant(k, name) for k, name in enumerate(self.seconds)}
        with self.tuner.active():
            return list(self.seconds)[int(fastest("r", n, torch.zeros(1), table))]


def test_the_fastest_is_kept() -> None:
    clock = Clock(slow=3.0, fast=1.0, middling=2.0)
    assert clock.asked() == "fast"
    assert clock.runs == {"slow": 2, "fast": 2, "middling": 2}
    assert [clock.asked(n=n) for n in (5, 8)] == ["fast", "fast"]
    assert clock.runs == {"slow": 2, "fast": 4, "middling": 2}
    (choice,) = clock.tuner.chosen.values()
    assert choice.to_json() == {
        "request": "r, n≤8, float32, cpu",
        "way": "fast",
        "seconds": {"slow": 3.0, "fast": 1.0, "middling": 2.0},
    }


def test_another_size_is_another_choice() -> None:
    clock = Clock(a=1.0, b=2.0)
    clock.asked(n=8)
    clock.seconds["a"] = 3.0
    assert clock.asked(n=9) == "b"
    assert len(clock.tuner.chosen) == 2


@pytest.mark.parametrize(
    ("predicted", "runs"),
    [
        ({"a": 100.0}, {"a": 0, "b": 2}),  # hopeless
        ({"a": 2e-6, "b": 1e-6}, {"a": 0, "b": 1}),  # not worth measuring
    ],
)
def test_what_is_not_tried(predicted: dict[str, float], runs: dict[str, int]) -> None:
    clock = Clock(a=1.0, b=2.0)
    assert clock.asked(**predicted) == "b"
    assert clock.runs == runs


def test_without_measuring_the_cost_model_chooses() -> None:
    clock = Clock(a=1.0, b=2.0)
    outer = Tuner(measures=False)
    with outer.active():  # the outermost decides
        assert clock.asked(b=0.5) == "b"
    (choice,) = outer.chosen.values()
    assert (choice.variant, choice.seconds) == ("b", {"a": 1.0, "b": 0.5})
    assert clock.runs == {"a": 0, "b": 1}
    assert not clock.tuner.chosen
    with clock.tuner.active(), unmeasured():
        assert clock.asked(b=0.5) == "b"
    assert not clock.tuner.chosen
    assert clock.asked(b=0.5) == "a"


def test_a_preferred_variant_is_taken_also_for_a_proof() -> None:
    clock = Clock(a=1.0, b=2.0)
    with Tuner(preferred=frozenset({"b"})).active():
        assert clock.asked() == "b"
        with unmeasured():
            assert clock.asked() == "b"
    assert clock.asked() == "a"


def preferring(name: str):
    return Tuner(preferred=frozenset({name})).active()


@pytest.mark.parametrize("first", ["samples", "positions"])
@pytest.mark.parametrize("variant", ["gemm", "oneDNN"])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128], ids=str)
def test_contracted(variant: str, k: int, dtype: torch.dtype, first: str) -> None:
    torch.manual_seed(0)
    left, right = (torch.randn(5, k, 4, c).to(dtype) for c in (7, 3))
    if first == "positions":
        left, right = (f.transpose(0, 2).contiguous().transpose(0, 2) for f in (left, right))
    with preferring(variant):
        found = products.contracted(left, right)
    exact = torch.einsum("nktr,nktc->krc", left.cdouble(), right.cdouble())
    torch.testing.assert_close(found.cdouble(), exact, rtol=1e-5, atol=1e-5)


@pytest.fixture(params=[True, False], ids=["oneDNN", "gemm"])
def onednn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With oneDNN, and without."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: request.param)


@pytest.mark.parametrize("lead", [(), (6,), (2, 3)], ids=str)
def test_multiplied(onednn: None, lead: tuple[int, ...]) -> None:
    """As a linear layer and what squashes its output, for factors with any strides."""
    torch.manual_seed(0)
    left, right, bias = torch.randn(*lead, 8), torch.randn(5, 8), torch.randn(5)
    for dtype in (torch.float64, torch.complex64, torch.bfloat16):  # which torch multiplies
        given = left.to(dtype), right.to(dtype)
        torch.testing.assert_close(products.multiplied(*given), given[0] @ given[1].mT)
    wide = torch.randn(5, 3, 16)[:, 1, ::2]
    for factor in (right, right.T.contiguous().T, wide, right[:1].expand(5, 8)):
        for extra in (None, bias):
            exact = left.double() @ factor.double().T + (0 if extra is None else extra)
            found = products.multiplied(left, factor, extra)
            torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
            for after in ("sigmoid", "tanh"):
                found = products.multiplied(left, factor, extra, after)
                right_one = getattr(torch, after)(exact)
                torch.testing.assert_close(found.double(), right_one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", ["together", "one by one"])
@pytest.mark.parametrize("axes", [(0, 1, 2), (0, 2, 1), (1, 0, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_separate(
    variant: str, axes: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sample by sample, in whatever order the axes lie in memory; into a buffer, too."""
    monkeypatch.setattr(products, "WORTH_A_CALL", 0)
    torch.manual_seed(0)
    given = torch.randn(6, 9, 4, dtype=dtype), torch.randn(6, 9, 5, dtype=dtype)
    left, right = (f.permute(axes).contiguous().permute(axes) for f in given)
    out = torch.full((6, 4, 5), torch.nan, dtype=dtype)
    with preferring(variant):
        found = [products.separate(left, right), products.separate(left, right, out), out]
    for product in found:
        torch.testing.assert_close(product, torch.einsum("mtr,mtc->mrc", *given))


@pytest.mark.parametrize("t", [1, 127, 131, 260])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_ghost_norms_of_many_positions(t: int, dtype: torch.dtype) -> None:
    torch.manual_seed(t)
    left, right = torch.randn(3, t, 5, dtype=dtype), torch.randn(3, t, 4, dtype=dtype)
    dense = torch.einsum("mtr,mtc->mrc", left, right)
    torch.testing.assert_close(products.ghost(left, right), dense.abs().square().sum((1, 2)))


@pytest.mark.parametrize("variant", ["gram", "dense"])
def test_norms_of_an_outer_product_both_ways(variant: str) -> None:
    torch.manual_seed(1)
    block = OuterBlock(torch.randn(6, 2, 9, 4).double(), torch.randn(6, 2, 9, 5).double(), (8, 5))
    with preferring(variant):
        found = block.squared_norms()
    torch.testing.assert_close(found, block.dense().square().sum((1, 2)))


SPECIAL = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, 3e38])


@pytest.mark.parametrize(
    "x",
    [
        *(torch.linspace(-3, 3, entries) for entries in (7, 2**15 + 3, 2**20 + 5)),
        torch.linspace(-1e-6, 1e-6, 2**15),
        SPECIAL.repeat(2**13),
        torch.randn(2**8, 2**8).T,
        torch.randn(2**16).double(),
        torch.randn(2**16, dtype=torch.complex64),
        torch.randn(2**16).bfloat16(),
    ],
    ids=["few", "many", "parts", "small", "special", "strided", "double", "complex", "half"],
)
def test_tanh(x: Tensor) -> None:
    right = torch.tanh(x if x.is_complex() else x.double())
    precision = 1e-2 if x.dtype == torch.bfloat16 else 1e-6
    found = products.tanh(x)
    assert found.dtype == x.dtype
    torch.testing.assert_close(found.to(right.dtype), right, rtol=precision, atol=0, equal_nan=True)


def test_kernels_without_a_derivative_are_not_taken_where_one_is_asked_for() -> None:
    left, right = torch.randn(4, 8, requires_grad=True), torch.randn(5, 8)
    products.multiplied(left, right).sum().backward()
    batched = torch.func.vmap(products.multiplied, (0, None))(left.detach()[None], right)
    assert left.grad is not None
    torch.testing.assert_close(left.grad, right.sum(0).expand(4, 8))
    torch.testing.assert_close(batched[0], left.detach() @ right.T)
    x = torch.randn(2**16, requires_grad=True)
    (slope,) = torch.autograd.grad(products.tanh(x).sum(), x)
    torch.testing.assert_close(slope, 1 - x.detach().tanh() ** 2)
    batched = torch.func.vmap(products.tanh)(x.detach().view(2, -1))
    torch.testing.assert_close(batched.flatten(), x.detach().tanh())
