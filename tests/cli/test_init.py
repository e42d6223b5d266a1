"""`gradscope init`: a run file that says what was guessed, and runs as it is where it can."""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gradscope.config import load
from gradscope.sources.draft import quoted
from tests.cli.conftest import SAMPLES, Gradscope

MODEL = """
raise_on_import = 1 / 0 if __name__ == "never" else None
from torch import nn
def helper(): pass
def build(): return nn.Linear(4, 3)
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the scripts of this repository out of the search, which also covers the cwd."""
    monkeypatch.chdir(tmp_path)


def project(folder: Path, model: str | None = MODEL, **arrays: np.ndarray) -> tuple[Path, Path]:
    folder.mkdir(exist_ok=True, parents=True)
    if model is not None:
        (folder / "model.py").write_text(model)
    torch.save(nn.Linear(4, 3).state_dict(), folder / "w.pt")
    default = {"x": np.ones((9, 4), "float32"), "y": np.arange(9) % 3}
    np.savez(folder / "d.npz", **(arrays or default))
    return folder / "w.pt", folder / "d.npz"


def test_a_run_file_that_runs_as_it_is(gradscope: Gradscope, tmp_path: Path) -> None:
    checkpoint, data = project(tmp_path / "project")
    run = tmp_path / "runs" / "run.toml"
    run.parent.mkdir()
    done = gradscope("init", checkpoint, data, "-o", run)
    assert done.code == 0, done.err
    assert "guessed" in run.read_text()
    document = tomllib.loads(run.read_text())
    assert document["model"]["factory"] == "../project/model.py:build"  # relative to the file
    assert document["dataset"] == {
        "path": "../project/d.npz",
        "inputs": ["x"],
        "targets": ["y"],
    }
    assert document["loss"]["name"] == "cross_entropy"
    assert gradscope("compute", "--config", run, "-o", tmp_path / "o.h5").code == 0
    with h5py.File(tmp_path / "o.h5") as file:
        assert file["chains/0/weight"].shape == (9, 3, 4)


@pytest.mark.parametrize("sample", ["digits_mlp", "sunspots_lstm", "text_transformer"])
def test_the_sample_models(gradscope: Gradscope, tmp_path: Path, sample: str) -> None:
    folder = SAMPLES / sample
    run = tmp_path / "run.toml"
    weights = next(p for p in folder.iterdir() if p.stem == "weights")
    done = gradscope("init", weights, folder / "data.npz", "-o", run, "--json")
    assert (done.code, done.err) == (0, "")
    document = json.loads(done.out)
    assert (document["schema"], document["missing"]) == ("gradscope.init", [])
    given = tomllib.loads((folder / "dataset.toml").read_text())
    spec = load(run)
    assert (list(spec.dataset.inputs), list(spec.dataset.targets)) == (
        given["inputs"],
        given["targets"],
    )
    file, _, name = spec.model.factory.rpartition(":")
    assert (Path(file).resolve(), name) == ((folder / "model.py").resolve(), "build")


FLOATS = np.ones((9, 4), "float32")


@pytest.mark.parametrize(
    ("arrays", "inputs", "targets", "loss"),
    [
        ({"x": FLOATS, "y": FLOATS}, ("x",), ("y",), "mse"),
        ({"x": FLOATS, "is_y": np.ones(9, bool)}, ("x",), ("is_y",), "bce_with_logits"),
        ({"a": FLOATS, "b": FLOATS, "label": np.ones(9, int)}, ("a", "b"), ("label",), None),
        ({"x": FLOATS, "id": np.arange(9), "y": np.arange(9)}, ("x",), ("y",), None),
        ({"x": FLOATS, "y": np.arange(9), "mean": np.ones(4)}, ("x",), ("y",), None),
        (
            {"tx": FLOATS[:2], "ty": FLOATS[:2], "x": FLOATS, "y": FLOATS},
            ("x",),
            ("y",),
            "mse",
        ),
        ({"x": FLOATS}, ("x",), (), "mse"),
        ({"y": FLOATS}, ("y",), (), "mse"),
        (
            {"input_ids": np.ones((9, 4), int), "attention_mask": np.ones((9, 4), int)},
            {"attention_mask": "attention_mask", "input_ids": "input_ids"},
            ("input_ids",),
            "causal_lm",
        ),
    ],
)
def test_what_is_guessed_of_arrays(
    gradscope: Gradscope,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arrays: Any,
    inputs: Any,
    targets: Any,
    loss: str | None,
) -> None:
    monkeypatch.chdir(tmp_path)  # where no script calls a loss
    checkpoint, data = project(tmp_path, **arrays)
    done = gradscope("init", checkpoint, data, "-o", tmp_path / "run.toml")
    assert done.code == 0, done.err
    spec = load(tmp_path / "run.toml")
    assert (spec.dataset.inputs, spec.dataset.targets) == (inputs, targets)
    assert spec.loss.name == (loss or "cross_entropy")


