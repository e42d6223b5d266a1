"""What the page of `gradscope view` is told: against numpy on the rows, and the data."""

import base64
import io
import json
import re
import threading
import urllib.error
import urllib.request
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import gradscope
from gradscope.config import RunSpec
from gradscope.errors import OutputError, SpecError
from gradscope.markup.glossary import TERMS
from gradscope.run import compute, prepare
from gradscope.stats import summarize
from gradscope.stats.sections import Overview
from gradscope.view import View, page, serve, write_page
from tests.attribution.test_looking import HOSTILE, project

KINDS = {"f8": "<f8", "f4": "<f4", "i4": "<i4"}


def unpacked(packed: dict[str, str]) -> np.ndarray:
    ((kind, text),) = packed.items()
    return np.frombuffer(base64.b64decode(text), KINDS[kind])


def computed(folder: Path, *chains: str, name: str = "out.h5", **options: Any) -> Path:
    """Compute 30 pictures of 8 x 8, three classes."""
    values = np.random.default_rng(0).integers(0, 256, (30, 8, 8)).astype(np.float32)
    values[:, 0, 0], values[:, 7, 7] = 0, 255
    spec = project(folder, values, 64, **options).computing(transform=chains, dtype="float64")
    compute(prepare(spec), folder / name)
    return folder / name


def rows(path: Path) -> np.ndarray:
    """Return all gradients (N, p) of chain 0."""
    with gradscope.open(path) as file:
        arrays = file.chains[0].values()
        return np.concatenate([a[...].reshape(len(a), -1) for a in arrays], 1)


def document(path: Path, most: int | None = 5000) -> dict[str, Any]:
    with gradscope.open(path) as file:
        found = View(file).document(most)
    return json.loads(json.dumps(found, allow_nan=False))


def overview(path: Path) -> Overview:
    with gradscope.open(path) as file:
        return View(file).overview()


def test_columns_are_the_files_own_numbers(tmp_path: Path) -> None:
    path = computed(tmp_path, "identity")
    found = document(path)
    g = rows(path)
    with gradscope.open(path) as file:
        for name in ("index", "loss", "target", "prediction", "margin"):
            assert (unpacked(found["columns"][name]) == file.samples[name]).all()
    norms = np.linalg.norm(g, axis=1)
    np.testing.assert_allclose(unpacked(found["columns"]["norm"]), norms, rtol=1e-12)
    cosines = g @ g.mean(0) / norms / np.linalg.norm(g.mean(0))
    np.testing.assert_allclose(unpacked(found["columns"]["cosine"]), cosines, rtol=1e-9)
    assert found["classes"] == {"0": "0", "1": "1", "2": "2"}


@pytest.mark.parametrize("chain", ["identity", "gram", "project:dim=4000,kind=gaussian"])
def test_neighbours_are_the_largest_cosines(tmp_path: Path, chain: str) -> None:
    found = document(computed(tmp_path, chain))
    g = rows(computed(tmp_path, "identity", name="rows.h5"))
    cosines = g @ g.T / np.outer(*2 * [np.linalg.norm(g, axis=1)])
    np.fill_diagonal(cosines, np.nan)
    for side, sign in (("aligned", -1), ("opposed", 1)):
        places = unpacked(found[side]["places"]).reshape(30, found["beside"])
        told = unpacked(found[side]["cosines"]).reshape(places.shape)
        if chain.startswith("project"):  # approximate
            np.testing.assert_allclose(np.take_along_axis(cosines, places, 1), told, atol=0.2)
            continue
        order = np.argsort(np.where(np.isnan(cosines), np.inf, sign * cosines), 1)
        assert (places == order[:, : places.shape[1]]).all()
        np.testing.assert_allclose(told, np.take_along_axis(cosines, places, 1), rtol=1e-9)


def test_without_products_the_page_says_what_to_compute(tmp_path: Path) -> None:
    found = document(computed(tmp_path, "mean"))
    assert "aligned" not in found
    assert "-t identity" in found["why"]["neighbours"] and "-t identity" in found["why"]["cosines"]


