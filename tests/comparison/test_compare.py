"""`compare`: rows, verdicts and messages, with mistakes planted in whole implementations."""

import json
import math
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

import gradscope
from gradscope.backends.base import backends
from gradscope.backends.loop import loop
from gradscope.blocks import Evaluation
from gradscope.comparison import BackendRow, Comparison, compare
from gradscope.comparison.run import measure
from gradscope.errors import CoupledSamplesError, SpecError, UnsupportedError
from tests import oracle

N = 5
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-2}  # of relative errors


def problem(dtype=torch.float64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    inputs = torch.randn(N, 3) * torch.arange(1, N + 1)[:, None]
    return model.to(dtype), inputs.to(dtype), torch.tensor([0, 1, 1, 0, 1])


def problem_of(loss, dtype=torch.float64):
    model, inputs, targets = problem(dtype)
    return model, loss, inputs, targets


def right(model, loss, inputs, targets):
    """The user's own loop: independent of every backend."""
    return oracle.per_sample_gradients(model, loss, inputs, targets)[1]


def with_mistake(change):
    def implementation(*args):
        return {name: change(g) for name, g in right(*args).items()}

    return implementation


def transposed(g):
    return g.mT if g.dim() == 3 and g.shape[1] == g.shape[2] else g


def without(name):
    return lambda *args: {k: g for k, g in right(*args).items() if k != name}


def reshaped(*args):
    return {k: g.mT if g.dim() == 3 else g for k, g in right(*args).items()}


def not_cleared(model, loss, inputs, targets):
    rows = {name: [] for name, _ in model.named_parameters()}
    for i in range(len(inputs)):
        loss(model(inputs[i : i + 1]), targets[i : i + 1]).sum().backward()
        for name, p in model.named_parameters():
            rows[name].append(p.grad.clone())
    return {name: torch.stack(g) for name, g in rows.items()}


PLANTED = {
    "mean-reduced": (with_mistake(lambda g: g / N), "all parameters: c = 1/n with n = 5"),
    "transposed": (with_mistake(transposed), "2.weight: axes 0 and 1 of the parameter are trans"),
    "not finite": (with_mistake(lambda g: g * math.nan), "NaN or infinity in samples 0, 1, 2"),
    "permuted": (with_mistake(lambda g: g.flip(0)), "all parameters: the samples are in another"),
    "not cleared": (
        not_cleared,
        "row i is the sum of the gradients of samples 0 to i: .grad was not cleared",
    ),
    "one name missing": (without("0.bias"), "0.bias: there is no gradient for this parameter"),
    "wrong shape": (reshaped, "0.weight: has shape (5, 3, 4) instead of (5, 4, 3)"),
    "unknown name": (
        lambda *args: {**right(*args), "head.weight": torch.ones(N)},
        "unknown parameters: head.weight",
    ),
}


NONSENSE = {
    "raises": (
        lambda model, loss, inputs, *_: model(inputs.flatten()),
        "layer '0' (Linear): RuntimeError",
    ),
    "list": (lambda *args: [1], "it returned list, not a dict"),
    "text": (lambda *args: {"0.bias": "text"}, "a value is not an array of numbers"),
}
RIGHT = {dtype: with_mistake(lambda g, dtype=dtype: g.to(dtype)) for dtype in LIMITS}


@pytest.fixture(scope="module")
def result():
    """Everything of the user's against the loop, in one table."""
    model, inputs, targets = problem()
    rows = right(model, nn.CrossEntropyLoss(reduction="none"), inputs, targets)
    arrays = {name: g.numpy().astype(np.float32) for name, g in rows.items()}
    stored = {"stored": arrays, "short": {name: g[:3] for name, g in arrays.items()}}
    others = {name: one for name, (one, _) in (PLANTED | NONSENSE).items()}
    others |= {str(dtype): one for dtype, one in RIGHT.items()}
    with torch.no_grad():  # whoever calls may be under it
        return compare(model, "cross_entropy", inputs, targets, ["loop"], against=others | stored)


@pytest.fixture
def row(request, result):
    return next(row for row in result.rows if row.backend == str(request.param))


@pytest.mark.parametrize("row", PLANTED, indirect=True)
def test_a_planted_mistake_is_explained(row):
    words = PLANTED[row.backend][1]
    assert (row.status, words in (row.reason or "")) == ("disagrees", True), row.reason


@pytest.mark.parametrize("row", NONSENSE, indirect=True)
def test_what_raises_or_returns_nonsense_is_a_failed_row(row):
    words = NONSENSE[row.backend][1]
    assert (row.status, words in row.reason) == ("failed", True), row.reason


@pytest.mark.parametrize("row", RIGHT, indirect=True)
def test_the_right_gradients_agree(row):
    assert (row.status, row.reason) == ("agrees", None)
    assert row.worst.relative <= LIMITS[getattr(torch, row.backend.removeprefix("torch."))]
    assert row.seconds > 0.0


def test_the_loop_agrees_and_a_stored_result_of_numpy_arrays_has_no_time(result):
    *_, stored, short = result.rows
    assert (result.agrees, result.rows[0].status) == (False, "agrees")
    assert (stored.status, stored.seconds) == ("agrees", None)
    assert (short.status, "3 rows for 5 samples" in short.reason) == ("disagrees", True)


def test_float32_models_are_compared_in_float64():
    model, inputs, targets = problem(torch.float32)
    seen = []

    def mine(model, loss, inputs, targets):
        seen.append(inputs.dtype)
        return right(model, loss, inputs, targets)

    result = compare(model, "cross_entropy", inputs, targets, ["loop"], against={"mine": mine})
    assert result.agrees
    assert result.dtype == "float32"
    assert seen[0] == torch.float64
    assert set(seen[1:]) == {torch.float32}
    assert result.rows[1].worst.relative < 1e-12


@pytest.fixture
def toys():
    """Register backends for one test."""
    added = []

    def add(name, evaluate):
        @contextmanager
        def backend(problem):
            yield lambda batch: evaluate(problem, batch)

        backends.register(name)(backend)
        added.append(name)

    yield add
    for name in added:
        del backends._entries[name]


def test_a_refusing_backend_does_no_harm_and_a_broken_one_does(toys):
    def refuse(problem, batch):
        raise UnsupportedError("no rule for it", where="layer 'x'", remedy="Use loop.")

    def fail(problem, batch):
        raise ZeroDivisionError("oh")

    toys("refusing", refuse)
    toys("failing", fail)
    result = compare(*problem_of("cross_entropy"), ["loop", "refusing"])
    assert result.agrees
    assert result.rows[1] == BackendRow(
        "refusing", "refused", "layer 'x': no rule for it", "Use loop."
    )
    result = compare(*problem_of("cross_entropy"), ["refusing", "failing"])
    assert not result.agrees
    assert [r.backend for r in result.rows] == ["refusing", "failing"]
    assert (result.rows[1].status, result.rows[1].reason) == ("failed", "ZeroDivisionError: oh")


@pytest.fixture
def scaled(toys):
    """Register a backend that scales a sample's gradient where it is told to."""

    def add(name, is_wrong):
        def evaluate(problem, batch):
            with loop(problem) as evaluate:
                found = evaluate(batch)
            factors = torch.where(is_wrong(problem, batch), 1 / N, 1.0)
            return Evaluation(found.losses, found.gradients.scale(factors))

        toys(name, evaluate)

    return add


def test_a_wrong_backend_disagrees(scaled):
    scaled("halved", lambda problem, batch: torch.ones(len(batch), dtype=torch.bool))
    result = compare(*problem_of("cross_entropy"), ["loop", "halved"])
    assert not result.agrees
    assert {p.kind for p in result.rows[1].parameters} == {"mean_loss"}
    assert [p.factor for p in result.rows[1].parameters] == pytest.approx([1 / N] * 6)


def test_what_a_backend_keeps_of_the_first_answer_has_to_fit_the_second(scaled):
    first = []

    def is_wrong(problem, batch):
        first.append(batch.targets)
        return first[0] != batch.targets  # right only for the batch that it has seen first

    scaled("stale", is_wrong)
    result = compare(*problem_of("cross_entropy"), ["loop", "stale"])
    row = result.rows[1]
    assert (result.agrees, row.status) == (False, "disagrees")
    assert row.reason.startswith("with the samples in another order: all parameters")
    assert {p.factor for p in row.parameters} != {1.0}


@pytest.mark.parametrize("sample", range(N))
def test_each_sample_counts_in_the_models_own_dtype(scaled, sample):
    def is_wrong(problem, batch):
        single = problem.dtype == torch.float32
        return (batch.index == sample) & single & (len(batch) == N)

    scaled("narrow", is_wrong)
    result = compare(*problem_of("cross_entropy", torch.float32), ["loop", "narrow"])
    row = result.rows[1]
    assert (result.agrees, row.status) == (False, "disagrees")
    assert row.reason.startswith("only in float32: ")


def test_a_hook_that_a_copy_does_not_have():
    model, inputs, targets = problem(torch.float32)
    model[0].weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    loop, hooks = compare(model, "cross_entropy", inputs, targets, ["loop", "hooks"]).rows
    assert (loop.status, hooks.status) == ("agrees", "refused")
    assert "hook" in hooks.reason


def test_registered_backends_agree():
    result = gradscope.compare(*problem_of("cross_entropy", torch.float32), backends.names())
    assert [row.status for row in result.rows] == ["agrees"] * len(backends.names())
    assert all(row.worst.relative < 1e-8 for row in result.rows)


def test_parameters_are_selected_and_others_ignored():
    against, names = {"mine": right}, "*.weight"
    result = compare(*problem_of("cross_entropy"), ["loop"], names, against)
    assert result.agrees
    assert [p.name for p in result.rows[1].parameters] == ["0.weight", "2.weight", "4.weight"]


def test_a_tied_parameter_may_go_by_either_name():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x).tanh())

    def by_second_name(*args):
        return {"b.weight": right(*args)["a.weight"]}

    torch.manual_seed(0)
    inputs, targets = torch.randn(4, 3), torch.randn(4, 3)
    result = compare(Tied(), "mse", inputs, targets, ["loop"], against={"mine": by_second_name})
    assert result.agrees


