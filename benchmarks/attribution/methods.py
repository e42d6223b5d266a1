"""The ways to attribute: each returns scores (M, N) of one model, positive where a sample helps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradscope
from benchmarks.attribution.tasks import Task

Scorer = Callable[[Task, nn.Module], np.ndarray]
_BATCH = 100


@dataclass(frozen=True)
class Method:
    """A way to attribute.

    Attributes:
        scores: From a task and a trained model to (M, N).
        needs: The package it is of; None for gradscope and for what stands for chance.
    """

    scores: Scorer
    needs: str | None = None

    @property
    def present(self) -> bool:
        """Whether its package is installed."""
        return self.needs is None or find_spec(self.needs) is not None


def _ours(curvature: Any, task: Task, model: nn.Module) -> np.ndarray:
    scope = gradscope.Scope(model, task.loss)
    found = gradscope.attribute((scope, *task.train), (scope, *task.query), curvature)
    return np.asarray(found.values[...])


def _chance(task: Task, model: nn.Module) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(task.queries, task.size))


def _of_inputs(task: Task, model: nn.Module) -> np.ndarray:
    """Products of the inputs, where the targets are the same, less the others."""
    (train, labels), (query, wanted) = task.train, task.query
    if train.is_floating_point():
        sign = torch.where(wanted.unsqueeze(1) == labels, 1.0, -1.0)
        return (query.flatten(1) @ train.flatten(1).mT * sign).numpy()
    size = int(max(train.max(), query.max())) + 1  # of characters: how often each pair follows
    counts = [
        nn.functional.one_hot(x * size + y, size * size).sum(1).float()
        for x, y in ((query, wanted), (train, labels))
    ]
    return (counts[0] @ counts[1].mT).numpy()


def trained_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers that kronfluence has factors of."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d) and module.weight.requires_grad
    ]


@contextmanager
def analyzer(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> Iterator[Any]:
    """Yield kronfluence's analyzer of a model; its files are in a temporary folder."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.task import Task as TheirTask

    class ValidationSettings(TheirTask):  # type: ignore[misc]
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            inputs, targets = batch
            outputs = model(inputs)
            if sample and targets.is_floating_point():  # a squared error, of a unit variance
                targets = outputs.detach() + torch.randn_like(targets)
            elif sample:
                with torch.no_grad():
                    chance = torch.softmax(outputs.detach().flatten(0, -2), -1)
                    targets = torch.multinomial(chance, 1).reshape(targets.shape)
            return loss(outputs, targets).sum()

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

        def get_influence_tracked_modules(self) -> list[str]:
            return trained

    trained = trained_layers(model)
    asked = ValidationSettings()
    ready = prepare_model(model, asked)
    options: Any = {"cpu": True, "disable_tqdm": True, "log_level": 40}
    with TemporaryDirectory() as folder:
        yield Analyzer("benchmark", ready, asked, output_dir=folder, **options)


def _kronfluence(task: Task, model: nn.Module, **factors: Any) -> np.ndarray:
    """Kronfluence 1.0: factors and scores in its own files."""
    from kronfluence.arguments import FactorArguments, ScoreArguments

    damping = factors.pop("damping_factor", 1e-8)
    train, query = TensorDataset(*task.train), TensorDataset(*task.query)
    with analyzer(model, task.loss) as found:
        arguments = FactorArguments(strategy="ekfac", **factors)
        found.fit_all_factors("f", train, per_device_batch_size=_BATCH, factor_args=arguments)
        found.compute_pairwise_scores(
            "s",
            "f",
            query,
            train,
            per_device_query_batch_size=_BATCH,
            per_device_train_batch_size=_BATCH,
            score_args=ScoreArguments(damping_factor=damping),
        )
        scores: np.ndarray = found.load_pairwise_scores("s")["all_modules"].numpy()
    return scores


