"""Samples that are not finite leave the rows of the other samples right.

The reference is a batch of one in float64. The table holds operations with a rule, operations of
the masked fallback, and models that move samples.
"""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import gradscope
from gradscope.backends.base import PROVED, backends
from gradscope.backends.hooks.graph.axes import OwnerWeights, SpreadError, owned
from gradscope.backends.hooks.isolation import isolating
from gradscope.blocks import Evaluation, OuterBlock
from gradscope.core.batch import Batch
from gradscope.engine.chains import bind
from gradscope.errors import CoupledSamplesError, RefusedError, UnsupportedError
from gradscope.model.problem import Problem
from gradscope.scope import NonFiniteWarning, Scope
from tests import oracle

N, BROKEN = 6, (1, 4)
DTYPES = {torch.float64: 1e-9, torch.float32: 2e-4}
BACKENDS = ("hooks", "expand", "vmap")

# from positive activations (n, 4) and a parameter (4,) in (0.5, 1.9), to (n, ...)
ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "prelu": lambda h, w: F.prelu(h - 0.8, w),
    "power": torch.pow,
    "base_of_a_power": lambda h, w: w**h,
    "atan2": torch.atan2,
    "atan2_below": lambda h, w: torch.atan2(w, h),
    "xlogy": torch.xlogy,
    "xlogy_of_the_parameter": lambda h, w: torch.xlogy(w, h),
    "xlog1py": torch.special.xlog1py,
    "lerp": lambda h, w: torch.lerp(h, h.square(), w),
    "lerp_from": lambda h, w: torch.lerp(w, h, 0.3),
    "addcmul": lambda h, w: torch.addcmul(h, h, w),
    "addcdiv": lambda h, w: torch.addcdiv(h, h, w),
    "addcdiv_over": lambda h, w: torch.addcdiv(h, w, h),
    "hypot": torch.hypot,
    "logaddexp": torch.logaddexp,
    "logaddexp2": torch.logaddexp2,
    "remainder": lambda h, w: torch.remainder(5 * h, w),
    "fmod": lambda h, w: torch.fmod(5 * h, w),
    "maximum": torch.maximum,
    "fmin": torch.fmin,
    "clamp": lambda h, w: torch.clamp(h, min=w / 2),
    "where": lambda h, w: torch.where(h > 0.8, w, h * w),
    "copysign": torch.copysign,
    "division": lambda h, w: h / w,
    "divided": lambda h, w: w / h,
    "product": torch.mul,
    "difference": lambda h, w: (w - h).square(),
    "heaped": lambda h, w: torch.cat([h, w.expand(len(h), -1)], 1).cumsum(1),
    "softplus_scaled": lambda h, w: F.softplus(h * w),
    "layer_norm": lambda h, w: F.layer_norm(h, (4,), w, w.square()),
    "rms_norm": lambda h, w: F.rms_norm(h, (4,), w),
    "group_norm": lambda h, w: F.group_norm(h, 2, w, w),
    "batch_norm": lambda h, w: F.batch_norm(h, torch.ones_like(w), torch.ones_like(w), w, w),
    "convolution": lambda h, w: F.conv1d(h.unsqueeze(1), w.view(2, 1, 2)).flatten(1),
    "transposed": lambda h, w: F.conv_transpose1d(h.unsqueeze(1), w.view(1, 2, 2)).flatten(1),
    "bilinear": lambda h, w: F.bilinear(h[:, :2], h[:, 2:], w.view(1, 2, 2)),
    "cdist": lambda h, w: torch.cdist(h.unsqueeze(1), w.view(2, 2).repeat(1, 2)).flatten(1),
    "cosine": lambda h, w: F.cosine_similarity(h.unsqueeze(1), w.view(1, 1, 4), 2),
    "gaussian": lambda h, w: F.gaussian_nll_loss(h, w.expand_as(h), h.square(), reduction="none"),
    "solve": lambda h, w: torch.linalg.solve(w.diag() + 0.1, h.mT).mT,
    "outer": lambda h, w: torch.einsum("ni,j->nij", h, w).flatten(1),
    "attention": lambda h, w: F.scaled_dot_product_attention(
        *(t.view(-1, 2, 2) for t in (h * w, h, h))
    ).flatten(1),
    "embedded": lambda h, w: F.embedding((h > 0.8).long(), w.view(2, 2)).flatten(1) * h[:, :1],
    "table": lambda h, w: w[(h > 0.8).long()] * h,
    "fourier": lambda h, w: torch.fft.rfft(h * w).abs().square(),
    "sorted": lambda h, w: _back(h, lambda t: F.prelu(t - 0.8, w)),
    "masked": lambda h, w: h.masked_scatter(h > 0.8, h[h > 0.8].pow(2)) * w,
    "ragged": lambda h, w: _packed(h, lambda t, v: t * v, w),
    "ragged_power": lambda h, w: _packed(h, torch.pow, w),
    "assigned": lambda h, w: torch.eye(len(h)).to(h) @ (h * w),
    "own_function": lambda h, w: _Scaled.apply(h, w),
}