@pytest.mark.parametrize(
    ("name", "lines", "dataset", "loss"),
    [
        (
            "d.csv",
            ["name,a,b,label", "x,1,2.5,dog", "y,3,4,cat"],
            {
                "columns": {"table": ["a", "b"]},
                "inputs": ["table"],
                "targets": ["label"],
                "classes": {"label": ["cat", "dog"]},
            },
            "cross_entropy",
        ),
        (
            "d.csv",
            ["1,2,0.5", "3,4,0.25"],
            {"columns": {"table": ["0", "1"]}, "inputs": ["table"], "targets": ["2"]},
            "mse",
        ),
        (
            "d.csv",
            ["id,age,income,city,churn", "u1,30,1.5,Oslo,yes", "u2,40,2.5,Rome,no"],
            {
                "columns": {"table": ["age", "income"]},
                "inputs": ["table"],
                "targets": ["churn"],
                "classes": {"churn": ["no", "yes"]},
            },
            "cross_entropy",
        ),
        (
            "d.csv",
            ["length,species", "1.5,cat", "2.5,ant"],
            {"inputs": ["length"], "targets": ["species"], "classes": {"species": ["ant", "cat"]}},
            "cross_entropy",
        ),
        (
            "d.csv",
            ["review,rating", "so so,2.5", "well,4.5"],
            {"inputs": ["review"], "targets": ["rating"]},
            "mse",
        ),
        (
            "d.jsonl",
            ['{"input_ids": [1]}', '{"input_ids": [2, 3]}'],
            {
                "inputs": {"input_ids": "input_ids", "attention_mask": "input_ids_mask"},
                "targets": ["input_ids"],
                "pad": {"input_ids": 0},
            },
            "causal_lm:mask=input_ids_mask",
        ),
    ],
)
def test_what_is_guessed_of_tables_and_sequences(
    gradscope: Gradscope, tmp_path: Path, name: str, lines: list[str], dataset: Any, loss: str
) -> None:
    checkpoint, _ = project(tmp_path)
    (tmp_path / name).write_text("\n".join(lines))
    done = gradscope("init", checkpoint, tmp_path / name, "-o", tmp_path / "run.toml")
    assert done.code == 0, done.err
    document = tomllib.loads((tmp_path / "run.toml").read_text())
    assert document["dataset"] == {"path": name} | dataset
    assert document["loss"]["name"] == loss
    load(tmp_path / "run.toml")


def test_ids_and_sentences_are_neither_inputs_nor_classes(
    gradscope: Gradscope, tmp_path: Path
) -> None:
    """An id whose numbers repeat, as of users, is an input."""
    checkpoint, _ = project(tmp_path)
    rows = [f"{k % 2},{100 + k},{k % 3},{k / 2},sentence {k}" for k in range(12)]
    file = tmp_path / "d.csv"
    file.write_text("\n".join(["quality,#1 ID,user_id,length,text", *rows]))
    done = gradscope("init", checkpoint, file, "-o", tmp_path / "run.toml")
    assert done.code == 0
    document = tomllib.loads((tmp_path / "run.toml").read_text())["dataset"]
    assert document["columns"] == {"table": ["quality", "user_id", "length"]}
    assert "classes" not in document
    assert "12 of 12 texts of 'text' differ" in " ".join(done.out.split())


