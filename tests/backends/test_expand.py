"""The expand backend beyond the case table: what models do, and refusals."""

import copy
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from gradscope.errors import SpecError, UnsupportedError
from gradscope.model.problem import model_loss
from tests import oracle
from tests.backends.outcomes import differences, fingerprint, mistakes, run
from tests.cases import Setup
from tests.zoo.base import Net, smooth


def agrees(model, inputs, loss=smooth, targets=None):
    """Assert that expand equals the oracle on float64 data."""
    setup = Setup(model.double(), loss, inputs, targets)
    wrong = mistakes(run("expand", setup), *oracle.per_sample_gradients(*setup))
    assert not wrong


def inputs(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("positive", "negative", "runs"),
    [
        (9, 10, [True, False]),  # two groups
        (8, 9, [True] * 8 + [False]),  # the smaller one runs one sample at a time
        (1, 2, [True, False, False]),
    ],
)
def test_samples_that_decide_alike_run_together(positive, negative, runs):
    seen = []

    def forward(net, x):
        is_positive = bool(x.sum() > 0)
        seen.append(is_positive)
        return net.a(x).sin() if is_positive else net.a(x).tanh()

    n = positive + negative
    x = inputs(n, 4).abs() * (1 - 2 * (torch.arange(n) >= positive).double()).unsqueeze(1)
    order = torch.cat([torch.zeros(1).long(), 1 + torch.randperm(n - 1)])
    model = Net(forward, a=nn.Linear(4, 3))
    agrees(model, x[order], targets=inputs(n, 3))
    assert seen[: len(runs)] == runs  # the rest is the oracle


def _caught(net, x):
    """The signal that samples differ passes through the model's own `except`."""
    try:
        if x.sum() > 0:
            return net.a(x)
    except Exception:
        return net.a(x).tanh()
    return net.a(x).sin()


def _averaged(net, x):
    net.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return net.a(x * net.average)


def _normed(net, x):
    """By the statistics of a batch of one."""
    return net.norm(net.a(x)[:, :, None] * x[:, None]).sum(2) * net.norm.running_mean


@pytest.mark.parametrize(
    "model",
    [
        Net(_caught, a=nn.Linear(4, 3)),
        Net(_averaged, a=nn.Linear(4, 3), average=torch.ones(4)),
        Net(_normed, a=nn.Linear(4, 3), norm=nn.BatchNorm1d(3)),
        nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 3)), nn.Tanh()),
        nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.0)),  # draws no random numbers
    ],
    ids=["signal", "buffer", "batch norm", "spectral norm", "dropout of zero"],
)
def test_in_train_mode_each_sample_is_a_batch_of_one(model):
    before = {k: v.clone() for k, v in model.double().state_dict().items()}
    agrees(model.train(), inputs(6, 4), targets=inputs(6, 3))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_refusal_that_the_model_catches_stands():
    def forward(net, x):
        try:
            return F.dropout(net.a(x))
        except Exception:
            return net.a(x)

    model = Net(forward, a=nn.Linear(4, 3))
    with pytest.raises(UnsupportedError, match="random"):
        run("expand", Setup(model.double(), smooth, inputs(6, 4), inputs(6, 3)))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_sequences_run_by_length(kind):
    def forward(net, x, lengths):
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(net.a(packed)[0], batch_first=True, total_length=4)[0]

    model = Net(forward, a=kind(3, 2, batch_first=True))
    agrees(model, (inputs(6, 4, 3), torch.tensor([4, 1, 3, 4, 2, 3])), targets=inputs(6, 4, 2))


def test_sparse_embedding_gradients_come_dense():
    tables = [nn.Embedding(7, 3, sparse=sparse) for sparse in (False, True)]
    tables[1].load_state_dict(tables[0].state_dict())
    x = torch.randint(0, 7, (6, 4))
    dense, sparse = (
        run("expand", Setup(table, lambda o, t: o.sin().sum((1, 2)), x, None)).gradients
        for table in tables
    )
    torch.testing.assert_close(sparse["weight"].dense(), dense["weight"].dense())


def test_a_learning_step_inside_the_loss():
    @model_loss
    def loss(model, x, t):
        params = dict(model.named_parameters())
        inner = (model(x) - t).square().sum()
        slopes = torch.autograd.grad(inner, list(params.values()), create_graph=True)
        stepped = {k: p - 0.1 * g for (k, p), g in zip(params.items(), slopes, strict=True)}
        return (torch.func.functional_call(model, stepped, (x,)) - t).square().sum(1)

    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    agrees(model, inputs(6, 4), loss, inputs(6, 2))


def test_nothing_is_kept_in_the_model():
    def forward(net, x):
        net.seen = x
        if not hasattr(net, "table"):
            net.table = torch.zeros(1, 4)
        return net.a(x.clone().add_(1)) + net.lstm(x.unsqueeze(1))[0].squeeze(1)

    model = Net(forward, a=nn.Linear(4, 3), lstm=nn.LSTM(4, 3, batch_first=True)).double()
    setup = Setup(model, smooth, inputs(6, 4), inputs(6, 3))
    before = fingerprint(setup)
    run("expand", setup)
    assert not hasattr(model, "seen")
    assert all(isinstance(w, nn.Parameter) for w in model.lstm._flat_weights)
    copy.deepcopy(model)
    assert differences(before, fingerprint(setup)) == []


