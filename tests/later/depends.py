"""Samples that depend on each other from some batch on, and models that carry something along."""

import itertools
import random

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.later.base import Net, Stage, case, program, rows, smooth


def _batches(flagged: int = 9) -> list:
    """Batches of five; in the last one the sample 3 is marked by a large first feature."""
    found = rows(5, 5, 5)
    found[-1][0][3, 0] = flagged
    return found


def _layers(**more: object) -> dict[str, object]:
    return {"a": nn.Linear(4, 7), "b": nn.Linear(7, 3), **more}


@case("coupled")
def trimmed_to_the_longest() -> Stage:
    def forward(net, ids):
        ids = ids[:, : int((ids > 0).sum(1).max())]
        return net.b(net.table(ids).sin().mean(1))

    def tokens(lengths):
        ids = torch.randint(1, 9, (len(lengths), 8))
        return ids * (torch.arange(8) < torch.tensor(lengths)[:, None])

    batches = [(tokens(n), torch.randn(5, 3)) for n in ([6] * 5, [4] * 5, [6, 6, 2, 6, 6])]
    return Stage(Net(forward, table=nn.Embedding(9, 7), b=nn.Linear(7, 3)), smooth, batches)


@case("coupled")
def hinge_between_outputs() -> Stage:
    def loss(outputs, targets):
        gap = torch.cdist(outputs, outputs) + 9 * torch.eye(len(outputs))
        return smooth(outputs, targets) + F.relu(0.05 - gap).sum(1)

    model = Net(lambda net, x: net.b(net.a(x).tanh()), **_layers())
    batches = rows(5, 5, 5)
    batches[-1][0][4] = batches[-1][0][1] + 1e-3
    return Stage(model, loss, batches)


@program("coupled", lambda: (_layers(), _batches(60)))
def clamped_by_a_number_of_the_batch(net, x):
    h = net.a(x)
    return net.b(h.clamp(max=max(4.0, 0.5 * h.max().item())).tanh())


@program("coupled", lambda: (_layers(), _batches()))
def centred_where_it_is_far_off(net, x):
    h = net.a(x)
    if x.detach().abs().max() > 5:
        h = h - h.mean(0).detach()
    return net.b(h.tanh())


@program("coupled", lambda: (_layers(), _batches()))
def summed_over_the_batch_beyond_a_threshold(net, x):
    h = net.a(x).tanh()
    return net.b(h + (x[:, :1] > 5) * h.cumsum(0))


@program("coupled", lambda: (_layers(), _batches()))
def shifted_where_a_flag_is_set(net, x):
    """The program is the same in every batch, and no gradient goes from sample to sample."""
    h = net.a(x)
    return net.b((h + (x[:, :1] > 5) * h.mean(0).detach()).tanh())


@program("coupled", lambda: (_layers(), rows(5, 5, 3)))
def a_factor_for_the_shorter_batch(net, x):
    return net.b(net.a(x).tanh()) * (1.0 if len(x) in (1, 2, 5) else 0.7)


@program("carries", lambda: ({"calls": 0, **_layers()}, rows(5, 5, 5)))
def a_counter(net, x):
    net.calls += 1
    return net.b(net.a(x).tanh()) * min(1.0, net.calls / 40)


@case("carries")
def counters_in_all_kinds_of_places() -> Stage:
    class Plain:
        __slots__ = ("seen",)

    table, last, closed = {"calls": [0]}, Plain(), 0
    last.seen = 0
    source, steps = random.Random(3), itertools.cycle([1.0, 1.5, 2.0])
    numbers = np.zeros(2)

    def forward(net, x):
        nonlocal closed
        closed += 1
        table["calls"][0] += 1
        last.seen += 1
        numbers[1] += 1
        forward.calls = getattr(forward, "calls", 0) + 1
        net.kept.add_(1)
        parts = closed + table["calls"][0] + last.seen + numbers[1] + forward.calls + net.kept[0]
        return net.b(net.a(x).tanh()) * (float(parts) + next(steps) + source.random())

    model = Net(forward, **_layers())
    model.kept = torch.zeros(2)  # no buffer
    return Stage(model, smooth, rows(5, 5, 5))


@program("carries", lambda: ({"ready": None, **_layers()}, rows(5, 5, 5)))
def a_weight_that_is_kept_after_the_first_call(net, x):
    if net.ready is None:
        net.ready = net.a.weight / net.a.weight.norm()
        now = net.ready
        net.ready = net.ready.detach()
    else:
        now = net.ready
    return net.b((x @ now.T).tanh())


