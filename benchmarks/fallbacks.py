"""Models that loop over samples or branch on values: `python -m benchmarks.fallbacks [NAME ...]`.

Each call has a new batch of 16 samples, so that the recorded operations differ. Prints the backend
that `auto` takes on the first batch. Then prints the CPU time of rows with each backend. The unit
is a plain pass: a forward and a backward pass of the mean loss. Each figure is a median.
"""

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import gradscope
from benchmarks.later import Case, N, measured_seconds, plain

BACKENDS = ("hooks", "expand", "loop")


class Drawn(NamedTuple):
    """A model, its loss, and a function that draws inputs and targets."""

    model: nn.Module
    loss: Callable[..., Tensor]
    draw: Callable[[], tuple[object, object]]


def _entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


class _TreeLstm(nn.Module):
    """A child-sum LSTM over ragged trees (Tai et al. 2015), one node at a time."""

    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, d)
        self.gates, self.above = nn.Linear(d, 3 * d), nn.Linear(d, 3 * d, bias=False)
        self.forget, self.child = nn.Linear(d, d), nn.Linear(d, d, bias=False)
        self.head = nn.Linear(d, 3)

    def node(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states (d,) of a node with input (d,) and states (k, d) of its children."""
        i, o, u = (self.gates(x) + self.above(h.sum(0))).chunk(3)
        keep = torch.sigmoid(self.forget(x) + self.child(h))
        own = torch.sigmoid(i) * torch.tanh(u) + (keep * c).sum(0)
        return torch.sigmoid(o) * torch.tanh(own), own

    def forward(self, words: Tensor, children: Tensor, sizes: Tensor) -> Tensor:
        roots = []
        for k, size in enumerate(sizes.tolist()):
            x, states = self.embedding(words[k]), list[tuple[Tensor, Tensor]]()
            for j, pair in enumerate(children[k].tolist()[:size]):
                below = [states[child] for child in pair if child >= 0]
                below = below or [(torch.zeros_like(x[0]),) * 2]
                h, c = (torch.stack(each) for each in zip(*below, strict=True))
                states.append(self.node(x[j], h, c))
            roots.append(states[-1][0])
        found: Tensor = self.head(torch.stack(roots))
        return found


def _trees(leaves: int = 10) -> tuple[object, object]:
    """Draw binary trees: the two children of each node (n, nodes, 2), -1 for leaves."""
    children, sizes = torch.full((N, 2 * leaves - 1, 2), -1), torch.zeros(N, dtype=torch.int64)
    for k in range(N):
        forest = list(range(random.randint(4, leaves)))
        size = len(forest)
        while len(forest) > 1:
            j = random.randrange(len(forest) - 1)
            children[k, size] = torch.tensor(forest[j : j + 2])
            forest[j : j + 2] = [size]
            size += 1
        sizes[k] = size
    return (torch.randint(30, children.shape[:2]), children, sizes), torch.randint(3, (N,))


def _tree_lstm() -> Drawn:
    return Drawn(_TreeLstm(), _entropy, _trees)


class _Detr(nn.Module):
    """A detector with queries (Carion et al. 2020); returns scores and boxes."""

    def __init__(self, d: int = 32, queries: int = 8, classes: int = 5) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, d, 4, 4)
        self.core = nn.Transformer(d, 4, 1, 1, 64, dropout=0.0, batch_first=True)
        self.query = nn.Parameter(torch.randn(queries, d))
        self.place = nn.Parameter(torch.randn(16, d))
        self.kind, self.box = nn.Linear(d, classes + 1), nn.Linear(d, 4)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = self.patches(images).flatten(2).mT + self.place
        h = self.core(x, self.query.expand(len(x), -1, -1))
        return self.kind(h), self.box(h).sigmoid()


def _matching(outputs: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]) -> Tensor:
    """Return the losses (n,) of labels (n, k), -1 for none, and boxes (n, k, 4)."""
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

    losses = []
    for scores, boxes, labels, true in zip(*outputs, *targets, strict=True):
        m = int((labels >= 0).sum())
        cost = torch.cdist(boxes, true[:m], p=1) - scores.softmax(-1)[:, labels[:m]]
        rows, columns = map(torch.as_tensor, linear_sum_assignment(cost.detach().numpy()))
        wanted = torch.full((len(scores),), scores.shape[1] - 1)
        wanted[rows] = labels[columns]
        off = (boxes[rows] - true[columns]).abs().sum() / m
        losses.append(F.cross_entropy(scores, wanted) + off)
    return torch.stack(losses)


def _images() -> tuple[object, object]:
    labels = torch.randint(5, (N, 4))
    labels[torch.arange(4) >= torch.randint(1, 5, (N, 1))] = -1
    return torch.randn(N, 3, 16, 16), (labels, torch.rand(N, 4, 4))


def _detr() -> Drawn:
    return Drawn(_Detr(), _matching, _images)


class _Ball(nn.Module):
    """Bouncing balls with learned gravity, drag and restitution; a branch for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.gravity = nn.Parameter(torch.tensor(9.8))
        self.restitution = nn.Parameter(torch.tensor(0.8))
        self.drag = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def step(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return positions and velocities after a time step."""
        pull = -self.gravity - 0.1 * self.drag(torch.stack([x, v], -1)).squeeze(-1)
        return x + 0.1 * v, v + 0.1 * pull


class _BallAlone(_Ball):
    def forward(self, start: Tensor) -> Tensor:
        ends = []
        for x, v in start:
            for _ in range(20):
                x, v = self.step(x, v)
                if x < 0:
                    x, v = -self.restitution * x, -self.restitution * v
            ends.append(torch.stack([x, v]))
        return torch.stack(ends)


class _BallBatch(_Ball):
    def forward(self, start: Tensor) -> Tensor:
        x, v = start.unbind(1)
        for _ in range(20):
            x, v = self.step(x, v)
            low = x < 0
            if low.any():
                x = torch.where(low, -self.restitution * x, x)
                v = torch.where(low, -self.restitution * v, v)
        return torch.stack([x, v], 1)


def _throws() -> tuple[object, object]:
    return torch.stack([torch.rand(N) + 0.5, torch.randn(N)], 1), torch.randn(N, 2)


def _square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean(1)


def _ball() -> Drawn:
    return Drawn(_BallAlone(), _square, _throws)


def _ball_batch() -> Drawn:
    return Drawn(_BallBatch(), _square, _throws)


class _Experts(nn.Module):
    """Each token goes to the two best of four experts."""

    def __init__(self, d: int = 16, experts: int = 4) -> None:
        super().__init__()
        self.embedding, self.gate = nn.Embedding(30, d), nn.Linear(d, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 2 * d), nn.SiLU(), nn.Linear(2 * d, d))
            for _ in range(experts)
        )
        self.head = nn.Linear(d, 3)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words).flatten(0, 1)
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        for k, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == k)
            x = x.index_add(0, row, expert(x[row]) * weights[row, slot].unsqueeze(1))
        found: Tensor = self.head(x.unflatten(0, words.shape).mean(1))
        return found


def _experts() -> Drawn:
    return Drawn(_Experts(), _entropy, lambda: (torch.randint(30, (N, 12)), torch.randint(3, (N,))))


class _Halting(nn.Module):
    """Adaptive computation time (Graves 2016): steps until every sample has stopped."""

    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.cell, self.halt, self.out = nn.GRUCell(d, d), nn.Linear(d, 1), nn.Linear(d, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, mix, spent = torch.zeros_like(x), torch.zeros_like(x), x.new_zeros(len(x))
        on = torch.ones(len(x), dtype=torch.bool)
        while on.any():
            h = self.cell(x, h)
            p = self.halt(h).squeeze(1).sigmoid()
            last = on & (spent + p > 0.95)
            share = torch.where(last, 1 - spent, torch.where(on, p, torch.zeros_like(p)))
            mix, spent, on = mix + share.unsqueeze(1) * h, spent + share, on & ~last
        found: Tensor = self.out(mix)
        return found


def _halting() -> Drawn:
    return Drawn(_Halting(), _entropy, lambda: (torch.randn(N, 16), torch.randint(3, (N,))))


MODELS: dict[str, Callable[[], Drawn]] = {
    make.__name__.removeprefix("_"): make
    for make in (_tree_lstm, _detr, _ball, _ball_batch, _experts, _halting)
}


def measure(given: Drawn, repeats: int) -> tuple[str, float, dict[str, float]]:
    """Return the backend of `auto`, the seconds of a plain pass, and the ratio of each backend."""
    scopes = {
        b: gradscope.Scope(given.model, given.loss, backend=b, verify="never") for b in BACKENDS
    }
    with gradscope.Scope(given.model, given.loss, verify="first") as auto:
        for scope in (auto, *scopes.values()):
            scope.per_sample_gradients(*given.draw())
        chosen = auto.backend
    seconds: list[float] = []
    ratios: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for _ in range(repeats):
        inputs, targets = given.draw()
        seconds.append(measured_seconds(plain(Case(given.model, given.loss, inputs, targets))))
        for backend, scope in scopes.items():
            spent = measured_seconds(partial(scope.per_sample_gradients, inputs, targets))
            ratios[backend].append(spent / seconds[-1])
    return chosen, statistics.median(seconds), {k: statistics.median(v) for k, v in ratios.items()}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("names", nargs="*", default=[], help=f"some of {', '.join(MODELS)}")
    made.add_argument("--repeats", type=int, default=9)
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table."""
    given = parser().parse_args(argv)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        print(f"{'':12}{'plain ms':>9}{'auto':>8}" + "".join(f"{b:>8}" for b in BACKENDS))
        for name in given.names or MODELS:
            torch.manual_seed(0)
            random.seed(0)
            chosen, base, ratios = measure(MODELS[name](), given.repeats)
            found = "".join(f"{ratio:8.2f}" for ratio in ratios.values())
            print(f"{name:12}{1e3 * base:9.2f}{chosen:>8}{found}", flush=True)
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
