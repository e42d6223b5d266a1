"""The expand backend beyond the case table: its rules, its tensor, writes, signals, refusals."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from gradscope.backends import expand as package
from gradscope.backends.expand.facts import facts_of
from gradscope.backends.expand.fallback import sample_by_sample
from gradscope.backends.expand.mode import Interpreter
from gradscope.backends.expand.rules import rules
from gradscope.backends.expand.tensor import Differ, Own, PerSample, Samples, SharedWrite
from gradscope.core.batch import Batch
from gradscope.core.problem import Problem, model_loss
from gradscope.errors import SpecError, UnsupportedError
from tests import oracle
from tests.backends.expand_examples import EXAMPLES, OTHERWISE, Maker, N
from tests.backends.outcomes import fingerprint, mistakes, run
from tests.cases import Setup
from tests.zoo.base import Net, smooth

LEVELS = list(Own)


def operator(key):
    name, _, overload = key.partition(".")
    return getattr(getattr(torch.ops.aten, name), overload)


def call(example, own):
    """The arguments and keyword arguments of an example, seeded."""
    torch.manual_seed(0)
    arguments = example(Maker(own))
    kwargs = arguments[-1] if isinstance(arguments[-1], dict) else {}
    return arguments[: len(arguments) - bool(kwargs)], kwargs


def test_every_rule_has_an_example():
    assert set(rules.names()) == set(EXAMPLES) | OTHERWISE


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("key", EXAMPLES)
def test_a_rule_does_what_torch_does_for_each_sample(key, own):
    for example in EXAMPLES[key]:
        args, kwargs = call(example, own)
        again, _ = call(example, own)
        with torch.random.fork_rng():
            ours = rules.get(key)(Samples(N), *args, **kwargs)
        torchs = sample_by_sample(Samples(N), operator(key), again, kwargs)
        assert ours is not NotImplemented
        pairs = zip(flat(ours), flat(torchs), strict=True)
        for k, (a, b) in enumerate(pairs):
            if key == "_pack_padded_sequence.default" and k == 1:
                a = a.as_subclass(Tensor).expand_as(b)  # the batch sizes are for all samples
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def flat(results):
    return [r for r in results if r is not None] if isinstance(results, tuple | list) else [results]


@pytest.mark.parametrize("key", ["flip.default", "roll.default"])
def test_no_axes_at_all_is_not_all_axes(key):
    x = PerSample(torch.randn(N, 4, 6))
    args = (x, []) if key == "flip.default" else (x, [1], [])
    assert rules.get(key)(Samples(N), *args) is NotImplemented


def test_rules_leave_axes_out_of_range_to_torch():
    x = PerSample(torch.randn(N, 4))
    with Interpreter(N, Own.NOTHING), pytest.raises(IndexError):
        x.sum(-2)


def interpreted(program, *tensors, own=Own.NOTHING):
    """The result (n, ...) of a program on tensors (n, ...)."""
    wrapped = [PerSample(t.clone()) for t in tensors]
    with Interpreter(N, own):
        return program(*wrapped).physical


def by_sample(program, *tensors):
    return torch.stack([program(*(t[i].clone() for t in tensors)) for i in range(N)])


PROGRAMS = {
    "type promotion of a number": lambda x: x.float().sum() * x.double() + x.sum() * 2.5,
    "a number of wider dtype": lambda x: x.float() * x.sum(),
    "write to a transposed view": lambda x: (x.T.mul_(x[:, 0].clone()), x)[1],
    "write to a slice of a view": lambda x: (x.view(-1)[1::2].fill_(0.5), x)[1],
    "write a number": lambda x: (x[0].fill_(x.sum()), x)[1],
    "assign by mask": lambda x: (x.__setitem__(x > 0, x.mean()), x)[1],
    "assign by positions": lambda x: (x.__setitem__((x.argmax(0), [0, 1]), 0.0), x)[1],
    "reshape in place": lambda x: x.clone().unsqueeze_(0).transpose_(1, 2).squeeze_(0) * 2,
    "new memory": lambda x: x.new_zeros(2) + x.new_ones(2) + x.new_full((2,), 3.0),
    "one sample's own sort": lambda x: x.flatten().sort().values.unfold(0, 2, 3),
    "conjugates": lambda x: torch.complex(x, x + 1).conj().imag * 2,
    "a conjugate of what changes": lambda x: conjugate_then_write(torch.complex(x, x + 1)),
    "indices with a gap": lambda x: x.expand(4, 3, 2)[
        torch.tensor([0, 3]), :, torch.tensor([1, 0])
    ],
    "a mask with as many entries": lambda x: x[torch.tensor([True, False, True])].cumsum(0),
    "out=": lambda x: torch.mul(x, 2, out=torch.empty_like(x)),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 2), 1).add_(1) + x[1:],
    "no entries": lambda x: x[:0].sum(0) + x[:0].amax(1).sum(),
}


def conjugate_then_write(z):
    """A lazy conjugate sees later writes, a resolved one does not."""
    lazy, resolved = z.conj(), z.conj().resolve_conj()
    z.mul_(2)
    return torch.view_as_real(lazy * resolved + resolved.conj())


@pytest.mark.parametrize("own", LEVELS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_means_the_same_for_all_samples_at_once(name, own):
    x = torch.randn(N, 3, 2, dtype=torch.float64)
    ours = interpreted(PROGRAMS[name], x, own=own)
    torch.testing.assert_close(ours, by_sample(PROGRAMS[name], x))


def test_writes_to_shared_tensors_are_signalled():
    shared = PerSample(torch.ones(4).expand(N, 4))
    own = PerSample(torch.randn(N, 4))
    with Interpreter(N, Own.NOTHING):
        with pytest.raises(SharedWrite) as result:
            (shared * 2).add_(own)
        with pytest.raises(SharedWrite) as constant:
            torch.zeros(4).add_(own)
    assert result.value.needed == Own.RESULTS
    assert constant.value.needed == Own.EVERYTHING
    with Interpreter(N, Own.EVERYTHING):
        assert torch.equal((shared * 2).add_(own).physical, 2 + own.physical)
        assert torch.equal(torch.zeros(4).add_(own).physical, own.physical)
        with pytest.raises(UnsupportedError, match="writes per-sample values"):
            shared.add_(own)


def test_values_read_in_python_must_agree():
    same, different = PerSample(torch.full((N, 1), 2.0)), PerSample(torch.arange(N).unsqueeze(1))
    with Interpreter(N, Own.NOTHING):
        assert same.item() == 2.0 and bool(same > 1) and same.tolist() == [2.0]
        assert same.numpy() == 2.0
        for read in (Tensor.item, bool, PerSample.tolist, PerSample.numpy, Tensor.nonzero):
            with pytest.raises(Differ) as caught:
                read(different)
            assert len(caught.value.keys) == N


def test_shared_work_is_done_once():
    weight = PerSample(torch.randn(6, 4).expand(N, 6, 4))
    with Interpreter(N, Own.NOTHING):
        assert (weight / weight.norm()).T.shared


def test_schemas_are_read_right():
    aten = torch.ops.aten
    assert facts_of(aten.add_.Tensor).may_write == ("self",)
    assert facts_of(aten.add_.Tensor).returns_written == ("self",)
    assert facts_of(aten.add_.Tensor).pointwise and facts_of(aten.copy_.default).pointwise
    assert facts_of(aten.select.int).view and not facts_of(aten.select_backward.default).view
    assert not facts_of(aten.equal.default).pointwise
    assert facts_of(aten.bernoulli.default).random
    assert facts_of(aten.squeeze_.dim).reshapes_in_place


def agrees(model, inputs, loss=smooth, targets=None):
    """Assert that expand equals the oracle on float64 data."""
    setup = Setup(model.double(), loss, inputs, targets)
    wrong = mistakes(run("expand", setup), *oracle.per_sample_gradients(*setup))
    assert not wrong


def inputs(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_samples_that_decide_alike_run_together():
    seen = []

    def forward(net, x):
        positive = bool(x.sum() > 0)
        seen.append(positive)
        return net.a(x).sin() if positive else net.a(x).tanh()

    x = inputs(6, 4)
    model = Net(forward, a=nn.Linear(4, 3))
    agrees(model, x, targets=inputs(6, 3))
    assert sorted(seen[:2]) == [False, True]  # two groups; the rest is the oracle


def test_signals_are_not_caught_by_the_model():
    def forward(net, x):
        try:
            if x.sum() > 0:
                return net.a(x)
        except Exception:
            return net.a(x).tanh()
        return net.a(x).sin()

    agrees(Net(forward, a=nn.Linear(4, 3)), inputs(6, 4), targets=inputs(6, 3))


def test_a_refusal_that_the_model_catches_stands():
    def forward(net, x):
        try:
            return F.dropout(net.a(x))
        except Exception:
            return net.a(x)

    model = Net(forward, a=nn.Linear(4, 3))
    with pytest.raises(UnsupportedError, match="random"):
        run("expand", Setup(model.double(), smooth, inputs(6, 4), inputs(6, 3)))


def test_buffers_written_by_each_sample_start_alike():
    def forward(net, x):
        net.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return net.a(x * net.average)

    model = Net(forward, a=nn.Linear(4, 3), average=torch.ones(4))
    agrees(model, inputs(6, 4), targets=inputs(6, 3))
    assert torch.equal(model.average, torch.ones(4).double())


def test_spectral_norm_in_train_mode():
    layer = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
    agrees(nn.Sequential(layer, nn.Tanh()).train(), inputs(6, 4), targets=inputs(6, 3))


def test_batch_norm_in_train_mode_is_that_of_a_batch_of_one():
    norm = nn.BatchNorm2d(2)
    model = Net(lambda net, x: net.norm(x).sum((2, 3)) * net.norm.running_mean, norm=norm)
    agrees(model.train(), inputs(6, 2, 3, 4), targets=inputs(6, 2))


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


def test_chunks_give_the_same(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    setup = Setup(model, smooth, inputs(7, 4), inputs(7, 2))
    whole = run("expand", setup)
    monkeypatch.setattr(package, "CHUNK_BYTES", 3 * 8 * 23)  # three samples
    parts = run("expand", setup)
    torch.testing.assert_close(parts.losses, whole.losses)
    for name, block in whole.gradients.items():
        torch.testing.assert_close(parts.gradients[name].dense(), block.dense())


def test_only_the_selected_parameters():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    problem = Problem.of(model, smooth, "2.*")
    x, t = inputs(5, 4), inputs(5, 2)
    with package.expand(problem) as evaluate:
        gradients = evaluate(Batch.of(x, t)).gradients
    right = oracle.per_sample_gradients(model, smooth, x, t)[1]
    assert list(gradients) == ["2.weight", "2.bias"]
    torch.testing.assert_close(gradients["2.weight"].dense(), right["2.weight"])


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
    assert fingerprint(setup).keys() == before.keys()


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


def test_random_numbers_that_are_not_drawn_are_no_matter():
    agrees(
        nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.0)).train(), inputs(6, 4), targets=inputs(6, 3)
    )


def test_writing_to_a_parameter_is_refused():
    table = nn.Embedding(7, 3, max_norm=0.1)
    before = table.weight.detach().clone()
    with pytest.raises(UnsupportedError, match="embedding_renorm_"):
        run("expand", Setup(table, smooth, torch.randint(0, 7, (6, 4)), torch.randn(6, 4, 3)))
    assert torch.equal(table.weight, before)


def test_a_scalar_loss_is_explained():
    with pytest.raises(SpecError, match="one number a sample"):
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
