"""Exact labels of several positions, against all C^T labels of a sample and closed forms."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.backends.base import backends
from gradscope.blocks import DenseBlock, Gradients
from gradscope.config import load
from gradscope.core.batch import Batch
from gradscope.engine.chains import bind
from gradscope.errors import ModelError, SpecError
from gradscope.model.problem import Predictive
from gradscope.run import compute, prepare
from gradscope.scope import NonFiniteWarning
from gradscope.stages.losses import Normaliser, losses, per_sample_loss, resolve
from gradscope.stages.losses import loss as registered

N, T, C = 3, 3, 3
Q = Callable[[Tensor], Tensor]


class Mixing(nn.Module):
    """Outputs (n, *shape), each of which depends on the whole input (n, 4)."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, int(np.prod(shape)))
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.first(x).tanh())
        return 2 * found.reshape(-1, *self.shape)


def inputs(n: int = N) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def all_labels(
    model: nn.Module, loss: str, p: Tensor, labels: Callable[[int, tuple[int, ...]], Any], q: Q
) -> Tensor:
    """Return E_y q(g(y)) (n, ·) over every combination of classes, one gradient for each.

    `p` (n, T, c) are the probabilities, `labels` makes a sample's targets of a combination.
    """
    function, rows = resolve(loss), []
    for i, x in enumerate(inputs(len(p))):
        total: Any = 0
        for combination in product(range(p.shape[2]), repeat=p.shape[1]):
            weight = torch.stack([p[i, t, c] for t, c in enumerate(combination)]).prod()
            value = function(model(x[None]), labels(i, combination))[0]
            parts = torch.autograd.grad(value, list(model.parameters()))
            total = total + weight * q(torch.cat([g.flatten() for g in parts]))
        rows.append(total)
    return torch.stack(rows)


def flat(found: dict[str, Tensor], n: int | None = None) -> Tensor:
    return torch.cat([v.flatten() if n is None else v.reshape(n, -1) for v in found.values()], -1)


def classes(ignored: bool) -> Tensor:
    """Labels (3, 3) of which some are ignored: two in the second sample, all in the third."""
    found = torch.zeros(N, T, dtype=torch.int64)
    if ignored:
        found[1, 1:] = found[2] = -100
    return found


def of_classes(data: Tensor) -> Callable[[int, tuple[int, ...]], Tensor]:
    def made(i: int, combination: tuple[int, ...]) -> Tensor:
        return torch.where(data[i] == -100, data[i], torch.tensor(combination))[None]

    return made


CHAINS: dict[str, tuple[Q, Q]] = {  # what of a sample's gradient, and what becomes of the mean
    "second_moment": (torch.square, lambda m: m),
    "square | mean": (torch.square, lambda m: m),
    "square | sum": (torch.square, lambda m: m * N),
    "scale:by=-3 | square | mean": (lambda g: (3 * g) ** 2, lambda m: m),
    "norm | second_moment": (lambda g: g.square().sum()[None], lambda m: m),
    "norm:p=2.0 | square | mean | power:p=0.5": (lambda g: g.square().sum()[None], torch.sqrt),
    "mean": (lambda g: g, lambda m: m),
    "scale:by=2 | sum": (lambda g: 2 * g, lambda m: m * N),
}
LOSSES = [  # score functions, and some whose gradients have a mean
    "cross_entropy",
    "cross_entropy:per_sample=sum",
    'cross_entropy:weight="0.2,1,3"',
    "cross_entropy:label_smoothing=0.3,per_sample=sum",
]


@pytest.mark.sampled
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_classes_at_positions(loss: str, ignored: bool) -> None:
    model, data = Mixing(C, T).double(), classes(ignored)
    p = model(inputs()).detach().softmax(1).mT
    with gradscope.Scope(model, loss, labels="exact", verify="always") as scope:
        found = scope.expectations([*CHAINS], inputs(), data)
    for one, (q, then) in zip(found, CHAINS.values(), strict=True):
        right = then(all_labels(model, loss, p, of_classes(data), q).mean(0))
        torch.testing.assert_close(flat(one), right, rtol=1e-9, atol=1e-14)


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["auto", *backends.names()])
@pytest.mark.parametrize("loss", LOSSES[1:3])
def test_each_backend(loss: str, backend: str) -> None:
    """Rows, too, and a second batch; in float32 to its precision."""
    data = classes(ignored=True)
    for dtype, rtol in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        model = Mixing(C, T).to(dtype)
        wide = Mixing(C, T).double()
        p = wide(inputs()).detach().softmax(1).mT
        right = all_labels(wide, loss, p, of_classes(data), torch.square)
        with gradscope.Scope(model, loss, labels="exact", backend=backend) as scope:
            for _ in range(2):
                found = scope.expectation("second_moment", inputs().to(dtype), data)
                mean = right.mean(0).to(dtype)
                torch.testing.assert_close(flat(found), mean, rtol=rtol, atol=1e-8)


