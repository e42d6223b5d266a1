"""Losses as they are written: names, files, arguments, and where relative files belong."""

from pathlib import Path

import pytest

from gradscope.config import function_of, parse_loss, resolve
from gradscope.errors import SpecError

RUN = """
[model]
factory = "model.py:build"
[checkpoint]
path = "w.pt"
[dataset]
path = "d.npz"
[loss]
"""


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("mse", "mse", {}),
        ("huber:delta=2", "huber", {"delta": "2"}),
        ('nll:weight="1,2",per_sample=sum', "nll", {"weight": "1,2", "per_sample": "sum"}),
        ("a b/my.py:f", "a b/my.py:f", {}),
        ("a|b/my.py:f.g:tau=1", "a|b/my.py:f.g", {"tau": "1"}),
        ("my.py:f:path=other.py:g", "my.py:f", {"path": "other.py:g"}),
        ("package.module:f", "package.module:f", {}),
        ("package.module:f:tau=1,x=y", "package.module:f", {"tau": "1", "x": "y"}),
    ],
)
def test_the_parts_of_a_loss(text, name, arguments):
    stage = parse_loss(text)
    assert (stage.name, stage.arguments) == (name, arguments)
    assert function_of(text) == (name if ":" in name else None)
    assert parse_loss(str(stage)).arguments == arguments


def test_arguments_of_a_table_are_those_of_the_text():
    table = {"weight": [1, 2.5], "label_smoothing": 0.1, "full": True}
    found = parse_loss("x", table)
    assert str(found) == 'x:weight="1,2.5",label_smoothing=0.1,full=true'
    assert parse_loss(str(found)).arguments == found.arguments


@pytest.mark.parametrize(
    ("text", "table", "words"),
    [
        ("x:a=1", {"a": 2}, "twice"),
        ("x", {"a": {"b": 1}}, "a list of numbers"),
        ("x", {"a": ["b"]}, "a list of numbers"),
        ("x:a=", {}, "key=value"),
        ("x:a=1,a=2", {}, "twice"),
    ],
)
def test_losses_of_another_form(text, table, words):
    with pytest.raises(SpecError) as caught:
        parse_loss(text, table)
    assert words in str(caught.value) and str(caught.value).startswith("loss")


def test_a_run_file(tmp_path: Path):
    config = tmp_path / "run.toml"
    config.write_text(RUN + 'name = "loss.py:f:tau=2"\nkwargs = {weight = [1, 2]}')
    loss = resolve(config, {}).loss
    assert loss.stage.name == f"{tmp_path / 'loss.py'}:f"
    assert loss.stage.arguments == {"tau": "2", "weight": "1,2"}
    config.write_text(RUN + 'name = "loss.py"')
    with pytest.raises(SpecError, match=r"loss.name: found .*loss\.py"):
        resolve(config, {})
