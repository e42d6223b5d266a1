"""Implementations with the usual mistakes: each is named, and what was computed instead."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradscope import model_loss
from gradscope.comparison import compare
from tests import oracle

N = 5


def right(model: nn.Module, loss: Any, inputs: Any, targets: Any) -> dict[str, Tensor]:
    return oracle.per_sample_gradients(model, loss, inputs, targets)[1]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def diagnosed(model, loss, inputs, targets, mine, **options):
    result = compare(model, loss, inputs, targets, ["loop"], against={"mine": mine}, **options)
    row = result.rows[1]
    assert row.status == "disagrees", row
    return {p.name: (p.kind, p.meaning) for p in row.parameters if not p.agrees}, row


def hooked(model, loss, inputs, targets, combine, layers=nn.Linear):
    """Run the batch once with hooks on layers, and combine what they have stored."""
    stored: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
    handles = []
    for name, layer in model.named_modules():
        if isinstance(layer, layers):
            a, g = stored[name] = ([], [])

            def after(module, args, output, a=a, g=g):
                a.append(args[0].detach())
                output.register_hook(lambda x: g.append(x.detach()))

            handles.append(layer.register_forward_hook(after))
    if getattr(loss, "of_model", False):
        loss(model, inputs, targets).sum().backward()
    else:
        loss(model(inputs), targets).sum().backward()
    for handle in handles:
        handle.remove()
    found = {}
    for name, (a, g) in stored.items():
        layer = model.get_submodule(name)
        for weight, bias in [combine(a, g)]:
            found[f"{name}.weight"] = weight
            if layer.bias is not None:
                found[f"{name}.bias"] = bias
    return found


def outer(a, g):
    return torch.einsum("n...o,n...i->noi", g, a), g.flatten(1, -2).sum(1) if g.dim() > 2 else g


def pairs(*chosen):
    """Sum the outer products of some inputs (by index) with some gradients."""

    def combine(a, g):
        every = chosen if chosen else [(0, k) for k in range(len(g))]
        found = [outer(a[i], g[j]) for i, j in every]
        return sum(w for w, _ in found), sum(b for _, b in found)

    return combine


# a Laplacian in the loss


@model_loss
def poisson(model, inputs, targets):
    with torch.enable_grad():
        x = inputs.detach().requires_grad_()
        u = model(x).squeeze(1)
        (slopes,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        bends = [
            torch.autograd.grad(slopes[:, k].sum(), x, create_graph=True)[0][:, k] for k in (0, 1)
        ]
        return (sum(bends) + targets) ** 2 + (u - targets) ** 2


@model_loss
def penalty(model, inputs, targets):
    with torch.enable_grad():
        x = inputs.detach().requires_grad_()
        u = model(x).squeeze(1)
        (slopes,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return (u - targets) ** 2 + (slopes.norm(dim=1) - 1) ** 2


def pinn():
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))


def field(n=N):
    return torch.randn(n, 2).double(), torch.randn(n).double()


@pytest.mark.parametrize(
    ("combine", "words"),
    [
        (pairs((0, -1)), "Only the last was kept (the backward pass of the loss)"),
        (pairs((0, 0)), "Only the first was kept (derivative 1 inside the loss)"),
        (pairs((0, 1)), "Only the second was kept (derivative 2 inside the loss)"),
        (pairs(), "The gradients of all times were summed"),
    ],
)
def test_hooks_that_fire_several_times_in_a_laplacian(combine, words):
    model = seeded(pinn)
    found, _ = diagnosed(model, poisson, *field(), partial(hooked, combine=combine))
    assert {kind for kind, _ in found.values()} == {"inner_passes"}, found
    _, text = found["0.weight"]
    assert words in text and "fires 4 times for each sample: 3 times inside the loss" in text
    assert "torch.func" in text
    assert found["2.weight"][1] == text  # one message for all layers


def test_a_gradient_penalty_and_a_hook_of_its_last_pass():
    model = seeded(pinn)
    found, _ = diagnosed(model, penalty, *field(), partial(hooked, combine=pairs((0, -1))))
    assert "fires 2 times for each sample: 1 time inside the loss" in found["2.weight"][1]


def test_an_inner_derivative_without_create_graph():
    @model_loss
    def detached(model, inputs, targets):
        with torch.enable_grad():
            x = inputs.detach().requires_grad_()
            u = model(x).squeeze(1)
            (slopes,) = torch.autograd.grad(u.sum(), x, retain_graph=True)
            return (u - targets) ** 2 * (1 + slopes.norm(dim=1))

    @model_loss
    def true(model, inputs, targets):
        with torch.enable_grad():
            x = inputs.detach().requires_grad_()
            u = model(x).squeeze(1)
            (slopes,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            return (u - targets) ** 2 * (1 + slopes.norm(dim=1))

    mine = lambda model, loss, *data: right(model, detached, *data)  # noqa: E731
    found, _ = diagnosed(seeded(pinn), true, *field(), mine)
    assert {kind for kind, _ in found.values()} == {"detached"}, found
    assert "create_graph=True" in found["0.bias"][1]


# layers that are used several times


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.step, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        for _ in range(3):
            x = self.step(x).tanh()
        return self.head(x)


def classes(n=N, c=2):
    return torch.randn(n, 3).double(), torch.arange(n) % c


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        # the backward pass reaches the calls in reverse: gradient 0 is that of the last call
        ([(2, 0)], "only call 3 was counted; calls 1, 2 are missing"),
        ([(0, 2)], "only call 1 was counted; calls 2, 3 are missing"),
        ([(0, 2), (1, 1)], "only calls 1, 2 was counted; call 3 is missing"),
        ([(2, 0), (2, 1), (2, 2)], "the input of the last call was combined with the gradients of"),
        ([(0, 0), (1, 1), (2, 2)], "paired in the wrong order"),
        ([(0, 0)], "the input of the first call was combined with the gradient of the last call"),
        ([(i, j) for i in range(3) for j in range(3)], "the sum of the inputs was combined with"),
    ],
)
def test_a_layer_that_is_called_three_times(chosen, words):
    def combine(a, g):
        return pairs(*(chosen if len(g) > 1 else [(0, 0)]))(a, g)

    mine = partial(hooked, combine=combine)
    model = seeded(Shared)
    loss = nn.CrossEntropyLoss(reduction="none")
    found, _ = diagnosed(model, loss, *classes(), mine)
    assert found["step.weight"][0] == "uses" and words in found["step.weight"][1], found
    assert "layer 'step' (Linear)" in found["step.weight"][1]
    assert "head.weight" not in found


class Tied(nn.Module):
    def __init__(self, functional=False):
        super().__init__()
        self.emb, self.mix = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.functional = functional
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x):
        h = self.mix(self.emb(x)).tanh()
        return nn.functional.linear(h, self.emb.weight) if self.functional else self.head(h)


def tokens(model_outputs, targets):
    return nn.functional.cross_entropy(model_outputs.mT, targets, reduction="none").sum(1)


def untied(kept):
    """Gradients of a copy whose weights are not tied, of which one is returned."""

    def mine(model, loss, inputs, targets):
        copy = seeded(Tied)
        copy.load_state_dict(model.state_dict())
        copy.head.weight = nn.Parameter(copy.head.weight.detach().clone())
        found = right(copy, loss, inputs, targets)
        found["emb.weight"] = found[kept]
        return {k: found[k] for k in ("emb.weight", "mix.weight", "mix.bias")}

    return mine


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize(
    ("kept", "one", "other"), [("emb.weight", "emb", "head"), ("head.weight", "head", "emb")]
)
def test_a_tied_weight_of_which_one_use_is_missing(kept, one, other, functional):
    model = seeded(partial(Tied, functional))
    data = torch.randint(7, (N, 6)), torch.randint(7, (N, 6))
    found, _ = diagnosed(model, tokens, *data, untied(kept))
    assert set(found) == {"emb.weight"}
    kind, text = found["emb.weight"]
    place = {k: f"layer '{k}'" for k in ("emb", "head")}
    place["head"] = "the use outside of layers" if functional else "layer 'head'"
    assert kind == "uses" and f"only {place[one]}" in text, text
    if functional:
        assert "outside of layers" in text
    else:
        assert f"{place[other]} is missing" in text
        assert "layer 'emb' (Embedding), layer 'head' (Linear)" in text


# the mode of the model


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.drop = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.4)
        self.b = nn.Linear(4, 2)

    def forward(self, x):
        return self.b(self.drop(self.norm(self.a(x)).tanh()))


def in_batch(model, loss, inputs, targets):
    each = loss(model(inputs), targets)
    named = dict(model.named_parameters())
    rows = [torch.autograd.grad(x, list(named.values()), retain_graph=True) for x in each]
    return {k: torch.stack(g) for k, g in zip(named, zip(*rows, strict=True), strict=True)}


def normed():
    model = seeded(Normed)
    model(torch.randn(20, 3).double())
    return model.eval()


def in_mode(change, implementation):
    def mine(model, loss, inputs, targets):
        change(model)
        return implementation(model, loss, inputs, targets)

    return mine


LOSS = nn.CrossEntropyLoss(reduction="none")


def test_batch_statistics_of_training_mode():
    mine = in_mode(lambda model: model.norm.train(), in_batch)
    found, row = diagnosed(normed(), LOSS, *classes(8), mine)
    kinds = {kind for kind, _ in found.values()}
    text = found["b.weight"][1]
    assert "mode" in kinds and "layer 'norm' (BatchNorm1d) computes batch statistics" in text, found
    assert "row i is the gradient of sample i's loss within the batch" in text
    assert "layer 'norm' (BatchNorm1d) in training mode" in (row.remedy or "")


def test_hooks_in_training_mode_hold_other_samples_losses():
    mine = in_mode(lambda model: model.norm.train(), partial(hooked, combine=pairs((0, 0))))
    found, _ = diagnosed(normed(), LOSS, *classes(8), mine, parameters=["a.weight", "b.weight"])
    assert "includes the losses of other samples" in found["a.weight"][1], found


def test_dropout_that_only_they_apply():
    mine = in_mode(lambda model: model.drop.train(), in_batch)
    found, row = diagnosed(normed(), LOSS, *classes(8), mine)
    text = found["a.weight"][1]
    assert "in training mode for Dropout only" in text, found
    assert "layer 'drop' (Dropout) in training mode" in row.remedy
    assert "random numbers" in row.remedy


def test_a_function_that_changes_the_model_is_reported():
    def steps(model, loss, inputs, targets):
        found = right(model, loss, inputs, targets)
        with torch.no_grad():
            model.b.weight.add_(0.1)
        model.a.weight.requires_grad_(False)
        return {k: g * 1.7 for k, g in found.items()}

    _, row = diagnosed(normed(), LOSS, *classes(), steps)
    assert "changed the values of b.weight" in row.remedy
    assert "a.weight no longer requires a gradient" in row.remedy


# formulas of single layers


def replaced(name, gradient):
    """Return the right gradients with one of them computed by `gradient(layer, a, g)`."""
    layer = name.rpartition(".")[0]

    def mine(model, loss, inputs, targets):
        kept: list[Tensor] = []

        def after(module, args, output):
            kept.append(args[0].detach())
            kept.append(output.detach())
            output.register_hook(lambda g: kept.append(g.detach()))

        handle = model.get_submodule(layer).register_forward_hook(after)
        loss(model(inputs), targets).sum().backward()
        handle.remove()
        a, y, g = kept
        wrong = gradient(model.get_submodule(layer), a, g, y)
        return right(model, loss, inputs, targets) | {name: wrong}

    return mine


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.norm = nn.Embedding(9, 4, padding_idx=0), nn.LayerNorm(4)
        self.up, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.up(self.norm(self.emb(x))))).mean(1)


class Images(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 6, 3, **options), nn.GroupNorm(2, 6)
        self.act, self.head = nn.ReLU(), nn.LazyLinear(3)

    def forward(self, x):
        return self.head(self.act(self.norm(self.conv(x))).flatten(1))


def sequences():
    torch.manual_seed(1)
    return torch.tensor([[1, 1, 2, 0, 0], [3, 2, 3, 3, 0], [4, 4, 4, 4, 5]] * 2), torch.arange(
        6
    ) % 3


def images():
    torch.manual_seed(1)
    return torch.randn(N, 4, 7, 7).double(), torch.arange(N) % 3


def kernel_with(**options):
    """The kernel's gradient by torch's own, of a convolution with other options."""

    def gradient(layer, a, g, _):
        own = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
        rows = []
        for x, d in zip(a, g, strict=True):
            weight = layer.weight.detach().clone().requires_grad_()
            y = nn.functional.conv2d(x[None], weight, None, groups=layer.groups, **(own | options))
            h, w = min(y.shape[2], d.shape[1]), min(y.shape[3], d.shape[2])
            part = d[None, :, :h, :w]
            rows.append(torch.autograd.grad(y[..., :h, :w], weight, part)[0])
        return torch.stack(rows)

    return gradient


def all_channels(layer, a, g, _):
    """The kernel's gradient as if every output channel saw every input channel."""
    grad = nn.grad.conv2d_weight
    shape = (6, 4, 3, 3)
    return torch.stack([grad(x[None], shape, d[None]) for x, d in zip(a, g, strict=True)])


