"""Predictions and margins in the sample table, against numpy on the model's own outputs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.config import RunSpec, resolve
from gradscope.core.batch import Batch
from gradscope.engine.session import Session, SessionSettings
from gradscope.errors import OutputError
from gradscope.run import compute, prepare, start
from gradscope.stages.losses import losses
from gradscope.stages.predictions import predicted
from gradscope.stats import summarize

MODELS = Path(__file__).parents[2] / "sample_models"
Table = dict[str, np.ndarray]


def spec(name: str = "digits_mlp", **options: Any) -> RunSpec:
    return resolve(MODELS / name / "run.toml", {"compute": {"samples": ":90"} | options})


def table(path: Path, **options: Any) -> Table:
    compute(prepare(spec(**({"transform": ["mean"]} | options))), path)
    with gradscope.open(path) as file:
        return {name: np.asarray(column) for name, column in file.samples.items()}


@pytest.fixture(scope="module")
def truth() -> tuple[np.ndarray, np.ndarray]:
    """The logits of the digits' model, each alone, and the labels."""
    job = prepare(spec())
    whole = job.load(0, 90)
    model = job.session.problem.model
    with torch.no_grad():
        alone = torch.cat([model(whole.inputs[k : k + 1]) for k in range(90)])
    return alone.double().numpy(), whole.targets.numpy()


