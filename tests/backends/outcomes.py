"""What a backend makes of a case: judged once, asked about by several tests."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from gradscope.backends import backends
from gradscope.blocks import Evaluation
from gradscope.core.batch import Batch, tensors
from gradscope.core.problem import Problem
from gradscope.errors import RefusedError
from tests import oracle
from tests.cases import CASES, Setup

TOLERANCE = 1e-8


@dataclass(frozen=True)
class Outcome:
    """A backend's answer to a case.

    Attributes:
        error: What it raised, or None.
        wrong: What is wrong with its answer; empty when the answer is exact.
        traces: What it left behind in the model, the data or torch.
    """

    error: Exception | None
    wrong: tuple[str, ...]
    traces: tuple[str, ...]


def run(backend: str, setup: Setup) -> Evaluation:
    """Evaluate a setup with a backend."""
    with backends.get(backend)(Problem.of(setup.model, setup.loss)) as evaluate:
        return evaluate(Batch.of(setup.inputs, setup.targets))


@cache
def expected(name: str) -> tuple[Tensor, dict[str, Tensor]] | None:
    """The oracle's answer to a case, or None where a batch of one has none."""
    try:
        return oracle.per_sample_gradients(*CASES[name].build())
    except ValueError:
        assert CASES[name].coupled
        return None


@cache
def outcome(backend: str, name: str) -> Outcome:
    """Run a backend on a case and judge what it did."""
    setup = CASES[name].build()
    error, wrong = None, []
    before = fingerprint(setup)
    try:
        evaluation = run(backend, setup)
    except Exception as raised:
        error = raised
    traces = differences(before, fingerprint(setup))
    if error is None:
        answer = expected(name)
        if answer is None:
            wrong = ["an answer where a batch of one has none"]
        else:
            wrong = mistakes(evaluation, *answer)
    return Outcome(error, tuple(wrong), tuple(traces))


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
        "hooks": [len(v) for m in model.modules() for k, v in _hooks(m)],
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


def _hooks(module: nn.Module) -> list[tuple[str, Any]]:
    return [(k, v) for k, v in vars(module).items() if k.endswith("_hooks")]


def require_as_exact(backend: str, name: str, setup: Setup) -> bool:
    """Run a case under other conditions: it must be right, or refused as it is without them.

    Returns:
        Whether it was run.
    """
    try:
        evaluation = run(backend, setup)
    except RefusedError:
        assert outcome(backend, name).error is not None
        return False
    answer = expected(name)
    assert answer is not None
    assert not mistakes(evaluation, *answer)
    return True
