"""Folders as checkpoints: the one file that holds the weights, or a reason why there is none."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from gradscope.errors import CheckpointError
from gradscope.sources import load_into
from tests.sources.test_checkpoints import model, state


def put(folder: Path, *names: str) -> None:
    for name in names:
        if name.endswith(".safetensors"):
            safetensors.torch.save_file(state(), folder / name)
        elif name.endswith((".json", ".metadata", ".txt", ".distcp", ".pkl")):
            (folder / name).write_text("{}")
        else:
            torch.save(state(), folder / name)


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (("model.safetensors", "pytorch_model.bin", "config.json"), "model.safetensors"),
        (("pytorch_model.bin", "training_args.bin", "optimizer.pt"), "pytorch_model.bin"),
        (("epoch=3.ckpt", "notes.txt"), "epoch=3.ckpt"),
        (("weights.pt", "optimizer.pt", "scheduler.pt", "rng_state.pth"), "weights.pt"),
    ],
)
def test_the_file_that_is_meant(tmp_path: Path, names: tuple[str, ...], chosen: str) -> None:
    put(tmp_path, *names)
    net = model()
    report = load_into(net, tmp_path)
    torch.testing.assert_close(dict(net.state_dict()), state(), rtol=0, atol=0)
    assert report.path == tmp_path / chosen
    assert report.notes == (f"The weights of the folder are those in {chosen}.",)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((), "it is empty"),
        (("notes.txt", "config.json"), "it holds: config.json, notes.txt"),
        (("a.pt", "b.pt"), "several files may be meant: a.pt, b.pt"),
        ((".metadata", "__0_0.distcp"), "a distributed checkpoint"),
        (("adapter_config.json", "adapter_model.safetensors"), "an adapter, not a model"),
        (("data.pkl", "version.txt"), "an unpacked archive of torch.save"),
    ],
)
def test_a_folder_without_weights(tmp_path: Path, names: tuple[str, ...], expected: str) -> None:
    put(tmp_path, *names)
    with pytest.raises(CheckpointError) as caught:
        load_into(model(), tmp_path)
    assert expected in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.remedy
