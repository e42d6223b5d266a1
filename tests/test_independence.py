"""Coupling of any strength is refused in float32 too; rounding alone never is.

What is refused here changes a loss by a thousandth to a billionth. Float64, or the last bit of a
loss next to other samples, shows it.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import gradscope
from gradscope.core.batch import Batch
from gradscope.errors import CoupledSamplesError, RefusedError, UnsupportedError
from gradscope.model.independence import require_unaffected
from gradscope.model.problem import Problem
from tests import oracle

BACKENDS = ("auto", "hooks", "vmap", "expand", "loop")
N = 6


class Net(nn.Module):
    """Hidden values of tokens or numbers, and what a case makes of them: outputs and a term."""

    def __init__(self, forward: Callable[..., tuple[Tensor, Tensor | float]]) -> None:
        super().__init__()
        self.ids, self.numbers = nn.Embedding(9, 6), nn.Linear(5, 6)
        self.hidden, self.out, self.extra = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 1)
        self._forward = forward

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        first = self.numbers(x) if x.is_floating_point() else self.ids(x)
        return self._forward(self, torch.tanh(self.hidden(first)))


def with_term(outputs: tuple[Tensor, Tensor | float], targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs[0], targets, reduction="none") + outputs[1]


def more_than_one(net: nn.Module, given: tuple[Tensor]) -> None:
    if len(given[0]) == 1:
        raise ValueError("a batch of one")


def partners(n: int) -> Tensor:
    """Return 1, 0, 3, 2, ...; the last of an odd number has itself."""
    return (torch.arange(n) ^ 1).clamp(max=n - 1)


def info_nce(net: Net, h: Tensor, c: float) -> tuple[Tensor, Tensor]:
    z = F.normalize(h, dim=1)
    pairs = z @ z.flip(1).t() / 0.5
    return net.out(h), c * F.cross_entropy(pairs, torch.arange(len(h)), reduction="none")


def centre_loss(net: Net, h: Tensor, c: float) -> tuple[Tensor, Tensor]:
    kind = torch.arange(len(h)) % 2
    centres = torch.stack([h[kind == k].mean(0) if (kind == k).any() else 0 * h[0] for k in (0, 1)])
    return net.out(h), c * (h - centres[kind]).square().sum(1)


def decorrelation(net: Net, h: Tensor, c: float) -> tuple[Tensor, Tensor]:
    z = h - h.mean(0)
    covariance = z.t() @ z / len(h)
    return net.out(h), c * (covariance - torch.diag(covariance.diagonal())).square().sum()


def load_balancing(net: Net, h: Tensor, c: float) -> tuple[Tensor, Tensor]:
    p = net.out(h).softmax(1)
    share = F.one_hot(p.argmax(1), 3).float().mean(0)  # a count: float32 in a model of any dtype
    return net.out(h), c * (share * p.mean(0)).sum()


def step_of_the_batch(net: Net, h: Tensor, c: float) -> tuple[Tensor, float]:
    step = 0.1 / (1 + c * h.abs().max())
    for _ in range(5):
        h = h - step * torch.tanh(net.hidden(h))
    return net.out(h), 0.0


COUPLED: dict[str, Callable[[Net, Tensor, float], tuple[Tensor, Tensor | float]]] = {
    "mean": lambda net, h, c: (net.out(h + c * h.mean(0)), 0.0),
    "detached mean": lambda net, h, c: (net.out(h + c * h.mean(0).detach()), 0.0),
    "scale": lambda net, h, c: (net.out(h) * (1 + c * h.abs().max().detach()), 0.0),
    "number": lambda net, h, c: (net.out(h) * (1 + c * h.mean().item()), 0.0),
    "deviation": lambda net, h, c: (net.out(h), c * h.std()),
    "InfoNCE": info_nce,
    "centre loss": centre_loss,
    "decorrelation": decorrelation,
    "load balancing": load_balancing,
    "solver": step_of_the_batch,
    "one parameter": lambda net, h, c: (net.out(h), 1e-3 * c * net.extra(h.detach()).mean() ** 2),
    "gradient": lambda net, h, c: (net.out(h + c * (h.mean(0) - h.mean(0).detach())), 0.0),
    "last sample": lambda net, h, c: (net.out(h + c * h[-1:]), 0.0),
    "ranks": lambda net, h, c: (net.out(h) * (1 + c * h[:, :1].argsort(0).argsort(0)), 0.0),
    "batch size": lambda net, h, c: (net.out(h) * (1 + c * len(h)), 0.0),
    "pairs": lambda net, h, c: (net.out(h + c * h[partners(len(h))]), 0.0),
    "float32": lambda net, h, c: (net.out(h + (c * h.float().mean(0)).to(h.dtype)), 0.0),
}


def setup(
    name: str, c: float, dtype: torch.dtype, *, ids: bool, n: int = N
) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Net(lambda net, h: COUPLED[name](net, h, c)).to(dtype)
    inputs = torch.randint(9, (n,)) if ids else torch.randn(n, 5, dtype=dtype)
    return model, inputs, torch.randint(3, (n,))


@pytest.mark.sampled
@pytest.mark.parametrize("name", COUPLED)
def test_a_millionth_of_coupling_is_refused_in_float32(name: str) -> None:
    model, inputs, targets = setup(name, 1e-6, torch.float32, ids=True)
    for backend in BACKENDS:
        with pytest.raises(RefusedError):
            gradscope.norms(model, with_term, inputs, targets, backend=backend)


@pytest.mark.parametrize("n", [4, 5, 20])
@pytest.mark.parametrize("name", ["mean", "last sample", "ranks", "batch size", "InfoNCE", "pairs"])
def test_coupling_below_float32_is_refused_in_batches_of_any_size(name: str, n: int) -> None:
    """Float64 judges a few of the samples, unless float32 shows a change."""
    model, inputs, targets = setup(name, 1e-8, torch.float32, ids=False, n=n)
    for backend in ("hooks", "vmap"):
        with pytest.raises(RefusedError):
            gradscope.norms(model, with_term, inputs, targets, backend=backend)


@pytest.mark.parametrize("n", [4, 20])
def test_weak_coupling_of_a_model_that_rejects_a_batch_of_one_is_refused(n: int) -> None:
    """As a run that plans its batches asks it, before a proof refuses the batch of one."""
    model, inputs, targets = setup("mean", 1e-8, torch.float32, ids=False, n=n)
    model.register_forward_pre_hook(more_than_one)
    problem, batch = Problem.of(model, with_term), Batch.of(inputs, targets)
    with pytest.raises(CoupledSamplesError, match="when other samples are replaced"):
        require_unaffected(problem, batch, problem.losses(batch).detach(), judged=True)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", COUPLED)
def test_more_coupling_is_refused_by_auto(name: str, dtype: torch.dtype) -> None:
    for c, ids in ((1e-3, True), (1e-4, False)):
        model, inputs, targets = setup(name, c, dtype, ids=ids)
        with pytest.raises(CoupledSamplesError):
            gradscope.norms(model, with_term, inputs, targets)


def test_coupling_of_a_later_batch_is_refused_in_float32() -> None:
    def forward(net: Net, h: Tensor) -> tuple[Tensor, float]:
        mixed = 1e-5 * h.mean(0).detach() if len(h) == 7 else 0 * h.detach()
        return net.out(h + mixed), 0.0

    torch.manual_seed(0)
    for backend in BACKENDS:
        with gradscope.Scope(Net(forward), with_term, backend=backend) as scope:
            scope.norms(torch.randn(N, 5), torch.randint(3, (N,)))
            with pytest.raises(CoupledSamplesError, match="other samples"):
                scope.norms(torch.randn(7, 5), torch.randint(3, (7,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_scaled_by_the_batch_is_refused_with_fixed_random_numbers(dtype: torch.dtype) -> None:
    def forward(net: Net, h: Tensor) -> tuple[Tensor, float]:
        noise = torch.randn(h.shape, dtype=torch.float32)
        noise = noise - noise.min()
        return net.out(h + (1e-5 * noise / noise.max()).to(h.dtype)), 0.0

    torch.manual_seed(0)
    given = torch.randn(N, 5, dtype=dtype), torch.randint(3, (N,))
    for backend in BACKENDS:
        with pytest.raises(CoupledSamplesError):
            model = Net(forward).to(dtype)
            gradscope.norms(model, with_term, *given, backend=backend, randomness="fixed")


def experts(net: Net, h: Tensor) -> tuple[Tensor, float]:
    """Each sample goes to one layer of two; a layer adds up its own samples in another order."""
    kind = net.extra(h)[:, 0] > 0
    order = kind.long().argsort(stable=True)
    first, second = h[order].split([int((~kind).sum()), int(kind.sum())])
    parts = torch.cat([torch.tanh(first), net.hidden(second)])
    return net.out(parts[order.argsort()]), 0.0


def solved_each_by_itself(net: Net, h: Tensor) -> tuple[Tensor, float]:
    """A fixed point; a sample that has converged stays as it is while others go on."""
    y, done = h, torch.zeros(len(h), dtype=torch.bool)
    while not bool(done.all()):
        z = 0.3 * torch.tanh(net.hidden(y)) + 0.5 * h
        close = (z - y).abs().amax(1) < 1e-3
        y, done = torch.where(done[:, None], y, z), done | close
    return net.out(y), 0.0


def autocast(net: Net, h: Tensor) -> tuple[Tensor, float]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = torch.tanh(net.hidden(h))
    return net.out(z.to(h.dtype)), 0.0


def normalised_in_float32(net: Net, h: Tensor) -> tuple[Tensor, float]:
    z = h.to(torch.float32)
    return net.out((z * torch.rsqrt(z.square().mean(1, keepdim=True) + 1e-6)).to(h.dtype)), 0.0


INDEPENDENT = {
    "experts": (experts, 1e-5),
    "solver": (solved_each_by_itself, 1e-5),
    "autocast": (autocast, 3e-2),
    "normalised in float32": (normalised_in_float32, 1e-5),
    "frequency": (lambda net, h: (net.out(h) * torch.arange(3).float().exp(), 0.0), 1e-5),
}


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", INDEPENDENT)
def test_rounding_is_no_coupling(name: str, dtype: torch.dtype) -> None:
    forward, tolerance = INDEPENDENT[name]
    torch.manual_seed(0)
    model = Net(forward).to(dtype)
    for backend in ("hooks", "expand", "loop"):
        with gradscope.Scope(model, with_term, backend=backend) as scope:
            for n in (9, 5):
                batch = torch.randint(9, (n,)), torch.randint(3, (n,))
                found = scope.per_sample_gradients(*batch)
                right = oracle.per_sample_gradients(model, with_term, *batch)[1]
                for key, g in found.items():
                    torch.testing.assert_close(
                        g.double(), right[key], rtol=tolerance, atol=tolerance / 10
                    )


def test_a_choice_that_rounding_decides_is_refused_as_such() -> None:
    """Sums in another order differ in the last bit, on which a threshold depends."""

    def forward(net: Net, h: Tensor) -> tuple[Tensor, float]:
        terms = torch.tensor([1.0, 2.0**-24, 2.0**-24], dtype=h.dtype).expand(len(h), 3)
        added = (terms if len(h) == 1 else terms.flip(1)).unbind(1)
        large = added[0] + added[1] + added[2] > 1 + 2.0**-24
        return net.out(h) * torch.where(large, 1.0, 2.0).unsqueeze(1), 0.0

    torch.manual_seed(0)
    batch = torch.randint(9, (N,)), torch.randint(3, (N,))
    for backend in ("auto", "hooks", "loop"):
        with pytest.raises(UnsupportedError, match="rounding changes the loss of sample"):
            gradscope.norms(Net(forward), with_term, *batch, backend=backend)
    assert len(gradscope.norms(Net(forward).double(), with_term, *batch)) == N


def test_an_exact_count_in_float32_loosens_nothing() -> None:
    def forward(net: Net, h: Tensor) -> tuple[Tensor, float]:
        return net.out(h) * (h > 0).float().mean(1, keepdim=True), 0.0

    torch.manual_seed(0)
    with gradscope.Scope(Net(forward).double(), with_term) as scope:
        scope.norms(torch.randint(9, (N,)), torch.randint(3, (N,)))
        assert not any("computes in" in note for note in scope.notes)


class FirstWeight(torch.autograd.Function):
    """Cross entropy as fused kernels compute it: the backward pass reads one incoming weight."""

    @staticmethod
    def forward(ctx, h, weight, targets):
        logits = h @ weight.t()
        p = logits.softmax(1)
        p[torch.arange(len(h)), targets] -= 1
        ctx.save_for_backward(p @ weight, p.t() @ h)
        return F.cross_entropy(logits, targets, reduction="none")

    @staticmethod
    def backward(ctx, g):
        by_h, by_weight = ctx.saved_tensors
        return by_h * g[0], by_weight * g[0], None


class Contiguous(torch.autograd.Function):
    """A product whose backward pass takes its incoming gradient to be contiguous."""

    @staticmethod
    def forward(ctx, h, weight):
        ctx.save_for_backward(h, weight)
        return h * weight

    @staticmethod
    def backward(ctx, g):
        h, weight = ctx.saved_tensors
        if g.untyped_storage().nbytes() // g.element_size() >= g.storage_offset() + g.numel():
            g = g.as_strided(h.shape, h.stride(), g.storage_offset())
        return g * weight, (g * h).sum(0)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(5, 6), nn.Parameter(torch.randn(3, 6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return FirstWeight.apply(torch.tanh(self.first(x)), self.weight, y)


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight, self.last = (
            nn.Linear(5, 6),
            nn.Parameter(torch.randn(6)),
            nn.Linear(12, 3),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        z = self.last(torch.cat([Contiguous.apply(h, self.weight), h], 1))
        return F.cross_entropy(z, y, reduction="none")


@pytest.mark.parametrize("coupling", ["refuse", "own-loss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("model, name", [(Fused, "FirstWeight"), (Strided, "Contiguous")])
def test_a_custom_function_that_is_no_derivative_is_named(
    model: type[nn.Module], name: str, dtype: torch.dtype, coupling: str
) -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(N, 5, dtype=dtype), torch.randint(3, (N,))
    for backend in ("auto", "loop"):
        with pytest.raises(UnsupportedError, match=f"Function {name}"):
            gradscope.norms(
                model().to(dtype),
                lambda losses, _: losses,
                (inputs, targets),
                targets,
                backend=backend,
                coupling=coupling,
            )


class Places(nn.Module):
    """A mixture of experts; an expert takes tokens of the batch until its places are taken."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.ids, self.router, self.out = nn.Embedding(9, 6), nn.Linear(6, 2), nn.Linear(6, 3)
        self.experts, self.act = nn.ModuleList(nn.Linear(6, 6) for _ in range(2)), nn.SiLU()
        self.places = places

    def forward(self, ids: Tensor) -> Tensor:
        h = self.ids(ids)
        flat = h.flatten(0, 1)
        p = self.router(flat).softmax(1)
        y = torch.zeros_like(flat)
        for k, expert in enumerate(self.experts):
            chosen = (p.argmax(1) == k).nonzero().flatten()[: self.places]
            y = y.index_add(0, chosen, self.act(expert(flat[chosen])) * p[chosen, k : k + 1])
        return self.out((flat + y).view_as(h).mean(1))


@pytest.mark.parametrize(
    "places, share, where",
    [(3, 0.0, "the code before layer"), (99, 0.1, "the loss"), (99, 1e-6, "the loss")],
)
def test_what_mixes_samples_is_named(places: int, share: float, where: str) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none") + share * outputs.mean()

    torch.manual_seed(0)
    inputs, targets = torch.randint(9, (N, 4)), torch.randint(3, (N,))
    with pytest.raises(CoupledSamplesError, match=where):
        gradscope.norms(Places(places), loss, inputs, targets)