def test_the_model_is_left_as_it_was():
    model, inputs, targets = problem()
    model[0].weight.grad = torch.ones(4, 3, dtype=torch.float64)
    before = {k: v.clone() for k, v in model.state_dict().items()}

    def rude(model, loss, inputs, targets):
        found = right(model, loss, inputs, targets)
        with torch.no_grad():
            model[0].weight.zero_()
            inputs.zero_()
        return found

    others = {"rude": rude, "right": right, "not cleared": not_cleared}
    result = compare(model, "cross_entropy", inputs, targets, ["loop"], against=others)
    assert [row.status for row in result.rows] == [*["agrees"] * 3, "disagrees"]
    assert bool(inputs.any())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(4, 3, dtype=torch.float64))
    assert torch.get_default_dtype() == torch.float32


def test_coupled_samples():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.Flatten(), nn.LazyLinear(2))
    inputs, targets = torch.randn(4, 2, 6), torch.randn(4, 2)
    model(inputs)

    def in_batch(model, loss, inputs, targets):
        each = loss(model(inputs), targets)
        named = dict(model.named_parameters())
        rows = [torch.autograd.grad(x, list(named.values()), retain_graph=True) for x in each]
        return {k: torch.stack(g) for k, g in zip(named, zip(*rows, strict=True), strict=True)}

    result = compare(model, "mse", inputs, targets, ["loop"], against={"mine": in_batch})
    assert (result.coupled, result.agrees) == (True, False)
    assert "BatchNorm in training mode" in result.rows[1].reason
    result = compare(model.eval(), "mse", inputs, targets, ["loop"], against={"mine": in_batch})
    assert (result.coupled, result.agrees) == (False, True)


