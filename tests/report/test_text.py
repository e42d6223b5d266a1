"""Names stay distinct and harmless; numbers stay short."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from gradscope.core import texts
from gradscope.report.console import fit_names, visible
from gradscope.stats import sections

GPT = [
    f"transformer.h.{layer}.{part}"
    for layer in range(12)
    for part in ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_fc.bias")
]


@pytest.mark.parametrize("width", [24, 28, 32])
def test_layers_of_a_transformer_are_told_apart(width):
    cut = fit_names(GPT, width)
    assert len(set(cut)) == len(GPT)
    assert all(cell_len(name) <= width for name in cut)
    assert fit_names(GPT, 16) == GPT  # no cut tells them apart: they will wrap


def test_short_names_are_left_alone():
    assert fit_names(["a.weight", "b.weight"], 8) == ["a.weight", "b.weight"]


def test_names_that_no_cut_tells_apart_stay_whole():
    names = ["a" * 30 + "x" + "a" * 30, "a" * 30 + "y" + "a" * 30]
    assert fit_names(names, 16) == names


@given(st.sets(st.text("ab.é層", min_size=1, max_size=24), max_size=12), st.integers(5, 20))
def test_no_two_names_become_alike(names, width):
    ordered = sorted(names)
    shown = fit_names(ordered, width)
    assert len(set(shown)) == len(ordered)
    cut = [new for new, old in zip(shown, ordered, strict=True) if new != old]
    assert all(cell_len(name) <= width for name in cut)


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31mred", r"\x1b[31mred"),
        ("a\nb\tc\x00", r"a\nb\tc\x00"),
        ("abc\u202edef", r"abc\u202edef"),
        ("\ud800", r"\ud800"),
        ("\x9b5m", r"\x9b5m"),
        ("層.weight [bold]é", "層.weight [bold]é"),
    ],
)
def test_visible(raw, shown):
    assert visible(raw) == shown
    assert visible("a\nb", keep="\n") == "a\nb"


@given(st.floats(-1e99, 1e99).filter(lambda v: v == 0 or abs(v) > 1e-99))
def test_numbers_take_at_most_nine_cells_and_lose_little(value):
    shown = sections.short(value)
    assert len(shown) <= 9
    assert float(shown) == pytest.approx(value, rel=5.1e-3)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"), (0.0, "0"), (1.0, "1.00"), (0.001, "0.00100"), (999.6, "1000"),
        (12345.6, "12346"), (99999.7, "1.00e5"), (1.5e-7, "1.50e-7"), (-3.14159, "-3.14"),
        (999.4, "999"), (1e-100, "1.00e-100"), (float("nan"), "nan"), (float("inf"), "inf"),
    ],
)  # fmt: skip
def test_short(value, shown):
    assert sections.short(value) == shown


def test_units():
    assert [sections.size(n) for n in (None, 0, 999, 1000, 999_600, 123_456_789)] == [
        "-", "0 B", "999 B", "1 kB", "1 MB", "123 MB"
    ]  # fmt: skip
    assert [sections.duration(s) for s in (None, 0.0123, 4.56, 123, 3900)] == [
        "-", "12.3 ms", "4.56 s", "2 min 03 s", "1 h 05 min"
    ]  # fmt: skip
    assert [sections.percent(s) for s in (None, 0.0, 1e-5, 0.1234, 1.0)] == [
        "-", "0.0%", "<0.1%", "12.3%", "100.0%"
    ]  # fmt: skip
    assert [texts.count(n, "sample") for n in (0, 1, 1797)] == [
        "0 samples", "1 sample", "1,797 samples"
    ]  # fmt: skip
    assert [sections.shape_text(s) for s in ((), (3,), (64, 3, 7, 7))] == [
        "scalar",
        "3",
        "64x3x7x7",
    ]
