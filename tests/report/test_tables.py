"""Tables at every width: nothing too wide, no two names alike, nothing taken for markup."""

import re

import numpy as np
import pytest

from gradscope.report import render, render_run
from gradscope.stats import RunReport, Summary, short, summarize
from tests.report.screens import WIDTHS, fits, screen
from tests.stats.fakes import FakeFile, fake

HOSTILE = ["[conv1].weight", "[/bold]", "[red]x[/red]", "\x1b[31mred\x1b[0m", "a\nb", ":smile:"]
LAYERS = [f"transformer.h.{k}.attn.c_{part}.weight" for k in range(12) for part in ("attn", "proj")]
CERTIFICATE = {
    "verified": True,
    "verdict": "passed: sum of 256 samples to 1e-07, 3 of them alone to 3e-07 (float32)",
    "backend": "hooks",
    "dtype": "float32",
    "completeness": {"error": 1.2e-7, "parameter": "a", "tolerance": 1e-4},
    "agreement": {"error": 3.4e-7, "parameter": "a", "tolerance": 1e-4},
    "unused": ["head.bias"],
}


def file_with(names, n=30, **changes):
    rng = np.random.default_rng(0)
    gradients = {name: rng.normal(k + 1, 1, (n, 3, k + 1)) for k, name in enumerate(names)}
    return FakeFile(gradients, rng.random(n) + 0.5, target=rng.integers(0, 9, n), **changes)


def summary_of(names, **changes):
    return summarize(file_with(names, certificate=CERTIFICATE, **changes))


def run_of(summary, **changes):
    values = {
        "parameters": summary.parameters,
        "certificate": CERTIFICATE,
        "backend": "hooks",
        "notes": ("auto chose hooks: " + "every node has a rule " * 5, "unused: head.bias"),
        "samples": 1797,
        "nonfinite": 2,
        "seconds": 2.5,
        "path": "runs/" + "long/" * 20 + "out.h5",
        "bytes": 123_456_789,
        "chains": ("identity", "clip:max_norm=1.0 | mean"),
    }
    return RunReport(**(values | changes))


@pytest.mark.parametrize("width", [20, *WIDTHS])
@pytest.mark.parametrize("names", [HOSTILE, LAYERS], ids=["hostile", "layers"])
def test_nothing_is_wider_than_the_terminal(names, width):
    summary = summary_of(names)
    assert fits(screen(render, summary, width), width)
    assert fits(screen(render_run, run_of(summary), width), width)


@pytest.mark.parametrize("width", WIDTHS)
def test_no_two_names_look_alike(width):
    text = screen(render_run, run_of(summary_of(LAYERS)), width)
    names = []
    for line in re.split(r"\n\n|\(hidden", text.split("─\n")[1])[0].splitlines():
        word, *numbers = line.split()
        if numbers:
            names.append(word)
        else:
            names[-1] += word  # the rest of a wrapped name
    assert len(names) == len(set(names)) == len(LAYERS)


def test_all_columns_and_whole_names_when_there_is_room():
    text = screen(render, summary_of(LAYERS), 200)
    assert all(name in text for name in LAYERS)
    assert "hidden" not in text
    for title in ("shape", "entries", "share", "SNR", "largest"):
        assert title in text
    assert "hidden for want of width: shape" in screen(render, summary_of(LAYERS), 40)


@pytest.mark.parametrize("width", WIDTHS)
def test_names_are_text_and_never_markup_or_escapes(width):
    for show, result in (
        (render, summary_of(HOSTILE, path="[bold]\x1b[2J.h5")),
        (render_run, run_of(summary_of(HOSTILE), notes=("[blink]\x07",), path="[bold]\x1b[2J.h5")),
    ):
        text = screen(show, result, width)
        shown = ["[conv1].weight", "[/bold]", "[red]x[/red]", r"a\nb", ":smile:"]
        for name in [*shown, r"\x1b[31mred", r"[bold]\x1b[2J.h5"]:
            assert name in text
        assert "\x1b" not in text
        assert "\x07" not in text