def test_a_model_that_cannot_run_on_one_sample():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    every = backends.names()
    with pytest.raises(CoupledSamplesError, match=r"layer '1' \(BatchNorm1d\)"):
        compare(model, "mse", torch.randn(4, 3), torch.randn(4, 4), every)


def test_words_are_checked_before_anything_runs():
    model, inputs, targets = problem()
    for options, words in (
        ({"backends": ["loop"]}, "nothing to compare with the loop"),
        ({"backends": ["lop"]}, "unknown backend 'lop'"),
        ({"backends": ["loop"], "against": {"loop": right}}, "name of a backend"),
        ({"backends": ["loop"], "against": {"mine": 3}}, "'mine' is neither"),
    ):
        with pytest.raises(SpecError, match=words):
            compare(model, "cross_entropy", inputs, targets, **options)


def test_a_printed_comparison_is_short_and_names_what_is_worst():
    torch.manual_seed(0)
    layers = [layer for _ in range(15) for layer in (nn.Linear(3, 3), nn.Tanh())]
    model, data = nn.Sequential(*layers), (torch.randn(4, 3), torch.randn(4, 3))
    noisy = with_mistake(lambda g: g + g.abs().mean() * torch.rand_like(g))
    others = {f"mine {k}": noisy for k in range(3)}
    found = compare(model, "mse", *data, ["loop"], against=others)
    lines = str(found).splitlines()
    assert len(lines) <= 25 and max(map(len, lines)) <= 110
    assert lines[0] == "Comparison of 4 samples in float32: DISAGREES"
    assert [line.split()[0] for line in lines[2:4]] == ["loop", "mine"]
    row = found.rows[1]
    assert any(line.split()[0] == row.worst.name for line in lines[11:])
    assert "and 27 parameters more" in str(found) and "to_json()" in lines[-1]
    assert len(found.to_json()["rows"][1]["parameters"]) == 30
    right_ones = str(compare(model, "mse", *data, ["loop", "hooks"])).splitlines()
    assert len(right_ones) == 4


def test_the_json_document(result):
    document = result.to_json()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert (document["schema"], document["version"]) == ("gradscope.compare", 1)
    assert (document["agrees"], document["samples"], document["dtype"]) == (False, N, "float64")
    assert [row["status"] for row in document["rows"]] == [row.status for row in result.rows]
    row = next(row for row in document["rows"] if row["backend"] == "not finite")
    parameter = row["parameters"][0]
    assert (parameter["relative"], parameter["kind"]) == (None, "not_finite")
    assert isinstance(result, Comparison)


@pytest.mark.parametrize(("slow", "very_slow", "calls"), [(9, 9, 5), (0, 9, 2), (0, 0, 1)])
def test_slow_calls_are_timed_less_often(slow, very_slow, calls):
    made = []
    call = lambda: (made.append(1), time.sleep(0.01))  # noqa: E731
    seconds, _ = measure(call, torch.device("cpu"), slow, very_slow)
    assert len(made) == calls
    assert 0.01 <= seconds < 5