@pytest.mark.parametrize(
    ("model", "word", "where"),
    [
        (nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), "random", "layer '1' (Dropout)"),
        (Net(lambda net, x: net.a(x) + torch.randn(3), a=nn.Linear(4, 3)), "randn", None),
        (
            nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)),
            "more than 1 value per channel",
            "layer '1' (BatchNorm1d)",
        ),
    ],
)
def test_refusals_name_the_layer(model, word, where):
    with pytest.raises(UnsupportedError, match=word) as caught:
        run("expand", Setup(model.train(), smooth, torch.randn(6, 4), torch.randn(6, 3)))
    assert caught.value.where == where
    assert caught.value.remedy


def test_writing_to_a_parameter_is_refused():
    table = nn.Embedding(7, 3, max_norm=0.1)
    before = table.weight.detach().clone()
    with pytest.raises(UnsupportedError, match="embedding_renorm_"):
        run("expand", Setup(table, smooth, torch.randint(0, 7, (6, 4)), torch.randn(6, 4, 3)))
    assert torch.equal(table.weight, before)


def test_a_scalar_loss_is_explained():
    with pytest.raises(SpecError, match="one number per sample"):
        run("expand", Setup(nn.Linear(4, 3), F.mse_loss, torch.randn(6, 4), torch.randn(6, 3)))


def test_a_tensor_kept_by_the_loss_cannot_be_used_later():
    kept = []

    def loss(outputs, targets):
        kept.append(outputs)
        return outputs.sum(1)

    run("expand", Setup(nn.Linear(4, 3), loss, torch.randn(6, 4), None))
    assert "samples=6" in repr(kept[0])
    with pytest.raises(UnsupportedError, match="earlier evaluation"):
        kept[0] + 1


def test_tables_kept_by_the_model_are_left_as_they_were():
    def forward(net, x):
        if x.shape[1] not in net.tables:
            net.tables[x.shape[1]] = torch.zeros(1, 4)
        table = net.tables[x.shape[1]].clone()
        table[:, 0] = x[:, 0]
        return net.a(x + table)

    model = Net(forward, a=nn.Linear(4, 3))
    model.tables = tables = {3: torch.ones(1)}
    agrees(model, inputs(6, 4), targets=inputs(6, 3))
    assert model.tables is tables
    assert all(type(t) is Tensor for t in tables.values())


def test_rows_outside_of_an_embedding_are_not_another_samples():
    def forward(net, x):
        return F.embedding(x - 1, net.table * net.table.sum() * x.sum())

    model = Net(forward, table=nn.Parameter(torch.randn(4, 3)))
    x = torch.randint(1, 5, (6, 2))
    agrees(model, x, targets=inputs(6, 2, 3))
    x[3, 1] = 0
    with pytest.raises(UnsupportedError, match="IndexError"):
        run("expand", Setup(model, smooth, x, inputs(6, 2, 3)))


def _each(choose):
    """A forward pass that treats the rows x (n, 4) one by one: `choose(net, row)` returns a row."""
    return lambda net, x: torch.stack([choose(net, row) for row in x])


def _expert(name):
    return _each(lambda net, row: getattr(net, name(row.argmax()))(row))


@pytest.mark.parametrize(
    "forward",
    [
        _expert(lambda k: f"expert_{k}"),
        _expert(lambda k: f"expert_{k:d}"),
        _expert(lambda k: "expert_{}".format(k)),  # noqa: UP032
        _expert(lambda k: "expert_%d" % k),  # noqa: UP031
        _expert(lambda k: "expert_" + str(int(k))),
        _expert(lambda k: {0: "expert_3", 1: "expert_2"}.get(k.item(), "expert_0")),
        _expert(lambda k: ["expert_1", "expert_0", "expert_3", "expert_2"][k]),
        _expert(lambda k: "expert_0" if k in (0, 3) else "expert_1"),
        _each(lambda net, row: net.expert_0(row) * float(f"{row.detach().sum():.3f}")),
        _each(lambda net, row: net.expert_0(row) * torch.from_dlpack(row.detach()).sum()),
        _each(lambda net, row: (f"{row}", repr(row), {row: 1}, net.expert_0(row))[-1]),
    ],
)
def test_a_number_in_a_text_a_key_or_an_index_is_each_samples_own(forward):
    experts = {f"expert_{k}": nn.Linear(4, 3) for k in range(4)}
    agrees(Net(forward, **experts), inputs(6, 4), targets=inputs(6, 3))


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (_each(lambda net, row: net.a(row) * {"tensor(1)": 1}[str(row.argmax())]), "text of a"),
        (_each(lambda net, row: net.a(row) * torch.tensor([row[0], row[1]])[0]), "memory of a"),
    ],
)
def test_refusals_do_not_speak_of_the_tensors_of_the_backend(forward, reason):
    setup = Setup(Net(forward, a=nn.Linear(4, 3)), smooth, torch.ones(6, 4), torch.randn(6, 3))
    with pytest.raises(UnsupportedError, match=reason) as caught:
        run("expand", setup)
    assert "PerSample" not in str(caught.value)
    assert 'backend="loop"' in caught.value.remedy


@pytest.mark.parametrize("backend", ["expand", "hooks"])
def test_dynamo_and_sympy_are_not_loaded(backend):
    """Loading them takes seconds, at the first operator or index."""
    code = f"""
import sys, torch, gradscope
class Indexed(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x)[torch.arange(len(x))]
scope = gradscope.Scope(Indexed(3, 2), 'cross_entropy', backend={backend!r})
scope.norms(torch.ones(2, 3), torch.tensor([0, 1]))
sys.exit(bool({{'torch._dynamo', 'sympy'}} & {{*sys.modules}}))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
