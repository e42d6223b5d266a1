"""Every case with every backend: equal to the oracle, or refused; never wrong."""

import pytest
import torch

import gradscope.backends.vmap  # noqa: F401  (importing registers it)
from gradscope.backends import backends
from gradscope.blocks import DenseBlock, Evaluation, Gradients
from gradscope.errors import GradscopeError, RefusedError
from tests.backends.outcomes import expected, mistakes, outcome
from tests.cases import CASES, COUPLED, INDEPENDENT

PAIRS = [(backend, name) for backend in backends.names() for name in CASES]
VMAP_REFUSES = {
    "boolean_mask",
    "checkpointed",
    "control_flow_on_the_data",
    "custom_function_with_a_parameter",
    "experts_by_dispatch",
    "gradient_reversed_by_a_function",
    "packed_sequences",
    "sparse_embedding",
}
AT_LEAST = {  # independent cases answered exactly
    "expand": len(INDEPENDENT) - 4,
    "hooks": len(INDEPENDENT) - 4,
    "loop": len(INDEPENDENT),
    "vmap": len(INDEPENDENT) - len(VMAP_REFUSES),
}


@pytest.mark.parametrize(("backend", "name"), [p for p in PAIRS if not CASES[p[1]].coupled])
def test_exact_or_refused(backend, name):
    result = outcome(backend, name)
    if result.error is None:
        assert not result.wrong
    else:
        assert isinstance(result.error, RefusedError), repr(result.error)


@pytest.mark.parametrize(("backend", "name"), [p for p in PAIRS if CASES[p[1]].coupled])
def test_coupled_samples_are_refused_or_answered_as_batches_of_one(backend, name):
    result = outcome(backend, name)
    if result.error is None:
        assert not result.wrong
    else:
        assert isinstance(result.error, GradscopeError if backend == "loop" else RefusedError)


@pytest.mark.parametrize(("backend", "name"), PAIRS)
def test_nothing_is_left_behind(backend, name):
    assert outcome(backend, name).traces == ()


@pytest.mark.parametrize(("backend", "name"), PAIRS)
def test_an_error_says_what_to_do(backend, name):
    error = outcome(backend, name).error
    if error is not None:
        assert error.what and error.remedy


@pytest.mark.parametrize("backend", backends.names())
def test_enough_cases_are_answered(backend):
    exact = [c.name for c in INDEPENDENT if outcome(backend, c.name).error is None]
    refused = sorted({c.name for c in INDEPENDENT} - set(exact))
    assert len(exact) >= AT_LEAST.get(backend, len(INDEPENDENT) // 2), refused


def test_vmap_refuses_only_what_it_says():
    errors = {c.name for c in INDEPENDENT if outcome("vmap", c.name).error is not None}
    assert errors == VMAP_REFUSES


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_worth_its_place(name):
    """Samples differ in loss and gradient, or a wrong order of samples would go unseen."""
    answer = expected(name)
    if answer is None:
        return
    losses, gradients = answer
    rows = [g.reshape(len(g), -1) for g in gradients.values()]
    assert all(r.isfinite().all() for r in rows)
    if len(losses) > 1 and name not in {"loss_reaches_no_parameter", "coupled_contrastive_loss"}:
        norms = sum(r.abs().square().sum(1) for r in rows)
        assert len(norms.unique()) >= 3
        assert len(losses.unique()) >= 3


@pytest.mark.parametrize(
    "spoil",
    [
        lambda g: g.flip(0),
        lambda g: g / len(g),
        lambda g: g * (1 + 1e-7),
        lambda g: g.mT,
        lambda g: g + 1e-6 * g.mean(0),
        lambda g: torch.cat([g[:-1], 0 * g[-1:]]),
        lambda g: g.float(),
    ],
    ids=["permuted", "mean", "scaled", "transposed", "leaked", "last forgotten", "rounded"],
)
def test_the_judge_sees_what_is_wrong(spoil):
    losses, gradients = expected("linear_all_axes_equal_samples")
    blocks = {name: DenseBlock(g) for name, g in gradients.items()}
    assert mistakes(Evaluation(losses, Gradients(blocks)), losses, gradients) == []
    blocks["0.weight"] = DenseBlock(spoil(gradients["0.weight"]))
    (mistake, *_) = mistakes(Evaluation(losses, Gradients(blocks)), losses, gradients)
    assert mistake.startswith("0.weight")


def test_the_table_has_coupled_and_independent_cases():
    assert len(INDEPENDENT) >= 90
    assert len(COUPLED) >= 6