def test_log_probabilities() -> None:
    class Logs(Mixing):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).log_softmax(1)

    model, data = Logs(C, T).double(), classes(ignored=False)
    p = model(inputs()).detach().exp().mT
    found = gradscope.expectation(
        model, "nll", "second_moment", inputs(), data, labels="exact", backend="hooks"
    )
    right = all_labels(model, "nll", p, of_classes(data), torch.square).mean(0)
    torch.testing.assert_close(flat(found), right, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("loss", ["causal_lm", "causal_lm:per_sample=sum"])
def test_next_tokens(loss: str) -> None:
    """The first token has no prediction, and a prompt's tokens are not drawn."""
    model = Mixing(4, C).double()
    tokens, mask = (
        torch.randint(C, (N, 4)),
        torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1], [0, 0, 0, 1]]),
    )
    p = model(inputs()).detach()[:, :-1].softmax(2)

    def labels(i: int, combination: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        return torch.cat([tokens[i, :1], torch.tensor(combination)])[None], mask[i : i + 1]

    right = all_labels(model, loss, p, labels, torch.square).mean(0)
    for data in ((tokens, mask), tokens.where(mask > 0, -100)):
        found = gradscope.expectation(
            model, loss, "second_moment", inputs(), data, labels="exact", backend="hooks"
        )
        torch.testing.assert_close(flat(found), right, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@pytest.mark.parametrize(
    "loss", ["bce_with_logits", 'bce_with_logits:pos_weight="2",per_sample=sum']
)
def test_bits(loss: str, shape: tuple[int, ...]) -> None:
    model = Mixing(*shape).double()
    on = model(inputs()).detach().sigmoid().flatten(1)
    p = torch.stack([1 - on, on], -1)

    def labels(i: int, combination: tuple[int, ...]) -> Tensor:
        return torch.tensor(combination).double().reshape(1, *shape)

    found = gradscope.expectation(
        model, loss, "second_moment", inputs(), torch.zeros(N, *shape).double(), labels="exact"
    )
    right = all_labels(model, loss, p, labels, torch.square).mean(0)
    torch.testing.assert_close(flat(found), right, rtol=1e-9, atol=1e-14)


def jacobians(model: Mixing, x: Tensor) -> Tensor:
    """(n, entries, p), one backward pass each."""
    rows = []
    for one in x:
        outputs = model(one[None]).flatten()
        grads = [torch.autograd.grad(o, [*model.parameters()], retain_graph=True) for o in outputs]
        rows.append(torch.stack([torch.cat([g.flatten() for g in own]) for own in grads]))
    return torch.stack(rows)


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["auto", *backends.names()])
@pytest.mark.parametrize("shape", [(1,), (5,), (2, 3)])
def test_a_squared_error(shape: tuple[int, ...], backend: str) -> None:
    """2 w² JᵀJ: the Gauss-Newton matrix of the sum; a mean of d entries has 1/d² of it."""
    model, y = Mixing(*shape).double(), torch.full((N, *shape), 9.0, dtype=torch.float64)
    squares = 2 * jacobians(model, inputs()).square().sum(1)
    d = squares.new_tensor(shape).prod()
    for loss, by in (("mse", 1 / d**2), ("mse:per_sample=sum", 1.0)):
        with gradscope.Scope(model, loss, labels="exact", backend=backend) as scope:
            found = scope.expectation("second_moment", inputs(), y)
            mean = scope.expectation("mean", inputs(), y)
            rows = scope.expectation("norm | square | sum", inputs(), y)["norm"]
        torch.testing.assert_close(flat(found), squares.mean(0) * by, rtol=1e-10, atol=1e-15)
        torch.testing.assert_close(rows, squares.sum() * by)
        assert not flat(mean).any()


def test_a_squared_error_of_large_outputs() -> None:
    """One standard deviation beside 10⁷ would be rounded away in float32."""

    class Shifted(Mixing):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1e7

    right, found = (
        gradscope.expectation(
            model, "mse", "second_moment", inputs().float(), torch.zeros(N, 4), labels="exact"
        )
        for model in (Mixing(4), Shifted(4))
    )
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-8)


