"""Shards: which part of a run's samples one of many workers takes.

Workers are counted from 0, as torchrun's RANK and the tasks of job arrays are.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gradscope.errors import SpecError

_SHARD = re.compile(r"(0|[1-9][0-9]{0,8})/([1-9][0-9]{0,8})")


@dataclass(frozen=True)
class Shard:
    """The part of worker `index`, from 0, of `count` workers."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def place(self, output: Path) -> Path:
        """Return the file of this shard, next to the file of the whole run."""
        name = f"{output.stem}.shard-{self.index}-of-{self.count}{output.suffix}"
        return output.with_name(name)

    def rows(self, whole: range, batch: int) -> range:
        """Return this shard's samples, cut between batches of `batch` samples.

        Raises:
            SpecError: There are fewer batches than shards.
        """
        batches = -(-len(whole) // batch)
        if batches < self.count:
            raise SpecError(
                f"{len(whole):,} samples in batches of {batch:,} are {batches:,} batches, too few "
                f"for {self.count:,} shards",
                where="shard",
                remedy=f"Use at most {batches:,} shards, or a smaller --batch-size.",
            )
        first, last = (k * batches // self.count * batch for k in (self.index, self.index + 1))
        return whole[first:last]


def parse_shard(text: str) -> Shard:
    """Return the shard that "I/N" stands for.

    Raises:
        SpecError: It has another form, or I is not below N.
    """
    match = _SHARD.fullmatch(text)
    shard = Shard(*map(int, match.groups())) if match else Shard(0, 0)
    if shard.index >= shard.count:
        remedy = "Accepted: I/N with 0 ≤ I < N: workers are counted from 0."
        raise SpecError(f"found {text!r}", where="shard", remedy=remedy)
    return shard


@dataclass(frozen=True)
class Worker:
    """One of several processes that torchrun has started."""

    shard: Shard  # what it computes
    local: int | None  # its number on this machine, which picks the GPU; None if there is none
    restarted: bool  # whether torchrun started it again, because a worker failed

    def device(self, wanted: str | None) -> str | None:
        """Return this worker's own GPU where any was asked for."""
        return f"cuda:{self.local}" if wanted == "cuda" and self.local is not None else wanted


def this_worker(environment: Mapping[str, str]) -> Worker | None:
    """Return which of several workers this process is, None where it is the only one.

    Raises:
        SpecError: RANK and WORLD_SIZE do not fit together.
    """
    count = environment.get("WORLD_SIZE", "1")
    if count == "1":
        return None
    index, local = (environment.get(key, "") for key in ("RANK", "LOCAL_RANK"))
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "")
    try:
        shard = parse_shard(f"{index}/{count}")
    except SpecError as error:
        raise SpecError(
            f"found RANK={index!r} and WORLD_SIZE={count!r}",
            where="environment",
            remedy="Start the workers with torchrun, give --shard I/N, or unset WORLD_SIZE.",
        ) from error
    return Worker(shard, int(local) if local.isdecimal() else None, restarts not in ("", "0"))