def test_without_a_factory_an_example_is_marked(gradscope: Gradscope, tmp_path: Path) -> None:
    checkpoint, data = project(tmp_path, None)
    (tmp_path / "broken.py").write_text("def build(:")
    os.mkfifo(tmp_path / "pipe.py")  # would be waited for
    done = gradscope("init", checkpoint, data, "--json")
    assert json.loads(done.out)["missing"] == ["model.factory"]
    assert "AN EXAMPLE" in (tmp_path / "run.toml").read_text()
    load(tmp_path / "run.toml")


def test_a_hugging_face_folder_is_its_own_model(gradscope: Gradscope, tmp_path: Path) -> None:
    folder, run = tmp_path / "gpt2", tmp_path / "run.toml"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}'
    )
    save_file({"wte.weight": torch.ones(11, 4)}, folder / "model.safetensors")
    np.savez(tmp_path / "d.npz", input_ids=np.arange(24).reshape(6, 4) % 11)
    assert gradscope("init", folder, tmp_path / "d.npz", "-o", run).code == 0
    assert load(run).model.factory == "checkpoint"


IDS, MASK = np.arange(36).reshape(6, 6) % 11, np.ones((6, 6), int)
WAVES = np.ones((6, 6), "float32")


@pytest.mark.parametrize(
    "names",
    [
        ("input_ids", "attention_mask", "decoder_input_ids"),
        ("input_ids", "global_attention_mask"),
        ("decoder_input_ids", "encoder_outputs"),
        ("input_values",),
        ("input_features", "decoder_input_ids", "decoder_attention_mask"),
        ("pixel_values", "bool_masked_pos"),
        ("x", "z"),
    ],
)
@pytest.mark.parametrize("kind", ["npz", "safetensors", "h5", "jsonl"])
def test_every_array_is_a_keyword_of_a_checkpoint_that_is_its_own_model(
    gradscope: Gradscope, tmp_path: Path, names: tuple[str, ...], kind: str
) -> None:
    folder, run, data = tmp_path / "bart", tmp_path / "run.toml", tmp_path / f"d.{kind}"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "bart"}')
    save_file({"weight": torch.ones(11, 4)}, folder / "model.safetensors")
    arrays = {k: MASK if "mask" in k else IDS if "ids" in k else WAVES for k in names}
    arrays |= {"bool_masked_pos": MASK > 0} if "bool_masked_pos" in names else {}
    write(data, arrays | {"labels": IDS[:, 0]})
    options = ["--model", "checkpoint"] if kind in ("npz", "jsonl") else []
    done = gradscope("init", folder, data, *options, "-o", run, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["unused"] == {}
    found = load(run).dataset
    assert isinstance(found.inputs, dict) and found.targets == ("labels",)
    padded = {f"{k}_mask" for k in names}  # lists of JSON may be of different lengths
    assert {k: v for k, v in found.inputs.items() if v not in padded} == {k: k for k in names}
    assert not found.dtype  # a mask is no picture


def write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    elif path.suffix == ".safetensors":
        save_file({k: torch.tensor(v) for k, v in arrays.items()}, path)
    elif path.suffix == ".h5":
        with h5py.File(path, "w") as file:
            for name, values in arrays.items():
                file[name] = values
    else:
        n = len(next(iter(arrays.values())))
        rows = [{k: v[i].tolist() for k, v in arrays.items()} for i in range(n)]
        path.write_text("\n".join(map(json.dumps, rows)))


SEQ2SEQ = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 3), nn.Linear(3, 4)
    def forward(self, input_ids, attention_mask=None, decoder_input_ids=None, level=1.0):
        x = self.embed(input_ids)
        if attention_mask is not None:
            x = x * attention_mask.unsqueeze(-1)
        if decoder_input_ids is not None:
            x = x + self.embed(decoder_input_ids)
        return self.head(torch.tanh(x).sum(1)) * torch.as_tensor(level).reshape(-1, 1)
def build():
    torch.manual_seed(0)
    return Net()