def test_drawn_targets_of_a_squared_error() -> None:
    """y ~ N(μ, ½): mean and variance within five standard errors, and their Fisher."""
    model, x = Mixing(4).double(), inputs(1).expand(20_000, -1)
    with gradscope.Scope(model, "mse:per_sample=sum", labels="sampled", seed=3) as scope:
        drawn = scope.session.labels.of(Batch.of(x, None)).targets - model(x).detach()
        again = scope.session.labels.of(Batch.of(x[7:9], None, torch.tensor([7, 8]))).targets
        assert torch.equal(again - model(x[7:9]).detach(), drawn[7:9])
        found = flat(scope.expectation("second_moment", x, torch.zeros(len(x), 4).double()))
    count = drawn.numel()
    assert abs(drawn.mean()) < 5 * (0.5 / count) ** 0.5
    assert abs(drawn.var() - 0.5) < 5 * 0.5 * (2 / count) ** 0.5
    right = 2 * jacobians(model, inputs(1)).square().sum(1)[0]
    assert ((found - right).abs() < 5 * (2 * right**2 / len(x)).sqrt() + 1e-12).all()


@pytest.mark.parametrize(
    "chain",
    [
        *("clip:max_norm=1 | mean", "norm | mean", "norm:p=1 | square | mean", "abs | mean"),
        *("square | square | mean", "sign | second_moment", "center | square | mean"),
    ],
)
@pytest.mark.parametrize(("loss", "told"), [("cross_entropy", r"3\^3"), ("mse", "infinitely")])
def test_what_needs_all_labels_is_refused(loss: str, told: str, chain: str) -> None:
    shape = (C, T) if loss == "cross_entropy" else (4,)
    y = classes(ignored=False) if loss == "cross_entropy" else torch.zeros(N, 4).double()
    with pytest.raises(SpecError, match=told) as caught:
        gradscope.expectation(Mixing(*shape).double(), loss, chain, inputs(), y, labels="exact")
    assert "second_moment, square | mean" in str(caught.value)


def test_stages_that_are_linear() -> None:
    """A projection is, and the second moment of what it makes."""
    model, data = Mixing(C, T).double(), classes(ignored=False)
    p = model(inputs()).detach().softmax(1).mT
    chain = "project:dim=3 | second_moment"
    with gradscope.Scope(model, "cross_entropy", labels="exact") as scope:
        found = scope.expectation(chain, inputs(), data)["project"]
    sizes = [v.numel() for v in model.parameters()]

    def projected(g: Tensor) -> Tensor:
        parts = g.split(sizes)
        named = zip(dict(model.named_parameters()), parts, model.parameters(), strict=True)
        rows = {name: DenseBlock(v.reshape(1, *like.shape)) for name, v, like in named}
        made = bind("project:dim=3").rows(Gradients(rows))
        return made["project"].dense()[0].square()

    right = all_labels(model, "cross_entropy", p, of_classes(data), projected).mean(0)
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-14)


def test_a_sample_that_is_not_finite() -> None:
    model, x, y = Mixing(C, T).double(), inputs(), classes(ignored=False)
    right = gradscope.expectation(
        model, "cross_entropy", "second_moment", x[1:], y[1:], labels="exact"
    )
    x[0] = torch.nan
    with pytest.warns(NonFiniteWarning, match="1 samples"):
        found = gradscope.expectation(model, "cross_entropy", "second_moment", x, y, labels="exact")
    torch.testing.assert_close(found, right)


def test_losses_of_ones_own() -> None:
    """A loss with the option `per_sample` is answered, a loss without it is refused."""

    predictive = Predictive(lambda o: o.movedim(1, -1).softmax(-1), lambda drawn, *_: drawn)

    def values(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    @registered("told_apart", predictive)
    def told_apart(o: Tensor, t: Tensor, *, per_sample: Normaliser = "mean") -> Tensor:
        return per_sample_loss(values(o, t), per_sample)

    @registered("joined", predictive)
    def joined(o: Tensor, t: Tensor) -> Tensor:
        return values(o, t).mean(1)

    model, y = Mixing(C, T).double(), classes(ignored=False)
    try:
        own, right = (
            gradscope.expectation(model, loss, "second_moment", inputs(), y, labels="exact")
            for loss in ("told_apart", "cross_entropy")
        )
        torch.testing.assert_close(own, right)
        with pytest.raises(
            SpecError, match="the loss 'joined' does not return a number for each position"
        ):
            gradscope.expectation(model, "joined", "second_moment", inputs(), y, labels="exact")
    finally:
        for name in ("told_apart", "joined"):
            del losses._entries[name]


def test_outputs_without_a_distribution() -> None:
    class Whole(Mixing):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x).round().long()

    for labels in ("sampled", "exact"):
        with pytest.raises(ModelError, match="labels cannot be sampled"):
            gradscope.expectation(
                Whole(4).double(), "mse", "second_moment", inputs(), None, labels=labels
            )


