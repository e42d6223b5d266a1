"""What a backend makes of a case, and what it leaves behind."""

from typing import Any

import torch
from torch import Tensor

from gradscope.backends.base import Backend, backends
from gradscope.blocks import Evaluation
from gradscope.core.batch import Batch, tensors
from gradscope.model.problem import Problem
from tests.cases import Setup

TOLERANCE = 1e-8


def run(backend: str | Backend, setup: Setup) -> Evaluation:
    """Evaluate a setup with a backend."""
    bound = backends.get(backend) if isinstance(backend, str) else backend
    with bound(Problem.of(setup.model, setup.loss)) as evaluate:
        return evaluate(Batch.of(setup.inputs, setup.targets))


def mistakes(evaluation: Evaluation, losses: Tensor, gradients: dict[str, Tensor]) -> list[str]:
    """Compare losses, names, shapes, each parameter's gradients and each sample's."""
    found = []
    if not torch.allclose(evaluation.losses, losses, rtol=TOLERANCE, atol=0.0):
        found.append(f"losses {evaluation.losses} instead of {losses}")
    if list(evaluation.gradients) != list(gradients):
        return [*found, f"parameters {list(evaluation.gradients)}, not {list(gradients)}"]
    norms = torch.stack([_sizes(g) for g in gradients.values()]).norm(dim=0)
    for name, right in gradients.items():
        ours = evaluation.gradients[name].dense()
        if ours.shape != right.shape or ours.dtype != right.dtype:
            found.append(f"{name}: {ours.dtype} {ours.shape}, not {right.dtype} {right.shape}")
            continue
        gap = _sizes(ours - right)
        size = _sizes(right)
        if not gap.norm() <= TOLERANCE * max(size.norm(), 1e-6 * norms.norm()):
            found.append(f"{name}: relative error {gap.norm() / size.norm():.1e}")
        floor = torch.maximum(size, 1e-6 * norms).clamp_min(1e-10)
        if not (gap <= TOLERANCE * floor).all():
            found.append(f"{name}: errors by sample {(gap / floor).tolist()}")
    return found


def _sizes(gradients: Tensor) -> Tensor:
    """The norm (n,) of each sample's gradient (n, *shape)."""
    return gradients.reshape(len(gradients), -1).norm(dim=1)


def fingerprint(setup: Setup) -> dict[str, Any]:
    """Everything that an evaluation must leave alone."""
    model = setup.model
    facts: dict[str, Any] = {
        "generator": torch.get_rng_state(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "gradients enabled": torch.is_grad_enabled(),
        "training": [m.training for m in model.modules()],
        "parameters": [id(p) for p in model.parameters()],
        "buffers": [id(b) for b in model.buffers()],
        "hooks": [
            len(v) for m in model.modules() for k, v in vars(m).items() if k.endswith("_hooks")
        ],
        "data flags": [t.requires_grad for t in tensors((setup.inputs, setup.targets))],
    }
    for name, p in model.named_parameters():
        facts[f"{name}: flags"] = (p.requires_grad, p.grad, p._version, p._backward_hooks)
        facts[f"{name}: values"] = p.detach().clone()
    for name, b in model.named_buffers():
        facts[f"{name}: values"] = b.detach().clone()
    for k, t in enumerate(tensors((setup.inputs, setup.targets))):
        facts[f"data {k}"] = t.detach().clone()
    return facts


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Name the facts that changed."""
    same = {
        k: torch.equal(v, after[k]) if isinstance(v, Tensor) else v == after[k]
        for k, v in before.items()
    }
    return [name for name, equal in same.items() if not equal]