def odds(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """log p_y - log(1 - p_y), by the definition."""
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    own = p[np.arange(len(p)), labels]
    return np.log(own) - np.log1p(-own)


@pytest.mark.parametrize(
    "options",
    [
        *({"backend": name} for name in ("auto", "loop", "vmap", "expand")),
        {"batch_size": 1},
        {"batch_size": 7, "verify": "always"},
        {"labels": "sampled"},
        {"labels": "exact"},
    ],
    ids=str,
)
def test_classes_have_prediction_and_margin(
    tmp_path: Path, truth: tuple[np.ndarray, np.ndarray], options: dict[str, Any]
) -> None:
    logits, labels = truth
    found = table(tmp_path / "a.h5", **options)
    np.testing.assert_array_equal(found["prediction"], logits.argmax(1))
    np.testing.assert_array_equal(found["target"], labels)
    np.testing.assert_allclose(found["margin"], odds(logits, labels), rtol=1e-7)


def test_a_number_a_sample_is_the_prediction(tmp_path: Path) -> None:
    job = prepare(spec("sunspots_lstm"))
    with torch.no_grad():
        outputs = job.session.problem.model(job.load(0, 90).inputs)
    found = table(tmp_path / "a.h5", name="sunspots_lstm")
    np.testing.assert_allclose(found["prediction"], outputs.flatten().numpy(), rtol=1e-5)
    assert "margin" not in found


@pytest.mark.parametrize("name", ["text_transformer", "poisson_pinn"])
def test_sequences_and_model_losses_have_none(tmp_path: Path, name: str) -> None:
    assert not {"prediction", "margin"} & table(tmp_path / "a.h5", name=name, samples=":8").keys()


def test_they_can_be_left_out_and_change_nothing_else(tmp_path: Path) -> None:
    own = table(tmp_path / "a.h5")
    without = table(tmp_path / "b.h5", predictions=False)
    assert own.keys() - without.keys() == {"prediction", "margin"}
    for name, column in without.items():
        assert column.tobytes() == own[name].tobytes(), name
    with gradscope.open(tmp_path / "a.h5") as one, gradscope.open(tmp_path / "b.h5") as other:
        for name, array in one.chains[0].items():
            assert np.asarray(array).tobytes() == np.asarray(other.chains[0][name]).tobytes()


def test_a_run_goes_on_with_them_or_without_as_it_began(tmp_path: Path) -> None:
    path, asked = tmp_path / "a.h5", {"batch_size": 30, "transform": ["mean"]}
    with start(prepare(spec(**asked)), path) as run:
        run.add(next(iter(run.remaining())))
    with (
        pytest.raises(OutputError, match="predictions"),
        start(prepare(spec(predictions=False, **asked)), path, resume=True),
    ):
        pass
    with start(prepare(spec(**asked)), path, resume=True) as run:
        for batch in run.remaining():
            run.add(batch)
        run.finish()
    compute(prepare(spec(**asked)), tmp_path / "whole.h5")
    assert path.read_bytes() == (tmp_path / "whole.h5").read_bytes()


class Counting(nn.Module):
    """A linear layer that counts how often it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 4), [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        return self.layer(x)


def batches() -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        inputs = torch.randn(20, 6, generator=generator)
        yield Batch.of(inputs, torch.randint(4, (20,), generator=generator))


def test_the_hooks_backend_takes_no_further_forward_pass() -> None:
    calls = []
    for asked in (False, True):
        torch.manual_seed(0)
        session = Session(Counting(), "cross_entropy", SessionSettings(predictions=asked))
        for batch in batches():
            assert bool(session.predictions_of(batch, session.evaluate(batch))) == asked
        calls.append(session.problem.model.calls[0])
    assert calls[0] == calls[1]


class OneAtATime(nn.Module):
    """Takes a way by the first sample: only batches of one are right."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer(x)
        return logits if float(x[0].sum()) > 0 else logits.flip(1) * 2


def test_a_model_for_single_samples_predicts_as_it_does_for_them() -> None:
    torch.manual_seed(0)
    model = OneAtATime()
    asked = SessionSettings(predictions=True, backend="loop", verify="never")  # or it is refused
    session = Session(model, "cross_entropy", asked)
    batch = next(batches())
    found = session.predictions_of(batch, session.evaluate(batch))["prediction"]
    with torch.no_grad():
        alone = [int(model(batch.inputs[k : k + 1]).argmax()) for k in range(20)]
    assert found.tolist() == alone
    assert alone != model(batch.inputs).argmax(1).tolist()


def test_a_loss_that_writes_into_the_outputs_leaves_none_that_is_wrong() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.mul_(3).squeeze(1).sub(targets).square()

    torch.manual_seed(0)
    model, batch = nn.Linear(6, 1), next(batches())
    batch = Batch.of(batch.inputs, batch.targets.float())
    session = Session(model, loss, SessionSettings(predictions=True))
    assert not session.predictions_of(batch, session.evaluate(batch))


def test_margins_of_two_classes_are_the_logits_far_out_too() -> None:
    logits = torch.tensor([0.0, 2.5, -400.0, 600.0, float("nan"), 1.0])
    targets = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.25])
    found = predicted(losses.get("bce_with_logits"), logits, targets)
    assert found["prediction"].tolist() == [0, 1, 0, 1, -1, 1]
    np.testing.assert_allclose(found["margin"][:4], [0.0, -2.5, 400.0, 600.0], rtol=1e-6)
    assert found["margin"][4:].isnan().all()  # not finite; a target between the classes


def test_a_target_that_does_not_count_has_no_margin() -> None:
    logits, targets = torch.randn(3, 5), torch.tensor([2, -100, 4])
    found = predicted(losses.get("cross_entropy"), logits, targets)
    assert found["margin"].isnan().tolist() == [False, True, False]
    soft = predicted(losses.get("cross_entropy"), logits, logits.softmax(1))
    assert soft.keys() == {"prediction"}
    assert soft["prediction"].tolist() == logits.argmax(1).tolist()


def test_stats_count_the_wrong_ones(tmp_path: Path, truth: tuple[np.ndarray, np.ndarray]) -> None:
    logits, labels = truth
    table(tmp_path / "a.h5")
    with gradscope.open(tmp_path / "a.h5") as file:
        summary = summarize(file, top=4)
    assert summary.predictions.wrong == np.mean(logits.argmax(1) != labels) > 0
    assert summary.predictions.samples == 90
    for row in summary.largest_losses:
        assert row.prediction == logits.argmax(1)[row.index]
