"""Accumulators: sums in place change nothing else, and nothing at all if memory runs out."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.stages.reducers.accumulator import Accumulator
from gradscope.stages.reducers.base import State
from tests.stages.examples import example, reducer


def sums(*values: float, dtype: torch.dtype = torch.float64) -> State:
    return {"n": torch.tensor(1.0, dtype=torch.float64), "sum:w": torch.tensor(values, dtype=dtype)}


def test_states_that_share_tensors_are_added_apart() -> None:
    first, total = sums(1.0, 2.0), Accumulator({k: reducer("sum") for k in "ab"})
    total.add({"a": {**first}, "b": {**first}})
    total.add({"a": sums(10.0, 20.0), "b": sums(100.0, 200.0)})
    assert first["sum:w"].tolist() == [1.0, 2.0]
    assert total.states["a"]["sum:w"].tolist() == [11.0, 22.0]
    assert total.result("b")["w"].tolist() == [101.0, 202.0]
    assert [*total.states] == ["a"]


def test_states_from_before_are_left_as_they_were() -> None:
    before = sums(1.0)
    total = Accumulator({0: reducer("sum")}, {0: before})
    for _ in range(3):
        total.add({0: sums(10.0)})
    assert before["sum:w"].tolist() == [1.0]
    assert total.result(0)["w"].tolist() == [31.0]


def test_nothing_changes_where_one_reducer_runs_out_of_memory() -> None:
    def merge(a: State, b: State) -> State:
        raise MemoryError

    bad = reducer("max")._replace(merge=merge)
    total = Accumulator({"sum": reducer("sum"), "max": bad})
    one = {"n": torch.tensor(1.0), "value:w": torch.ones(1)}
    total.add({"sum": sums(1.0), "max": {**one}})
    before = {
        key: {kind: t.clone() for kind, t in own.items()} for key, own in total.states.items()
    }
    with pytest.raises(MemoryError):
        total.add({"sum": sums(10.0), "max": {**one}})
    torch.testing.assert_close(total.states, before, rtol=0, atol=0)


def test_sums_are_carried_in_float64_and_narrow_again_if_asked_for() -> None:
    total = Accumulator({k: reducer("sum") for k in "ab"})
    for value in (1e8, 1.0, -1e8):
        total.add({k: sums(value, dtype=torch.float32) for k in "ab"})
    wide, narrow = total.result("a")["w"], total.result("b", narrow=True)["w"]
    assert (wide.dtype, narrow.dtype) == (torch.float64, torch.float32)
    assert wide.tolist() == narrow.tolist() == [1.0]


def test_a_first_state_is_carried_when_more_samples_come() -> None:
    gradients, rows = example(torch.float32)
    total = Accumulator({0: reducer("mean")})
    first, second = gradients.select(slice(0, 9)), gradients.select(slice(9, None))
    total.add({0: reducer("mean").start(first)}, carry=False)
    assert {t.dtype for key, t in total.states[0].items() if key != "n"} == {torch.float32}
    total.carry()
    total.add({0: reducer("mean").start(second)}, carry=False)
    for name, value in total.result(0).items():
        assert value.dtype == torch.float64
        np.testing.assert_allclose(value, rows[name].mean(0), rtol=1e-5, atol=1e-6)


def test_a_state_may_change_its_form_between_batches() -> None:
    """A quantile keeps values up to a million numbers, and counts them in buckets beyond."""
    torch.manual_seed(0)
    model = nn.Linear(500, 3, bias=False)
    x, y = torch.randn(701, 500), torch.randint(0, 3, (701,))
    rows = gradscope.per_sample_gradients(model, "cross_entropy", x, y)["weight"]
    median = "quantile:q=0.5"
    found: Tensor = gradscope.expectation(model, "cross_entropy", median, x, y)["weight"]
    right = rows.double().quantile(0.5, dim=0)
    torch.testing.assert_close(found, right, rtol=0.02, atol=1e-9)