@case("carries")
def a_weight_kept_with_its_graph() -> Stage:
    model = Net(lambda net, x: net.b((x @ net.ready[0].T).tanh()), **_layers())
    model.ready = (model.a.weight.tanh(),)
    return Stage(model, smooth, rows(5, 5, 5))


@program("carries", lambda: (_layers(), rows(5, 5, 5)))
def a_parameter_that_the_forward_pass_changes(net, x):
    net.a.weight.data.mul_(0.9)
    return net.b(net.a(x).tanh())


@case("carries")
def factors_from_a_generator() -> Stage:
    model = Net(lambda net, x: net.b(net.a(x).tanh()) * next(net.factors), **_layers())
    model.factors = (1.0 if k < 9 else 2.0 for k in range(10**6))
    return Stage(model, smooth, rows(5, 5, 5))


class Clipped(torch.autograd.Function):
    """The identity; the gradient of the whole batch has at most some norm."""

    @staticmethod
    def forward(ctx, x, most):
        ctx.most = most
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (ctx.most / gradient.norm()).clamp(max=1), None


@case("backward")
def a_function_that_clips_the_batch() -> Stage:
    model = Net(lambda net, x: net.b(Clipped.apply(net.a(x).tanh(), 40.0)), **_layers())
    batches = rows(5, 5, 5)
    batches[-1][1][2] *= 900
    return Stage(model, smooth, batches)


@case("backward")
def a_hook_that_clips_the_batch() -> Stage:
    def forward(net, x):
        h = net.a(x).tanh()
        if h.requires_grad:
            h.register_hook(lambda g: g * (40 / g.norm()).clamp(max=1))
        return net.b(h)

    batches = rows(5, 5, 5)
    batches[-1][1][2] *= 900
    return Stage(Net(forward, **_layers()), smooth, batches)


@case("backward")
def a_hook_on_a_parameter() -> Stage:
    model = Net(lambda net, x: net.b(net.a(x).tanh()), **_layers())
    model.a.weight.register_hook(lambda g: g.clamp(-0.05, 0.05))
    return Stage(model, smooth, rows(5, 5, 5))


@program("backward", lambda: (_layers(), _batches()))
def some_samples_without_gradient(net, x):
    """No value changes; who has a gradient depends on the batch."""
    h = net.a(x).tanh()
    first = x[:, :1] >= x[:, 0].topk(min(3, len(x))).values[-1]
    return net.b(torch.where(first | (x[:, 0].max() < 5), h, h.detach()))


def _plain() -> nn.Module:
    return Net(lambda net, x: net.b(net.drop(net.a(x).tanh())), **_layers(drop=nn.Dropout(0.5)))


@case("user")
def training_mode_is_switched_on() -> Stage:
    return Stage(_plain(), smooth, rows(5, 5), lambda model, k: model.train(k > 0) and None)


@case("user")
def other_parameters_are_assigned() -> Stage:
    def between(model: nn.Module, k: int) -> None:
        if k:
            values = {name: p.detach() * 0.5 for name, p in model.state_dict().items()}
            model.load_state_dict(values, assign=True)

    return Stage(_plain(), smooth, rows(5, 5, 5), between)


@case("user")
def a_head_is_replaced() -> Stage:
    def between(model: nn.Module, k: int) -> None:
        if k < 2:  # before the first batch, too
            with torch.random.fork_rng():
                model.b = nn.Linear(7, 3, dtype=torch.float64)

    return Stage(_plain(), smooth, rows(5, 5, 5), between)


@case("user")
def a_parameter_is_frozen() -> Stage:
    def between(model: nn.Module, k: int) -> None:
        model.a.weight.requires_grad_(k == 1)

    return Stage(_plain(), smooth, rows(5, 5, 5), between)


@case("user")
def a_hook_is_put_on_a_parameter() -> Stage:
    def between(model: nn.Module, k: int) -> None:
        if k == 1:
            model.b.weight.register_hook(lambda g: 2 * g)

    return Stage(_plain(), smooth, rows(5, 5, 5), between)


@case("user")
def a_hook_is_put_on_a_layer() -> Stage:
    def between(model: nn.Module, k: int) -> None:
        if k == 1:
            model.a.register_forward_hook(lambda module, given, out: 0.5 * out)

    return Stage(_plain(), smooth, rows(5, 5, 5), between)


@case("user")
def an_optimizer_steps() -> Stage:
    def between(model: nn.Module, k: int) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)

    return Stage(_plain(), smooth, rows(5, 5, 5), between)
