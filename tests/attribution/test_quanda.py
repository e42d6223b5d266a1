"""The explainer for quanda, on a stand-in of quanda's own base class."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import gradscope
import gradscope.attribution.quanda as adapter
from gradscope.errors import SpecError

N, M = 20, 5


class Explainer:
    """What quanda 0.5 does in its base class, as far as explainers rely on it."""

    accepted_tasks: tuple[str, ...] = ()

    def __init__(
        self, model: nn.Module, train_dataset: Any, task: str = "", checkpoints: Any = None,
        checkpoints_load_func: Any = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        if task not in self.accepted_tasks:
            raise ValueError(f"Task {task} not supported by this explainer.")
        self.model, self.device = model, "cpu"
        self.train_dataset, self.checkpoints = train_dataset, checkpoints or []
        self.checkpoints_load_func = checkpoints_load_func

    def load_last_checkpoint(self) -> None:
        if self.checkpoints:
            self.checkpoints_load_func(self.model, self.checkpoints[-1])

    def self_influence(self, batch_size: int = 32) -> Tensor:
        rows = [self.explain(*self.train_dataset[i : i + 1]) for i in range(N)]  # type: ignore
        return torch.stack([row[0, i] for i, row in enumerate(rows)])


@pytest.fixture
def explainer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    package, inner = ModuleType("quanda"), ModuleType("quanda.explainers")
    inner.Explainer = Explainer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "quanda", package)
    monkeypatch.setitem(sys.modules, "quanda.explainers", inner)
    yield adapter.GradscopeExplainer
    vars(adapter).pop("GradscopeExplainer", None)


@pytest.fixture
def case() -> tuple[nn.Module, Dataset[Any], Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 3)).double()
    draw = torch.randn(N + M, 4, dtype=torch.float64), torch.randint(0, 3, (N + M,))
    return model, TensorDataset(draw[0][:N], draw[1][:N]), draw[0][N:], draw[1][N:]


@pytest.mark.parametrize("curvature", ["auto", "ekfac", "identity"])
def test_it_gives_the_scores_of_attribute(explainer: Any, case: Any, curvature: str) -> None:
    model, train, inputs, targets = case
    made = explainer(model, train, curvature=curvature, damping=0.2)
    rows = [made.explain(inputs[:2], targets[:2].tolist()), made.explain(inputs[2:], targets[2:])]
    found = torch.cat(rows)
    with gradscope.Scope(model.eval(), "cross_entropy") as scope:
        sides = (scope, *train.tensors), (scope, inputs, targets)
        expected = gradscope.attribute(*sides, curvature, 0.2)
        itself = gradscope.attribute(sides[0], sides[0], curvature, 0.2)
    assert (found.shape, found.dtype) == ((M, N), torch.float32)
    torch.testing.assert_close(found, torch.from_numpy(expected.values).float())
    own = torch.from_numpy(itself.values).diagonal()
    torch.testing.assert_close(made.self_influence(), own.float())


def test_the_curvature_is_found_once(
    explainer: Any, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradscope.attribution import scoring

    model, train, inputs, targets = case
    known, calls = scoring.curved, []
    monkeypatch.setattr(scoring, "curved", lambda *a: (calls.append(1), known(*a))[1])
    made = explainer(model, train)
    for _ in range(3):
        made.explain(inputs, targets)
    made.self_influence()
    assert len(calls) == 1


def test_it_takes_the_last_checkpoint_and_evaluates(explainer: Any, case: Any) -> None:
    model, train, inputs, targets = case
    expected = explainer(model, train).explain(inputs, targets)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    nn.init.normal_(model[0].weight)
    made = explainer(
        model.train(), train, checkpoints=[None, state],
        checkpoints_load_func=lambda model, state: model.load_state_dict(state),
    )  # fmt: skip
    assert not model.training
    torch.testing.assert_close(made.explain(inputs, targets), expected)


def test_a_sample_without_a_finite_gradient_scores_nothing(explainer: Any, case: Any) -> None:
    model, train, inputs, targets = case
    train.tensors[0][3] = torch.nan
    found = explainer(model, train).explain(inputs, targets)
    assert (found[:, 3] == 0).all()
    assert (found != 0).sum() == M * (N - 1)


def test_other_tasks_are_refused(explainer: Any, case: Any) -> None:
    with pytest.raises(ValueError, match="not supported"):
        explainer(case[0], case[1], task="causal_lm")


def test_without_quanda_there_is_a_word_about_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "quanda", None)
    with pytest.raises(SpecError, match=r"torch-gradscope\[quanda\]"):
        _ = adapter.GradscopeExplainer
    with pytest.raises(AttributeError):
        _ = adapter.Nothing
    importlib.reload(adapter)  # the module itself does not need it
