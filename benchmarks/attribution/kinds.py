"""Small trainings of many kinds, on which the rule of `auto` is chosen (`KINDS`) or tested.

All halves are retrained at once: `fit_many` trains a stack of models, whose steps do not mix.
`python -m benchmarks.attribution.kinds` makes the files in `truth/kinds`. They hold the start of
trainings that do not begin with random parameters.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.attribution import truth as _truth
from benchmarks.attribution.tasks import SAMPLES, by_image, by_sequence
from benchmarks.attribution.truth import FIRST_SEED, SUBSETS, Truth, halves, load, save
from gradscope.attribution.lds import lds

FOLDER = _truth.FOLDER / "kinds"
Samples = tuple[Tensor, Tensor]  # inputs (n, ...), targets (n, ...)
State = dict[str, Tensor]
LENGTH = 32  # characters of a text
_LETTERS = 96
_START = "start."
_TOGETHER = 25  # models trained in a stack


def by_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Half the squared error: (n, o), (n, o) -> (n,)."""
    return 0.5 * (outputs - targets).square().sum(1)


@dataclass(frozen=True)
class Kind:
    """A kind of training.

    Attributes:
        title: For tables.
        build: Makes the model.
        data: Makes training samples and queries.
        loss: (outputs, targets) -> (n,).
        epochs: Passes over the data.
        batch: Samples a step.
        optimizer: AdamW, or SGD with momentum 0.9.
        rate: The first learning rate; it falls to zero along a cosine.
        decay: AdamW's weight decay, or SGD's.
        before: The training from whose end this one starts: parameters with the same names and
            shapes. Others, and all without `before`, depend on the seed.
        only: A word in the names of the parameters that are trained.
    """

    title: str
    build: Callable[[], nn.Module]
    data: Callable[[], tuple[Samples, Samples]]
    loss: Callable[[Tensor, Tensor], Tensor]
    epochs: int
    batch: int = 32
    optimizer: Literal["adam", "sgd"] = "adam"
    rate: float = 3e-3
    decay: float = 0.01
    before: "Kind | None" = None
    only: str = ""

    @cached_property
    def _samples(self) -> tuple[Samples, Samples]:
        return self.data()

    @property
    def train(self) -> Samples:
        """Inputs (N, ...) and targets (N, ...) of the training samples."""
        return self._samples[0]

    @property
    def query(self) -> Samples:
        """Inputs (M, ...) and targets (M, ...) of the queries."""
        return self._samples[1]

    @property
    def size(self) -> int:
        """The number N of training samples."""
        return len(self.train[0])

    @property
    def queries(self) -> int:
        """The number M of queries."""
        return len(self.query[0])

    @cached_property
    def start(self) -> State:
        """The parameters at the end of the training before, rounded to half precision."""
        if self.before is None:
            return {}
        found = self.before.fit(np.arange(self.before.size), 0).state_dict()
        return {k: v.half().float() for k, v in found.items() if v.is_floating_point()}

    def model(self, seed: int) -> nn.Module:
        """Return the model at the start of its training."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.build()
        own = model.state_dict()
        inner = {k.replace(".inner.", "."): k for k in own}  # adapters wrap layers
        known = {inner[k]: v for k, v in self.start.items() if k in inner}
        same = {k: v for k, v in known.items() if v.shape == own[k].shape}
        model.load_state_dict({**own, **same})
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self.only in name)
        return model

    def fit(self, indices: np.ndarray, seed: int) -> nn.Module:
        """Train on some training samples (n,), as `Task.fit` does."""
        (state,) = self.fit_many(np.asarray(indices)[None], [seed])
        model = self.model(seed)
        model.load_state_dict(state)
        return model.eval()

    def fit_many(self, indices: np.ndarray, seeds: Sequence[int]) -> list[State]:
        """Train K models on training samples (K, n), with a seed each; return their states."""
        inputs, targets = self.train
        models = [self.model(seed).train() for seed in seeds]
        parameters, buffers = stack_module_state(models)
        free = {k: v.detach().requires_grad_(self.only in k) for k, v in parameters.items()}
        trained = [v for v in free.values() if v.requires_grad]
        chosen, steps = torch.from_numpy(indices), self.epochs * -(-indices.shape[1] // self.batch)
        optimizer: torch.optim.Optimizer
        if self.optimizer == "adam":
            optimizer = torch.optim.AdamW(trained, lr=self.rate, weight_decay=self.decay)
        else:
            optimizer = torch.optim.SGD(
                trained, lr=self.rate, momentum=0.9, weight_decay=self.decay
            )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        draws = [torch.Generator().manual_seed(seed) for seed in seeds]

        def losses(state: State, held: State, x: Tensor, y: Tensor) -> Tensor:
            return self.loss(functional_call(models[0], (state, held), (x,)), y).mean()

        together = vmap(losses, randomness="different")
        for _ in range(self.epochs):
            order = torch.stack([torch.randperm(chosen.shape[1], generator=d) for d in draws])
            for rows in chosen.gather(1, order).split(self.batch, 1):
                optimizer.zero_grad()
                with sdpa_kernel(SDPBackend.MATH):  # the other has no rule for a stack
                    together(free, buffers, inputs[rows], targets[rows]).sum().backward()
                optimizer.step()
                schedule.step()
        whole = {**free, **buffers}
        return [{k: v[i].detach() for k, v in whole.items()} for i in range(len(seeds))]

    def sampled(self, outputs: Tensor) -> Tensor:
        """Draw targets from the model's predictions (n, ...)."""
        if self.loss is by_error:
            return outputs + torch.randn_like(outputs)
        chances = torch.softmax(outputs.flatten(0, -2), -1)
        return torch.multinomial(chances, 1).reshape(outputs.shape[:-1])

    def losses(self, model: nn.Module) -> np.ndarray:
        """Loss of each query: (M,)."""
        inputs, targets = self.query
        with torch.no_grad():
            return self.loss(model(inputs), targets).numpy()


