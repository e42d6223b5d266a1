"""`gradscope attribute` as a user types it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradscope as library
from gradscope.config import resolve
from gradscope.run import compute, prepare
from tests.cli.conftest import DIGITS, Gradscope


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two files, which no test changes."""
    folder = tmp_path_factory.mktemp("sides")
    paths = str(folder / "train.h5"), str(folder / "query.h5")
    for path, samples in zip(paths, ("0:60", "60:66"), strict=True):
        options = {"samples": samples, "transform": ["identity"]}
        compute(prepare(resolve(DIGITS, {"compute": options})), Path(path))
    return paths


def test_scores_as_text_json_and_file(
    gradscope: Gradscope, sides: tuple[str, str], tmp_path: Path
) -> None:
    out = str(tmp_path / "scores.h5")
    found = gradscope("attribute", *sides, "-o", out, "--curvature", "fisher", "--json")
    assert found.code == 0, found.err
    document: dict[str, Any] = json.loads(found.out)
    with library.open(out) as file:
        scores = file.chains[0]["scores"][...]
    assert document["queries"], document["samples"] == scores.shape
    for q, row in enumerate(document["rows"]):
        assert row["helpful"][0]["index"] == int(np.argmax(scores[q]))
        assert row["harmful"][0]["score"] == pytest.approx(float(scores[q].min()))
    text = gradscope("attribute", *sides, "-q", "--curvature", "identity", "--top", "1")
    assert text.code == 0
    assert text.out == ""  # quiet, and no file: nothing is said


def test_more_checkpoints_are_words_behind_their_option(
    gradscope: Gradscope, sides: tuple[str, str], digits: Path
) -> None:
    data = ["--samples", "60:66", "--curvature", "identity", "--json"]
    once = gradscope("attribute", sides[0], str(digits), *data)
    thrice = gradscope(
        "attribute", sides[0], str(digits), *data, "--weights", "1,1,1",
        "--checkpoints", sides[0], sides[0],
    )  # fmt: skip
    assert once.code == thrice.code == 0, thrice.err
    one, three = (json.loads(found.out)["rows"][0]["helpful"][0] for found in (once, thrice))
    assert three["score"] == pytest.approx(3 * one["score"])


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--curvature", "fischer"], 2, "Did you mean 'fisher'"),
        (["--damping", "much"], 2, "auto, or a number"),
        (["--damping", "-1"], 2, "negative or not finite"),
        (["--weights", "1,2"], 2, "2 weights"),
        (["--weights", "inf"], 2, "numbers separated by commas"),
        (["--chain", "7"], 2, "no chain '7'"),
        (["third.h5"], 2, "unexpected argument third.h5"),
        (["-o", "no/such/folder/s.h5"], 6, "does not exist"),
        (["-o", "never.h5", "--factors", "absent.h5"], 3, "absent.h5: there is no such file"),
        (["-o", "never.h5", "--factors", "."], 3, ".: this is a directory"),
    ],
)
def test_wrong_words(
    gradscope: Gradscope, sides: tuple[str, str], words: list[str], code: int, text: str
) -> None:
    found = gradscope("attribute", *sides, *words)
    assert found.code == code
    assert text in found.err


def test_nothing_is_computed_for_a_file_that_is_in_the_way(
    gradscope: Gradscope, sides: tuple[str, str]
) -> None:
    found = gradscope("attribute", *sides, "-o", sides[0])
    assert found.code == 6
    assert "exists already" in found.err
    before = [Path(side).read_bytes() for side in sides]
    for taken in sides:  # what may have taken hours
        found = gradscope("attribute", *sides, "-o", taken, "--overwrite")
        assert found.code == 6
        assert "the output would replace an input" in found.err
    assert [Path(side).read_bytes() for side in sides] == before
