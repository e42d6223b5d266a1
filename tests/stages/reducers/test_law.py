"""The law of parts: every reducer keeps to it, and one that does not is told."""

from pathlib import Path

import pytest
import torch
from torch import nn

from gradscope import Scope
from gradscope.stages.chain import bind
from gradscope.stages.reducers import depends_on_split, reducers

ARGUMENTS = {"moment": ":k=3", "quantile": ":q=0.3"}
OWN = """
import gradscope

@gradscope.reducer
def latest():
    def start(gradients):
        return {name: block.weighted_sum() for name, block in gradients.items()}

    return gradscope.Reducer(start, lambda a, b: b, lambda state: state)
"""


@pytest.mark.parametrize("name", reducers.names())
def test_every_reducer_keeps_to_it(name: str) -> None:
    reducer = bind(name + ARGUMENTS.get(name, "")).reducer
    assert reducer is not None
    assert depends_on_split(reducer) is None


@pytest.mark.parametrize("name", reducers.names())
def test_a_reducer_that_forgets_does_not(name: str) -> None:
    reducer = bind(name + ARGUMENTS.get(name, "")).reducer
    assert reducer is not None
    assert depends_on_split(reducer._replace(merge=lambda a, b: b)) is not None


def test_of_a_users_own_it_is_noted(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with Scope(nn.Linear(3, 2), "mse") as scope:
        scope.expectation(f"{tmp_path}/own.py:latest", torch.randn(4, 3), torch.randn(4, 2))
        assert any("see its `merge`" in note for note in scope.notes)
