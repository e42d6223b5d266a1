"""Rows of tokens: every backend against autograd, one position of one sample at a time."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from gradscope import Scope, compare, model_loss
from gradscope.blocks import DenseBlock, OuterBlock
from gradscope.core.batch import Batch, Tokens
from gradscope.errors import CertificateError, CoupledSamplesError, SpecError

N, T, D = 4, 5, 6
BACKENDS = ("loop", "hooks", "vmap", "expand")
Loss = Callable[..., Any]


class Places(nn.Module):
    """Words and places, a map of each position, a norm: positions never meet."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, D), nn.Embedding(T, D)
        self.shift, self.scale = nn.Parameter(torch.randn(T, D)), nn.Parameter(torch.randn(1, 1, D))
        self.inner, self.norm, self.head = nn.Linear(D, 7), nn.LayerNorm(7), nn.Linear(7, 3, False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.words(ids) + self.places(torch.arange(ids.shape[1])) + self.shift
        out: Tensor = self.head(self.norm(self.inner(h * self.scale).tanh()))
        return out


class Attention(nn.Module):
    """Causal attention and a head, or the head alone."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0, batch_first=True)
        self.layer.requires_grad_(not frozen)
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]).to(x.dtype)
        out: Tensor = self.head(self.layer(x, src_mask=mask))
        return out


class Recurrent(nn.Module):
    """An LSTM and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(D, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(x)[0])
        return out


class Convolved(nn.Module):
    """Convolutions over the positions: of one, no position meets another but in the inputs."""

    def __init__(self, layers: int, stride: int = 1) -> None:
        super().__init__()
        widths = [D, 4, 3] if layers == 2 else [D, 3]
        self.layers = nn.ModuleList(
            nn.Conv1d(a, b, 3, stride, padding=1) for a, b in pairwise(widths)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = x.mT
        for layer in self.layers:
            h = layer(h).tanh()
        return h.mT


class Pixels(nn.Module):
    """A map with a loss for each pixel (h·w positions), its filters in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(4, 6, (2, 3), groups=2, padding=(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(self.layer(x).chunk(2, 1), -1).flatten(2, 3).movedim(1, -1).flatten(2)


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss (n, t)."""
    return (outputs - targets[:, : outputs.shape[1], : outputs.shape[2]]).square().sum(-1)


def counted(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same, some of whose positions count."""
    counts = targets[..., 0] > -0.5
    return squares(outputs, targets) * counts, counts


@model_loss
def penalised(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of the model."""
    return squares(model(inputs), targets) + model[0].weight.square().sum()  # type: ignore[index]


def linear() -> nn.Module:
    """Two maps of each position."""
    return nn.Sequential(nn.Linear(D, 5), nn.ReLU(), nn.Linear(5, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {  # and whether positions are kept apart
    "linear": (linear, True),
    "places": (Places, True),
    "attention": (Attention, False),
    "head": (lambda: Attention(frozen=True), True),
    "lstm": (Recurrent, False),
    "conv1d": (lambda: Convolved(2), False),
    "one conv1d": (lambda: Convolved(1), True),
    "group norm": (lambda: nn.Sequential(nn.GroupNorm(1, T), nn.Linear(D, 3)), False),
}


def data(name: str) -> tuple[Tensor, Tensor]:
    """Return inputs and targets for a model."""
    y = torch.randn(N, T, 3)
    return (torch.randint(0, 11, (N, T)) if name == "places" else torch.randn(N, T, D)), y


def oracle(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return {name: (m, *shape)} by autograd: one sample alone, one position at a time."""
    named = {k: p for k, p in model.named_parameters() if p.requires_grad}
    rows = []
    for i in range(len(x)):
        own = x[i : i + 1], y[i : i + 1]
        found = loss(model, *own) if loss is penalised else loss(model(own[0]), own[1])
        values, counts = found if isinstance(found, tuple) else (found, torch.ones_like(found))
        for t in counts[0].nonzero().flatten():
            rows.append(
                torch.autograd.grad(
                    values[0, t],
                    list(named.values()),
                    retain_graph=True,
                    allow_unused=True,
                    materialize_grads=True,
                )
            )
    return {
        k: torch.stack(column) for k, column in zip(named, zip(*rows, strict=True), strict=True)
    }


@pytest.fixture(autouse=True)
def doubles() -> Any:
    """Compute in float64, from the same random numbers."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def require_rows(model: nn.Module, loss: Loss, x: Tensor, y: Tensor, backend: str) -> Scope:
    """Hold rows, norms and an expectation against the oracle."""
    scope, right = Scope(model, loss, backend=backend, rows="token"), oracle(model, loss, x, y)
    for name, rows in scope.per_sample_gradients(x, y).items():
        torch.testing.assert_close(rows, right[name], rtol=1e-9, atol=1e-11)
    squared = torch.stack([g.flatten(1).square().sum(1) for g in right.values()]).sum(0)
    torch.testing.assert_close(scope.norms(x, y), squared.sqrt())
    factors = (0.5 / squared.sqrt()).clamp(max=1)
    found = scope.expectation("clip:max_norm=0.5 | mean", x, y)
    for name, rows in right.items():
        torch.testing.assert_close(
            found[name], torch.einsum("i,i...->...", factors, rows) / len(rows)
        )
    return scope


@pytest.mark.sampled
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_rows_are_those_of_one_position_at_a_time(name: str, backend: str) -> None:
    model, (x, y) = MODELS[name][0]().eval(), data(name)
    for loss in (squares, counted):
        require_rows(model, loss, x, y, backend)


@pytest.mark.parametrize("name", MODELS)
def test_one_pass_is_enough_where_positions_do_not_meet(name: str) -> None:
    """Then nothing is formed: the blocks are outer products of one position each."""
    factory, apart = MODELS[name]
    x, y = data(name)
    scope = Scope(factory().eval(), squares, backend="hooks", rows="token")
    gradients = scope.evaluate(Batch.of(x, y)).gradients
    weight = next(block for name, block in gradients.items() if name.endswith("weight"))
    assert scope.session.factored_tokens == apart
    assert not apart or not isinstance(weight, DenseBlock)
    if name == "linear":
        assert isinstance(weight, OuterBlock)
        assert weight.sizes == (1, 1, 5, D)


def test_what_meets_is_named_and_shares_its_forward_pass() -> None:
    calls: list[int] = []

    class Counted(Attention):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            return super().forward(x)

    model, (x, y) = Counted().eval(), data("attention")
    scope = Scope(model, squares, backend="hooks", rows="token", verify="never")
    scope.norms(x, y)
    (note,) = scope.notes
    assert f"backward pass ({T} per sample)" in note and "in_proj" in note
    calls.clear()
    rows = scope.per_sample_gradients(x, y)
    assert calls == [1] * N
    for name, right in oracle(model, squares, x, y).items():
        torch.testing.assert_close(rows[name], right, rtol=1e-9, atol=1e-11)
    scope.norms(x, y)
    assert scope.notes == [note]
    apart = Scope(linear(), squares, rows="token")
    apart.norms(x, y)
    assert not apart.notes


class Unbatched(torch.autograd.Function):
    """Sums over the positions before, by a backward pass that no vmap can run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.cumsum(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        found = gradients[0].flip(1).cumsum(1).flip(1)
        return found * (1.0 if float(found.abs().sum()) >= 0 else 0.0)


class Sums(nn.Module):
    """Maps of positions, and sums over those before."""

    def __init__(self, *, batched: bool) -> None:
        super().__init__()
        self.first, self.last, self.batched = nn.Linear(D, 5), nn.Linear(5, 3), batched

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        summed = h.cumsum(1) if self.batched else Unbatched.apply(h)  # type: ignore[no-untyped-call]
        out: Tensor = self.last(summed)
        return out


def test_a_backward_pass_that_takes_one_row_at_a_time() -> None:
    (x, y), model = data("linear"), Sums(batched=False)
    require_rows(model, squares, x, y, "hooks")
    own = Sums(batched=True)
    own.load_state_dict(model.state_dict())
    found = Scope(model, squares, backend="hooks", rows="token").per_sample_gradients(x, y)
    for name, right in oracle(own, squares, x, y).items():
        torch.testing.assert_close(found[name], right, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss_of_the_model(backend: str) -> None:
    require_rows(linear(), penalised, *data("linear"), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_of_a_map(backend: str) -> None:
    x, y = torch.randn(N, 4, 3, 5), torch.randn(N, 2 * 5, 6)
    scope = require_rows(Pixels(), squares, x, y, backend)
    assert scope.session.factored_tokens == (backend == "hooks")


def test_a_strided_convolution_owns_several_pixels_each() -> None:
    """Its outputs are fewer than the inputs, and a position's loss may take two of them."""

    def pairs(outputs: Tensor, targets: Tensor) -> Tensor:
        return squares(outputs, targets).unflatten(1, (2, 2)).sum(2)

    x, y = torch.randn(N, 8, D), torch.randn(N, 4, 3)
    scope = require_rows(Convolved(1, stride=2), pairs, x, y, "hooks")
    assert scope.session.factored_tokens


def test_a_single_sample_and_a_single_row() -> None:
    for name in ("linear", "attention"):
        model, (x, y) = MODELS[name][0]().eval(), data(name)
        require_rows(model, squares, x[:1], y[:1], "hooks")
        require_rows(model, squares, x[:1], y[:1, :1].expand(1, T, 3), "hooks")


class TimeMajor(nn.Module):
    """Two maps, samples behind positions: one sample alone is not copied on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = linear()

    def forward(self, x: Tensor) -> Tensor:
        rows = self.maps(x.transpose(0, 1).reshape(-1, D))
        out: Tensor = rows.view(x.shape[1], len(x), 3).transpose(0, 1)
        return out


@pytest.mark.parametrize(("factory", "seen"), [(linear, [1]), (TimeMajor, [2])])
@pytest.mark.parametrize("t", [1, T])
def test_a_single_sample_stands_twice_only_if_it_runs_otherwise(
    factory: Callable[[], nn.Module], seen: list[int], t: int
) -> None:
    calls: list[int] = []
    model, (x, y) = factory(), data("linear")
    x, y = x[:, :t], y[:, :t]
    scope = require_rows(model, squares, x[:1], y[:1], "hooks")
    assert scope.session.factored_tokens
    model.register_forward_pre_hook(lambda _, given: calls.append(len(given[0])))
    for k in (1, 2):
        apart = Scope(model, squares, backend="hooks", rows="token", verify="never")
        apart.norms(x[:1], y[:1])
        calls.clear()
        found = apart.per_sample_gradients(x[k : k + 1], y[k : k + 1])
        assert calls == seen or t == 1
        for name, right in oracle(model, squares, x[k : k + 1], y[k : k + 1]).items():
            torch.testing.assert_close(found[name], right, rtol=1e-9, atol=1e-11)


def test_losses_that_cancel_in_their_sum() -> None:
    """Differences of neighbours: of all positions but the ends the total has no gradient."""

    def differences(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs[:, 1:, 0] - outputs[:, :-1, 0]

    scope = require_rows(nn.Linear(D, 1), differences, *data("linear"), "hooks")
    assert not scope.session.factored_tokens


def test_tokens_sum_to_the_sample() -> None:
    model, (x, _) = MODELS["attention"][0]().eval(), data("attention")
    classes = torch.randint(0, 3, (N, T))
    classes[1, 2:] = -100
    whole = Scope(Transposed(model), "cross_entropy:per_sample=sum")
    each = Scope(Transposed(model), "cross_entropy", rows="token")
    sample, position = each.positions(x, classes)
    assert torch.equal(torch.stack([sample, position], 1), (classes != -100).nonzero())
    rows = each.per_sample_gradients(x, classes)
    for name, right in whole.per_sample_gradients(x, classes).items():
        found = torch.zeros_like(right).index_add_(0, sample, rows[name])
        torch.testing.assert_close(found, right)


class Transposed(nn.Module):
    """Classes on axis 1, where `cross_entropy` looks for them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x).mT
        return out


def test_next_tokens_of_a_language_model() -> None:
    """`causal_lm` has one position less than tokens, and leaves padding out."""
    model, ids = nn.Sequential(nn.Embedding(11, D), nn.Linear(D, 11)), torch.randint(0, 11, (N, T))
    ids[2, 3:] = 7

    def right(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        values = F.cross_entropy(outputs[:, :-1].mT, targets[:, 1:], reduction="none")
        return values, targets[:, 1:] != 7

    scope = Scope(model, "causal_lm:ignore_index=7", rows="token")
    found = scope.per_sample_gradients(ids, ids)
    for name, rows in oracle(model, right, ids, ids).items():
        torch.testing.assert_close(found[name], rows)
    assert scope.session.factored_tokens


def test_the_proof_finds_wrong_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that change places keep every sum over a sample, and are found out."""
    from gradscope.backends import hooks

    right = hooks.row_axis

    def swapped(gradient: Tensor, weighted: Any, axis: Any, rows: Tensor, marks: Any) -> Any:
        return right(gradient, weighted, axis, rows[:, [1, 0, *range(2, T)]], marks)

    monkeypatch.setattr(hooks, "row_axis", swapped)
    with pytest.raises(CertificateError, match=r"(position . |tokens )of sample"):
        Scope(linear(), squares, backend="hooks", rows="token").norms(*data("linear"))


def test_coupled_samples_are_refused_and_named() -> None:
    model = nn.Sequential(nn.Linear(D, 4), nn.BatchNorm1d(T), nn.Linear(4, 3)).train()
    for backend in BACKENDS:
        with pytest.raises(CoupledSamplesError, match="BatchNorm1d") as caught:
            Scope(model, squares, backend=backend, rows="token").norms(*data("linear"))
        assert 'whole samples (rows="sample")' in str(caught.value)
    Scope(model, squares, rows="token", coupling="frozen").norms(*data("linear"))  # as advised
    whole = Scope(model, lambda o, y: squares(o, y).sum(1), coupling="own-loss", backend="loop")
    whole.norms(*data("linear"))


def test_fixed_random_numbers_are_those_of_the_sample() -> None:
    """All positions of a sample see the masks that the sample sees as a whole."""
    model = nn.Sequential(nn.Linear(D, 8), nn.Dropout(0.5), nn.Linear(8, 3)).train()
    x, y = data("linear")
    given = {"randomness": "fixed", "seed": 3}
    right = Scope(model, lambda o, y: squares(o, y).sum(1), **given).per_sample_gradients(x, y)
    for backend in BACKENDS:
        scope = Scope(model, squares, backend=backend, rows="token", **given)
        for name, rows in scope.per_sample_gradients(x, y).items():
            torch.testing.assert_close(rows.unflatten(0, (N, T)).sum(1), right[name])


def test_rows_keep_to_their_samples_when_selected() -> None:
    x, y = data("linear")
    rows = Tokens.among(Batch.of(x, y), torch.rand(N, T) > 0.4)
    some = rows.select(torch.tensor([len(rows) - 1, 2, 0]))
    for k, row in enumerate((len(rows) - 1, 2, 0)):
        assert torch.equal(some.inputs[some.sample[k]], x[rows.samples[row]])
        assert int(some.position[k]) == int(rows.position[row])
    assert int(some.index[1]) == int(rows.samples[2]) * T + int(rows.position[2])
    assert len(some.sample_index) == len({int(k) for k in some.samples})


def test_all_backends_agree_in_compare() -> None:
    found = compare(Attention().eval(), squares, *data("attention"), rows="token")
    assert found.agrees
    assert found.samples == N * T
    assert [row.status for row in found.rows] == ["agrees"] * 4


def test_what_is_not_of_tokens_is_refused() -> None:
    model, (x, y) = linear(), data("linear")
    for wrong in (lambda v: v.sum(1), lambda v: v[:, :0], lambda v: v.long()):
        with pytest.raises(SpecError, match="one per position"):
            Scope(model, lambda o, y, wrong=wrong: wrong(squares(o, y)), rows="token").norms(x, y)
    with pytest.raises(SpecError, match="one number per sample") as caught:
        Scope(model, squares).norms(x, y)
    assert 'rows="token"' in str(caught.value)
    with pytest.raises(SpecError, match="booleans"):
        Scope(model, lambda o, y: (squares(o, y), y[..., 0]), rows="token").norms(x, y)
    with pytest.raises(SpecError, match="no position"):
        nothing = Scope(model, lambda o, y: (squares(o, y), y[..., 0] > 99), rows="token")
        nothing.norms(x, y)
    with pytest.raises(SpecError, match="own-loss"):
        Scope(model, squares, rows="token", coupling="own-loss")
    with pytest.raises(SpecError, match="labels sampled"):
        Scope(model, "cross_entropy", rows="token", labels="sampled")
    with pytest.raises(SpecError, match="one row a token"):
        Scope(model, "mse:per_sample=mean", rows="token")
    with pytest.raises(SpecError, match="positions are defined"):
        Scope(model, lambda o, y: squares(o, y).sum(1)).positions(x, y)