def test_heat_is_of_the_rows(tmp_path: Path) -> None:
    path = computed(tmp_path, "identity")
    heat = document(path)["heat"]
    with gradscope.open(path) as file:
        target, chain = file.samples["target"], file.chains[0]
        for j, name in enumerate(heat["parameters"]):
            for c in heat["classes"]:
                part = chain[name][...].reshape(30, -1)[target == c]
                mean, spread = part.mean(0), part.var(0).sum()
                assert heat["norm"][c][j] == pytest.approx(np.linalg.norm(part, axis=1).mean())
                assert heat["snr"][c][j] == pytest.approx(mean @ mean / spread)


def test_pictures_lie_on_the_sheet_where_it_says(tmp_path: Path) -> None:
    album = document(computed(tmp_path, "mean"))["album"]
    sheet = album["sheet"]
    with np.load(tmp_path / "data.npz") as data:
        wanted = data["inputs"].astype(np.uint8)  # 0 to 255
    with Image.open(io.BytesIO(base64.b64decode(sheet["source"].partition(",")[2]))) as picture:
        pixels = np.asarray(picture)
    for slot, k in enumerate(sheet["of"]):
        w, h = sheet["size"]
        top, left = slot // sheet["across"] * sheet["side"], slot % sheet["across"] * sheet["side"]
        assert (pixels[top : top + h, left : left + w] == wanted[k]).all()


def test_details_are_of_the_largest_first(tmp_path: Path) -> None:
    path = computed(tmp_path, "identity")
    found = document(path, most=8)
    places = unpacked(found["places"])
    norms = np.linalg.norm(rows(path), axis=1)
    assert set(np.argsort(-norms)[:4]) <= set(places) and len(set(places)) == 8
    with gradscope.open(path) as file:
        wanted = np.stack([file.norms[name][places] for name in found["parameters"]], 1)
    told = unpacked(found["norms"]).reshape(8, -1)
    np.testing.assert_allclose(told, wanted, rtol=1e-6, atol=1e-30)


def test_a_second_file_is_joined_by_position(tmp_path: Path) -> None:
    first = computed(tmp_path, "identity")
    spec = project(tmp_path, np.load(tmp_path / "data.npz")["inputs"], 64)
    compute(prepare(spec.computing(samples="10:20")), tmp_path / "second.h5")
    with gradscope.open(first) as one, gradscope.open(tmp_path / "second.h5") as other:
        columns = View(one, other).document()["columns"]
        joined = unpacked(columns["loss2"])
        np.testing.assert_allclose(joined[10:20], other.samples["loss"])
        assert np.isnan(joined[:10]).all() and np.isnan(joined[20:]).all()
    (tmp_path / "b").mkdir()
    elsewhere = computed(tmp_path / "b", "mean", dtype={"targets": "int64"})
    np.savez(tmp_path / "b" / "data.npz", inputs=np.zeros((30, 8, 8), np.float32),
             targets=np.arange(30) % 3)  # fmt: skip
    other_data = project(tmp_path / "b", np.ones((30, 8, 8), np.float32), 64)
    compute(prepare(other_data), elsewhere, overwrite=True)
    with (
        gradscope.open(first) as one,
        gradscope.open(elsewhere) as other,
        pytest.raises(SpecError, match="different data"),
    ):
        View(one, other)


