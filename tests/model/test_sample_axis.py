"""Calls that lose the sample axis are named with their line, and nothing else is blamed on them."""

import inspect
import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradscope
from gradscope.errors import CoupledSamplesError, GradscopeError, ModelError, SpecError

N = 10
ROWS, VALUES = torch.randn(N, 4), torch.rand(N)
IMAGES, CLASSES = torch.randn(N, 1, 8, 8), torch.randint(5, (N,))


class Model(nn.Module):
    """Layers that a function puts together."""

    def __init__(self, function):
        super().__init__()
        self.line, self.conv, self.head = nn.Linear(4, 1), nn.Conv2d(1, 3, 3), nn.Linear(108, 5)
        self.full = nn.Conv2d(1, 5, 8)
        self.rnn = nn.GRU(4, 4, batch_first=True)
        self.function = function

    def forward(self, *inputs):
        return self.function(self, *inputs)


def bce(outputs, targets):
    return functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none")


def squared(outputs, targets):
    return (outputs - targets).square()


def squeezed_in_loss(outputs, targets):
    outputs = outputs.squeeze()  # here
    return bce(outputs, targets)


def plain(model, x):
    return model.line(x)


def squeezed(model, x):
    return model.line(x).squeeze()  # here


def first_squeezed(model, x):
    return torch.squeeze(model.line(x), 0)[:, 0]  # here


def images_squeezed(model, x):
    h = functional.relu(model.conv(x))
    h = torch.squeeze(h)  # here
    return model.head(h.flatten(1))


def answer_squeezed(model, x):
    h = model.full(x)
    return h.squeeze()  # here


def written_squeezed(model, x):
    h = model.full(x)
    h.squeeze_()  # here
    return h


def other_values(model, x):
    h = model.full(x).squeeze()  # here
    h = h / h.norm(dim=-1, keepdim=True) if h.dim() > 1 else h
    return h.reshape(len(x), -1)


def flattened(model, x):
    return model.head(model.conv(x).flatten())  # here


def viewed(model, x):
    h = model.conv(x)
    h = h.view(-1)  # here
    return model.head(h)


def reshaped(model, x):
    h = model.conv(x).relu().reshape(1, -1)  # here
    return model.head(h)


def answer_merged(model, x):
    h = model.line(x).expand(-1, 3)
    return h.reshape(-1)  # here


def fixed(model, x):
    h = model.line(x)
    return h.view(10)  # here


def line_of(function):
    """Return the file and the number of the line that says `# here`."""
    lines, start = inspect.getsourcelines(function)
    (found,) = (k for k, line in enumerate(lines) if "# here" in line)
    return f"{__file__}, line {start + found}", lines[found].strip()


DROPS, MERGES = "drops the sample axis of a single sample", "merges the sample axis with others"
CASES = [
    (plain, squeezed_in_loss, ROWS, VALUES, squeezed_in_loss, rf"squeeze\(\) {DROPS}: .*\(3,\)"),
    (squeezed, "mse", ROWS, VALUES, squeezed, rf"squeeze\(\) {DROPS}"),
    (squeezed, bce, ROWS, VALUES, squeezed, rf"squeeze\(\) {DROPS}"),
    (first_squeezed, bce, ROWS, VALUES, first_squeezed, rf"squeeze\(\) {DROPS}"),
    (images_squeezed, "cross_entropy", IMAGES, CLASSES, images_squeezed, rf"squeeze\(\) {DROPS}"),
    (answer_squeezed, "cross_entropy", IMAGES, CLASSES, answer_squeezed, rf"squeeze\(\) {DROPS}"),
    (written_squeezed, "cross_entropy", IMAGES, CLASSES, written_squeezed, "squeeze_"),
    (other_values, "cross_entropy", IMAGES, CLASSES, other_values, rf"squeeze\(\) {DROPS}"),
    (flattened, "cross_entropy", IMAGES, CLASSES, flattened, rf"flatten\(\) {MERGES}: .*\(324,\)"),
    (viewed, "cross_entropy", IMAGES, CLASSES, viewed, rf"view\(\) {MERGES}"),
    (reshaped, "cross_entropy", IMAGES, CLASSES, reshaped, rf"reshape\(\) {MERGES}"),
    (answer_merged, "mse", ROWS, torch.rand(N, 3), answer_merged, rf"reshape\(\) {MERGES}"),
    (fixed, "mse", ROWS, VALUES, fixed, r"view\(\) has a fixed shape: it fails on 1 and 2"),
]


@pytest.mark.parametrize("backend", ["auto", "loop"])
@pytest.mark.parametrize(("forward", "loss", "inputs", "targets", "guilty", "what"), CASES)
def test_the_line_is_named(forward, loss, inputs, targets, guilty, what, backend):
    model = Model(forward)
    with pytest.raises(ModelError, match=what) as caught:
        gradscope.norms(model, loss, inputs, targets, backend=backend)
    place, text = line_of(guilty)
    assert caught.value.where == place
    assert caught.value.remedy.startswith("Keep the first axis")
    assert caught.value.remedy.endswith(text)


def test_compare_names_the_line_too():
    with pytest.raises(ModelError, match=DROPS) as caught:
        gradscope.compare(Model(squeezed), bce, ROWS, VALUES)
    assert caught.value.where == line_of(squeezed)[0]


def test_a_layer_without_a_line_of_the_users_is_named():
    layers = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(0), nn.Linear(108, 5))
    with pytest.raises(ModelError, match=MERGES) as caught:
        gradscope.norms(layers, "cross_entropy", IMAGES, CLASSES)
    assert caught.value.where == "layer '1' (Flatten)"


