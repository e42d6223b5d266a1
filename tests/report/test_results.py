"""Two files and a history: on a terminal, as pictures and as a page."""

import re
from dataclasses import replace

import numpy as np
import pytest

from gradscope.report import plot_stats, render, write_html
from gradscope.report.terminal import sparkline
from gradscope.stats import History, difference, read_history, record, summarize
from tests.pages import ROOT
from tests.report.screens import WIDTHS, fits, screen
from tests.report.test_pictures import HEADS, Page
from tests.report.test_tables import HOSTILE, LAYERS, file_with
from tests.stats.fakes import FakeChain, fake


def two(names, **changes):
    first = file_with(names, attributes={"dataset_sha256": "d"}, path="[bold]a.h5")
    moved = {k: g * 1.5 + 0.1 for k, g in first.gradients.items()}
    return difference(first, replace(first, gradients=moved, **changes))


def steps(tmp_path, count=30):
    path = tmp_path / "<b>run.jsonl"
    for step in range(count):
        record(path, 10 * step, summarize(fake(30, seed=step)))
    return read_history(path)


@pytest.mark.parametrize("width", [20, *WIDTHS])
@pytest.mark.parametrize("names", [HOSTILE, LAYERS], ids=["hostile", "layers"])
def test_two_files_fit_the_terminal(names, width):
    text = screen(render, two(names), width)
    assert fits(text, width)
    assert "\x1b" not in text


def test_what_two_files_say():
    found = two(["w", "v"])
    text = screen(render, found, 200)
    assert f"cosine of the two mean gradients: {found.cosine:.3g}" in text
    for row in found.samples:
        assert f"{row.moved:.3g}" in text
    other = two(["w"], attributes={"dataset_sha256": "other"})
    assert "data are not the same" in screen(render, other, 80)


@pytest.mark.parametrize("width", [20, *WIDTHS])
def test_a_history_fits_the_terminal(tmp_path, width):
    history = steps(tmp_path)
    text = screen(render, history, width)
    assert fits(text, width)
    assert "290" in text
    assert fits(
        screen(render, history.model_copy(update={"steps": history.steps[:1]}), width), width
    )


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_pictures(tmp_path, suffix):
    for k, found in enumerate((two(LAYERS), steps(tmp_path))):
        path = tmp_path / f"{k}{suffix}"
        plot_stats(found, path)
        assert path.read_bytes().startswith(HEADS[suffix])


def test_pages(tmp_path):
    for found in (two([*HOSTILE, "<script>"]), steps(tmp_path)):
        write_html(found, tmp_path / "out.html")
        page = Page((tmp_path / "out.html").read_text(encoding="utf-8"))
        assert page.tags.count("script") == 1
        assert "b" not in page.tags
        assert page.tags.count("figure") > 1


def test_every_picture_and_scrolled_region_has_a_name(tmp_path):
    write_html(summarize(fake(40), nearest=100), tmp_path / "out.html")
    page = Page((tmp_path / "out.html").read_text(encoding="utf-8"))
    named = [tag for tag, name, value in page.attributes if name == "aria-label" and value]
    assert named.count("svg") == page.tags.count("svg") == 7
    assert named.count("div") == sum(
        name == "role" for tag, name, _ in page.attributes if tag == "div"
    )


def test_a_section_for_each_question_and_a_formula_for_each_section():
    file = fake(40)
    inside = {k: np.sign(g).mean(0) for k, g in file.gradients.items()}
    more = (FakeChain("sign | mean", inside, True), FakeChain("mean | sign", inside, True))
    copied = {k: np.concatenate([g, g[:1]]) for k, g in file.gradients.items()}
    loss = np.append(file.loss, file.loss[0])
    target = np.append(file.target, file.target[0])
    found = summarize(
        replace(file, gradients=copied, loss=loss, target=target, index=None, more=more), nearest=3
    )
    text = screen(render, found, 120)
    for word in (
        "Which clipping norm", "How large a batch", "Cosine with the mean", "Classes", "Spectrum",
        "Jensen gap", "Duplicates", "0 and 40", "aligned with sample 3", "largest losses",
        "most opposed",
    ):  # fmt: skip
        assert word in text
    assert "Not in this file" not in text
    without = screen(render, summarize(replace(file, rows=False)), 80)
    assert "Not in this file" in without
    assert "-t identity" in without


def test_formulas_are_those_of_the_documentation(tmp_path):
    text = (ROOT / "docs" / "statistics.md").read_text(encoding="utf-8").replace("\\|", "|")
    shown = (summarize(fake(40), nearest=100), two(["w"]), steps(tmp_path, 3))
    lines = [
        line for one in shown for section in one.overview().sections for line in section.formulas
    ]
    assert len(lines) > 25
    for line in lines:
        without_source = re.sub(r" \([A-Z][^)]*\d{4}\).*", "", line)
        assert without_source in text, line


def test_a_broken_identity_is_loud():
    class Wrong(type(fake(4))):
        @property
        def norms(self):
            return {k: v * 2 for k, v in super().norms.items()}

    file = fake(20)
    given = {k: getattr(file, k) for k in ("gradients", "loss", "target")}
    assert "does not hold" in screen(render, summarize(Wrong(**given)), 80)


def test_sparklines():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 20) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, None, 7], 20) == "▁ █"
    assert sparkline([0, 7], 20, ascii_only=True) == "_@"
    assert sparkline([3, 3, 3], 20) == "▁▁▁"
    assert len(sparkline(list(range(1000)), 30)) == 30
    assert sparkline(list(range(1000)), 30)[-1] == "█"


def test_an_old_history_may_lack_what_is_unknown(tmp_path):
    steps_ = tuple(
        step.model_copy(update={"opposing": None, "loss": None})
        for step in steps(tmp_path, 3).steps
    )
    history = History(path="x.jsonl", steps=steps_)
    assert fits(screen(render, history, 80), 80)
    plot_stats(history, tmp_path / "out.png")
