"""The table of `gradscope compare`."""

import pytest

from gradscope.comparison import BackendRow, Comparison, ParameterAgreement
from gradscope.report import render_comparison
from tests.report.screens import WIDTHS, fits, screen

REASON = "the vmap backend cannot run [conv1] this model: RuntimeError: .item() on a Tensor"
REMEDY = "Write the model without data-dependent control flow, or use --backend hooks instead."
MEANING = "the loss was averaged over the batch of 4: use reduction='none'"


def agreement(name, relative=2e-7, agrees=True):
    if agrees:
        return ParameterAgreement(name, 1e-7, relative, 1.0, 0, 1.0, "agrees", "", True)
    return ParameterAgreement(name, 0.3, relative, 0.99988, 17, 0.25, "scale", MEANING, False)


def comparison(*rows):
    agrees = all(row.status in ("agrees", "refused") for row in rows)
    return Comparison(agrees, 64, "float32", 0.0125, None, False, rows)


AGREES = BackendRow("loop", "agrees", None, None, 0.8, 10**6, (agreement("a"), agreement("b")))
REFUSED = BackendRow("vmap", "refused", REASON, REMEDY)
WRONG = BackendRow(
    "expand", "disagrees", "two of three parameters", None, 0.05, None,
    (agreement("[a].weight", 0.75, False), agreement("b"), agreement("c\x1b[2J", 0.5, False)),
)  # fmt: skip
SHAPES = BackendRow(
    "mine", "disagrees", None, None, None, None,
    (ParameterAgreement("w", None, None, None, None, None, "shape", "shapes (3,), (4,)", False),),
)  # fmt: skip
FAILED = BackendRow("file", "failed", "the file has other samples", "Compute it again.")


def words(text):
    return " ".join(text.split())


@pytest.mark.parametrize("width", WIDTHS)
def test_everything_is_said_at_every_width(width):
    found = comparison(AGREES, REFUSED, WRONG, SHAPES, FAILED)
    text = screen(render_comparison, found, width)
    assert fits(text, width)
    assert "\x1b" not in text
    for part in (REASON, REMEDY, MEANING, "two of three parameters", "shapes (3,), (4,)",
                 "the file has other samples", "Compute it again.",
                 "expand disagrees in 2 parameters", "[a].weight", r"c\x1b[2J",
                 "1 agrees, 1 refused, 2 DISAGREES, 1 FAILED"):  # fmt: skip
        assert part in words(text)


def test_numbers_of_a_row():
    lines = screen(render_comparison, comparison(AGREES, WRONG), 120).splitlines()
    (loop,) = [line.split() for line in lines if line.startswith("loop")]
    assert loop == ["loop", "agrees", "800", "ms", "64.0", "1", "MB", "2.00e-7"]
    (expand,) = [line.split() for line in lines if line.startswith("expand  ")]
    assert expand == ["expand", "DISAGREES", "50", "ms", "4.00", "-", "0.750"]
    (wrong,) = [line.split() for line in lines if line.startswith("[a].weight ")]
    assert wrong == ["[a].weight", "0.750", "0.300", "0.99988", "17", "0.25"]


def test_agreement_says_so_and_nothing_more():
    text = screen(render_comparison, comparison(AGREES), 80)
    assert "64 samples, 1 backend: 1 agrees" in text
    assert "disagrees in" not in text
