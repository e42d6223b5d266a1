"""Shards: their form, their samples, and what torchrun's environment says."""

from pathlib import Path

import pytest

from gradscope.config import Shard, parse_shard, this_worker
from gradscope.errors import SpecError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "0"}


def test_a_shard_and_its_file() -> None:
    assert parse_shard("0/1") == Shard(0, 1)
    assert parse_shard("7/1000") == Shard(7, 1000)
    assert str(Shard(3, 8)) == "3/8"
    assert Shard(3, 8).place(Path("a/OUT.h5")) == Path("a/OUT.shard-3-of-8.h5")
    assert Shard(0, 2).place(Path("a.b/out")) == Path("a.b/out.shard-0-of-2")


@pytest.mark.parametrize(
    "text", ["", "1", "8/8", "9/8", "0/0", "-1/8", "01/8", "1/08", "1/8 ", "a/b", "1//8", "1.0/8"]
)
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="counted from 0"):
        parse_shard(text)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8])
@pytest.mark.parametrize(("samples", "batch"), [(100, 10), (95, 10), (8, 1), (1797, 200)])
def test_shards_are_cut_between_batches(samples: int, batch: int, count: int) -> None:
    whole = range(5, 5 + samples)
    shares = [Shard(k, count).rows(whole, batch) for k in range(count)]
    assert [i for share in shares for i in share] == list(whole)
    assert all((share.start - 5) % batch == 0 for share in shares)
    batches = [-(-len(share) // batch) for share in shares]
    assert min(batches) >= 1 and max(batches) - min(batches) <= 1


def test_more_shards_than_batches() -> None:
    with pytest.raises(SpecError, match="are 3 batches, too few for 4 shards"):
        Shard(0, 4).rows(range(25), 10)


def test_a_worker_of_torchrun() -> None:
    worker = this_worker(TORCHRUN)
    assert worker is not None
    assert (worker.shard, worker.local, worker.restarted) == (Shard(3, 8), 1, False)
    assert worker.device("cuda") == "cuda:1"
    assert worker.device("cuda:0") == "cuda:0"
    assert worker.device("cpu") == "cpu" and worker.device(None) is None
    again = this_worker(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"})
    assert again is not None and again.restarted
    assert this_worker({}) is None
    assert this_worker({"RANK": "0", "WORLD_SIZE": "1"}) is None
    without = this_worker({"RANK": "1", "WORLD_SIZE": "2"})
    assert without is not None and without.device("cuda") == "cuda"


@pytest.mark.parametrize(
    "environment",
    [{"WORLD_SIZE": "8"}, {"WORLD_SIZE": "8", "RANK": "8"}, {"WORLD_SIZE": "x", "RANK": "0"}],
)
def test_an_environment_that_does_not_fit(environment: dict[str, str]) -> None:
    with pytest.raises(SpecError, match="Start the workers with torchrun"):
        this_worker(environment)