def test_a_file_has_expectations_over_labels(tmp_path: Any) -> None:
    """Losses are E[L], norms √E‖g‖²; and rows are what their mean says."""
    model, data = Mixing(C, T).double(), classes(ignored=True)
    (tmp_path / "model.py").write_text(
        "from tests.stages.test_positions import Mixing\n"
        f"def build():\n    return Mixing({C}, {T}).double()\n"
    )
    torch.save(model.state_dict(), tmp_path / "w.pt")
    np.savez(tmp_path / "d.npz", inputs=inputs().numpy(), targets=data.numpy())
    (tmp_path / "run.toml").write_text(
        '[model]\nfactory = "model.py:build"\n[checkpoint]\npath = "w.pt"\n[dataset]\n'
        'path = "d.npz"\n[loss]\nname = "cross_entropy"\n'
        '[compute]\nlabels = "exact"\ntransform = ["second_moment", "square"]\n'
    )
    job = prepare(load(tmp_path / "run.toml"))
    compute(job, tmp_path / "out.h5")
    p = model(inputs()).detach().softmax(1).mT
    squares = all_labels(model, "cross_entropy", p, of_classes(data), torch.square)
    entropy = -(p * p.log()).sum(2)
    counted = data != -100
    loss = (entropy * counted).sum(1) / counted.sum(1).clamp(min=1)
    with gradscope.open(tmp_path / "out.h5") as file:
        np.testing.assert_allclose(file.samples["loss"], loss.numpy(), rtol=1e-9)
        norms = squares.sum(1).sqrt().numpy()
        np.testing.assert_allclose(file.samples["norm"], norms, rtol=1e-9)
        found = np.concatenate([a[:].ravel() for a in file.chains[0].values()])
        np.testing.assert_allclose(found, squares.mean(0).numpy(), rtol=1e-9, atol=1e-15)
        rows = np.concatenate([a[:].reshape(N, -1) for a in file.chains[1].values()], 1)
        np.testing.assert_allclose(rows, squares.numpy(), rtol=1e-9, atol=1e-15)
    assert any("√E‖g‖²" in note for note in job.session.notes)


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
@pytest.mark.parametrize("labels", ["sampled", "exact"])
def test_labels_of_models_that_draw_random_numbers(loss: str, labels: str) -> None:
    """Every label of a sample meets the same dropout, as its own batch of one does."""
    shape = (C,) if loss == "cross_entropy" else (2,)
    model = nn.Sequential(Mixing(*shape), nn.Dropout(0.5)).double().train()
    y = torch.zeros(N, dtype=torch.int64) if loss == "cross_entropy" else None
    with gradscope.Scope(model, loss, labels=labels, randomness="fixed") as scope:  # type: ignore[arg-type]
        whole = scope.expectation("square | sum", inputs(), y)
        parts = [
            scope.expectation(
                "square | sum",
                inputs()[i : i + 1],
                None if y is None else y[:1],
                index=torch.tensor([i]),
            )
            for i in range(N)
        ]
    for name, value in whole.items():
        torch.testing.assert_close(value, torch.stack([part[name] for part in parts]).sum(0))


