"""Gradients that are all zero: whether a loss reaches the parameter is said at the first answer."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import gradscope
from tests.cli.forked import Outcome
from tests.oracle import per_sample_gradients
from tests.zoo.base import Net, smooth

BACKENDS = ("auto", "hooks", "vmap", "expand", "loop")
X, Y = (torch.randn(3, 4, generator=torch.Generator().manual_seed(k)) for k in (0, 1))


class Biased(nn.Module):
    """Indexes its biases once and keeps them in eval mode, as LeViT does."""

    def __init__(self):
        super().__init__()
        self.a, self.bias, self.kept = nn.Linear(4, 4), nn.Parameter(torch.randn(7)), None

    def train(self, mode=True):
        super().train(mode)
        self.kept = None
        return self

    def forward(self, x):
        chosen = self.bias[torch.tensor([0, 2, 4, 6])] if self.kept is None else self.kept
        self.kept = None if self.training else chosen
        return torch.tanh(self.a(x) + chosen)


def notes(model, backend="auto", inputs=X, **how):
    """What is said of zeros, and the rows; a second call says nothing more."""
    with gradscope.Scope(model, smooth, backend=backend, **how) as scope:
        rows = scope.per_sample_gradients(inputs, Y)
        said = [*scope.notes]
        scope.per_sample_gradients(inputs, Y)
        assert scope.notes == said
    return [note for note in said if "depend" in note or "proved" in note], rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_parameter_whose_use_was_kept_without_a_graph_is_named(backend, dtype):
    model = Biased().eval().to(dtype)
    with torch.no_grad():
        model(X.to(dtype))
    with gradscope.Scope(model, smooth, backend=backend) as scope:
        rows = scope.per_sample_gradients(X.to(dtype), Y.to(dtype))
        (note,) = [note for note in scope.notes if "depend" in note]
        assert note.startswith("no loss of samples 0 to 2 depends on bias: the gradient is zero.")
        assert "under torch.no_grad" in note
        assert not rows["bias"].any()
        model.train().eval()  # forgets what it kept
        rows = scope.per_sample_gradients(X.to(dtype), Y.to(dtype))
    fresh = Biased().double()
    fresh.load_state_dict(model.state_dict())
    _, right = per_sample_gradients(fresh.train(), smooth, X.double(), Y.double())
    for name, wanted in right.items():
        torch.testing.assert_close(rows[name].double(), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fresh_model_has_no_note(backend):
    assert notes(Biased().eval(), backend)[0] == []


def _adapted(net, x):
    return net.a(x) + net.up(net.down(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_that_is_zero_by_its_values_is_told_apart(backend):
    """An adapter's first layer, while the second is zero; and a layer that nobody calls."""
    layers = {"a": nn.Linear(4, 4), "down": nn.Linear(4, 2), "up": nn.Linear(2, 4, bias=False)}
    model = Net(_adapted, **layers, spare=nn.Linear(2, 2, bias=False))
    nn.init.zeros_(model.up.weight)
    lost, zero = notes(model, backend)[0]
    assert lost.startswith("no loss of samples 0 to 2 depends on spare.weight: ")
    assert zero == (
        "the losses of samples 0 to 2 depend on down.weight, down.bias, but each gradient is "
        "exactly zero"
    )


def test_a_branch_that_no_sample_takes_is_told_with_the_samples():
    def forward(net, x):
        return torch.stack([(net.b if row[0] > 9 else net.a)(row) for row in x])

    model = Net(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    (note,), rows = notes(model, "hooks")
    assert note.startswith("no loss of samples 0 to 2 depends on b.weight, b.bias: ")
    assert not rows["b.weight"].any() and rows["a.weight"].any()


def test_that_nothing_is_proved_is_said_until_something_is():
    model = Net(lambda net, x: net.a(x).relu(), a=nn.Linear(4, 4))
    nn.init.constant_(model.a.bias, -100)
    with gradscope.Scope(model, "mse") as scope:
        scope.norms(X, Y)
        said = "nothing is proved: every gradient is zero (samples 0 to 2)"
        assert scope.notes == [said]
        scope.norms(X, Y)
        assert scope.notes == [said]
        scope.norms(200 * torch.sign(model.a.weight[:3].detach()) + X, Y)
        assert scope.certificate.proves and scope.notes == []


CODE = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.spare = torch.nn.Linear(4, 3), torch.nn.Linear(2, 2)
    def forward(self, x):
        return self.a(x)
class Dead(Net):
    def forward(self, x):
        return (self.a(x) - 1e4).relu()
"""


@pytest.fixture
def run(tmp_path, forked):
    (tmp_path / "m.py").write_text(CODE)
    space: dict = {}
    exec(CODE, space)
    torch.save(space["Net"]().state_dict(), tmp_path / "w.pt")
    draw = np.random.default_rng(0)
    data = {"inputs": draw.normal(size=(12, 4)), "targets": draw.normal(size=(12, 3))}
    np.savez(tmp_path / "d.npz", **{k: v.astype(np.float32) for k, v in data.items()})

    def compute(model: str, *words: str) -> Outcome:
        given = ("w.pt", "d.npz", "--model", f"m.py:{model}", "--loss", "mse", "-o", "o.h5")
        more = ("--batch-size", "4", "--overwrite", *words)
        return forked.run("compute", *given, *more, cwd=tmp_path, COLUMNS="400")

    return compute


def test_the_command_line_says_it_on_stderr_once(run):
    done = run("Net")
    said = "no loss of samples 0 to 3 depends on spare.weight, spare.bias: the gradient is zero."
    assert done.code == 0
    assert done.err.count(said) == 1 and said in done.out
    assert "proved" not in done.err
    done = run("Dead")
    said = "nothing is proved: every gradient is zero"
    assert done.code == 0
    assert done.err.count(f"{said} (samples 0 to 3)\n") == 1
    assert f"certificate  {said}" in done.out


def test_no_notice_where_none_is_wanted(run):
    assert run("Dead", "--quiet").err == ""
    done = run("Dead", "--json")
    assert done.err == ""
    assert any("every gradient is zero" in note for note in json.loads(done.out)["notes"])


@pytest.mark.parametrize(
    ("model", "code", "what"),
    [("Dead", 4, "every gradient is zero"), ("Lost", 7, "no gradient is finite")],
)
def test_a_check_that_proves_nothing_does_not_end_as_done(run, tmp_path, forked, model, code, what):
    lost = "class Lost(Net):\n    def forward(self, x): return self.a(x) * float('nan')\n"
    (tmp_path / "m.py").write_text(CODE + lost)
    done = forked.run(
        "check",
        "w.pt",
        "d.npz",
        "--model",
        f"m.py:{model}",
        "--loss",
        "mse",
        cwd=tmp_path,
        COLUMNS="400",
    )
    assert done.code == code and f"nothing is proved: {what}" in done.out
