"""Mutated run files and checkpoints: whatever they hold, the answer is ours, and it comes soon.

    python -m tests.fuzz --rounds 10000 --seed 1

Each round damages a good file and reads it in this process. The outcome is a success or a
`GradscopeError`; anything else, or more than `SECONDS` for one file, is a finding.
"""

import argparse
import io
import json
import random
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import safetensors.torch
import torch
from torch import nn

from gradscope.core.spec import load
from gradscope.errors import GradscopeError
from gradscope.sources import load_into

SECONDS = 20
RUN = """
version = 1
[model]
factory = "model.py:build"
kwargs = { width = 3, names = ["a", "b"], date = 2024-01-02 }
[checkpoint]
path = "weights.pt"
key = "ema.module"
[dataset]
path = "data.npz"
inputs = { x = "a", y = "b" }
targets = ["labels"]
dtype = { a = "float32" }
scale = { a = 0.5 }
reshape = { a = [-1, 8] }
[loss]
name = "loss.py:f:a=1"
kwargs = { weight = [1.0, 2.0] }
[compute]
backend = "auto"
transform = ["clip:max_norm=1.0 | mean", 'mine.py:f:with="a.h5:x | y"']
samples = "0:10"
batch_size = 4
seed = 0
[compare]
backends = ["loop", "hooks"]
"""
_BYTES = [b"\0", b"\xff" * 8, b"\x80", b"{", b"[" * 40, b'"', b"'", b"=", b"9" * 30, b"\n", b"../"]


def good_files() -> dict[str, bytes]:
    """Return one good file of each kind, by name."""
    state = model().state_dict()
    files = {"run.toml": RUN.encode()}
    for name, options in (("w.pt", {}), ("old.pt", {"_use_new_zipfile_serialization": False})):
        buffer = io.BytesIO()
        torch.save({"epoch": 3, "state_dict": state}, buffer, **options)
        files[name] = buffer.getvalue()
    files["w.safetensors"] = safetensors.torch.save(state)
    table = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(state, "shard.safetensors")}
    files["index.json"] = json.dumps(table).encode()
    return files


def model() -> nn.Module:
    """Return what the checkpoints are of."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Return the file with one to four accidents."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(content) + 1)
        length = rng.choice((1, 2, 8, 64, len(content) // 3))
        part = content[at : at + length]
        content = rng.choice(_ACCIDENTS)(content, at, length, part, rng)
    return content


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


def outcome(name: str, path: Path) -> str:
    """Read a file and say what came of it.

    Raises:
        Exception: What is neither success nor a `GradscopeError` is a finding.
    """
    try:
        with _limited():
            load(path) if name == "run.toml" else load_into(model(), path)
    except GradscopeError as error:
        assert error.remedy, f"no remedy: {error}"
        assert "Traceback" not in str(error)
        return type(error).__name__
    return "loaded"


def rounds(folder: Path, n: int, seed: int) -> Counter[tuple[str, str]]:
    """Read `n` damaged files in a folder, and count what came of them by kind of file.

    Raises:
        AssertionError: A finding; the file stays in the folder.
    """
    rng, files = random.Random(seed), good_files()
    (folder / "shard.safetensors").write_bytes(files["w.safetensors"])
    found: Counter[tuple[str, str]] = Counter()
    for k in range(n):
        name = rng.choice(list(files))
        path = folder / name
        path.write_bytes(mutated(files[name], rng))
        try:
            found[name, outcome(name, path)] += 1
        except Exception as error:
            raise AssertionError(f"round {k} of seed {seed}, {path}: {error!r}") from error
    return found


@contextmanager
def _limited() -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gradscope-fuzz-"))
    counts = rounds(folder, given.rounds, given.seed)
    shutil.rmtree(folder)
    for (name, what), n in sorted(counts.items()):
        print(f"{name:16} {what:16} {n:6}")


if __name__ == "__main__":
    main()