"""


@pytest.mark.parametrize("last", ["decoder_input_ids", "level"])
def test_the_function_that_is_computed_takes_every_array(
    gradscope: Gradscope, tmp_path: Path, last: str
) -> None:
    """Beside names that are known, others are inputs of the model, too."""
    (tmp_path / "net.py").write_text(SEQ2SEQ)
    scope: dict[str, Any] = {}
    exec(SEQ2SEQ, scope)
    net = scope["build"]()
    torch.save(net.state_dict(), tmp_path / "w.pt")
    own = {"decoder_input_ids": IDS[::-1].copy(), "level": np.arange(6, dtype="float32")}
    mask = MASK.copy()
    mask[:, 4:] = 0
    arrays = {"input_ids": IDS, "attention_mask": mask, last: own[last], "label": IDS[:, 0] % 4}
    np.savez(tmp_path / "d.npz", **arrays)
    run, out = tmp_path / "run.toml", tmp_path / "o.h5"
    options = ["--model", f"{tmp_path}/net.py:build", "-o", run]
    assert gradscope("init", tmp_path / "w.pt", tmp_path / "d.npz", *options).code == 0
    done = gradscope("check", "--config", run)
    assert (done.code, done.err) == (0, "")
    assert gradscope("compute", "--config", run, "-o", out).code == 0
    net = net.double()
    given = {k: torch.tensor(v) for k, v in arrays.items()}
    y = given.pop("label")
    with h5py.File(out) as file:
        rows = file["chains/0/head.weight"][:]
    for i in range(6):
        one = {k: v[i : i + 1] for k, v in given.items()}
        one = {k: v.double() if v.is_floating_point() else v for k, v in one.items()}
        loss = nn.functional.cross_entropy(net(**one), y[i : i + 1])
        (right,) = torch.autograd.grad(loss, [net.head.weight])
        np.testing.assert_allclose(rows[i], right, rtol=1e-4, atol=1e-6)


def test_targets_of_a_decoder_are_not_shifted(gradscope: Gradscope, tmp_path: Path) -> None:
    """A model that is given the decoder's own inputs predicts the target at their position."""
    (tmp_path / "net.py").write_text(SEQ2SEQ)
    scope: dict[str, Any] = {}
    exec(SEQ2SEQ, scope)
    torch.save(scope["build"]().state_dict(), tmp_path / "w.pt")
    for name, loss in (("decoder_input_ids", "token_cross_entropy"), ("other_ids", "causal_lm")):
        np.savez(tmp_path / "d.npz", **{"input_ids": IDS, name: IDS, "labels": IDS % 4})
        options = ["--model", f"{tmp_path}/net.py:build", "-o", tmp_path / "run.toml"]
        found = gradscope("init", tmp_path / "w.pt", tmp_path / "d.npz", *options, "--overwrite")
        assert found.code == 0 and loss in found.out


def test_masks_of_what_is_padded(gradscope: Gradscope, tmp_path: Path) -> None:
    checkpoint, _ = project(tmp_path)
    lines = [{"input_ids": [1] * k, "decoder_input_ids": [2] * (4 - k)} for k in (1, 2, 3)]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run = tmp_path / "run.toml"
    assert gradscope("init", checkpoint, tmp_path / "d.jsonl", "-o", run).code == 0
    assert load(run).dataset.inputs == {
        "input_ids": "input_ids",
        "decoder_input_ids": "decoder_input_ids",
        "attention_mask": "input_ids_mask",
    }
    folder = tmp_path / "bart"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "bart"}')
    save_file({"weight": torch.ones(11, 4)}, folder / "model.safetensors")
    assert gradscope("init", folder, tmp_path / "d.jsonl", "-o", run, "--overwrite").code == 0
    assert load(run).dataset.inputs == {
        "input_ids": "input_ids",
        "decoder_input_ids": "decoder_input_ids",
        "attention_mask": "input_ids_mask",
        "decoder_attention_mask": "decoder_input_ids_mask",
    }
    own = [line | {"attention_mask": [0] * len(line["input_ids"])} for line in lines]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, own)))
    assert gradscope("init", checkpoint, tmp_path / "d.jsonl", "-o", run, "--overwrite").code == 0
    assert load(run).dataset.inputs["attention_mask"] == "attention_mask"  # the data's own


