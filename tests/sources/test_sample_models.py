"""The sample models: every run file resolves, every checkpoint fits, every data set opens."""

from pathlib import Path

import pytest

from gradscope.config import load
from gradscope.sources.code import load_function
from gradscope.sources.data import open_dataset
from gradscope.sources.models import build
from gradscope.sources.weights import load_into

FOLDER = Path(__file__).parents[2] / "sample_models"
SAMPLES = {path.parent.name: path for path in sorted(FOLDER.glob("*/run.toml"))}


def test_the_six_are_there() -> None:
    assert set(SAMPLES) == {
        "digits_mlp",
        "digits_cnn",
        "digits_batchnorm",
        "sunspots_lstm",
        "text_transformer",
        "poisson_pinn",
    }


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_model_loads_and_its_model_takes_its_data(name: str) -> None:
    spec = load(SAMPLES[name])
    model = build(spec.model.factory, spec.model.kwargs, spec.model.mode)
    fresh = {k: v.clone() for k, v in model.named_parameters()}
    report = load_into(model, spec.checkpoint.path)
    assert report.notes == ()  # the weights fit as they are
    assert report.tensors == len(model.state_dict())
    assert any(not v.equal(fresh[k]) for k, v in model.named_parameters())
    data = open_dataset(spec.dataset)
    batch = data.batch(data.rows("0:5"))
    outputs = model(batch.inputs)
    assert outputs.shape[0] == 5
    assert outputs.isfinite().all()
    if ":" in spec.loss.name:
        assert callable(load_function(spec.loss.name, "loss"))
