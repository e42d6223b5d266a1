"""What is printed at every width: nothing too wide, no two names alike, nothing a markup."""

import re
from typing import Any

import numpy as np
import pytest

from gradscope.comparison import BackendRow, Comparison, ParameterAgreement
from gradscope.report.agreement import render_comparison
from gradscope.report.screens import render_run
from gradscope.report.terminal import print_facts, print_table, render
from gradscope.stats import Summary, short, summarize
from gradscope.stats.certificate import certificate_facts, spans
from gradscope.stats.sections import Sparkline, Table, numbers
from tests.report.shown import (
    CERTIFICATE,
    HOSTILE,
    LAYERS,
    WIDTHS,
    file_with,
    fits,
    run_of,
    screen,
    steps,
    summary_of,
    two,
    words,
)
from tests.stats.fakes import FakeChain, FakeFile, fake, plain
from tests.stats.test_summary import AUDITED

PASSED = CERTIFICATE | {k: v for k, v in AUDITED.items() if k != "verified"}
UNUSUAL = {
    "one": fake(1),
    "none finite": fake(3, broken=(0, 1, 2)),
    "zeros": plain(np.zeros((4, 2)), loss=np.zeros(4)),
    "equal": plain(np.ones((4, 2))),
    "texts": plain(np.ones((2, 1)), target=np.array([b"\x1b[1mcat", b"x" * 300])),
    "hostile": file_with(HOSTILE, path="[bold]\x1b[2J.h5"),
    "layers": file_with(LAYERS),
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", UNUSUAL)
def test_a_summary_fits_and_is_the_same_read_back(name, width):
    summary = summarize(UNUSUAL[name])
    text = screen(render, summary, width)
    assert fits(text, width)
    assert screen(render, Summary.from_json(summary.to_json()), width) == text


@pytest.mark.sampled
@pytest.mark.parametrize("width", WIDTHS)
def test_all_other_results_fit(tmp_path, width):
    history = steps(tmp_path)
    unknown = [s.model_copy(update={"opposing": None, "loss": None}) for s in history.steps[:3]]
    old = history.model_copy(update={"steps": tuple(unknown)})
    for found in (two(HOSTILE), two(LAYERS), history, old):
        assert fits(screen(render, found, width), width)
    assert fits(screen(render_run, run_of(summary_of(LAYERS)), width), width)


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_names_are_text_and_never_markup_or_escapes(width):
    run = run_of(summary_of(HOSTILE), notes=("[blink]\x07",), path="[bold]\x1b[2J.h5")
    for show, result in ((render, summarize(UNUSUAL["hostile"])), (render_run, run)):
        text = screen(show, result, width)
        shown = ["[conv1].weight", "[/bold]", "[red]x[/red]", r"a\nb", ":smile:"]
        for name in [*shown, r"\x1b[31mred", r"[bold]\x1b[2J.h5"]:
            assert name in text
        assert "\x07" not in text


@pytest.mark.parametrize("width", WIDTHS[1:])
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
    assert "terminal too narrow: shape" in screen(render, summary_of(LAYERS), 40)


@pytest.mark.parametrize("width", [80, 40])
def test_every_class_has_a_column_in_a_table_that_wraps(width):
    classes = [numbers(f"class{k}", [k + 0.25, -k - 0.5], rank=1 + k) for k in range(10)]
    table = Table(classes, "query", ["12", "7"], wraps=True)
    text = screen(lambda t, console: print_table(console, t), table, width)
    assert fits(text, width) and "hidden" not in text
    found = words(text).split()
    for k in range(10):
        assert found.count(f"class{k}") == 1 and short(k + 0.25) in found
    assert found.count("query") == found.count("12") > 1


def test_the_numbers_of_a_summary_and_the_answers_first():
    summary = summarize(fake(40, broken=(3,), certificate=CERTIFICATE))
    text = screen(render, summary, 200)
    told = text.partition("In short")[2].partition("Loss and gradient norm")[0]
    first = summary.samples[0]
    learn = [row for row in summary.parameters if row.noise_scale is not None]
    for word in (
        f"sample {first.index}, {short(first.times_median)} times the median norm",
        f"{short(summary.clipping.by_share['10'].norm)} clips 10%",
        short(summary.noise_scale.simple),
        f"{len(learn)} of {len(summary.parameters)} parameters above the noise",
        "1 sample not finite",
        str(summary.largest_losses[0].index),
    ):
        assert word in told
    for value in (summary.norm.percentiles["50"], *(row.norm for row in summary.samples)):
        assert short(value) in text
    for n in summary.norm.histogram.counts:
        assert f" {n}  " in text
    assert CERTIFICATE["verdict"] in words(text)
    assert "head.bias" in text
    assert "1 sample not finite and left out below: 109" in text


def test_a_section_for_each_question():
    file = fake(40)
    inside = {k: np.sign(g).mean(0) for k, g in file.gradients.items()}
    more = (FakeChain("sign | mean", inside, True), FakeChain("mean | sign", inside, True))
    copied = {k: np.concatenate([g, g[:1]]) for k, g in file.gradients.items()}
    loss, target = np.append(file.loss, file.loss[0]), np.append(file.target, file.target[0])
    text = screen(render, summarize(FakeFile(copied, loss, target, more=more), nearest=3), 120)
    for word in (
        "Which clipping norm", "Useful batch size", "Cosine with the mean", "Classes", "Spectrum",
        "Jensen gap", "Duplicates", "1 pair with equal gradients",
        "aligned with sample 3", "largest losses", "most opposed",
    ):  # fmt: skip
        assert word in text
    assert "Not in this file" not in text
    without = screen(render, summarize(file.holding()), 80)
    assert "Not in this file" in without
    assert "-t identity" in without


def test_what_is_wrong_is_loud():
    wrong = {"norms": {"scale": fake(20).norms["scale"] * 2 + 9}}
    assert "a check failed" in screen(render, summarize(fake(20, wrong=wrong)), 80)
    many = summarize(fake(30, broken=tuple(range(20))), top=2)
    told = "20 samples not finite and left out below: 100, 103, ..."
    assert told in screen(render, many, 80)
    assert "2 of 1,797 samples" in screen(render_run, run_of(many), 80)
    assert "not finite" not in screen(render_run, run_of(many, nonfinite=0), 80)


def test_a_run_of_many_parameters_prints_those_with_the_largest_share():
    names = [f"w{k}" for k in range(90)]
    result = run_of(summary_of(names))
    rows = [r.model_copy(update={"share": k / 100}) for k, r in enumerate(result.parameters)]
    text = screen(render_run, result.model_copy(update={"parameters": tuple(rows)}), 80)
    assert [word for word in text.split() if re.fullmatch(r"w\d+", word)] == names[50:]
    assert "50 parameters with a smaller share" in text


def test_a_run_says_what_was_written():
    text = screen(render_run, run_of(summary_of(["w"]), path="out.h5"), 80)
    for word in ("out.h5 (123 MB)", "1,797 samples in 2.5 s, 719 samples/s", "max_norm=1.0 | mean"):
        assert word in text
    assert "written" not in screen(render_run, run_of(summary_of(["w"]), path=None), 80)


def test_what_two_files_say():
    found = two(["w", "v"])
    text = screen(render, found, 200)
    assert f"cosine of the two mean gradients: {found.cosine:.3g}" in text
    assert all(f"{row.moved:.3g}" in text for row in found.samples)
    other = two(["w"], attributes={"dataset_sha256": "other"})
    assert "The data differ" in screen(render, other, 80)


def test_bars_are_in_proportion():
    text = screen(render, summarize(plain(np.repeat([1.0, 50.0], [30, 10])[:, None])), 80)
    lines = text.split("Histogram of the norm")[1].split("\n\n")[0].splitlines()
    long, brief = [line.count("█") for line in lines if "█" in line]
    assert long == pytest.approx(3 * brief, abs=3)


def test_sparklines():
    assert Sparkline([0, 1, 2, 3, 4, 5, 6, 7]).bars(20) == "▁▂▃▄▅▆▇█"
    assert Sparkline([0, None, 7]).bars(20) == "▁ █"
    assert Sparkline([0, 7]).bars(20, ascii_only=True) == "_@"
    assert Sparkline([3, 3, 3]).bars(20) == "▁▁▁"
    thinned = Sparkline(list(range(1000))).bars(30)
    assert (len(thinned), thinned[-1]) == (30, "█")


def told(certificate: dict[str, Any], audits: str | None = None) -> list[tuple[str, str]]:
    rows = certificate_facts(certificate, "sample", audits)
    return [(label, value if isinstance(value, str) else value.text) for label, value in rows]


def with_audit(**changes: Any) -> dict[str, Any]:
    return PASSED | {"audit": AUDITED["audit"] | changes}


def test_an_audited_run() -> None:
    assert told(PASSED) == [
        ("certificate", f"the first batch {CERTIFICATE['verdict']}"),
        ("audits", "3 of 50 batches audited: samples 0 to 6, 203 to 209, 343 to 349"),
        ("", "largest error 2e-07, in a"),
        ("not proved", "c, b: as small as rounding errors"),
        ("unused", "head.bias"),
    ]
    assert ("audits", "9 of 50, it says") in told(PASSED, "9 of 50, it says")
    assert spans([(3, 3)], "sample") == "sample 3"


FIRST = {"verify": "first", "proved": 1, "audited": [[0, 6]]}
MANY = [[10 * k, 10 * k + 1] for k in range(9)]
SEVERAL = "3 of 50 batches audited: samples "


@pytest.mark.parametrize(
    ("certificate", "label", "said"),
    [
        (with_audit(**FIRST), "audits", "1 of 50 batches proved, the first (verify = first)"),
        (
            with_audit(verify="always", proved=50, audited=[[0, 349]]),
            "audits",
            "all 50 batches proved",
        ),
        (with_audit(batches=1, proved=1, audited=[[0, 6]]), "audits", "1 batch"),
        (with_audit(audited=[[0, 6], [9, 9]]), "audits", f"{SEVERAL}0 to 6, 9"),
        (
            with_audit(audited=MANY),
            "audits",
            f"{SEVERAL}0 to 1, 10 to 11, ... (6 more), 80 to 81",
        ),
        (
            PASSED | {"positions": [14, 20]},
            "certificate",
            f"samples 14 to 20 {CERTIFICATE['verdict']}",
        ),
        (PASSED | {"proves": False}, "certificate", "nothing is proved: every gradient is zero"),
        ({"verified": False}, "certificate", "NOT VERIFIED: verification was switched off"),
        ({}, "certificate", "not recorded"),
        (CERTIFICATE, "certificate", f"the first batch {CERTIFICATE['verdict']}"),
    ],
)
def test_what_was_proved(certificate: dict[str, Any], label: str, said: str) -> None:
    """ "Proved" is said of what was proved only."""
    assert (label, said) in told(certificate)


def test_merged_files() -> None:
    merged = {"count": 3, "verified": 2, "unverified": [[20, 39]], "first_only": [[40, 59]]}
    mixed = with_audit(verify="mixed") | {"verified": False, "merged": merged}
    said = [value for _, value in told(mixed)]
    assert said[0] == "NOT VERIFIED: samples 20 to 39 (verify = never)"
    assert said[1].startswith("the first batch of 2 of 3 files passed: ")
    assert "samples 40 to 59: only the first batch (verify = first)" in said
    whole = merged | {"verified": 3, "unverified": [], "first_only": []}
    found = told(PASSED | {"merged": whole})
    assert found[0][1].startswith("the first batch of each of 3 files passed: ")
    none = {"verified": False, "merged": merged | {"verified": 0}}
    assert told(none) == [("certificate", "NOT VERIFIED: verification was switched off")]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_certificate_fits_and_is_escaped(width: int) -> None:
    hostile = with_audit(parameter="[red]\x1b[2Jx", unproved=[f"\x1b{k}" for k in range(99)])
    rows = certificate_facts(hostile, "sample")
    text = screen(lambda rows, console: print_facts(console, rows), rows, width)
    assert fits(text, width)
    assert "and 96 more" in words(text) or width == 20


REASON = "the vmap backend cannot run [conv1] this model: RuntimeError: .item() on a Tensor"
REMEDY = "Write the model without data-dependent control flow, or use --backend hooks instead."
MEANING = "the loss was averaged over the batch of 4: use reduction='none'"
RIGHT = ParameterAgreement(
    name="a", absolute=1e-7, relative=2e-7, cosine=1.0, worst_sample=0, factor=1.0,
    kind="agrees", meaning="", agrees=True,
)  # fmt: skip


def wrong(name, relative):
    return ParameterAgreement(
        name=name, absolute=0.3, relative=relative, cosine=0.99988, worst_sample=17, factor=0.25,
        kind="scale", meaning=MEANING, agrees=False,
    )  # fmt: skip


AGREES = BackendRow("loop", "agrees", None, None, 0.8, 10**6, (RIGHT,))
REFUSED = BackendRow("vmap", "refused", REASON, REMEDY)
WRONG = BackendRow(
    "expand", "disagrees", "two of three parameters", None, 0.05, None,
    (wrong("[a].weight", 0.75), RIGHT, wrong("c\x1b[2J", 0.5)),
)  # fmt: skip
SHAPES = BackendRow(
    "mine", "disagrees", None, None, None, None,
    (ParameterAgreement(name="w", kind="shape", meaning="shapes (3,), (4,)", agrees=False),),
)  # fmt: skip
FAILED = BackendRow("file", "failed", "the file has other samples", "Compute it again.")


def compared(*rows):
    agrees = all(row.status in ("agrees", "refused") for row in rows)
    return Comparison(agrees, 64, "float32", 0.0125, None, False, rows)


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_a_comparison_says_everything_at_every_width(width):
    text = screen(render_comparison, compared(AGREES, REFUSED, WRONG, SHAPES, FAILED), width)
    assert fits(text, width)
    for part in (REASON, REMEDY, MEANING, "two of three parameters", "shapes (3,), (4,)",
                 "the file has other samples", "Compute it again.",
                 "expand disagrees in 2 parameters", "[a].weight", r"c\x1b[2J",
                 "1 agrees, 1 refused, 2 DISAGREES, 1 FAILED"):  # fmt: skip
        assert part in words(text)


@pytest.mark.parametrize(
    ("start", "cells"),
    [
        ("loop", "loop agrees 800 ms 64.0 1 MB 2.00e-7"),
        ("expand  ", "expand DISAGREES 50 ms 4.00 - 0.750"),
        ("[a].weight ", "[a].weight 0.750 0.300 0.99988 17 0.25"),
    ],
)
def test_the_numbers_of_a_comparison(start, cells):
    lines = screen(render_comparison, compared(AGREES, WRONG), 120).splitlines()
    (found,) = [words(line) for line in lines if line.startswith(start)]
    assert found == cells


def test_a_disagreement_beyond_the_parameters_is_told():
    row = BackendRow("mine", "disagrees", "unknown parameters: x", None, 0.8, 10**6, (RIGHT,))
    assert "unknown parameters: x" in words(screen(render_comparison, compared(row), 80))


def test_agreement_says_so_and_nothing_more():
    text = screen(render_comparison, compared(AGREES), 80)
    assert "64 samples, 1 backend: 1 agrees" in text
    assert "disagrees in" not in text
