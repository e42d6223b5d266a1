"""docs/reference.md: what the program says of its options today."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_reference_is_current() -> None:
    made = runpy.run_path(str(DOCS / "make_reference.py"))["page"]()
    stale = "docs/reference.md is stale: run python docs/make_reference.py"
    assert made == (DOCS / "reference.md").read_text(encoding="utf-8"), stale
