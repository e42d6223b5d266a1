"""What a certificate says of a whole file, read off whatever a file holds."""

import json
from dataclasses import replace

import pytest

from gradscope.stats import Proof, Summary, summarize
from tests.stats.fakes import fake

AUDITED = {
    "verified": True,
    "positions": [0, 6],
    "proves": True,
    "unproved": ["c"],
    "audit": {
        "verify": "audit",
        "batches": 50,
        "proved": 3,
        "audited": [[0, 6], [203, 209], [343, 349]],
        "error": 2e-7,
        "parameter": "a",
        "unproved": ["b", "c"],
        "proves": True,
    },
}


def test_what_was_audited() -> None:
    proof = Proof.of(AUDITED)
    assert (proof.verified, proof.verify, proof.positions) == (True, "audit", (0, 6))
    assert (proof.batches, proof.proved) == (50, 3)
    assert proof.audited == ((0, 6), (203, 209), (343, 349))
    assert (proof.error, proof.parameter, proof.unproved) == (2e-7, "a", ("c", "b"))
    assert proof.merged is None


def test_it_is_part_of_the_summary_and_its_json() -> None:
    summary = summarize(replace(fake(9), certificate=AUDITED))
    document = json.loads(json.dumps(summary.to_json()))
    assert document["file"]["proof"]["audited"] == AUDITED["audit"]["audited"]
    assert Summary.from_json(document).file.proof == Proof.of(AUDITED)
    del document["file"]["proof"]  # as an earlier version wrote it
    assert Summary.from_json(document).file.proof == Proof()


@pytest.mark.parametrize(
    ("certificate", "verified", "verify"),
    [
        ({}, None, None),
        ({"verified": False}, False, "never"),
        ({"verified": True}, True, None),  # of a version without audits
    ],
)
def test_what_is_missing_is_not_made_up(certificate, verified, verify) -> None:
    proof = Proof.of(certificate)
    assert (proof.verified, proof.verify) == (verified, verify)
    assert (proof.batches, proof.proved, proof.error) == (None, None, None)


@pytest.mark.parametrize(
    "spoilt",
    [
        {"audit": "x"},
        {"audit": {"batches": "many"}},
        {"audit": {"audited": [[1]]}},
        {"audit": {"audited": 3, "unproved": {"a": 1}}},
        {"audit": {"error": float("nan")}},
        {"merged": [1]},
        {"positions": None},
        {"unproved": 7},
        {"proves": "perhaps not"},
    ],
)
def test_a_malformed_record_is_none(spoilt) -> None:
    proof = Proof.of({"verified": True, **spoilt})
    assert proof.verified is True
    assert (proof.batches, proof.audited) == (None, ())
    assert Proof.of({"verified": [3], **spoilt}).verified is None
