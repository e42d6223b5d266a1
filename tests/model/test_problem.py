"""Problems: which parameters, which losses, and that the model is left as it was."""

import pytest
import torch
from torch import nn

from gradscope.core.batch import Batch
from gradscope.errors import ModelError, RefusedError, SpecError
from gradscope.model.problem import Problem, differentiable_inputs, is_model_loss, model_loss
from tests.cases import CASES
from tests.zoo.base import Net, smooth


def net():
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))


def batch(n=5):
    return Batch.of(torch.randn(n, 4), torch.randn(n, 3))


@pytest.mark.parametrize(
    ("globs", "names"),
    [
        (None, ["0.weight", "0.bias", "2.weight", "2.bias"]),
        ("*.bias", ["0.bias", "2.bias"]),
        (["2.*", "0.bias"], ["0.bias", "2.weight", "2.bias"]),
        ("[02].weight", ["0.weight", "2.weight"]),
    ],
)
def test_selection_by_glob(globs, names):
    assert list(Problem.of(net(), smooth, globs).parameters) == names


def test_a_glob_that_matches_nothing_is_an_error():
    with pytest.raises(SpecError, match=r"'head\.\*'") as caught:
        Problem.of(net(), smooth, ["0.*", "head.*"])
    assert "0.weight" in str(caught.value)


def test_nothing_trainable_is_an_error():
    with pytest.raises(SpecError, match="no trainable parameter"):
        Problem.of(net().requires_grad_(False), smooth)


def test_tied_parameters_go_under_their_first_name():
    setup = CASES["tied_embedding_and_output"].build()
    problem = Problem.of(setup.model, setup.loss)
    assert "table.weight" in problem.parameters and "out.weight" not in problem.parameters


def test_dtype_is_the_widest():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).double()])
    assert Problem.of(model, smooth).dtype == torch.float64
    assert Problem.of(model, smooth, "0.*").dtype == torch.float32


def test_model_losses_are_objects_of_their_own():
    class Objective:
        @model_loss
        def method(self, model, inputs, targets):
            return smooth(model(inputs), targets)

    loss = Objective().method
    assert is_model_loss(loss) and not is_model_loss(smooth) and loss.__name__ == "method"
    data, model = batch(), net()
    expected = smooth(model(data.inputs), data.targets)
    assert torch.equal(Problem.of(model, loss).losses(data), expected)
    assert torch.equal(Problem.of(model, smooth).losses(data), expected)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda o: o.mean(), "scales every gradient by 1/n"),
        (lambda o: o, "shape (5, 3)"),
        (lambda o: o.sum(1)[:-1], "shape (4,)"),
        (lambda o: None, "returned None"),
        (lambda o: 1.0, "float"),
    ],
)
def test_a_loss_of_the_wrong_form_is_named(result, words):
    def my_loss(outputs, targets):
        return result(outputs)

    with pytest.raises(SpecError) as caught:
        Problem.of(net(), my_loss).losses(batch())
    assert words in str(caught.value) and "my_loss" in str(caught.value)
    with pytest.raises(SpecError):
        Problem.of(net(), my_loss).functional_losses({}, batch())


def test_running_out_of_memory_is_not_the_models_error():
    def forward(net, x):
        raise MemoryError

    model = Net(forward, a=nn.Linear(4, 3))
    with pytest.raises(MemoryError):
        Problem.of(model, smooth).losses(batch())


def test_losses_leave_buffers_generator_and_data_alone():
    def forward(net, x):
        net.calls += 1
        x *= 2.0
        return net.norm(net.a(x) + torch.rand(3)) * net.calls

    model = Net(forward, a=nn.Linear(4, 3), norm=nn.BatchNorm1d(3), calls=torch.tensor(0.0))
    problem, data = Problem.of(model.train(), smooth), batch()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    inputs, generator = data.inputs.clone(), torch.get_rng_state()
    first, second = problem.losses(data), problem.losses(data)
    assert torch.equal(first, second) and first.requires_grad
    assert torch.equal(generator, torch.get_rng_state())
    assert torch.equal(data.inputs, inputs)
    after = model.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


@pytest.mark.parametrize(
    ("targets", "words"),
    [(None, r"\(outputs, targets, here None\)"), ((torch.ones(5),) * 2, "form one tuple")],
)
def test_a_loss_of_another_number_of_arguments_is_told_what_it_is_given(targets, words):
    def loss(outputs, first, second, third):
        return outputs.sum(1)

    with pytest.raises(ModelError, match=f"missing 2 required positional(?s:.*){words}"):
        Problem.of(net(), loss).losses(Batch.of(torch.randn(5, 4), targets))


def test_buffers_are_restored_when_the_model_raises():
    def forward(net, x):
        net.calls += 1
        raise ValueError("no")

    model = Net(forward, a=nn.Linear(4, 3), calls=torch.tensor(0.0))
    buffer = model.calls
    with pytest.raises(ModelError):
        Problem.of(model, smooth).losses(batch())
    with pytest.raises(ValueError, match="no"):
        Problem.of(model, smooth).functional_losses({}, batch())
    assert model.calls is buffer and float(buffer) == 0.0


@pytest.mark.parametrize(
    "name", ["one_module_under_two_names", "tied_embedding_and_output", "lstm"]
)
def test_functional_losses_use_the_values_and_put_the_parameters_back(name):
    setup, other = CASES[name].build(), CASES[name].build()
    problem, data = Problem.of(setup.model, setup.loss), Batch.of(setup.inputs, setup.targets)
    own = [id(p) for _, p in setup.model.named_parameters(remove_duplicate=False)]
    values = {k: torch.randn_like(p) for k, p in problem.parameters.items()}
    with torch.no_grad():
        for key, p in other.model.named_parameters():
            p.copy_(values[key])
    ours = problem.functional_losses(values, data)
    torch.testing.assert_close(ours, Problem.of(other.model, other.loss).losses(data))
    assert [id(p) for _, p in setup.model.named_parameters(remove_duplicate=False)] == own
    assert not torch.allclose(ours, problem.losses(data))


def test_conversion_copies_and_keeps_complex_parameters():
    setup = CASES["complex_parameters"].build()
    setup.model.phase.grad = torch.ones_like(setup.model.phase)
    problem = Problem.of(setup.model, setup.loss)
    again = problem.converted(torch.float64)
    assert again.model is not setup.model
    for name, p in again.parameters.items():
        assert torch.equal(p, problem.parameters[name]) and p.grad is None
    wide = Problem.of(net(), smooth).converted(torch.float64)
    assert wide.dtype == torch.float64
    assert [id(p) for p in wide.parameters.values()] == [id(p) for p in wide.model.parameters()]


def test_a_model_that_cannot_be_copied_is_refused():
    model = net()
    model.secret = (k for k in range(3))
    with pytest.raises(RefusedError, match="cannot be copied"):
        Problem.of(model, smooth).converted(torch.float64)


def test_differentiable_inputs_may_be_written_into_by_the_model():
    data = Batch.of((torch.ones(3, 2), torch.ones(3, dtype=torch.long)))
    given = differentiable_inputs(data)
    real, whole = given.inputs
    assert real.requires_grad and not whole.requires_grad

    class Writer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x, k):
            x += self.weight
            return x.sum(1)

    losses = Problem.of(Writer(), lambda outputs, targets: outputs).losses(given)
    assert losses.tolist() == [4.0, 4.0, 4.0]
    (slope,) = torch.autograd.grad(losses.sum(), [real])
    assert torch.equal(slope, torch.ones(3, 2))
    assert torch.equal(data.inputs[0], torch.ones(3, 2))
    assert not data.inputs[0].requires_grad
