"""Batches unlike the first: answered right, or refused; of coupled ones at the latest in the last.

The reference is a batch of one on a model made anew, in float64.
"""

import re
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.core.batch import Batch, map_tensors
from gradscope.errors import CertificateError, CoupledSamplesError, ModelError, RefusedError
from gradscope.scope import Scope
from tests.later import depends, moves  # noqa: F401  (importing files the cases)
from tests.later.base import CASES, Case, Stage

TOLERANCE = 1e-8


def of_kind(*kinds: str) -> list[Any]:
    found = [case for case in CASES.values() if case.kind in kinds]
    assert found
    return [pytest.param(case, id=case.name) for case in found]


@cache
def right(case: Case, k: int) -> dict[str, Tensor]:
    """Return {name: (n, *shape)} of batch k: each sample by itself, on a model of its own."""
    rows: list[dict[str, Tensor]] = []
    n = len(case.build().batches[k][1])
    for i in range(n):
        stage = case.build()
        for earlier in range(k + 1):
            stage.between(stage.model, earlier)
        model, (inputs, targets) = stage.model, stage.batches[k]
        given, wanted = map_tensors(lambda t, i=i: t[i : i + 1], (inputs, targets))
        outputs = model(*given) if isinstance(given, tuple) else model(given)
        stage.loss(outputs, wanted).sum().backward()
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        zeros = {name: torch.zeros_like(p) for name, p in named.items()}
        rows.append({m: zeros[m] if p.grad is None else p.grad for m, p in named.items()})
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def is_right(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    if found.keys() != wanted.keys():
        return False
    gaps = [(found[name] - g).abs().amax() for name, g in wanted.items()]
    sizes = [g.abs().amax().clamp_min(1e-9) for g in wanted.values()]
    return all(float(a) <= TOLERANCE * float(b) for a, b in zip(gaps, sizes, strict=True))


def outcomes(case: Case, **options: Any) -> list[Any]:
    """Ask about each batch; return "right", "wrong" or the error for each."""
    stage = case.build()
    found: list[Any] = []
    scope = Scope(stage.model, stage.loss, **options)
    for k, batch in enumerate(stage.batches):
        stage.between(stage.model, k)
        before = traces(stage.model)
        try:
            rows = rows_of(scope, k, batch, k == len(stage.batches) - 1)
        except gradscope.GradscopeError as error:
            found.append(error)
        else:
            found.append("right" if is_right(rows, right(case, k)) else "wrong")
        after = traces(stage.model)
        assert before.keys() == after.keys()
        for name, value in before.items():
            assert (
                torch.equal(value, after[name])
                if isinstance(value, Tensor)
                else (value == after[name])
            ), name
    return found


def traces(model: nn.Module) -> dict[str, Any]:
    """Values and attributes, which every call is to leave as they were."""
    values = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return values | {k: v for k, v in vars(model).items() if isinstance(v, int | None)}


def rows_of(scope: Scope, k: int, batch: Any, last: bool) -> dict[str, Tensor]:
    """As a run does, which knows which batch is its last."""
    return scope.evaluate(Batch.of(*batch), ordinal=k, last=last).gradients.dense()


def test_the_table_is_what_it_says() -> None:
    """All kinds are there; of samples that only move, the whole batch gives the same losses."""
    for case in CASES.values():
        stage = case.build()
        if case.kind == "moves":
            for inputs, targets in stage.batches:
                together = stage.loss(stage.model(*inputs), targets)
                for i in range(len(targets)):
                    one = map_tensors(lambda t, i=i: t[i : i + 1], (inputs, targets))
                    alone = stage.loss(stage.model(*one[0]), one[1])
                    torch.testing.assert_close(alone, together[i : i + 1])
    assert {case.kind for case in CASES.values()} == {
        "moves",
        "coupled",
        "carries",
        "backward",
        "user",
    }


EXACT_BY_HOOKS = {
    "sorted_by_length",
    "nearly_sorted_by_length",
    "gathered_and_scattered",
    "permuted_by_a_matrix",
    "permuted_by_a_function",
    "sorted_under_a_checkpoint",
    "time_major_and_sorted",
    "the_last_positions_of_sequences",
}


@pytest.mark.parametrize("case", of_kind("moves"))
def test_samples_that_move_are_never_mistaken(case: Case) -> None:
    """Not even where nothing is proved: the owners are read in every batch."""
    found = outcomes(case)
    assert found == ["right"] * len(found)
    found = outcomes(case, verify="never", backend="hooks")
    assert all(one == "right" or isinstance(one, RefusedError) for one in found)
    assert case.name not in EXACT_BY_HOOKS or found == ["right"] * len(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_owners_are_told_in_low_precision(dtype: torch.dtype) -> None:
    """Thirty samples: half precision needs several marks."""
    torch.manual_seed(5)

    class Sorting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 7), nn.Linear(7, 3)

        def forward(self, x: Tensor) -> Tensor:
            order = x[:, 0].argsort()
            return self.b(self.a(x[order]).tanh())[order.argsort()]

    model, inputs = Sorting().to(dtype), torch.randn(30, 4).to(dtype)
    targets = torch.randint(3, (30,))
    given = model, "cross_entropy", inputs, targets
    found = gradscope.per_sample_gradients(*given, backend="hooks", verify="never")
    wanted = gradscope.per_sample_gradients(*given, backend="loop", verify="never")
    for name, g in wanted.items():
        gap = (found[name].double() - g.double()).flatten(1).norm(dim=1)
        assert (gap <= 20 * torch.finfo(dtype).eps * g.double().flatten(1).norm(dim=1)).all(), name


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["auto", "hooks", "vmap", "expand", "loop"])
@pytest.mark.parametrize("case", of_kind("coupled", "backward"))
def test_what_couples_samples_is_found_in_the_last_batch(case: Case, backend: str) -> None:
    found = outcomes(case, backend=backend)
    assert all(one == "right" or isinstance(one, RefusedError) for one in (found[0], found[-1]))
    bites = case.kind == "coupled" and case.name != "clamped_by_a_number_of_the_batch"
    assert not bites or isinstance(found[-1], RefusedError)


