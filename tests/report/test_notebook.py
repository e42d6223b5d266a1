"""Results in a notebook: the numbers of their JSON, every text as it is, and figures to keep."""

from html.parser import HTMLParser
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch import nn

import gradscope
import gradscope.stats
from gradscope.cli import app
from gradscope.errors import SpecError
from gradscope.stats import Summary
from tests.cli.conftest import SAMPLES
from tests.report.shown import NASTY, summary_of, two


class Seen(HTMLParser):
    """The tags and the cells that a browser would make of it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.cells: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.tags.add(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.cells:
            self.cells[-1] += data


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("notebook") / "<b>out.h5"
    model = SAMPLES / "digits_mlp" / "run.toml"
    words = ["compute", "--config", str(model), "--samples", ":40", "-q", "-o", str(path)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["gradscope", *words])
        assert app.run() == 0
    return path


def test_a_file_says_what_it_holds(file: Path) -> None:
    with gradscope.open(file) as opened:
        found = Seen(opened._repr_html_())
        assert {"40", str(opened.certificate["verdict"])} <= {*found.cells}
        assert all(chain.text in found.cells for chain in opened.chains)
    assert found.tags == {"div", "strong", "table", "tbody", "tr", "th", "td", "abbr"}


@pytest.mark.parametrize("found", [summary_of(NASTY), two(NASTY)])
def test_statistics_are_no_markup(found: Summary) -> None:
    seen = Seen(found._repr_html_())
    known = {"div", "strong", "p", "br", "table", "thead", "tbody", "tr", "th", "td"}
    assert seen.tags <= known | {"details", "summary", "ul", "li", "abbr"}
    assert not any("\x1b" in cell for cell in seen.cells)


def test_what_stands_out_is_listed(file: Path) -> None:
    with gradscope.open(file) as opened:
        found = gradscope.stats.summarize(opened)
        order = np.argsort(-opened.samples["norm"], kind="stable")
        cells = Seen(found._repr_html_()).cells
        largest = cells[cells.index("prediction") + 1 :][:6]  # the first row of the table
        assert largest[0] == str(opened.samples["index"][order[0]])
        assert float(largest[1]) == pytest.approx(opened.samples["norm"][order[0]], rel=0.01)


def test_a_comparison_has_a_row_a_backend() -> None:
    torch.manual_seed(0)
    model, inputs = nn.Linear(4, 3), torch.randn(5, 4)
    found = gradscope.compare(model, "cross_entropy", inputs, torch.tensor([0, 1, 2, 0, 1]))
    cells = Seen(found._repr_html_()).cells
    for row in found.rows:
        place = cells.index(row.backend)
        assert cells[place + 1] == row.status == "agrees"


def test_plot_draws_the_samples_of_the_file(file: Path) -> None:
    drawn = gradscope.plot(file)
    with h5py.File(file) as hdf5:
        loss, norm = (np.sort(hdf5[f"samples/{name}"][...]) for name in ("loss", "norm"))
    axes = {axis.get_title(): axis for axis in drawn.findobj(type(drawn.axes[0]))}
    points = np.asarray(axes["Norm against loss"].collections[0].get_offsets())
    np.testing.assert_allclose(np.sort(points[:, 0]), loss)
    np.testing.assert_allclose(np.sort(points[:, 1]), norm)


def test_there_is_nothing_to_draw_of_an_empty_result(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="nothing to draw"):
        gradscope.plot(gradscope.stats.sections.Overview([], [], [], []))