def test_numbers_of_the_summary_are_shown():
    summary = summary_of(["w", "v"])
    text = screen(render, summary, 80)
    assert f"{summary.norm.percentiles['50']:.3g}" in text
    assert f"{summary.noise_scale.simple:.3g}"[:3] in text
    for row in summary.samples:
        assert f"{row.norm:.3g}" in text
    for n in summary.norm.histogram.counts:
        assert f" {n}  " in text
    assert CERTIFICATE["verdict"] in " ".join(text.split())
    assert "head.bias" in text


def test_samples_that_are_not_finite_are_announced():
    text = screen(render, summarize(fake(30, broken=(3, 5))), 80)
    assert "2 samples not finite and left out below: 109, 115" in text
    many = summarize(fake(30, broken=tuple(range(20))), top=2)
    assert "20 samples not finite and left out below: 100, 103, ..." in screen(render, many, 80)
    text = screen(render_run, run_of(many), 80)
    assert "2 of 1,797 samples" in text
    assert "not finite" not in screen(render_run, run_of(many, nonfinite=0), 80)


def test_run_says_what_was_written():
    text = screen(render_run, run_of(summary_of(["w"]), path="out.h5"), 80)
    assert "out.h5 (123 MB)" in text
    assert "1,797 samples in 2.5 s, 719 samples/s" in text
    assert "clip:max_norm=1.0 | mean" in text
    silent = screen(render_run, run_of(summary_of(["w"]), path=None), 80)
    assert "written" not in silent


def test_certificate_that_is_missing_or_off():
    without = summarize(file_with(["w"], certificate={}))
    assert "not recorded" in screen(render, without, 80)
    off = summarize(file_with(["w"], certificate={"verified": False}))
    assert "NOT VERIFIED" in screen(render, off, 80)


@pytest.mark.parametrize(
    "file",
    [
        fake(1),
        fake(3, broken=(0, 1, 2)),
        FakeFile({"w": np.zeros((4, 2))}, np.zeros(4)),
        FakeFile({"w": np.ones((4, 2))}, np.ones(4)),
        FakeFile({"w": np.ones((2, 1))}, np.ones(2), target=np.array([b"\x1b[1mcat", b"x" * 300])),
    ],
    ids=["one", "none-finite", "zeros", "equal", "texts"],
)
@pytest.mark.parametrize("width", WIDTHS)
def test_unusual_files(file, width):
    summary = summarize(file)
    text = screen(render, summary, width)
    assert fits(text, width)
    assert "\x1b" not in text
    restored = Summary.from_json(summary.to_json())
    assert screen(render, restored, width) == text


def test_bars_are_in_proportion():
    file = FakeFile({"w": np.repeat([1.0, 50.0], [30, 10])[:, None]}, np.ones(40))
    text = screen(render, summarize(file), 80).split("Histogram of the norm")[1]
    lines = text.split("\n\n")[0].splitlines()
    bars = [line.count("█") for line in lines if "█" in line]
    assert len(bars) == 2
    assert bars[0] == pytest.approx(3 * bars[1], abs=3)


def test_the_answers_come_first():
    """Who dominates, where to clip, how large a batch, what learns, what is broken."""
    summary = summarize(fake(40, broken=(3,)))
    told = (
        screen(render, summary, 200).partition("In short")[2].partition("Loss and gradient norm")[0]
    )
    first = summary.samples[0]
    assert f"sample {first.index}, {short(first.times_median)} times the median norm" in told
    assert f"{short(summary.clipping.by_share['10'].norm)} clips 10%" in told
    assert short(summary.noise_scale.simple) in told
    learn = [row for row in summary.parameters if row.noise_scale is not None]
    assert f"{len(learn)} of {len(summary.parameters)} parameters above the noise" in told
    assert "1 sample not finite" in told
    assert str(summary.largest_losses[0].index) in told
