"""The page and the pictures of trainings: the curves of each run, under its name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gradscope.report import plots
from gradscope.report.page import write_html
from gradscope.stats import summarize
from gradscope.training import Histories, read_histories, read_history, record
from gradscope.training.history import End, append
from tests.report.shown import NASTY, summary_of
from tests.stats.fakes import fake
from tests.view.test_document import Scripts

NUMBERS = {
    "loss": lambda line: line["loss"],
    "median norm": lambda line: line["norm_median"],
    "norm of mean": lambda line: line["mean_gradient_norm"],
    "noise scale": lambda line: line["noise_scale"]["simple"],
    "opposed": lambda line: line["opposing"],
}


def run(path: Path, *steps: int, seed: int = 0) -> Path:
    path.parent.mkdir(exist_ok=True)
    for step in steps:
        record(path, step, summarize(fake(30, seed=seed + step)))
    append(path, End(step=steps[-1]))
    return path


def curves_of(page: Path) -> list[dict[str, Any]]:
    text = page.read_text()
    found = re.search(r'<script type="application/json" id="curves">(.*?)</script>', text)
    assert found is not None
    return json.loads(found[1])  # type: ignore[no-any-return]


def lines_of(path: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, path.read_text().splitlines())
    return [line for line in lines if line["schema"] == "gradscope.step"]


def test_the_page_has_the_curves_of_each_run(tmp_path: Path) -> None:
    paths = {
        "a/run": run(tmp_path / "a" / "run.jsonl", 1, 5, 7),
        "b/run": run(tmp_path / "b" / "run.jsonl", 1, 50, seed=100),
    }
    write_html(read_histories([*paths.values()]), tmp_path / "out.html")
    pictures = curves_of(tmp_path / "out.html")
    text = (tmp_path / "out.html").read_text()
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", text)
    plain = [re.sub("<[^>]*>", "", caption) for caption in captions]
    assert plain == [*NUMBERS, "signal to noise, a/run", "signal to noise, b/run"]
    for picture, take in zip(pictures, NUMBERS.values(), strict=False):
        for name, path in paths.items():
            known = [[line["step"], take(line)] for line in lines_of(path)]
            assert picture["curves"][name] == [point for point in known if point[1] is not None]
    for picture, path in zip(pictures[5:], paths.values(), strict=True):
        for name, curve in picture["curves"].items():
            own = [
                [line["step"], p["signal_to_noise"]]
                for line in lines_of(path)
                for p in line["parameters"]
                if p["name"] == name
            ]
            assert curve == own
    assert sorted(pictures[3]["bands"]) == ["a/run", "b/run"]


def test_the_page_explains_its_terms_and_needs_no_network(tmp_path: Path) -> None:
    path = tmp_path / "<b>.jsonl"
    record(path, 1, summary_of(NASTY))
    record(path, 2, summary_of(NASTY))
    write_html(read_history(path), tmp_path / "out.html")
    text = (tmp_path / "out.html").read_text()
    seen = Scripts(text)
    policy = next(a["content"] for _, a in seen.tags if "http-equiv" in a)
    assert "default-src 'none'" in str(policy) and "connect-src 'none'" in str(policy)
    assert not any(tag == "b" for tag, _ in seen.tags)
    assert not any("src" in a or a.get("href") for _, a in seen.tags)
    _, *scripts = seen.scripts
    assert not any("innerHTML" in one for one in scripts if "licen" not in one.lower())
    for term in ("noise scale", "opposed", "signal to noise", "What learns", "norm of mean"):
        assert re.search(f'<abbr title="[^"]+" tabindex="0">{term}</abbr>', text), term
    names = {name for picture in curves_of(tmp_path / "out.html") for name in picture["curves"]}
    assert {"<script>alert(1)</script>", r"\x1b[31mred\x1b[0m"} <= names


def test_what_is_known_at_no_step_is_said(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, 1, summarize(fake(1)))
    write_html(read_history(path), tmp_path / "out.html")
    text = (tmp_path / "out.html").read_text()
    assert "not known at any step" in text
    assert text.count('<figure class="curves">') == len(curves_of(tmp_path / "out.html"))


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (["a.jsonl", "b.jsonl"], ["a", "b"]),
        (["x/run.jsonl", "y/run.jsonl"], ["x/run", "y/run"]),
        (["a.jsonl", "a.jsonl"], ["a (1)", "a (2)"]),
    ],
)
def test_runs_have_names_of_their_own(tmp_path: Path, files: list[str], names: list[str]) -> None:
    paths = [tmp_path / file for file in files]
    for path in {*paths}:
        run(path, 1, 2)
    found = read_histories(paths)
    (picture,) = [p for p in found.overview().pictures if p.title == "loss"]
    shown = [name.rpartition(f"{tmp_path.name}/")[2] for name in picture.curves]
    assert shown == names
    assert Histories.from_json(found.to_json()) == found


def test_the_picture_has_whole_steps_and_a_legend_above_the_curves(tmp_path: Path) -> None:
    paths = [run(tmp_path / f"run{k}.jsonl", 1, 3, 6, seed=k) for k in range(3)]
    figure = plots.figure(read_histories(paths).overview().pictures)
    figure.canvas.draw()
    for axes in figure.axes:
        low, high = axes.get_xlim()
        assert all(x == round(x) for x in axes.get_xticks() if low <= x <= high)
        legend = axes.get_legend().get_window_extent()
        assert legend.y0 >= axes.get_window_extent().y1 - 1