class _WithLoss(nn.Module):
    """A model that takes the targets too, and returns its loss as dattri wants it: `.loss`."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model, self.task = model, task

    def forward(self, inputs: Tensor, targets: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.task.loss(self.model(inputs), targets).sum())


def _named(samples: tuple[Tensor, Tensor]) -> DataLoader[Any]:
    each = [{"inputs": x, "targets": y} for x, y in zip(*samples, strict=True)]
    return DataLoader(each, batch_size=_BATCH)  # type: ignore[arg-type]


def _dattri(task: Task, model: nn.Module) -> np.ndarray:
    """LoGra as dattri has it: every Linear layer projected to 16 × 16, its own damping."""
    from dattri.algorithm.logra import LoGraAttributor
    from dattri.task import AttributionTask

    def loss(model: nn.Module, batch: Any, device: str) -> Tensor:
        found: Tensor = model(**batch).loss
        return found

    own = _WithLoss(model, task)
    asked = AttributionTask(loss_func=loss, model=own, checkpoints=own.state_dict())
    train = _named(task.train)
    with TemporaryDirectory() as folder:
        attributor = LoGraAttributor(task=asked, proj_dim=256, device="cpu", cache_dir=folder)
        attributor.cache(train)
        found = attributor.attribute(train, _named(task.query))
    scores: Tensor = found if isinstance(found, Tensor) else found[0]  # (N, M)
    return scores.mT.numpy()


def _trak(task: Task, model: nn.Module) -> np.ndarray:
    """TRAK by its authors' package, in float32, its projection at most half as wide as N."""
    import trak
    from trak.modelout_functions import AbstractModelOutput
    from trak.projectors import BasicProjector, ProjectionType

    def chances(model: Any, weights: Any, buffers: Any, x: Tensor, y: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, (weights, buffers), x)
        found = torch.softmax(logits, -1).gather(-1, y.unsqueeze(-1))
        return found.flatten(1)  # (n, t), t = 1 of images

    class Margin(AbstractModelOutput):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

        @staticmethod
        def get_output(model: Any, weights: Any, buffers: Any, x: Tensor, y: Tensor) -> Tensor:
            found = chances(model, weights, buffers, x.unsqueeze(0), y.unsqueeze(0))
            return torch.logit(found, eps=1e-6).mean()

        def get_out_to_loss_grad(self, model: Any, weights: Any, buffers: Any, batch: Any) -> Any:
            return (1.0 - chances(model, weights, buffers, *batch)).mean(1, keepdim=True).detach()

    width = 2 ** int(np.log2(task.size / 2))
    parameters = sum(p.numel() for p in model.parameters())
    kind = ProjectionType.normal
    projector = BasicProjector(  # of one block it cannot be used twice
        parameters, width, 0, kind, "cpu", block_size=width // 2
    )
    with TemporaryDirectory() as folder:
        traker = trak.TRAKer(
            model=model,
            task=Margin(),
            train_set_size=task.size,
            save_dir=folder,
            device="cpu",
            projector=projector,
            use_half_precision=False,
            logging_level=40,
        )
        state = {k: v.clone() for k, v in model.state_dict().items()}
        traker.load_checkpoint(state, model_id=0)
        for batch in DataLoader(TensorDataset(*task.train), batch_size=_BATCH):
            traker.featurize(batch=batch, num_samples=len(batch[0]))
        traker.finalize_features()
        traker.start_scoring_checkpoint("q", state, model_id=0, num_targets=task.queries)
        for batch in DataLoader(TensorDataset(*task.query), batch_size=_BATCH):
            traker.score(batch=batch, num_samples=len(batch[0]))
        scores = np.array(traker.finalize_scores("q"))  # (N, M)
    return scores.T


METHODS = {
    **{
        f"gradscope {word}": Method(partial(_ours, word))
        for word in (
            "auto",
            "shrunk",
            "ekfac",
            "kfac",
            "fisher",
            "blockfisher",
            "diagonal",
            "identity",
        )
    },
    "kronfluence EK-FAC": Method(_kronfluence, "kronfluence"),
    "kronfluence EK-FAC, damping 0.1": Method(
        partial(_kronfluence, damping_factor=None), "kronfluence"
    ),
    "kronfluence EK-FAC, labels of the data, damping 0.1": Method(
        partial(_kronfluence, damping_factor=None, use_empirical_fisher=True), "kronfluence"
    ),
    "dattri LoGra 16 × 16": Method(_dattri, "dattri"),
    "TRAK": Method(_trak, "trak"),
    "products of inputs": Method(_of_inputs),
    "chance": Method(_chance),
}


def checkpoints(task: Task, seeds: tuple[int, ...], folder: Path) -> list[nn.Module]:
    """Return the models that are explained, trained on all samples; kept in the folder."""
    found = []
    for seed in seeds:
        path = folder / f"{seed}.pt"
        if path.exists():
            model: nn.Module = task.module.build(**task.kwargs)
            model.load_state_dict(torch.load(path, weights_only=True))
            found.append(model.eval())
        else:
            found.append(task.fit(np.arange(task.size), seed))
            torch.save(found[-1].state_dict(), path)
    return found
