"""Choosing between ways, and the ways of matrix products against einsum in float64."""

import pytest
import torch
from torch import Tensor

from gradscope.blocks import (
    ConvolutionBlock,
    DenseBlock,
    Geometry,
    Gradients,
    OuterBlock,
    SquaredBlock,
    outer,
    products,
    ways,
)
from gradscope.blocks.derived import ScaledBlock
from gradscope.blocks.ways import Way, fastest
from gradscope.stages.chain import bind


class Clock:
    """Ways that say how long they took, and count how often they ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
        self.seconds, self.runs = seconds, dict.fromkeys(seconds, 0)
        monkeypatch.setattr(ways, "_timed", self._timed)
        monkeypatch.setattr(ways, "_chosen", {})

    def way(self, name: str, predicted: float = 1.0) -> Way:
        def run() -> Tensor:
            self.runs[name] += 1
            self.last = name
            return torch.tensor(float(list(self.seconds).index(name)))

        return Way(predicted, run)

    def _timed(self, run, device: torch.device) -> tuple[float, Tensor]:
        answer = run()
        return self.seconds[self.last], answer


def asked(clock: Clock, n: int = 8, **predicted: float) -> str:
    table = {name: clock.way(name, predicted.get(name, 1.0)) for name in clock.seconds}
    return list(clock.seconds)[int(fastest("r", n, torch.zeros(1), table))]


def test_the_fastest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, slow=3.0, fast=1.0, middling=2.0)
    assert asked(clock) == "fast"
    assert clock.runs == {"slow": 2, "fast": 2, "middling": 2}
    assert [asked(clock, n=n) for n in (5, 8)] == ["fast", "fast"]
    assert clock.runs == {"slow": 2, "fast": 4, "middling": 2}
    (choice,) = ways.choices()
    assert choice.way == "fast"
    assert choice.seconds == {"slow": 3.0, "fast": 1.0, "middling": 2.0}


def test_another_size_is_another_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, a=1.0, b=2.0)
    asked(clock, n=8)
    clock.seconds["a"] = 3.0
    assert asked(clock, n=9) == "b"
    assert len(ways.choices()) == 2


def test_what_is_hopeless_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, good=1.0, other=2.0, hopeless=0.5)
    assert asked(clock, hopeless=100.0) == "good"
    assert clock.runs["hopeless"] == 0


def test_small_work_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, a=1.0, b=2.0)
    assert asked(clock, a=2e-6, b=1e-6) == "b"
    assert clock.runs == {"a": 0, "b": 1}
    assert ways.choices() == ()


def test_without_measuring_the_cost_model_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, a=1.0, b=2.0)
    with ways.predicted() as known:
        assert asked(clock, b=0.5) == "b"
    assert clock.runs == {"a": 0, "b": 1}
    assert [(c.way, c.seconds) for c in known.values()] == [("b", {"a": 1.0, "b": 0.5})]
    assert asked(clock, b=0.5) == "a"


def test_a_preferred_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, a=1.0, b=2.0)
    with ways.preferring("b"):
        assert asked(clock) == "b"
    assert asked(clock) == "a"


@pytest.mark.parametrize("way", ["gemm", "oneDNN"])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128], ids=str)
def test_contracted(way: str, k: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(5, k, 4, 7).to(dtype), torch.randn(5, k, 4, 3).to(dtype)
    with ways.preferring(way):
        found = products.contracted(left, right)
    right_one = torch.einsum("nktr,nktc->krc", left.cdouble(), right.cdouble())
    torch.testing.assert_close(found.cdouble(), right_one, rtol=1e-5, atol=1e-5)


@pytest.fixture(params=[True, False], ids=["oneDNN", "gemm"])
def onednn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With oneDNN, and without."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: request.param)


@pytest.mark.parametrize("lead", [(), (6,), (2, 3)], ids=str)
def test_multiplied(onednn: None, lead: tuple[int, ...]) -> None:
    """As a linear layer, for factors with any strides."""
    torch.manual_seed(0)
    left, right, bias = torch.randn(*lead, 8), torch.randn(5, 8), torch.randn(5)
    wide = torch.randn(5, 3, 16)[:, 1, ::2]
    for factor in (right, right.T.contiguous().T, wide, right[:1].expand(5, 8)):
        for extra in (None, bias):
            found = products.multiplied(left, factor, extra)
            exact = left.double() @ factor.double().T + (0 if extra is None else extra)
            torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.bfloat16], ids=str)
def test_multiplied_in_other_formats(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(6, 8).to(dtype), torch.randn(8, 5).to(dtype).mT
    torch.testing.assert_close(products.multiplied(left, right), left @ right.mT)


@pytest.mark.parametrize("after", ["sigmoid", "tanh"])
def test_multiplied_and_squashed(onednn: None, after: products.Activation) -> None:
    torch.manual_seed(0)
    left, right, bias = torch.randn(4, 6, 8), torch.randn(5, 8), torch.randn(5)
    found = products.multiplied(left, right, bias, after)
    exact = getattr(torch, after)(left.double() @ right.double().T + bias)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["together", "one by one"])
@pytest.mark.parametrize("given", [False, True], ids=["new", "into a buffer"])
@pytest.mark.parametrize("lie", ["positions", "entries", "samples inside"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_separate(
    way: str, given: bool, lie: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sample by sample, whatever lies next to each other in memory."""
    monkeypatch.setattr(products, "_WORTH_A_CALL", 0)
    torch.manual_seed(0)
    left, right = torch.randn(6, 9, 4, dtype=dtype), torch.randn(6, 9, 5, dtype=dtype)
    if lie == "entries":
        left, right = (f.mT.contiguous().mT for f in (left, right))
    if lie == "samples inside":
        left, right = (f.transpose(0, 1).contiguous().transpose(0, 1) for f in (left, right))
    out = torch.full((6, 4, 5), torch.nan, dtype=dtype) if given else None
    with ways.preferring(way):
        found = products.separate(left, right, out)
    torch.testing.assert_close(found, torch.einsum("mtr,mtc->mrc", left, right))
    assert out is None or found.data_ptr() == out.data_ptr()


