"""Random numbers fixed by seed and sample: every backend, batch and order has the same masks."""

import random
import warnings
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from scipy import stats
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch.utils.checkpoint import checkpoint

import gradscope
from gradscope.core.batch import Batch
from gradscope.errors import (
    CertificateError,
    CoupledSamplesError,
    DatasetError,
    RefusedError,
    UnsupportedError,
)
from gradscope.model.randomness import DrawAxis
from tests.oracle import cross_entropy, per_sample_gradients

BACKENDS = ("hooks", "vmap", "expand")
N, T, I, O = 7, 5, 6, 8  # noqa: E741


class Net(nn.Module):
    """Two linear maps and what is between them; `body(self, x)` calls them."""

    def __init__(self, body: Callable[["Net", Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.a, self.b = nn.Linear(I, O), nn.Linear(O, 3)
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, 3) of x (n, t, i)."""
        return self.body(self, x)


def between(fn: Callable[[Tensor], Tensor]) -> Callable[[], Net]:
    """A model with `fn` between its maps, on (n, o)."""
    return lambda: Net(lambda net, x: net.b(fn(net.a(x.mean(1)))))


def sequence(fn: Callable[[Net, Tensor], Tensor], **layers: Callable[[], nn.Module]):
    """A model with `fn` between its maps, from (n, t, o) to (n, o)."""
    return lambda: Net(
        lambda net, x: net.b(fn(net, net.a(x))), **{k: make() for k, make in layers.items()}
    )


def turned(fn: Callable[[Tensor], Tensor]) -> Callable[[Net, Tensor], Tensor]:
    """`fn` of (t, n, o), its positions averaged."""
    return lambda net, h: fn(h.transpose(0, 1)).mean(0)


def noise(h: Tensor) -> Tensor:
    each = torch.rand(h.shape[0], 1, dtype=h.dtype) + torch.randn(h.shape, dtype=h.dtype)
    return h * (each + torch.rand_like(h) + torch.randn_like(h)) + torch.rand(O)


def filled(h: Tensor) -> Tensor:
    made = torch.empty_like(h).exponential_(2.0) + torch.empty_like(h).uniform_(-1, 1)
    made += torch.empty_like(h).geometric_(0.4) + torch.empty_like(h).log_normal_(0, 0.1)
    return h * (made + torch.empty_like(h).normal_(0, 2) + torch.empty_like(h).cauchy_() * 1e-3)


def given(h: Tensor) -> Tensor:
    """By out=, which is large enough, or not, and of another type."""
    found = torch.rand(h.shape, out=torch.empty(0)) + torch.randn(h.shape, out=torch.empty(h.shape))
    found = found + torch.bernoulli(h.sigmoid().detach(), out=torch.empty_like(h))
    found = found + torch.normal(h.detach(), torch.ones_like(h), out=torch.empty_like(h))
    whole = torch.randint(5, h.shape, out=torch.empty(h.shape, dtype=torch.int64))
    place = torch.multinomial(
        h.softmax(-1).detach(), 2, out=torch.empty(len(h), 2, dtype=torch.int64)
    )
    return h * (found + whole + place.sum(1, keepdim=True))


def shuffled_and_back(h: Tensor) -> Tensor:
    order = torch.randperm(len(h))
    return F.dropout(h, 0.3) + h[order].tanh()[order.argsort()]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def recomputed(reentrant: bool) -> Callable[[Net, Tensor], Tensor]:
    def fn(net: Net, h: Tensor) -> Tensor:
        def inner(h: Tensor) -> Tensor:
            return F.dropout(net.c(F.dropout(h, 0.3)).tanh(), 0.3)

        h = checkpoint(inner, F.dropout(h.mean(1), 0.2), use_reentrant=reentrant)
        return F.dropout(h, 0.2)

    return fn


def attention(**options: object) -> Callable[[], nn.Module]:
    return lambda: nn.MultiheadAttention(O, 4, dropout=0.3, **options)


def compiled() -> nn.Module:
    inner = nn.Sequential(nn.Linear(O, O), nn.Dropout(0.3), nn.Tanh(), nn.Linear(O, O))
    return torch.compile(inner, backend="aot_eager")


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(nn.Sequential(nn.Linear(O, O), nn.Dropout(0.3)))


CASES: dict[str, Callable[[], Net]] = {
    "dropout": between(lambda h: F.dropout(h, 0.4)),
    "dropout_in_place": between(lambda h: F.dropout(h * 1, 0.4, inplace=True)),
    "alpha_dropout": between(lambda h: F.alpha_dropout(h, 0.4, training=True)),
    "rrelu": between(lambda h: F.rrelu(h, training=True)),
    "gumbel": between(lambda h: F.gumbel_softmax(h)),
    "noise": between(noise),
    "filled": between(filled),
    "shared_by_all": between(lambda h: h * torch.rand(O)),
    "one_way_for_all": between(lambda h: h if torch.rand(()) < 0.5 else h.tanh()),
    "python_and_numpy": between(lambda h: h * random.random() + np.random.rand()),
    "rows_dropped": between(lambda h: h * h.new_empty((h.shape[0], 1)).bernoulli_(0.5)),
    "rows_dropped_by_empty": between(lambda h: h * torch.empty((h.shape[0], 1)).bernoulli_(0.5)),
    "bernoulli": between(lambda h: h * torch.bernoulli(h.sigmoid().detach())),
    "normal": between(lambda h: h + torch.normal(0.0, 1.0, h.shape) + torch.normal(h.detach(), 1)),
    "randint": between(lambda h: h * torch.randint(-2, 5, h.shape) + torch.randint(9, h.shape)),
    "randperm": between(lambda h: h[:, torch.randperm(O)]),
    "random": between(lambda h: h * torch.empty_like(h).random_(2, 9)),
    "poisson": between(lambda h: h * torch.poisson(h.detach().exp() * 3)),
    "binomial": between(
        lambda h: h * torch.binomial(torch.arange(O).to(h).expand_as(h), h.sigmoid().detach())
    ),
    "gamma": between(lambda h: h + torch.distributions.Gamma(h.exp(), 2.0).rsample()),
    "laplace": between(lambda h: torch.distributions.Laplace(h, h.exp()).rsample()),
    "dirichlet": between(lambda h: h * torch.distributions.Dirichlet(h.exp()).rsample()),
    "into_a_given_tensor": between(given),
    "shuffled_and_back": between(shuffled_and_back),
    "one_by_one": between(lambda h: torch.cat([noise(r) * torch.rand(()) for r in h.split(1)])),
    "generator_for_all": between(lambda h: h * torch.rand(O, generator=seeded())),
    "multinomial": between(lambda h: h * torch.multinomial(h.softmax(-1), 1)),
    "multinomial_order": between(lambda h: h.gather(1, torch.multinomial(h.softmax(-1), O))),
    "multinomial_again": between(
        lambda h: h * torch.multinomial(h.softmax(-1), O, replacement=True)
    ),
    "multinomial_merged": sequence(
        lambda net, h: (
            h
            * torch.multinomial(h.flatten(0, 1).softmax(-1), 2)
            .sum(1)
            .unflatten(0, (-1, T))[..., None]
        ).mean(1)
    ),
    "multinomial_shared": between(lambda h: h * torch.multinomial(torch.ones(O), O)),
    "dropout1d": sequence(lambda net, h: F.dropout1d(h.transpose(1, 2), 0.4).mean(2)),
    "feature_alpha": sequence(
        lambda net, h: F.feature_alpha_dropout(h.transpose(1, 2), 0.4, training=True).mean(2)
    ),
    "dropout2d": sequence(
        lambda net, h: F.dropout2d(net.c(h[:, None]), 0.4).mean((2, 3)),
        c=lambda: nn.Conv2d(1, O, 3),
    ),
    "dropout3d": sequence(lambda net, h: F.dropout3d(h[..., None, None], 0.4).mean((1, 3, 4))),
    "attention_function": sequence(
        lambda net, h: F.scaled_dot_product_attention(h, h, h, dropout_p=0.3).mean(1)
    ),
    "attention_weights": sequence(
        lambda net, h: net.m(h, h, h)[0].mean(1), m=attention(batch_first=True)
    ),
    "attention_time_major": sequence(
        lambda net, h: turned(lambda q: net.m(q, q, q, need_weights=False)[0])(net, h),
        m=attention(),
    ),
    "encoder": sequence(
        lambda net, h: net.m(h).mean(1),
        m=lambda: nn.TransformerEncoderLayer(O, 2, 16, dropout=0.2, batch_first=True),
    ),
    "merged": sequence(
        lambda net, h: F.dropout(h.flatten(0, 1), 0.4).unflatten(0, (-1, T)).mean(1)
    ),
    "merged_time_major": sequence(
        turned(lambda h: F.dropout(h.flatten(0, 1), 0.4).unflatten(0, (T, -1)))
    ),
    "time_major": sequence(turned(lambda h: F.dropout(h, 0.4))),
    "lstm": sequence(
        lambda net, h: net.m(h)[0].mean(1),
        m=lambda: nn.LSTM(O, O, 2, dropout=0.3, batch_first=True),
    ),
    "gru": sequence(
        lambda net, h: turned(lambda x: net.m(x)[0])(net, h), m=lambda: nn.GRU(O, O, 3, dropout=0.3)
    ),
    "checkpointed": sequence(recomputed(reentrant=False), c=lambda: nn.Linear(O, O)),
    "checkpointed_reentrant": sequence(recomputed(reentrant=True), c=lambda: nn.Linear(O, O)),
    "compiled": sequence(lambda net, h: net.c(h.mean(1)), c=compiled),
    "scripted": sequence(lambda net, h: net.c(h.mean(1)), c=scripted),
}
SHARED = (
    *("multinomial_shared", "shared_by_all", "one_way_for_all", "python_and_numpy", "randperm"),
    "generator_for_all",
)
OWN = ("generator_for_all",)  # numbers that all samples share, which the model has seeded
REFUSES = {
    "vmap": (  # what torch.func has no rule for
        *("rrelu", "one_way_for_all", "randperm", "checkpointed", "checkpointed_reentrant"),
        *("dirichlet", "shuffled_and_back", "into_a_given_tensor", *OWN),
    ),
    "expand": ("into_a_given_tensor", *OWN),
}
PLACES = torch.tensor([5, 0, 3, 6, 1])


def built(make: Callable[[], Net]) -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(0)
    model = make().train().double()
    return model, torch.randn(N, T, I, dtype=torch.float64), torch.randint(0, 3, (N,))


def scope(model: nn.Module, backend: str = "loop", seed: int = 3) -> gradscope.Scope:
    return gradscope.Scope(model, "cross_entropy", backend=backend, randomness="fixed", seed=seed)


def streams() -> tuple[object, ...]:
    return (bytes(torch.get_rng_state()), random.getstate(), str(np.random.get_state()))


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_every_backend_draws_for_a_sample_what_a_batch_of_one_does(name: str) -> None:
    model, x, y = built(CASES[name])
    before = streams()
    alone = scope(model).per_sample_gradients(x, y)
    for backend in BACKENDS:
        asked = scope(model, backend)
        if name in REFUSES.get(backend, ()):
            with pytest.raises(UnsupportedError):
                asked.per_sample_gradients(x, y)
            assert streams() == before, backend
            continue
        together = asked.per_sample_gradients(x, y)
        some = asked.per_sample_gradients(x[PLACES], y[PLACES], index=PLACES)
        for key, rows in alone.items():
            torch.testing.assert_close(together[key], rows, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(some[key], rows[PLACES], rtol=1e-9, atol=1e-12)
        assert streams() == before, backend


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_samples_draw_for_themselves_unless_they_share(name: str) -> None:
    model, x, y = built(CASES[name])
    x, y = x[:1].expand(4, T, I), y[:1].expand(4)
    rows = scope(model).per_sample_gradients(x, y)["a.weight"].flatten(1)
    same = [torch.equal(rows[0], row) for row in rows[1:]]
    assert all(same) if name in SHARED else not any(same)


@pytest.mark.parametrize("backend", ("loop", *BACKENDS))
def test_gradients_are_those_under_the_masks(backend: str) -> None:
    """Of Σ_j w_j d_j x_j the gradient by w is d x: what is kept is twice as large, half is."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(400, 1, bias=False))
    x = torch.randn(50, 400).abs() + 1
    rows = gradscope.per_sample_gradients(
        model, lambda out, _: out[:, 0], x, backend=backend, randomness="fixed"
    )["1.weight"][:, 0]
    torch.testing.assert_close(rows, torch.where(rows == 0, 0, 2 * x))
    kept = (rows != 0).double()
    assert abs(float(kept.mean()) - 0.5) < 4 * 0.5 / 20000**0.5
    apart = kept @ kept.T / 400  # a quarter where samples draw independently
    assert float((apart - torch.diag(apart.diag())).amax()) < 0.25 + 5 * (3 / 16 / 400) ** 0.5


def test_numbers_have_the_distributions_they_are_drawn_from() -> None:
    found: dict[str, Tensor] = {}

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            shape = (len(x), 100_000)
            found["uniform"] = torch.rand(shape)
            found["normal"] = torch.randn(shape)
            found["exponential"] = torch.empty(shape).exponential_(2.0)
            found["whole"] = torch.randint(3, 7, shape)
            found["geometric"] = torch.empty(shape).geometric_(0.25)
            found["often"] = torch.empty(shape).bernoulli_(0.9)
            return x * self.p

    one = {"backend": "loop", "verify": "never", "randomness": "fixed"}
    gradscope.norms(Watched(), lambda out, _: out, torch.ones(1), **one)
    moments = {  # mean, variance
        "uniform": (1 / 2, 1 / 12),
        "normal": (0, 1),
        "exponential": (1 / 2, 1 / 4),
        "whole": (4.5, 1.25),
        "geometric": (4, 12),
        "often": (0.9, 0.09),
    }
    for name, (mean, variance) in moments.items():
        values = found[name].double().flatten()
        spread = float(((values - mean) ** 2).std())
        assert abs(float(values.mean()) - mean) < 4 * (variance / 100_000) ** 0.5, name
        assert abs(float(values.var()) - variance) < 5 * spread / 100_000**0.5, name
    assert float(found["uniform"].min()) >= 0 and float(found["uniform"].max()) < 1
    assert set(found["whole"].flatten().tolist()) == {3, 4, 5, 6}


def drawn(fn: Callable[[int], Tensor]) -> np.ndarray:
    """What a model draws in one call for one sample: `fn` of the number of samples."""
    found: list[Tensor] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            found.append(fn(len(x)))
            return x * self.p

    how = {"backend": "loop", "verify": "never", "randomness": "fixed"}
    gradscope.norms(Watched(), lambda out, _: out, torch.ones(1), **how)
    return found[-1].squeeze().numpy()


def counts_fit(values: np.ndarray, law: np.ndarray) -> float:
    """The p-value of Pearson's test of whole numbers 0, 1, ... against their probabilities."""
    found, wanted = np.bincount(values, minlength=len(law)), law * len(values)
    assert found[len(law) :].sum() == 0 and found[: len(law)][law == 0].sum() == 0
    kept = wanted >= 5
    rest = found[: len(law)][~kept].sum(), wanted[~kept].sum()
    ends = ([rest[0]], [rest[1]]) if rest[1] > 0 else ([], [])
    return float(
        stats.chisquare([*found[: len(law)][kept], *ends[0]], [*wanted[kept], *ends[1]])[1]
    )


WEIGHTS = torch.tensor([3.0, 0.0, 1.0, 0.5, 5.5])


@pytest.mark.parametrize("rate", [0.3, 4.0, 50.0, 20_000.0])
def test_counts_have_the_law_of_poisson(rate: float) -> None:
    values = drawn(lambda n: torch.poisson(torch.full((n, 40_000), rate))).astype(int)
    least = max(0, int(rate - 8 * rate**0.5))
    law = stats.poisson(rate).pmf(np.arange(least, int(rate + 8 * rate**0.5) + 20))
    assert counts_fit(values - least, law / law.sum()) > 1e-3
    assert not drawn(lambda n: torch.poisson(torch.zeros(n, 9))).any()


def test_choices_have_the_law_of_their_weights() -> None:
    law = (WEIGHTS.double() / WEIGHTS.sum()).numpy()
    for again in (True, False):
        choose = partial(torch.multinomial, num_samples=2, replacement=again)
        first, second = drawn(lambda n, fn=choose: fn(WEIGHTS.expand(n * 40_000, 5))).T
        assert counts_fit(first, law) > 1e-3
        pairs = law[:, None] * law  # of two that are drawn one after the other
        if not again:
            pairs = pairs * (1 - np.eye(5)) / (1 - law[:, None])
        assert counts_fit(first * 5 + second, pairs.ravel()) > 1e-3
    whole = drawn(lambda n: torch.multinomial(torch.ones(n * 40_000, 3), 3))
    orders = whole @ [9, 3, 1]
    assert counts_fit(np.unique(orders, return_inverse=True)[1], np.full(6, 1 / 6)) > 1e-3


@pytest.mark.parametrize(
    ("fill", "law"),
    [
        (lambda t: t.exponential_(2.0), stats.expon(scale=0.5)),
        (lambda t: t.cauchy_(1.0, 3.0), stats.cauchy(1, 3)),
        (lambda t: t.log_normal_(0.5, 0.7), stats.lognorm(0.7, scale=np.exp(0.5))),
        (lambda t: t.normal_(-1, 3), stats.norm(-1, 3)),
        (lambda t: t.uniform_(-2, 5), stats.uniform(-2, 7)),
        (lambda t: torch._standard_gamma(t.fill_(0.3)), stats.gamma(0.3)),
        (lambda t: torch._standard_gamma(t.fill_(70.0)), stats.gamma(70)),
        (lambda t: torch._sample_dirichlet(t.fill_(2.0))[:, :1], stats.beta(2, 39_998)),
    ],
)
def test_numbers_fit_their_distribution(fill: Callable[[Tensor], Tensor], law) -> None:
    values = drawn(lambda n: fill(torch.empty(n, 20_000, dtype=torch.float64)))
    assert stats.kstest(values, law.cdf).pvalue > 1e-3


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("fill", "law"),
    [
        (lambda t: t.geometric_(0.3), stats.geom(0.3)),
        (lambda t: t.bernoulli_(0.2), stats.bernoulli(0.2)),
        (lambda t: t.random_(3, 10), stats.randint(3, 10)),
        (lambda t: t.random_(4), stats.randint(0, 4)),
        (lambda t: torch.binomial(t.fill_(9), torch.tensor(0.7)), stats.binom(9, 0.7)),
        (lambda t: torch.binomial(t.fill_(5000), torch.tensor(0.005)), stats.binom(5000, 0.005)),
    ],
)
def test_whole_numbers_fit_their_distribution(fill: Callable[[Tensor], Tensor], law) -> None:
    values = drawn(lambda n: fill(torch.empty(n, 40_000)))
    assert counts_fit(values.astype(int), law.pmf(np.arange(60))) > 1e-3


def test_a_seed_fixes_the_numbers_and_another_one_draws_others() -> None:
    model, x, y = built(CASES["dropout"])
    first, again, other = (scope(model, "hooks", seed).norms(x, y) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_precision_changes_no_mask() -> None:
    model, x, y = built(CASES["noise"])
    exact = scope(model, "hooks").norms(x, y)
    rough = scope(model.float(), "hooks").norms(x.float(), y)
    torch.testing.assert_close(rough.double(), exact, rtol=1e-4, atol=1e-5)


def test_sequences_of_other_lengths_and_other_ways_are_learnt_anew() -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        h = F.dropout(net.a(x), 0.3)
        if x.shape[1] > 3:
            h = F.dropout(h.transpose(0, 1), 0.3).transpose(0, 1) * torch.rand(x.shape[1], 1)
        return net.b(h.mean(1))

    model, x, y = built(lambda: Net(body))
    for asked in (scope(model, "hooks"), scope(model, "expand")):
        for t in (5, 2, 4, 5):
            rows = asked.per_sample_gradients(x[:, :t], y)
            alone = scope(model).per_sample_gradients(x[:, :t], y)
            torch.testing.assert_close(rows, alone, rtol=1e-9, atol=1e-12)


def test_the_numbers_of_a_wrong_place_are_caught_by_the_proof(monkeypatch) -> None:
    model, x, y = built(CASES["dropout"])

    arranged = DrawAxis.arranged

    def shifted(place: DrawAxis, each: Tensor) -> Tensor:
        return arranged(place, each.roll(1, 0))  # a batch of one remains as it is

    monkeypatch.setattr(DrawAxis, "arranged", shifted)
    with pytest.raises((RefusedError, CertificateError)):
        scope(model, "hooks").per_sample_gradients(x, y)


def test_expectations_do_not_depend_on_batches_and_order() -> None:
    model, x, y = built(CASES["encoder"])
    asked = scope(model, "auto")
    whole = asked.expectation("clip:max_norm=0.5 | mean", x, y)
    order = torch.tensor([6, 2, 0, 1, 5, 3, 4])
    turned = asked.expectation("clip:max_norm=0.5 | mean", x[order], y[order], index=order)
    torch.testing.assert_close(whole, turned, rtol=1e-10, atol=1e-13)


def test_second_derivatives_have_the_masks_of_the_first() -> None:
    """H v of a sample is the difference of its gradients along v, all under one mask."""
    model, x, y = built(CASES["checkpointed"])
    asked, step = scope(model), 1e-5
    gradients = asked.per_sample_gradients(x[:1], y[:1])
    found = asked.expectation("hvp", x[:1], y[:1])
    own = {k: p.detach().clone() for k, p in model.named_parameters()}
    sides = []
    for sign in (1, -1):
        with torch.no_grad():
            for k, p in model.named_parameters():
                p.copy_(own[k] + sign * step * gradients[k][0])
        sides.append(asked.per_sample_gradients(x[:1], y[:1]))
    for k, value in found.items():
        right = (sides[0][k][0] - sides[1][k][0]) / (2 * step)
        torch.testing.assert_close(value, right, rtol=1e-5, atol=1e-7)


def kept_apart(net: Net, x: Tensor) -> Tensor:
    def inner(h: Tensor) -> Tensor:
        return net.a(F.dropout(h.tanh(), 0.3))

    return net.b(checkpoint(inner, x.mean(1), use_reentrant=False, preserve_rng_state=False))


def masked(net: Net, x: Tensor) -> Tensor:
    h, keep = net.a(x), x[..., 0] > 0
    return net.b(torch.zeros_like(h).masked_scatter(keep[..., None], F.dropout(h[keep])).mean(1))


def drawn_by_chance(net: Net, x: Tensor) -> Tensor:
    """How many are drawn depends on what was drawn before, on an axis that is merged with T."""
    keep = torch.rand(len(x) * T, 1, dtype=x.dtype)
    hidden = (net.a(x).reshape(-1, O) * keep).reshape(len(x), T, O).mean(1)
    return net.b(hidden) + torch.rand(len(x), 1 + int(1e6 * keep[T])).mean(1, keepdim=True)


def drawn_by_calls(net: Net, x: Tensor) -> Tensor:
    """Computed anew, it draws something else."""
    calls: list[Tensor] = []

    def inner(h: Tensor) -> Tensor:
        calls.append(h)
        return F.dropout(h) if len(calls) == 1 else h * torch.rand(len(h), 1, dtype=h.dtype)

    return net.b(checkpoint(inner, net.a(x.mean(1)), use_reentrant=False))


def two_outs(h: Tensor) -> Tensor:
    kept, places = torch.empty_like(h), torch.empty(h.shape, dtype=torch.bool)
    torch.ops.aten.native_dropout.out(h.detach(), 0.5, True, out0=kept, out1=places)
    return h + kept


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (between(two_outs), "random numbers of native_dropout cannot be fixed"),
        (between(lambda h: h * torch.empty_like(h).random_()), "no fixed random integers"),
        (between(lambda h: h * torch.empty(len(h) + 1, 1).uniform_()[:-1]), "uniform draws"),
        (between(lambda h: h * torch.rand(3 if len(h) > 2 else ())[..., None]), "cannot determine"),
        (lambda: Net(kept_apart), "preserve_rng_state=True"),
        (lambda: Net(masked), "cannot determine"),
        (lambda: Net(drawn_by_chance), "cannot determine"),
        (lambda: Net(drawn_by_calls), "different random numbers in the backward pass"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "loop"])
def test_what_cannot_be_fixed_is_refused(make: Callable[[], Net], words: str, backend: str) -> None:
    model, x, y = built(make)
    before = streams()
    with pytest.raises(UnsupportedError) as caught:
        scope(model, backend).per_sample_gradients(x, y)
    assert words in str(caught.value)
    assert streams() == before


@pytest.mark.parametrize("backend", ["auto", "vmap"])
def test_a_shuffle_that_mixes_samples_couples_them(backend: str) -> None:
    model, x, y = built(between(lambda h: h + h[torch.randperm(len(h))]))
    with pytest.raises(CoupledSamplesError, match="before layer 'b'"):
        scope(model, backend).norms(x, y)


@pytest.mark.parametrize("backend", ["auto", "loop", "expand"])
def test_what_is_drawn_for_one_sample_alone_is_not_shared(backend: str) -> None:
    """Two samples and three draw as many numbers, which belong to the first of them."""

    def some(net: Net, x: Tensor) -> Tensor:
        h, keep = net.a(x.mean(1)), x[:, 0, 0] > 0
        return net.b(h.masked_scatter(keep[:, None], F.dropout(h[keep])))

    model, x, y = built(lambda: Net(some))
    x[:, 0, 0] = -1.0
    x[0, 0, 0] = 1.0
    with pytest.raises(UnsupportedError, match="differs between samples"):
        scope(model, backend).norms(x, y)


def test_without_it_randomness_is_refused_and_the_way_out_named() -> None:
    model, x, y = built(CASES["dropout"])
    with pytest.raises(UnsupportedError) as caught:
        gradscope.norms(model, "cross_entropy", x, y)
    assert 'randomness="fixed"' in str(caught.value) and "dropout" in str(caught.value)


def test_who_draws_in_mode_eval_is_told_to_take_numbers_of_the_data() -> None:
    """There, mode eval is no way out."""
    model, x, y = built(between(lambda h: h + torch.randn_like(h)))
    with pytest.raises(
        UnsupportedError, match=r"draws random numbers in mode eval too.*an input"
    ) as e:
        gradscope.norms(model.eval(), "cross_entropy", x, y)
    assert 'randomness="fixed"' in str(e.value) and "dropout" not in str(e.value)


@pytest.mark.parametrize("backend", ["auto", "loop"])
def test_low_precision_does_not_hide_a_random_forward_pass(backend: str) -> None:
    model, x, y = built(between(lambda h: F.dropout(h, 0.02) + torch.randn_like(h) * 1e-3))
    with pytest.raises(UnsupportedError, match="the forward pass is random"):
        gradscope.norms(
            model.bfloat16(), "cross_entropy", x.bfloat16(), y, backend=backend, verify="first"
        )


@pytest.mark.parametrize(
    "between_layers",
    [
        lambda h: h if torch.rand(()) < 0.999 else h * 2,
        lambda h: h * torch.empty(len(h), 1).bernoulli_(0.999),
        lambda h: h * (torch.randn(()) > -5),
    ],
)
def test_what_happens_once_in_a_thousand_times_is_random(between_layers) -> None:
    model, x, y = built(between(between_layers))
    with pytest.raises(UnsupportedError, match="the forward pass is random"):
        gradscope.norms(model, "cross_entropy", x, y)


def test_numbers_that_are_drawn_and_change_nothing_are_no_matter() -> None:
    model, x, y = built(between(lambda h: h + 0 * torch.rand_like(h)))
    plain, _, _ = built(between(lambda h: h))
    found, wanted = (gradscope.norms(m, "cross_entropy", x, y) for m in (model, plain))
    torch.testing.assert_close(found, wanted)


def test_numbers_that_a_model_seeds_itself_are_its_own() -> None:
    def fn(h: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(11)
            own = torch.rand(O)
        return F.dropout(h, 0.3) * own

    model, x, y = built(between(fn))
    with torch.random.fork_rng():
        torch.manual_seed(11)
        own = torch.rand(O)
    fixed, _, _ = built(between(lambda h: F.dropout(h, 0.3) * own))
    for backend in ("loop", "hooks"):
        found = scope(model, backend).norms(x, y)
        torch.testing.assert_close(found, scope(fixed, backend).norms(x, y))


def test_numbers_that_are_drawn_twice_are_the_same_ones() -> None:
    """By a state that is put back, and in a gradient within the loss that computes anew."""

    def again(h: Tensor) -> Tensor:
        with torch.random.fork_rng():
            first = torch.rand(len(h), O, dtype=h.dtype)
        second = torch.rand(len(h), O, dtype=h.dtype)
        assert torch.equal(first, second)
        return F.dropout(h + first, 0.3)

    @gradscope.model_loss
    def steep(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = x.requires_grad_()
        (slopes,) = torch.autograd.grad(model(x).logsumexp(1).sum(), x, create_graph=True)
        return slopes.square().sum((1, 2))

    def body(net: Net, x: Tensor) -> Tensor:
        h = checkpoint(lambda x: F.dropout(net.a(x).tanh(), 0.3), x, use_reentrant=False)
        return net.b(F.dropout(h, 0.3).mean(1))

    for make, loss in ((between(again), "cross_entropy"), (lambda: Net(body), steep)):
        model, x, y = built(make)
        options = {"randomness": "fixed", "seed": 2}
        alone = gradscope.per_sample_gradients(model, loss, x, y, backend="loop", **options)
        found = gradscope.per_sample_gradients(model, loss, x, y, backend="hooks", **options)
        torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-12)
        assert float(alone["a.weight"].abs().amax()) > 0


@pytest.mark.parametrize("backend", ["auto", "hooks", "loop", "expand"])
@pytest.mark.parametrize("name", ["checkpointed", "checkpointed_reentrant", "compiled"])
def test_checkpointed_and_compiled_models_run_as_they_are_written(name: str, backend: str) -> None:
    model, x, y = built(CASES[name])
    model.eval()

    def plain(net: Net, h: Tensor) -> Tensor:
        c = getattr(net.c, "_orig_mod", net.c)
        return c.eval()(h.mean(1)) if name == "compiled" else inner(net, h)

    def inner(net: Net, h: Tensor) -> Tensor:
        return net.c(h.mean(1)).tanh()

    if name != "compiled":  # the same without dropout, checkpointed
        reentrant = name.endswith("reentrant")
        model.body = lambda net, x: net.b(
            checkpoint(lambda h: inner(net, h), net.a(x), use_reentrant=reentrant)
        )
    asked = gradscope.Scope(model, "cross_entropy", backend=backend)
    found = asked.per_sample_gradients(x, y)
    assert asked.backend == ("hooks" if backend == "auto" else backend)
    model.body = lambda net, x: net.b(plain(net, net.a(x)))
    _, right = per_sample_gradients(model, cross_entropy, x, y)
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-12)


def chosen(net: Net, x: Tensor, torchs: bool) -> Tensor:
    """torch's control flow of functions that close over parameters, and what it stands for."""
    h, ways = net.a(x.mean(1)), (lambda h: net.c(h).tanh(), lambda h: net.c(h).sin())
    flag = net.a.weight.detach().sum() > 0
    if not torchs:
        h = net.c(ways[0](ways[0](ways[0 if flag else 1](h))))
        return net.b(torch.stack([h, net.c(h + x.sum((1, 2))[:, None])]).sum(0))
    h = torch.cond(flag, *ways, (h,))
    start = (torch.zeros((), dtype=torch.int64), h)
    _, h = while_loop(lambda k, h: k < 2, lambda k, h: (k + 1, ways[0](h)), start)
    given = torch.stack([torch.zeros_like(h), x.sum((1, 2))[:, None].expand_as(h)])
    return net.b(scan(lambda h, t: ((new := net.c(h + t)), new.clone()), h, given)[1].sum(0))


@pytest.mark.parametrize("backend", ["auto", "loop", "expand"])
def test_control_flow_by_functions_gives_its_parameters_their_gradient(backend: str) -> None:
    """Where it is not compiled, torch silently gives what such functions close over none."""
    torch.compile(lambda x: x, backend="eager")  # what is compiled runs as it is written
    model, x, y = built(lambda: Net(partial(chosen, torchs=True), c=nn.Linear(O, O)))
    found = gradscope.per_sample_gradients(model, "cross_entropy", x, y, backend=backend)
    model.body = partial(chosen, torchs=False)
    _, right = per_sample_gradients(model, cross_entropy, x, y)
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-12)


