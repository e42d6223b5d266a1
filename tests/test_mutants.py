"""Every defect is real, and the guard that is named for it tells; without one all is right."""

from functools import cache
from typing import Any

import pytest

from gradscope.errors import RefusedError
from tests.mutants import MUTANTS, Mutant, wrong
from tests.mutants.base import GUARDS, Numbers, Scenario
from tests.mutants.scenarios import Asked


@cache
def right(scenario: Scenario) -> Numbers:
    """Return the right numbers, having seen that the engine as it is gives them unhindered."""
    numbers = scenario.right()
    assert not wrong(scenario.numbers(), numbers)
    assert scenario.caught_by() is None
    return numbers


def by_guard(mutants: list[Mutant]) -> list[Any]:
    """Return the mutants as parameters, all marked `full` except the last of each guard."""
    quick = {mutant.guard: mutant for mutant in mutants}.values()
    return [
        pytest.param(m, id=m.name, marks=[] if m in quick else [pytest.mark.full]) for m in mutants
    ]


@pytest.mark.parametrize("mutant", by_guard([*MUTANTS.values()]))
def test_a_defect_is_caught(mutant: Mutant) -> None:
    numbers = right(mutant.scenario)
    with mutant.planted():
        assert wrong(mutant.scenario.numbers(), numbers), "the numbers are right all the same"
        assert mutant.scenario.caught_by() == (None if mutant.test else mutant.guard)


@pytest.mark.parametrize("mutant", by_guard([m for m in MUTANTS.values() if m.test]))
def test_what_no_guard_tells_the_tests_do(mutant: Mutant) -> None:
    assert mutant.test is not None
    mutant.test()
    with mutant.planted(), pytest.raises(AssertionError):
        mutant.test()


IN_HOOKS = [m for m in MUTANTS.values() if "/hooks/" in m.file and m.guard == "certificate"]


@pytest.mark.parametrize("mutant", by_guard(IN_HOOKS))
def test_auto_goes_on_to_another_backend(mutant: Mutant) -> None:
    assert isinstance(mutant.scenario, Asked)
    with mutant.planted():
        try:
            found = mutant.scenario.by_auto()
        except RefusedError:
            return
    first = {k: v for k, v in mutant.scenario.right().items() if k.startswith("0:")}
    assert not wrong(found, first)


def test_every_guard_catches_something() -> None:
    assert {mutant.guard for mutant in MUTANTS.values()} == set(GUARDS)