def digits(
    count: int,
    queries: int = 40,
    skip: int = 0,
    *,
    wrong: float = 0.0,
    rare: float = 1.0,
    classes: int = 10,
    flat: bool = True,
    inverted: bool = False,
) -> tuple[Samples, Samples]:
    """Return images (n, 64) or (n, 1, 8, 8) and labels.

    Args:
        count: Number N of training samples.
        queries: Number M of queries.
        skip: Images left out first: a training before used them.
        wrong: The share of training labels that are drawn anew.
        rare: Training samples of class c are kept with probability rare^c.
        classes: Only labels below it.
        flat: The shape.
        inverted: White for black.
    """
    with np.load(SAMPLES / "digits_mlp" / "data.npz") as data:
        images, labels = data["images"].astype(np.float32) / 16.0, data["labels"].astype(np.int64)
    if inverted:
        images = 1.0 - images
    draw = np.random.default_rng(1)
    order = draw.permutation(len(images))
    order, asked = order[queries:], order[:queries]
    order = order[skip:][labels[order[skip:]] < classes]
    order = order[draw.random(len(order)) < rare ** labels[order]][:count]
    inputs = torch.from_numpy(images).unflatten(1, (64,) if flat else (1, 8, 8))
    targets = torch.from_numpy(labels)
    learned = targets[order]
    drawn = torch.from_numpy(draw.integers(0, 10, len(order)))
    learned = torch.where(torch.from_numpy(draw.random(len(order)) < wrong), drawn, learned)
    return (inputs[order], learned), (inputs[asked], targets[asked])


def _characters() -> np.ndarray:
    with np.load(SAMPLES / "text_transformer" / "data.npz") as data:
        whole = np.concatenate([data["characters"], data["following"][:, -1:]], 1)
    return whole.astype(np.int64)  # (512, 65)


def texts(count: int, queries: int = 40, *, backwards: bool = False) -> tuple[Samples, Samples]:
    """Return sequences (n, 32) of The Devil's Dictionary, each with the next characters."""
    whole = _characters()
    halves = np.concatenate([whole[:, : LENGTH + 1], whole[:, LENGTH:]])  # (1024, 33)
    rows = np.random.default_rng(2).permutation(len(halves))
    found = torch.from_numpy(halves[rows])
    if backwards:
        found = found.flip(1)
    return _shifted(found[queries:][:count]), _shifted(found[:queries])


def chains(count: int, queries: int = 40, order: int = 2, seed: int = 0) -> tuple[Samples, Samples]:
    """Return sequences (n, 32) of a Markov chain with the text's frequencies, and what follows."""
    whole, draw = _characters(), np.random.default_rng(seed)
    found = np.empty((count + queries, LENGTH + 1), np.int64)
    begins, following = [], {}
    for row in whole:
        begins.append(tuple(row[:order]))
        for i in range(len(row) - order):
            following.setdefault(tuple(row[i : i + order]), []).append(row[i + order])
    for own in found:
        own[:order] = begins[draw.integers(len(begins))]
        for i in range(order, LENGTH + 1):
            known = following.get(tuple(own[i - order : i]))
            own[i] = known[draw.integers(len(known))] if known else draw.integers(_LETTERS)
    drawn = torch.from_numpy(found)
    return _shifted(drawn[queries:]), _shifted(drawn[:queries])


