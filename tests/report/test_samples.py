"""Samples as they are, on a terminal and on a page: the pixels and texts of the data."""

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import gradscope
from gradscope.report.page import write_html
from gradscope.report.terminal import render
from gradscope.run import compute, prepare
from gradscope.sources.opened import ShownData
from gradscope.stats import summarize
from gradscope.stats.album import with_samples
from tests.attribution.test_looking import project
from tests.report.shown import NASTY, summary_of

HALF = re.compile("\x1b\\[38;2;(\\d+);(\\d+);(\\d+);48;2;(\\d+);(\\d+);(\\d+)m(▀+)")


def result(folder: Path, values: np.ndarray, **dataset: Any) -> Path:
    """Compute norms of a small model on `values` (30, ...)."""
    width = values[0].size if values.dtype.kind == "f" else 0
    compute(prepare(project(folder, values, width, **dataset)), folder / "out.h5")
    return folder / "out.h5"


def screen(path: Path, *, full: bool = False, **options: Any) -> str:
    with gradscope.open(path) as file:
        shown = with_samples(summarize(file), ShownData.of(file.run))
    out = io.StringIO()
    render(shown, Console(file=out, **{"width": 80, **options}), full=full)
    return out.getvalue()


def largest(path: Path) -> list[int]:
    with gradscope.open(path) as file:
        order = np.argsort(-file.samples["norm"], kind="stable")[:5]
        return [int(file.samples["index"][k]) for k in order]


@pytest.mark.parametrize("shape", [(8, 8), (64,), (1, 8, 8)])
def test_a_terminal_shows_the_pixels_of_the_samples(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).integers(0, 256, (30, *shape)).astype(np.float32)
    values[:, *[0] * len(shape)], values[:, *[-1] * len(shape)] = 0, 255  # the range of all
    path = result(tmp_path, values)
    text = screen(path, force_terminal=True, color_system="truecolor")
    upper, lower = [], []
    for r, _, _, s, _, _, cells in HALF.findall(text):
        upper += [int(r)] * len(cells)
        lower += [int(s)] * len(cells)
    wanted = np.stack([values[k].reshape(8, 8) for k in largest(path)])  # five, side by side
    found = np.stack([upper, lower], 1).reshape(4, 5, 8, 2)  # line, sample, column, half
    assert (found.transpose(1, 0, 3, 2).reshape(5, 8, 8) == wanted).all()


def test_without_colours_a_picture_is_drawn_by_what_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = 255 * np.random.default_rng(0).integers(0, 2, (30, 8, 8)).astype(np.float32)
    values[:, 0, 0], values[:, -1, -1] = 0, 255
    path = result(tmp_path, values)
    monkeypatch.setenv("NO_COLOR", "1")
    text = screen(path, force_terminal=True, color_system="truecolor")
    drawn = re.sub("\x1b\\[[0-9;]*m", "", text)
    for place, k in enumerate(largest(path)):
        upper, lower = values[k][::2] > 0, values[k][1::2] > 0
        wanted = ["".join(" ▄▀█"[i] for i in line) for line in 2 * upper + lower]
        found = [line[16 * place :][:8] for line in drawn.splitlines()]
        found = [line.ljust(8) for line in found]
        assert any(found[i : i + 4] == wanted for i in range(len(found))), (k, wanted)


def test_a_pipe_has_a_table_instead(tmp_path: Path) -> None:
    path = result(tmp_path, np.random.default_rng(0).normal(size=(30, 8, 8)).astype(np.float32))
    text = screen(path)
    assert "▀" not in text and "\x1b" not in text
    assert all(re.search(rf"^ *{k} ", text, re.MULTILINE) for k in largest(path))


def test_texts_stand_below_what_is_known_of_them(tmp_path: Path) -> None:
    letters = "a\x1bé<"
    ids = np.random.default_rng(0).integers(0, 4, (30, 12))
    path = result(tmp_path, ids, vocabulary={"inputs": letters})
    text = screen(path)
    for k in largest(path):
        assert "".join(letters[i] for i in ids[k]).replace("\x1b", "\\x1b") in text
    assert "\x1b" not in text


def test_a_page_shows_the_samples_before_the_numbers(tmp_path: Path) -> None:
    path = result(tmp_path, np.random.default_rng(0).normal(size=(30, 8, 8)).astype(np.float32))
    with gradscope.open(path) as file:
        write_html(with_samples(summarize(file), ShownData.of(file.run)), tmp_path / "out.html")
    titles = re.findall("<h2>([^<]*)</h2>", (tmp_path / "out.html").read_text("utf-8"))
    assert titles[:4] == ["Run", "In short", *titles[2:4]]
    assert all(title.startswith("Samples with the largest") for title in titles[2:4])
    assert len(set(titles)) == len(titles) and "Parameters" in titles[4:]


def test_changed_data_are_not_shown(tmp_path: Path) -> None:
    path = result(tmp_path, np.random.default_rng(0).normal(size=(30, 8, 8)).astype(np.float32))
    np.savez(tmp_path / "data.npz", inputs=np.zeros((30, 8, 8), np.float32), targets=np.zeros(30))
    text = screen(path, full=True, force_terminal=True, color_system="truecolor")
    assert "▀" not in text and "has changed since" in text.replace("\n", " ")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_one_screen_unless_all_is_asked_for(width: int) -> None:
    found = summary_of(NASTY)
    texts = []
    for full in (False, True):
        out = io.StringIO()
        render(found, Console(file=out, width=width), full=full)
        texts.append(out.getvalue())
    short, long = (text.splitlines() for text in texts)
    assert len(long) > 2 * len(short)
    assert "--full" in texts[0] and all(len(line) <= width for line in short)
    assert all(title in texts[1] for title in ("Percentiles", "Which clipping norm"))
    assert "Percentiles" not in texts[0]
    assert "Which clipping norm" in brief_of(replace(found, asked=["clipping"]))


def brief_of(found: Any) -> str:
    out = io.StringIO()
    render(found, Console(file=out, width=80), full=False)
    return out.getvalue()
