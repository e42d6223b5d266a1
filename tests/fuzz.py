"""Mutated run files, dataset specs, data files and checkpoints: the answer is ours, and it is soon.

    python -m tests.fuzz --rounds 10000 --seed 1

Each round damages a good file and reads it in this process. The outcome is a success or a
`GradscopeError`; anything else, a warning, or more than `SECONDS` for one file, is a finding.
"""

import argparse
import random
import shutil
import signal
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from gradscope.config import DatasetSpec, load, resolve
from gradscope.core.batch import tensors
from gradscope.errors import GradscopeError
from gradscope.sources import load_into, open_dataset
from tests import fuzz_files

SECONDS = 20
_BYTES = [b"\0", b"\xff" * 8, b"\x80", b"{", b"[" * 40, b'"', b"'", b"=", b"9" * 30, b"\n", b"../"]


def read_run(path: Path) -> None:
    """Read a run file."""
    load(path)


def read_checkpoint(path: Path) -> None:
    """Load a checkpoint."""
    load_into(fuzz_files.model(), path)


def read_data(path: Path) -> None:
    """Read all samples of a data file."""
    read_samples(DatasetSpec.model_validate({"path": path, "columns": fuzz_files.columns_of(path)}))


def read_dataset(path: Path) -> None:
    """Read all samples that a dataset spec describes."""
    others = {
        "model": {"factory": "checkpoint"},
        "checkpoint": {"path": "w.pt"},
        "loss": {"name": "mse"},
    }
    read_samples(resolve(None, {"dataset": {"path": path}, **others}).dataset)


def read_samples(spec: DatasetSpec) -> None:
    """Read at most 100 samples, which are tensors of as many rows."""
    data = open_dataset(spec)
    batch = data.batch(range(min(len(data), 100)))
    data.ids(batch.index)
    for tensor in tensors((batch.inputs, batch.targets)):
        assert tensor.is_floating_point() or tensor.dtype in _WHOLE
        assert len(tensor) == len(batch)


_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)

Reader = Callable[[Path], None]


def good_files() -> dict[str, tuple[bytes, Reader]]:
    """Return one good file of each kind by name, and what reads it."""
    return {
        "run.toml": (fuzz_files.RUN.encode(), read_run),
        "dataset.toml": (fuzz_files.DATASET.encode(), read_dataset),
        **{name: (file, read_checkpoint) for name, file in fuzz_files.checkpoints().items()},
        **{name: (file, read_data) for name, file in fuzz_files.data_files().items()},
    }


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


def outcome(path: Path, read: Reader) -> str:
    """Read a file and say what came of it.

    Raises:
        Exception: What is neither success nor a `GradscopeError` is a finding.
    """
    try:
        with _limited():
            read(path)
    except GradscopeError as error:
        assert error.exit_code in (2, 3), error
        assert error.remedy, f"no remedy: {error}"
        assert str(path.parent) in str(error), f"no file: {error}"
        assert "Traceback" not in str(error)
        return type(error).__name__
    return "loaded"


def rounds(folder: Path, n: int, seed: int) -> Counter[tuple[str, str]]:
    """Read `n` damaged files in a folder, and count what came of them by kind of file.

    Raises:
        AssertionError: A finding; the file stays in the folder.
    """
    rng, files = random.Random(seed), good_files()
    for name, content in fuzz_files.companions().items():
        (folder / name).write_bytes(content)
    found: Counter[tuple[str, str]] = Counter()
    for k in range(n):
        name = rng.choice(list(files))
        content, read = files[name]
        path = folder / name
        path.write_bytes(mutated(content, rng))
        try:
            found[name, outcome(path, read)] += 1
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
    warnings.simplefilter("error")
    folder = Path(tempfile.mkdtemp(prefix="gradscope-fuzz-"))
    counts = rounds(folder, given.rounds, given.seed)
    shutil.rmtree(folder)
    for (name, what), n in sorted(counts.items()):
        print(f"{name:16} {what:16} {n:6}")


if __name__ == "__main__":
    main()
