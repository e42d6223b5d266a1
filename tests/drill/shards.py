"""A thousand shards, of which some are lost, damaged, foreign, twice there or half written.

What is promised: all of them give the file that one process would have written; anything else is
refused with one message that names the shard, and nothing is written.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from os import getpid
from pathlib import Path
from random import Random
from typing import Any

import h5py
import numpy as np
import torch

from gradscope.run import compute, prepare
from gradscope.storage import open_file
from tests.cli.forked import apart
from tests.drill.runs import RESULT, command
from tests.drill.verdicts import (
    FAILURE,
    REFUSED,
    RIGHT,
    Row,
    Setting,
    Verdict,
    is_one_message,
    judged,
    told,
)
from tests.run import project
from tests.storage.example import contents

CHAINS = ("identity", "clip:max_norm=1 | mean", "var | norm:p=1")
_ROWS = ("samples/", "norms/", "chains/0/")  # exact; aggregates depend on the order of their sums
_RTOL = 1e-12


@dataclass(frozen=True)
class Place:
    """Where shards are."""

    shards: Path  # the folder with all of them
    others: dict[str, Path]  # folders with shards of other runs, by what is different there
    count: int  # how many there are

    def name(self, k: int) -> str:
        """Return the name of shard k."""
        return f"o.shard-{k}-of-{self.count}.h5"


Way = Callable[[Place, Path, int, Random], str]  # changes a folder; returns what must be named


def drill(scratch: Path, setting: Setting, count: int) -> Iterator[Row]:
    """Yield the rows: all shards computed and merged, and each way in which some can be wrong."""
    place = _prepared(scratch, count)
    chosen = _chosen(count, setting)
    cases = [(place.shards, k, {}) for k in range(count)]
    cases += [(place.others["seed"], k, {"seed": 5}) for k in chosen]
    cases += [(place.others[name], k, {}) for name in ("weights", "code", "data") for k in chosen]
    whole = setting.all()
    yield judged(f"{count:,} shards computed", cases, partial(_computed, count), whole)
    words = [(), ("--virtual",)]
    yield judged(f"{count:,} shards merged", words, partial(_merged, scratch, place), whole)
    wrong = [(name, k) for name in WAYS for k in chosen]
    judge = partial(_refused, scratch, place, setting)
    yield judged(f"{count:,} shards, some of them wrong", wrong, judge, setting.part(0.15))


def _prepared(scratch: Path, count: int) -> Place:
    """Make a folder for the shards, and others whose run is not quite the same."""
    place = Place(
        scratch / "shards", {name: scratch / name for name in ("seed", "weights", "code", "data")},
        count,
    )  # fmt: skip
    for folder in (place.shards, *place.others.values()):
        folder.mkdir()
        project.write(folder, count)
    weights = place.others["weights"] / "weights.pt"
    state = torch.load(weights, weights_only=True)
    state["first.bias"][0] += 1e-3
    torch.save(state, weights)
    code = place.others["code"] / "model.py"
    code.write_text(code.read_text().replace(".cos()", ".sin()"))
    data = place.others["data"] / "data.npz"
    with np.load(data) as arrays:
        changed = {name: array.copy() for name, array in arrays.items()}
    changed["inputs"][count // 2] += 1
    np.savez(data, **changed)
    return place


def _chosen(count: int, setting: Setting) -> list[int]:
    """Return the shards that something happens to: the first, the last, and two between."""
    between = setting.generator("shards").sample(range(1, count - 1), 2)
    return [0, *sorted(between), count - 1][: setting.most]


def _computed(count: int, case: tuple[Path, int, dict[str, Any]]) -> Verdict:
    """Compute a shard in this process."""
    folder, k, words = case
    given = {"shard": f"{k}/{count}", "batch_size": 1, "transform": CHAINS, **words}
    job = prepare(project.spec(folder, **given))
    compute(job, job.place(folder / RESULT))
    return Verdict(RIGHT)


def _merged(scratch: Path, place: Place, words: tuple[str, ...]) -> Verdict:
    """Merge all shards, and compare them with the run of one process."""
    output = scratch / f"merged{''.join(words)}.h5"
    done = apart(lambda: command("merge", place.shards, "-q", *words, "-o", output), seconds=600)
    if done.code:
        return Verdict(FAILURE, f"merge {words}: {told(done)}")
    whole = scratch / f"whole{''.join(words)}.h5"
    spec = project.spec(place.shards, batch_size=1, transform=CHAINS)
    compute(prepare(spec), whole)
    with open_file(output) as file, open_file(whole) as single:
        found, wanted = contents(file), contents(single)
    found["attributes"].pop("sources", None)
    different = [key for key, value in wanted.items() if not _equal(key, found[key], value)]
    if different or found.keys() != wanted.keys():
        return Verdict(FAILURE, f"merge {words}: other than one process: {different}")
    return Verdict(RIGHT)


def _equal(key: str, found: Any, wanted: Any) -> bool:
    if not isinstance(wanted, np.ndarray):
        return key == "documents" or bool(found == wanted)  # norms' means are sums, too
    if key.startswith(_ROWS):
        return bool(found.tobytes() == wanted.tobytes())
    return bool(np.allclose(found, wanted, rtol=_RTOL, atol=1e-14))


def _refused(scratch: Path, place: Place, setting: Setting, case: tuple[str, int]) -> Verdict:
    """Merge shards of which some are wrong."""
    way, k = case
    folder = scratch / f"case-{getpid()}"
    folder.mkdir()
    for path in place.shards.glob("*.h5"):
        os.link(path, folder / path.name)
    wanted = WAYS[way](place, folder, k, setting.generator(way, k))
    before = sorted(folder.iterdir())
    done = apart(lambda: command("merge", folder, "-q", "-o", folder / "all.h5"), seconds=600)
    after = sorted(folder.iterdir())
    shutil.rmtree(folder)
    if not is_one_message(done, (3,)) or wanted not in done.err:
        return Verdict(FAILURE, f"{way} {k}: {wanted!r} is not named, {told(done)}")
    if before != after:
        return Verdict(FAILURE, f"{way} {k}: something was written")
    return Verdict(REFUSED)


def _rewritten(folder: Path, name: str, change: Callable[[bytearray], Any]) -> str:
    """Give a shard other content; it is a link to one that others need."""
    path = folder / name
    content = bytearray(path.read_bytes())
    path.unlink()
    change(content)
    path.write_bytes(content)
    return name


def _flip(content: bytearray, at: int, rng: Random) -> None:
    content[at] ^= 1 << rng.randrange(8)


def _lost(place: Place, folder: Path, k: int, rng: Random) -> str:
    (folder / place.name(k)).unlink()
    return f"{k:,} to {k + 1:,} (shard {k}"


def _many_lost(place: Place, folder: Path, k: int, rng: Random) -> str:
    lost = {k, *rng.sample(range(place.count), min(50, place.count // 4))}
    for number in lost:
        (folder / place.name(number)).unlink()
    return f"samples are missing: {min(lost):,} to"


def _half_written(place: Place, folder: Path, k: int, rng: Random) -> str:
    path = folder / place.name(k)
    path.rename(path.with_name(f"{path.name}.part"))
    return f"not finished: {place.name(k)}"


def _flipped(place: Place, folder: Path, k: int, rng: Random) -> str:
    name = place.name(k)
    return _rewritten(folder, name, lambda data: _flip(data, rng.randrange(len(data)), rng))


def _flipped_row(place: Place, folder: Path, k: int, rng: Random) -> str:
    with h5py.File(folder / place.name(k)) as file:
        at = file["chains/0/first.weight"].id.get_chunk_info(0).byte_offset + rng.randrange(8)
    return _rewritten(folder, place.name(k), lambda data: _flip(data, at, rng))


def _cut(place: Place, folder: Path, k: int, rng: Random) -> str:
    name = place.name(k)
    return _rewritten(
        folder, name, lambda data: data.__delitem__(slice(rng.randrange(len(data)), None))
    )


def _zeroed(place: Place, folder: Path, k: int, rng: Random) -> str:
    return _rewritten(
        folder, place.name(k), lambda data: data.__setitem__(slice(None), bytes(len(data)))
    )


def _foreign(what: str, place: Place, folder: Path, k: int, rng: Random) -> str:
    other = (place.others[what] / place.name(k)).read_bytes()
    return _rewritten(folder, place.name(k), lambda data: data.__setitem__(slice(None), other))


def _twice(place: Place, folder: Path, k: int, rng: Random) -> str:
    copy = place.name(k).replace("o.", "copy.")
    os.link(folder / place.name(k), folder / copy)
    return copy


def _another_in_its_place(place: Place, folder: Path, k: int, rng: Random) -> str:
    other = (place.shards / place.name((k + 1) % place.count)).read_bytes()
    return _rewritten(folder, place.name(k), lambda data: data.__setitem__(slice(None), other))


WAYS: dict[str, Way] = {
    "lost": _lost,
    "many lost": _many_lost,
    "half written": _half_written,
    "a bit flipped": _flipped,
    "a bit of a row flipped": _flipped_row,
    "cut short": _cut,
    "zeroed": _zeroed,
    **{f"other {what}": partial(_foreign, what) for what in ("seed", "weights", "code", "data")},
    "twice": _twice,
    "another in its place": _another_in_its_place,
}
