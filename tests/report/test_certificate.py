"""The words in which a certificate is told: "proved" is said of what was proved only."""

from typing import Any

import pytest

from gradscope.report import print_facts
from gradscope.stats.certificate import certificate_facts, spans
from tests.report.screens import WIDTHS, fits, screen
from tests.report.test_tables import CERTIFICATE
from tests.stats.test_proof import AUDITED

PASSED = CERTIFICATE | {k: v for k, v in AUDITED.items() if k != "verified"}


def told(certificate: dict[str, Any], audits: str | None = None) -> list[tuple[str, str]]:
    rows = certificate_facts(certificate, audits)
    return [(label, value if isinstance(value, str) else value.text) for label, value in rows]


def with_audit(**changes: Any) -> dict[str, Any]:
    return PASSED | {"audit": AUDITED["audit"] | changes}


def test_an_audited_run() -> None:
    assert told(PASSED) == [
        ("certificate", f"the first batch {CERTIFICATE['verdict']}"),
        ("audits", "3 of 50 batches audited: samples 0 to 6, 203 to 209, 343 to 349"),
        ("", "largest error 2e-07, in a"),
        ("not proved", "c, b: too small to tell from rounding"),
        ("unused", "head.bias"),
    ]
    assert ("audits", "9 of 50, it says") in told(PASSED, "9 of 50, it says")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"verify": "first", "proved": 1, "audited": [[0, 6]]},
            "1 of 50 batches proved, the first (verify = first)",
        ),
        ({"verify": "always", "proved": 50, "audited": [[0, 349]]}, "all 50 batches proved"),
        ({"batches": 1, "proved": 1, "audited": [[0, 6]]}, "1 batch"),
        ({"audited": [[0, 6], [9, 9]]}, "3 of 50 batches audited: samples 0 to 6, 9"),
        (
            {"audited": [[10 * k, 10 * k + 1] for k in range(9)]},
            "3 of 50 batches audited: samples 0 to 1, 10 to 11, ... (6 more), 80 to 81",
        ),
    ],
)
def test_how_much_was_audited(changes: dict[str, Any], words: str) -> None:
    assert ("audits", words) in told(with_audit(**changes))


def test_batches_of_zeros() -> None:
    late = PASSED | {"positions": [14, 20]}
    assert told(late)[0][1].startswith("samples 14 to 20 passed: ")
    zeros = told(PASSED | {"proves": False})
    assert zeros[0][1] == "nothing is proved: every gradient is zero"


def test_without_an_audit() -> None:
    assert told({"verified": False}) == [
        ("certificate", "NOT VERIFIED: verification was switched off")
    ]
    assert told({}) == [("certificate", "not recorded")]
    old = told(CERTIFICATE)
    assert [label for label, _ in old] == ["certificate", "unused"]


def test_merged_files() -> None:
    merged = {"count": 3, "verified": 2, "unverified": [[20, 39]], "first_only": [[40, 59]]}
    mixed = with_audit(verify="mixed") | {"verified": False, "merged": merged}
    words = [value for _, value in told(mixed)]
    assert words[0] == "NOT VERIFIED: samples 20 to 39 (verify = never)"
    assert words[1].startswith("the first batch of 2 of 3 files passed: ")
    assert "of samples 40 to 59 the first batch alone (verify = first)" in words
    whole = merged | {"verified": 3, "unverified": [], "first_only": []}
    words = [value for _, value in told(PASSED | {"merged": whole})]
    assert words[0].startswith("the first batch of each of 3 files passed: ")
    none = {"verified": False, "merged": merged | {"verified": 0}}
    assert told(none) == [("certificate", "NOT VERIFIED: verification was switched off")]


@pytest.mark.parametrize("width", [20, *WIDTHS])
def test_it_fits_and_escapes(width: int) -> None:
    hostile = with_audit(parameter="[red]\x1b[2Jx", unproved=[f"\x1b{k}" for k in range(99)])
    text = screen(
        lambda rows, console: print_facts(console, rows), certificate_facts(hostile), width
    )
    assert fits(text, width) and "\x1b" not in text
    assert "and 96 more" in " ".join(text.split()) or width == 20


def test_spans() -> None:
    assert spans([(3, 3)]) == "sample 3"
    assert spans([(3, 3), (5, 8)]) == "samples 3, 5 to 8"
