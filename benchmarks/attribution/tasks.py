"""The three models, their data, and how each is trained: `fit(indices, seed)`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

SAMPLES = Path(__file__).resolve().parents[2] / "sample_models"
CHECKPOINTS = (0, 1, 2, 3, 4)  # seeds of the models that are explained; retrainings use others


def by_image(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each image: logits (n, o), labels (n,) -> (n,)."""
    return functional.cross_entropy(outputs, targets, reduction="none")


def by_sequence(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each sequence, mean over tokens: (n, t, o), (n, t) -> (n,)."""
    return functional.cross_entropy(outputs.transpose(1, 2), targets, reduction="none").mean(1)


@dataclass(frozen=True)
class Task:
    """A model, the samples that it learns, the queries, and the recipe of its training.

    Attributes:
        title: For tables.
        folder: Of the sample model whose `build` and data are used.
        loss: (outputs, targets) -> (n,).
        size: Number N of training samples.
        queries: Number M of queries, drawn from the samples that are left.
        epochs: Passes over the data.
        batch: Samples a step.
        rate: AdamW's first learning rate; it falls to zero along a cosine.
        decay: AdamW's weight decay.
        kwargs: Of `build`.
        split: Seed of the division into training samples and queries.
    """

    title: str
    folder: str
    loss: Callable[[Tensor, Tensor], Tensor]
    size: int
    queries: int
    epochs: int
    batch: int = 50
    rate: float = 3e-3
    decay: float = 0.01
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    split: int = 0

    @cached_property
    def module(self) -> ModuleType:
        """The sample model's `model.py`."""
        path = SAMPLES / self.folder / "model.py"
        spec = spec_from_file_location(f"sample_{self.folder}", path)
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    @cached_property
    def samples(self) -> tuple[Tensor, Tensor]:
        """All inputs and targets: images (n, 64) or (n, 1, 8, 8), or characters (n, t)."""
        with np.load(SAMPLES / self.folder / "data.npz") as data:
            if "characters" in data:
                inputs, targets = data["characters"], data["following"]
                return torch.from_numpy(inputs).long(), torch.from_numpy(targets).long()
            images, labels = data["images"], data["labels"]
        inputs = torch.from_numpy(images).float() / 16.0
        shape = (1, 8, 8) if self.folder.endswith("cnn") else (64,)
        return inputs.unflatten(1, shape), torch.from_numpy(labels).long()

    def _part(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.samples
        rows = np.random.default_rng(self.split).permutation(len(inputs))[start:stop]
        return inputs[rows], targets[rows]

    @cached_property
    def train(self) -> tuple[Tensor, Tensor]:
        """Inputs (N, ...) and targets (N, ...) of the training samples."""
        return self._part(0, self.size)

    @cached_property
    def query(self) -> tuple[Tensor, Tensor]:
        """Inputs (M, ...) and targets (M, ...) of the queries."""
        return self._part(self.size, self.size + self.queries)

    def fit(self, indices: np.ndarray, seed: int) -> nn.Module:
        """Train a new model on those training samples, in float32.

        Args:
            indices: Training samples (n,), numbers below N; one that stands there twice is
                learned twice.
            seed: Of the first parameters and of the order of the samples.

        Returns:
            The model, in eval mode. The same arguments give the same model; torch's own random
            state is left as it was.
        """
        inputs, targets = self.train
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: nn.Module = self.module.build(**self.kwargs)
            chosen = torch.from_numpy(np.asarray(indices))
            steps = self.epochs * -(-len(chosen) // self.batch)
            optimizer = torch.optim.AdamW(
                model.parameters(), lr=self.rate, weight_decay=self.decay, foreach=True
            )
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
            for _ in range(self.epochs):
                for rows in chosen[torch.randperm(len(chosen))].split(self.batch):
                    optimizer.zero_grad()
                    self.loss(model(inputs[rows]), targets[rows]).mean().backward()
                    optimizer.step()
                    schedule.step()
        return model.eval()

    def losses(self, model: nn.Module) -> np.ndarray:
        """Loss of each query: (M,)."""
        inputs, targets = self.query
        with torch.no_grad():
            return self.loss(model(inputs), targets).numpy()


TASKS = {
    "mlp": Task("MLP, digits", "digits_mlp", by_image, size=1000, queries=100, epochs=40),
    "cnn": Task(
        "CNN, digits",
        "digits_cnn",
        by_image,
        size=1000,
        queries=100,
        epochs=20,
        kwargs={"width": 8},
    ),
    "transformer": Task(
        "Transformer, text",
        "text_transformer",
        by_sequence,
        size=128,
        queries=100,
        epochs=40,
        batch=32,
        kwargs={"width": 32, "depth": 1},
    ),
}
