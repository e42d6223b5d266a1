"""Every case with every backend: equal to the oracle, or refused; never wrong."""

from contextlib import suppress

import pytest
import torch

from gradscope.backends.base import Request, backends
from gradscope.blocks import DenseBlock, Evaluation, Gradients
from gradscope.core.batch import Batch
from gradscope.errors import GradscopeError, RefusedError
from gradscope.model.problem import Problem
from tests import oracle
from tests.backends.outcomes import differences, fingerprint, mistakes, run
from tests.cases import CASES, COUPLED, INDEPENDENT

WAYS = {name: backends.get(name) for name in backends.names()}
REFUSES = {
    "vmap": {
        "boolean_mask",
        "checkpointed",
        "control_flow_on_the_data",
        "custom_function_with_a_parameter",
        "experts_by_dispatch",
        "gradient_reversed_by_a_function",
        "packed_sequences",
        "sparse_embedding",
    },
    "expand": {"laplacian_by_functional_transforms"},
}
ALIKE = {"loss_reaches_no_parameter", "coupled_contrastive_loss"}  # all samples are


@pytest.mark.parametrize("name", CASES)
def test_exact_or_refused_with_nothing_left_behind(name):
    case = CASES[name]
    try:
        losses, gradients = oracle.per_sample_gradients(*case.build())
    except ValueError:
        assert case.coupled  # a batch of one has no answer
        losses, gradients = torch.empty(0), {}
    for way, backend in WAYS.items():
        setup = case.build()
        before = fingerprint(setup)
        try:
            evaluation, error = run(backend, setup), None
        except GradscopeError as raised:
            evaluation, error = None, raised
        assert differences(before, fingerprint(setup)) == [], way
        if evaluation is not None:
            assert mistakes(evaluation, losses, gradients) == [], way
        else:
            assert isinstance(error, RefusedError) or (case.coupled and way == "loop"), way
            assert error.what and error.remedy, way
        if not case.coupled:
            assert (error is not None) == (name in REFUSES.get(way.split(",")[0], ())), error
    # samples differ in loss and gradient, or a wrong order of samples would go unseen
    rows = [g.reshape(len(g), -1) for g in gradients.values()]
    assert all(r.isfinite().all() for r in rows)
    if len(losses) > 1 and name not in ALIKE:
        assert len(sum(r.abs().square().sum(1) for r in rows).unique()) >= 3
        assert len(losses.unique()) >= 3


@pytest.mark.sampled
@pytest.mark.parametrize("case", INDEPENDENT, ids=lambda case: case.name)
def test_single_samples_whose_structure_is_asked_for(case):
    """One after the other, and then all of them: what one sample has shown is for such alone."""
    setup = case.build()
    losses, gradients = oracle.per_sample_gradients(*setup)
    batch = Batch.of(*setup[2:])
    problem = Problem.of(*setup[:2])
    structured = 0
    with WAYS["hooks"](problem) as evaluate, suppress(RefusedError):
        for k in range(len(batch)):
            one = evaluate(batch.select(slice(k, k + 1)), Request(factors=True))
            structured += any(block.kind is not None for block in one.gradients.values())
            right = {key: g[k : k + 1] for key, g in gradients.items()}
            assert mistakes(one, losses[k : k + 1], right) == []
        whole = evaluate(batch, Request(factors=True))
        assert mistakes(whole, losses, gradients) == []
        kinds = {block.kind for block in whole.gradients.values()}
        if case.name != "experts_by_dispatch":  # the masks of two equal samples tell nothing
            assert structured == (len(batch) if kinds != {None} else 0)


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
    setup = CASES["linear_all_axes_equal_samples"].build()
    losses, gradients = oracle.per_sample_gradients(*setup)
    blocks = {name: DenseBlock(g) for name, g in gradients.items()}
    assert mistakes(Evaluation(losses, Gradients(blocks)), losses, gradients) == []
    blocks["0.weight"] = DenseBlock(spoil(gradients["0.weight"]))
    (mistake, *_) = mistakes(Evaluation(losses, Gradients(blocks)), losses, gradients)
    assert mistake.startswith("0.weight")


def test_the_table_has_coupled_and_independent_cases():
    assert len(INDEPENDENT) >= 90
    assert len(COUPLED) >= 6