def embedded(reduce):
    def gradient(layer, x, g, _):
        rows = g.new_zeros(len(x), *layer.weight.shape)
        for i, tokens in enumerate(x):
            for t, token in enumerate(tokens):
                reduce(rows[i], int(token), g[i, t])
        return rows

    return gradient


def added(rows, k, g):
    rows[k] += g


def last(rows, k, g):
    if k:
        rows[k] = g


FORMULAS = [
    # layer and parameter, model, what is computed, words
    ("up.weight", Sequence, lambda m, a, g, y: g.sum(1)[:, :, None] * a.sum(1)[:, None],
     "summed over positions first"),
    ("up.weight", Sequence, lambda m, a, g, y: g[:, -1, :, None] * a[:, -1, None],
     "only the last position was counted"),
    ("up.bias", Sequence, lambda m, a, g, y: g[:, 0], "only the first position was counted"),
    ("up.bias", Sequence, lambda m, a, g, y: g.mean(1),
     "k = 5, which is the number of positions of the layer's output"),
    ("up.weight", Sequence, lambda m, a, g, y: outer(a, g * (1 - y.tanh() ** 2))[0], None),
    ("norm.weight", Sequence, lambda m, a, g, y: (g * a).sum(1), "by the layer's input"),
    ("norm.weight", Sequence, lambda m, a, g, y: g.sum(1), "the bias's formula"),
    ("emb.weight", Sequence, embedded(added), "the padding token 0 has a gradient"),
    ("emb.weight", Sequence, embedded(last), "only the last occurrence of a repeated"),
    ("conv.weight", partial(Images, stride=2, padding=1), kernel_with(stride=1),
     "stride (2, 2) was ignored"),
    ("conv.weight", partial(Images, dilation=2), kernel_with(dilation=1),
     "dilation (2, 2) was ignored"),
    ("conv.weight", partial(Images, padding=1), kernel_with(padding=0),
     "padding (1, 1) was ignored"),
    ("conv.weight", partial(Images, padding=1, padding_mode="circular"), kernel_with(),
     "was padded with zeros"),
    ("conv.bias", partial(Images, stride=2), lambda m, a, g, y: g.mean((2, 3)),
     "k = 9, which is the number of positions of the layer's"),
    ("conv.bias", Images, lambda m, a, g, y: g[:, :, -1, -1], "only the last position"),
    ("conv.weight", partial(Images, groups=2), all_channels, "groups were not applied"),
    ("norm.weight", Images, lambda m, a, g, y: (g * y).sum((2, 3)), "by the layer's output"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "make", "gradient", "words"), FORMULAS)
