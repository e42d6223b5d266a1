"""Statistics of one batch in memory, during training."""

from collections.abc import Sequence
from math import nan
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradscope.blocks import Evaluation
from gradscope.blocks.base import size
from gradscope.core.batch import Batch
from gradscope.engine.certificate import finite_samples
from gradscope.model.ranks import Ranks
from gradscope.scope import Scope
from gradscope.stats import Summary, summarize
from gradscope.stats.records import Floats, cosines_of


class _Cosines(dict[str, Floats]):
    """A chain in memory: {name: array}."""

    text, reduced = "cosine:to=mean", False


def measure(
    scope: Scope, inputs: Any, targets: Any = None, top: int = 10, clip: Sequence[float] = ()
) -> Summary:
    """Return the statistics of the samples of one batch.

    Gradients are not formed if blocks can compute norms and products without them. Statistics that
    need rows (signal by entry, spectrum, noise between classes) are omitted. If the model is
    sharded, all processes call this together and get the statistics of all samples.

    Args:
        scope: The scope of model and loss.
        inputs: A tensor, tuple or dict, sample axis first. All samples are evaluated at once.
        targets: The same for the targets, or None.
        top: The number of samples in each list.
        clip: Clipping norms; the share of samples above each norm is computed.
    """
    scope.session.labels.require_one()
    ranks = scope.problem.model_parallel
    if ranks is None:
        evaluation = scope.evaluate(Batch.of(inputs, targets))
        samples, norms, dots, lengths = _measured(evaluation, targets, None)
    else:
        batch = ranks.number_samples(lambda: Batch.of(inputs, targets), "measure")
        evaluation = scope.evaluate(batch)
        with ranks.raise_on_all():
            *own, lengths = _measured(evaluation, targets, ranks)
        samples, norms, dots = map(_joined, zip(*ranks.all_gather(own), strict=True))
    n, finite = len(samples["loss"]), samples["finite"]
    samples["index"], along = np.arange(n), np.zeros(n)
    sizes = samples["norm"][finite] * np.linalg.norm(list(lengths.values()))
    along[finite] = np.nan_to_num(cosines_of(dots, sizes))
    measured: Any = SimpleNamespace(  # a `Source`
        path="memory",
        n=n,
        parameters={name: block.shape for name, block in evaluation.gradients.items()},
        samples=samples,
        norms=norms,
        norm_attributes={k: {"mean_gradient_norm": length} for k, length in lengths.items()},
        chains=(_Cosines(cosine=along),),
        attributes={},
        run={"backend": scope.backend},
        certificate={} if scope.certificate is None else scope.certificate.to_json(),
    )
    return summarize(measured, top=top, clip=clip)


def _measured(evaluation: Evaluation, targets: Any, ranks: Ranks | None) -> tuple[Any, ...]:
    """Return columns (n,), {parameter: norms (n,)}, ⟨gᵢ, G⟩ of finite samples, {parameter: ‖G‖}.

    G is the mean over the finite samples of all ranks. The other values are for this rank.
    """
    gradients, finite = evaluation.gradients, _numpy(finite_samples(evaluation))
    rows = torch.from_numpy(np.flatnonzero(finite)).to(evaluation.losses.device)
    count = len(rows) if ranks is None else sum(ranks.all_gather(len(rows)))
    dots, lengths = np.zeros(len(rows)), {}
    for name, block in gradients.items():
        kept = block.select(rows).to(torch.promote_types(block.dtype, torch.float32))
        total = kept.weighted_sum()
        mean = (total if ranks is None else ranks.sum_over_ranks(total)) / max(1, count)
        dots += _numpy(kept.dot(mean).real)
        lengths[name] = float(size(mean)) if count else nan
    samples = {
        "loss": _numpy(evaluation.losses),
        "norm": _numpy(gradients.norms),
        "finite": finite,
    }
    if isinstance(targets, Tensor) and targets.dim() == 1:
        samples["target"] = _numpy(targets)
    norms = {name: _numpy(v.sqrt()) for name, v in gradients.squared_norms.items()}
    return samples, norms, dots, lengths


def _joined(of_ranks: Sequence[Any]) -> Any:
    """Concatenate the ranks' arrays (n,), or the arrays of each key that all ranks have."""
    if not isinstance(of_ranks[0], dict):
        return np.concatenate(of_ranks)
    common = [k for k in of_ranks[0] if all(k in one for one in of_ranks)]
    return {k: np.concatenate([one[k] for one in of_ranks]) for k in common}


def _numpy(values: Tensor) -> Any:
    values = values.detach().cpu()
    return (values.float() if values.dtype is torch.bfloat16 else values).numpy()