def _shifted(rows: Tensor) -> Samples:
    return rows[:, :-1], rows[:, 1:]


def sorts(count: int, queries: int = 40) -> tuple[Samples, Samples]:
    """Return sequences (n, 32) of four sorts, and the sort: text, two chains, reversed text."""
    each = (count + queries) // 4
    every = [
        texts(each, 0)[0][0],
        chains(each, 0, 1, 5)[0][0],
        chains(each, 0, 2, 6)[0][0],
        texts(2 * each, 0)[0][0][each:].flip(1),
    ]
    inputs, labels = torch.cat(every), torch.arange(4).repeat_interleave(each)
    rows = np.random.default_rng(3).permutation(len(inputs))
    inputs, labels = inputs[rows], labels[rows]
    return (inputs[queries:], labels[queries:]), (inputs[:queries], labels[:queries])


def noisy_sorts(count: int, queries: int = 40) -> tuple[Samples, Samples]:
    """Return sequences (n, 32) of three sorts, and the sort, of which a tenth is drawn anew."""
    each = (count + queries) // 3
    every = [
        texts(each, 0)[0][0],
        texts(2 * each, 0)[0][0][each:].flip(1),
        chains(each, 0, 2, 31)[0][0],
    ]
    draw = np.random.default_rng(33)
    rows = draw.permutation(3 * each)
    inputs, labels = torch.cat(every)[rows], torch.arange(3).repeat_interleave(each)[rows]
    wrong = torch.from_numpy(draw.random(len(labels)) < 0.1)
    wrong[:queries] = False
    labels = torch.where(wrong, torch.from_numpy(draw.integers(0, 3, len(labels))), labels)
    return (inputs[queries:], labels[queries:]), (inputs[:queries], labels[:queries])


def curves(
    count: int, queries: int = 40, seed: int = 0, shift: float = 0.0
) -> tuple[Samples, Samples]:
    """Return points (n, 6) and two values of a random network with noise."""
    draw = torch.Generator().manual_seed(seed + 10)
    first, second = (
        torch.randn(s, generator=torch.Generator().manual_seed(4)) for s in ((6, 12), (12, 2))
    )
    x = torch.randn(count + queries, 6, generator=draw)
    y = torch.tanh(x @ first + shift) @ second / 2 + 0.3 * torch.randn(
        count + queries, 2, generator=draw
    )
    return (x[queries:], y[queries:]), (x[:queries], y[:queries])