def test_a_checkpoint_that_training_gives_no_gradient_is_told_of() -> None:
    def body(net: Net, x: Tensor, reentrant: bool) -> Tensor:
        return net.b(checkpoint(net.a, x.mean(1), use_reentrant=reentrant))

    for reentrant in (True, False):
        model, x, y = built(lambda r=reentrant: Net(partial(body, reentrant=r)))
        asked = gradscope.Scope(model, "cross_entropy")
        rows = asked.per_sample_gradients(x, y)["a.weight"]
        assert rows.flatten(1).any(1).all()
        assert (
            any("in training its parameters get no gradient" in note for note in asked.notes)
            == reentrant
        )


def counted(net: Net, h: Tensor) -> Tensor:
    net.calls = getattr(net, "calls", 0) + 1
    return h * net.calls


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["auto", "loop", "expand"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    ("randomness", "change"),
    [
        ("fixed", lambda net, h: h * random.random()),
        ("fixed", lambda net, h: h[:, np.random.permutation(O)]),
        ("fixed", lambda net, h: h * torch.rand(h.shape, generator=net.own)),
        ("refuse", lambda net, h: h * torch.rand(O, generator=net.own)),
        ("refuse", counted),
    ],
    ids=["python", "numpy", "generator", "generator_for_all", "counter"],
)
def test_a_checkpointed_part_that_computes_something_else_anew_is_refused(
    change: Callable[[Net, Tensor], Tensor], randomness: str, reentrant: bool, backend: str
) -> None:
    """The same part is right where it is not checkpointed, or draws from torch's generators."""

    def body(net: Net, x: Tensor, run: Callable[..., Tensor]) -> Tensor:
        return net.b(run(lambda h: net.c(change(net, h)).tanh(), net.a(x.mean(1))))

    once = partial(checkpoint, use_reentrant=reentrant)
    model, x, y = built(lambda: Net(partial(body, run=once), c=nn.Linear(O, O)))
    model.train(randomness == "fixed")
    model.own = seeded()
    asked = gradscope.Scope(model, "cross_entropy", backend=backend, randomness=randomness)
    with pytest.raises(UnsupportedError, match="different values in the backward pass"):
        asked.per_sample_gradients(x, y)
    model.body = partial(body, run=lambda part, h: part(h))
    assert asked.per_sample_gradients(x, y)["c.weight"].flatten(1).any(1).all()


