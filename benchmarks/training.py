"""What a `Monitor` costs a training: `python -m benchmarks.training`, alone on the machine.

Each training runs in a process of its own, with and without the monitor in turn.
"""

import argparse
import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch import nn

from gradscope.errors import ResultFileError
from gradscope.training import Monitor, Step, TrainerMonitor, read_history

OVERHEAD = 0.03
Begin = Callable[[], None]  # is called when all is made, and the training is about to begin


class Run(NamedTuple):
    """One training."""

    seconds: float
    weights: str  # their digest


def trainer(steps: int, path: Path | None, folder: Path, begin: Begin) -> nn.Module:
    """Train a GPT-2 of 2 layers by transformers' Trainer, sequences of 128 tokens, 8 a step."""
    import transformers

    transformers.logging.set_verbosity_error()
    sizes = {"n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": 2000, "n_positions": 128}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    tokens = torch.randint(2000, (512, 128))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    how = {"max_steps": steps, "per_device_train_batch_size": 8, "use_cpu": True}
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    arguments = transformers.TrainingArguments(str(folder), **how, **quiet)
    monitors = []
    if path is not None:
        monitors += [TrainerMonitor("causal_lm", every=10, overhead=OVERHEAD, path=path)]
    training = transformers.Trainer(model, arguments, train_dataset=rows, callbacks=monitors)
    training.remove_callback(transformers.PrinterCallback)
    begin()
    training.train()
    return model


def loop(steps: int, path: Path | None, folder: Path, begin: Begin) -> nn.Module:
    """Train three convolutions on pictures 32×32, 64 a step, in a loop of one's own."""
    sizes = ((3, 32), (32, 64), (64, 64))
    blocks = [m for i, o in sizes for m in (nn.Conv2d(i, o, 3), nn.ReLU(), nn.MaxPool2d(2))]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(64 * 4, 10)).train()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(2048, 3, 32, 32), torch.randint(10, (2048,))
    begin()
    monitor = path and Monitor(model, "cross_entropy", every=10, overhead=OVERHEAD, path=path)
    for step in range(steps):
        rows = torch.arange(64 * step, 64 * step + 64) % len(x)
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimiser.step()
        if monitor:
            monitor.step(x[rows], y[rows])
    if monitor:
        monitor.close()
    return model


TRAININGS = {"GPT-2 of 2 layers, Trainer": (trainer, 200), "CNN, a plain loop": (loop, 400)}


def run(name: str, steps: int, path: Path | None, folder: Path) -> Run:
    """Train, and return what it took."""
    torch.manual_seed(0)
    train, _ = TRAININGS[name]
    begun = 0.0

    def begin() -> None:
        nonlocal begun
        begun = time.perf_counter()

    model = train(steps, path, folder, begin)
    seconds = time.perf_counter() - begun
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.contiguous().numpy().tobytes())
    return Run(seconds, digest.hexdigest())


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--pairs", type=int, default=6, help="trainings with and without")
    parser.add_argument("--steps", type=int, help="of each; 200 and 400 by default")
    options = parser.parse_args(arguments)
    print("| training | steps | without | with | time | of pairs | it says | measured | weights |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---|")
    for name, (_, usual) in TRAININGS.items():
        steps = options.steps or usual
        with TemporaryDirectory() as place:
            pairs = [pair(name, steps, Path(place), first=k % 2) for k in range(options.pairs)]
            measured: Sequence[Step] = ()
            with suppress(ResultFileError):  # there was no time to measure any
                measured = read_history(Path(place) / "run.jsonl").steps
        ratios = sorted(b.seconds / a.seconds for a, b in pairs)
        without, along = (statistics.median(p[k].seconds for p in pairs) for k in (0, 1))
        said = [s.cost.overhead for s in measured if s.cost and s.cost.overhead is not None]
        cells = [name, f"{steps}", f"{without:.1f} s", f"{along:.1f} s"]
        cells += [f"{statistics.median(ratios):.3f}", f"{ratios[0]:.2f} to {ratios[-1]:.2f}"]
        cells += [f"{said[-1]:.1%}" if said else "–", f"{len(measured)} ×"]
        same = len({run.weights for pair in pairs for run in pair}) == 1
        print(f"| {' | '.join([*cells, 'the same' if same else 'DIFFERENT'])} |", flush=True)


def pair(name: str, steps: int, place: Path, first: int) -> tuple[Run, Run]:
    """Return a training without the monitor and one with it; `first` says which runs first."""
    path = place / "run.jsonl"
    path.unlink(missing_ok=True)
    found = {}
    for monitored in (bool(first), not first):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            given = path if monitored else None
            found[monitored] = pool.submit(run, name, steps, given, place).result()
    return found[False], found[True]


if __name__ == "__main__":
    main()
