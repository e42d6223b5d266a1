"""The vmap backend beyond the case table: refusals, chunks, fused kernels, traces."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from gradscope.backends.expand import expand
from gradscope.backends.vmap import STEPS, recurrent, vmap
from gradscope.core.batch import Batch
from gradscope.errors import UnsupportedError
from gradscope.model.problem import Problem, model_loss
from tests.backends.outcomes import mistakes, run
from tests.cases import CASES, Setup
from tests.oracle import per_sample_gradients
from tests.zoo.base import Net, smooth


def refusal(model, loss=smooth, inputs=None, targets=None):
    inputs = torch.randn(6, 4) if inputs is None else inputs
    targets = torch.randn(6, 3) if targets is None else targets
    with pytest.raises(UnsupportedError) as caught:
        run("vmap", Setup(model, loss, inputs, targets))
    return caught.value


def test_random_numbers_are_refused():
    error = refusal(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).train())
    assert error.where == "layer '1' (Dropout)"
    assert "eval mode" in error.remedy


def test_random_numbers_between_recurrent_layers_are_refused():
    lstm = nn.LSTM(4, 3, num_layers=2, dropout=0.3, batch_first=True)
    model = Net(lambda net, x: net.a(x)[0][:, -1], a=lstm).train()
    error = refusal(model, inputs=torch.randn(6, 7, 4))
    assert error.where == "layer 'a' (LSTM)"
    assert "dropout" in error.remedy


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("boolean_mask", "mask"),
        ("checkpointed", "checkpointing"),
        ("control_flow_on_the_data", "branches"),
        ("custom_function_with_a_parameter", "generate_vmap_rule"),
        ("experts_by_dispatch", "nonzero"),
        ("coupled_batch_norm_in_train_mode", "BatchNorm in eval mode"),
        ("coupled_batch_norm_of_images", "BatchNorm in eval mode"),
    ],
)
def test_the_remedy_fits_the_refusal(name, word):
    with pytest.raises(UnsupportedError) as caught:
        run("vmap", CASES[name].build())
    assert word in f"{caught.value.what} {caught.value.remedy}"


def test_packed_sequences_are_refused():
    def forward(net, x):
        packed = pack_padded_sequence(x, torch.full((len(x),), 7), batch_first=True)
        return pad_packed_sequence(net.a(packed)[0], batch_first=True)[0][:, -1]

    model = Net(forward, a=nn.LSTM(4, 3, batch_first=True))
    assert refusal(model, inputs=torch.randn(6, 7, 4)).remedy

    packed = pack_padded_sequence(torch.randn(2, 7, 4), torch.tensor([7, 3]), batch_first=True)
    states = (torch.zeros(1, 2, 3), torch.zeros(1, 2, 3))
    order = (packed.data, packed.batch_sizes, states, model.a._flat_weights, True, 1, 0.0, False)
    with pytest.raises(UnsupportedError, match="packed"):
        recurrent(STEPS[torch.lstm], *order, False)


def test_writing_a_sample_into_a_fresh_tensor_is_refused():
    def forward(net, x):
        return torch.zeros(x.shape[0], 3).copy_(net.a(x))

    error = refusal(Net(forward, a=nn.Linear(4, 3)))
    assert "out-of-place" in error.remedy


def test_backward_inside_the_loss_is_refused():
    @model_loss
    def loss(model, inputs, targets):
        values = smooth(model(inputs), targets)
        values.sum().backward(retain_graph=True)
        return values

    assert refusal(nn.Linear(4, 3), loss).remedy


@pytest.mark.parametrize("samples_a_chunk", [1, 2])
@pytest.mark.parametrize("backend", [vmap, expand])
def test_chunks_do_not_change_the_answer(backend, samples_a_chunk):
    setup = CASES["language_model"].build()
    row = sum(p.numel() * p.element_size() for p in setup.model.parameters())
    with backend(Problem.of(setup.model, setup.loss), samples_a_chunk * row) as evaluate:
        found = evaluate(Batch.of(setup.inputs, setup.targets))
    assert not mistakes(found, *per_sample_gradients(*setup))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_fused_recurrent_kernels_in_float32(kind):
    torch.manual_seed(2)
    model = Net(lambda net, x: net.a(x)[0], a=kind(4, 3, 2, bidirectional=True, batch_first=True))
    setup = Setup(model, smooth, torch.randn(5, 7, 4), torch.randn(5, 7, 6))
    _, right = per_sample_gradients(*setup)
    for name, block in run("vmap", setup).gradients.items():
        assert block.dtype == torch.float32
        gap = (block.dense() - right[name]).norm() / right[name].norm()
        assert gap < 1e-5, name


def test_recurrent_layers_step_by_step_give_what_torch_gives():
    torch.manual_seed(3)
    lstm = nn.LSTM(4, 6, num_layers=2, bidirectional=True, proj_size=3, batch_first=True).double()
    x, h = torch.randn(5, 7, 4).double(), torch.randn(4, 5, 3).double()
    c = torch.randn(4, 5, 6).double()
    theirs, (their_h, their_c) = lstm(x, (h, c))
    ours = recurrent(
        STEPS[torch.lstm], x, (h, c), lstm._flat_weights, True, 2, 0.0, False, True, True
    )
    for a, b in zip(ours, (theirs, their_h, their_c), strict=True):
        torch.testing.assert_close(a, b)


def test_no_tensor_of_torch_func_stays_in_the_model():
    setup = CASES["lstm"].build()
    run("vmap", setup)
    lstm = setup.model.a
    assert [id(w) for w in lstm._flat_weights] == [id(p) for p in lstm.parameters()]
    copy.deepcopy(setup.model)(setup.inputs)


@pytest.mark.parametrize("backend", [vmap, expand])
def test_a_selection_of_the_parameters(backend):
    setup = CASES["encoder_layer_in_eval_mode"].build()
    _, right = per_sample_gradients(*setup)
    problem = Problem.of(setup.model, setup.loss, "1.*")
    with backend(problem) as evaluate:
        result = evaluate(Batch.of(setup.inputs, setup.targets))
    assert list(result.gradients) == ["1.weight", "1.bias"]
    for name, block in result.gradients.items():
        torch.testing.assert_close(block.dense(), right[name], rtol=1e-10, atol=1e-12)
    assert not result.losses.requires_grad


def test_signed_zeros_and_infinities_reach_the_model_unchanged():
    def forward(net, x):
        return net.a(torch.where(x.isinf(), 0.0, torch.atan2(x, -torch.ones_like(x))))

    x = torch.tensor([[0.0, -0.0], [torch.inf, -0.0], [-torch.inf, 0.0]])
    setup = Setup(Net(forward, a=nn.Linear(2, 3)), smooth, x, torch.randn(3, 3))
    _, right = per_sample_gradients(*setup)
    ours = run("vmap", setup).gradients["a.weight"].dense()
    torch.testing.assert_close(ours.double(), right["a.weight"], rtol=1e-5, atol=1e-6)