def test_what_computes_in_less_than_its_parameters_precision_is_told_of() -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=net.training):
            return net.b(net.a(x.mean(1))).float()

    for train in (True, False):
        model, x, y = built(lambda: Net(body))
        asked = gradscope.Scope(model.float().train(train), "cross_entropy")
        asked.norms(x.float(), y)
        assert any("computes in bfloat16" in note for note in asked.notes) == train


def turned_later(net: Net, x: Tensor) -> Tensor:
    """As many numbers, which for eight samples have one shape either way."""
    keep = torch.rand(O, len(x)).T if x.max() > 9 else torch.rand(len(x), O)
    return net.b(net.a(x.mean(1)) * keep)


def random_later(net: Net, x: Tensor) -> Tensor:
    keep = torch.rand(len(x), O) if x.max() > 9 else torch.ones(len(x), O)
    return net.b(net.a(x.mean(1)) * keep)


def sorted_later(
    net: Net, x: Tensor, pick: Callable[[Tensor, Tensor], Tensor] = lambda h, rows: h[rows]
) -> Tensor:
    """The same program; what is dropped belongs to rows, not to samples."""
    order = x[:, 0, 0].double().sign().argsort(descending=True, stable=True)
    return net.b(pick(F.dropout(pick(net.a(x.mean(1)), order), 0.5), order.argsort()))


PICKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "second_axis": lambda h, rows: h.T[:, rows].T,
    "index_select": lambda h, rows: h.T.index_select(1, rows).T,
    "gather": lambda h, rows: h.gather(-2, rows[:, None].expand_as(h)),
    "embedding": lambda h, rows: F.embedding(rows, h),
}


@pytest.mark.parametrize(
    ("body", "fixed"),
    [
        (turned_later, "fixed"),
        (random_later, "refuse"),
        (sorted_later, "fixed"),
        *(pytest.param(partial(sorted_later, pick=p), "fixed", id=k) for k, p in PICKS.items()),
    ],
)
def test_a_batch_that_draws_in_another_way_is_audited(body, fixed: str) -> None:
    model, x, y = built(lambda: Net(body))
    x, y = torch.cat([x, x[:1]]), torch.cat([y, y[:1]])
    asked = gradscope.Scope(model, "cross_entropy", backend="hooks", randomness=fixed)
    asked.session.auditor.clock = lambda: 0.0  # there is no time for other audits
    x[:, 0, 0] = x[:, 0, 0].abs()
    asked.norms(x, y)
    x[0, 0, 0], x[2, 0, 0] = 10.0, -1.0
    with pytest.raises((RefusedError, CertificateError)):
        asked.norms(x, y)