def test_tokens():
    def squeezed(outputs, targets):
        outputs = outputs.squeeze()  # here
        return functional.cross_entropy(outputs.mT, targets, reduction="none")

    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    tokens = torch.randint(9, (6, 5))
    with pytest.raises(ModelError, match=DROPS) as caught:
        gradscope.norms(model, squeezed, tokens, tokens, rows="token")
    assert caught.value.where == line_of(squeezed)[0]


def folded(model, x):  # the time axis is folded into the samples, and unfolded
    return model.line(x.reshape(-1, 4)).reshape(len(x), -1)


def misfolded(model, x):
    return model.line(x.reshape(-1, 5)).reshape(len(x), -1)


def harmless(model, x):  # a loss of one shape for any number
    return model.line(x).squeeze().reshape(len(x))


def masked(model, x):  # as many rows as there are positive numbers
    return model.line(x * (x[x > -9].mean() * 0 + 1)).flatten()


@pytest.mark.parametrize(
    ("forward", "inputs", "targets"),
    [
        (folded, torch.randn(N, 3, 4), torch.rand(N, 3)),
        (harmless, ROWS, VALUES),
        (masked, ROWS, VALUES),
    ],
)
def test_what_keeps_the_samples_apart_passes(forward, inputs, targets):
    assert gradscope.norms(Model(forward), "mse", inputs, targets).shape == (N,)


def normalised(model, x):
    h = functional.batch_norm(model.line(x), None, None, training=True)
    return h.squeeze()


def centred(model, x):
    h = model.line(x).squeeze()
    return (h - h.mean()).reshape(len(x))


def scaled(model, x):
    h = model.full(x).squeeze().reshape(len(x), -1)
    return h / h.abs().max()


@pytest.mark.parametrize(
    ("forward", "loss", "inputs", "targets"),
    [
        (normalised, "mse", ROWS, VALUES),
        (centred, "mse", ROWS, VALUES),
        (scaled, "cross_entropy", IMAGES, CLASSES),
    ],
)
def test_coupling_is_not_blamed_on_a_squeeze(forward, loss, inputs, targets):
    with pytest.raises(CoupledSamplesError):
        gradscope.norms(Model(forward), loss, inputs, targets)


def test_a_wrong_number_of_features_is_not_blamed_on_a_reshape():
    with pytest.raises(ModelError, match="mat1 and mat2") as caught:
        gradscope.norms(Model(misfolded), "mse", torch.randn(N, 3, 5), torch.rand(N, 3))
    assert MERGES not in caught.value.what


def test_a_mean_over_the_samples_is_a_scalar():
    def mean(outputs, targets):
        return squared(outputs, targets).mean()

    of_model = gradscope.model_loss(lambda model, x, y: mean(model(x), y))
    for loss, name, passed in ((mean, "mean", "outputs"), (of_model, "<lambda>", "model, inputs")):
        with pytest.raises(SpecError) as caught:
            gradscope.norms(Model(plain), loss, ROWS, VALUES)
        assert str(caught.value) == (
            f"loss: the loss {name!r} must return one number per sample, shape (10,); it returned "
            "shape ()\nA scalar loss is already summed or averaged over the batch, and a mean "
            "scales every gradient by 1/n. Use reduction='none', and reduce over all axes but the "
            f"first. Or return torch.stack([one({passed}[i : i + 1], targets[i : i + 1]) for i in "
            "range(len(targets))]), where one is this loss. Instead of a mean over all tokens of a "
            "batch, return each sample's sum over its tokens, divided by a constant."
        )


@pytest.mark.parametrize("targets", [None, (VALUES, VALUES), {"a": VALUES}])
@pytest.mark.parametrize("of_model", [False, True])
def test_the_code_for_a_scalar_loss_gives_a_loss_for_each_sample(targets, of_model):
    def one(*given):
        outputs = given[0](given[1]) if of_model else given[0]
        values = given[-1].values() if isinstance(given[-1], dict) else given[-1] or [0]
        return sum(squared(outputs[:, 0], value) for value in values).mean()

    def loss(*given):
        names = ("model", "inputs", "targets") if of_model else ("outputs", "targets")
        return eval(code, {"one": one, "torch": torch, **dict(zip(names, given, strict=True))})

    model, wrapped = Model(plain), gradscope.model_loss if of_model else lambda fn: fn
    with pytest.raises(SpecError) as caught:
        gradscope.norms(model, wrapped(one), ROWS, targets)
    code = re.search(r"torch\.stack\(\[.*?\]\)(?=, where)", str(caught.value))[0]
    factor = 1 if targets is None else len(targets)
    values = VALUES if factor > 1 or targets else torch.zeros_like(VALUES)
    expected = gradscope.norms(model, lambda o, y: factor * squared(o[:, 0], y), ROWS, values)
    torch.testing.assert_close(gradscope.norms(model, wrapped(loss), ROWS, targets), expected)


def test_a_scalar_loss_of_one_sample_at_a_time():
    def separate(outputs, targets):
        one = [squared(outputs[i : i + 1], targets[i : i + 1]).mean() for i in range(len(targets))]
        return torch.stack(one)

    model = Model(plain)  # with random weights
    found = gradscope.norms(model, separate, ROWS, VALUES)
    together = gradscope.norms(model, lambda o, y: squared(o[:, 0], y), ROWS, VALUES)
    torch.testing.assert_close(found, together)


def test_nothing_is_left_in_the_model():
    model = Model(squeezed)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(GradscopeError):
        gradscope.norms(model, bce, ROWS, VALUES)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
