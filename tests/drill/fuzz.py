"""Thousands of damaged files: the right result, or one error of ours, soon and in little memory.

What is right is what is in the file: where its format has checksums, what was in it before it was
damaged; where it has none, what another reader finds in it.
"""

import csv
import json
import random
import resource
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from os import getpid
from pathlib import Path
from types import FrameType
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.numpy
import safetensors.torch
import torch

from gradscope.config import CheckpointSpec, DatasetSpec, ModelSpec, load, resolve
from gradscope.core.batch import tensors
from gradscope.errors import GradscopeError
from gradscope.run import merge
from gradscope.sources.data import open_dataset
from gradscope.sources.models import load_model
from gradscope.sources.weights import load_into
from gradscope.stats import summarize
from gradscope.storage import open_file
from tests import fuzz_files
from tests.cli.forked import apart
from tests.drill.runs import RESULT, SHARDS
from tests.drill.verdicts import FAILURE, REFUSED, RIGHT, Row, Setting, Verdict, judged, told
from tests.storage.example import PLAN, contents, with_layout, write

MEMORY = 4 * 2**30  # bytes that reading one file may take
TOGETHER = 25  # cases in one process
_NUMBERS = (2**63 - 1, 2**62, 2**40, 2**31, 2**32 - 1, 2**64 - 1, 0, 0x7FF8 << 48, 0x7FC00000)
SECONDS = 20  # that reading one file may take

_BYTES = [b"\0", b"\xff" * 8, b"\x80", b"{", b"[" * 40, b'"', b"'", b"=", b"9" * 30, b"\n", b"../"]

Found = dict[str, Any]  # arrays by name, or whatever else there is in a file
Read = Callable[[Path], Found]


@dataclass(frozen=True)
class Kind:
    """A kind of file."""

    files: Mapping[str, bytes]  # what is in the folder, by name
    damaged: str  # which of them is damaged
    read: Read  # how gradscope reads it
    other: Read | None = None  # how another reader does; None where checksums tell what is damaged
    # whether any content is right that can be read: a file that a user writes
    lenient: bool = False
    weight: int = 4  # how often it is taken


def drill(scratch: Path, setting: Setting, files: int) -> Iterator[Row]:
    """Yield a row for each group of kinds."""
    inputs = scratch / "good"
    inputs.mkdir()
    groups = {
        "fuzzed checkpoints": (checkpoints() | hugging_face(inputs / "hf"), 0.25),
        "fuzzed data files": (data(), 0.4),
        "fuzzed run files and specs": (texts(), 0.1),
        "fuzzed result files": (results(inputs), 0.2),
        "fuzzed shards and stopped runs": (unfinished(inputs), 0.05),
    }
    for drill, (kinds, share) in groups.items():
        count = min(round(files * share), setting.most or files)
        numbers = [range(k, min(k + TOGETHER, count)) for k in range(0, count, TOGETHER)]
        row = judged(drill, numbers, Group(drill, kinds, scratch, setting), setting.part(0.15))
        row.all = count
        yield row


