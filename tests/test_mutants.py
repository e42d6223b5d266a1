"""Every defect is real, and the guard that is named for it tells; without one all is right."""

import pytest

from tests.mutants import MUTANTS, Mutant, wrong
from tests.mutants.base import Numbers, Scenario

_RIGHT: dict[Scenario, Numbers] = {}


def _right(scenario: Scenario) -> Numbers:
    """Return the right numbers, having seen that the engine as it is gives them unhindered."""
    if scenario not in _RIGHT:
        right = scenario.right()
        assert not wrong(scenario.numbers(), right)
        assert scenario.caught_by() is None
        _RIGHT[scenario] = right
    return _RIGHT[scenario]


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS.keys())
def test_a_defect_is_caught(mutant: Mutant) -> None:
    right = _right(mutant.scenario)
    with pytest.MonkeyPatch.context() as patch:
        mutant.install(patch)
        assert wrong(mutant.scenario.numbers(), right), "the numbers are right all the same"
    with pytest.MonkeyPatch.context() as patch:
        mutant.install(patch)
        assert mutant.scenario.caught_by() == mutant.guard
