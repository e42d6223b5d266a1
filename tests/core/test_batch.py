"""Batches: what is accepted, and how rows are taken from nested inputs."""

from collections import OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence
from torch.nn.utils.rnn import pad_packed_sequence as padded
from torch.utils import _pytree as pytree

import gradscope
from gradscope.core.batch import Batch, call, map_tensors, tensors
from gradscope.errors import DatasetError, UnsupportedError


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


class Checked(NamedTuple("Checked", [("first", Any), ("second", Any)])):
    """A named tuple with a constructor of its own, as PackedSequence is."""

    def __new__(cls, first, second=None):
        assert first.dim() == 2
        return super().__new__(cls, first, second)


class Triple(tuple):
    __slots__ = ()

    def __new__(cls, a, b, c):
        return super().__new__(cls, (a, b, c))


class Tagged(list):
    def __init__(self, *values, tag):
        super().__init__(values)
        self.tag = tag


class Outputs(OrderedDict):
    """A dict whose entries are attributes too, and whose constructor takes keywords alone."""

    def __init__(self, *, logits, hidden):
        super().__init__(logits=logits, hidden=hidden)
        vars(self).update(self)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        vars(self)[key] = value


class Encoding(UserDict):
    pass


@dataclass(frozen=True)
class Frozen:
    tokens: Any
    length: int = 3

    def __post_init__(self):
        assert self.tokens.dim() == 2


@dataclass(slots=True)
class Slotted:
    tokens: Any
    unset: Any = None


class Registered:
    def __init__(self, tensor):
        self.tensor = tensor


pytree.register_pytree_node(
    Registered, lambda held: ([held.tensor], None), lambda values, _: Registered(values[0])
)


_X = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    ("tree", "read"),
    [
        (pack_sequence([_X, _X[:1]]), lambda tree: tree.data),
        (Checked(_X, 3), lambda tree: tree.first),
        (Triple(_X, 1, "a"), lambda tree: tree[0]),
        (Tagged(_X, tag="b"), lambda tree: tree[0] if tree.tag == "b" else None),
        (Outputs(logits=_X, hidden=None), lambda tree: tree.logits),
        (Encoding({"tokens": _X}), lambda tree: tree["tokens"]),
        (defaultdict(list, tokens=_X), lambda tree: tree["tokens"] if tree["no"] == [] else None),
        (MappingProxyType({"tokens": _X}), lambda tree: tree["tokens"]),
        (deque([_X]), lambda tree: tree[0]),
        (torch.max(_X, 0), lambda tree: tree.values),
        (Frozen(_X), lambda tree: tree.tokens if tree.length == 3 else None),
        (Slotted(_X), lambda tree: tree.tokens),
        (Registered(_X), lambda tree: tree.tensor),
    ],
    ids=lambda value: type(value).__name__,
)
def test_containers_of_any_class_are_made_anew_without_their_constructors(tree, read):
    before = read(tree)
    made = map_tensors(lambda t: t.sum(-1) if t.is_floating_point() else t, tree)
    assert type(made) is (dict if isinstance(tree, MappingProxyType) else type(tree))
    assert torch.equal(read(made), before.sum(-1))
    assert read(tree) is before
    assert any(t is before for t in tensors(tree))


@pytest.mark.parametrize("tree", [_X.shape, Triple(1, 2, 3), Encoding(a=1), None, "text", Tagged])
def test_what_holds_no_tensor_is_left_as_it_is(tree):
    assert map_tensors(torch.neg, tree) is tree
    assert tensors(tree) == []


class Packing(nn.Module):
    """Packs its sequences; its only dropout is on what the layer returns."""

    def __init__(self, *, random):
        super().__init__()
        self.lstm, self.random = nn.LSTM(3, 2, batch_first=True), random

    def forward(self, x):
        lengths = torch.full((len(x),), x.shape[1])
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        h, _ = padded(self.lstm(packed)[0], batch_first=True)
        return nn.functional.dropout(h, 0.5, training=self.random).mean((1, 2))


def test_a_random_model_that_packs_sequences_is_refused_as_random():
    given = torch.randn(3, 5, 3), torch.randn(3)
    assert len(gradscope.norms(Packing(random=False).eval(), "mse", *given)) == 3
    with pytest.raises(UnsupportedError, match="the forward pass is random"):
        gradscope.norms(Packing(random=True).eval(), "mse", *given)


def test_packed_sequences_among_inputs_are_refused():
    packed = pack_sequence([torch.ones(1, 2)] * 3)  # as many positions as targets
    assert isinstance(packed, PackedSequence)
    with pytest.raises(DatasetError, match=r"PackedSequence of 3 sequences: .* \(3, 2\)") as caught:
        Batch.of({"x": (packed,)}, torch.ones(3))
    assert "pack_padded_sequence" in caught.value.remedy


def test_the_answer_of_a_tokenizer_is_given_by_keyword():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 2)

        def forward(self, input_ids, attention_mask):
            return (self.table(input_ids) * attention_mask[..., None]).sum(1)

    model, ids, mask = Model(), torch.tensor([[1, 2], [3, 0]]), torch.tensor([[1, 1], [1, 0]])
    found = gradscope.norms(model, "mse", Encoding(input_ids=ids, attention_mask=mask), _X[:, :2])
    right = gradscope.norms(model, "mse", (ids, mask), _X[:, :2])
    assert isinstance(right, Tensor)
    assert torch.equal(found, right)
