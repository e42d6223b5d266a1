"""`--previews`: small forms of samples in the file, shown where the data cannot be opened."""

import base64
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from pydantic import ValidationError

import gradscope
from gradscope.config import RunSpec
from gradscope.run import compute, merge, prepare
from gradscope.sources.opened import ShownData, previews_of
from gradscope.view import View
from tests.attribution.test_looking import project


def kept(folder: Path, values: np.ndarray, previews: int, **dataset: Any) -> Path:
    width = values[0].size if values.dtype.kind == "f" else 0
    spec = project(folder, values, width, **dataset).computing(previews=previews, batch_size=7)
    compute(prepare(spec), folder / "out.h5")
    return folder / "out.h5"


def shown(path: Path) -> list[Any]:
    """Return what can be shown of a file's samples when the data are gone."""
    (path.parent / "data.npz").unlink()
    with gradscope.open(path) as file:
        opened = ShownData.of(file.run, file.samples)
        return opened.contents(file.samples["index"].tolist())


@pytest.mark.parametrize("shape", [(8, 8), (64,), (3, 8, 8)])
@pytest.mark.parametrize("most", [32, 90, 400])
def test_pictures_are_means_of_blocks(tmp_path: Path, shape: tuple[int, ...], most: int) -> None:
    values = np.random.default_rng(0).normal(size=(30, *shape)).astype(np.float32)
    found = shown(kept(tmp_path, values, most))
    for value, picture in zip(values, found, strict=True):
        pixels = np.moveaxis(value, 0, 2) if len(shape) == 3 else value.reshape(8, 8)
        fits = [step for step in range(1, 9) if 8 // step == picture.shape[0]]
        assert any(is_mean(pixels, picture, step) for step in fits)
        assert 4 * -(-picture.size // 3) <= most


def is_mean(pixels: np.ndarray, picture: np.ndarray, step: int) -> bool:
    """Whether a picture has the means of blocks of `step` pixels, from 0 to 255."""
    m = picture.shape[0]
    blocks = pixels[: m * step, : m * step].reshape(m, step, m, step, -1)
    means = blocks.mean((1, 3))
    scaled = (means - means.min()) / (means.max() - means.min()) * 255
    return bool(np.abs(picture.reshape(means.shape) - scaled).max() <= 0.5 + 1e-3)


def test_texts_begin_as_they_do(tmp_path: Path) -> None:
    letters = "aé€\x1b"
    ids = np.random.default_rng(0).integers(0, 4, (30, 40))
    found = shown(kept(tmp_path, ids, 50, vocabulary={"inputs": letters}))
    for row, text in zip(ids, found, strict=True):
        whole = "".join(letters[i] for i in row)
        assert whole.startswith(text)
        assert len(text.encode()) <= 50 < len((text + whole[len(text) :][:1]).encode()) + 3


def test_shards_keep_the_same(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(30, 8, 8)).astype(np.float32)
    whole = kept(tmp_path, values, 200)
    spec = project(tmp_path, values, 64).computing(previews=200, batch_size=7)
    parts = []
    for k in (0, 1):
        job = prepare(spec.computing(shard=f"{k}/2"))
        parts.append(job.place(tmp_path / "part.h5"))
        compute(job, parts[-1])
    merge(parts, tmp_path / "merged.h5")
    with h5py.File(whole) as one, h5py.File(tmp_path / "merged.h5") as other:
        assert (one["samples/preview"][...] == other["samples/preview"][...]).all()
        assert one["samples/preview"].dtype == np.dtype("S200")


def test_the_page_shows_them(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(30, 8, 8)).astype(np.float32)
    path = kept(tmp_path, values, 200)
    (tmp_path / "data.npz").unlink()
    with gradscope.open(path) as file:
        found = View(file).document()
    assert found["album"]["sheet"]["size"] == [8, 8] and "samples" not in found["why"]


@pytest.mark.parametrize(
    "record", [None, {"kind": "picture", "shape": [3, 3]}, {"kind": "picture"}]
)
def test_a_record_that_does_not_fit_shows_nothing(record: Any) -> None:
    text = base64.b64encode(bytes(64)).decode()
    samples = {"index": np.array([0]), "preview": np.array([text])}
    run = {"spec": None, "previews": record}
    assert previews_of(run, samples) == {}


def test_too_few_bytes_are_refused(tmp_path: Path) -> None:
    spec = project(tmp_path, np.zeros((30, 8, 8), np.float32), 64).model_dump(mode="json")
    spec["compute"]["previews"] = 8
    with pytest.raises(ValidationError, match="32"):
        RunSpec.model_validate(spec)
