"""Data files of torch.save: what scripts put in them, and what they are refused for."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gradscope.errors import DatasetError
from gradscope.sources.data.files import open_arrays
from tests.cli.conftest import Gradscope, gradscope  # noqa: F401 (a fixture)

X, Y = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 2
Z = torch.arange(12.0).reshape(6, 2)

KINDS: dict[str, tuple[Any, dict[str, Tensor]]] = {
    "a tensor": (X, {"inputs": X}),
    "a tuple": ((X, Y), {"inputs": X, "targets": Y}),
    "a tuple of three": ((X, Z, Y), {"inputs_1": X, "inputs_2": Z, "targets": Y}),
    "a dict": ({"x": X, "label": Y, "made": "today"}, {"x": X, "label": Y}),
    "a list of pairs": (
        [(x, int(y)) for x, y in zip(X, Y, strict=True)],
        {"inputs": X, "targets": Y},
    ),
    "a list of tensors": ([*X], {"inputs": X}),
    "a sparse matrix": ({"adj": (X > 0).float().to_sparse()}, {"adj": (X > 0).float()}),
    "a data set": (TensorDataset(X, Y), {"inputs": X, "targets": Y}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["data.pt", "data"])
def test_what_torch_saved_is_read(tmp_path: Path, kind: str, name: str) -> None:
    content, expected = KINDS[kind]
    torch.save(content, tmp_path / name)
    form, opened = open_arrays(tmp_path / name)
    assert form == "torch" and set(opened.names) == set(expected)
    for key, value in expected.items():
        column: Any = opened.load(key)
        assert column.dtype == value.dtype and tuple(column.shape) == tuple(value.shape)
        assert torch.equal(column[0 : len(value)], value) and torch.equal(column[2:4], value[2:4])


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("touched"),))


REFUSED: dict[str, tuple[Any, str]] = {
    "a checkpoint": (nn.Linear(3, 2).state_dict(), "a checkpoint of torch.save"),
    "a training's checkpoint": ({"model": {"weight": X}, "epoch": 3}, "a checkpoint of torch"),
    "samples of two shapes": ([torch.ones(2), torch.ones(3)], "2 samples have different shapes"),
    "a number": (7, "it has an int"),
    "nothing": ([], "it has a list"),
    "code": (Evil(), "values that are not tensors"),
    "a model": (nn.Linear(3, 2), "values that are not tensors"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_data_says_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    content, told = REFUSED[kind]
    torch.save(content, "data.pt")
    with pytest.raises(DatasetError, match=told) as caught:
        open_arrays(Path("data.pt"))
    assert "torch.save({" in str(caught.value) and "data.pt" in str(caught.value)
    assert not Path("touched").exists()


def test_the_numbers_are_those_of_other_formats(
    gradscope: Gradscope,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text("from torch import nn\ndef build(): return nn.Linear(3, 2)\n")
    torch.save(nn.Linear(3, 2).state_dict(), "w.pt")
    torch.save((X, Y), "data.pt")
    np.savez("data.npz", inputs=X, targets=Y)
    import gradscope as package

    norms = []
    for data in ("data.pt", "data.npz"):
        done = gradscope("init", "w.pt", data, "--overwrite", "--json")
        assert done.code == 0, done.err
        done = gradscope("compute", "--config", "run.toml", "-o", f"{data}.h5", "--json")
        assert done.code == 0, done.err
        with package.open(f"{data}.h5") as file:
            norms.append(file.samples["norm"][:])
    assert np.array_equal(*norms) and norms[0].min() > 0


@pytest.mark.parametrize(
    ("head", "told", "remedy"),
    [
        (b"\x89PNG\r\n\x1a\n" + bytes(9), "a PNG image", "one folder of images for each class"),
        (b"\xff\xd8\xff\xe0" + bytes(20), "a JPEG image", "one folder of images for each class"),
        (b"%PDF-1.7" + bytes(20), "a PDF", "torch.save("),
        (pickle.dumps([list(range(40))]), "a Python pickle", "torch.save("),
        (bytes(range(200, 256)), "an unknown kind", "torch.save("),
    ],
)
def test_another_file_says_what_it_is_and_the_lines_that_convert_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: bytes, told: str, remedy: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_bytes(head)
    with pytest.raises(DatasetError) as caught:
        open_arrays(Path("file"))
    text = str(caught.value)
    assert told in text and remedy in text
    if "torch.save(" in text:  # the lines are run as they are printed
        lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
        exec("\n".join(lines).replace("...", "X, Y"), {"X": X, "Y": Y})
        assert open_arrays(Path("data.pt"))[1].names == ("inputs", "targets")