def test_a_wrong_formula_of_one_layer(name, make, gradient, words):
    model = make()
    data = sequences() if isinstance(model, Sequence) else images()
    torch.manual_seed(0)
    model(data[0].float() if data[0].is_floating_point() else data[0])  # lazy layers
    model = seeded(lambda: model)
    nn.init.normal_(model.norm.weight), nn.init.normal_(model.norm.bias)
    found, _ = diagnosed(model, LOSS, *data, replaced(name, gradient))
    assert set(found) == {name}
    kind, text = found[name]
    if words is None:
        assert kind in ("unknown", "unrelated"), text
    else:
        assert words in text, (kind, text)


def test_a_hook_behind_the_activation():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.act, self.b = nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2)

        def forward(self, x):
            return self.b(self.act(self.a(x)))

    def mine(model, loss, inputs, targets):
        kept = []
        model.act.register_forward_hook(lambda m, i, o: o.register_hook(kept.append) and None)
        loss(model(inputs), targets).sum().backward()
        return right(model, loss, inputs, targets) | {
            "a.weight": torch.einsum("no,ni->noi", kept[0], inputs),
            "b.weight": torch.einsum(
                "no,ni->noi",
                (model(inputs).softmax(1) - nn.functional.one_hot(targets)),
                model.a(inputs),
            ).detach(),
        }

    found, _ = diagnosed(seeded(Net), LOSS, *classes(), mine)
    assert "at the output of layer 'act' (Sigmoid) instead of" in found["a.weight"][1], found
    assert "the output of layer 'a' (Linear) was used instead of the input" in found["b.weight"][1]


