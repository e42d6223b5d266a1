"""Batches without samples, as Poisson sampling draws them: answered without running the model."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import gradscope
from gradscope.backends.base import backends
from gradscope.blocks import DenseBlock, Gradients
from gradscope.core.batch import Batch
from gradscope.engine.chains import bind
from gradscope.engine.fold import fold
from gradscope.errors import DatasetError, GradscopeError, SpecError

NOBODY = torch.zeros(0, dtype=torch.int64)
SHAPES = {"0.weight": (0, 4, 3), "0.bias": (0, 4), "2.weight": (0, 2, 4), "2.bias": (0, 2)}


class Refusing(nn.Sequential):
    """A model that fails on a batch without samples, as many do."""

    def forward(self, x: Tensor) -> Tensor:
        assert len(x)
        found: Tensor = super().forward(x)
        return found


def model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return Refusing(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def some(n: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, dtype=dtype), torch.randint(2, (n,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", ["auto", *backends.names()])
def test_rows_norms_and_sums(backend: str, dtype: torch.dtype) -> None:
    """The first batch, too, may be empty: the one that follows is proved."""
    with gradscope.Scope(model(dtype), "cross_entropy", backend=backend) as scope:
        for _ in range(2):
            nobody = some(0, dtype)
            rows = scope.per_sample_gradients(*nobody)
            assert {k: tuple(v.shape) for k, v in rows.items()} == SHAPES
            assert all(v.dtype == dtype for v in rows.values())
            assert scope.norms(*nobody).shape == (0,)
            assert {v.shape for v in scope.norms(*nobody, per="parameter").values()} == {(0,)}
            for name, value in scope.expectation("clip:max_norm=1 | sum", *nobody).items():
                assert value.shape == SHAPES[name][1:] and value.dtype == dtype and not value.any()
            if scope.certificate is None:
                scope.per_sample_gradients(*some(5, dtype))
            assert scope.certificate is not None and scope.certificate.samples == 5


def test_the_noise_is_added_all_the_same() -> None:
    """What DP-SGD adds to a sum of no sample is what it adds to any sum."""
    x, y = some(5)
    with gradscope.Scope(model(), "cross_entropy") as scope:
        found = scope.expectation("clip:max_norm=1 | sum | noise:std=2", *some(0))
        plain = scope.expectation("clip:max_norm=1 | sum", x, y)
        noisy = scope.expectation("clip:max_norm=1 | sum | noise:std=2", x, y)
    for name, noise in found.items():
        assert noise.any()
        torch.testing.assert_close(noisy[name] - plain[name], noise)


@pytest.mark.parametrize("chain", ["mean", "second_moment", "var", "norm | quantile:q=0.5", "gram"])
def test_what_has_no_value_without_samples_is_refused(chain: str) -> None:
    with (
        gradscope.Scope(model(), "cross_entropy") as scope,
        pytest.raises(DatasetError, match=r"is empty, and .* no value") as caught,
    ):
        scope.expectations(["sum", chain], *some(0))
    assert "Use the reducer sum" in str(caught.value)


@pytest.mark.parametrize("chain", ["center | sum", "hvp | sum", "ekfac", "max"])
def test_a_stage_that_needs_samples_is_refused(chain: str) -> None:
    with (
        gradscope.Scope(model(), "cross_entropy") as scope,
        pytest.raises(DatasetError, match="no value without samples"),
    ):
        scope.expectation(chain, *some(0))


@pytest.mark.parametrize(
    "chain", ["norm | sum", "project:dim=5 | sum", "square | sum", "nonfinite"]
)
def test_sums_of_other_shapes(chain: str) -> None:
    with gradscope.Scope(model(), "cross_entropy") as scope:
        found, expected = (scope.expectation(chain, *some(n)) for n in (0, 5))
    for name, value in expected.items():
        assert found[name].shape == value.shape and found[name].dtype == value.dtype
        assert not found[name].any()


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2).double()

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        found: Tensor = self.layer(x) * scale
        return found


@pytest.mark.parametrize("form", [dict, tuple])
def test_inputs_by_name_and_by_position(form: type) -> None:
    x, _ = some(0)
    scale = torch.tensor(2.0).double()  # a constant of all samples has no sample axis
    inputs: Any = {"x": x, "scale": scale} if form is dict else (x, scale)
    assert gradscope.norms(Named(), "mse", inputs, torch.zeros(0, 2).double()).shape == (0,)
    with gradscope.Scope(Named(), "mse") as scope:
        rows = scope.per_sample_gradients(inputs, torch.zeros(0, 2).double(), index=NOBODY)
    assert rows["layer.weight"].shape == (0, 2, 3)


def test_one_empty_tensor_among_others_is_an_error() -> None:
    for x, y in ((some(0)[0], some(3)[1]), (some(3)[0], some(0)[1])):
        with pytest.raises(DatasetError, match="different numbers of samples"):
            gradscope.norms(model(), "cross_entropy", x, y)
    with pytest.raises(DatasetError, match="no sample"):
        gradscope.norms(model(), "cross_entropy", torch.tensor(1.0))


def test_buffers_of_no_row() -> None:
    with gradscope.Scope(model(), "cross_entropy") as scope:
        rows = scope.per_sample_gradients(*some(0))
        again = scope.per_sample_gradients(*some(0), out=rows)
        assert all(again[name] is rows[name] for name in rows)


@pytest.mark.parametrize("options", [{"coupling": "own-loss"}, {"verify": "always"}], ids=str)
def test_with_other_settings(options: dict[str, Any]) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    net.train("coupling" in options)
    with gradscope.Scope(net, "cross_entropy", **options) as scope:
        for n in (0, 4, 0):
            rows = scope.per_sample_gradients(*some(n))
            assert {len(v) for v in rows.values()} == {n}
            assert not n or scope.expectation("sum", *some(n))["0.weight"].any()


def test_labels() -> None:
    for labels in ("sampled", "exact"):
        with gradscope.Scope(model(), "cross_entropy", labels=labels) as scope:
            assert not scope.expectation("square | sum", *some(0))["0.weight"].any()
            if labels == "sampled":
                assert len(scope.norms(*some(0))) == 0


def test_a_frozen_layer_has_no_rows() -> None:
    net = model()
    with gradscope.Scope(net, "cross_entropy") as scope:
        scope.per_sample_gradients(*some(3))
        net[0].requires_grad_(False)  # type: ignore[index]
        assert {*scope.per_sample_gradients(*some(0))} == {"2.weight", "2.bias"}


def token_loss(outputs: Tensor, targets: Tensor) -> Any:
    values = F.cross_entropy(outputs.mT, targets.clamp(min=0), reduction="none")
    return values, targets >= 0


def test_tokens() -> None:
    x, y = torch.randn(0, 5, 3).double(), torch.zeros(0, 5, dtype=torch.int64)
    with gradscope.Scope(model(), token_loss, rows="token") as scope:
        for _ in range(2):
            assert {
                k: tuple(v.shape) for k, v in scope.per_sample_gradients(x, y).items()
            } == SHAPES
            sample, position = scope.positions(x, y)
            assert sample.shape == position.shape == (0,) and position.dtype == torch.int64
            assert not scope.expectation("sum", x, y)["0.weight"].any()
            rows = scope.per_sample_gradients(torch.randn(2, 5, 3).double(), y.new_ones(2, 5))
            assert len(rows["0.bias"]) == 10
        with pytest.raises(SpecError, match="no position of these samples counts"):
            scope.norms(torch.randn(2, 5, 3).double(), y.new_full((2, 5), -1))


def test_states_stay_as_they_were() -> None:
    chains = ["clip:max_norm=1 | mean", "norm | quantile:q=0.5", "var", "gram", "kfac", "max"]
    batches = [Batch.of(*some(n), empty=True) for n in (0, 3, 0, 4, 0)]
    with gradscope.Scope(model(), "cross_entropy", backend="hooks") as scope:
        bound = {text: bind(text) for text in chains}
        found, _ = fold(scope.session, batches, bound, count=len(batches))
        expected, _ = fold(scope.session, [b for b in batches if len(b)], bound)
        assert [*found.states] == chains
        for text in chains:
            torch.testing.assert_close(found.states[text], expected.states[text])


def test_blocks_of_no_sample() -> None:
    block = DenseBlock(torch.zeros(0, 4, 3)).to(torch.float64)
    assert block.squared_norms().shape == block.norms(1).shape == (0,)
    assert block.dot(torch.ones(4, 3).double()).shape == (0,)
    for value in (block.weighted_sum(), block.squared_sum(), *block.sums()):
        assert value.shape == (4, 3) and not value.any()
    assert Gradients({"w": block}).norms.shape == (0,)


def test_a_monitor_waits_for_a_batch_with_samples() -> None:
    net = model()
    with (
        warnings.catch_warnings(),
        gradscope.training.Monitor(net, "cross_entropy", every=1, overhead=None) as monitor,
    ):
        warnings.simplefilter("error")
        monitor.start()
        for n in (0, 4, 0):
            before = monitor.latest
            monitor.step(*some(n))
            assert (monitor.latest is before) == (n == 0)


def test_a_probe_of_no_sample_is_an_error() -> None:
    monitor = gradscope.training.Monitor(
        model(), "cross_entropy", every=1, overhead=None, probe=some(0), errors="raise"
    )
    monitor.start()
    with pytest.raises(GradscopeError, match="no sample"):
        monitor.step(*some(3))