@pytest.mark.parametrize("k", [1, 2])
def test_contracted_positions_may_come_before_samples(k: int) -> None:
    torch.manual_seed(0)
    left, right = (torch.randn(9, 6, k, c).permute(1, 2, 0, 3) for c in (4, 5))
    found = products.contracted(left, right)
    torch.testing.assert_close(found, torch.einsum("nktr,nktc->krc", left, right))


def test_the_kernel_without_a_derivative_is_not_taken_where_one_is_asked_for() -> None:
    left, right = torch.randn(4, 8, requires_grad=True), torch.randn(5, 8)
    products.multiplied(left, right).sum().backward()
    batched = torch.func.vmap(products.multiplied, (0, None))(left.detach()[None], right)
    assert left.grad is not None
    torch.testing.assert_close(left.grad, right.sum(0).expand(4, 8))
    torch.testing.assert_close(batched[0], left.detach() @ right.T)


@pytest.mark.parametrize("t", [1, 2, 127, 128, 131, 260])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_ghost_norms_of_many_positions(t: int, dtype: torch.dtype) -> None:
    torch.manual_seed(t)
    left, right = torch.randn(3, t, 5, dtype=dtype), torch.randn(3, t, 4, dtype=dtype)
    dense = torch.einsum("mtr,mtc->mrc", left, right)
    torch.testing.assert_close(products.ghost(left, right), dense.abs().square().sum((1, 2)))


@pytest.mark.parametrize("way", ["gram", "dense"])
def test_norms_of_an_outer_product_both_ways(way: str) -> None:
    torch.manual_seed(1)
    block = OuterBlock(torch.randn(6, 2, 9, 4).double(), torch.randn(6, 2, 9, 5).double(), (8, 5))
    with ways.preferring(way):
        found = block.squared_norms()
    torch.testing.assert_close(found, block.dense().square().sum((1, 2)))


@pytest.mark.parametrize("entries", [3, 40_000], ids=["short rows", "long rows"])
@pytest.mark.parametrize("weighted", [False, True])
def test_both_sums_at_once(entries: int, weighted: bool) -> None:
    torch.manual_seed(2)
    values = torch.randn(7, entries)
    w, u = (torch.rand(7), torch.rand(7)) if weighted else (None, None)
    first, second = DenseBlock(values).sums(w, u)
    ones = torch.ones(7)
    for found, weights, power in ((first, w, 1), (second, u, 2)):
        factors = (ones if weights is None else weights).double()
        right = (factors.unsqueeze(1) * values.double() ** power).sum(0)
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)