# relations of the numbers alone, in whole implementations


def of_rows(change):
    def mine(model, loss, inputs, targets):
        losses, found = oracle.per_sample_gradients(model, loss, inputs, targets)
        return change(found, dict(model.named_parameters()), losses, targets)

    return mine


def each(change):
    return of_rows(lambda found, named, *_: {k: change(g, named[k]) for k, g in found.items()})


def clipped(found, *_):
    norm = torch.stack([g.flatten(1).norm(dim=1) for g in found.values()]).norm(dim=0)
    factors = (norm.median() / (norm + 1e-6)).clamp_max(1.0)
    return {k: g * factors.reshape(-1, *[1] * (g.dim() - 1)) for k, g in found.items()}


def weighted(of):
    def change(found, named, losses, targets):
        w = of(losses.detach(), targets)
        return {k: g * w.reshape(-1, *[1] * (g.dim() - 1)) for k, g in found.items()}

    return of_rows(change)


RELATIONS = {
    "weight decay": (each(lambda g, p: g + 0.01 * p), "0.01 times the parameter added: weight"),
    "mean and decay": (each(lambda g, p: g / 9 + 0.01 * p), "In addition, c = 1/n with n = 9"),
    "batch gradient": (each(lambda g, p: g.sum(0)), "the numbers are the sum of all samples'"),
    "mean gradient": (each(lambda g, p: g.mean(0)[None]), "the numbers are the mean of all"),
    "repeated": (each(lambda g, p: g.mean(0).expand_as(g)), "every row is the mean of all"),
    "stale": (each(lambda g, p: g + g.sum(0)), "the gradient of the whole batch added: a .grad"),
    "accumulated": (each(lambda g, p: g.cumsum(0)), "row i is the sum of the gradients of samples"),
    "stale, accumulated": (each(lambda g, p: g.cumsum(0) + p.sin()), "a stale .grad"),
    "accumulated by four": (
        each(lambda g, p: torch.cat([c.cumsum(0) for c in g.split(4)])),
        "restarted at samples 0, 4, 8",
    ),
    "centred": (each(lambda g, p: g - g.mean(0)), "the mean gradient of the batch was subtracted"),
    "no copy": (each(lambda g, p: g[-1].expand_as(g)), "every row is the gradient of sample 8"),
    "clipped": (of_rows(clipped), "rows are clipped: the norm of the whole gradient"),
    "normalised": (
        each(lambda g, p: g / g.flatten(1).norm(dim=1).reshape(-1, *[1] * p.dim())),
        "every row is scaled to norm 1 of this parameter's gradient",
    ),
    "class weights": (weighted(lambda loss, y: 1 + 2.0 * y), "class (0: 1, 1: 3)"),
    "squared loss": (weighted(lambda loss, y: 2 * loss), "2 times its loss"),
    "focal": (weighted(lambda loss, y: (1 - (-loss).exp()) ** 2), "times a different factor"),
    "half": (each(lambda g, p: g.half().double()), "every number is a float16 number"),
    "square": (each(lambda g, p: g.square()), "every number is the square"),
    "shapes": (each(lambda g, p: g.mT if g.dim() == 3 else g), "in the right shape, the"),
    "shapes and a mean": (each(lambda g, p: g.movedim(0, -1) / 9), "c = 1/n with n = 9"),
}  # fmt: skip