ANSWERED = {
    "a_counter",
    "counters_in_all_kinds_of_places",
    "a_weight_that_is_kept_after_the_first_call",
    "a_weight_kept_with_its_graph",
    "other_parameters_are_assigned",
    "a_head_is_replaced",
    "a_parameter_is_frozen",
    "a_hook_is_put_on_a_parameter",
    "a_hook_is_put_on_a_layer",
    "an_optimizer_steps",
}
REFUSED = {
    "a_parameter_that_the_forward_pass_changes": r"model\.a\.weight",
    "factors_from_a_generator": r"model\.factors",
    "training_mode_is_switched_on": r"'drop' \(Dropout\).*random",
}


@pytest.mark.parametrize("case", of_kind("carries", "user"))
def test_what_a_model_carries_along_makes_no_difference(case: Case) -> None:
    """It is put back, or refused by name; and so is what the user changes between two calls."""
    for backend in ("auto", "hooks", "vmap", "expand", "loop"):
        found = outcomes(case, backend=backend)
        assert all(one == "right" or isinstance(one, RefusedError) for one in found), found
        if backend == "auto":
            assert case.name not in ANSWERED or found == ["right"] * len(found)
            assert re.search(REFUSED.get(case.name, ""), str(found[-1]))
            assert case.name not in REFUSED or isinstance(found[-1], RefusedError)


@pytest.mark.parametrize("backend", ["auto", "hooks", "expand", "loop"])
@pytest.mark.parametrize("verify", ["audit", "always"])
def test_a_batch_that_no_parameter_has_a_part_in_is_zeros(backend: str, verify: Any) -> None:
    """Such as one of masked samples alone, of which a loss is a constant; not if all are so."""
    model, x = nn.Linear(4, 3).double(), torch.randn(6, 4).double()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        counted = targets * outputs.square().sum(1)
        return counted if targets.any() else torch.zeros_like(targets)

    masks = torch.ones(3, 6).double()
    masks[1] = 0
    with Scope(model, loss, backend=backend, verify=verify) as scope:
        norms = [scope.norms(x, mask) for mask in masks]
        last = scope.per_sample_gradients(x[:5], masks[1, :5])
    assert norms[0].all() and torch.equal(norms[0], norms[2]) and not norms[1].any()
    assert all(len(row) == 5 and not row.any() for row in last.values())
    with pytest.raises(ModelError, match="detached from the autograd graph"):
        gradscope.norms(model, loss, x, masks[1], backend=backend)


