"""The Python interface: one object asked about many batches, and the same in one call."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.errors import CoupledSamplesError, ModelError, SpecError, UnsupportedError
from gradscope.scope import NonFiniteWarning
from tests.cases import CASES, COUPLED, INDEPENDENT
from tests.oracle import cross_entropy, per_sample_gradients


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 4)).double()


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(11, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 4, (11,), generator=generator)


CUT_OFF = "loss_reaches_no_parameter"
REACHED = [case for case in INDEPENDENT if case.name != CUT_OFF]


def test_losses_that_reach_no_parameter_are_refused_when_proved() -> None:
    """Zeros are right, and almost surely not what was meant."""
    setup = next(case for case in INDEPENDENT if case.name == CUT_OFF).build()
    with (
        pytest.raises(ModelError, match="detached from the autograd graph"),
        gradscope.Scope(setup.model, setup.loss) as scope,
    ):
        scope.norms(setup.inputs, setup.targets)
    with gradscope.Scope(setup.model, setup.loss, verify="never") as scope:
        assert not scope.norms(setup.inputs, setup.targets).any()


@pytest.mark.sampled
@pytest.mark.parametrize("case", REACHED, ids=lambda c: c.name)
def test_auto_is_exact_on_every_well_defined_case(case) -> None:
    setup = case.build()
    _, wanted = per_sample_gradients(*setup)
    with gradscope.Scope(setup.model, setup.loss) as scope:
        found = scope.per_sample_gradients(setup.inputs, setup.targets)
    for name, gradient in wanted.items():
        scale = gradient.abs().max().clamp_min(1e-12)
        assert float((found[name] - gradient).abs().max() / scale) < 1e-8, (name, scope.notes)
    assert scope.certificate is not None


@pytest.mark.parametrize("case", COUPLED, ids=lambda c: c.name)
@pytest.mark.parametrize("backend", ["auto", "loop"])
def test_coupled_samples_are_refused_with_both_meanings(case, backend: str) -> None:
    setup = case.build()
    with pytest.raises(CoupledSamplesError) as refusal:
        gradscope.per_sample_gradients(
            setup.model, setup.loss, setup.inputs, setup.targets, backend=backend
        )
    of_loss = case.name == "coupled_contrastive_loss"  # alone, its samples have no loss
    wanted = "a sample has no loss without its batch" if of_loss else "two meanings"
    assert wanted in str(refusal.value)
    assert 'coupling="own-loss"' in str(refusal.value)


def test_the_layer_that_couples_is_named() -> None:
    setup = CASES["coupled_batch_norm_of_images"].build()
    with pytest.raises(CoupledSamplesError, match=r"layer '1' \(BatchNorm2d\)"):
        gradscope.norms(setup.model, setup.loss, setup.inputs, setup.targets)


def test_norms_and_expectations_follow_from_the_gradients(model, data) -> None:
    rows = {
        k: g.numpy()
        for k, g in gradscope.per_sample_gradients(model, "cross_entropy", *data).items()
    }
    flat = np.concatenate([g.reshape(len(g), -1) for g in rows.values()], axis=1)
    norms = np.linalg.norm(flat, axis=1)
    scope = gradscope.Scope(model, "cross_entropy")
    np.testing.assert_allclose(scope.norms(*data), norms, rtol=1e-12)
    by_name = scope.norms(*data, per="parameter")
    for name, g in rows.items():
        np.testing.assert_allclose(by_name[name], np.linalg.norm(g.reshape(len(g), -1), axis=1))
    level = float(np.median(norms))
    inside = scope.expectation(f"clip:max_norm={level} | mean", *data)
    outside = scope.expectation(f"mean | clip:max_norm={level / 4}", *data)
    factors = np.minimum(1, level / norms)
    total = np.linalg.norm(flat.mean(0))
    for name, g in rows.items():
        clipped = np.tensordot(factors, g, 1) / len(g)
        np.testing.assert_allclose(inside[name], clipped, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(
            outside[name], g.mean(0) * min(1, level / 4 / total), rtol=1e-12, atol=1e-15
        )


def test_a_chain_without_a_reducer_means_the_mean(model, data) -> None:
    scope = gradscope.Scope(model, "cross_entropy")
    a, b = scope.expectation("sign", *data), scope.expectation("sign | mean", *data)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_buffers_are_written_in_place(model, data) -> None:
    scope = gradscope.Scope(model, "cross_entropy")
    first = scope.per_sample_gradients(*data)
    buffers = {name: torch.full_like(g, torch.nan) for name, g in first.items()}
    second = scope.per_sample_gradients(*data, out=buffers)
    for name, g in first.items():
        assert second[name].data_ptr() == buffers[name].data_ptr()
        assert torch.equal(buffers[name], g)


def test_globs_select_parameters(model, data) -> None:
    found = gradscope.per_sample_gradients(model, "cross_entropy", *data, parameters="2.*")
    assert list(found) == ["2.weight", "2.bias"]
    with pytest.raises(SpecError, match="no trainable parameter matches"):
        gradscope.Scope(model, "cross_entropy", parameters=["nothing.*"])


def test_the_model_is_left_as_it_was_found(model, data) -> None:
    model.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    random = torch.random.get_rng_state()
    gradscope.per_sample_gradients(model, "cross_entropy", *data)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert model.training
    assert all(not m._forward_hooks and not m._backward_hooks for m in model.modules())
    assert torch.equal(random, torch.random.get_rng_state())


def test_what_has_no_values_or_lies_elsewhere_is_refused(model, data) -> None:
    with pytest.raises(ModelError, match="on one device") as mixed:
        gradscope.norms(model, "cross_entropy", data[0].to("meta"), data[1])
    assert "layer '0' (Linear)" in str(mixed.value)
    with pytest.raises(UnsupportedError, match=r"parameter '0\.weight'.* no value"):
        gradscope.norms(model.to("meta"), "cross_entropy", *data)


def test_a_gpu_that_is_not_in_use_keeps_the_callers_seed(model, data, monkeypatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)  # as soon as it is
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    gradscope.per_sample_gradients(model, "cross_entropy", *data)
    assert seeded == []


def test_inputs_need_not_be_detached(model, data) -> None:
    inputs = data[0].clone().requires_grad_(True)
    found = gradscope.per_sample_gradients(model, "cross_entropy", inputs, data[1])
    assert not any(g.requires_grad for g in found.values())
    assert inputs.grad is None


CHAINS = {
    "sums": ["mean", "second_moment", "sum"],
    "clipped": ["clip:max_norm=1.0 | mean"],
    "clipped and raw": ["mean", "clip:max_norm=0.1,per=parameter | mean"],
    "clipped by another norm": ["clip:max_norm=0.1,p=1 | sum"],
    "signs": ["sign | mean", "mean"],
    "in order": ["max", "mean"],
}


@pytest.mark.parametrize("chains", [["mean"], ["gram", "clip:max_norm=1 | mean"]])
def test_without_a_finite_sample_there_is_no_expectation(chains):
    scope = gradscope.Scope(nn.Linear(3, 2), "cross_entropy")
    x, y = torch.randn(4, 3), torch.randint(2, (4,))
    for _ in range(2):
        with pytest.raises(SpecError, match="no sample has a finite gradient"):
            scope.expectations(chains, x * torch.nan, y)
        assert scope.expectations(chains, x, y)


@pytest.mark.parametrize("texts", CHAINS.values(), ids=CHAINS.keys())
@pytest.mark.parametrize(
    ("value", "n"), [*((bad, 11) for bad in (torch.nan, torch.inf, 1e300, 1e30)), (1e300, 1100)]
)
def test_samples_that_are_not_finite_are_left_out_of_every_chain(
    model, data, texts: list[str], value: float, n: int
) -> None:
    """Whether their gradients are looked through or what they are reduced to shows them."""
    model[1] = nn.Identity()  # so that large numbers stay large
    inputs, targets = (t.repeat(n // 11, *[1] * (t.dim() - 1)) for t in data)
    if value == 1e30:  # of which float32 has no square
        model, inputs = model.float(), inputs.float()
    spoilt = inputs.clone()
    spoilt[n - 2] = value
    keep = torch.arange(n) != n - 2
    scope = gradscope.Scope(model, "cross_entropy")
    with pytest.warns(NonFiniteWarning, match="1 sample"):
        found = scope.expectations(texts, spoilt, targets)
    wanted = scope.expectations(texts, inputs[keep], targets[keep])
    for one, other in zip(found, wanted, strict=True):
        for name in other:
            torch.testing.assert_close(one[name], other[name])


@pytest.mark.parametrize("n", [11, 1100])
def test_without_any_finite_sample_there_is_no_expectation(model, data, n: int) -> None:
    inputs, targets = (t.repeat(n // 11, *[1] * (t.dim() - 1)) for t in data)
    scope = gradscope.Scope(model, "cross_entropy")
    with pytest.raises(SpecError, match="no sample has a finite gradient"):
        scope.expectations(["mean", "var"], inputs * torch.nan, targets)


def test_a_chain_asked_for_twice_is_answered_twice(model, data) -> None:
    scope = gradscope.Scope(model, "cross_entropy")
    first, second, third = scope.expectations(["mean", "second_moment", "mean"], *data)
    alone = scope.expectation("mean", *data)
    for name, value in alone.items():
        torch.testing.assert_close(first[name], value)
        torch.testing.assert_close(third[name], value)
        assert not torch.equal(second[name], value)


def test_unused_and_frozen_parameters(model, data) -> None:
    model.add_module("spare", nn.Linear(2, 2).double())
    model.forward = lambda x: model[2](model[1](model[0](x)))  # type: ignore[method-assign]
    model[0].weight.requires_grad_(False)
    scope = gradscope.Scope(model, "cross_entropy")
    found = scope.per_sample_gradients(*data)
    assert "0.weight" not in found
    assert found["spare.weight"].shape == (11, 2, 2)
    assert not found["spare.weight"].any()
    assert scope.certificate is not None
    assert set(scope.certificate.unused) == {"spare.weight", "spare.bias"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(model, data, dtype: torch.dtype) -> None:
    low, inputs = model.to(dtype), data[0].to(dtype)
    found = gradscope.per_sample_gradients(low, "cross_entropy", inputs, data[1])
    _, wanted = per_sample_gradients(low, cross_entropy, inputs, data[1])
    for name, g in found.items():
        assert g.dtype == dtype
        error = (g.double() - wanted[name]).norm() / wanted[name].norm()
        assert float(error) < 40 * torch.finfo(dtype).eps


Call = Callable[[nn.Module, Tensor, Tensor], object]
WRONG_CALLS: dict[str, tuple[Call, str]] = {
    "a word that does not exist": (
        lambda m, x, y: gradscope.Scope(m, "mse", verify="allways"),
        "verify: unknown value 'allways'\n"
        "Did you mean 'always'? Supported: audit, first, always, never.",
    ),
    "a seed below 0": (
        lambda m, x, y: gradscope.Scope(m, "mse", seed=-1),
        "seed: the seed must be an integer from 0 to 2^63 - 1, not -1\nGive a seed such as 0.",
    ),
    "a text as a switch": (
        lambda m, x, y: gradscope.Scope(m, "mse", compile="yes"),
        "compile: compile must be True or False, not 'yes'\nUse compile=True or compile=False.",
    ),
    "the class of a model": (
        lambda m, x, y: gradscope.Scope(nn.Linear, "mse"),
        "model: the model must be a torch.nn.Module, not the class Linear\n"
        "Create the model: Linear(...).",
    ),
    "weights for a model": (
        lambda m, x, y: gradscope.Scope(m.state_dict(), "mse"),
        "model: the model must be a torch.nn.Module, not OrderedDict\n"
        "If this is a state dict, create the model, and call model.load_state_dict(...).",
    ),
    "numpy arrays": (
        lambda m, x, y: gradscope.norms(m, "cross_entropy", x.numpy(), y),
        "inputs or targets contain a numpy array (11, 6), not a tensor\n"
        "Convert it: torch.from_numpy(x).",
    ),
    "lists": (
        lambda m, x, y: gradscope.norms(m, "cross_entropy", x.tolist(), y.tolist()),
        "the batch holds no sample (inputs: list, targets: list)\nGive tensors (n, ...), n ≥ 1.",
    ),
    "no targets": (
        lambda m, x, y: gradscope.norms(m, "cross_entropy", x),
        "loss: the targets are not a tensor but NoneType\nGive targets: this loss needs them.",
    ),
    "no chain": (
        lambda m, x, y: gradscope.expectation(m, "cross_entropy", None, x, y),
        "chain: a chain must be a text or a list of stages, not NoneType\n"
        'Write "clip:max_norm=1.0 | mean".',
    ),
    "a buffer of another shape": (
        lambda m, x, y: gradscope.Scope(m, "cross_entropy").per_sample_gradients(
            x, y, {"0.bias": x}
        ),
        "out: the buffer of 0.bias has shape (11, 6), but its rows (11, 7)\n"
        "Pass what an earlier call returned for as many samples, or no `out`.",
    ),
    "a list to compare with": (
        lambda m, x, y: gradscope.compare(m, "cross_entropy", x, y, against=[len]),
        "against: it must be a dict {label: implementation}, not a list\n"
        'Write against={"mine": ...}.',
    ),
    "a model for a scope": (
        lambda m, x, y: gradscope.attribute((m, x, y), (m, x, y)),
        "training samples: the first of three is a Sequential, not a Scope\n"
        "Give (gradscope.Scope(model, loss), inputs, targets).",
    ),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_wrong_call_is_an_error_that_says_what_to_do(model, data, name: str) -> None:
    call, message = WRONG_CALLS[name]
    with pytest.raises(gradscope.GradscopeError) as caught:
        call(model, *data)
    assert str(caught.value) == message