class Group:
    """Judges files of some kinds, by their numbers."""

    def __init__(
        self, name: str, kinds: Mapping[str, Kind], scratch: Path, setting: Setting
    ) -> None:
        self._name, self._kinds, self._scratch, self._setting = name, kinds, scratch, setting
        self._right: dict[str, Found] = {}

    def __call__(self, numbers: range) -> list[Verdict]:
        """Judge some files in a process of their own, which a file may bring down."""
        left, verdicts = list(numbers), []
        while left:
            done = apart(partial(self._judge_all, left), seconds=TOGETHER * SECONDS)
            lines = [json.loads(line) for line in done.out.splitlines()]
            verdicts += [Verdict(*line) for line in lines]
            left = left[len(lines) :]
            if left:  # the first of them ended the process
                verdicts.append(Verdict(FAILURE, f"{self._name} {left[0]}: {told(done)}"))
                left = left[1:]
        return verdicts

    def _judge_all(self, numbers: list[int]) -> None:
        warnings.simplefilter("error")
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))
        for number in numbers:
            verdict = self.judge(number)
            print(json.dumps([verdict.kind, verdict.text]), flush=True)

    def judge(self, number: int) -> Verdict:
        """Damage a file of one of the kinds, and say what came of it."""
        rng = self._setting.generator(self._name, number)
        name = rng.choices(list(self._kinds), [kind.weight for kind in self._kinds.values()])[0]
        kind, folder = self._kinds[name], self._scratch / f"file-{getpid()}"
        place = _laid(kind, folder)
        wanted = kind.read(place) if name not in self._right else self._right[name]
        self._right[name] = wanted
        shutil.rmtree(folder)
        place = _laid(kind, folder)
        damaged = folder / kind.damaged
        content = damaged.read_bytes()
        damaged.write_bytes(mutated(content, rng))
        verdict, text = _verdict(kind, place, wanted)
        if verdict == FAILURE:  # the file is kept, to be looked at
            kept = Path("build", "drill", f"{self._setting.seed}-{name}-{number}")
            shutil.copytree(folder, kept, dirs_exist_ok=True)
            text = f"{text}; kept in {kept}"
        shutil.rmtree(folder)
        return Verdict(verdict, f"{name} {number}: {text}")


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Return a file with some damage: often very little of it."""
    data, way, at = bytearray(content), rng.random(), rng.randrange(len(content))
    if way < 0.3:  # one to three bits are flipped
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif way < 0.5:  # a huge, negative or strange number: a length, a size, a NaN
        size = rng.choice((2, 4, 8))
        number = rng.choice(_NUMBERS) % 2 ** (8 * size)
        data[at : at + size] = number.to_bytes(size, rng.choice(("little", "big")))
    elif way < 0.6:  # two blocks are in each other's place
        other, size = rng.randrange(len(data)), rng.choice((8, 64, 512, 4096))
        size = min(size, len(data) - max(at, other))
        a, b = data[at : at + size], data[other : other + size]
        data[at : at + size], data[other : other + size] = b, a
    else:  # one to four accidents
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(content) + 1)
            length = rng.choice((1, 2, 8, 64, len(content) // 3))
            part = content[at : at + length]
            content = rng.choice(_ACCIDENTS)(content, at, length, part, rng)
        return content
    return bytes(data)


_Accident = Callable[[bytes, int, int, bytes, random.Random], bytes]
_ACCIDENTS: list[_Accident] = [
    lambda c, at, n, part, rng: c[:at],  # cut off
    lambda c, at, n, part, rng: c[:at] + c[at + n :],  # a hole
    lambda c, at, n, part, rng: c[:at] + part * rng.randint(2, 5) + c[at + n :],  # repeated
    lambda c, at, n, part, rng: c[:at] + bytes(b ^ rng.randrange(256) for b in part) + c[at + n :],
    lambda c, at, n, part, rng: c[:at] + rng.choice(_BYTES) + c[at + n :],
    lambda c, at, n, part, rng: c[at:] + c[:at],  # turned round
    lambda c, at, n, part, rng: c[:at] + bytes(len(part)) + c[at + n :],  # zeroed
]


def _laid(kind: Kind, folder: Path) -> Path:
    """Write a kind's files, and return what is to be read."""
    folder.mkdir()
    for name, content in kind.files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder / kind.damaged


def _verdict(kind: Kind, place: Path, wanted: Found) -> tuple[str, str]:
    """Read a damaged file, and compare what comes of it."""
    try:
        signal.signal(signal.SIGALRM, _too_slow)
        signal.alarm(SECONDS)
        try:
            found = kind.read(place)
        finally:
            signal.alarm(0)
    except GradscopeError as error:
        good = error.exit_code in (2, 3, 6) and error.remedy and str(place.parent) in str(error)
        return (REFUSED, "") if good else (FAILURE, f"a poor error: {error!r} {error}")
    except BaseException as error:
        return FAILURE, f"{type(error).__name__}: {error}"[:500]
    if kind.lenient or alike(found, wanted):
        return RIGHT, ""
    if kind.other is None:
        return FAILURE, "it was read, with other content"
    try:
        other = kind.other(place)
    except Exception as error:
        return FAILURE, f"it was read, where another reader says {error!r}"[:500]
    if alike(found, other):
        return RIGHT, ""
    return FAILURE, f"it was read as {found}, by another reader as {other}"[:1000]


