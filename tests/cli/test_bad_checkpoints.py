"""Bad checkpoints through the command line: one clear error, nothing written, nothing executed."""

import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from tests.cli.forked import Forked, Outcome

MODEL = """
from torch import nn


def build():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
"""


class Payload:
    """Writes a file as it is unpickled."""

    def __reduce__(self) -> tuple:
        return (os.system, ("touch executed",))


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "override"])
def forked(request: pytest.FixtureRequest) -> Iterator[Forked]:
    """Commands as they are, and with torch's variable that switches its protection off."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            patch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        with Forked() as process:
            yield process


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    random = np.random.default_rng(0)
    inputs = random.standard_normal((8, 4)).astype("float32")
    np.savez(tmp_path / "data.npz", inputs=inputs, targets=random.integers(0, 3, 8))
    return tmp_path


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def state(**changes: Any) -> dict[str, Any]:
    return dict(net().state_dict()) | changes


def compute(forked: Forked, folder: Path, *more: str, checkpoint: str = "w.pt") -> Outcome:
    words = ["compute", checkpoint, "data.npz", "--loss", "cross_entropy", "-o", "out.h5"]
    if "--model" not in more:
        words += ["--model", "model.py:build"]
    return forked.run(*words, *more, cwd=folder)


def cut(path: Path) -> None:
    torch.save(state(), path)
    path.write_bytes(path.read_bytes()[:-300])


def outside(path: Path) -> None:
    safetensors.torch.save_file(state(), path.parent.parent / "elsewhere.safetensors")
    table = dict.fromkeys(state(), "../elsewhere.safetensors")
    path.write_text(json.dumps({"weight_map": table}))


def claiming(path: Path) -> None:
    header = b'{"0.weight":{"dtype":"F32","shape":[99999,99999],"data_offsets":[0,39999200004]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda p: None, "there is no such file"),
    "cut": (cut, "damaged or cut off"),
    "payload": (lambda p: torch.save(Payload(), p), "it holds more than tensors"),
    "inside": (lambda p: torch.save(state(x=Payload()), p), "it holds more than tensors"),
    "pickle": (lambda p: p.write_bytes(pickle.dumps(Payload())), "which could execute code"),
    "misfit": (lambda p: torch.save(state(x=torch.ones(1)), p), "1 unexpected (x)"),
    "index outside": (outside, "which is no file of its own folder"),
    "huge header": (claiming, "damaged or cut off"),
    "odd names": (lambda p: torch.save({"[red]\x1b[31m": torch.ones(1)}, p), "[red]\\x1b[31m"),
}


@pytest.mark.parametrize("name", BAD)
def test_one_clear_error(forked: Forked, folder: Path, name: str) -> None:
    write, words = BAD[name]
    write(folder / "w.pt")
    before = sorted(folder.iterdir())
    done = compute(forked, folder)
    assert done.code == 3, done.err
    assert words in done.err
    assert f"{folder}/w.pt" in done.err
    assert done.err.startswith("error: ")
    assert done.err.count("\n") >= 2  # a remedy
    assert "Traceback" not in done.err and "weights_only" not in done.err
    assert not done.out
    assert sorted(folder.iterdir()) == before  # nothing written, nothing executed


def test_the_same_file_is_loaded_when_it_is_trusted(forked: Forked, folder: Path) -> None:
    torch.save(state(), folder / "w.pt")
    done = compute(forked, folder, "--model", "checkpoint")
    assert done.code == 3
    assert "holds weights, not the model they belong to" in done.err
    torch.save(net(), folder / "w.pt")
    done = compute(forked, folder, "--unsafe-pickle")
    assert done.code == 0, done.err
    assert "was trusted to execute code" in done.out
    done = compute(forked, folder, "--unsafe-pickle", "--model", "checkpoint", "--overwrite")
    assert done.code == 0, done.err
    torch.save(state() | {"x": Payload()}, folder / "w.pt")
    compute(forked, folder, "--unsafe-pickle", "--overwrite")
    assert (folder / "executed").exists()  # the payload is a real one


def test_a_key_is_chosen(forked: Forked, folder: Path) -> None:
    torch.save({"model": state(), "ema": state()}, folder / "w.pt")
    assert compute(forked, folder, "--key", "ema").code == 0
    torch.save({"a": {"b": {"c": {"d": state()}}}}, folder / "deep.pt")
    done = compute(forked, folder, "--key", "a.b.c.d", "--overwrite", checkpoint="deep.pt")
    assert done.code == 0, done.err
    wrong = compute(forked, folder, "--key", "emma", "--overwrite")
    assert wrong.code == 3
    assert "Did you mean 'ema'?" in wrong.err


def test_names_that_the_model_does_not_have(forked: Forked, folder: Path) -> None:
    more = {"scale": torch.ones(1), "head.w": torch.ones(2)}
    torch.save({f"module.{k}": v for k, v in (state() | more).items()}, folder / "w.pt")
    refused = compute(forked, folder)
    assert refused.code == 3
    assert "2 unexpected (scale, head.w)" in refused.err
    assert "--ignore GLOB leaves out" in refused.err
    done = compute(forked, folder, "--ignore", "scale", "--ignore", "head.*")
    assert done.code == 0, done.err
    assert "Left out of the checkpoint" in done.out
    wanted = compute(forked, folder, "--ignore", "*", "--overwrite")
    assert wanted.code == 0, wanted.err  # what the model has is never left out
    torch.save({"0.weight": state()["0.weight"]} | more, folder / "w.pt")
    short = compute(forked, folder, "--ignore", "*", "--overwrite")
    assert short.code == 3
    assert "3 missing" in short.err


def test_no_part_of_the_checkpoint_is_written_over(forked: Forked, folder: Path) -> None:
    safetensors.torch.save_file(state(), folder / "part.safetensors")
    table = dict.fromkeys(state(), "part.safetensors")
    (folder / "w.pt").write_text(json.dumps({"weight_map": table}))
    before = (folder / "part.safetensors").read_bytes()
    done = compute(forked, folder, "-o", "part.safetensors", "--overwrite")
    assert done.code == 6
    assert "would replace the checkpoint" in done.err
    assert (folder / "part.safetensors").read_bytes() == before