def looked_up(net: Net, tokens: Tensor) -> Tensor:
    """What the tokens pick are parameters, and what the padding picks becomes zero."""
    h = net.a(net.table.weight[tokens])
    h[tokens == 0] = 0.0
    return net.b(F.dropout(h.mean(1), 0.5))


@pytest.mark.parametrize("backend", ["hooks", "loop"])
def test_what_puts_no_rows_in_another_order_is_not_audited(backend: str) -> None:
    model, _, y = built(lambda: Net(looked_up, table=nn.Embedding(4 * N, I)))
    asked = scope(model, backend)
    asked.session.auditor.clock = lambda: 0.0
    for _ in range(5):
        asked.norms(torch.randint(4 * N, (N, T)), y)
    audits = asked.session.auditor.audits
    assert (audits.batches, audits.proved, audits.more, audits.singles) == (5, 1, 0, 0)


def test_an_index_is_one_whole_number_a_sample() -> None:
    model, x, y = built(CASES["dropout"])
    for index in (torch.arange(3), torch.rand(N)):
        with pytest.raises(DatasetError):
            scope(model).norms(x, y, index=index)


def test_sessions_take_the_positions_of_the_data() -> None:
    model, x, y = built(CASES["dropout"])
    session = scope(model, "hooks").session
    first = session.evaluate(Batch.of(x, y, torch.arange(10, 10 + N))).gradients.norms
    moved = session.evaluate(Batch.of(x, y, torch.arange(11, 11 + N))).gradients.norms
    assert not torch.allclose(first, moved)