def perceptron(*widths: int) -> nn.Module:
    """Build layers of those widths, [64, 24, 10]: (n, first) -> (n, last)."""
    widths = widths or (64, 24, 10)
    layers = [x for i, o in pairwise(widths) for x in (nn.Linear(i, o), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def convolutions(norm: str = "group", width: int = 6) -> nn.Module:
    """Build two convolutions with a normalisation each, and a head: (n, 1, 8, 8) -> (n, 10)."""

    def normalised(channels: int) -> nn.Module:
        return nn.GroupNorm(2, channels) if norm == "group" else nn.BatchNorm2d(channels)

    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        normalised(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        normalised(2 * width),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, 10),
    )


class Recurrent(nn.Module):
    """Rows of an image one after the other: (n, 64) -> (n, 10)."""

    def __init__(self, width: int = 24) -> None:
        """Make the layers."""
        super().__init__()
        self.read, self.keep = nn.Linear(8, width), nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """(n, 64) -> (n, 10)."""
        rows = self.read(images.unflatten(1, (8, 8)))
        state = torch.zeros_like(rows[:, 0])
        for t in range(8):
            state = torch.tanh(rows[:, t] + self.keep(state))
        found: Tensor = self.head(state)
        return found


def _transformer_module() -> "type[nn.Module]":
    path = SAMPLES / "text_transformer" / "model.py"
    spec = spec_from_file_location("sample_text_transformer", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    found: type[nn.Module] = module.Transformer
    return found


class Adapted(nn.Module):
    """A linear layer and a product of two narrow ones, of which the second starts at zero."""

    def __init__(self, inner: nn.Linear, rank: int = 4) -> None:
        """Wrap the layer."""
        super().__init__()
        self.inner = inner
        self.adapter_down = nn.Linear(inner.in_features, rank, bias=False)
        self.adapter_up = nn.Linear(rank, inner.out_features, bias=False)
        nn.init.zeros_(self.adapter_up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., i) -> (..., o)."""
        found: Tensor = self.inner(x) + self.adapter_up(self.adapter_down(x))
        return found


class Text(nn.Module):
    """A character transformer with an untied output layer, or a classifier."""

    def __init__(
        self, width: int = 24, depth: int = 2, *, pooled: bool = False, adapted: bool = False
    ) -> None:
        """Make the layers."""
        super().__init__()
        self.pooled = pooled
        self.body = _transformer_module()(_LETTERS, LENGTH, width, 4, depth)
        name = "sort" if pooled else "head"
        self.add_module(name, nn.Linear(width, 4 if pooled else _LETTERS))
        if adapted:
            for block in self.body.blocks:
                block.qkv, block.merge = Adapted(block.qkv), Adapted(block.merge)
                block.mlp[0], block.mlp[2] = Adapted(block.mlp[0]), Adapted(block.mlp[2])

    def forward(self, characters: Tensor) -> Tensor:
        """(n, t) -> logits (n, t, v), or (n, 4)."""
        body = self.body
        positions = torch.arange(characters.shape[1])
        hidden = body.norm(body.blocks(body.tokens(characters) + body.positions(positions)))
        found: Tensor = self.sort(hidden.mean(1)) if self.pooled else self.head(hidden)
        return found


_CONV = partial(convolutions, "group")
_TALK = Kind(
    "text before",
    Text,
    partial(chains, 6000, order=1),
    by_sequence,
    6,
    batch=32,
    rate=3e-3,
    decay=0.0,
)
_SEEN = Kind(
    "digits before",
    _CONV,
    partial(digits, 600, skip=900, classes=5, flat=False),
    by_image,
    epochs=10,
)
_FITTED = Kind(
    "curves before",
    partial(perceptron, 6, 24, 2),
    partial(curves, 2000, seed=1, shift=0.7),
    by_error,
    epochs=20,
)

KINDS = {
    "mlp-adam": Kind("MLP, Adam", perceptron, partial(digits, 400), by_image, 25, rate=0.01),
    "mlp-sgd": Kind(
        "MLP, SGD",
        perceptron,
        partial(digits, 400),
        by_image,
        40,
        optimizer="sgd",
        rate=0.05,
        decay=1e-4,
    ),
    "decay": Kind(
        "MLP, strong decay",
        perceptron,
        partial(digits, 400),
        by_image,
        40,
        optimizer="sgd",
        rate=0.05,
        decay=0.01,
    ),
    "noise": Kind(
        "MLP, label noise", perceptron, partial(digits, 400, wrong=0.2), by_image, 25, rate=0.01
    ),
    "imbalance": Kind(
        "MLP, rare classes", perceptron, partial(digits, 400, rare=0.75), by_image, 25, rate=0.01
    ),
    "early": Kind("MLP, stopped early", perceptron, partial(digits, 400), by_image, 5, rate=0.01),
    "groupnorm": Kind(
        "CNN, GroupNorm", _CONV, partial(digits, 400, flat=False), by_image, 20, rate=0.01
    ),
    "batchnorm": Kind(
        "CNN, BatchNorm, SGD",
        partial(convolutions, "batch"),
        partial(digits, 400, flat=False),
        by_image,
        12,
        optimizer="sgd",
        rate=0.05,
        decay=1e-3,
    ),
    "squared": Kind(
        "MLP, squared error",
        partial(perceptron, 6, 24, 2),
        partial(curves, 300),
        by_error,
        60,
        rate=0.01,
    ),
    "recurrent": Kind("RNN, Adam", Recurrent, partial(digits, 400), by_image, 25, rate=0.01),
    "tuned-images": Kind(
        "CNN, fine-tuned",
        _CONV,
        partial(digits, 400, flat=False),
        by_image,
        6,
        rate=3e-3,
        before=_SEEN,
    ),
    "tuned-squared": Kind(
        "MLP, squared error, fine-tuned",
        partial(perceptron, 6, 24, 2),
        partial(curves, 300),
        by_error,
        8,
        rate=3e-3,
        before=_FITTED,
    ),
    "tuned-text": Kind(
        "Transformer, text, fine-tuned",
        Text,
        partial(texts, 512),
        by_sequence,
        6,
        rate=3e-3,
        before=_TALK,
    ),
    "tuned-sorts": Kind(
        "Transformer, classifier, fine-tuned",
        partial(Text, pooled=True),
        partial(sorts, 256),
        by_image,
        6,
        rate=3e-3,
        before=_TALK,
    ),
    "adapters": Kind(
        "Transformer, adapters",
        partial(Text, adapted=True),
        partial(texts, 256),
        by_sequence,
        6,
        rate=0.01,
        before=_TALK,
        only="adapter",
    ),
}


_SPOKEN = Kind(
    "text before, one block",
    partial(Text, 32, 1),
    partial(chains, 6000, order=1, seed=21),
    by_sequence,
    5,
    rate=3e-3,
    decay=0.0,
)
_NEGATIVE = Kind(
    "digits before, inverted",
    partial(perceptron, 64, 24, 24, 10),
    partial(digits, 600, skip=900, inverted=True),
    by_image,
    15,
)
UNSEEN = {  # no rule was chosen on them
    "unseen-text": Kind(
        "Transformer, text backwards, fine-tuned",
        partial(Text, 32, 1),
        partial(texts, 384, backwards=True),
        by_sequence,
        5,
        rate=2e-3,
        before=_SPOKEN,
    ),
    "unseen-sorts": Kind(
        "Transformer, classifier with label noise, fine-tuned",
        partial(Text, 32, 1, pooled=True),
        partial(noisy_sorts, 320),
        by_image,
        6,
        rate=2e-3,
        before=_SPOKEN,
    ),
    "unseen-adapters": Kind(
        "Transformer, adapters, Markov chain",
        partial(Text, 32, 1, adapted=True),
        partial(chains, 300, order=3, seed=9),
        by_sequence,
        6,
        rate=0.01,
        before=_SPOKEN,
        only="adapter",
    ),
    "unseen-scratch": Kind(
        "Transformer, classifier", partial(Text, pooled=True), partial(sorts, 320), by_image, 12
    ),
    "unseen-wide": Kind(
        "MLP, wide", partial(perceptron, 64, 96, 10), partial(digits, 200), by_image, 25, rate=5e-3
    ),
    "unseen-deep": Kind(
        "MLP, three layers, fine-tuned",
        partial(perceptron, 64, 24, 24, 10),
        partial(digits, 300),
        by_image,
        10,
        optimizer="sgd",
        rate=0.03,
        before=_NEGATIVE,
    ),
    "unseen-first": Kind(
        "MLP, two epochs", partial(perceptron, 64, 32, 10), partial(digits, 400), by_image, 2
    ),
    "unseen-cnn": Kind(
        "CNN, inverted images, fine-tuned",
        _CONV,
        partial(digits, 300, flat=False, inverted=True),
        by_image,
        3,
        optimizer="sgd",
        rate=0.02,
        before=_SEEN,
    ),
    "unseen-warm": Kind(
        "MLP, five more classes, fine-tuned",
        perceptron,
        partial(digits, 300),
        by_image,
        4,
        optimizer="sgd",
        rate=0.02,
        before=Kind(
            "digits before, flat",
            perceptron,
            partial(digits, 600, skip=900, classes=5),
            by_image,
            15,
        ),
    ),
}


def stored(name: str) -> tuple[Kind, Truth]:
    """Return a kind with its stored start, and its ground truth."""
    path, kind = FOLDER / f"{name}.npz", replace((KINDS | UNSEEN)[name])
    if kind.before is not None:
        with np.load(path) as data:
            start = {k: torch.from_numpy(data[k]).float() for k in data if k.startswith(_START)}
        vars(kind)["start"] = {k.removeprefix(_START): v for k, v in start.items()}
    return kind, load(path)


def make(name: str, folder: Path = FOLDER, subsets: int = SUBSETS) -> Truth:
    """Retrain on random halves, and write the file; other seeds matter more without a start."""
    kind = (KINDS | UNSEEN)[name]
    held = halves(kind.size, subsets)
    seeds = 4 if kind.before is None else 2
    indices = np.stack([np.flatnonzero(row) for row in held])
    losses, model = np.empty((seeds, subsets, kind.queries), np.float32), kind.model(0).eval()
    for k in range(seeds):
        for part in np.array_split(np.arange(subsets), -(-subsets // _TOGETHER)):
            states = kind.fit_many(indices[part], [FIRST_SEED + k] * len(part))
            for i, state in zip(part, states, strict=True):
                model.load_state_dict(state)
                losses[k, i] = kind.losses(model)
    start = {_START + k: v.numpy().astype(np.float16) for k, v in kind.start.items()}
    truth = Truth(held, losses)
    save(folder / f"{name}.npz", truth, centre=losses.mean((0, 1)), **start)
    return truth


def agreement(truth: Truth) -> float:
    """Return how well two groups of seeds agree: the LDS of one as a score of the other."""
    half = len(truth.losses) // 2
    first, second = truth.losses[:half].mean(0), truth.losses[half:].mean(0)
    return lds(-first.T, np.eye(len(first), dtype=bool), second).mean


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the ground truth of the kinds that were asked for."""
    names = sys.argv[1:] if arguments is None else arguments
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in names or KINDS | UNSEEN:
        print(f"{name}: two groups of seeds agree by {agreement(make(name)):.2f}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
