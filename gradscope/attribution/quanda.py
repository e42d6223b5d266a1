"""`GradscopeExplainer`: scores for the metrics and benchmarks of quanda.

    from gradscope.attribution.quanda import GradscopeExplainer

This import also imports quanda (https://github.com/dilyabareeva/quanda, 0.5 or later).
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gradscope.attribution.methods import AttributionSettings
from gradscope.attribution.scoring import CheckpointSources, Comparing, Scoring
from gradscope.attribution.sources import scope_source
from gradscope.errors import SpecError
from gradscope.scope import Scope

_Quanda: Any = object  # stands for quanda's `Explainer`, which may not be installed
_READ = 256  # training samples collated at a time


def __getattr__(name: str) -> Any:
    if name != "GradscopeExplainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from quanda.explainers import Explainer
    except ImportError as error:
        raise SpecError(
            f"quanda cannot be imported: {error}",
            where="GradscopeExplainer",
            remedy="Install it: pip install torch-gradscope[quanda].",
        ) from error
    made = type(name, (_Explainer, Explainer), {"__doc__": _Explainer.__doc__})
    globals()[name] = made
    return made


class _Explainer(_Quanda):  # type: ignore[misc]
    """Scores of the training samples for test samples, s(q, i) of `gradscope.attribution`.

    The curvature is computed once, when the first test samples are explained.

    Args:
        model: Any module. It is set to eval mode, with the last of the checkpoints if given.
        train_dataset: Pairs (input, target).
        task: image_classification.
        checkpoints: Paths of checkpoints.
        checkpoints_load_func: Loads a checkpoint into the model.
        loss: A name, or `(outputs, targets) -> (n,)`.
        curvature: See `gradscope.attribute`.
        damping: See `gradscope.attribute`.
        **more: Arguments of quanda's class.
    """

    accepted_tasks = ["image_classification"]  # noqa: RUF012 (quanda's)

    def __init__(
        self,
        model: torch.nn.Module,
        train_dataset: Any,
        task: str = "image_classification",
        checkpoints: Any = None,
        checkpoints_load_func: Any = None,
        loss: Any = "cross_entropy",
        curvature: Any = "auto",
        damping: Any = "auto",
        **more: Any,
    ) -> None:
        own = model, train_dataset, task, checkpoints, checkpoints_load_func
        super().__init__(*own, **more)
        self.load_last_checkpoint()
        self.model.eval()
        self._asked = AttributionSettings(curvature, damping)
        self._scope = Scope(self.model, loss)
        loader = torch.utils.data.DataLoader(self.train_dataset, batch_size=_READ)
        inputs, targets = zip(*loader, strict=True)
        self._train = scope_source(
            "training samples", self._scope, torch.cat(inputs), torch.cat(targets)
        )

    @cached_property
    def _own(self) -> Comparing:
        return Comparing(CheckpointSources(self._train, self._train), self._asked)

    def explain(self, test_data: Tensor, targets: list[int] | Tensor) -> Tensor:
        """Return the scores (m, N) of inputs (m, ...); 0 for samples without finite gradient."""
        given = torch.as_tensor(targets).to(self.device)
        query = scope_source("queries", self._scope, test_data.to(self.device), given)
        rows = Scoring(
            [CheckpointSources(self._train, query)], self._asked, self._own.curved
        ).rows()
        found = torch.cat([scores for _, scores in rows])
        return found.nan_to_num(nan=0.0).to(self.device, torch.float32)

    def self_influence(self, batch_size: int = 32) -> Tensor:
        """Return s(i, i) (N,) of the training samples; 0 for samples without finite gradient."""
        own = self._own.self_influence()
        if own is None:
            found: Tensor = super().self_influence(batch_size)
            return found
        return own.nan_to_num(nan=0.0).to(self.device, torch.float32)