@pytest.mark.parametrize("backend", ["auto", "hooks", "vmap", "expand", "loop"])
def test_samples_that_are_finite_together_alone_are_refused(backend: str) -> None:
    """The variance of one sample is not a number, and so are all batches of one."""
    model, x = nn.Linear(4, 3).double(), torch.randn(6, 4).double()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        far = (outputs - outputs.mean(0)).square().sum() / (len(outputs) - 1)
        return outputs.sum(1) + (far if targets.any() else 0.0)

    scope = Scope(model, loss, backend=backend)
    with pytest.raises(RefusedError):
        scope.norms(x, torch.ones(6))
    if backend != "vmap":  # it takes no branch
        scope.norms(x, torch.zeros(6))
        with pytest.raises(CoupledSamplesError, match="is nan alone but"):
            scope.evaluate(Batch.of(x[:5], torch.ones(5)), last=True)


def test_a_hook_on_a_parameter_is_run() -> None:
    found = outcomes(CASES["a_hook_on_a_parameter"])
    assert found == ["right"] * len(found)


def stopped() -> float:
    """A clock by which there is no time for audits but those that are always done."""
    return 0.0


def through_a_context(stage: Stage, **options: Any) -> None:
    """Ask in a hurry: there is no time for audits, but the last."""
    with Scope(stage.model, stage.loss, **options) as scope:
        for inputs, targets in stage.batches:
            scope.per_sample_gradients(inputs, targets)
            scope.auditor.clock = stopped


def test_a_scope_that_is_left_audits_its_last_batch() -> None:
    stage = CASES["shifted_where_a_flag_is_set"].build()
    for verify in ("first", "never"):
        through_a_context(stage, verify=verify)  # they say nothing of it
    with pytest.raises(CoupledSamplesError, match="depends on other samples"):
        through_a_context(stage)


def test_an_error_of_the_callers_own_is_not_hidden() -> None:
    stage = CASES["shifted_where_a_flag_is_set"].build()
    with pytest.raises(KeyError, match="mine"), Scope(stage.model, stage.loss) as scope:
        scope.norms(*stage.batches[0])
        scope.auditor.clock = stopped
        scope.norms(*stage.batches[-1])
        raise KeyError("mine")


def test_the_last_part_of_an_expectation_is_audited() -> None:
    """Here the first 512 samples are in order, and the 20 that follow are not independent."""
    stage = CASES["shifted_where_a_flag_is_set"].build()
    inputs, targets = torch.randn(532, 4).double(), torch.randn(532, 3).double()
    inputs[520, 0] = 9
    with pytest.raises(CoupledSamplesError):
        gradscope.expectation(stage.model, stage.loss, "mean", inputs, targets)


def test_a_refusal_stays_a_refusal_until_a_proof_has_passed() -> None:
    model = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).double()
    inputs, targets = torch.randn(6, 4).double(), torch.randint(3, (6,))
    for backend in ("loop", "hooks", "auto"):
        scope = Scope(model.train(), "cross_entropy", backend=backend)
        for _ in range(3):
            with pytest.raises(RefusedError):
                scope.norms(inputs, targets)
        model.eval()
        scope.norms(inputs, targets)
        model.train()
        with pytest.raises(RefusedError):
            scope.norms(inputs, targets)


def test_after_a_refusal_every_batch_is_proved() -> None:
    """A model that couples samples once may do so again: batches 1 and 3 do, 0 and 2 do not."""
    stage = CASES["centred_where_it_is_far_off"].build()
    (good, bad), scope = (stage.batches[0], stage.batches[-1]), Scope(stage.model, stage.loss)
    scope.norms(*good)
    with pytest.raises(RefusedError):
        scope.evaluate(Batch.of(*bad), last=True)
    for _ in range(3):
        scope.norms(*good)
        with pytest.raises(RefusedError):
            scope.norms(*bad)


def test_auto_goes_on_with_another_backend_and_says_so() -> None:
    """Where the answers before are proved, the caller need not ask again."""
    stage = CASES["a_hook_that_clips_the_batch"].build()
    scope = Scope(stage.model, stage.loss)
    for k in (0, 2):
        rows = scope.session.retry(lambda k=k: rows_of(scope, k, stage.batches[k], k == 2))
        assert is_right(rows, right(CASES["a_hook_that_clips_the_batch"], k))
    assert scope.backend != "hooks"
    assert any("hooks refused: the hooks backend failed the proof" in note for note in scope.notes)


def test_doubtful_answers_are_told() -> None:
    stage = CASES["a_hook_that_clips_the_batch"].build()
    scope = Scope(stage.model, stage.loss, backend="hooks")
    scope.norms(*stage.batches[0])
    scope.auditor.clock = stopped
    scope.norms(*stage.batches[1])
    with pytest.raises(CertificateError, match="results of the 1 batches since the last proof"):
        scope.session.retry(lambda: rows_of(scope, 2, stage.batches[2], True))
