"""What the texts of settings stand for: samples, functions, losses, shards; torchrun's workers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradscope.config import (
    Shard,
    function_of,
    parse_loss,
    parse_samples,
    parse_shard,
    split_reference,
    this_worker,
)
from gradscope.errors import SpecError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "0"}


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_samples, "0:10", slice(0, 10)),
        (parse_samples, "5:", slice(5, None)),
        (parse_samples, ":7", slice(None, 7)),
        (parse_samples, ":", slice(None, None)),
        (parse_samples, "00:1", slice(0, 1)),
        (parse_shard, "0/1", Shard(0, 1)),
        (parse_shard, "7/1000", Shard(7, 1000)),
        (split_reference, "a b/m.py:f.g", ("a b/m.py", "f.g")),
        (split_reference, "package.module:f", ("package.module", "f")),
    ],
)
def test_a_text_and_its_value(parse: Callable[[str], Any], text: str, value: Any) -> None:
    assert parse(text) == value
    if isinstance(value, Shard):
        assert str(value) == text


SAMPLES = ["", "5", "a:b", "-1:3", "5:5", "7:3", ":0", "1:2:3", "1 : 2", "١:٢"]
SHARDS = ["", "1", "8/8", "9/8", "0/0", "-1/8", "01/8", "1/08", "1/8 ", "a/b", "1//8", "1.0/8"]
FUNCTIONS = ["model.py:", ":build", "a b:c", "a..b:c", "m:1x", "m:"]
OTHERS = [
    (parse, text, words)
    for parse, texts, words in (
        (parse_samples, SAMPLES, "A:B"),
        (parse_shard, SHARDS, "counted from 0"),
        (split_reference, FUNCTIONS, "FILE.py:NAME"),
    )
    for text in texts
]


@pytest.mark.parametrize(("parse", "text", "words"), OTHERS)
def test_texts_of_another_form(parse: Callable[[str], Any], text: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("mse", "mse", {}),
        ("huber:delta=2", "huber", {"delta": "2"}),
        ('nll:weight="1,2",per_sample=sum', "nll", {"weight": "1,2", "per_sample": "sum"}),
        ("a b/my.py:f", "a b/my.py:f", {}),
        ("a|b/my.py:f.g:tau=1", "a|b/my.py:f.g", {"tau": "1"}),
        ("my.py:f:path=other.py:g", "my.py:f", {"path": "other.py:g"}),
        ("package.module:f:tau=1,x=y", "package.module:f", {"tau": "1", "x": "y"}),
    ],
)
def test_the_parts_of_a_loss(text: str, name: str, arguments: dict[str, str]) -> None:
    stage = parse_loss(text)
    assert (stage.name, stage.arguments) == (name, arguments)
    assert function_of(text) == (name if ":" in name else None)
    assert parse_loss(str(stage)).arguments == arguments


def test_arguments_of_a_table_are_those_of_the_text() -> None:
    found = parse_loss("x", {"weight": [1, 2.5], "label_smoothing": 0.1, "full": True})
    assert str(found) == 'x:weight="1,2.5",label_smoothing=0.1,full=true'
    assert parse_loss(str(found)).arguments == found.arguments


@pytest.mark.parametrize(
    ("text", "table", "words"),
    [
        ("x:a=1", {"a": 2}, "twice"),
        ("x", {"a": {"b": 1}}, "a list of numbers"),
        ("x", {"a": ["b"]}, "a list of numbers"),
        ("x:a=", {}, "name=value"),
        ("x:a=1,a=2", {}, "twice"),
    ],
)
def test_losses_of_another_form(text: str, table: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=r"(?s)^loss.*" + words):
        parse_loss(text, table)


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize(("samples", "batch"), [(100, 10), (95, 10), (8, 1)])
def test_shards_are_cut_between_batches(samples: int, batch: int, count: int) -> None:
    whole = range(5, 5 + samples)
    shares = [Shard(k, count).rows(whole, batch) for k in range(count)]
    assert [i for share in shares for i in share] == list(whole)
    assert all((share.start - 5) % batch == 0 for share in shares)
    batches = [-(-len(share) // batch) for share in shares]
    assert min(batches) >= 1 and max(batches) - min(batches) <= 1


def test_the_file_of_a_shard_and_more_shards_than_batches() -> None:
    assert Shard(3, 8).place(Path("a/OUT.h5")) == Path("a/OUT.shard-3-of-8.h5")
    assert Shard(0, 2).place(Path("a.b/out")) == Path("a.b/out.shard-0-of-2")
    with pytest.raises(SpecError, match="for 4 shards: 25 samples make 3 batches"):
        Shard(0, 4).rows(range(25), 10)
    with pytest.raises(SpecError, match=r"1 sample make 1 batch\nUse at most 1 shard, or"):
        Shard(0, 2).rows(range(1), 10)


def test_a_worker_of_torchrun() -> None:
    worker = this_worker(TORCHRUN)
    assert worker is not None
    assert (worker.shard, worker.local, worker.restarted) == (Shard(3, 8), 1, False)
    devices = {"cuda": "cuda:1", "cuda:0": "cuda:0", "cpu": "cpu", None: None}
    assert {wanted: worker.device(wanted) for wanted in devices} == devices
    again = this_worker(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"})
    assert again is not None and again.restarted
    assert this_worker({}) is this_worker({"RANK": "0", "WORLD_SIZE": "1"}) is None
    without = this_worker({"RANK": "1", "WORLD_SIZE": "2"})
    assert without is not None and without.device("cuda") == "cuda"


@pytest.mark.parametrize(
    "environment",
    [{"WORLD_SIZE": "8"}, {"WORLD_SIZE": "8", "RANK": "8"}, {"WORLD_SIZE": "x", "RANK": "0"}],
)
def test_an_environment_that_does_not_fit(environment: dict[str, str]) -> None:
    with pytest.raises(SpecError, match="Start the workers with torchrun"):
        this_worker(environment)
