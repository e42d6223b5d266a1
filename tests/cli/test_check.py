"""`gradscope check`: everything is loaded and the first batch proved; nothing is written."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.cli.conftest import SAMPLES, Gradscope
from tests.cli.test_compute import digits_rows


def test_what_is_said_is_true(gradscope: Gradscope, digits: Path) -> None:
    done = gradscope("check", "--config", digits, "--batch-size", "32", "--json")
    assert (done.code, done.err) == (0, "")
    document = json.loads(done.out)
    assert document["schema"] == "gradscope.check"
    assert document["certificate"]["verified"] is True
    assert document["certificate"]["samples"] == 32
    rows = digits_rows(32)
    norms = np.sqrt(sum((g.reshape(32, -1) ** 2).sum(1) for g in rows.values()))
    found = document["first_batch"]
    assert (found["samples"], found["nonfinite"]) == (32, 0)
    np.testing.assert_allclose(found["norm"][::2], [norms.min(), norms.max()], rtol=1e-4)
    numbers = sum(g[0].size for g in rows.values())
    assert (document["model"]["parameters"], document["model"]["numbers"]) == (len(rows), numbers)
    assert document["checkpoint"]["tensors"] == len(rows)
    assert document["dataset"]["samples"] == 1797
    assert document["plan"]["samples"] == 1797


def test_what_is_mostly_predicted_wrongly_is_told(gradscope: Gradscope, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "from torch import nn\ndef build(): return nn.Linear(4, 3)\n"
    )
    net = nn.Linear(4, 3)
    torch.save(net.state_dict(), tmp_path / "w.pt")
    inputs = np.random.default_rng(0).standard_normal((20, 4)).astype("float32")
    best = net(torch.tensor(inputs)).argmax(1).numpy()
    for wrong in (4, 15):
        targets = np.where(np.arange(20) < wrong, (best + 1) % 3, best)
        np.savez(tmp_path / "d.npz", inputs=inputs, targets=targets)
        words = ["check", tmp_path / "w.pt", tmp_path / "d.npz", "--loss", "cross_entropy"]
        words += ["--model", f"{tmp_path}/model.py:build"]
        assert json.loads(gradscope(*words, "--json").out)["first_batch"]["wrong"] == wrong / 20
        out = gradscope(*words).out
        assert f"{100 * wrong / 20}% predicted wrongly" in out
        assert ("scaled" in out) == (wrong == 15)


@pytest.mark.parametrize("name", ["digits_mlp", "poisson_pinn"])
def test_it_is_shown_and_nothing_is_written(
    gradscope: Gradscope, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = SAMPLES / name / "run.toml"
    done = gradscope("check", "--config", config, "--samples", ":16", "--batch-size", "16")
    assert done.code == 0, done.err
    for words in ("weights", "certificate", "passed", "The first batch", "nothing was written"):
        assert words in done.out
    assert not list(tmp_path.iterdir())


def test_notes_tell_of_tied_and_frozen_parameters_and_of_samples_that_are_not_finite(
    gradscope: Gradscope, tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))\n"
        "    net[2].weight = net[0].weight\n"
        "    net[3].bias.requires_grad_(False)\n"
        "    return net\n"
    )
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    net[2].weight = net[0].weight
    torch.save({"state_dict": net.state_dict()}, tmp_path / "w.ckpt")
    inputs = np.random.default_rng(0).standard_normal((20, 4)).astype("float32")
    inputs[3] = np.nan
    np.savez(tmp_path / "d.npz", inputs=inputs, targets=np.zeros((20, 2), "float32"))
    run = tmp_path / "run.toml"
    run.write_text('[compute]\nverify = "never"')  # the proof is made all the same
    done = gradscope(
        "check", tmp_path / "w.ckpt", tmp_path / "d.npz",
        "--model", f"{tmp_path}/model.py:build", "--loss", "mse", "--json",
        "--config", run,
    )  # fmt: skip
    assert done.code == 7, done.err
    document = json.loads(done.out)
    notes = " ".join(document["plan"]["notes"])
    assert "0.weight = 2.weight" in notes
    assert "1 of 5 parameters (3.bias)" in notes
    assert "key 'state_dict'" in notes
    assert document["first_batch"]["nonfinite"] == 1
    assert document["certificate"]["verified"] is True


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ("", ["id", "keep", "spare", "table", "z"]),
        ('id = "id"\nselect = "keep"\n', ["spare", "table", "z"]),
        ('columns = { inputs = ["table[0:2]", "z*"] }\n', ["id", "keep", "spare", "x"]),
        ('targets = ["y", "spare"]\nid = "id"\nselect = "keep"\n', ["table", "z"]),
    ],
)
def test_an_array_that_is_used_nowhere_is_said(
    gradscope: Gradscope, tmp_path: Path, more: str, names: list[str]
) -> None:
    """Under options, too, an array may be used; `check` answers in any case."""
    (tmp_path / "model.py").write_text(
        "from torch import nn\ndef build(): return nn.Linear(3, 2)\n"
        "def loss(o, t): return (o if isinstance(t, tuple) else o * t[:, None]).square().sum(1)\n"
    )
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "w.pt")
    n = 6
    draw = np.random.default_rng(0)
    arrays = {k: draw.standard_normal((n, 3)).astype("float32") for k in ("x", "table")}
    arrays |= {k: draw.standard_normal(n).astype("float32") for k in ("y", "z", "spare")}
    arrays |= {"id": np.arange(n), "keep": np.arange(n) > 1}
    np.savez(tmp_path / "d.npz", **arrays)
    inputs = "inputs" if "columns" in more else "x"
    text = f'path = "d.npz"\ninputs = ["{inputs}"]\n{more}'
    text += "" if "targets" in more else 'targets = ["y"]\n'
    (tmp_path / "d.toml").write_text(text)
    words = ["check", tmp_path / "w.pt", tmp_path / "d.toml", "--json"]
    words += ["--model", f"{tmp_path}/model.py:build", "--loss", f"{tmp_path}/model.py:loss"]
    done = gradscope(*words)
    assert done.code == 0, done.err
    told = done.err.partition(" not used")[0].partition("d.npz: the arrays ")[2]
    assert sorted(told.removesuffix(" are").split(", ")) == names


def test_an_array_of_a_data_set_of_ones_own_that_is_used_nowhere(
    gradscope: Gradscope, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\ndef build(): return nn.Linear(3, 2)\n"
        "def data(): return [dict(inputs=torch.ones(3), targets=torch.ones(2), mask=torch.ones(2))"
        " for _ in range(4)]\n"
    )
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "w.pt")
    words = ["check", tmp_path / "w.pt", f"{tmp_path}/mine.py:data", "--loss", "mse"]
    done = gradscope(*words, "--model", f"{tmp_path}/mine.py:build")
    assert done.code == 0 and "the array mask is not used" in done.err


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_dtype_that_data_are_cast_to_is_said(
    gradscope: Gradscope, tmp_path: Path, dtype: str
) -> None:
    (tmp_path / "model.py").write_text(
        "from torch import nn\ndef build(): return nn.Linear(4, 3)\n"
    )
    torch.save(nn.Linear(4, 3).state_dict(), tmp_path / "w.pt")
    np.savez(tmp_path / "d.npz", inputs=np.ones((6, 4)), targets=np.arange(6) % 3)
    words = ["check", tmp_path / "w.pt", tmp_path / "d.npz", "--loss", "cross_entropy"]
    done = gradscope(*words, "--model", f"{tmp_path}/model.py:build", "--dtype", dtype)
    assert ("inputs: float64 cast to float32, 4 a sample" in done.out) == (dtype == "float32")
    assert "targets: int64, one number a sample" in done.out
    assert "more digits" not in done.out  # of the weights, which are float32


@pytest.mark.parametrize(
    ("inputs", "refused"),
    [
        ('["x", "mask"]', False),
        ('["mask", "x"]', True),
        ('["spare", "x"]', True),
        ('["mask"]', True),
        ('["spare", "mask"]', False),
        ('{ mask = "mask", x = "x" }', False),
        ('{ mask = "x", x = "mask" }', False),
    ],
)
def test_arrays_in_another_order_than_the_arguments_of_their_names(
    gradscope: Gradscope, tmp_path: Path, inputs: str, refused: bool
) -> None:
    """The shapes fit in any order; names say which array is which argument."""
    (tmp_path / "model.py").write_text(
        "from torch import nn\nclass Net(nn.Linear):\n"
        "    def forward(self, x, mask=None):\n"
        "        return super().forward(x if mask is None else x * mask.sigmoid())\n"
        "def build(): return Net(4, 3)\n"
    )
    torch.save(nn.Linear(4, 3).state_dict(), tmp_path / "w.pt")
    draw = np.random.default_rng(0)
    arrays = {k: draw.standard_normal((6, 4)).astype("float32") for k in ("mask", "x", "spare")}
    np.savez(tmp_path / "d.npz", **arrays, y=np.arange(6) % 3)
    (tmp_path / "d.toml").write_text(f'path = "d.npz"\ninputs = {inputs}\ntargets = ["y"]\n')
    words = ["check", tmp_path / "w.pt", tmp_path / "d.toml", "--loss", "cross_entropy"]
    done = gradscope(*words, "--model", f"{tmp_path}/model.py:build")
    assert done.code == (2 if refused else 0), done.err
    assert ("would be passed as the model's argument" in done.err) == refused
    assert ("Name the arguments: inputs = {" in done.err) == refused


def test_a_model_that_drops_the_sample_axis(gradscope: Gradscope, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "from torch import nn\nclass Net(nn.Linear):\n    def forward(self, x):\n"
        "        return super().forward(x).squeeze()\ndef build(): return Net(4, 1)\n"
    )
    torch.save(nn.Linear(4, 1).state_dict(), tmp_path / "w.pt")
    x = np.random.default_rng(0).standard_normal((20, 4)).astype("float32")
    np.savez(tmp_path / "d.npz", inputs=x, targets=x[:, 0])
    model = f"{tmp_path / 'model.py'}:build"
    run = (tmp_path / "w.pt", tmp_path / "d.npz", "--model", model, "--loss", "mse")
    for command in ("check", "compare"):
        done = gradscope(command, *run)
        assert done.code == 3
        assert f"{tmp_path / 'model.py'}, line 4: squeeze() drops the sample axis" in done.err