@pytest.mark.parametrize("name", RELATIONS)
def test_relations_of_the_numbers(name):
    mine, words = RELATIONS[name]
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)))
    found, _ = diagnosed(model, LOSS, *classes(9), mine)
    assert words in found["0.weight"][1], found["0.weight"]


def test_a_mean_over_tokens_whose_number_differs():
    def ignoring(outputs, targets):
        return nn.functional.cross_entropy(
            outputs.mT, targets, reduction="none", ignore_index=-100
        ).sum(1)

    def averaged(model, loss, inputs, targets):
        mean = lambda o, t: nn.functional.cross_entropy(o.mT, t, ignore_index=-100)[None]  # noqa: E731
        return right(model, mean, inputs, targets)

    model = seeded(Tied)
    x, y = torch.randint(7, (N, 6)), torch.randint(7, (N, 6))
    y[1, 2:], y[3, 4:] = -100, -100
    found, _ = diagnosed(model, ignoring, x, y, averaged)
    assert "1 / its number of targets (without -100)" in found["mix.bias"][1], found

    def of_all(model, loss, inputs, targets):
        return {
            k: g / (targets != -100).sum() for k, g in right(model, loss, inputs, targets).items()
        }

    found, _ = diagnosed(model, ignoring, x, y, of_all)
    assert "k = 24, which is the number of targets of the batch" in found["mix.bias"][1], found


