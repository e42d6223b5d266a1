"""`measure`: the statistics of a batch in memory, with no file between."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradscope.blocks import Evaluation
from gradscope.core.batch import Batch
from gradscope.engine import finite_samples
from gradscope.scope import Scope
from gradscope.stages.reducers.base import wide
from gradscope.stats.base import Floats, Mask
from gradscope.stats.summary import Summary, summarize


class Column(Mapping[str, Floats]):
    """A chain in memory: one array by name."""

    reduced = False

    def __init__(self, text: str, name: str, values: Floats) -> None:
        self.text, self._name, self._values = text, name, values

    def __getitem__(self, name: str) -> Floats:
        return {self._name: self._values}[name]

    def __iter__(self) -> Iterator[str]:
        return iter([self._name])

    def __len__(self) -> int:
        return 1


@dataclass
class Measured:
    """What `summarize` needs of a file, in memory."""

    n: int
    parameters: Any
    samples: Any
    norms: Any
    norm_attributes: Any
    chains: Any
    run: Any
    certificate: Any
    path: Any = "memory"
    attributes: Any = field(default_factory=dict)


def measure(scope: Scope, inputs: Any, targets: Any = None, top: int = 10) -> Summary:
    """Return the statistics of the samples of one batch.

    No gradient is formed where the blocks know their norms and products. What needs rows (signal
    by entry, spectrum, noise between classes) is left out.

    Args:
        scope: Of a model and loss.
        inputs: A tensor, tuple or dict, sample axis first; all samples are held at once.
        targets: Likewise, or None.
        top: How many samples to list in each list.
    """
    scope.session.labels.require_one()
    evaluation = scope.evaluate(Batch.of(inputs, targets))
    finite = _numpy(finite_samples(evaluation))
    means, dots = _mean_and_products(evaluation, finite)
    certificate = {} if scope.certificate is None else scope.certificate.to_json()
    gradients = evaluation.gradients
    samples = {
        "index": np.arange(len(finite)),
        "loss": _numpy(evaluation.losses),
        "norm": _numpy(gradients.norms),
        "finite": finite,
    }
    if isinstance(targets, Tensor) and targets.dim() == 1:
        samples["target"] = _numpy(targets)
    lengths = {name: _length(mean) if finite.any() else nan for name, mean in means.items()}
    along = np.zeros(len(finite))
    sizes = samples["norm"][finite] * np.linalg.norm(list(lengths.values()))
    along[finite] = np.divide(dots, sizes, out=np.zeros_like(dots), where=sizes > 0)
    measured = Measured(
        n=len(finite),
        parameters={name: block.shape for name, block in gradients.items()},
        samples=samples,
        norms={name: _numpy(v.sqrt()) for name, v in gradients.squared_norms.items()},
        norm_attributes={k: {"mean_gradient_norm": length} for k, length in lengths.items()},
        chains=(Column("cosine:to=mean", "cosine", along),),
        run={"backend": scope.backend},
        certificate=certificate,
    )
    return summarize(measured, top=top)


def _mean_and_products(evaluation: Evaluation, finite: Mask) -> tuple[dict[str, Tensor], Floats]:
    """Return G, {name: (*shape)}, and ⟨gᵢ, G⟩ (m,) of the m finite samples."""
    rows = torch.from_numpy(np.flatnonzero(finite)).to(evaluation.losses.device)
    kept = {name: wide(block.select(rows)) for name, block in evaluation.gradients.items()}
    means = {name: block.weighted_sum() / max(1, len(rows)) for name, block in kept.items()}
    dots = np.zeros(len(rows))
    for name, block in kept.items():
        dots += _numpy(block.dot(means[name]).real)
    return means, dots


def _length(mean: Tensor) -> float:
    return float(torch.linalg.vector_norm(mean))


def _numpy(values: Tensor) -> Any:
    return values.detach().cpu().numpy()
