"""Prints the table of mutants: each defect, and the guard that catches it."""

import warnings

import pytest

from tests.mutants import MUTANTS


def main() -> None:
    """Put each defect in, ask, and print a Markdown table of who told."""
    warnings.simplefilter("ignore")
    print("| where | mutant | defect | caught by |\n|---|---|---|---|")
    for mutant in MUTANTS.values():
        with pytest.MonkeyPatch.context() as patch:
            mutant.install(patch)
            found = mutant.scenario.caught_by()
        guard = found or ("only the tests" if mutant.test else "NOTHING")
        print(f"| {mutant.room} | {mutant.name} | {mutant.defect} | {guard} |", flush=True)


if __name__ == "__main__":
    main()
