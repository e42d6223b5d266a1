"""Batches: what is accepted, and how rows are taken from nested inputs."""

from typing import NamedTuple

import pytest
import torch

from gradscope.core.batch import Batch, call, map_tensors
from gradscope.errors import DatasetError


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def nested():
    x = torch.arange(12.0).reshape(4, 3)
    inputs = {"x": x, "more": (x[:, 0] + 100, [Pair(x.long(), torch.tensor(7.0))]), "flag": True}
    return Batch.of(inputs, torch.arange(4))


def test_mapping_keeps_the_nest():
    doubled = map_tensors(lambda t: 2 * t, nested().inputs)
    pair = doubled["more"][1][0]
    assert isinstance(pair, Pair) and doubled["flag"] is True
    assert float(pair.second) == 14.0
    assert isinstance(doubled["more"], tuple) and isinstance(doubled["more"][1], list)


@pytest.mark.parametrize(
    "rows",
    [slice(1, 3), torch.tensor([3, 0, 0]), torch.tensor([True, False, False, True])],
    ids=["slice", "positions", "mask"],
)
def test_rows_are_taken_everywhere_but_from_constants(rows):
    batch = nested()
    part = batch.select(rows)
    right = torch.arange(12.0).reshape(4, 3)[rows]
    assert len(part) == len(right)
    assert torch.equal(part.inputs["x"], right)
    assert torch.equal(part.inputs["more"][0], right[:, 0] + 100)
    assert torch.equal(part.inputs["more"][1][0].first, right.long())
    assert float(part.inputs["more"][1][0].second) == 7.0
    assert torch.equal(part.targets, torch.arange(4)[rows])
    assert torch.equal(part.index, torch.arange(4)[rows])


@pytest.mark.parametrize("n", [1, 3, 4, 7])
def test_resized_repeats_from_the_first(n):
    batch = nested().resized(n)
    assert batch.index.tolist() == [k % 4 for k in range(n)]
    assert batch.inputs["x"][:, 0].tolist() == [3.0 * (k % 4) for k in range(n)]


def test_only_floating_point_tensors_are_cast():
    batch = Batch.of(
        (torch.ones(2), torch.ones(2, dtype=torch.long), torch.ones(2, dtype=torch.complex64)),
        torch.ones(2, dtype=torch.bool),
    ).to(None, torch.float64)
    assert [t.dtype for t in batch.inputs] == [torch.float64, torch.long, torch.complex64]
    assert batch.targets.dtype == torch.bool


@pytest.mark.parametrize("inputs", [torch.ones(0, 3), torch.tensor(1.0), (), {}, None], ids=str)
def test_no_sample_is_an_error(inputs):
    with pytest.raises(DatasetError, match="no sample"):
        Batch.of(inputs)


def test_different_lengths_are_an_error_that_names_them():
    with pytest.raises(DatasetError, match=r"\[4, 3\]") as caught:
        Batch.of(torch.ones(4, 2), torch.ones(3))
    assert "(4, 2)" in str(caught.value) and "(3,)" in str(caught.value)


def test_call_follows_the_form_of_the_inputs():
    def model(*args, **kwargs):
        return args, kwargs

    assert call(model, 3) == ((3,), {})
    assert call(model, (3, 4)) == ((3, 4), {})
    assert call(model, [3, 4]) == ((3, 4), {})
    assert call(model, {"x": 3}) == ((), {"x": 3})
