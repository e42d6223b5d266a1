"""Checkpoints that can execute code: loaded only when the user said so; then also as the model."""

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradscope
from gradscope.config import CheckpointSpec, ModelSpec
from gradscope.errors import CheckpointError, ModelError
from gradscope.sources.models import LoadedModel, load_model
from gradscope.sources.weights import load_into
from tests.sources.test_checkpoints import WROTE, Payload, legacy, model, state, trained

INPUTS = torch.linspace(-1, 1, 10).reshape(5, 2)
TARGETS = torch.linspace(0, 1, 15).reshape(5, 3)


def pickled(content: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(content))


def scripted(content: nn.Module, path: Path) -> None:
    torch.jit.script(content).save(path)


def traced(content: nn.Module, path: Path) -> None:
    torch.jit.trace(content, INPUTS).save(path)


def exported(content: nn.Module, path: Path, sizes: Any = ({0: torch.export.Dim.DYNAMIC},)) -> None:
    torch.export.save(torch.export.export(content, (INPUTS,), dynamic_shapes=sizes), path)


MODULES: dict[str, Callable[[Any, Path], None]] = {
    "saved": torch.save,
    "legacy": legacy,
    "pickled": pickled,
    "scripted": scripted,
    "traced": traced,
    "exported": exported,
}
quiet = pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:`isinstance.treespec:FutureWarning")


def held(path: Path, mode: str = "eval", **kwargs: Any) -> LoadedModel:
    spec = CheckpointSpec(path=path, **{"unsafe_pickle": True} | kwargs)
    return load_model(ModelSpec(factory="checkpoint", mode=mode), spec)


def written(folder: Path, how: str, content: nn.Module | None = None) -> Path:
    path = folder / ("model.pt2" if how == "exported" else "model.bin")
    MODULES[how](trained().eval() if content is None else content, path)
    return path


@quiet
@pytest.mark.parametrize("how", MODULES)
def test_only_with_the_flag_it_gives_the_weights_and_is_the_model(tmp_path: Path, how: str) -> None:
    path = written(tmp_path, how)
    for load in (lambda: load_into(model(), path), lambda: held(path, unsafe_pickle=False)):
        with pytest.raises(CheckpointError) as caught:
            load()
        assert "unsafe_pickle=True" in str(caught.value.remedy)
    net = model()
    report = load_into(net, path, unsafe_pickle=True)
    torch.testing.assert_close(dict(net.state_dict()), state(), rtol=0, atol=0)
    assert any("allowed to execute code" in note for note in report.notes)
    loaded = held(path)
    expected = gradscope.per_sample_gradients(trained().eval(), "mse", INPUTS, TARGETS)
    found = gradscope.per_sample_gradients(loaded.model, "mse", INPUTS, TARGETS)
    torch.testing.assert_close(found, expected)
    if how in ("traced", "exported"):  # the others are the model itself, or compiled alike
        assert gradscope.compare(loaded.model, "mse", INPUTS, TARGETS).agrees
    assert loaded.digests == {}  # the checkpoint alone describes the model


@quiet
@pytest.mark.parametrize("how", ["saved", "scripted"])
def test_the_mode_is_the_one_asked_for(tmp_path: Path, how: str) -> None:
    path = written(tmp_path, how)
    assert not held(path).model.training
    assert held(path, "train").model.training


def test_a_program_stays_in_the_mode_of_its_export(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the mode of an exported program cannot be changed"):
        held(written(tmp_path, "exported"), "train")


def test_a_program_for_one_batch_size_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    exported(trained().eval(), path, None)
    with pytest.raises(CheckpointError, match="exported for batches of 5 only"):
        held(path)


def test_a_module_under_a_key(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"epoch": 3, "model": trained(), "ema": model()}, path)
    with pytest.raises(CheckpointError, match="several models, under 'model', 'ema'"):
        held(path)
    assert dict(held(path, key="model").model.state_dict()).keys() == state().keys()
    net = model()
    assert load_into(net, path, key="model", unsafe_pickle=True).key == "model"
    torch.testing.assert_close(dict(net.state_dict()), state(), rtol=0, atol=0)


def test_weights_alone_are_no_model(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save(state(), path)
    with pytest.raises(CheckpointError, match="has weights, but no model"):
        held(path)


@quiet
def test_a_model_without_parameters_or_with_bad_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no parameter at all"):
        held(written(tmp_path, "saved", nn.ReLU()))
    broken = trained()
    with torch.no_grad():
        broken[0].weight[0, 0] = torch.nan
    with pytest.raises(CheckpointError, match=r"not finite in 1 tensor: 0\.weight \(1 of 6\)"):
        held(written(tmp_path, "saved", broken))


def test_arguments_without_a_factory(tmp_path: Path) -> None:
    spec = CheckpointSpec(path=written(tmp_path, "saved"), unsafe_pickle=True)
    with pytest.raises(ModelError, match="arguments are given, but the model is stored"):
        load_model(ModelSpec(factory="checkpoint", kwargs={"width": 3}), spec)


def test_the_flag_executes_and_nothing_else_does(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"state_dict": state(), "x": Payload()}, path)
    with pytest.raises(CheckpointError):
        load_into(model(), path)
    assert not WROTE
    load_into(model(), path, unsafe_pickle=True)
    assert WROTE == ["executed"]
    WROTE.clear()


def test_a_class_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "gs_gone.py"
    source.write_text("from torch import nn\nclass Net(nn.Linear): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import gs_gone

    path = tmp_path / "m.pt"
    torch.save(gs_gone.Net(2, 2), path)
    monkeypatch.undo()
    del sys.modules["gs_gone"]
    with pytest.raises(CheckpointError, match="needs a module or name that is missing"):
        held(path)
    monkeypatch.chdir(tmp_path)  # the folder of that module
    loaded = held(path)
    assert loaded.model.in_features == 2
    assert set(loaded.digests) == {"gs_gone.py"}  # the class is not in the checkpoint


class Leaving:
    def __reduce__(self) -> tuple:
        return (sys.exit, ("bye",))


def test_code_that_exits(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"a": Leaving()}, path)
    with pytest.raises(CheckpointError, match=r"its code called sys\.exit\('bye'\)"):
        held(path)


@pytest.mark.parametrize("how", ["saved", "legacy", "pickled", "exported"])
def test_a_damaged_file_is_told(tmp_path: Path, how: str) -> None:
    path = written(tmp_path, how)
    whole = path.read_bytes()
    tensor = whole.find(state()["0.weight"].numpy().tobytes())
    assert tensor > 0
    flipped = whole[:tensor] + bytes([whole[tensor] ^ 1]) + whole[tensor + 1 :]
    checked = [flipped] if how == "exported" else []
    for content in (whole[: len(whole) // 3], whole[:-20], *checked):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"damaged or cut off|is missing"):
            held(path)
