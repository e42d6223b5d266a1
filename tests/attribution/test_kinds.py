"""Trainings of many kinds, and the study of the rule of `auto`, on few samples."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from benchmarks.attribution import kinds, study
from benchmarks.attribution.kinds import KINDS, UNSEEN, Kind
from benchmarks.attribution.truth import SUBSETS


def by_hand(kind: Kind, indices: np.ndarray, seed: int) -> torch.nn.Module:
    """Train one model with torch's own optimiser, without a stack."""
    model, (inputs, targets) = kind.model(seed).train(), kind.train
    trained = [p for p in model.parameters() if p.requires_grad]
    made = {
        "adam": partial(torch.optim.AdamW, weight_decay=kind.decay),
        "sgd": partial(torch.optim.SGD, momentum=0.9, weight_decay=kind.decay),
    }
    optimizer = made[kind.optimizer](trained, lr=kind.rate)
    steps = kind.epochs * -(-len(indices) // kind.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    draw, chosen = torch.Generator().manual_seed(seed), torch.from_numpy(indices)
    for _ in range(kind.epochs):
        for rows in chosen[torch.randperm(len(chosen), generator=draw)].split(kind.batch):
            optimizer.zero_grad()
            kind.loss(model(inputs[rows]), targets[rows]).mean().backward()
            optimizer.step()
            schedule.step()
    return model.eval()


@pytest.mark.parametrize("name", ["mlp-sgd", "batchnorm", "squared", "recurrent", "adapters"])
def test_models_of_a_stack_are_trained_each_by_itself(name: str) -> None:
    kind = replace(kinds.stored(name)[0], epochs=2, batch=8)
    vars(kind)["start"] = kinds.stored(name)[0].start
    indices = np.stack([np.arange(24), np.arange(30, 54)])
    model = kind.model(5)
    for rows, state in zip(indices, kind.fit_many(indices, [5, 5]), strict=True):
        model.load_state_dict(state)
        wanted = by_hand(kind, rows, 5).state_dict()
        for key, value in model.eval().state_dict().items():
            torch.testing.assert_close(value, wanted[key], rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("name", [*KINDS, *UNSEEN])
def test_the_shipped_truth_fits_its_kind(name: str) -> None:
    kind, truth = kinds.stored(name)
    assert truth.subsets.shape == (SUBSETS, kind.size)
    assert truth.losses.shape[1:] == (SUBSETS, kind.queries) and np.isfinite(truth.losses).all()
    assert kinds.agreement(truth) > 0.4
    trained = [k for k, p in kind.model(1).named_parameters() if p.requires_grad]
    assert trained and all(kind.only in k for k in trained)


def test_products_give_the_dense_formulas() -> None:
    draw = np.random.default_rng(0)
    g, c, q = (draw.normal(size=(n, 7)) for n in (5, 6, 3))
    inverse = np.diag(4.0 * draw.random(7) + 0.4)
    made = (q @ inverse @ g.T, q @ inverse @ c.T, c @ inverse @ c.T, c @ inverse @ g.T)
    own = torch.from_numpy(np.diag(g @ inverse @ g.T).copy())
    products = study.Products(*map(torch.from_numpy, made), own)
    np.testing.assert_allclose(products.scores("T", 1.0), q @ inverse @ g.T)
    for some, rows in ((products, c), (products.centred(), c - c.mean(0))):
        h = np.linalg.inv(0.6 * rows.T @ rows / 6 + 0.4 * np.linalg.inv(inverse))
        ratio = np.trace(g @ inverse @ g.T) / np.trace(g @ h @ g.T)
        wanted = q @ h @ g.T / 0.4**-1
        np.testing.assert_allclose(some.scores("H", 0.4), wanted, rtol=1e-9)
        wanted = q @ (inverse + ratio * h) @ g.T
        np.testing.assert_allclose(some.scores("mean", 0.4), wanted, rtol=1e-9)
        odds = 2 / 3 * max(1.0, np.trace(g @ inverse @ g.T) / 5 / 6)
        raised = some.scores("raised", 0.4)
        np.testing.assert_allclose(raised, some.scores("mean", odds / (1 + odds)), rtol=1e-9)


def test_the_rule_of_a_task_is_the_best_on_all_others() -> None:
    rules = {"a": [0.9, 0.1], "b": [0.5, 0.6], "c": [0.5, 0.7]}
    found = {k: {"rules": dict(zip("xy", v, strict=True))} for k, v in rules.items()}
    assert study.left_out(found) == {"a": ("y", 0.1), "b": ("x", 0.5), "c": ("x", 0.5)}
