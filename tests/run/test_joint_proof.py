"""The certificate of a merged file, from those of its parts."""

from pathlib import Path
from typing import Any

import pytest

from gradscope.run.outcome import combine_certificates
from gradscope.stats import Proof
from gradscope.storage import PartialFile


def certificate(start: int, error: float, **changes: Any) -> dict[str, Any]:
    """Of 20 samples from `start` on, in five batches: the first and the last were audited."""
    check = {"error": error, "parameter": f"p{start}", "tolerance": 1e-4, "dtype": "float32"}
    audit = {"verify": "audit", "batches": 5, "proved": 2, "error": error, "proves": True}
    spans = [[start, start + 3], [start + 16, start + 19]]
    return {
        "verified": True,
        "verdict": "passed: and so on",
        "backend": "hooks",
        "dtype": "float32",
        "samples": 4,
        "positions": [start, start + 3],
        "nonfinite": 1,
        "completeness": check,
        "agreement": check | {"error": 2 * error},
        "compared": [start, start + 2],
        "unused": ["dead", f"only {start}"],
        "unproved": ["small"],
        "proves": True,
        "audit": audit | {"audited": spans, "parameter": f"p{start}", "unproved": [f"u{start}"]},
    } | changes


def part(start: int, document: dict[str, Any]) -> PartialFile:
    return PartialFile(Path(f"{start}.h5"), start, start + 20, None, b"", document, 4)


def first_only(start: int) -> dict[str, Any]:
    document = certificate(start, 1e-7)
    document["audit"] |= {"verify": "first", "proved": 1, "audited": [[start, start + 3]]}
    return document


NEVER = {"verified": False, "verdict": "not asked for (verify = never)"}


def test_audits_add_up() -> None:
    found = combine_certificates([part(0, certificate(0, 1e-7)), part(20, certificate(20, 5e-7))])
    assert found["verified"] and found["proves"]
    assert found["verdict"] == (
        "passed: sums of 6 samples to 5e-07, 4 of them alone to 1e-06 (float32)"
    )
    assert (found["samples"], found["nonfinite"], found["compared"]) == (8, 2, [0, 2, 20, 22])
    assert (found["completeness"]["error"], found["completeness"]["parameter"]) == (5e-7, "p20")
    assert found["unused"] == ["dead"]
    assert found["unproved"] == ["small", "u0", "u20"]
    audit = found["audit"]
    assert (audit["verify"], audit["batches"], audit["proved"]) == ("audit", 10, 4)
    assert audit["audited"] == [[0, 3], [16, 23], [36, 39]]  # neighbours are one
    assert (audit["error"], audit["parameter"]) == (5e-7, "p20")
    assert found["merged"] == {"count": 2, "verified": 2, "unverified": [], "first_only": []}


def test_files_of_less_are_told() -> None:
    files = [certificate(0, 1e-7), NEVER, NEVER, first_only(60), certificate(80, 1e-7)]
    found = combine_certificates([part(20 * k, document) for k, document in enumerate(files)])
    assert found["verified"] is False
    assert found["merged"] == {
        "count": 5,
        "verified": 3,
        "unverified": [[20, 59]],
        "first_only": [[60, 79]],
    }
    audit = found["audit"]
    assert (audit["verify"], audit["batches"], audit["proved"]) == ("mixed", 25, 5)
    assert Proof.of(found).merged is not None


def test_none_is_verified() -> None:
    found = combine_certificates([part(0, NEVER), part(20, NEVER)])
    assert found == NEVER | {
        "merged": {"count": 2, "verified": 0, "unverified": [[0, 39]], "first_only": []}
    }


def test_backends_and_gradients_that_a_layer_scales() -> None:
    scaled = certificate(20, 0.3, backend="vmap, hooks", verdict="passed: all 4 samples alone ...")
    found = combine_certificates([part(0, certificate(0, 1e-7)), part(20, scaled)])
    assert found["backend"] == "hooks, vmap"
    assert found["verdict"] == "passed: all 4 samples alone ..."  # they do not sum up


@pytest.mark.parametrize(
    "spoilt",
    [
        {"audit": 3},
        {"completeness": "none"},
        {"compared": 1, "unused": {"a": 1}, "samples": "4", "backend": None},
        {"agreement": {"error": "x"}, "unproved": 2},
    ],
)
def test_malformed_records_are_left_out(spoilt: dict[str, Any]) -> None:
    found = combine_certificates(
        [part(0, certificate(0, 1e-7)), part(20, certificate(20, 1e-7, **spoilt))]
    )
    assert found["audit"]["proved"] in (3, 4) and found["audit"]["batches"] == 10