def test_a_bound_is_above_every_norm_and_shows_what_is_not_finite() -> None:
    torch.manual_seed(3)
    walk = Geometry((1, 1), (1, 1), (1, 1), (0, 0), 1, False)
    blocks = [
        DenseBlock(torch.randn(4, 5)),
        OuterBlock.matrix(torch.randn(4, 3, 2), torch.randn(4, 3, 5)),
        ConvolutionBlock(
            torch.randn(4, 1, 2, 6, 6), torch.randn(4, 1, 3, 6, 6), (3, 2, 3, 3), walk
        ),
    ]
    factors = torch.tensor([3.0, -4.0, 0.0, 1.0])
    blocks += [*(ScaledBlock(block, factors) for block in blocks), *map(SquaredBlock, blocks)]
    for block in blocks:
        assert float(block.bound()) >= float(block.norms().max())
        for factor in (torch.inf, torch.nan):
            bad = block.scale(torch.tensor([1.0, factor, 1.0, 1.0]))
            assert not float(bad.bound()) < torch.inf


@pytest.mark.parametrize(
    "stage",
    ["sign", "abs", "power:p=3", "power:p=2.5", "clamp:min=-1", "clamp:min=-1,max=2",
     "threshold:value=0.5", "square", "scale:by=-3"],
)  # fmt: skip
def test_a_bound_goes_with_a_transform_of_entries(stage: str) -> None:
    torch.manual_seed(5)
    for scale in (1e-3, 1.0, 1e5):
        base = DenseBlock(torch.randn(4, 5) * scale)
        (block,) = bind(stage).rows(Gradients({"w": base})).values()
        assert float(block.norms().max()) <= float(block.bound()) < torch.inf
    for value in (torch.inf, torch.nan):
        bad = DenseBlock(torch.tensor([[1.0, value], [1.0, 2.0]]))
        (block,) = bind(stage).rows(Gradients({"w": bad})).values()
        assert not float(block.bound()) < torch.inf


@pytest.mark.parametrize(
    ("sizes", "dense"),
    [
        ((32, 1, 128, 128, 128), True),
        ((32, 2, 128, 64, 128), True),
        ((32, 1, 4, 128, 128), False),  # a few positions: their Gram matrices are tiny
        ((32, 1, 1, 128, 128), False),
        ((320, 1, 128, 128, 128), False),  # 20 MiB
    ],
    ids=str,
)
def test_what_is_formed_for_norms_and_a_sum(sizes: tuple[int, ...], dense: bool) -> None:
    torch.manual_seed(4)
    n, k, t, r, c = sizes
    block = OuterBlock(torch.randn(n, k, t, r), torch.randn(n, k, t, c), (k * r, c))
    formed = block.formed()
    assert isinstance(formed, DenseBlock) is dense
    anyway = t > 1 and 4 * n * k * r * c <= outer.KEPT
    assert isinstance(block.formed(anyway=True), DenseBlock) is anyway
    exact = torch.einsum("nktr,nktc->nkrc", block.left.double(), block.right.double())
    weights = torch.rand(n)
    torch.testing.assert_close(
        formed.squared_norms().double(), exact.square().sum((1, 2, 3)), rtol=1e-4, atol=0
    )
    torch.testing.assert_close(
        formed.weighted_sum(weights).double(),
        torch.einsum("n,nkrc->krc", weights.double(), exact).reshape(block.shape),
        rtol=1e-4,
        atol=1e-3,
    )


def test_half_precision_is_not_formed() -> None:
    """Dense it would be rounded, and its norms and sums are taken in float32."""
    factor = torch.randn(32, 1, 128, 128).bfloat16()
    block = OuterBlock(factor, factor, (128, 128))
    assert block.formed() is block
    assert block.formed(anyway=True) is block


@pytest.mark.parametrize(("room", "count"), [(0, 0), (6000, 1), (20_000, 2), (10**6, 3)])
def test_what_is_formed_of_many_has_a_limit(
    room: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradscope.blocks.gradients._FORMED", room)
    torch.manual_seed(5)
    names = {"a": (15, 20), "b": (10, 300), "c": (10, 12)}  # 4 samples: 4,800, 48,000, 1,920 bytes
    given = Gradients(
        {
            name: OuterBlock.matrix(torch.randn(4, 7, r), torch.randn(4, 7, c))
            for name, (r, c) in names.items()
        }
    )
    rows = {name: block.dense().clone() for name, block in given.items()}
    found = given.formed(anyway=True)
    kinds = [isinstance(block, DenseBlock) for block in found.values()]
    assert kinds == [count >= 1, count == 3, count >= 2]
    squares = sum(row.square().sum((1, 2)) for row in rows.values())
    torch.testing.assert_close(found.norms, squares.sqrt())
    for name, row in rows.items():
        torch.testing.assert_close(found[name].dense(), row)
        torch.testing.assert_close(found[name].weighted_sum(), row.sum(0), rtol=1e-4, atol=1e-5)
    assert found.formed(anyway=True) is found  # what is known already is not computed again
