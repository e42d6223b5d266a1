"""Notes of check and compute about a loss that gets the wrong kind of numbers."""

from pathlib import Path

import pytest

from tests.cli.conftest import Gradscope, words

SOFTMAX = """
from torch import nn
class Model(nn.Linear):
    def forward(self, x):
        return super().forward(x).softmax(1)
def build(): return Model(4, 3)
"""
SAYS = "cross_entropy expects logits but gets probabilities"


def test_the_note_is_in_check_and_compute(
    folder: Path, gradscope: Gradscope, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "model.py").write_text(SOFTMAX)
    checked = gradscope(*words(command="check"))
    assert checked.code == 0, checked.err
    assert " ".join(checked.out.split()).count(SAYS) == 1
    done = gradscope(*words("--batch-size", 5))
    assert done.code == 0, done.err
    assert SAYS in done.err  # at the first batch
    assert " ".join(done.out.split()).count(SAYS) == 1  # and in the summary


def test_nothing_is_said_of_logits(
    folder: Path, gradscope: Gradscope, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for done in (gradscope(*words(command="check")), gradscope(*words())):
        assert done.code == 0
        assert "expects logits" not in done.out + done.err