class Scripts(HTMLParser):
    """The tags of a page, and what its scripts hold."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._open = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self._open = tag == "script"
        self.scripts += [""] * self._open

    def handle_endtag(self, tag: str) -> None:
        self._open = False

    def handle_data(self, data: str) -> None:
        if self._open:
            self.scripts[-1] += data


def test_the_page_runs_its_own_scripts_alone(tmp_path: Path) -> None:
    path = computed(tmp_path, "mean", classes={})
    found = document(path)
    found["classes"] = {str(c): HOSTILE for c in range(3)}
    told = replace(overview(path), paths=[HOSTILE], facts=[("file", HOSTILE)], warnings=[HOSTILE])
    text = page(found, told)
    seen = Scripts(text)
    data, sorting, charts, drawing, script = seen.scripts
    assert json.loads(data) == found | {"terms": TERMS}
    policy = next(a["content"] for t, a in seen.tags if "http-equiv" in a)
    for one in (sorting, charts, drawing, script):
        digest = base64.b64encode(sha256(one.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in str(policy)
    assert "unsafe-eval" not in str(policy) and "default-src 'none'" in str(policy)
    assert not any(name.startswith("on") for _, a in seen.tags for name in a)
    assert not re.search(r"https?://[^\s\"'<>)]*\.(js|css)", text.replace(charts, ""))
    assert "innerHTML" not in sorting + script and "eval(" not in sorting + script


def test_without_pillow_the_page_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = computed(tmp_path, "mean")
    monkeypatch.setattr("gradscope.view.document.find_spec", lambda name: None)
    found = document(path)
    assert found["album"]["sheet"] is None and "pip install" in found["why"]["samples"]


def test_only_its_own_pages_are_replaced(tmp_path: Path) -> None:
    source = computed(tmp_path, "mean")
    found = document(source), overview(source)
    write_page(*found, tmp_path / "page.html")
    write_page(*found, tmp_path / "page.html")
    for name in ("mine.html", "out.h5"):
        path = tmp_path / name
        if not path.exists():
            path.write_text("<html>mine</html>")
        before = path.read_bytes()
        with pytest.raises(OutputError, match="another kind"):
            write_page(*found, path)
        assert path.read_bytes() == before


def test_a_token_shows_its_sample(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 4, (30, 5))
    spec = project(tmp_path, ids, 0, vocabulary={"inputs": "abcd"})
    (tmp_path / "loss.py").write_text(
        "def loss(outputs, targets):\n    return outputs[:, :2] ** 2 + targets[:, None]\n"
    )
    changed = spec.model_dump(mode="json")
    changed["loss"] = {"name": f"{tmp_path}/loss.py:loss"}
    changed["compute"] |= {"rows": "token", "batch_size": 7}
    compute(prepare(RunSpec.model_validate(changed)), tmp_path / "out.h5")
    found = document(tmp_path / "out.h5")
    assert "samples" not in found["why"], found["why"]
    texts = found["album"]["texts"]
    with gradscope.open(tmp_path / "out.h5") as file:
        samples = file.samples["sample"]
    assert len(samples) == 60
    assert texts == ["".join("abcd"[i] for i in ids[k]) for k in samples]


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    source = computed(tmp_path, "mean")
    with pytest.raises(OutputError, match="cannot be written"):
        write_page(document(source), overview(source), tmp_path / "no" / "page.html")


def test_the_server_answers_its_own_name_alone(tmp_path: Path) -> None:
    addresses: list[str] = []
    known = threading.Event()

    def ready(address: str) -> None:
        addresses.append(address)
        known.set()

    with gradscope.open(computed(tmp_path, "identity")) as file:
        view = View(file)
        wanted = view.details(np.array([3, 29]))
        threading.Thread(target=serve, args=(view, 0, ready), daemon=True).start()
        assert known.wait(20)
        with urllib.request.urlopen(f"{addresses[0]}details?places=3,29") as answer:
            assert json.loads(answer.read()) == json.loads(json.dumps(wanted))
        with urllib.request.urlopen(addresses[0]) as answer:
            assert b"<dialog" in answer.read()
        port = addresses[0].rstrip("/").rpartition(":")[2]
        hostile = urllib.request.Request(addresses[0], headers={"Host": f"evil.example:{port}"})
        for asked, code in [
            (hostile, 403),
            (f"{addresses[0]}details?places=30", 404),
            (f"{addresses[0]}details?places=-1", 404),
            (f"{addresses[0]}details?places=x", 404),
            (f"{addresses[0]}../etc/passwd", 404),
        ]:
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(asked)
            assert refused.value.code == code
            refused.value.close()


def test_numbers_of_stats_and_of_the_page_agree(tmp_path: Path) -> None:
    path = computed(tmp_path, "identity")
    with gradscope.open(path) as file:
        told = summarize(file, nearest=5)
        found = View(file).document()
    norms = unpacked(found["columns"]["norm"])
    assert [row.norm for row in told.samples] == sorted(norms, reverse=True)[:10]
    places = unpacked(found["aligned"]["places"]).reshape(30, -1)[5]
    assert [row.index for row in told.nearest.aligned][: len(places)] == places.tolist()
