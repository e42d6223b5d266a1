"""Damaged files of each kind; `python -m tests.drill` judges thousands, also in little memory."""

from math import inf
from pathlib import Path

import pytest

from tests.drill import fuzz
from tests.drill.verdicts import FAILURE, REFUSED, Setting


@pytest.mark.parametrize("seed", [0, *(pytest.param(k, marks=pytest.mark.full) for k in (1, 2))])
def test_whatever_is_damaged_the_answer_is_right_or_ours(tmp_path: Path, seed: int) -> None:
    kinds = fuzz.checkpoints() | fuzz.data() | fuzz.texts()
    group = fuzz.Group("some", kinds, tmp_path, Setting(seed, workers=1, seconds=inf))
    verdicts = [group.judge(number) for number in range(300)]
    assert [verdict.text for verdict in verdicts if verdict.kind == FAILURE] == []
    refused = {verdict.text.split()[0] for verdict in verdicts if verdict.kind == REFUSED}
    assert refused == set(kinds)  # every kind was really damaged
