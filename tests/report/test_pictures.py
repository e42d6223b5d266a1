"""Pictures and the page: the formats, the escaping, nothing from a network."""

import re
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import numpy as np
import pytest

from gradscope.errors import OutputError, SpecError
from gradscope.report import plots
from gradscope.report.page import write_html
from gradscope.report.plots import plot_stats
from gradscope.stats import Summary, summarize
from tests.pages import ROOT
from tests.report.shown import NASTY, steps, summary_of, two
from tests.stats.fakes import FakeFile, fake, plain

SVG = "{http://www.w3.org/2000/svg}"
HEADS = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf", ".PNG"])
def test_formats(tmp_path, suffix):
    path = tmp_path / f"out{suffix}"
    plot_stats(two(["w"]), path)
    assert path.read_bytes().startswith(HEADS[suffix.lower()])


def test_picture_holds_names_and_outliers(tmp_path):
    path = tmp_path / "out.svg"
    found = two(NASTY)
    plot_stats(found, path)
    texts = {"".join(e.itertext()) for e in ElementTree.parse(path).iter(f"{SVG}text")}
    assert texts >= {"[conv1].weight", "$x_{", "<script>alert(1)</script>", r"\x1b[31mred\x1b[0m"}
    assert texts >= {str(row.index) for row in found.samples[:5]}
    again = tmp_path / "again.svg"
    plot_stats(found, again)
    assert again.read_bytes() == path.read_bytes()


def test_bars_have_the_values_of_the_rows():
    summary = summary_of(["w", "v"])
    axes = plots.figure(summary.overview().pictures).axes
    (norms,) = [a for a in axes if a.get_title() == "Mean norm"]
    (signals,) = [a for a in axes if a.get_title().startswith("Signal to noise")]
    rows = summary.parameters
    assert [b.get_width() for b in norms.patches] == [r.mean_norm for r in rows]
    assert [b.get_width() for b in signals.patches] == [r.signal_to_noise for r in rows]
    n = summary.file.samples - summary.nonfinite.count
    assert [line.get_xdata()[0] for line in signals.lines] == [1 / n]  # of noise alone


@pytest.mark.sampled
@pytest.mark.parametrize(
    "file",
    [
        fake(1),
        fake(3, broken=(0, 1, 2)),
        plain(np.zeros((4, 2)), loss=np.zeros(4)),
        plain(np.ones((4, 2))),
        plain(np.array([[0.0], [1e-30], [1e30]]), loss=np.array([0.0, 1e-9, 1e9])),
        FakeFile({f"layer{k}": np.ones((2, 1)) * k for k in range(50)}, np.ones(2)),
    ],
    ids=["one", "none-finite", "zeros", "equal", "wide", "deep"],
)
def test_unusual_files(tmp_path, file):
    write_html(summarize(file), tmp_path / "out.html")
    assert (tmp_path / "out.html").read_text().endswith("</html>\n")


def test_what_cannot_be_written(tmp_path, monkeypatch):
    summary = summary_of(["w"])
    with pytest.raises(SpecError, match=r"\.png, \.svg, \.pdf"):
        plot_stats(summary, tmp_path / "out.jpg")
    for write in (plot_stats, write_html):
        with pytest.raises(OutputError, match="No such file"):
            write(summary, tmp_path / "absent" / "out.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SpecError, match=r"gradscope\[plot\]"):
        plot_stats(summary, tmp_path / "out.png")
    write_html(summary, tmp_path / "out.html")
    assert "<figure" not in (tmp_path / "out.html").read_text()


class Page(HTMLParser):
    """Collects what matters of a page, and checks that tags close in order."""

    def __init__(self, result, folder):
        super().__init__()
        self.open, self.tags, self.attributes, self.rows = [], [], [], []
        write_html(result, folder / "out.html")
        self.text = (folder / "out.html").read_text(encoding="utf-8")
        self.feed(self.text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in ("meta", "br"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *a) for a in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "tr" in self.open and self.rows[-1]:
            self.rows[-1][-1] += data.strip("\n")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return Page(summary_of(NASTY, path="<b>run</b>.h5"), tmp_path_factory.mktemp("page"))


def test_page_is_well_formed_and_escaped(page):
    assert page.tags.count("script") == 1  # ours
    assert "b" not in page.tags
    first = next(k for k, row in enumerate(page.rows) if row[0] == "parameter") + 1
    assert [row[0] for row in page.rows[first : first + len(NASTY)]] == [
        "[conv1].weight", "[/bold]", "[red]x[/red]", r"\x1b[31mred\x1b[0m", r"a\nb", ":smile:",
        "$x_{", "<script>alert(1)</script>", "a&b\"'",
    ]  # fmt: skip
    assert "\x1b" not in page.text
    assert sum(name == "scope" and value == "col" for _, name, value in page.attributes) > 8 + 5
    named = [tag for tag, name, value in page.attributes if name == "aria-label" and value]
    assert named.count("table") == page.tags.count("table")
    assert page.tags.count("details") == page.tags.count("summary") > 5


def test_page_needs_no_network_and_takes_the_colours_of_the_reader(page):
    for tag, name, value in page.attributes:
        if name in ("src", "href", "xlink:href"):
            assert value.startswith(("#", "data:image/png;base64,")), (tag, value)
    assert not re.search(r"@import|url\((?!#)", page.text)
    assert "prefers-color-scheme: dark" in page.text
    assert "currentColor" in page.text
    assert "#010203" not in page.text  # the placeholder


def test_page_sorts_by_full_numbers(page):
    values = [float(v) for _, name, v in page.attributes if name == "data-value"]
    for row in summary_of(NASTY).parameters:
        assert {row.mean_norm, row.max_norm, row.share, float(row.entries)} <= set(values)


def test_pages_of_two_files_of_a_history_and_of_what_is_read_back(tmp_path):
    read_back = Summary.from_json(summary_of(["w"]).to_json())
    pages = (two([*NASTY[:3], "<script>"]), 1), (steps(tmp_path, 9), 5), (read_back, 1)
    for found, scripts in pages:  # a history has data, and scripts that draw them
        page = Page(found, tmp_path)
        assert page.tags.count("script") == scripts
        assert "b" not in page.tags
        assert page.tags.count("figure") > 1


def test_every_picture_and_scrolled_region_has_a_name(tmp_path):
    page = Page(summarize(fake(40), nearest=100), tmp_path)
    named = [tag for tag, name, value in page.attributes if name == "aria-label" and value]
    assert named.count("svg") == page.tags.count("svg") == 9
    roles = sum(name == "role" for tag, name, _ in page.attributes if tag == "div")
    assert named.count("div") == roles


def test_formulas_are_those_of_the_documentation(tmp_path):
    text = (ROOT / "docs" / "statistics.md").read_text(encoding="utf-8").replace("\\|", "|")
    shown = (summarize(fake(40), nearest=100), two(["w"]), steps(tmp_path, 3))
    sections = [section for one in shown for section in one.overview().sections]
    lines = [line for section in sections for line in section.formulas]
    assert len(lines) > 25
    for line in lines:
        without_source = re.sub(r" \([A-Z][^)]*\d{4}\).*", "", line)
        assert without_source in text, line
