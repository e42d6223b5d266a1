"""Every defect is real, and the guard that is named for it tells; without one all is right."""

import pytest

from gradscope.errors import RefusedError
from tests.mutants import MUTANTS, Mutant, wrong
from tests.mutants.base import GUARDS, Numbers, Scenario
from tests.mutants.scenarios import Asked

_RIGHT: dict[Scenario, Numbers] = {}


def right(scenario: Scenario) -> Numbers:
    """Return the right numbers, having seen that the engine as it is gives them unhindered."""
    if scenario not in _RIGHT:
        numbers = scenario.right()
        assert not wrong(scenario.numbers(), numbers)
        assert scenario.caught_by() is None
        _RIGHT[scenario] = numbers
    return _RIGHT[scenario]


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS.keys())
def test_a_defect_is_caught(mutant: Mutant) -> None:
    numbers = right(mutant.scenario)
    with pytest.MonkeyPatch.context() as patch:
        mutant.install(patch)
        assert wrong(mutant.scenario.numbers(), numbers), "the numbers are right all the same"
    with pytest.MonkeyPatch.context() as patch:
        mutant.install(patch)
        assert mutant.scenario.caught_by() == (None if mutant.test else mutant.guard)


@pytest.mark.parametrize("mutant", [m for m in MUTANTS.values() if m.test], ids=lambda m: m.name)
def test_what_no_guard_tells_the_tests_do(mutant: Mutant) -> None:
    assert mutant.test is not None
    mutant.test()
    with pytest.MonkeyPatch.context() as patch:
        mutant.install(patch)
        with pytest.raises(AssertionError):
            mutant.test()


HOOKS = [m for m in MUTANTS.values() if m.room.startswith("hooks") and m.guard == "certificate"]


@pytest.mark.parametrize("mutant", HOOKS, ids=lambda m: m.name)
def test_auto_goes_on_to_another_backend(mutant: Mutant) -> None:
    assert isinstance(mutant.scenario, Asked)
    with pytest.MonkeyPatch.context() as patch:
        mutant.install(patch)
        try:
            found = mutant.scenario.by_auto()
        except RefusedError:
            return
        assert not wrong(found, right_of_first(mutant.scenario))


def right_of_first(scenario: Asked) -> Numbers:
    return {name: value for name, value in scenario.right().items() if name.startswith("0:")}


def test_every_guard_catches_something() -> None:
    caught = {mutant.guard for mutant in MUTANTS.values()}
    assert caught == set(GUARDS)