# what has no explanation must get none


class ByKeyword(Shared):
    """Its layers are called with keywords."""

    def forward(self, x):
        return self.head(input=self.step(input=x).tanh())


@model_loss
def by_transforms(model, inputs, targets):
    """A Laplacian by torch.func, within whose transforms hooks see no tensors to keep."""
    u = lambda x: model(x[None]).squeeze()  # noqa: E731
    jacrev = torch.func.jacrev
    bends = torch.func.vmap(lambda x: jacrev(jacrev(u))(x).trace())(inputs)
    return bends**2 + model(inputs).squeeze(1) ** 2


@pytest.mark.full
def test_noise_and_small_changes_are_not_explained():
    strange = {
        "noise": each(lambda g, p: g + 0.1 * g.abs().mean() * torch.randn_like(g)),
        "cubed": each(lambda g, p: g**3),
        "mixed": each(lambda g, p: 0.5 * g + 0.2 * g.abs()),
        "rolled": each(lambda g, p: g + 0.3 * g.roll(1, 0)),
    }
    for make, loss, data in (
        (Shared, LOSS, classes()),
        (normed, LOSS, classes()),
        (pinn, poisson, field()),
        (ByKeyword, LOSS, classes()),
        (pinn, by_transforms, field()),
        (Tied, tokens, (torch.randint(7, (N, 6)), torch.randint(7, (N, 6)))),
    ):
        model = seeded(make)
        for mine in strange.values():
            torch.manual_seed(3)
            found, _ = diagnosed(model, loss, *data, mine)
            vague = {"unknown", "unrelated", "coupled", "some_samples", "not_zero"}
            assert {kind for kind, _ in found.values()} <= vague, found