def _too_slow(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"more than {SECONDS} seconds")


def alike(found: Found, wanted: Found) -> bool:
    """Whether two contents are equal, numbers in the format of the first."""
    return found.keys() == wanted.keys() and all(
        np.array_equal(a, np.asarray(wanted[key]).astype(a.dtype), equal_nan=a.dtype.kind in "fc")
        if isinstance(a, np.ndarray)
        else a == wanted[key]
        for key, a in found.items()
    )


# Checkpoints


def checkpoints() -> dict[str, Kind]:
    """Return checkpoints of every format; torch's archives have checksums, others none."""
    good, shard = fuzz_files.checkpoints(), fuzz_files.companions()["shard.safetensors"]
    return {
        "w.pt": Kind({"w.pt": good["w.pt"]}, "w.pt", _weights),
        "old.pt": Kind({"old.pt": good["old.pt"]}, "old.pt", _weights, _by_torch),
        "w.safetensors": Kind(
            {"w.safetensors": good["w.safetensors"]}, "w.safetensors", _weights, _by_safetensors
        ),
        "index.json": Kind(
            {"index.json": good["index.json"], "shard.safetensors": shard}, "index.json", _weights
        ),
    }


def hugging_face(folder: Path) -> dict[str, Kind]:
    """Return the two files of a model folder."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 4, "n_layer": 1, "n_head": 1}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)).save_pretrained(folder)
    names = ("config.json", "model.safetensors")
    files = {f"hf/{name}": (folder / name).read_bytes() for name in names}
    return {
        "config.json": Kind(files, "hf/config.json", _held, lenient=True, weight=1),
        "hf": Kind(files, "hf/model.safetensors", _held, _by_safetensors, weight=1),
    }


def _arrays(state: Mapping[str, Any]) -> Found:
    return {name: np.asarray(value) for name, value in state.items()}


def _weights(path: Path) -> Found:
    model = fuzz_files.model()
    load_into(model, path)
    return _arrays(model.state_dict())


def _held(path: Path) -> Found:
    spec = CheckpointSpec(path=path.parent)
    model = load_model(ModelSpec(factory="checkpoint"), spec).model
    state = dict(model.named_parameters())
    return {name.removeprefix("model."): value.detach().numpy() for name, value in state.items()}


def _by_torch(path: Path) -> Found:
    found = torch.load(path, weights_only=True)  # the name of what holds the tensors is no matter
    return _arrays(next(held for held in found.values() if isinstance(held, dict)))


def _by_safetensors(path: Path) -> Found:
    return _arrays(safetensors.torch.load(path.read_bytes()))


# Data


def data() -> dict[str, Kind]:
    """Return data files of every format; of these, npz has checksums."""
    others: dict[str, Read | None] = {
        "plain.npz": None,
        "packed.npz": None,
        "single.npy": lambda path: _pair(np.load(path)),
        "data.safetensors": lambda path: _pair(safetensors.numpy.load(path.read_bytes())),
        "data.h5": _by_h5py,
        "data.csv": _by_csv,
        "lines.jsonl": _by_json,
        "data.parquet": lambda path: _of_table(pq.read_table(path)),
        "data.arrow": lambda path: _of_table(pa.ipc.open_stream(path.read_bytes()).read_all()),
    }
    good = fuzz_files.data_files()
    assert others.keys() == good.keys()
    return {name: Kind({name: good[name]}, name, _samples, others[name]) for name in good}


def _samples(path: Path) -> Found:
    columns = fuzz_files.columns_of(path)
    return _read(DatasetSpec.model_validate({"path": path, "columns": columns}))


def _read(spec: DatasetSpec) -> Found:
    data = open_dataset(spec)
    batch = data.batch(range(len(data)))
    data.ids(batch.index)
    found = tensors((batch.inputs, batch.targets))
    assert all(len(tensor) == len(batch) for tensor in found)
    return dict(zip(("inputs", "targets"), (t.numpy() for t in found), strict=False))


def _pair(arrays: Any) -> Found:
    return {name: np.asarray(arrays[name]) for name in ("inputs", "targets")}


def _by_h5py(path: Path) -> Found:
    with h5py.File(path) as file:
        return _pair({name: file[name][...] for name in ("inputs", "targets")})


def _by_csv(path: Path) -> Found:
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = [row for row in csv.DictReader(file) if any(row.values())]
    columns = ([float(row[name] or "nan") for row in rows] for name in ("a", "b", "label"))
    *inputs, targets = columns  # an empty field is NaN
    return _pair({"inputs": np.stack(inputs, 1), "targets": targets})


def _by_json(path: Path) -> Found:
    text = path.read_bytes().decode("utf-8-sig")  # a carriage return in a line does not end it
    lines = [line for line in text.split("\n") if line.strip()]
    rows = [json.loads(line) for line in lines]
    names = ("inputs", "targets")  # what a line does not have is NaN
    return _pair({name: [row.get(name, np.nan) for row in rows] for name in names})


def _of_table(table: pa.Table) -> Found:
    return _pair({name: table[name].to_pylist() for name in ("inputs", "targets")})


# Run files


def texts() -> dict[str, Kind]:
    """Return what users write: whatever can be read of it is meant."""
    more = fuzz_files.companions() | fuzz_files.checkpoints()

    def run(path: Path) -> Found:
        return {"run": load(path)}

    def described(path: Path) -> Found:
        """Read the samples that a dataset spec describes."""
        layer = {"dataset": {"path": path}, "model": {"factory": "checkpoint"}}
        layer |= {"checkpoint": {"path": "w.pt"}, "loss": {"name": "mse"}}
        return _read(resolve(None, layer).dataset)

    good = {"run.toml": (fuzz_files.RUN, run), "dataset.toml": (fuzz_files.DATASET, described)}
    return {
        name: Kind(more | {name: text.encode()}, name, read, lenient=True)
        for name, (text, read) in good.items()
    }


# Results


def results(scratch: Path) -> dict[str, Kind]:
    """Return result files of every layout: every byte of them has a checksum."""
    plans = {
        "dense.h5": with_layout("dense"),
        "factored.h5": with_layout("factored"),
        "mixed.h5": PLAN,
    }
    kinds = {}
    for name, plan in plans.items():
        write(scratch / name, plan)
        kinds[name] = Kind({name: (scratch / name).read_bytes()}, name, _result)
    return kinds


def _result(path: Path) -> Found:
    with open_file(path) as file:
        found = contents(file)
        states = {f"states/{k}/{n}": v for k, s in file.states.items() for n, v in s.items()}
        return found | states | {"summary": repr(summarize(file))}


def unfinished(scratch: Path) -> dict[str, Kind]:
    """Return shards to be merged, and what a stopped run leaves."""
    from tests.drill import runs

    made = runs.prepared(scratch.parent.parent)
    shards = {f"o.shard-{k}-of-{SHARDS}.h5": b"" for k in range(SHARDS)}
    shards = {name: (made / name).read_bytes() for name in shards}
    stopped = scratch / RESULT
    with suppress(KeyboardInterrupt):
        write(stopped, stop_at=64)
    names = [f"{RESULT}.part", f"{RESULT}.part.progress"]
    parts = {name: (scratch / name).read_bytes() for name in names}
    return {
        **{name: Kind(shards, name, _merged) for name in shards},
        **{name: Kind(parts, name, _gone_on) for name in names},
    }


def _merged(path: Path) -> Found:
    output = path.parent / "merged.h5"
    try:
        merge([path.parent / f"o.shard-{k}-of-{SHARDS}.h5" for k in range(SHARDS)], output)
    except GradscopeError:
        assert not list(path.parent.glob("merged*")), "something was written"
        raise
    return {"bytes": output.read_bytes()}


def _gone_on(path: Path) -> Found:
    output = path.parent / RESULT
    try:
        write(output, resume=True)
    except GradscopeError:
        assert not output.exists(), "something was written"
        raise
    return {"bytes": output.read_bytes()}
