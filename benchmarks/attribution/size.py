"""EK-FAC of larger models, gradscope beside kronfluence: seconds and memory of each phase.

`python -m benchmarks.attribution --size`. Each cell is a process with one thread. Both tools have
the same layers (the linear layers with their biases), labels and damping, so their scores agree.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import gradscope
from benchmarks.attribution.methods import analyzer, trained_layers
from benchmarks.networks import GPT
from gradscope.attribution import AttributionSettings, Scoring, open_sources
from gradscope.process.memory import peak_memory

LENGTH, _LIMIT = 128, 3600.0


@dataclass(frozen=True)
class Size:
    """A decoder-only transformer with random weights, and its numbers of sequences."""

    depth: int
    width: int
    heads: int
    vocabulary: int
    train: int
    query: int
    tied: bool = False  # whether the output matrix is the embedding, whose gradient has no factors

    def model(self) -> nn.Module:
        """Return the model in evaluation mode."""
        torch.manual_seed(0)
        model = GPT(self.depth, self.width, LENGTH, self.vocabulary, self.heads)
        if self.tied:
            model.head = _Tied(model.tokens)  # type: ignore[assignment]
        return model.eval()

    def samples(self, n: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return n random sequences (n, t) and the tokens that follow (n, t)."""
        draw = torch.Generator().manual_seed(seed)
        tokens = torch.randint(self.vocabulary, (n, LENGTH + 1), generator=draw)
        return tokens[:, :-1], tokens[:, 1:]


class _Tied(nn.Module):
    """The output layer of an embedding's matrix, which other libraries leave out."""

    def __init__(self, tokens: nn.Embedding) -> None:
        super().__init__()
        self.tokens = tokens
        nn.init.normal_(tokens.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, t, width) to logits (n, t, vocabulary)."""
        return F.linear(x, self.tokens.weight)


SIZES = {
    "4x256": Size(4, 256, 4, 2048, 64, 8),
    "6x512": Size(6, 512, 8, 2048, 32, 4),
    "gpt2-small": Size(12, 768, 12, 50257, 8, 2, tied=True),
}


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the summed cross-entropy (n,) of logits (n, vocabulary, t)."""
    return F.cross_entropy(outputs, targets, reduction="none").sum(1)


def _gradscope(size: Size, clock: Callable[[str], None]) -> Tensor:
    model = size.model()
    scope = gradscope.Scope(model, loss, [f"{name}.*" for name in trained_layers(model)])
    train, query = size.samples(size.train, 1), size.samples(size.query, 2)
    with open_sources((scope, *train), (scope, *query)) as pairs:
        scoring = Scoring(pairs, AttributionSettings("ekfac", 0.1))
        clock("factors")
        found = torch.cat([rows for _, rows in scoring.rows()])
    clock("scores")
    return found


def _kronfluence(size: Size, clock: Callable[[str], None]) -> Tensor:
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from torch.utils.data import TensorDataset

    train, query = size.samples(size.train, 1), size.samples(size.query, 2)
    with analyzer(size.model(), loss) as ready:
        data, batch = TensorDataset(*train), 8
        how = FactorArguments(strategy="ekfac", use_empirical_fisher=True)
        ready.fit_all_factors("f", data, per_device_batch_size=batch, factor_args=how)
        clock("factors")
        ready.compute_pairwise_scores(
            "s",
            "f",
            TensorDataset(*query),
            data,
            per_device_query_batch_size=batch,
            per_device_train_batch_size=batch,
            score_args=ScoreArguments(damping_factor=None),  # 0.1 of the mean eigenvalue
        )
        clock("scores")
        return cast(Tensor, ready.load_pairwise_scores("s")["all_modules"]) / size.train


TOOLS = {"gradscope": _gradscope, "kronfluence": _kronfluence}


@dataclass(frozen=True)
class Cell:
    """What a tool takes for a size.

    Attributes:
        seconds: CPU seconds of each phase; imports do not count.
        peak_bytes: Memory above the start, when the imports are done; None if unknown.
        scores: (M, N), for a comparison of tools.
    """

    seconds: dict[str, float]
    peak_bytes: int | None
    scores: list[list[float]]


def run(name: str, tool: str) -> Cell:
    """Run a tool in this process, after a small run that imports what is imported late."""
    torch.set_num_threads(1)
    tiny = Size(1, 16, 2, 32, 2, 2)
    TOOLS[tool](tiny, lambda phase: None)
    seconds: dict[str, float] = {}
    begun = time.process_time()

    def clock(phase: str) -> None:
        seconds[phase] = time.process_time() - begun - sum(seconds.values())

    with peak_memory(torch.device("cpu")) as peak:
        scores = TOOLS[tool](SIZES[name], clock)
    return Cell(seconds, peak[0] if peak else None, scores.tolist())


def main(names: Sequence[str]) -> None:
    """Print a table of sizes and tools in Markdown.

    The last column is the largest difference to gradscope's scores, relative to the largest score.
    """
    print("| size | tool | factors, s | scores, s | together | MB | scores differ by |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for name in names:
        own: Tensor | None = None
        for tool in TOOLS:
            if tool != "gradscope" and find_spec(tool) is None:
                continue
            command = [sys.executable, "-m", "benchmarks.attribution.size", name, tool]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=_LIMIT)
            cell = Cell(**json.loads(done.stdout.splitlines()[-1]))
            each = [
                f"{value:.1f}" for value in (*cell.seconds.values(), sum(cell.seconds.values()))
            ]
            memory = "" if cell.peak_bytes is None else f"{cell.peak_bytes / 1e6:,.0f}"
            scores = torch.tensor(cell.scores, dtype=torch.float64)
            own = scores if own is None else own
            gap = float((scores - own).abs().max() / own.abs().max())
            row = [name, tool, *each, memory, f"{gap:.0e}" if tool != "gradscope" else ""]
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    print(json.dumps(asdict(run(*sys.argv[1:]))))