def test_what_is_left_out_is_said(gradscope: Gradscope, tmp_path: Path) -> None:
    arrays = {"x": FLOATS, "y": np.arange(9), "id": np.arange(9), "mean": np.ones(4)}
    checkpoint, data = project(tmp_path, **arrays, text=np.array(["a"] * 9))
    run = tmp_path / "run.toml"
    done = gradscope("init", checkpoint, data, "-o", run, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["unused"] == {
        "id": "the name of a sample index",
        "mean": "4 samples, not 9",
        "text": "texts",
    }
    line = next(line for line in run.read_text().splitlines() if "# not used" in line)
    assert all(name in line for name in ("id", "mean", "text"))
    done = gradscope("init", checkpoint, data, "-o", run, "--overwrite")
    assert "not used" in done.out and "mean: 4 samples, not 9" in done.out


def test_an_array_that_could_be_an_input_is_not_dropped(
    gradscope: Gradscope, tmp_path: Path
) -> None:
    run = tmp_path / "run.toml"
    checkpoint, data = project(tmp_path, y=np.arange(9), label=np.arange(9), target=FLOATS)
    done = gradscope("init", checkpoint, data, "-o", run)
    assert done.code == 0, done.err
    spec = load(run).dataset
    assert (spec.inputs, spec.targets) == (("y",), ("label", "target"))


def test_keywords_of_other_lengths_are_not_dropped(gradscope: Gradscope, tmp_path: Path) -> None:
    arrays = {"input_ids": IDS, "labels": IDS, "position_ids": IDS[:1], "id": np.arange(6)}
    checkpoint, data = project(tmp_path, **arrays)
    done = gradscope("init", checkpoint, data, "-o", tmp_path / "run.toml")
    assert done.code == 3 and "position_ids (1 sample, not 6)" in done.err
    assert "dataset.toml" in done.err and not (tmp_path / "run.toml").exists()


def test_two_state_dicts_are_told(gradscope: Gradscope, tmp_path: Path) -> None:
    checkpoint, data = project(tmp_path)
    state = nn.Linear(4, 3).state_dict()
    torch.save({"model": state, "ema": dict(state)}, checkpoint)
    run = tmp_path / "run.toml"
    assert gradscope("init", checkpoint, data, "-o", run).code == 0
    assert load(run).checkpoint.key == "model"
    assert "the checkpoint also has ema" in run.read_text()


def test_options_are_taken_and_a_dataset_spec_too(gradscope: Gradscope, tmp_path: Path) -> None:
    checkpoint, _ = project(tmp_path)
    (tmp_path / "d.toml").write_text('path = "d.npz"\ninputs = ["x"]\ntargets = ["y"]\n')
    run = tmp_path / "run.toml"
    run.write_text("mine")
    options = ["--model", "my.models:net", "--loss", f"{tmp_path}/model.py:helper", "--overwrite"]
    refused = gradscope("init", checkpoint, tmp_path / "d.toml", *options, "-o", run)
    assert refused.code == 6 and "expected: run file" in refused.err and run.read_text() == "mine"
    run.write_text("version = 1")
    assert gradscope("init", checkpoint, tmp_path / "d.toml", *options, "-o", run).code == 0
    document = tomllib.loads(run.read_text())
    assert document["dataset"] == {"spec": "d.toml"}
    assert document["model"]["factory"] == "my.models:net"
    assert document["loss"]["name"] == "model.py:helper"
    assert load(run).dataset.targets == ("y",)
    with (tmp_path / "model.py").open("a") as file:
        file.write("\ndef samples(): return [(0.0, 1.0)]\n")
    assert (
        gradscope("init", checkpoint, f"{tmp_path}/model.py:samples", *options, "-o", run).code == 0
    )
    assert tomllib.loads(run.read_text())["dataset"] == {"path": "model.py:samples"}


@pytest.mark.parametrize(
    "text", ['a"b', "a\\b", "a\nb", "a\x7fb", "\x00", "é 日 \U0001f600", "\u202e"]
)
def test_any_name_is_written_as_toml(text: str) -> None:
    assert tomllib.loads(f"x = {quoted(text)}") == {"x": text}