class Pooled(nn.Module):
    """A model (n, 3, 4) -> (n, 3) of a layer on positions, of which a sample has one label."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, C)
        self.inputs_first = nn.Parameter(torch.randn(4, 4))
        self.convolution = nn.Conv1d(4, 4, 2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        mask = x[..., :1] > -1  # some positions do not count
        match self.kind:
            case "linear":
                x = self.first(x)
            case "inputs first":
                x = x @ self.inputs_first
            case "convolution":
                x = self.convolution(x.mT).mT[:, 1:]
            case "tied":
                x = (x @ self.inputs_first).tanh() @ self.inputs_first.t()
        found: Tensor = self.last((x.tanh() * mask).sum(1))
        return found


def each_label(
    model: nn.Module, loss: str, x: Tensor, chain: str
) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Return what a chain gives of each sample by itself with each label, and its probability."""
    found, p = [], model(x).detach().softmax(1)
    with gradscope.Scope(model, loss, backend="hooks", verify="never") as scope:
        for i, c in product(range(len(x)), range(C)):
            made = scope.expectation(chain, x[i : i + 1], torch.tensor([c]))
            found.append((made, p[i, c] / len(x)))
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("loss", ["cross_entropy", 'cross_entropy:weight="0.2,1,3"'])
@pytest.mark.parametrize("kind", ["linear", "inputs first", "convolution", "tied"])
def test_kronecker_factors(kind: str, loss: str) -> None:
    """B is E[Σₜ b bᵀ] over all labels; A and T are of the positions that count in any of them."""
    model, x = Pooled(kind).double(), torch.randn(4, T, 4).double()
    y = torch.zeros(4, dtype=torch.int64)
    for chain in ("kfac:positions=sum", "kfac:positions=sum,bias=column,full=9"):
        with gradscope.Scope(model, loss, labels="exact") as scope:
            found = scope.expectation(chain, x, y)
            halves = [scope.expectation(chain, x[k], y[k]) for k in (slice(0, 1), slice(1, 4))]
        right = each_label(model, loss, x, chain)
        for key, value in found.items():
            mean = torch.stack([own[key] * weight for own, weight in right]).sum(0)
            torch.testing.assert_close(value, mean, rtol=1e-9, atol=1e-13)
            both = (halves[0][key] + 3 * halves[1][key]) / 4
            torch.testing.assert_close(both, value, rtol=1e-9, atol=1e-13)
    pooled = gradscope.expectation(model, loss, "kfac", x, y, labels="exact")
    name = {"linear": "first.weight.A", "convolution": "convolution.weight.A"}.get(kind)
    if name is not None:
        whole = gradscope.expectation(model, loss, "kfac:positions=sum", x, y, labels="exact")
        counted = (x[..., 0] > -1).sum() / 4
        torch.testing.assert_close(pooled[name] * counted, whole[name])


def test_eigenvalues_of_the_exact_fisher() -> None:
    model, x = Pooled("linear").double(), torch.randn(4, T, 4).double()
    y = torch.zeros(4, dtype=torch.int64)
    found = gradscope.expectation(model, "cross_entropy", "ekfac", x, y, labels="exact")
    a, b = (found[f"first.weight.{side}.vectors"] for side in "AB")
    p, total = model(x).detach().softmax(1), torch.zeros(4, 5).double()
    for i, c in product(range(4), range(C)):
        value = nn.functional.cross_entropy(model(x[i : i + 1]), torch.tensor([c]))
        grads = torch.autograd.grad(value, [model.first.weight, model.first.bias])
        matrix = torch.cat([grads[0], grads[1][:, None]], 1)
        total += p[i, c] / 4 * (b.T @ matrix @ a).square()
    torch.testing.assert_close(found["first.weight.eigenvalues"], total, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("chain", ["kfac", "ekfac"])
def test_factors_of_several_positions_are_refused(chain: str) -> None:
    """A row of each position and class does not say which positions of a layer are the same."""
    model = nn.Sequential(nn.Linear(4, C), nn.Flatten(), nn.Unflatten(1, (T, C))).double()
    x = torch.ones(N, T, 4).double()  # alike, so that their activations do not say so either

    with pytest.raises(SpecError, match=r"3\^3.* needs samples with one position"):
        gradscope.expectation(
            nn.Sequential(model, Swapped()),
            "cross_entropy",
            chain,
            x,
            classes(False),
            labels="exact",
        )


class Swapped(nn.Module):
    def forward(self, o: Tensor) -> Tensor:
        return o.mT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_factors_of_one_position(dtype: torch.dtype) -> None:
    """B = E[diag p − p pᵀ], and of a squared error of one output 2."""
    layer, x = nn.Linear(4, C).to(dtype), inputs().to(dtype)
    y, p = torch.zeros(N, dtype=torch.int64), layer(x).detach().softmax(1)
    found = gradscope.expectation(layer, "cross_entropy", "kfac", x, y, labels="exact")
    right = (torch.diag_embed(p) - p[:, :, None] * p[:, None]).mean(0)
    a = x.T @ x / N
    close = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {}
    torch.testing.assert_close(found["weight.B"].to(dtype), right, **close)
    torch.testing.assert_close(found["weight.A"].to(dtype), a, **close)
    one = nn.Linear(4, 1).to(dtype)
    squared = gradscope.expectation(one, "mse", "kfac", x, None, labels="exact")
    torch.testing.assert_close(squared["weight.B"].to(dtype), torch.full((1, 1), 2.0, dtype=dtype))
    torch.testing.assert_close(squared["weight.A"].to(dtype), a, **close)
