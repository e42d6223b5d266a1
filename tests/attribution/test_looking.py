"""Scores shown with their samples: the right ones, as they are, and never as markup."""

import base64
import io
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import gradscope
from gradscope.attribution import open_scores, summarize_scores
from gradscope.cli import app
from gradscope.config import RunSpec, resolve
from gradscope.run import compute, prepare

HOSTILE = '"><img src=x onerror=alert(1)><script>alert(2)</script>\x1b[31m'

MODEL = """
from torch import nn


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, ids):
        return self.last(self.table(ids).mean(1))


def build(width=0):
    return nn.Sequential(nn.Flatten(), nn.Linear(width, 3)) if width else Tokens()


def data():
    raise AssertionError("to look at scores must run no code of the data's")
"""


def command(*words: object) -> int:
    """Run the command line in this process; return its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["gradscope", *map(str, words)])
        return app.run()


class Found(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.headings: list[list[str]] = []  # each: its tag, its text, what follows up to the next
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("h1", "h2", "h3"):
            self.headings.append([tag, "", ""])
        elif tag == "img" and self.headings:
            self.headings[-1][2] += "a picture"

    def handle_endtag(self, tag: str) -> None:
        if self.headings and tag == self.headings[-1][0]:
            self.headings[-1][0] = tag.upper()  # it is closed

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.headings:
            self.headings[-1][1 + self.headings[-1][0].isupper()] += data

    def empty(self) -> list[str]:
        """Return the headings that no content follows before the next of their rank or above."""
        ranks = [int(tag[1]) for tag, _, _ in self.headings]
        found = []
        for k, (_, title, content) in enumerate(self.headings):
            below = k + 1 < len(ranks) and ranks[k + 1] > ranks[k]
            if not (content.strip() or below):
                found.append(title)
        return found

    def pictures(self) -> dict[str, np.ndarray]:
        """Return the pixels of each sample, by what stands instead of its picture."""
        found = {}
        for tag, attributes in self.tags:
            if tag == "img":
                head, _, data = str(attributes["src"]).partition(",")
                assert head == "data:image/png;base64"
                with Image.open(io.BytesIO(base64.b64decode(data))) as picture:
                    found[str(attributes["alt"])] = np.asarray(picture)
        return found


def project(folder: Path, inputs: np.ndarray, width: int, **dataset: Any) -> RunSpec:
    """Write a model and 30 samples of three classes; return the run."""
    (folder / "model.py").write_text(MODEL)
    labels = np.arange(30) % 3
    np.savez(folder / "data.npz", inputs=inputs, targets=labels)
    torch.manual_seed(1)
    namespace: dict[str, Any] = {}
    exec(MODEL, namespace)
    torch.save(namespace["build"](width).state_dict(), folder / "weights.pt")
    return resolve(
        None,
        {
            "model": {"factory": f"{folder}/model.py:build", "kwargs": {"width": width}},
            "checkpoint": {"path": folder / "weights.pt"},
            "dataset": {"path": folder / "data.npz", **dataset},
            "loss": {"name": "cross_entropy"},
        },
    )


def scored(folder: Path, spec: RunSpec, first: int = 27) -> Path:
    """Score the samples before the `first` query for those from it on."""
    for name, samples in (("train", f"0:{first}"), ("query", f"{first}:30")):
        compute(prepare(spec.computing(samples=samples)), folder / f"{name}.h5")
    where = folder / "scores.h5"
    sides = folder / "train.h5", folder / "query.h5"
    gradscope.attribute(*sides, curvature="identity", output=where).close()
    return where


def page(scores: Path, *options: str) -> Found:
    """Return the page that `stats` writes of scores."""
    out = scores.with_suffix(".html")
    assert command("stats", str(scores), "--html", str(out), *options) == 0
    found = Found(out.read_text(encoding="utf-8"))
    assert [tag for tag, _ in found.tags].count("script") == 1  # the page's own
    assert not found.empty()
    for tag, attributes in found.tags:
        assert not any(name.startswith("on") for name in attributes), tag
        assert not {"href", "srcset"} & attributes.keys()
        assert str(attributes.get("src", "data:")).startswith("data:")
    return found


@pytest.mark.parametrize("shape", [(8, 8), (1, 8, 6), (3, 5, 7)])
def test_pictures_are_those_of_the_samples(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).normal(size=(30, *shape)).astype(np.float32)
    scores = scored(tmp_path, project(tmp_path, values, int(np.prod(shape))))
    with open_scores(scores) as opened:
        summary = summarize_scores(opened, top=5)
    rows = summary.rows
    shown = {q.index for q in rows} | {s.index for q in rows for s in (*q.helpful, *q.harmful)}
    pictures = page(scores).pictures()
    assert {int(alt.split()[1].strip(",")) for alt in pictures} == shown
    low = min(values[k].min() for k in shown)
    high = max(values[k].max() for k in shown)
    for alt, pixels in pictures.items():
        wanted = values[int(alt.split()[1].strip(","))]
        wanted = wanted.transpose(1, 2, 0) if len(shape) == 3 and shape[0] == 3 else wanted
        grey = (wanted.astype(np.float64) - low) / (high - low) * 255
        assert np.abs(pixels - grey.reshape(pixels.shape)).max() <= 0.5 + 1e-4
    first = rows[0]
    for row in (first, *first.helpful):
        kind = "query" if row is first else "sample"
        told = f"{kind} {row.index}, target {row.target}, predicted {row.prediction}"
        assert any(alt.startswith(told) for alt in pictures)


def test_texts_and_names_of_strangers_are_no_markup(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(5, size=(30, 6))
    words = ["<b>bold</b>", HOSTILE, "plain", "&amp;", "\u202eback"]
    spec = project(tmp_path, ids, 0, vocabulary={"inputs": words})
    found = page(scored(tmp_path, spec))
    assert "plain" in found.text and "<b>bold</b>" in found.text and "&amp;" in found.text
    assert "alert(2)</script>" in found.text
    assert "\x1b" not in found.text and "\u202e" not in found.text


def test_rows_of_a_table_have_the_names_of_their_columns(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(30, 2)).astype(np.float32)
    spec = project(tmp_path, rows, 2)
    lines = [f"{a},{b},{k % 3}" for k, (a, b) in enumerate(rows)]
    quoted = '"' + HOSTILE.replace('"', '""') + '"'
    text = "\n".join([f"height,{quoted},class", *lines]) + "\n"
    (tmp_path / "data.csv").write_text(text, encoding="utf-8")
    columns = {"inputs": ["height", "*script*"], "targets": "class"}
    table = {"path": tmp_path / "data.csv", "columns": columns, "dtype": {"targets": "int64"}}
    spec = spec.model_copy(update={"dataset": spec.dataset.model_validate(table)})
    found = page(scored(tmp_path, spec))
    assert "height" in found.text and "alert(2)</script>" in found.text  # as its file says it
    with open_scores(tmp_path / "scores.h5") as scores:
        best = int(scores.samples["index"][scores.helpful(0, 1).places[0]])
    assert f"{rows[best, 0]:#.3g}" in found.text


def test_data_that_have_changed_are_not_shown(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(30, 8, 8)).astype(np.float32)
    scores = scored(tmp_path, project(tmp_path, values, 64))
    np.savez(tmp_path / "data.npz", inputs=-values, targets=np.arange(30) % 3)
    found = page(scores)
    assert not found.pictures()
    assert "has changed since" in found.text
    (tmp_path / "data.npz").unlink()
    found = page(scores)
    assert "not shown" in found.text and "that helped and harmed each query" in found.text


def test_no_code_is_run_to_show_samples(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(30, 8, 8)).astype(np.float32)
    scores = scored(tmp_path, project(tmp_path, values, 64))
    with open_scores(scores) as opened:
        record = json.loads(json.dumps(dict(opened.record)))
        for side in ("train", "query"):
            record[side]["spec"]["dataset"] = {"path": f"{tmp_path}/model.py:data"}
        changed = type(opened)(opened.values, opened.queries, opened.samples, record)
        shown = gradscope.attribution.with_samples(summarize_scores(changed), changed)
    assert not any(section.cards for section in shown.sections)
    assert "runs no code" in str(shown.facts)


def test_sums_by_a_column_are_those_of_the_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = np.random.default_rng(0).normal(size=(30, 8, 8)).astype(np.float32)
    scores = scored(tmp_path, project(tmp_path, values, 64))
    capsys.readouterr()
    assert command("stats", str(scores), "--json", "--by", "prediction") == 0
    document = json.loads(capsys.readouterr().out)
    with gradscope.open(scores) as file:
        rows = np.asarray(file.chains[0]["scores"], np.float64)
        made = np.asarray(file.chains[1]["prediction"])
    assert document["groups"] == np.unique(made).tolist()
    for q, row in enumerate(document["rows"]):
        wanted = [rows[q][made == k].sum() for k in document["groups"]]
        np.testing.assert_allclose(row["sums"], wanted, rtol=1e-9)
    assert command("stats", scores, "--plot", tmp_path / "bars.png") == 0
    with Image.open(tmp_path / "bars.png") as picture:
        assert min(picture.size) > 100
    assert command("stats", str(scores), "--by", "nothing") == 2
    assert command("stats", str(scores), "--lr", "0.1") == 2
    assert command("stats", str(tmp_path / "train.h5"), "--by", "target") == 2


def shown_order(text: str) -> list[int]:
    """Return the queries that a table of scores lists on a terminal, in its order."""
    rows = text[text.index("that helped and harmed each query") :].partition("Each cell")[0]
    words = [row.split() for row in rows.splitlines()[3:]]
    return [int(row[0]) for row in words if len(row) > 6]  # shorter rows continue a query


@pytest.mark.parametrize("predictions", [True, False])
def test_wrong_predictions_come_first_then_large_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], predictions: bool
) -> None:
    values = np.random.default_rng(3).normal(size=(30, 8, 8)).astype(np.float32)
    spec = project(tmp_path, values, 64).computing(predictions=predictions)
    scores = scored(tmp_path, spec, first=22)
    with gradscope.open(scores) as file:
        table = {name: np.asarray(column) for name, column in file.samples.items()}
    queries = table["index"].tolist()
    expected, said = queries, ""
    if predictions:
        wrong = table["prediction"] != table["target"]
        said = f"{wrong.sum()} of 8 queries are predicted wrongly and shown first."
        assert 0 < wrong.sum() < len(wrong)
        expected = [queries[k] for k in np.lexsort((-table["loss"], ~wrong))]
        assert expected != queries
    capsys.readouterr()
    found = page(scores)
    pages = [title for _, title, _ in found.headings if title.startswith("Query ")]
    assert pages == [f"Query {k}" for k in expected]
    out = capsys.readouterr().out  # no terminal: there is no room for pictures
    assert shown_order(out) == expected
    assert not any(line.startswith("Query ") for line in out.splitlines())
    for text in (found.text, " ".join(out.split())):
        assert said in text
        assert predictions or ("wrongly" not in text and "come first" not in text)
    assert command("stats", str(scores), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["index"] for row in document["rows"]] == queries  # as in the file
