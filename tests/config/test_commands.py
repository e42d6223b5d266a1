"""The options of the commands: each described once, and checked before anything is read."""

from inspect import signature, unwrap
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from gradscope.cli.app import app
from gradscope.config import options_of, run_options
from gradscope.config.commands import AttributeOptions, ExportOptions, Options
from gradscope.errors import SpecError

COMMANDS: Any = get_command(app).commands  # type: ignore[attr-defined]


def options_class(command: str) -> type[Options]:
    (own,) = signature(unwrap(COMMANDS[command].callback)).parameters.values()
    return own.annotation


def test_each_command_has_a_spec_of_its_own() -> None:
    assert len({options_class(name) for name in COMMANDS}) == len(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_line_takes_what_the_spec_says(name: str) -> None:
    """Every flag is an option's or a setting's of a run, and none belongs to two of them."""
    own = [*options_of(options_class(name))]
    run = [s for s in run_options() if name in s.commands]
    assert bool(run) == ("spec" in options_class(name).model_fields)
    parameters = [s.parameter for s in (*own, *run)]
    assert sorted(parameters) == sorted(p.name for p in COMMANDS[name].params)
    flags = [flag for s in (*own, *run) for flag in s.flags]
    assert len(set(flags)) == len(flags)
    hidden = [s.key for s in own if not s.help]
    assert hidden == (["more"] if name == "attribute" else [])


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_not_given_has_the_default_of_the_spec(name: str) -> None:
    for option in options_of(options_class(name)):
        parameter = next(p for p in COMMANDS[name].params if p.name == option.parameter)
        assert parameter.required == option.required
        if not isinstance(option.default, tuple):
            assert parameter.default == option.default or parameter.default is None


def test_all_wrong_options_are_listed_by_their_flags() -> None:
    sides = {"train": Path("a.h5"), "query": Path("b.h5"), "checkpoints": []}
    given = {"weights": "1,x", "memory": "lots", "damping": "much", "samples": "5:3"}
    with pytest.raises(SpecError) as caught:
        AttributeOptions.of({**sides, **given})
    assert caught.value.exit_code == 2
    text = str(caught.value)
    assert "4 settings are wrong" in text
    assert "--weights: found '1,x'. Accepted: numbers separated by commas." in text
    assert "--damping: found 'much'. Accepted: auto, or a number such as 0.1." in text
    assert "--memory: found 'lots'. Accepted: a size such as" in text
    assert "--samples: found '5:3'. Accepted: \"A:B\" with 0 ≤ A < B" in text


@pytest.mark.parametrize(
    ("weights", "expected"), [("1,2.5", (1.0, 2.5)), (" 1 , -2 ", (1.0, -2.0)), ("nan", None)]
)
def test_numbers_with_commas(weights: str, expected: tuple[float, ...] | None) -> None:
    given = {"train": Path("a.h5"), "query": Path("b.h5"), "weights": weights}
    if expected is None:
        with pytest.raises(SpecError):
            AttributeOptions.of(given)
    else:
        assert AttributeOptions.of(given).weights == expected


def test_one_wrong_option_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="--samples: found"):
        ExportOptions.of({"file": tmp_path, "output": tmp_path, "samples": "x"})