# vmap refuses shapes and errors that depend on a sample's numbers
ANOTHER_SHAPE = {"ragged", "ragged_power", "masked", "gaussian"}


def _back(h: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function to the samples in another order."""
    order = h.detach()[:, 0].nan_to_num().argsort()
    return fn(h[order])[order.argsort()]


def _packed(h: Tensor, fn: Callable[[Tensor, Tensor], Tensor], w: Tensor) -> Tensor:
    """Apply a function to the entries that a mask lets through, as many as there are."""
    mask = ~(h.detach() > 1.1)
    rows, columns = mask.nonzero().unbind(1)
    values = fn(h[mask], w[columns])
    return torch.zeros_like(h).index_put((rows, columns), values)


class _Scaled(torch.autograd.Function):
    """A function of the user's own: h · w²."""

    generate_vmap_rule = True

    @staticmethod
    def forward(h, w):
        return h * w.square()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        h, w = ctx.saved_tensors
        return gradient * w.square(), (gradient * 2 * h * w).sum(0)


class Net(nn.Module):
    """A layer in front of an operation, and a layer after it."""

    def __init__(self, fn: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.fn, self.a = fn, nn.Linear(3, 4)
        self.w = nn.Parameter(torch.tensor([0.5, 1.3, 0.7, 1.9]))

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.a(x).sigmoid() + 0.3, self.w)


def loss(outputs: Tensor, weights: Tensor) -> Tensor:
    """Return Σⱼ j oᵢⱼ² times a sample's own weight."""
    size = outputs.shape[1]
    return (outputs.square() * torch.arange(1, size + 1)).sum(1).to(outputs.dtype) * weights


def made(fn: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(3)
    return Net(fn).to(dtype), torch.randn(N, 3).to(dtype), torch.ones(N, dtype=dtype)


def nan_inputs(x: Tensor, y: Tensor) -> None:
    x[BROKEN[0]] = torch.nan
    x[BROKEN[1], 2] = torch.nan


def infinite_inputs(x: Tensor, y: Tensor) -> None:
    x[BROKEN[0]] = torch.inf
    x[BROKEN[1], 0], x[BROKEN[1], 1] = torch.inf, -torch.inf


def losses_of_one(x: Tensor, y: Tensor) -> None:
    y[BROKEN[0]], y[BROKEN[1]] = torch.nan, torch.inf


def right(model: nn.Module, fn, x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return the rows in float64 of batches of one, and which samples are finite (n,)."""
    losses, rows = oracle.per_sample_gradients(model, fn, x, y)
    flat = [losses.unsqueeze(1), *(g.reshape(len(g), -1) for g in rows.values())]
    return rows, torch.cat(flat, 1).isfinite().all(1)


close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)  # of float32


def require_close(found: Tensor, wanted: Tensor, dtype: torch.dtype, scale: Tensor) -> None:
    gap = (found.double() - wanted).abs().amax() if wanted.numel() else torch.zeros(())
    assert gap <= DTYPES[dtype] * scale


@pytest.mark.sampled
@pytest.mark.parametrize(
    "spoil",
    [nan_inputs, infinite_inputs, losses_of_one],
    ids=lambda spoil: spoil.__name__,
)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_rows_of_the_others_are_right(name, spoil):
    """In the first batch and in a later one, by each backend, in both precisions."""
    for dtype in DTYPES:
        model, good, even = made(ELEMENTWISE[name], dtype)
        x, y = good.clone(), even.clone()
        spoil(x, y)
        wanted, finite = right(model, loss, x, y)
        scale = max(g[finite].abs().amax() for g in wanted.values())
        for backend in BACKENDS:
            with backends.get(backend)(Problem.of(model, loss)) as evaluate:
                for before in ([], [(good, even)]):
                    try:
                        for batch in before:
                            evaluate(Batch.of(*batch))
                        found = evaluate(Batch.of(x, y), PROVED).gradients
                    except RefusedError:
                        assert backend == "vmap" and name in ANOTHER_SHAPE
                        continue
                    for key, rows in wanted.items():
                        dense = found[key].dense()
                        require_close(dense[finite], rows[finite], dtype, scale)
                        own = rows[finite].flatten(1).norm(dim=1)
                        require_close(found.squared_norms[key][finite].sqrt(), own, dtype, scale)
                    assert torch.equal(found.norms.isfinite(), finite), backend


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("name", ["prelu", "power", "ragged_power", "sorted", "assigned"])
def test_whatever_is_asked_of_the_others_is_right(name, later, dtype):
    """The reference is computed from dense rows of batches of one in float64."""
    model, good, even = made(ELEMENTWISE[name], dtype)
    x, y = good.clone(), even.clone()
    nan_inputs(x, y)
    wanted, finite = right(model, loss, x, y)
    kept = {key: rows[finite].flatten(1) for key, rows in wanted.items()}
    flat = torch.cat([*kept.values()], 1)
    sizes = flat.norm(dim=1)
    clipped = torch.clamp(0.3 / sizes, max=1.0)
    means = {
        "mean": lambda g: g.mean(0),
        "clip:max_norm=0.3 | mean": lambda g: (clipped.unsqueeze(1) * g).mean(0),
        "square | mean": lambda g: g.square().mean(0),
        "var": lambda g: g.var(0),
        "normalize | mean": lambda g: (g / sizes.unsqueeze(1)).mean(0),
    }
    for backend in ("auto", "hooks"):
        with Scope(model, loss, backend=backend) as scope:
            if later:
                scope.norms(good, even)
            for chain, mean in means.items():
                with pytest.warns(NonFiniteWarning, match="^2 samples"):
                    found = scope.expectation(chain, x, y)
                for key, g in kept.items():
                    require_close(found[key].flatten(), mean(g), dtype, mean(g).abs().amax() + 0.1)
            assert torch.equal(scope.norms(x, y).isfinite(), finite)
            require_close(scope.norms(x, y)[finite], sizes, dtype, sizes.amax())
            for key, size in scope.norms(x, y, per="parameter").items():
                require_close(size[finite], kept[key].norm(dim=1), dtype, sizes.amax())
            with pytest.warns(NonFiniteWarning):
                gram = scope.expectation("gram", x, y)
            require_close(sum(gram.values()), flat @ flat.mT, dtype, sizes.amax() ** 2)
            assert scope.backend == "hooks"
            assert later or scope.certificate.nonfinite == len(BROKEN)


def test_projections_of_the_others_are_right():
    """Projections are equal to those of the same samples in a finite batch."""
    model, x, y = made(ELEMENTWISE["power"], torch.float64)
    with Scope(model, loss, backend="loop") as scope:
        chain = bind("project:dim=3")
        wanted = chain.rows(scope.evaluate(Batch.of(x, y)).gradients).dense()
    nan_inputs(x, y)
    with Scope(model, loss) as scope:
        found = chain.rows(scope.evaluate(Batch.of(x, y)).gradients).dense()
    others = [k for k in range(N) if k not in BROKEN]
    for key, rows in wanted.items():
        torch.testing.assert_close(found[key][others], rows[others])
        assert not found[key][[*BROKEN]].isfinite().any()


@pytest.mark.parametrize("labels", ["sampled", "exact"])
def test_samples_with_drawn_labels(labels):
    model, x, _ = made(ELEMENTWISE["prelu"], torch.float64)
    y = torch.zeros(N, dtype=torch.int64)
    others = [k for k in range(N) if k not in BROKEN]
    found = []
    for spoiled in (False, True):
        given, targets, index = x, y, torch.arange(N)
        if spoiled:
            given = x.clone()
            nan_inputs(given, y)
        else:
            given, targets, index = x[others], y[others], index[others]
        with Scope(model, "cross_entropy", labels=labels) as scope, warnings.catch_warnings():
            warnings.simplefilter("ignore", NonFiniteWarning)
            found.append(scope.expectation("square | mean", given, targets, index=index))
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value)


def test_rows_of_tokens():
    """A NaN at one position reaches the rows of its own sample alone."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.o = nn.Linear(3, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.o(self.a(x).tanh())

    def each(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")

    torch.manual_seed(1)
    model, x, y = Tagger().double(), torch.randn(4, 5, 3).double(), torch.randint(3, (4, 5))
    bad = x.clone()
    bad[2, 3, 0] = torch.nan
    wanted = gradscope.norms(model, each, x, y, rows="token", backend="loop").view(4, 5)
    for backend in ("hooks", "vmap", "expand", "loop"):
        with Scope(model, each, rows="token", backend=backend) as scope:
            for _ in range(2):
                found = scope.norms(bad, y).view(4, 5)
                torch.testing.assert_close(found[[0, 1, 3]], wanted[[0, 1, 3]])
                assert not found[2].isfinite().any()
                scope.norms(x, y)
            assert scope.notes == []


def test_a_gradient_that_is_not_finite_of_a_finite_loss():
    """√0 has none; halving the batch finds whose it is, wherever that is."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 4), nn.PReLU(), nn.Linear(4, 2)).double()
    x, n = torch.randn(16, 3).double(), 16
    y = torch.zeros(n, dtype=torch.float64)
    y[[3, 11, 12]] = 1

    def rooted(outputs: Tensor, targets: Tensor) -> Tensor:
        first = outputs[:, 0]
        distance = torch.where(targets == 1, first - first.detach(), first)
        return distance.square().sqrt() + outputs.square().sum(1)

    wanted, finite = right(model, rooted, x, y)
    assert finite.logical_not().nonzero().flatten().tolist() == [3, 11, 12]
    with Scope(model, rooted) as scope:
        found = scope.per_sample_gradients(x, y)
        assert (scope.backend, scope.certificate.nonfinite) == ("hooks", 3)
    for key, rows in wanted.items():
        torch.testing.assert_close(found[key], rows, equal_nan=True)


def test_structure_survives_in_a_batch_that_was_evaluated_in_parts():
    model, x, y = made(ELEMENTWISE["prelu"], torch.float64)
    nan_inputs(x, y)
    with Scope(model, loss, verify="never") as scope:
        found = scope.evaluate(Batch.of(x, y)).gradients
    assert isinstance(found["a.weight"], OuterBlock)
    assert isinstance(found.select(torch.tensor([0, 2]))["a.weight"], OuterBlock)


def test_finite_batches_are_evaluated_once(monkeypatch):
    model, x, y = made(ELEMENTWISE["prelu"], torch.float64)
    problem, calls = Problem.of(model, loss), []
    counted = Problem.losses
    monkeypatch.setattr(Problem, "losses", lambda *a, **k: calls.append(1) or counted(*a, **k))
    with backends.get("hooks")(problem) as evaluate:
        evaluate(Batch.of(x, y))
        calls.clear()
        evaluate(Batch.of(x, y))
        assert len(calls) == 1


def test_no_owner_is_read_from_numbers_that_are_not_finite():
    """Infinity over infinity is no mark: the entry would be nobody's, and its sample finite."""
    losses = torch.ones(3, dtype=torch.float64)
    marks = OwnerWeights.of(losses, 0)
    gradient = torch.tensor([[1.0], [2.0], [torch.inf]], dtype=torch.float64)
    weighted = [gradient * weights.unsqueeze(1) for weights in marks.weights]
    with pytest.raises(SpreadError):
        owned(gradient, weighted, (0,), marks)


def test_norms_and_squares_whose_factors_are_beyond_the_range():
    """A huge input of a unit that is saturated has no gradient, and so no part in any sum."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2))
    torch.manual_seed(0)
    x, y = torch.randn(5, 3), torch.ones(5)
    x[2, 0] = 1e30
    wanted, finite = right(model, loss, x, y)
    assert bool(finite.all())
    flat = torch.cat([g.flatten(1) for g in wanted.values()], 1)
    for backend in ("hooks", "loop"):
        with Scope(model, loss, backend=backend) as scope:
            close(scope.norms(x, y).double(), flat.norm(dim=1))
            found = scope.expectation("square | mean", x, y)
            gram = scope.expectation("gram", x, y)
        for key, rows in wanted.items():
            close(found[key].double(), rows.square().mean(0))
        close(sum(gram.values()).double(), flat @ flat.mT)


def test_samples_that_are_coupled_stay_refused():
    """A batch's statistics are NaN for everybody, which says nothing of independence."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.PReLU(), nn.Flatten(1))
    x = torch.randn(4, 1, 5, 5)
    x[1] = torch.nan
    for backend in ("auto", "hooks"):
        with (
            Scope(model, loss, backend=backend) as scope,
            pytest.raises(CoupledSamplesError, match="BatchNorm2d"),
        ):
            scope.norms(x, torch.ones(4))
    frozen = copy.deepcopy(model).eval()
    wanted, finite = right(frozen, loss, x, torch.ones(4))
    found = gradscope.per_sample_gradients(model, loss, x, torch.ones(4), coupling="frozen")
    assert finite.tolist() == [True, False, True, True]
    for key, rows in wanted.items():
        close(found[key][finite].double(), rows[finite])


def test_a_model_that_is_divided_refuses():
    """Its parts would need further passes of all processes."""

    def evaluate(batch: Batch) -> Evaluation:
        raise SpreadError

    problem = cast(Problem, SimpleNamespace(model_parallel=object()))
    with pytest.raises(UnsupportedError, match="spreads it to"):
        isolating(problem, Batch.of(torch.zeros(3, 1)), evaluate, evaluate)
